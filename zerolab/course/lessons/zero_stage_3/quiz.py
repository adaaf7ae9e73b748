"""Lesson 06's predictions."""

from collections.abc import Mapping

from zerolab.course.questions import Prediction

TRILLION = Prediction(
    {
        "that is stage 2, where parameters are whole": 2013.7,
        "that is the parameters alone; gradients and optimizer state are 14 bytes more": 1.953,
        "the fp32 master weights, m and v were forgotten": 3.906,
    },
    "GB",
)


def traffic(numels: Mapping[str, int]) -> Prediction:
    """The bytes that one fp32 step moves, for units of so many parameters each."""
    psi, root, block = sum(numels.values()), numels["root"], numels["blocks.0"]
    return Prediction(
        {
            "that is 3Ψ; but root is gathered once, so it is 3Ψ − Ψ_root": 12 * psi / 1e6,
            "that is stage 2's 2Ψ; the second gather, for backward, was forgotten": 8 * psi / 1e6,
            "the reduce-scatter of one layer was counted for all": 4 * (2 * psi - root + block) / 1e6,
            "the parameters were gathered after the update, too": 4 * (4 * psi - root) / 1e6,
        },
        "MB",
        tolerance=0.005,
    )


BLOCKS_AT_ONCE = Prediction(
    {"that is only the block that computes, as with prefetch=0": 1, "that is all of them, as at stage 2": 6},
    "blocks",
)

"""Lesson 06's predictions."""

from collections.abc import Mapping

from zerolab.course.questions import Prediction

TRILLION = Prediction(
    {
        "stage 2, where parameters are whole": 2013.7,
        "the parameters alone; gradients and optimizer state are 14 bytes more": 1.953,
        "the fp32 master weights, m and v were forgotten": 3.906,
    },
    "GB",
)


def traffic(numels: Mapping[str, int]) -> Prediction:
    """The bytes that one fp32 step moves, for units of so many parameters each."""
    psi, root, block = sum(numels.values()), numels["root"], numels["blocks.0"]
    return Prediction(
        {
            "root is gathered once, not twice: 3Ψ − Ψ_root": 12 * psi / 1e6,
            "stage 2's 2Ψ: backward's second gather is forgotten": 8 * psi / 1e6,
            "one layer's reduce-scatter counted for all": 4 * (2 * psi - root + block) / 1e6,
            "Ψ were gathered after the update as well, as in stages 1 and 2": 4 * (4 * psi - root) / 1e6,
        },
        "MB",
        tolerance=0.005,
    )


BLOCKS_AT_ONCE = Prediction(
    {"only the one that computes; that is prefetch=0": 1, "all of them, as at stage 2": 6}, "blocks"
)

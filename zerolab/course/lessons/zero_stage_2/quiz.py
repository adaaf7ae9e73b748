"""Lesson 05's predictions and its quiz."""

from collections.abc import Mapping

from zerolab.course.questions import Prediction, Quiz

STAGE_2 = Prediction(
    {
        "stage 1, where gradients are whole": 31.4,
        "the parameters were sharded as well, which is stage 3": 1.875,
        "all of the gradients were dropped; the summed 1/64 stays": 16.41,
    },
    "GB",
    tolerance=0.005,
)
BEHIND_A_VIEW = Prediction({"a view had a storage of its own": 1_000_000}, "bytes")


def gradient_peak(unit_bytes: Mapping[str, float]) -> Prediction:
    """The most gradients that one of four ranks holds, for units of so many bytes each."""
    block, root, whole = unit_bytes["blocks.0"], unit_bytes["root"], sum(unit_bytes.values())
    return Prediction(
        {
            "nothing was let go before the end of backward": whole / 1e6,
            "only the shards; but a unit is whole while its gradients come": whole / 4e6,
            "block 1 shrinks at once; but its reduction is still under way": (root + 2.75 * block) / 1e6,
        },
        "MB",
    )


TRAFFIC = Prediction(
    {
        "that is M = 1, or stage 1": 2,
        "the parameters' all-gather is forgotten": 4,
        "the parameters were gathered for every micro-batch; they change once a step": 8,
    },
    "Ψ",
)
NORM = Prediction(
    {
        "norms do not add up; their squares do": 7,
        "the largest shard's": 4,
        "rank 0's own: rank 1 would clip by another factor": 3,
        "their mean": 3.5,
    }
)
NEVER_COSTS_MORE = Quiz(
    "b",
    {
        "a": "they do at M = 1 only. Look at the left bars for M = 4.",
        "b": "a gradient that may not stay has to travel. With M micro-batches stage 2 moves (M+1)Ψ, or it "
        "gives back its memory under no_sync: 2Ψ of traffic or 1/N of the gradients, not both.",
        "c": "it is the sum of the messages that counts, and at M = 1 both stages move 2Ψ.",
    },
)

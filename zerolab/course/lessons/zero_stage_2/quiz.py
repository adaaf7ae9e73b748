"""Lesson 05's predictions and its quiz."""

from collections.abc import Mapping

from zerolab.course.questions import Prediction, Quiz

STAGE_2 = Prediction(
    {
        "that is stage 1, where gradients are whole": 31.4,
        "the parameters were sharded, too, which is stage 3": 1.875,
        "all gradients were freed; the summed 1/64 must stay": 16.41,
    },
    "GB",
    tolerance=0.005,
)
BEHIND_A_VIEW = Prediction({"a view has no storage of its own": 1_000_000}, "bytes")


def gradient_peak(unit_bytes: Mapping[str, float]) -> Prediction:
    """The most gradients that one of four ranks holds, for units of so many bytes each."""
    block, root, whole = unit_bytes["blocks.0"], unit_bytes["root"], sum(unit_bytes.values())
    return Prediction(
        {
            "nothing was freed before the end of backward": whole / 1e6,
            "that is only the shards; but a unit is whole while its gradients are computed": whole / 4e6,
            "block 1 was freed at once; but its reduction is still running": (root + 2.75 * block) / 1e6,
        },
        "MB",
    )


TRAFFIC = Prediction(
    {
        "that is M = 1, or stage 1 under no_sync()": 2,
        "the all-gather of the parameters was forgotten": 4,
        "the parameters were gathered for every micro-batch; they change once a step": 8,
    },
    "Ψ",
)
NORM = Prediction(
    {
        "norms do not add up; their squares do": 7,
        "that is the largest shard's": 4,
        "that is rank 0's own; rank 1 would clip by another factor": 3,
        "that is their mean": 3.5,
    }
)
NEVER_COSTS_MORE = Quiz(
    "b",
    {
        "a": "they do only at M = 1. Look at the left bars for M = 4.",
        "b": "a gradient that is not kept must be sent. With M micro-batches stage 2 moves (M+1)Ψ, or it "
        "keeps whole gradients under no_sync. It can have 2Ψ of traffic or 1/N of the gradients, not "
        "both.",
        "c": "it is the sum of the messages that counts, and at M = 1 both stages move 2Ψ.",
    },
)

"""Lesson 04's predictions."""

from zerolab.course.questions import Prediction

STAGE_1 = Prediction(
    {
        "only m and v were sharded, and each rank kept all fp32 master weights": 63,
        "as before, and in GiB instead of GB": 58.7,
        "the gradients were sharded too, which is stage 2": 26.25,
        "stage 0, where nothing is sharded": 112,
    },
    "GB",
)
TRAFFIC = Prediction(
    {
        "an all-reduce, then an all-gather: it works, and wastes a third": 3,
        "the reduce-scatter alone, and nobody learns the others' parameters": 1,
    },
    "Ψ",
)
REMAINS = Prediction(
    {
        "only the bf16 parameters; the gradients are whole at stage 1, too": 15,
        "with enough GPUs nothing remains: that will be stage 3": 0,
        "that is the optimizer's share, 12 bytes per parameter, and just this part shrinks": 90,
    },
    "GB",
)

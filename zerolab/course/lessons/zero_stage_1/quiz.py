"""Lesson 04's predictions."""

from zerolab.course.questions import Prediction

STAGE_1 = Prediction(
    {
        "only m and v were sharded, and each rank kept all fp32 master weights": 63,
        "only m and v were sharded, and the result is in GiB": 58.7,
        "the gradients were sharded too, which is stage 2": 26.25,
        "that is stage 0, where nothing is sharded": 112,
    },
    "GB",
)
TRAFFIC = Prediction(
    {
        "that is an all-reduce and then an all-gather, which sends a third for nothing": 3,
        "that is the reduce-scatter alone; no rank would get the others' parameters": 1,
    },
    "Ψ",
)
REMAINS = Prediction(
    {
        "that is only the bf16 parameters; the gradients are whole at stage 1, too": 15,
        "that is stage 3, where nothing stays on every GPU": 0,
        "that is the optimizer state, 12 bytes per parameter, the part that shrinks": 90,
    },
    "GB",
)

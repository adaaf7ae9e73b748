"""Lesson 03's predictions and its quiz."""

from zerolab.course.questions import Prediction, Quiz

FIRST_STEP = Prediction(
    {
        "plain SGD: lr × the mean gradient": 0.2,
        "the gradients were added, not averaged": 0.4,
        "the two updates, +0.1 and −0.1, were averaged": 0,
    }
)
MEAN_LOSS = Prediction(
    {"the mean of the two means: rank 1's tokens then count three times as much as rank 0's": 4}
)
LATENCY = Prediction(
    {
        "one all-reduce is not one message; around a ring of 64 it is 126 in a row": 5.8,
        "that is a reduce-scatter's latency; an all-reduce goes around twice": 365.4,
    },
    "ms",
)
HELD_BY_64_GPUS = Prediction(
    {"that is one rank's, and all 64 hold the same": 120, "only the bf16 weights": 15 * 64}, "GB"
)
IDENTICAL_WORK = Quiz(
    "c",
    {
        "a": "each rank runs its own micro-batch forward.",
        "b": "each rank's gradients come from its own micro-batch.",
        "c": "after the all-reduce every rank has the same gradients, the same m and v and the same "
        "weights: N times the same work, on N copies of the same state. That is where stage 1 begins.",
    },
)

"""Lesson 03's predictions and its quiz."""

from zerolab.course.questions import Prediction, Quiz

FIRST_STEP = Prediction(
    {
        "that is plain SGD: lr × the mean gradient": 0.2,
        "the gradients were added, not averaged": 0.4,
        "the two updates, +0.1 and −0.1, were averaged": 0,
    }
)
MEAN_LOSS = Prediction(
    {"that is the mean of the means, where a token of rank 1 counts three times as much as one of rank 0": 4}
)
LATENCY = Prediction(
    {
        "one all-reduce on a ring of 64 is 126 messages in a row, not one": 5.8,
        "that is the latency of reduce-scatters; an all-reduce goes around the ring twice": 365.4,
    },
    "ms",
)
HELD_BY_64_GPUS = Prediction(
    {"that is one rank, and all 64 hold the same": 120, "that is only the bf16 weights": 15 * 64}, "GB"
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

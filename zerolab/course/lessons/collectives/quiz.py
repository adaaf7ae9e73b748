"""Lesson 02's predictions and its quiz."""

from zerolab.course.questions import Prediction, Quiz

CHUNK_OF_RANK_3 = Prediction({"that is rank 3's own number, not the sum": 34, "that is rank 0's chunk": 64})
BYTES_OF_AN_ALL_REDUCE = Prediction(
    {
        "that is one half only, the reduce-scatter": 180,
        "that is the paper's 2Ψ, without the factor (N-1)/N": 480,
        "that is the whole tensor in each of N-1 rounds": 720,
    },
    "bytes",
)
ALL_REDUCE_INSIDE = Quiz(
    "c",
    {
        "a": "the values are the same, the messages are not.",
        "b": "it sends more, too: the second half of the all-reduce is not needed.",
        "c": "an all-reduce is a reduce-scatter and an all-gather, and the gathered chunks are not used. "
        "This really happens: torch's own reduce-scatter on gloo, its library for CPUs, works this "
        "way. So zerolab builds its own there.",
    },
)

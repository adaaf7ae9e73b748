"""Lesson 02's predictions and its quiz."""

from zerolab.course.questions import Prediction, Quiz

CHUNK_OF_RANK_3 = Prediction({"that is rank 3's own, not the sum": 34, "that is rank 0's chunk": 64})
BYTES_OF_AN_ALL_REDUCE = Prediction(
    {
        "one half only, the reduce-scatter": 180,
        "the paper's 2Ψ, which drops the factor (N-1)/N": 480,
        "the whole tensor in each of N-1 rounds": 720,
    },
    "bytes",
)
ALL_REDUCE_INSIDE = Quiz(
    "c",
    {
        "a": "the values are the same, the messages are not.",
        "b": "it takes more memory too, and the second half of the all-reduce is sent for nothing.",
        "c": "an all-reduce is a reduce-scatter and an all-gather, and the gathered chunks are thrown away. "
        "This is not made up: torch's own reduce-scatter on gloo, the CPU backend, works this way. So "
        "zerolab builds its own there.",
    },
)

"""Lesson 02's predictions and its quiz."""

from zerolab.course.questions import Prediction
from zerolab.course.quizzes import Choice, Quiz

CHUNK_OF_RANK_3 = Prediction(
    {"you gave rank 3's own number, not the sum": 34, "you gave rank 0's chunk": 64},
    why="4 + 14 + 24 + 34 = 76. Each rank began with four numbers. It ends with one, which is complete.",
)
BYTES_OF_AN_ALL_REDUCE = Prediction(
    {
        "you counted one half only, the reduce-scatter": 180,
        "you counted two whole tensors, and in each half a rank sends (N-1)/N of one": 480,
        "you sent the whole tensor in each of N-1 rounds": 720,
    },
    "bytes",
    why="2 halves × 3 rounds × chunks of 60 bytes.",
)
QUESTIONS = (
    Quiz(
        "A library has a function `reduce_scatter`. Inside, it does an all-reduce and keeps its own slice "
        "of the result. The values are right. What does that cost?",
        "c",
        {
            "a": Choice(
                "Nothing, as the result is the same.", "The values are the same, the messages are not."
            ),
            "b": Choice(
                "The same bytes, but more memory.",
                "It sends more, too: the second half of the all-reduce is not needed.",
            ),
            "c": Choice(
                "Twice the bytes.",
                "An all-reduce is a reduce-scatter and an all-gather, and the gathered chunks are not used. "
                "This really happens: torch's own reduce-scatter on gloo, its library for CPUs, works this "
                "way. So zerolab builds its own there.",
            ),
        },
    ),
    Quiz(
        "Eight ranks all-reduce a gradient of 1 GB on a ring. You take 64 ranks with the same links. How "
        "much does each rank send now?",
        "a",
        {
            "a": Choice(
                "Almost the same: 1.97 GB instead of 1.75 GB.",
                "2 × 63/64 instead of 2 × 7/8. It stays below 2 GB for any number of ranks.",
            ),
            "b": Choice(
                "Eight times as much.",
                "That is rank 0 in lesson 00. On a ring there are more rounds, and each chunk is smaller. "
                "The product stays almost the same.",
            ),
            "c": Choice(
                "An eighth, because a chunk is an eighth as large.",
                "Each chunk is smaller, but there are 126 rounds instead of 14.",
            ),
        },
    ),
    Quiz(
        "On a ring of 64 ranks one link has half the bandwidth of the others. How long does a large "
        "all-reduce take?",
        "b",
        {
            "a": Choice(
                "1/64 longer.",
                "The other ranks cannot go on: each of them waits for the chunk that comes over the slow "
                "link.",
            ),
            "b": Choice(
                "About twice as long.",
                "Every link carries one chunk in every round, and the round ends when the slowest link is "
                "done.",
            ),
            "c": Choice(
                "As long as before: chunks take another way.",
                "On a ring a rank sends to the next rank only. There is no other way.",
            ),
        },
    ),
    Quiz(
        "Somebody writes an all-reduce that cuts a gradient of 11 elements for 4 ranks into chunks of "
        "`11 // 4` elements, and trains with it. What happens?",
        "c",
        {
            "a": Choice(
                "An error: 11 is not divisible by 4.",
                "`//` rounds down without an error. Four chunks of 2 are a valid cut of the first 8 "
                "elements.",
            ),
            "b": Choice(
                "The last rank has more to do than the others.",
                "It would if it took the rest. With chunks of 2 nobody takes it.",
            ),
            "c": Choice(
                "Three parameters become different on every rank, and the loss still falls.",
                "4 × 2 = 8 elements are reduced. Of the other three each rank keeps its own gradient, and no "
                "error says so.",
            ),
        },
    ),
    Quiz(
        "64 ranks all-reduce a single number on a ring, once a step. Why does it take longer than one "
        "message between two ranks?",
        "a",
        {
            "a": Choice(
                "It is a sequence of 126 messages, each of them almost empty.",
                "A round can only begin when the round before has arrived: 63 rounds for each half. The "
                "start of a message takes time, however small it is.",
            ),
            "b": Choice(
                "64 times as many bytes go over each link.",
                "A rank sends two numbers at most. The bytes are not what takes the time.",
            ),
            "c": Choice(
                "It takes 64 additions.", "These are 63 additions of one number: far less than a message."
            ),
        },
    ),
)

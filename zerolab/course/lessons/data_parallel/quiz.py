"""Lesson 03's predictions and its quiz."""

from zerolab.course.questions import Prediction
from zerolab.course.quizzes import Choice, Quiz

FIRST_STEP = Prediction(
    {
        "you took plain SGD: lr × the mean gradient": 0.2,
        "you took plain SGD, and added the gradients": 0.4,
        "you averaged the two updates, +0.1 and −0.1": 0,
    },
    why="Adam divides by the size of the gradient, so its first step has the length `lr` for any gradient.",
)
MEAN_LOSS = Prediction(
    {
        "you took the mean of the means, where a token of rank 1 counts three times as much as rank 0's": 4
    },
    why="(30 × 2 + 10 × 6) / 40.",
)
LATENCY = Prediction(
    {
        "you took one message for each all-reduce, and on a ring of 64 it is 126 messages in a row": 5.8,
        "you took the latency of reduce-scatters, and an all-reduce goes around the ring twice": 365.4,
    },
    "ms",
    why="580 all-reduces × 126 messages × 10 µs. The latency alone takes three times as long as all the "
    "bytes.",
)
HELD_BY_64_GPUS = Prediction(
    {"you counted one rank, and all 64 hold the same": 120, "you counted the bf16 weights only": 15 * 64},
    "GB",
    why="64 × 120 GB.",
)
QUESTIONS = (
    Quiz(
        "The ranks see different data. Which part of the step do all of them compute identically, on "
        "identical "
        "inputs?",
        "c",
        {
            "a": Choice("The forward pass.", "Each rank runs its own micro-batch forward."),
            "b": Choice("The backward pass.", "Each rank's gradients come from its own micro-batch."),
            "c": Choice(
                "The optimizer's update.",
                "After the all-reduce every rank has the same gradients, the same m and v and the same "
                "weights: N "
                "times the same work, on N copies of the same state. That is where stage 1 begins.",
            ),
        },
    ),
    Quiz(
        "Rank 0 has 900 tokens and rank 1 has 100. Each computes its mean loss, and the gradients are "
        "averaged. What "
        "does the model learn?",
        "a",
        {
            "a": Choice(
                "A token of rank 1 counts nine times as much as one of rank 0.",
                "Each rank has half of the vote: 1/200 for a token of rank 1, and 1/1800 for one of rank 0.",
            ),
            "b": Choice(
                "All 1,000 tokens count the same.",
                "They would if each rank's loss were weighed by its tokens before the backward pass.",
            ),
            "c": Choice(
                "Rank 1 counts less, because it has less data.",
                "Its mean has the same weight as rank 0's mean. So each of its few tokens counts more.",
            ),
        },
    ),
    Quiz(
        "You put all gradients of a model into one bucket instead of buckets of 25 MB. What do you see?",
        "b",
        {
            "a": Choice(
                "Faster steps, because there is one message only.",
                "The latency is least. But the message can only start when backward is over, and nothing "
                "hides it.",
            ),
            "b": Choice(
                "After the backward pass the rank waits for the whole message.",
                "The bucket is complete with the last gradient. No computation is left to run beside the "
                "message.",
            ),
            "c": Choice(
                "Other gradients, because they are added in another order.",
                "Each element is still added over the ranks in rank order. Buckets decide when it is sent.",
            ),
        },
    ),
    Quiz(
        "You set `reduces_in_flight=0`, so the engine waits for each all-reduce at once. What changes?",
        "c",
        {
            "a": Choice(
                "The loss curve: gradients arrive one step later.",
                "No update is made before all gradients of the step are there, with overlap or without.",
            ),
            "b": Choice(
                "The bytes that are sent.",
                "The same gradients are reduced. They are sent at other times.",
            ),
            "c": Choice(
                "The time of a step. Losses and weights keep their bits.",
                "Network and processor take turns. Overlap changes when messages are sent, and nothing else.",
            ),
        },
    ),
    Quiz(
        "A colleague averages in a hook and has mixed up the two kinds. Her loss falls. How does she find "
        "the "
        "mistake?",
        "a",
        {
            "a": Choice(
                "She compares the weights of two ranks.",
                "The replicas differ. Neither hook raises an error, and the loss of each replica falls.",
            ),
            "b": Choice(
                "She waits: the loss will become NaN.",
                "Each rank trains on gradients of its own, which is a sound way to train one model of its "
                "own.",
            ),
            "c": Choice(
                "She looks for the error in the log of rank 1.",
                "No rank raises one: both hooks take any function of one tensor.",
            ),
        },
    ),
)

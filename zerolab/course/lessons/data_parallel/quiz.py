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
    {"you took the mean of the means, where a token of rank 1 counts three times as much as rank 0's": 4},
    why="(30 × 2 + 10 × 6) / 40.",
)
LATENCY = Prediction(
    {
        "you took one send for each all-reduce, and on a ring of 64 it is 126 sends in a row": 5.8,
        "you took the latency of reduce-scatters, and an all-reduce goes around the ring twice": 365.4,
    },
    "ms",
    why="580 all-reduces × 126 sends × 10 µs. The latency alone takes three times as long as all the bytes.",
)
HELD_BY_64_GPUS = Prediction(
    {"you counted one rank, and all 64 hold the same": 120, "you counted the bf16 weights only": 15 * 64},
    "GB",
    why="64 × 120 GB.",
)
QUESTIONS = (
    Quiz(
        "The ranks see different data. Which part of the step do all of them compute identically, on "
        "identical inputs?",
        "c",
        {
            "a": Choice("The forward pass.", "Each rank runs its own micro-batch forward."),
            "b": Choice("The backward pass.", "Each rank's gradients come from its own micro-batch."),
            "c": Choice(
                "The optimizer's update.",
                "After the all-reduce every rank has the same gradients, the same m and v and the same "
                "weights: N times the same work, on N copies of the same state. That is where stage 1 "
                "begins.",
            ),
        },
    ),
    Quiz(
        "Rank 0 has 900 tokens and rank 1 has 100. Each computes its mean loss, and the gradients are "
        "averaged. What does the model learn?",
        "a",
        {
            "a": Choice(
                "A token of rank 1 counts nine times as much as one of rank 0.",
                "Each rank's mean counts one half: 1/200 for a token of rank 1, 1/1800 for one of rank 0.",
            ),
            "b": Choice(
                "All 1,000 tokens count the same.",
                "They would if each rank's loss were weighted by its tokens before the backward pass.",
            ),
            "c": Choice(
                "Rank 1 counts less, because it has less data.",
                "Its mean has the same weight as rank 0's mean. So each of its few tokens counts more.",
            ),
        },
    ),
    Quiz(
        "64 GPUs send 3 GB of gradients in one bucket instead of buckets of 25 MB, with the links of this "
        "lesson. What do you see?",
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
                "Wrong gradients, because one message has gradients of several layers.",
                "Each element is added to the same element of the other ranks. Buckets decide when it is "
                "sent.",
            ),
        },
    ),
    Quiz(
        "Two ranks average their weights after each step of Adam, and never their gradients. What is lost?",
        "c",
        {
            "a": Choice(
                "Nothing: the weights are equal after each step.",
                "They are equal. But equal is not right: with Adam they are other weights than a single "
                "process gets.",
            ),
            "b": Choice(
                "Half of the data.",
                "Both ranks' data have an effect. What is lost is how large their gradients were.",
            ),
            "c": Choice(
                "How large each gradient was.",
                "Adam divides by the size of a gradient. A rank with a tiny gradient moves as far as one "
                "with a large gradient.",
            ),
        },
    ),
    Quiz(
        "One layer was used on rank 0 only, so its gradient on rank 1 is None. Rank 1 skips its all-reduce. "
        "What happens?",
        "a",
        {
            "a": Choice(
                "Rank 0 waits for ever, or its gradient is added to that of another layer.",
                "An all-reduce is a call that all ranks make together. Rank 1's next call is for another "
                "layer.",
            ),
            "b": Choice(
                "Rank 0 gets its own gradient back, as if rank 1 had sent zeros.",
                "Nobody sends those zeros. Rank 1 must put them there and take part.",
            ),
            "c": Choice(
                "Rank 0 keeps its gradient, and the replicas differ by that layer.",
                "That would follow if rank 0 skipped the call, too. Here it calls and waits.",
            ),
        },
    ),
)

"""Lesson 01's predictions and its quiz."""

from zerolab.course.questions import Prediction
from zerolab.course.quizzes import Choice, Quiz

BYTES_IN_FP32 = Prediction(
    {"you forgot m and v": 8, "you counted one of Adam's two numbers, m and v": 12},
    "bytes",
    why="4 + 4 + 8: the parameter, its gradient, and the two numbers that Adam keeps.",
)
BYTES_IN_MIXED_PRECISION = Prediction(
    {"you took everything to be 16 bits": 8, "you forgot the fp32 master weights": 12},
    "bytes",
    why="Weights and gradients in 16 bits save 4 bytes, and the master weights cost 4 bytes.",
)
STAGE_1 = Prediction(
    {
        "you sharded m and v and kept all master weights": 63.0,
        "you sharded m and v, kept all master weights, and gave the result in GiB": 58.7,
        "you divided everything by 8, which is stage 3": 14.0,
        "you sharded the gradients too, which is stage 2": 26.25,
        "you divided nothing": 112,
    },
    "GB",
    why="2 + 2 + 12/8 = 5.5 bytes for each of 7 billion parameters.",
)
ACTIVATIONS = Prediction(
    {
        "you counted one byte for each number, and it has two": 30.2,
        "you counted one tensor a layer, not 12": 5.03,
    },
    "GB",
    why="48 layers × 12 tensors × (32 × 1024 × 1600) numbers × 2 bytes.",
)
QUESTIONS = (
    Quiz(
        "A colleague plans to train 13B parameters on 16 GPUs of 32 GB at stage 2, and computes 2Ψ + 14Ψ/16 "
        "= 37.4 GB. “It will fit with SGD and momentum instead of Adam.” Will it?",
        "b",
        {
            "a": Choice(
                "Yes: K drops from 12 to 8.",
                "K does drop to 8 (the master copy and one moment), but 2Ψ + 10Ψ/16 is 34.1 GB, still above "
                "32.",
            ),
            "b": Choice(
                "No: 34.1 GB are still too much.",
                "K drops to 8, and 2Ψ + 10Ψ/16 is 26 + 8.1 GB. The 26 GB of parameters stay whole at stage "
                "2. Stage 3 shards them too, and from 22 GPUs on stage 2 would fit.",
            ),
            "c": Choice(
                "No: K stays the same.",
                "Momentum keeps one number where Adam keeps two, so K is 4 + 4 = 8. It still does not fit.",
            ),
        },
    ),
    Quiz(
        "A 7B model trains on one GPU of 141 GB. You turn stage 3 on and keep that one GPU. How many GB of "
        "model states does it hold now?",
        "a",
        {
            "a": Choice(
                "112 GB, as before.",
                "16Ψ/N with N = 1 is 16Ψ. ZeRO removes copies between ranks, and one rank has no copy to "
                "remove.",
            ),
            "b": Choice(
                "14 GB, only the weights in use.",
                "That is 2Ψ. The optimizer state must be somewhere, and there is no other rank to hold it.",
            ),
            "c": Choice(
                "28 GB, because the optimizer state is sharded away.",
                "That is 4Ψ. A shard of 1/1 is everything: the other 12Ψ stay on this GPU.",
            ),
        },
    ),
    Quiz(
        "A 7.5B model at stage 1 takes 31.4 GB on each of 64 GPUs. That is too much, so you rent 128. What "
        "does it take now?",
        "c",
        {
            "a": Choice(
                "15.7 GB, half of it.",
                "Only the optimizer state is divided by N. It was 1.4 of the 31.4 GB.",
            ),
            "b": Choice(
                "23.5 GB: a quarter of everything is gone.",
                "Only the optimizer state is divided by N. 1.4 of the 31.4 GB were left to halve.",
            ),
            "c": Choice(
                "30.7 GB.",
                "4Ψ = 30 GB are on every GPU for any N. The rest falls from 1.4 to 0.7 GB. Take another "
                "stage.",
            ),
        },
    ),
    Quiz(
        "At stage 3 on 1,024 GPUs the model states take 2 GB on each GPU. The forward pass still runs out "
        "of 32 GB. What helps?",
        "b",
        {
            "a": Choice(
                "2,048 GPUs, with the same batch on each.",
                "That saves 1 GB. What fills the GPU are activations, and no stage shards them.",
            ),
            "b": Choice(
                "A smaller batch on each GPU, or activation checkpointing.",
                "What grows in the forward pass are the activations. They depend on the samples of this "
                "rank.",
            ),
            "c": Choice(
                "SGD instead of Adam.",
                "That makes the optimizer state smaller. All model states together are 2 GB here.",
            ),
        },
    ),
    Quiz(
        "To save memory you train in plain fp32 instead of mixed precision, so you need no master weights. "
        "What happens to the memory?",
        "b",
        {
            "a": Choice(
                "The model states shrink by the 4 bytes of the master weights.",
                "Weight and gradient grow by 2 bytes each, and that takes the 4 bytes again: 4 + 4 + 8.",
            ),
            "b": Choice(
                "The model states stay at 16Ψ, and the activations double.",
                "2 + 2 + 12 becomes 4 + 4 + 8, and each number of an activation takes 4 bytes instead of 2.",
            ),
            "c": Choice(
                "Everything doubles.",
                "m and v were in fp32 before, and master weights are no longer needed. The activations "
                "double.",
            ),
        },
    ),
)

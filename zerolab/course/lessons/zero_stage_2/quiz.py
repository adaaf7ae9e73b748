"""Lesson 05's predictions and its quiz."""

from collections.abc import Mapping

from zerolab.course.questions import Prediction
from zerolab.course.quizzes import Choice, Quiz

STAGE_2 = Prediction(
    {
        "you kept the gradients whole, which is stage 1": 87.5,
        "you sharded the parameters, too, which is stage 3": 10,
        "you freed all gradients, and the summed 1/32 must stay": 47.5,
    },
    "GB",
    tolerance=0.005,
    why="(2 + 14/32) bytes × 20 billion.",
)
BEHIND_A_VIEW = Prediction(
    {"you gave the view a storage of its own": 1_000_000},
    "bytes",
    why="A view keeps its whole storage alive.",
)


def gradient_peak(unit_bytes: Mapping[str, float]) -> Prediction:
    """Return the most gradients that one of four ranks holds, for units of so many bytes each."""
    block, root, whole = unit_bytes["blocks.0"], unit_bytes["root"], sum(unit_bytes.values())
    return Prediction(
        {
            "you freed nothing before the end of backward": whole / 1e6,
            "you counted the shards only, and a unit is whole while its gradients are computed": whole / 4e6,
            "you freed block 1 at once, and its reduction is still running": (root + 2.75 * block) / 1e6,
        },
        "MB",
        tolerance=0.03,  # the sum of the units is right; small gradients that wait add 2 %
        why="Memory is fullest at the end of block 0. Block 0 is whole. `root` is whole, because it waits "
        "for the "
        "gradients of its embeddings. Block 1 is whole, because its reduction is still running. Of the "
        "other six "
        "blocks a quarter is left. The few bytes more are small gradients of block 0, which wait beside "
        "the buffer "
        "until several of them are copied in one call.",
    )


EQUAL_REPLICAS = Prediction(
    {
        "you took every hook to fit every function": 4,
        "you took one hook to work with one function only": 1,
        "you took three to work, and each hook fits one function alone": 3,
        "you took none to work": 0,
    },
    "combinations",
    why="Each hook fits one of the two functions.",
)
TRAFFIC = Prediction(
    {
        "you took M = 1, or stage 1 under `no_sync()`": 2,
        "you forgot the all-gather of the parameters": 4,
        "you gathered the parameters for every micro-batch, and they change once a step": 8,
    },
    "Ψ",
    why="Four reduce-scatters of Ψ, and one all-gather of Ψ.",
)
NORM = Prediction(
    {
        "you added the norms, and only their squares add up": 7,
        "you took the largest shard's": 4,
        "you took rank 0's own, and rank 1 would clip by another factor": 3,
        "you took their mean": 3.5,
    },
    why="The square root of 3² + 4².",
)
QUESTIONS = (
    Quiz(
        "“Stage 2 costs no more than stage 1.” You will often read this. Is it true for M > 1 "
        "micro-batches, if stage 1 runs under `no_sync`?",
        "b",
        {
            "a": Choice(
                "True: both move 2Ψ, and stage 2 holds less.",
                "Both move 2Ψ only at M = 1, or if stage 2 keeps whole gradients, too. Look at the left "
                "bars for M = 4.",
            ),
            "b": Choice(
                "False: it has 2Ψ of traffic or 1/N of the gradients, not both.",
                "A gradient that is not kept must be sent. With M micro-batches stage 1 moves 2Ψ under "
                "`no_sync`. Stage 2 moves (M+1)Ψ, or it keeps whole gradients under `no_sync`, as stage 1 "
                "does.",
            ),
            "c": Choice(
                "False: it always moves more, because it reduces unit by unit.",
                "It is the sum of the messages that counts, and at M = 1 both stages move 2Ψ.",
            ),
        },
    ),
    Quiz(
        "Your own stage 2 keeps `flat[mine]` after the reduce-scatter and deletes the name `flat`. What do "
        "you see?",
        "c",
        {
            "a": Choice(
                "Wrong gradients, because the buffer is reused.",
                "The values are right: the slice is part of a buffer that still exists.",
            ),
            "b": Choice(
                "An error: the buffer is gone.",
                "The buffer is not gone. The slice is a view, and a view keeps the storage alive.",
            ),
            "c": Choice(
                "Right gradients, and as much memory as at stage 1.",
                "A quarter is used and the whole stays. Copy the slice, then free the buffer.",
            ),
        },
    ),
    Quiz(
        "Each rank clips with the norm of its own shard instead of the norm of the whole gradient. What "
        "follows?",
        "a",
        {
            "a": Choice(
                "The update points into another direction.",
                "Each rank multiplies its part by another factor, so the parts no longer fit together.",
            ),
            "b": Choice(
                "The update is shorter, in the same direction.",
                "It would be if all ranks used one factor.",
            ),
            "c": Choice(
                "Nothing: each norm is at most the limit.",
                "Each shard's norm is. The whole gradient's norm can still be larger, and its direction has "
                "changed.",
            ),
        },
    ),
    Quiz(
        "Your own stage 2 reduces a block as soon as its gradients are there. In one step rank 0 skips "
        "block 3, and the others use it. What happens?",
        "b",
        {
            "a": Choice(
                "Rank 0 counts as zero for block 3, and all goes on.",
                "Somebody must send those zeros. zerolab does it: what never became ready is reduced in "
                "`step()`.",
            ),
            "b": Choice(
                "The others wait for rank 0, or add its block 2 to their block 3.",
                "Rank 0 never starts the reduction of block 3. Its next message is another block's, of the "
                "same size.",
            ),
            "c": Choice(
                "PyTorch raises an error, because the graphs differ.",
                "Each rank has a graph of its own, and no rank knows another one's.",
            ),
        },
    ),
    Quiz(
        "A model of 8 blocks trains at stage 2. You raise `reduces_in_flight` from 1 to 8. What does a rank "
        "hold at the peak?",
        "c",
        {
            "a": Choice(
                "Less: reductions finish earlier.",
                "They do not finish earlier. The engine only stops waiting for them, and buffers stay "
                "meanwhile.",
            ),
            "b": Choice(
                "The same, because each buffer is freed after its reduction.",
                "It is freed after its reduction, but nothing waits for that now.",
            ),
            "c": Choice(
                "Up to all gradients whole, as at stage 1.",
                "The engine frees a buffer after it has waited for the buffer's reduction. With 8 in flight "
                "it waits for all of them at the end of backward.",
            ),
        },
    ),
)

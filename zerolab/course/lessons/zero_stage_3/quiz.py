"""Lesson 06's predictions and its quiz."""

from collections.abc import Mapping

from zerolab.course.questions import Prediction
from zerolab.course.quizzes import Choice, Quiz

TRILLION = Prediction(
    {
        "you counted the parameters, and gradients and optimizer state are 14 bytes more": 25,
        "you forgot the fp32 master weights, m and v": 50,
        "you counted the optimizer state only": 150,
    },
    "GPUs",
    tolerance=0.005,
    why="16 bytes × 10¹² are 16,000 GB, and each GPU takes 80 of them.",
)


def traffic(numels: Mapping[str, int]) -> Prediction:
    """Return the bytes that one fp32 step moves, for units of so many parameters each."""
    psi, root, block = sum(numels.values()), numels["root"], numels["blocks.0"]
    return Prediction(
        {
            "you took 3Ψ, but root is gathered once, so it is 3Ψ − Ψ_root": 12 * psi / 1e6,
            "you took stage 2's 2Ψ and forgot the second gather, for backward": 8 * psi / 1e6,
            "you counted the reduce-scatter of one block alone": 4 * (2 * psi - root + block) / 1e6,
            "you gathered the parameters after the update, too": 4 * (4 * psi - root) / 1e6,
        },
        "MB",
        tolerance=0.005,
        why="3 × 6 × 49,984 and 2 × 34,944 numbers of 4 bytes.",
    )


BLOCKS_AT_ONCE = Prediction(
    {
        "you counted the block that computes, as with `prefetch=0`": 1,
        "you counted all of them, as at stage 2": 6,
    },
    "blocks",
    why="The block that computes, and the one that is gathered ahead.",
)
PATIENT_PEAK = Prediction(
    {
        "you left one block's parameters out, and its gradients are gone too": 78.4,
        "you left both blocks' parameters and gradients out, and one of each stays": 31.4,
        "you took the peak to stay": 94,
        "you took the model states alone, and the block at work is whole": 15.6,
    },
    "GB",
    tolerance=0.03,
    why="94 GB, and 2 × 15.7 GB less: one block is whole in place of two, and has gradients.",
)
QUESTIONS = (
    Quiz(
        "Your network is slow, and you accumulate over 8 micro-batches. The model fits at stage 2 and at "
        "stage 3. Which one do you take?",
        "b",
        {
            "a": Choice(
                "Stage 3: it moves at most 1.5 times as much, and it saves memory.",
                "1.5 holds for one micro-batch. With 8 of them stage 3 gathers 16 times and reduces 8 times.",
            ),
            "b": Choice(
                "Stage 2.",
                "It moves 9Ψ, and stage 3 up to 24Ψ. You do not need the memory that stage 3 saves.",
            ),
            "c": Choice(
                "Either: both wait for the network equally long.",
                "24Ψ take more than twice as long as 9Ψ.",
            ),
        },
    ),
    Quiz(
        "Rank 0 alone enters `with optimizer.full_params():` to look at the weights. The others go on "
        "training. What happens?",
        "c",
        {
            "a": Choice(
                "Rank 0 sees all weights.",
                "Rank 0 has 1/N of them. The rest can come from the other ranks only, and they do not send.",
            ),
            "b": Choice(
                "Rank 0 sees its own shard, and zeros in the rest.",
                "`full_params` gathers, and a gather needs all ranks. It does not return with a part.",
            ),
            "c": Choice(
                "It cannot succeed: every rank must enter it.",
                "It is a collective. If not all ranks call it, the ranks wait for each other or stop with "
                "an error.",
            ),
        },
    ),
    Quiz(
        "After forward, somebody frees a layer with `weight.data = torch.empty(0)`. The layer's input "
        "requires a gradient. How many bytes of the weight are free before backward?",
        "a",
        {
            "a": Choice(
                "None.",
                "Autograd holds the old storage for backward. The storage itself must be freed, for all "
                "views at once.",
            ),
            "b": Choice("All of them.", "The parameter is small now, but its old storage is still in use."),
            "c": Choice(
                "All of them, and backward raises an error.",
                "Backward does raise an error, because the gradient no longer has the shape of the "
                "parameter. But autograd still has the old storage, so no byte is free.",
            ),
        },
    ),
    Quiz(
        "A GPT of six blocks trains at stage 3 with `prefetch=5`. What did you gain over stage 2?",
        "b",
        {
            "a": Choice(
                "Less traffic, because blocks are gathered early.",
                "Each block is still gathered twice. Early or late, the bytes are the same.",
            ),
            "b": Choice(
                "Less memory between the steps, but not at the peak of the parameters, and more traffic.",
                "All six blocks are whole while the model computes, and 3Ψ − Ψ_root is more than 2Ψ.",
            ),
            "c": Choice(
                "Nothing changes but the bits of the result.",
                "The bits are what does not change. Memory and traffic do.",
            ),
        },
    ),
    Quiz(
        "One layer of a model has 40 % of all parameters. At stage 3 you go from 64 to 1,024 GPUs. What "
        "happens to the peak of a GPU?",
        "c",
        {
            "a": Choice(
                "It falls to a sixteenth.",
                "The model states do. While the large layer computes, it is whole on every GPU, for any N.",
            ),
            "b": Choice(
                "It rises, because more ranks take part in a gather.",
                "A gather fills the same buffer, from more and smaller shards.",
            ),
            "c": Choice(
                "It falls a little: that layer stays the largest part.",
                "The layer and its gradient are whole at one moment. Cut it into smaller units with "
                "`units=`.",
            ),
        },
    ),
)

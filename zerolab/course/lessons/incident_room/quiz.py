"""Lesson 09's predictions and its quiz."""

from zerolab.course.questions import Prediction
from zerolab.course.quizzes import Choice, Quiz

NORM = Prediction(
    {
        "you added the norms, and norms do not add": 43.06,
        "you took the mean of the norms, and each of them leaves out three quarters": 10.77,
        "you took the largest, and the other quarters count, too": 13.03,
        "you added the squares, and forgot the root": 477.9,
    },
    why="The norm is the root of the sum of all squares, so the squares of the quarters add up.",
)
KEPT_BYTES = 8 * 26
KEPT = Prediction(
    {
        "you took a whole gradient, and stage 2 keeps 1/N of it": 824,
        "you counted a shard for each micro-batch, and they are added up": 624,
        "you counted elements, and each has 8 bytes": 26,
        "you took the exact quarter, and a shard has whole elements": 206,
    },
    "bytes",
    tolerance=0.005,
)
MOVED = Prediction(
    {
        "you counted one micro-batch, and every micro-batch gathers and reduces": 3,
        "you forgot that backward gathers again": 8,
        "you counted one gather for all micro-batches, which this engine does not do": 5,
        "you took stage 0, 1 or 2 with one micro-batch": 2,
    },
    "Ψ",
)

QUESTIONS = (
    Quiz(
        "A new engine trains a model with AdamW, and its loss is the one of a single process to five "
        "digits. What may still be wrong?",
        "c",
        {
            "a": Choice(
                "Nothing.",
                "Equal losses show that the direction of the gradients is right. With AdamW they do not show "
                "that their size is.",
            ),
            "b": Choice(
                "Each rank may train on its own gradients only.",
                "Then the ranks differ from each other and from the single process, and so do their losses.",
            ),
            "c": Choice(
                "The gradient may be a sum where a mean is meant.",
                "Adam divides the gradient by its own size, so a factor of N changes almost nothing. It "
                "shows as soon as you clip, use SGD, or look at the norm.",
            ),
        },
    ),
    Quiz(
        "Tests run on 2 and on 4 ranks, with sizes 64, 128 and 256, and pass. Which of these faults can "
        "they see?",
        "b",
        {
            "a": Choice(
                "A lost remainder.",
                "All sizes are multiples of 2 and 4, so there is no remainder to lose.",
            ),
            "b": Choice(
                "A gather that is missing after the update.",
                "It shows at every size, as soon as parameters are compared over the ranks.",
            ),
            "c": Choice(
                "Padding that is counted in one place and not in the other.",
                "With these sizes nothing is padded. Take three ranks, or a size of 61.",
            ),
        },
    ),
    Quiz(
        "Ranks reduce two units of the same size in different orders, over a backend that does not compare "
        "them. What happens?",
        "d",
        {
            "a": Choice(
                "The job hangs.", "Every message finds a receiver of the right size, so nobody waits."
            ),
            "b": Choice(
                "A process is killed.", "Only if sizes differ: a message does not fit into its receiver."
            ),
            "c": Choice(
                "An error names the units.", "Messages have no names, if the engine gives them none."
            ),
            "d": Choice(
                "Gradients of one unit are added to those of the other.",
                "The messages fit, so nothing stops the job, and the sums are wrong. zerolab tags messages "
                "by unit and compares the order of collectives on all ranks for that reason.",
            ),
        },
    ),
    Quiz(
        "A job at stage 1 was saved on 8 ranks and is resumed on 4. Each rank loads the file of its own "
        "number, and `load` fills what is missing with zeros. What will you see first?",
        "a",
        {
            "a": Choice(
                "Losses that are a little off after the resume, and no error.",
                "The parameters are whole at stage 1, so the first loss is right. The momentum, or Adam's "
                "m and v, belongs to other parameters, and the updates are wrong for some time.",
            ),
            "b": Choice(
                "An error in the first step.",
                "Without the zeros the first step would raise one, because the sizes differ. With them the "
                "sizes fit. So an engine should compare sizes and refuse.",
            ),
            "c": Choice(
                "Other parameters on every rank.", "All ranks gather the same shards, so they agree."
            ),
        },
    ),
    Quiz(
        "A repair makes the values right, and a step moves 3Ψ now in place of 2Ψ. What do you say in the "
        "review?",
        "b",
        {
            "a": Choice(
                "Merge it: values are what counts.",
                "It sends 1.5 times the bytes in every step from now on, and no test of the values will ever "
                "notice.",
            ),
            "b": Choice(
                "Ask which collective is the third, and what it brings that was not there.",
                "Usually it is an all-reduce where a reduce-scatter is enough, or a gather of parameters "
                "that have not changed.",
            ),
            "c": Choice(
                "Refuse it: 3Ψ is stage 3.",
                "The number alone does not say which stage it is. Which collectives are there does.",
            ),
        },
    ),
)

"""Lesson 04's predictions and its quiz."""

from zerolab.course.questions import Prediction
from zerolab.course.quizzes import Choice, Quiz

STAGE_1 = Prediction(
    {
        "you sharded m and v and kept all master weights": 165,
        "you sharded m and v, kept all master weights, and gave the result in GiB": 153.7,
        "you sharded the gradients too, which is stage 2": 48.75,
        "you sharded everything, which is stage 3": 10,
        "you sharded nothing, which is stage 0": 320,
    },
    "GB",
    why="(2 + 2 + 12/32) bytes × 20 billion.",
)
UNTRAINED = Prediction(
    {
        "you took every tensor to have an owner, and 29 // 4 rounds down": 0,
        "you took all that one rank leaves out, and other ranks update most of it": 22,
        "you took the tensors of one rank": 7,
    },
    "tensors",
    why="29 // 4 is 7, and four ranks have 28 of them.",
)
TRAFFIC = Prediction(
    {
        "you took an all-reduce and then an all-gather, which sends a third for nothing": 3,
        "you took the reduce-scatter alone, and no rank would get the others' parameters": 1,
    },
    "Ψ",
    why="Ψ for the reduce-scatter of the gradients, and Ψ for the all-gather of the parameters.",
)
LARGEST = Prediction(
    {
        "you counted the bf16 parameters, and the gradients are whole at stage 1, too": 16,
        "you kept all 16 bytes of a parameter on every GPU, which is stage 0": 2,
        "you divided by the 12 bytes of the optimizer state, the part that shrinks": 2.67,
    },
    "billion parameters",
    why="4 bytes of each parameter stay on every GPU. 32 GB / 4 bytes is the limit.",
)
QUESTIONS = (
    Quiz(
        "A stage 1 forgets the all-gather after the update. What does each of four ranks have after one "
        "step?",
        "a",
        {
            "a": Choice(
                "New values in its own quarter of the parameters, old ones in the rest.",
                "Each rank updates its own shard only, so the four models are different after this step. "
                "In the next step each rank computes its gradients with another model.",
            ),
            "b": Choice(
                "The right parameters: the reduce-scatter has sent them.",
                "The reduce-scatter sends gradients. The update comes later.",
            ),
            "c": Choice(
                "Zeros in three quarters of the parameters.",
                "Nothing overwrites them: they keep the values from before the step.",
            ),
        },
    ),
    Quiz(
        "Another stage 1 does an all-reduce of the gradients, updates its shard, and gathers the "
        "parameters. A test looks at the weights only. What does it miss?",
        "b",
        {
            "a": Choice(
                "Nothing: right weights are all that counts.",
                "The point of stage 1 is to save memory at no cost. This one has a cost, and the test does "
                "not see it.",
            ),
            "b": Choice(
                "3Ψ of traffic instead of 2Ψ.",
                "Half of the all-reduce gathers gradients that this rank never uses. A test has to count "
                "bytes, too.",
            ),
            "c": Choice(
                "The optimizer state is not sharded.",
                "It is: the rank has m and v of its shard only. The messages are what is wrong.",
            ),
        },
    ),
    Quiz(
        "A model of 6B parameters takes 42 GB on each of 4 GPUs at stage 1. Your GPUs have 32 GB. What "
        "is the smallest number of them on which the model states fit?",
        "c",
        {
            "a": Choice(
                "6 of them: 4 × 42 / 6 is 28.",
                "Only the optimizer state is divided by N. On 6 GPUs it is 24 + 72/6 = 36 GB.",
            ),
            "b": Choice(
                "No number is enough.",
                "4Ψ = 24 GB stay on every GPU, and that is below 32. With enough GPUs the rest fits, too.",
            ),
            "c": Choice(
                "9 of them.",
                "24 + 72/N is 32 at N = 9. To train you need more than 9, because activations take "
                "memory, too.",
            ),
        },
    ),
    Quiz(
        "At stage 0 it was enough to save the optimizer state of rank 0. Somebody does the same at stage 1, "
        "on 4 ranks. What is in the file?",
        "b",
        {
            "a": Choice(
                "Everything: all ranks have the same state.",
                "They had the same state at stage 0. Now each of them has another quarter.",
            ),
            "b": Choice(
                "A quarter of m and v. The rest is lost.",
                "No other rank's quarter is in the file. `zerolab.save` is called on every rank and writes "
                "all of them.",
            ),
            "c": Choice(
                "All of m and v, but a quarter of the parameters.",
                "The parameters are whole at stage 1. The optimizer state is not.",
            ),
        },
    ),
    Quiz(
        "An optimizer divides each update by the norm of the whole weight matrix. A shard holds half of "
        "that matrix. What would stage 1 compute?",
        "a",
        {
            "a": Choice(
                "Another update: the norm of half a matrix is another number.",
                "Such an optimizer is not elementwise. zerolab tries the optimizer on a cut tensor first, "
                "finds that, and lets one rank update the whole matrix.",
            ),
            "b": Choice(
                "The same update, because the gradients are summed over the ranks.",
                "The summed gradient is right. The norm needs the other half of the weights, which is on "
                "another rank.",
            ),
            "c": Choice(
                "The same update, with one message more.",
                "A stock optimizer knows nothing of ranks. It sends no message, and takes the norm of what "
                "it has.",
            ),
        },
    ),
)

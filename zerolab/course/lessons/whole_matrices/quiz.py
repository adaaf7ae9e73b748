"""Lesson 10's predictions and its quiz."""

from zerolab.course.questions import Prediction
from zerolab.course.quizzes import Choice, Quiz

NORM_OF_HALVES = Prediction(
    {
        "you took one half by itself, and the squares of both count": 5.657,
        "you added the norms of the halves, and it is their squares that add up": 11.314,
        "you added the singular values, and not their squares": 64,
    },
    why="32 + 32 singular values of 1, and √64 = 8. The norm does not show that there was a cut.",
)
DISTANCE = Prediction(
    {
        "you took the difference that the losses have, and parameters can differ more": 1,
        "you took the cut for a small disturbance, and it changes the direction of every update": 10,
        "you took a third of the way, and every update has another direction": 30,
    },
    "percent",
    why="The loss differs less between the two runs than from one batch to the next. The parameters differ "
    "nearly as much as they have moved.",
)
BUSIEST = Prediction(
    {
        "you took the mean, and that needs a cut through a matrix": 14,
        "you gave both matrices of the MLP to one rank": 18,
        "you took the rank that works less": 12,
        "you put all of them on one rank": 28,
    },
    "h³",
    why="Of 7, 3, 9 and 9 the best two groups are 9 + 7 and 9 + 3.",
)
STAGE_1 = Prediction(
    {
        "you took Adam's K = 12, and Muon has no second moment": 87.5,
        "you left the master weights out, and they are fp32, too": 82.5,
        "you kept all masters and momenta on every GPU, which is stage 0": 240,
        "you sharded the gradients too, which is stage 2": 46.25,
        "you sharded everything, which is stage 3": 7.5,
    },
    "GB",
    why="(2 + 2 + 8/32) bytes × 20 billion: 4 bytes of master weight and 4 of momentum have an owner.",
)
QUESTIONS = (
    Quiz(
        "Stage 3 with Adam cuts a weight of 4,096 × 4,096 in the middle of row 1,000. Why is that right?",
        "b",
        {
            "a": Choice(
                "Because the ranks average their updates afterwards.",
                "Nothing is averaged after the update: each element has one owner.",
            ),
            "b": Choice(
                "Because Adam computes an element's update from that element's own history.",
                "Its gradient, m and v, and the number of steps. No other element counts.",
            ),
            "c": Choice(
                "Because rows are independent of each other in a linear layer.",
                "The cut is in the middle of a row, and for Adam no shape matters at all.",
            ),
        },
    ),
    Quiz(
        "An engine gives Muon the rows that a flat cut leaves on each rank. It runs, and the loss falls "
        "nearly as fast. What is wrong?",
        "c",
        {
            "a": Choice(
                "Nothing: the loss is what counts.",
                "The model depends on the number of GPUs then, and no single process has its numbers.",
            ),
            "b": Choice(
                "The updates are too small by the number of ranks.",
                "With the factor for tall matrices the parts together have about the norm of the whole.",
            ),
            "c": Choice(
                "With each number of ranks it trains a different model, and nothing says so.",
                "A resume on more GPUs would change the optimizer in the middle of a run.",
            ),
        },
    ),
    Quiz(
        "Every matrix has one owner. What does a rank send at stage 1?",
        "a",
        {
            "a": Choice(
                "As much as before, in the mean over the ranks: 2Ψ, and the owner of more sends more of it.",
                "Gradients go to their owner, new values from it. Equal shards are one case of that.",
            ),
            "b": Choice(
                "3Ψ: the whole matrix has to be gathered before the update.",
                "The gradients are reduced to the owner in the first place, so it has the whole matrix.",
            ),
            "c": Choice(
                "Nothing but the new values: gradients stay where they are.",
                "The update takes the sum over all ranks, so they have to be sent.",
            ),
        },
    ),
    Quiz(
        "A model has 48 matrices of equal size, and you train on 64 GPUs. How long does Muon's update take, "
        "compared with 48 GPUs?",
        "b",
        {
            "a": Choice(
                "Three quarters of it.",
                "For that a matrix would have to be updated by more than one rank.",
            ),
            "b": Choice(
                "As long: 16 GPUs own no matrix.",
                "The busiest rank has one matrix in both cases. Memory for states does not fall either.",
            ),
            "c": Choice(
                "Longer, because more ranks have to wait.",
                "They wait as before for the slowest, which has as much to do.",
            ),
        },
    ),
    Quiz(
        "Why are matrices balanced over the whole model and not over each block?",
        "a",
        {
            "a": Choice(
                "A block has few matrices, and they differ in size: with many ranks most would own none.",
                "Over all blocks there are enough to fill up every rank.",
            ),
            "b": Choice(
                "Because blocks are updated at different times.",
                "They are updated in one step. What counts is what a rank has to do in all.",
            ),
            "c": Choice(
                "Because a block's matrices must be on one rank.",
                "Each matrix is updated by itself. They may be anywhere.",
            ),
        },
    ),
)

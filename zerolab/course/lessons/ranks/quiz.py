"""Lesson 00's predictions and its quiz."""

from zerolab.course.questions import Prediction
from zerolab.course.quizzes import Choice, Quiz

SUM_OF_X = Prediction(
    {
        "you let the four ranks add to one shared tensor": 12,
        "you let the notebook see the copy of one rank": 3,
    },
    why="Each rank got a copy of `x` and changed its copy. The `x` of the notebook stayed as it was.",
)
RELAYED = Prediction(
    {"you doubled the number on rank 0 too": 27, "you doubled it and did not add the ranks": 8},
    why="0 receives nothing. Then 2 × 1 + 1 = 3, 2 × 3 + 2 = 8, 2 × 8 + 3 = 19.",
)
MB_THROUGH_RANK_0 = Prediction(
    {"you counted one direction only": 700, "you let rank 0 send to itself, too": 1600},
    "MB",
    why="Seven gradients come in, and seven means go out.",
)
QUESTIONS = (
    Quiz(
        "Four ranks train with averaged gradients, each on batches of 8. Which run of a single process is "
        "the same?",
        "b",
        {
            "a": Choice(
                "Batch size 8, since each rank has 8.",
                "The mean over four ranks is a mean over 4 × 8 samples.",
            ),
            "b": Choice(
                "Batch size 32.",
                "The mean of four mean gradients of 8 samples each is the mean gradient of all 32.",
            ),
            "c": Choice(
                "Batch size 8, at four times the learning rate.",
                "Four times the learning rate would go with the sum of four gradients of the same batch.",
            ),
        },
    ),
    Quiz(
        "Each of four ranks computes a loss. You want the four numbers in the notebook. How do you get them?",
        "c",
        {
            "a": Choice(
                "Each rank appends its loss to a list that the notebook passed to `launch`.",
                "Each rank appends to its own copy of the list. The notebook's list stays empty.",
            ),
            "b": Choice(
                "Each rank writes it into a global variable of the notebook.",
                "A rank is another process. It has variables of its own, and the notebook does not see them.",
            ),
            "c": Choice(
                "The function returns the loss, and you read the list that `launch` returns.",
                "Returned values are sent back to the notebook: entry 2 of the list comes from rank 2.",
            ),
        },
    ),
    Quiz(
        "A job on 8 ranks stands still. The report says that ranks 0 to 6 wait for other ranks, and that "
        "rank 7 reads a file. Where do you look first?",
        "a",
        {
            "a": Choice(
                "At what rank 7 does.",
                "Seven ranks wait in a call that rank 7 has not reached. The rank to blame is the one that "
                "is not waiting.",
            ),
            "b": Choice(
                "At the network between ranks 0 and 6.",
                "They all wait for a rank that has not arrived. A better network would not help them.",
            ),
            "c": Choice(
                "At rank 0, because it is the first.",
                "Rank 0 is not in charge. It waits like the others.",
            ),
        },
    ),
    Quiz(
        "Ranks 0 and 1 must swap two tensors, with `dist.send` and `dist.recv`. Which order never hangs?",
        "c",
        {
            "a": Choice(
                "Both send first, then both receive.",
                "Each send waits for a receive that comes one line later. You saw this hang above.",
            ),
            "b": Choice(
                "Both receive first, then both send.",
                "Each waits for a message that nobody has sent yet.",
            ),
            "c": Choice(
                "Rank 0 sends, then receives. Rank 1 receives, then sends.",
                "Whenever one rank sends, the other one receives.",
            ),
        },
    ),
    Quiz(
        "Two ranks average their gradients at every step, but in step 7 both forget it. From step 8 on they "
        "average again. What follows?",
        "b",
        {
            "a": Choice(
                "Nothing: the next average makes the models equal again.",
                "An average of gradients gives both ranks the same step. It does not make different weights "
                "equal.",
            ),
            "b": Choice(
                "The two models differ from step 7 on, and no error says so.",
                "Step 7 moved the two models apart. The same steps from different weights keep them apart.",
            ),
            "c": Choice(
                "The job hangs in step 7.",
                "It would hang if one rank averaged and the other did not. Here neither waits for anybody.",
            ),
        },
    ),
)

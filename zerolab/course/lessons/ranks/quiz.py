"""Lesson 00's predictions and its quiz."""

from zerolab.course.questions import Prediction, Quiz

SUM_OF_X = Prediction({"the four ranks added to one shared tensor": 12})
TOKEN = Prediction({"rank 0 doubled it, too": 27, "no rank added its number": 8})
MB_THROUGH_RANK_0 = Prediction(
    {"only one direction was counted": 700, "rank 0 sent to itself, too": 1600}, "MB"
)
SAME_RUN = Quiz(
    "b",
    {
        "a": "the mean over four ranks is a mean over 4 × 8 samples.",
        "b": "the mean of four mean gradients of 8 samples each is the mean gradient of all 32.",
        "c": "four times the learning rate would go with the sum of four gradients of the same batch.",
    },
)

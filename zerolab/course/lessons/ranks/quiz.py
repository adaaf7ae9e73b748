"""Lesson 00's predictions and its quiz."""

from zerolab.course.questions import Prediction, Quiz

SUM_OF_X = Prediction({"the four ranks had added to one shared tensor": 12})
TOKEN = Prediction({"rank 0 had doubled it as well": 27, "nobody had added its number": 8})
MB_THROUGH_RANK_0 = Prediction(
    {"only one direction was counted": 700, "rank 0 had sent to itself as well": 1600}, "MB"
)
SAME_RUN = Quiz(
    "b",
    {
        "a": "the mean over four ranks is taken over 4 × 8 samples.",
        "b": "the mean of four mean gradients of 8 samples each is the mean gradient of all 32.",
        "c": "that would be a sum of four gradients, if the four batches were one and the same.",
    },
)

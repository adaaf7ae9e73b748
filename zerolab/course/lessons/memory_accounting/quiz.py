"""Lesson 01's predictions and its quiz."""

from zerolab.course.questions import Prediction, Quiz

BYTES_IN_FP32 = Prediction(
    {"m and v were forgotten": 8, "only one of Adam's two numbers, m and v, was counted": 12}, "bytes"
)
BYTES_IN_MIXED_PRECISION = Prediction(
    {"everything was taken to be 16 bits": 8, "the fp32 master weights were forgotten": 12}, "bytes"
)
STAGE_1 = Prediction(
    {
        "only m and v were sharded; the fp32 master weights are optimizer state too": 63.0,
        "only m and v were sharded, and the result is in GiB": 58.7,
        "everything was divided by 8, which is stage 3": 14.0,
    },
    "GB",
)
ACTIVATIONS = Prediction(
    {"each number has two bytes, not one": 30.2, "a layer keeps 12 tensors, not one": 5.03}, "GB"
)
MOMENTUM_INSTEAD = Quiz(
    "b",
    {
        "a": "K does drop to 8 (the master copy and one moment), but 2Ψ + 10Ψ/16 is 34.1 GB, still above 32.",
        "b": "the parameters alone are 2Ψ = 26 GB on every GPU; with K = 8 the sum is 34.1 GB. Stage 3 "
        "shards them too.",
        "c": "momentum keeps one number where Adam keeps two, so K is 4 + 4 = 8. It still does not fit.",
    },
)

"""The lessons' quizzes: the right letter, and a reason for every letter.

They are kept here and not in the notebooks, where whoever reads a question would read its answer, too.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Reasons(NamedTuple):
    """Which letter is right, and why each of them is or isn't."""

    right: str
    because: Mapping[str, str]


QUIZZES = {
    "same_run": Reasons(
        "b",
        {
            "a": "the mean over four ranks is taken over 4 × 8 samples.",
            "b": "the mean of four mean gradients of 8 samples each is the mean gradient of all 32.",
            "c": "that would be a sum of four gradients, if the four batches were one and the same.",
        },
    ),
    "momentum_instead": Reasons(
        "b",
        {
            "a": "K does drop to 8 (the master copy and one moment), but 2Ψ + 10Ψ/16 is 34.1 GB, still above "
            "32.",
            "b": "the parameters alone are 2Ψ = 26 GB on every GPU; with K = 8 the sum is 34.1 GB. Stage 3 "
            "shards them too.",
            "c": "momentum keeps one number where Adam keeps two, so K is 4 + 4 = 8. It still does not fit.",
        },
    ),
    "all_reduce_inside": Reasons(
        "c",
        {
            "a": "the values are the same, the messages are not.",
            "b": "it takes more memory too, and the second half of the all-reduce is sent for nothing.",
            "c": "an all-reduce is a reduce-scatter and an all-gather, and the gathered chunks are thrown "
            "away. This is not made up: torch's own reduce-scatter on gloo, the CPU backend, works this way. "
            "So zerolab builds its own there.",
        },
    ),
    "identical_work": Reasons(
        "c",
        {
            "a": "each rank runs its own micro-batch forward.",
            "b": "each rank's gradients come from its own micro-batch.",
            "c": "after the all-reduce every rank has the same gradients, the same m and v and the same "
            "weights: N times the same work, on N copies of the same state. That is where stage 1 begins.",
        },
    ),
    "never_costs_more": Reasons(
        "b",
        {
            "a": "they do at M = 1 only. Look at the left bars for M = 4.",
            "b": "a gradient that may not stay has to travel. With M micro-batches stage 2 moves (M+1)Ψ, or "
            "it gives back its memory under no_sync: 2Ψ of traffic or 1/N of the gradients, not both.",
            "c": "it is the sum of the messages that counts, and at M = 1 both stages move 2Ψ.",
        },
    ),
}

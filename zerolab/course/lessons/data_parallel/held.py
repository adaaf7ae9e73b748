"""Lesson 03's buckets: the target for memory, no more than two buckets at once."""

import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from zerolab.course.attempts import Attempt
from zerolab.course.lessons.data_parallel.filled import Case, buckets, bytes_of
from zerolab.course.lessons.data_parallel.messages import in_flight
from zerolab.course.messages import Message
from zerolab.course.peak import Peak

SETTLES, SETTLE_SECONDS = 10, 0.01


def allowed(case: Case) -> int:
    """The bytes of two buckets, and of one gradient that is on its way from one of them."""
    return 2 * max(bytes_of(case, buckets(case))) + max(case.nbytes) + 64


class Settled(Peak):
    """The same, without tensors that only a collective's own thread still has, which lets go of them soon.

    It looks again where the peak is set above `enough`. A dispatch of its own would hide the reader's line
    from what records the calls.
    """

    def __init__(self, given: Iterable[torch.Tensor], enough: int):
        self._most, self._enough = 0, enough
        super().__init__(given)

    @property
    def nbytes(self) -> int:
        """The most bytes at once."""
        return self._most

    @nbytes.setter
    def nbytes(self, value: int) -> None:
        for _ in range(SETTLES if value > max(self._most, self._enough) else 0):
            time.sleep(SETTLE_SECONDS)
            self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
            value = max(self._most, sum(self._alive.values()))
        self._most = value


def held_too_much(held: Mapping[Case, Sequence[int]], outcomes: Mapping[Case, Attempt]) -> str | None:
    """Whether a rank held more at once than is allowed."""
    for case, by_rank in held.items():
        for rank, nbytes in enumerate(by_rank):
            if nbytes > allowed(case):
                said = (
                    f"with buckets of {case.bucket_bytes} bytes, rank {rank} holds {nbytes} bytes at once "
                    "beside the gradients"
                )
                if nbytes >= case.bucket_bytes > sum(case.nbytes):
                    return (
                        f"{said}, and all gradients have {sum(case.nbytes)}: give a bucket the size of the "
                        "gradients in it, and not bucket_bytes"
                    )
                whole = ", as much as all gradients have," if nbytes >= sum(case.nbytes) else ","
                two = 2 * max(bytes_of(case, buckets(case)))
                return (
                    f"{said}{whole} and two of its largest messages are {two}: "
                    f"{_why(outcomes[case].messages[rank])}"
                )
    return None


def _why(messages: Sequence[Message]) -> str:
    """What the messages tell of it."""
    if (many := in_flight(messages)) > 2:
        return (
            f"{many} messages were started before the first of them was waited for. Wait for a message "
            "before you start the next but one, and keep none of them for later"
        )
    return "divide in place, and keep no bucket, and no copy of the gradients, for later"

"""Many answers in one launch: a check sees of each what it would see of it alone, in a tenth of the time."""

import sys
import warnings
from collections.abc import Callable, Sequence
from unittest import mock

import torch.distributed as dist

import zerolab
from zerolab.course.attempts import Attempt, attempt
from zerolab.course.wire import Wire

SECONDS = 60  # far more than all answers of a check take together on a busy machine
_ALONE: list[Callable] = []


def alone(answer: Callable) -> Callable:
    """Mark an answer that hangs, ends a process or leaves a message unread in some case."""
    _ALONE.append(answer)
    return answer


class Together:
    """Stands in for `attempt`: the first answer that asks for a case has all answers run in its launch."""

    def __init__(self, answers: Sequence[Callable]):
        self.answers = [answer for answer in answers if answer not in _ALONE]
        self.seen: dict[tuple, list[list] | None] = {}

    def __call__(self, harness: Callable, inputs: Sequence[tuple]) -> Attempt:
        if inputs[0][0] not in self.answers:
            return attempt(harness, inputs)
        tails = [own[1:] for own in inputs]
        case = (harness, repr(tails))
        if case not in self.seen:
            self.seen[case] = self.launched(harness, tails)
        index = self.answers.index(inputs[0][0])
        by_rank = [None if own is None else own[index] for own in self.seen[case] or [None]]
        if None in by_rank:  # it raises, or one of the answers hangs or dies: each by itself
            return attempt(harness, inputs)
        values, calls, waits = zip(*by_rank, strict=True)
        return Attempt(list(values), list(calls), waits=list(waits))

    def launched(self, harness: Callable, tails: list[tuple]) -> list[list] | None:
        try:
            return zerolab.launch(_observe_all, len(tails), harness, self.answers, tails, timeout=SECONDS)
        except (zerolab.WorkerError, zerolab.LaunchTimeout) as error:
            warnings.warn(f"an answer hangs or dies beside others; mark it `alone`: {error}", stacklevel=2)
            return None


def _observe_all(harness: Callable, answers: list[Callable], tails: list[tuple]) -> list:
    """In the worker: what each answer returned and sent, or None if it raised."""
    seen = []
    for answer in answers:
        try:
            with Wire() as wire:
                seen.append((harness(answer, *tails[dist.get_rank()]), wire.calls, wire.waits))
        except Exception:
            seen.append(None)
        dist.barrier()
    return seen


def together(check: Callable, answers: Sequence[Callable]) -> Callable[[Callable], str | None]:
    """The diagnosis of `check`, with shared launches for those of `answers` that are not `alone`."""
    shared = Together(answers)

    def diagnose(answer: Callable) -> str | None:
        with mock.patch.object(sys.modules[check.__module__], "attempt", shared):
            return check.diagnose(answer)

    return diagnose

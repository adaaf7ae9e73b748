"""Run steps that succeed on all ranks or on none."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from zerolab.collectives import Comm

Answer = TypeVar("Answer")


def from_rank_0(comm: Comm, action: Callable[[], Answer]) -> Answer:
    """Run ``action`` on rank 0 only, and return its result, or raise its error, on every rank.

    If only rank 0 raised, the others would wait for it. A launcher reads in ``raised_on`` whose error it is.
    An error that other ranks cannot rebuild is a RuntimeError with its class and its words there.
    Comm: the answer, pickled.
    """
    message: list[Any] = [None, None]
    cause = None
    if comm.rank == 0:
        try:
            message[0] = action()
        except Exception as error:
            cause, message[1] = error, _as_it_is_sent(error)
    dist.broadcast_object_list(message, group=comm.control.group, group_src=0)
    answer, failure = message
    if failure is not None:
        failure.raised_on = dist.get_global_rank(comm.control.group, 0)
        raise failure from (None if failure is cause else cause)
    return answer


def _as_it_is_sent(error: Exception) -> Exception:
    """The error itself, if pickle makes the same of it again: else its words."""
    try:
        rebuilt = pickle.loads(pickle.dumps(error))
    except Exception:
        rebuilt = None
    if type(rebuilt) is type(error) and str(rebuilt) == str(error):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def on_every_rank(comm: Comm, failed: str, action: Callable[[], Answer]) -> Answer:
    """Run ``action`` on every rank, and return its result after it has returned on all of them.

    Raises: OSError on every rank if it failed on any: the error of the lowest such rank, its ``raised_on``.
    """
    answer: Any = None
    cause: Exception | None = None
    try:
        answer = action()
    except Exception as error:
        cause = error
    errors = gather(comm, cause and f"{type(cause).__name__}: {cause}")
    for rank, failure in enumerate(errors):
        if failure is not None:
            told: Any = OSError(f"{failed}: rank {rank} failed with {failure}")
            told.raised_on = dist.get_global_rank(comm.control.group, rank)
            raise told from cause
    return answer


def gather(comm: Comm, value: Answer) -> list[Answer]:
    """Return every rank's ``value``, in rank order, on every rank. Comm: the values, pickled."""
    values = [value] * comm.world_size
    dist.all_gather_object(values, value, group=comm.control.group)
    return values

"""Let a handle of a message go of its tensor when it has been waited for.

torch's own handle keeps the tensor as long as a name is bound to it. A reader who writes
``work = dist.isend(...)`` in a loop has not chosen to keep the last round's chunk.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d


class Handle:
    """Stands for a handle of torch's until it has been waited for."""

    def __init__(self, work: Any):
        self._work = work

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        work, self._work = self._work, None
        return work.wait(*args, **kwargs) if work is not None else True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextlib.contextmanager
def handles_that_let_go() -> Iterator[None]:
    """Let isend, irecv and batch_isend_irecv return such handles inside."""
    with contextlib.ExitStack() as stack:
        for name in ("isend", "irecv"):
            starting = _letting_go(getattr(distributed_c10d, name))
            for module in (dist, distributed_c10d):
                stack.enter_context(mock.patch.object(module, name, starting))
        yield


def _letting_go(start: Callable) -> Callable:
    def started(*args: Any, **kwargs: Any) -> Any:
        work = start(*args, **kwargs)
        return work if work is None else Handle(work)

    return started

"""The collectives as the backend has them, for NCCL and for the fake process group of a rehearsal."""

from collections.abc import Callable
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from zerolab.collectives.base import Comm, Subject, Work
from zerolab.collectives.names import all_gather_single, reduce_scatter_single
from zerolab.trace import Event


@final
class NativeComm(Comm):
    """The backend's own collectives, asynchronous on its own stream and ordered against the current one.

    What is handed over is counted as a ring sends it, (N-1)/N of it a pass. The order of the sum is the
    library's, so bits may differ from gloo's.
    """

    @property
    def device(self) -> torch.device:
        """This rank's GPU; in a rehearsal the meta device, where nothing has memory."""
        backend = dist.get_backend(self.group)
        return (
            torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("meta")
        )

    def reduce_scatter(self, flat: torch.Tensor, unit: Subject, op: ReduceOp = ReduceOp.SUM) -> Work:
        """The native reduce-scatter, in place: the output is this rank's own slice of the input."""
        own = self.own(flat)
        work = self._call("reduce_scatter", flat, unit, 1, partial(reduce_scatter_single, own, flat))
        return work.then(partial(self._divide, own, op))

    def all_gather(self, flat: torch.Tensor, unit: Subject) -> Work:
        """The native all-gather, in place: the input is this rank's own slice of the output."""
        start = partial(all_gather_single, flat, self.own(flat))
        return self._call("all_gather", flat, unit, 1, start)

    def all_reduce(self, flat: torch.Tensor, unit: Subject, op: ReduceOp = ReduceOp.SUM) -> Work:
        """The native all-reduce."""
        work = self._call("all_reduce", flat, unit, 2, partial(dist.all_reduce, flat))
        return work.then(partial(self._divide, flat, op))

    def check_same_collective(self, what: str) -> None:
        """Nothing: native collectives match by their order, and the CPU runs ahead of them to the step's own
        message, which carries a digest of what was issued.
        """

    def _exchange_rows(self, rows: torch.Tensor, event: Event) -> None:
        all_gather_single(rows.view(-1), rows[self.rank].clone().view(-1), group=self.control)

    def _call(self, op: str, flat: torch.Tensor, unit: Subject, passes: int, start: Callable) -> Work:
        """Start a native collective and count it. With one rank, or without elements, none is started."""
        event = self._begin(op, flat, unit, passes)
        waits = []
        if self.world_size > 1 and flat.numel():
            event.wire_bytes = passes * flat.nbytes * (self.world_size - 1) // self.world_size
            waits = [start(group=self.group, async_op=True).wait]
        return Work(waits).then(partial(self.trace.finish, event))

    def _divide(self, summed: torch.Tensor, op: ReduceOp) -> None:
        """Make the mean of the native sum, where it is asked for. A 16-bit sum was rounded once already.

        The native AVG is not used: it has had silent errors at N = 1.
        """
        if op == ReduceOp.AVG:
            summed /= self.world_size

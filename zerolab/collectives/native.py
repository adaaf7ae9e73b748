"""The backend's own collectives, for NCCL and for the fake process group of a rehearsal."""

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from zerolab.collectives.base import Comm, Op, Subject, Work
from zerolab.collectives.direct import reduce_in_rank_order
from zerolab.collectives.names import all_gather_single, reduce_scatter_single
from zerolab.device_times import DeviceTimes
from zerolab.trace import Event


@final
class NativeComm(Comm):
    """The backend's own collectives, asynchronous on its own stream and ordered against the current one.

    What is handed over is counted as a ring sends it, (N-1)/N of it a pass. The order of the sum is the
    library's, so bits may differ from gloo's. After ``torch.use_deterministic_algorithms(True)`` shards are
    exchanged and added up in rank order instead, in as many bytes.

    Each collective is announced when it is issued and compared before its result is used, by the CPUs. Where
    ranks have issued different ones, `Work.wait` raises an error before it makes the device wait.

    In bf16 the mean is the library's own, which may round more than once.

    ``bucket_bytes`` changes nothing here: the engine allocates no scratch for a native reduction, and the
    library's own buffers do not grow with the tensor. Those of deterministic algorithms do, so it is refused.
    """

    def __init__(self, *args: Any, **keywords: Any):
        super().__init__(*args, **keywords)
        self._adds_in_rank_order()

    def _adds_in_rank_order(self) -> bool:
        """Return whether algorithms are deterministic. Raises: ValueError where there is a bucket then."""
        chosen = torch.are_deterministic_algorithms_enabled()
        if chosen and self.bucket_bytes is not None:
            raise ValueError(
                f"bucket_bytes is {self.bucket_bytes}, and with deterministic algorithms a reduction of this "
                "backend takes scratch as large as a unit: leave out bucket_bytes, or call "
                "torch.use_deterministic_algorithms(False)"
            )
        return chosen

    def reduce_scatter(self, flat: torch.Tensor, unit: Subject, op: Op = ReduceOp.SUM) -> Work:
        """The native reduce-scatter, in place: the output is this rank's own slice of the input.

        Memory: none; N shards of scratch with deterministic algorithms.
        """
        event, own = self._begin("reduce_scatter", flat, unit, passes=1), self.own(flat, cuts=unit.cuts)
        if self._adds_in_rank_order():
            work = self._exchange_and_add(event, flat, unit, op)
        elif unit.cuts is None:
            work = self._reduce(event, flat, own, op, partial(reduce_scatter_single, own, flat))
        else:
            parts = list(self.parts(flat, unit))
            work = self._reduce(event, flat, own, op, partial(dist.reduce_scatter, own, parts))
        return work.then(partial(self.trace.finish, event))

    def all_gather(self, flat: torch.Tensor, unit: Subject) -> Work:
        """The native all-gather, in place: the input is this rank's own slice of the output."""
        event = self._begin("all_gather", flat, unit, passes=1)
        return self._gather(event, flat, unit).then(partial(self.trace.finish, event))

    def all_reduce(self, flat: torch.Tensor, unit: Subject, op: Op = ReduceOp.SUM) -> Work:
        """The native all-reduce; with deterministic algorithms its two halves in turn."""
        event = self._begin("all_reduce", flat, unit, passes=2)
        if self._adds_in_rank_order():
            halves = self._exchange_and_add(event, flat, unit, op)
            work = halves.then(partial(self._gather, event, flat, unit))
        else:
            work = self._reduce(event, flat, flat, op, partial(dist.all_reduce, flat), passes=2)
        return work.then(partial(self.trace.finish, event))

    def _gather(self, event: Event, flat: torch.Tensor, unit: Subject) -> Work:
        if unit.cuts is None:
            return self._issue(event, flat, partial(all_gather_single, flat, self.own(flat)))
        parts = list(self.parts(flat, unit))
        return self._issue(event, flat, partial(dist.all_gather, parts, parts[self.rank]))

    def _reduce(
        self,
        event: Event,
        flat: torch.Tensor,
        result: torch.Tensor,
        op: Op,
        native: Callable,
        passes: int = 1,
    ) -> Work:
        """Call a native reduction of ``flat``, and divide so that ``result`` is what ``op`` asks for."""
        before, native_op, after = _divisors(flat.dtype, op, self.world_size)
        if before > 1:
            flat /= before
        work = self._issue(event, flat, partial(native, op=native_op), passes)
        return work.then(partial(_divide, result, after))

    def _exchange_and_add(self, event: Event, flat: torch.Tensor, unit: Subject, op: Op) -> Work:
        """Every rank's part of this rank's shard, added up in rank order as on gloo."""
        own = self.own(flat, cuts=unit.cuts)
        rows = flat.new_empty((self.world_size, own.numel()))
        exchange = partial(dist.all_to_all_single, rows.view(-1), flat)
        if unit.cuts is not None:
            received, sent = [own.numel()] * self.world_size, [p.numel() for p in self.parts(flat, unit)]
            exchange = partial(exchange, output_split_sizes=received, input_split_sizes=sent)
        work = self._issue(event, flat, exchange)
        self.meter.report(work, rows)
        scratch = [rows]  # a list, so that `_add` can free what is in it
        return work.then(partial(self._add, work, scratch, own, op))

    def _add(self, work: Work, scratch: list[torch.Tensor], own: torch.Tensor, op: Op) -> None:
        if self.world_size > 1:
            rows = list(scratch.pop())
            del rows[self.rank]  # it is what ``own`` holds
            reduce_in_rank_order(own, rows, self.rank, op)
        self.meter.report(work)

    def _issue(self, event: Event, flat: torch.Tensor, start: Callable, passes: int = 1) -> Work:
        """Start a native collective and count it. With one rank, or without elements, none is started.

        The check is waited for first, because it can raise an error, and the native work cannot.
        """
        if self.world_size == 1 or not flat.numel():
            return Work()
        event.wire_bytes += passes * flat.nbytes * (self.world_size - 1) // self.world_size
        event.control_bytes += self.control.check_bytes
        check = self.control.submit(f"{event.op} of {event.unit}")
        native = start(group=self.group, async_op=True)
        return Work([check, _timed(event, native)])


def _timed(event: Event, native: dist.Work) -> Callable[[], object]:
    """The wait for a native collective, with the GPU's time around it in the event.

    The library knows how long the collective itself took where TORCH_NCCL_ENABLE_TIMING=1. To ask it later
    keeps the collective and its buffers alive as long as the event, so memory is larger then.
    """
    if not isinstance(event.device, DeviceTimes):
        return native.wait
    known = os.environ.get("TORCH_NCCL_ENABLE_TIMING") == "1"
    duration = native._get_duration if known else None  # type: ignore[attr-defined]  # not in torch's stubs
    return event.device.around(native.wait, duration)


def _divide(result: torch.Tensor, divisor: float) -> None:
    if divisor > 1:
        result /= divisor


def _divisors(dtype: torch.dtype, op: Op, world_size: int) -> tuple[float, Op, float]:
    """By how much to divide before a native reduction, which one to call, and by how much to divide after it.

    bf16 reaches as far as fp32, so it takes the native mean. A sum in fp16 may pass 65,504 and a divided
    gradient may vanish, so one half of the division comes before the sum and one after it.
    """
    if op == ReduceOp.SUM or world_size == 1:
        return 1, ReduceOp.SUM, 1
    if dtype == torch.bfloat16:
        return 1, ReduceOp.AVG, 1
    if dtype == torch.float16:
        return math.sqrt(world_size), ReduceOp.SUM, math.sqrt(world_size)
    return 1, ReduceOp.SUM, world_size

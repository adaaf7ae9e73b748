"""Engine: WHEN the stages' verbs run. It hangs hooks into the model and knows the order of things, and no
stage by name.

    forward   enter a scope: unshard it, start on the next      leave it: reshard backward  its output's
    gradient comes: unshard, prefetch    all its parameters' gradients came: reshard, reduce the end   of
    backward: whatever autograd never reached is reduced as zeros, and every scope is closed

Reductions are issued in one fixed order on every rank, whatever order the gradients came in. ``prefetch`` and
``reduces_in_flight`` say how much communication may run beside the computation; at 0 every collective is
waited for where it is issued, and the numbers are the same.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from zerolab.collectives import Work
from zerolab.measure import Gauge
from zerolab.scopes import Scope, tensors_in
from zerolab.stages.base import Stage
from zerolab.trace import Trace
from zerolab.unit import FlatUnit, Span


class Engine:
    """The hooks of one model, and what is under way in it.

    Args:
        scopes: the model's scopes with their units, as built by the optimizer. The root scope, if any, is the
        last. prefetch: how many scopes ahead of the one at work to gather. reduces_in_flight: how many
        reductions may be under way when the next unit's gradients are collected.
    Memory: at most prefetch + 1 scopes and the root are whole; gradients take at most 2 (1 +
    reduces_in_flight) units.
    """

    def __init__(
        self, scopes: list[Scope], stage: Stage, trace: Trace, prefetch: int, reduces_in_flight: int
    ):
        self.scopes, self.stage, self.trace = scopes, stage, trace
        self.prefetch, self.reduces_in_flight = prefetch, reduces_in_flight
        self.units = [unit for scope in scopes for unit in scope.units]
        self.trainable = [unit for unit in self.units if unit.trainable]
        self.gauge = Gauge(self.units)
        self.syncing = True
        self.unreduced = True
        self.in_backward = False
        self._order: list[Scope] = []
        self._cursor = 0
        self._gathers: dict[FlatUnit, Work] = {}
        self._missing: dict[FlatUnit, set[Span]] = {}
        self._waiting: deque[FlatUnit] = deque()
        self._in_flight: deque[tuple[FlatUnit, Work]] = deque()
        for scope in scopes:
            self._install(scope)

    def _install(self, scope: Scope) -> None:
        """Hang the hooks of one scope: at its doors, and at its parameters' gradients."""
        for door in scope.doors:
            door.register_forward_pre_hook(partial(self._enter, scope), prepend=True, with_kwargs=True)
            door.register_forward_hook(partial(self._leave, scope), always_call=True)
        for unit in scope.units:
            for span in unit.spans if unit.trainable else ():
                span.parameter.register_hook(lambda gradient: self._open_backward())
                span.parameter.register_post_accumulate_grad_hook(partial(self._collect, scope, unit, span))

    # Forward.

    def _enter(self, scope: Scope, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Before a module of the scope runs. During a checkpoint's recomputation only the parameters are seen
        to.
        """
        scope.depth += 1
        if scope.depth > 1:
            return
        recomputing = _inside_backward()
        if not recomputing:
            self._note_order(scope)
            self._await_inputs(scope, (args, kwargs))
        self._unshard(scope)
        if not recomputing:
            self._start(self._order[self._cursor : self._cursor + self.prefetch])

    def _leave(self, scope: Scope, module: nn.Module, args: tuple, output) -> None:
        """After a module of the scope ran, also when it raised. The root stays whole if a backward pass will
        follow.
        """
        scope.depth -= 1
        if scope.depth > 0 or _inside_backward():
            return
        differentiable = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf]
        for tensor in differentiable:
            tensor.register_hook(lambda gradient: self._before_backward(scope))
        if scope.is_root:
            self._discard_prefetched()
        if not (scope.is_root and differentiable):
            self._reshard(scope.units)

    def _note_order(self, scope: Scope) -> None:
        """Learn in which order scopes are entered, so that the next pass can prefetch; a new path overwrites
        the old.
        """
        if self.in_backward:
            self._close_backward(abandoned=True)
        if scope.is_root:
            self._cursor = 0
        if self._order[self._cursor : self._cursor + 1] != [scope]:
            self._order[self._cursor :] = [scope]
        self._cursor += 1

    def _await_inputs(self, scope: Scope, inputs) -> None:
        """A frozen unit has no gradients of its own to tell when it was needed last: its inputs' gradients
        do.
        """
        if torch.is_grad_enabled() and any(not unit.trainable for unit in scope.units):
            for tensor in tensors_in(inputs):
                if tensor.requires_grad:
                    scope.awaited_inputs += 1
                    tensor.register_hook(lambda gradient: self._input_done(scope))

    # Parameters: whole, or away.

    def _start(self, scopes: list[Scope]) -> None:
        """Start gathering what is not whole yet."""
        for scope in scopes:
            for unit in scope.units:
                if not unit.whole and unit not in self._gathers:
                    self._gathers[unit] = self.stage.unshard(unit)
                    self.gauge.note(unit, self.trace.phase)

    def _unshard(self, scope: Scope) -> None:
        """Make the scope's units whole, waiting for their gathers."""
        self._start([scope])
        for unit in scope.units:
            if unit in self._gathers:
                self._gathers.pop(unit).wait()

    def _reshard(self, units: list[FlatUnit]) -> None:
        for unit in units:
            if unit.whole:
                self.stage.reshard(unit)
                self.gauge.note(unit, self.trace.phase)

    def _discard_prefetched(self) -> None:
        """Close what was gathered for a scope that this pass then did not enter."""
        while self._gathers:
            unit, work = self._gathers.popitem()
            work.wait()
            self._reshard([unit])

    # Backward.

    def _open_backward(self) -> None:
        """The first sign of a backward pass: note which gradients it owes, and ask to be called at its end."""
        if self.in_backward:
            return
        self.in_backward = True
        self.trace.phase = "backward"
        for unit in self.trainable:
            unit.lift_markers()
            self._missing[unit] = {span for span in unit.spans if span.parameter.requires_grad}
        self._waiting = deque(self.trainable[::-1])
        torch.autograd.Variable._execution_engine.queue_callback(self._close_backward)

    def _before_backward(self, scope: Scope) -> None:
        """The gradient of the scope's output is there: its parameters are needed now, those of the scopes
        before soon.
        """
        self._open_backward()
        self._unshard(scope)
        before = self._order[: _last_index(self._order, scope)]
        self._start(before[: -self.prefetch - 1 : -1])

    def _collect(self, scope: Scope, unit: FlatUnit, span: Span, parameter: nn.Parameter) -> None:
        """A parameter's gradient is complete. With the last of its unit the unit is closed and may be
        reduced.
        """
        if span not in self._missing[unit]:
            raise RuntimeError(
                f"{span.name} received a second gradient in one backward pass, after its unit was closed. Reentrant "
                "activation checkpointing does that: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        unit.collect(span)
        self.gauge.note(unit, self.trace.phase)
        self._missing[unit].discard(span)
        if not self._missing[unit]:
            self._reshard([unit])
            self._close_frozen(scope)
            self._reduce_in_order()

    def _input_done(self, scope: Scope) -> None:
        scope.awaited_inputs -= 1
        self._close_frozen(scope)

    def _close_frozen(self, scope: Scope) -> None:
        """Reshard the scope's frozen units once neither an input nor a trainable neighbour can still ask for
        them.
        """
        if self.in_backward and scope.awaited_inputs <= 0 and not scope.is_root:
            if not any(self._missing.get(unit) for unit in scope.units):
                self._reshard([unit for unit in scope.units if not unit.trainable])

    # Gradients: reduced in one order.

    def _reduce_in_order(self) -> None:
        """Issue the reductions that are due: a unit's turn comes when it and all before it have their
        gradients.
        """
        while self.syncing and self._waiting and not self._missing[self._waiting[0]]:
            self._reduce(self._waiting.popleft())

    def _reduce(self, unit: FlatUnit) -> None:
        unit.fill_gaps()
        work = self.stage.reduce_grads(unit)
        self._in_flight.append((unit, work))
        self.gauge.note(
            unit, self.trace.phase, scratch_bytes=sum(work.scratch_bytes for _, work in self._in_flight)
        )
        while len(self._in_flight) > self.reduces_in_flight:
            self._finish_reduce()

    def _finish_reduce(self) -> None:
        unit, work = self._in_flight.popleft()
        work.wait()
        self.stage.after_reduce(unit)
        self.gauge.note(unit, self.trace.phase)

    def _close_backward(self, abandoned: bool = False) -> None:
        """The end of a backward pass: reduce what is left, then close every scope.

        Ranks that used different parameters all come here, so all issue the same reductions. After an
        exception in the middle of a backward pass (``abandoned``) only what had been issued is brought to its
        end.
        """
        if self.syncing and not abandoned:
            self._reduce_rest()
        else:
            self.unreduced = True
        while self._in_flight:
            self._finish_reduce()
        self._discard_prefetched()
        for scope in self.scopes:
            scope.awaited_inputs = 0
            self._reshard(scope.units)
        for unit in self.trainable:
            unit.place_markers()
        self.in_backward = False
        self.trace.phase = "forward"

    def _reduce_rest(self) -> None:
        while self._waiting:
            self._reduce(self._waiting.popleft())
        self.unreduced = False

    # What the optimizer asks for.

    def finish_grads(self) -> None:
        """Before anything looks at the gradients: reduce those that no backward pass has.

        That is the case after no_sync alone, and on a rank whose loss never touched the model: the others
        reduced, so must it.
        """
        if self.in_backward:
            self._close_backward(abandoned=True)
        for unit in self.trainable:
            unit.notice_cleared()
        if self.unreduced:
            self._waiting = deque(self.trainable[::-1])
            self._reduce_rest()
            while self._in_flight:
                self._finish_reduce()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside collect gradients locally; the first one outside reduces them all."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every unit whole, for as long as it is open. Collective: every rank enters."""
        for scope in self.scopes:
            self._unshard(scope)
            scope.depth += 1
        try:
            yield
        finally:
            for scope in self.scopes:
                scope.depth -= 1
                for unit in scope.units:
                    unit.write_back()
                self._reshard(scope.units)


def _inside_backward() -> bool:
    """Whether autograd is running on this thread: a forward now is a checkpoint's recomputation."""
    return torch._C._current_graph_task_id() != -1


def _last_index(order: list[Scope], scope: Scope) -> int:
    return max((index for index, each in enumerate(order) if each is scope), default=0)

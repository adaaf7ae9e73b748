"""Engine: WHEN the stages' verbs run. It hangs hooks into the model, and knows no stage by name.

    forward   a scope is entered: unshard it, start on the next     it is left: reshard backward  its output's
    gradient comes: unshard, start on the one before     its last gradient comes: reshard, reduce the end   of
    backward: what autograd never reached is reduced as zeros, and every scope is closed

``prefetch`` and ``reduces_in_flight`` say how much communication may run beside the computation. At 0 every
collective is waited for where it is issued; the numbers are the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from zerolab.gather import Gatherer
from zerolab.measure import Gauge
from zerolab.reduction import Reducer
from zerolab.scopes import Scope, tensors_in
from zerolab.span import Span
from zerolab.stages.base import Stage
from zerolab.trace import Trace
from zerolab.unit import FlatUnit


class Engine:
    """The hooks of one model: they tell the gatherer what is needed now, and the reducer what has come.

    Args:
        scopes: the model's scopes with their units; the root scope, if there is one, is the last.
        prefetch: how many scopes ahead of the one at work to gather.
        reduces_in_flight: how many reductions may be under way while the next unit's gradients are collected.
    """

    def __init__(
        self, scopes: list[Scope], stage: Stage, trace: Trace, prefetch: int, reduces_in_flight: int
    ):
        self.scopes, self.trace = scopes, trace
        units = [unit for scope in scopes for unit in scope.units]
        self.trainable = [unit for unit in units if unit.trainable]
        self.gauge = Gauge(units)
        self.gatherer = Gatherer(stage, self.gauge, trace, prefetch)
        self.reducer = Reducer(self.trainable, stage, self.gauge, trace, reduces_in_flight)
        self.in_backward = False
        for scope in scopes:
            self._install(scope)

    def _install(self, scope: Scope) -> None:
        """Hang the hooks of one scope: at its doors, and at its parameters' gradients."""
        for door in scope.doors:
            door.register_forward_pre_hook(partial(self._enter, scope), prepend=True, with_kwargs=True)
            door.register_forward_hook(partial(self._leave, scope), always_call=True)
        for unit in (unit for unit in scope.units if unit.trainable):
            for span in unit.spans:
                span.parameter.register_hook(lambda gradient: self._open_backward())
                span.parameter.register_post_accumulate_grad_hook(partial(self._collect, scope, unit, span))

    # Forward.

    def _enter(self, scope: Scope, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Before a module of the scope runs. A checkpoint's recomputation, inside backward, only needs
        parameters.
        """
        scope.depth += 1
        if scope.depth > 1:
            return
        if _inside_backward():
            self.gatherer.unshard(scope)
            return
        if self.in_backward:
            self._abandon_backward()
        self.gatherer.note_entry(scope)
        self._await_inputs(scope, (args, kwargs))
        self.gatherer.unshard(scope)
        self.gatherer.start_next()

    def _leave(self, scope: Scope, module: nn.Module, args: tuple, output) -> None:
        """After a module of the scope ran, also when it raised. The root stays whole if a backward pass may
        follow.
        """
        scope.depth -= 1
        if scope.depth > 0 or _inside_backward():
            return
        differentiable = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf]
        for tensor in differentiable:
            tensor.register_hook(lambda gradient: self._before_backward(scope))
        if scope.is_root:
            self.gatherer.discard_unused()
        if not (scope.is_root and differentiable):
            self.gatherer.reshard(scope.units)

    def _await_inputs(self, scope: Scope, inputs: tuple) -> None:
        """A frozen unit has no gradients of its own to tell when it was needed last: its inputs' gradients
        do.
        """
        if torch.is_grad_enabled() and not all(unit.trainable for unit in scope.units):
            for tensor in tensors_in(inputs):
                if tensor.requires_grad:
                    scope.awaited_inputs += 1
                    tensor.register_hook(lambda gradient: self._input_done(scope))

    # Backward.

    def _open_backward(self) -> None:
        """The first sign of a backward pass: note what it owes, and ask autograd to call when it ends."""
        if not self.in_backward:
            self.in_backward = True
            self.trace.phase = "backward"
            self.reducer.expect()
            torch.autograd.Variable._execution_engine.queue_callback(self._close_backward)

    def _before_backward(self, scope: Scope) -> None:
        """The gradient of the scope's output came: its parameters are needed now, those before it soon."""
        self._open_backward()
        self.gatherer.unshard(scope)
        self.gatherer.start_before(scope)

    def _collect(self, scope: Scope, unit: FlatUnit, span: Span, parameter: nn.Parameter) -> None:
        """A parameter's gradient is complete. With the last of its unit the unit is closed and may be
        reduced.
        """
        if self.reducer.collect(unit, span):
            self.gatherer.reshard([unit])
            self._close_frozen(scope)
            self.reducer.reduce_complete()

    def _input_done(self, scope: Scope) -> None:
        scope.awaited_inputs -= 1
        self._close_frozen(scope)

    def _close_frozen(self, scope: Scope) -> None:
        """Reshard frozen units once neither an input nor a trainable neighbour can still ask for them."""
        pending = scope.awaited_inputs > 0 or any(self.reducer.missing.get(unit) for unit in scope.units)
        if self.in_backward and not pending and not scope.is_root:
            self.gatherer.reshard([unit for unit in scope.units if not unit.trainable])

    def _close_backward(self) -> None:
        """The end of a backward pass. Ranks that used different parameters all come here, so all reduce
        alike.
        """
        self.reducer.finish()
        self._close_scopes()

    def _abandon_backward(self) -> None:
        """After an exception in the middle of a backward pass: bring to an end what had been issued, and
        close.
        """
        self.reducer.settle()
        self._close_scopes()

    def _close_scopes(self) -> None:
        self.gatherer.discard_unused()
        for scope in self.scopes:
            scope.awaited_inputs = 0
            self.gatherer.reshard(scope.units)
        self.in_backward = False
        self.trace.phase = "forward"

    # What the optimizer asks for.

    def finish_grads(self) -> None:
        """See that every gradient is reduced, before anything looks at one."""
        if self.in_backward:
            self._abandon_backward()
        self.reducer.finish_unreduced()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside collect gradients locally; the first one outside reduces them all."""
        before, self.reducer.syncing = self.reducer.syncing, False
        try:
            yield
        finally:
            self.reducer.syncing = before

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every unit whole, for as long as it is open. Collective: every rank enters."""
        for scope in self.scopes:
            self.gatherer.unshard(scope)
            scope.depth += 1
        try:
            yield
        finally:
            for scope in self.scopes:
                scope.depth -= 1
                for unit in scope.units:
                    unit.write_back()
                self.gatherer.reshard(scope.units)


def _inside_backward() -> bool:
    """Whether autograd is running on this thread, so that a forward now is a checkpoint's recomputation."""
    return torch._C._current_graph_task_id() != -1

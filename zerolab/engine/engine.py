"""Engine: WHEN the stages' verbs run. It hangs hooks into the model, and knows no stage by name.

    forward    a scope is entered: unshard it, start on the next
               it is left: reshard it
    backward   its output's gradient comes: unshard it, start on the one before
               its last gradient comes: reshard it, reduce its gradients
               the end: what autograd never reached is reduced as zeros, and every scope is closed

``prefetch`` and ``reduces_in_flight`` say how much communication may run beside the computation. At 0 every
collective is waited for where it is issued; the numbers are the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from zerolab.engine.gather import Gatherer
from zerolab.engine.hook import Hook
from zerolab.engine.passes import NESTED, inside_backward, inside_reentrant_checkpoint, pass_number
from zerolab.engine.reduction import Reducer
from zerolab.engine.scopes import Scope, tensors_in
from zerolab.measure import Gauge
from zerolab.stages.base import Stage
from zerolab.trace import Trace
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span


class Engine:
    """The hooks of one model: they tell the gatherer what is needed now, and the reducer what has come.

    Args:
        model: the module whose call begins a forward pass.
        scopes: its scopes with their units; the root scope, if there is one, is the last.
        prefetch: how many scopes ahead of the one at work to gather.
        reduces_in_flight: how many reductions may be under way while the next unit's gradients are collected.
    """

    def __init__(
        self,
        model: nn.Module,
        scopes: list[Scope],
        stage: Stage,
        trace: Trace,
        prefetch: int,
        reduces_in_flight: int,
    ):
        self.scopes, self.trace = scopes, trace
        units = [unit for scope in scopes for unit in scope.units]
        self.trainable = [unit for unit in units if unit.trainable]
        self.gauge = Gauge(units)
        self.gatherer = Gatherer(stage, self.gauge, trace, prefetch)
        self.reducer = Reducer(self.trainable, stage, self.gauge, trace, reduces_in_flight)
        roots = {unit for scope in scopes if scope.is_root for unit in scope.units}
        self.reducer.order = sorted(reversed(self.trainable), key=roots.__contains__)
        self.in_backward = False
        self.at_work: Scope | None = None
        self.pass_number = -1
        for scope in scopes:
            self._install(scope)
        model.register_forward_pre_hook(Hook(self._begin_forward), prepend=True)  # the last: to run first

    def _install(self, scope: Scope) -> None:
        """Hang the hooks of one scope: at its doors, and at its parameters' gradients."""
        if not all(unit.whole for unit in scope.units):
            enter, leave = Hook(partial(self._enter, scope)), Hook(partial(self._leave, scope))
            for door in scope.doors:
                door.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                door.register_forward_hook(leave, always_call=True)
        for door in scope.doors:
            door.register_forward_pre_hook(Hook(self._notice_broken_backward), prepend=True)
        for unit in (unit for unit in scope.units if unit.trainable):
            for span in unit.spans:
                span.parameter.register_hook(partial(self._make_room, unit, span))
                span.parameter.register_post_accumulate_grad_hook(partial(self._collect, scope, unit, span))

    # Forward.

    def _notice_broken_backward(self, module: nn.Module, args: tuple) -> None:
        """A module is called. A backward pass that is still open then was broken off by an exception."""
        if self.in_backward and not inside_backward():
            self._abandon_backward()

    def _begin_forward(self, model: nn.Module, args: tuple) -> None:
        """The whole model is called: the order of its scopes begins anew."""
        if not inside_backward():
            self.gatherer.rewind()

    def _enter(self, scope: Scope, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Before a module of the scope runs; a checkpoint's recomputation only needs the parameters."""
        scope.depth += 1
        if scope.depth > 1:
            return
        if inside_backward():
            self.gatherer.unshard(scope)
            return
        scope.expects_backward = False
        self.gatherer.note_entry(scope)
        self.gatherer.unshard(scope)
        self._watch_inputs(scope, (args, kwargs))
        self.gatherer.start_next()

    def _leave(self, scope: Scope, module: nn.Module, args: tuple, output) -> None:
        """After a module of the scope ran or raised. The root stays whole if a backward pass may follow.

        Every door's output is watched, the inner ones' too: a backward pass can begin inside a scope, at a
        loss that one of its modules put aside.
        """
        scope.depth -= 1
        differentiable = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf]
        for tensor in differentiable:
            tensor.register_hook(lambda gradient: self._before_backward(scope))
        scope.expects_backward |= bool(differentiable)
        if scope.depth > 0 or inside_backward():
            return
        if scope.is_root:
            self.gatherer.discard_unused()
        if not (scope.is_root and differentiable):
            self.gatherer.reshard(scope.units)

    def _watch_inputs(self, scope: Scope, inputs: tuple) -> None:
        """Where parameters are frozen, their inputs' gradients tell when they were needed last."""
        if scope.inputs_done:
            scope.inputs_watched = scope.inputs_done = 0
        if torch.is_grad_enabled() and not all(unit.owes_all for unit in scope.units):
            for tensor in tensors_in(inputs):
                if tensor.requires_grad:
                    scope.inputs_watched += 1
                    tensor.register_hook(lambda gradient: self._input_done(scope))

    # Backward.

    def _open_backward(self) -> None:
        """The first sign of a backward pass: note what it owes, and ask autograd to call when it ends."""
        if not self.in_backward:
            if inside_reentrant_checkpoint():
                raise RuntimeError(NESTED)
            self.pass_number = pass_number()
            self.in_backward, self.at_work = True, None
            self.trace.phase = "backward"
            self.reducer.expect()
            for scope in self.scopes:
                scope.inputs_done = 0
            torch.autograd.Variable._execution_engine.queue_callback(self._close_backward)

    def _before_backward(self, scope: Scope) -> None:
        """The gradient of one of the scope's outputs came: it is needed now, those before it soon."""
        self._open_backward()
        been_here = scope.is_root or scope is self.at_work
        if been_here and all(unit.whole or self._has_all(unit) for unit in scope.units):
            return
        if not scope.is_root and pass_number() == self.pass_number:
            if self.at_work is not None:
                self._leave_behind(self.at_work)
            self.at_work = scope
        self.gatherer.unshard(scope)
        self.gatherer.start_before(scope)

    def _has_all(self, unit: FlatUnit) -> bool:
        """Whether every parameter of a unit has had its gradient, so that nothing in backward needs it."""
        return unit.trainable and unit.owes_all and not self.reducer.missing[unit]

    def _leave_behind(self, scope: Scope) -> None:
        """Backward has come to another scope: what no gradient is on its way to in this one counts as zero.

        Another rank may have used that parameter, and has reduced the unit already. To wait for the end of
        backward would be to reduce it after gathers that came later there. The unit stays whole: where the
        other scope was called from inside this one, backward comes back to it.
        """
        for unit in scope.units:
            if unit.trainable and self.reducer.give_up(unit):
                self.reducer.reduce_complete()

    def _make_room(self, unit: FlatUnit, span: Span, gradient: torch.Tensor) -> None:
        self._open_backward()
        if pass_number() != self.pass_number:
            raise RuntimeError(NESTED)
        self.reducer.make_room(unit, span)

    def _collect(self, scope: Scope, unit: FlatUnit, span: Span, parameter: nn.Parameter) -> None:
        """A parameter's gradient is complete. With the last of its unit, the unit is closed and reduced."""
        if self.reducer.collect(unit, span):
            if unit.owes_all:
                self.gatherer.reshard([unit])
            self._close_frozen(scope)
            self.reducer.reduce_complete()

    def _input_done(self, scope: Scope) -> None:
        scope.inputs_done += 1
        self._close_frozen(scope)

    def _close_frozen(self, scope: Scope) -> None:
        """Reshard what is frozen, in whole or in part, once no input and no neighbour can ask for it."""
        owed = any(self.reducer.missing.get(unit) for unit in scope.units)
        if self.in_backward and not owed and scope.inputs_done >= scope.inputs_watched and not scope.is_root:
            self.gatherer.reshard([unit for unit in scope.units if not unit.owes_all])

    def _close_backward(self) -> None:
        """The end of backward. Ranks that used different parameters all come here, so all reduce alike."""
        self.reducer.finish()
        self._close_scopes()

    def _abandon_backward(self) -> None:
        """After an exception in a backward pass: bring to an end what had been issued, and close."""
        self.reducer.settle()
        self._close_scopes()

    def _close_scopes(self) -> None:
        for unit in self.trainable:
            unit.grads.put_markers_back()
        self.gatherer.discard_unused()
        for scope in self.scopes:
            self.gatherer.reshard(scope.units)
        self.in_backward = False
        self.trace.phase = "forward"

    # What the optimizer asks for.

    def finish_grads(self) -> None:
        """See that every gradient is reduced, before anything looks at one.

        Scopes are closed, because a forward without a backward leaves the root whole, and an update would
        pass it by.
        Raises: RuntimeError inside full_params(), whose whole parameters an update would pass by too.
        """
        if self.gatherer.held:
            raise RuntimeError(
                "gradients are asked for inside full_params(): leave the with block before that"
            )
        if self.in_backward:
            self._abandon_backward()
        self._close_scopes()
        self.reducer.finish_unreduced()

    def clear_grads(self, set_to_none: bool) -> None:
        """Forget the gradients, those of a backward pass that was broken off too."""
        if self.in_backward:
            self._abandon_backward()
        self.reducer.clear(set_to_none)

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
        self.gatherer.held += 1
        try:
            yield
        finally:
            self.gatherer.held -= 1
            lost = self._take_back() if not self.gatherer.held else []
        if lost:
            raise RuntimeError(
                f"parameter {lost[0]} was given another tensor inside full_params(), as p.data = ... does, "
                "and that is lost: write into it, as in p.copy_(...)"
            )

    def _take_back(self) -> list[str]:
        """Keep what was written to whole parameters, and reshard; the names of those that were moved."""
        lost = []
        for unit in (unit for scope in self.scopes for unit in scope.units):
            lost += [span.name for span in unit.spans if unit.lost(span)]
            unit.write_back()
            unit.leave_storage()
            self.gatherer.reshard([unit])
        return lost

"""Reducer: decide in which order the units' gradients are reduced, and when."""

from collections import deque

import torch

from zerolab.collectives import Work
from zerolab.engine.clearing import ClearedGradients
from zerolab.stages.base import Stage
from zerolab.unit import FlatUnit
from zerolab.unit.grads import FlatGrads
from zerolab.unit.sharded import as_plain_tensors
from zerolab.unit.span import Span


class Reducer:
    """Reduces the units' gradients in one fixed order, the same on every rank.

    Gradients may come in another order on another rank, where a parameter was not used; collectives must not.
    A unit is reduced when it and all before it are complete. What is missing at the end of backward counts as
    zero.

    A reduction may be two collectives, one after the other. Then as many second ones are under way as first
    ones, beside the same computation.

    Memory: gradients take at most 2 (1 + ``in_flight``) units beyond what the stage keeps, and in second
    collectives what this rank owns of ``in_flight`` units more.
    """

    def __init__(self, flats: list[FlatUnit], stage: Stage, in_flight: int):
        self.flats, self.stage, self.in_flight = flats, stage, in_flight
        self.order = flats
        self.order_is_agreed = False
        self.completed: list[FlatUnit] = []
        self.syncing = True
        self.collecting = False
        self.unreduced = True
        self.cleared = ClearedGradients()
        self._waiting: deque[FlatUnit] = deque()
        self._under_way: deque[tuple[FlatUnit, Work]] = deque()
        self._in_second: deque[tuple[FlatUnit, Work]] = deque()

    def set_order(self, first: list[FlatUnit]) -> None:
        """Reduce in this order from now on, the same on every rank; units that it leaves out follow."""
        self.order = first + [flat for flat in self.order if flat not in first]
        self.order_is_agreed = True

    def expect(self) -> None:
        """A backward pass begins: note which gradients are to come.

        None come in a pass of torch.autograd.grad, which stores no gradients. Such a pass reduces nothing.
        """
        self.completed = []
        self._notice_cleared()
        for flat in self.flats:
            flat.grads.expect()
        self.collecting = any(_will_come(span) for flat in self.flats for span in flat.grads.missing)
        if not self.collecting:
            for flat in self.flats:
                flat.grads.missing.clear()
        self._waiting = deque(self.order if self.collecting else ())

    def collect(self, flat: FlatUnit, span: Span, gradient: torch.Tensor | None) -> bool:
        """Collect one parameter's gradient; whether it was the last of its unit.

        Raises: RuntimeError where it is the parameter's second in one backward pass, because the first may
            be on its way already.
        """
        grads = flat.grads
        if span not in grads.missing:
            if gradient is None:
                return False
            raise RuntimeError(
                f"{span.name} receives a second gradient in one backward pass, after its unit may have been "
                "reduced: make a backward pass for each, under optimizer.no_sync() where they belong to one"
            )
        if gradient is not None and grads.was_cleared(span):
            self._forget(grads, span)
        grads.collect(span, gradient)
        return not grads.missing and self._complete(flat)

    def has_all_gradients(self, flat: FlatUnit) -> bool:
        """Whether each parameter of a unit has had its gradient, so that this backward needs none of them.

        A pass of torch.autograd.grad, which stores no gradients, cannot tell.
        """
        return self.collecting and flat.trainable and not flat.grads.missing and flat.all_require_grad

    def mark_unused(self, flat: FlatUnit) -> bool:
        """Stop waiting for gradients that this backward will not bring; whether that completes the unit."""
        unused = {span for span in flat.grads.missing if not _will_come(span)}
        flat.grads.missing -= unused
        return bool(unused) and self._complete(flat)

    def _complete(self, flat: FlatUnit) -> bool:
        """Return whether no gradient of the unit is missing any more."""
        if flat.grads.missing:
            return False
        flat.grads.move()
        self.completed.append(flat)
        return True

    def reduce_complete(self) -> None:
        """Issue the reductions that can go now."""
        while self.syncing and self._waiting and not self._waiting[0].grads.missing:
            self._reduce(self._waiting.popleft())

    def finish(self) -> None:
        """The end of a backward pass: reduce the rest, unless under no_sync, and wait for all of it."""
        if not self.collecting:
            return
        if self.syncing:
            self._reduce_all(self._waiting)
        else:
            self.unreduced = True
        self.wait_for_all()

    def finish_unreduced(self) -> None:
        """Reduce what no backward pass did.

        This is needed after passes under no_sync only, and on a rank whose loss did not use the model: the
        other ranks have issued the reductions, so this rank has to.
        """
        self._notice_cleared()
        if self.unreduced:
            self._reduce_all(deque(self.order))
            self.wait_for_all()

    def wait_for_all(self) -> None:
        """Wait for the reductions under way."""
        while self._under_way:
            self._wait_for_oldest()
        while self._in_second:
            self._finish_oldest()

    def clear(self, set_to_none: bool) -> None:
        """Forget every gradient, or set it to zero. None is being reduced: a pass ends when all are there."""
        if any(flat.grads.reduced is not None for flat in self.flats):
            self.cleared.note_all()
        for flat in self.flats:
            flat.grads.clear() if set_to_none else flat.grads.zero()
        self.unreduced = True

    def _notice_cleared(self) -> None:
        """Forget the gradients that users have cleared, as by model.zero_grad().

        Where every gradient that this rank knows of was cleared, so were those that other ranks alone used.
        """
        cleared = [(flat.grads, span) for flat in self.flats for span in flat.grads.cleared()]
        if cleared and len(cleared) == sum(len(flat.grads.used) for flat in self.flats):
            self.clear(set_to_none=True)
            return
        for grads, span in cleared:
            self._forget(grads, span)

    def _forget(self, grads: FlatGrads, span: Span) -> None:
        if grads.reduced is not None:
            self.cleared.note(span.name)
        grads.forget(span)

    def forget_clearings(self) -> None:
        """The ranks have cleared the same gradients until now."""
        self.cleared = ClearedGradients()

    def abandon(self) -> None:
        """A backward pass was broken off: reduce what came of it, because in PyTorch that counts too.

        All units are reduced, as in a whole pass. On another rank, which used other parameters, the pass may
        have come further, and that rank has reduced units that are incomplete here.
        """
        for flat in self.flats:
            flat.grads.collect_interrupted()
        self.finish()

    def _reduce_all(self, waiting: deque[FlatUnit]) -> None:
        while waiting:
            self._reduce(waiting.popleft())
        self.unreduced = False

    def _reduce(self, flat: FlatUnit) -> None:
        self.cleared.note_reduction()
        flat.grads.prepare_to_reduce()
        self._under_way.append((flat, self.stage.reduce_grads(flat)))
        while len(self._under_way) > self.in_flight:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        """Wait for the oldest first collective. Where a second one follows, it goes on beside backward."""
        flat, work = self._under_way.popleft()
        if not work.advance():
            self.stage.after_reduce(flat)
            return
        self._in_second.append((flat, work))
        while len(self._in_second) > self.in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        flat, work = self._in_second.popleft()
        work.wait()
        self.stage.after_reduce(flat)


def _will_come(span: Span) -> bool:
    """Return whether the backward pass that is running brings this parameter a gradient."""
    with as_plain_tensors():
        accumulation = torch.autograd.graph.get_gradient_edge(span.parameter).node
    try:
        return torch._C._will_engine_execute_node(accumulation)
    except RuntimeError:  # torch.autograd.grad was asked for this gradient: it returns it, and stores none
        return False

"""FlatGrads: the gradients of one flat unit, from autograd's tensors to the mean over the ranks.

Autograd stores each gradient in a tensor of its own. It is moved into the flat buffer of this rank's
gradients, ``local``, small ones together in one call. When the unit's last gradient is there, the stage
reduces the buffer and says what to keep of the result, ``reduced``.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch

from zerolab.precision import reduce_op
from zerolab.storages import MemoryMeter
from zerolab.unit.arrivals import MOVED_TOGETHER, Arrivals
from zerolab.unit.sharded import ReducedGradient, as_plain_tensors
from zerolab.unit.span import Span
from zerolab.unit.states import GradState, change

_COLLECTING = GradState.COLLECTING  # Python 3.11 computes a member each time that it is looked up
_OWN_REFERENCES = 3  # to a marker: those of the dict, of a local variable, and of the argument of getrefcount


class FlatGrads:
    """The gradients of one unit. P and S as in FlatUnit: the padded and the owned numel.

    Attributes:
        local: [P] this rank's own gradients until they are reduced, or None.
        reduced: [S] the gradients of the owned range, summed over micro-batches and ranks, or None.
        op: what the ranks reduce to: the sum in fp32, which is divided once after the last micro-batch; the
            mean in 16 bits.
        state: how far the gradients have come, a `GradState`.
        missing: the spans that the backward pass under way has not brought a gradient for yet.
        filled: the spans with a gradient in ``local``.
        used: the spans with a gradient anywhere since they were last cleared.
        replicas: over how many ranks the sum is, and the mean.
        arrivals: the gradients that wait to be moved into ``local``.
        producers: the GPU streams that gradients came on.
    """

    def __init__(
        self,
        name: str,
        spans: list[Span],
        padded_numel: int,
        dtype: torch.dtype,
        device: torch.device,
        meter: MemoryMeter,
        replicas: int,
    ):
        self.name, self.spans, self.padded_numel = name, spans, padded_numel
        self.dtype, self.device, self.meter, self.replicas = dtype, device, meter, replicas
        self.op = reduce_op(dtype)
        averaged = self.op == torch.distributed.ReduceOp.AVG
        self._state_when_reduced = GradState.AVERAGED if averaged else GradState.REDUCED
        self.owned = slice(0, padded_numel)
        self.local: torch.Tensor | Any = None  # Any is for None: ``state`` says where there is a tensor
        self.reduced: torch.Tensor | Any = None
        self.state = GradState.EMPTY
        self.missing: set[Span] = set()
        self.filled: set[Span] = set()
        self.used: set[Span] = set()
        self._divisor = 1
        self.arrivals = Arrivals(spans, padded_numel, dtype, device)
        self.producers = self.arrivals.producers
        self._markers: dict[Span, ReducedGradient] = {}

    def _become(self, state: GradState) -> None:
        self.state = change(f"the gradients of unit {self.name}", self.state, state)

    def _report(self, *passing: torch.Tensor | None) -> None:
        self.meter.report(self, self.local, self.reduced, *passing)

    # A backward pass collects.

    def expect(self) -> None:
        """A backward pass begins: every parameter that requires a gradient is to get one."""
        with as_plain_tensors():
            self.missing = {span for span in self.spans if span.parameter.requires_grad}

    def take(self, span: Span) -> torch.Tensor | None:
        """The gradient that autograd has just stored; ``parameter.grad`` is again as it was before that.

        None where a hook of the user's has removed it, and where the parameter was frozen since the forward:
        autograd calls the hook and stores nothing.
        """
        stored, marker, arrived = span.parameter.grad, self._markers.get(span), None
        if marker is not None:
            arrived, marker.arrived = marker.arrived, None
        if stored is None:
            return None
        if stored is not marker and stored is not arrived:  # there was no earlier gradient to add it to
            span.parameter.grad = None
            return stored
        span.parameter.grad = marker
        if arrived is not None and span.numel < MOVED_TOGETHER:
            return arrived.clone()  # it will wait, and a hook may change it where autograd shares it
        return arrived

    def was_cleared(self, span: Span) -> bool:
        """Return whether the user has cleared a parameter's earlier gradient, whose marker is gone."""
        return span in self.used and span.parameter.grad is None

    def collect(self, span: Span, gradient: torch.Tensor | None) -> None:
        """Collect a parameter's new gradient, and leave a marker in ``parameter.grad``.

        A large gradient is moved into ``local`` at once, a small one together with others.
        Memory: see `Arrivals`.
        """
        self.missing.discard(span)
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise RuntimeError(f"{span.name} has a sparse gradient: build its module with sparse=False")
        if gradient.requires_grad:  # under create_graph=True
            gradient = gradient.detach()
        if self.state is not _COLLECTING:
            self._become(_COLLECTING)
        if span not in self.used:
            self.used.add(span)
            self._leave_marker(span)
        if span.numel >= MOVED_TOGETHER:
            self._move_one(span, gradient)
            return
        full = self.arrivals.add(span, gradient)
        self.meter.hold(self.arrivals, self.arrivals.held_bytes)
        if full:
            self.move()

    def _leave_marker(self, span: Span) -> None:
        if span not in self._markers:
            self._markers[span] = ReducedGradient(span.parameter, span.layout)
        span.parameter.grad = self._markers[span]

    def _move_one(self, span: Span, gradient: torch.Tensor) -> None:
        """Move a large gradient into ``local``."""
        if not self.filled:
            self._open_local()
        self.meter.note_peak(gradient.untyped_storage().nbytes())
        self.arrivals.move_one(span, gradient, self.local, self.filled)

    def move(self) -> None:
        """Move the gradients that were collected into ``local``, added to those of no_sync, and zero padding.

        Memory: P elements from the first gradients on; the gradients' own tensors are released.
        """
        if self.arrivals:
            if not self.filled:
                self._open_local()
            self.arrivals.move(self.local, self.filled)
            self.meter.hold(self.arrivals, 0)

    def _forget_arrivals(self) -> None:
        self.arrivals.clear()
        self.meter.hold(self.arrivals, 0)

    def collect_interrupted(self) -> None:
        """Collect what autograd stored last before an exception: in PyTorch it counts."""
        for span in [span for span, marker in self._markers.items() if marker.arrived is not None]:
            if (gradient := self.take(span)) is not None:
                self.collect(span, gradient)

    def _open_local(self) -> None:
        """A buffer for this rank's gradients: a new one, or the last one, after its result was copied out."""
        if self.local is None:
            self.local = torch.empty(self.padded_numel, dtype=self.dtype, device=self.device)
        elif self.reduced is not None:
            self.reduced = self.reduced.clone()
        self._report()

    # The stage reduces.

    def prepare_to_reduce(self) -> None:
        """Complete ``local``: what was written to it, from whatever stream, and zeros everywhere else."""
        self.move()
        if not self.filled:
            self._open_local()
            self._become(GradState.COLLECTING)
        self.producers.join(self.local)
        self.fill_gaps()
        self._become(GradState.REDUCING)

    def fill_gaps(self) -> None:
        """Zero the parameters that have no gradient here, which are zero in the mean, and padding."""
        if len(self.filled) == len(self.spans):
            return
        stop = 0
        for span in self.spans:
            if span in self.filled:
                if stop < span.offset:
                    self.local[stop : span.offset].zero_()
                stop = span.stop
        self.local[stop:].zero_()

    def keep(self, reduced: torch.Tensor) -> None:
        """Take the reduced gradients of ``owned``, and add those of earlier micro-batches.

        If the earlier ones were divided already, as for clipping between micro-batches, they are multiplied
        again: a sum is divided once, after the last.
        """
        if self.reduced is not None:
            self._report(reduced)
            reduced += self.reduced if self._divisor == 1 else self.reduced * self._divisor
        self.reduced, self._divisor = reduced, 1
        self.filled.clear()
        self._become(self._state_when_reduced)
        self._report()

    def average(self) -> None:
        """Divide the sum by the number of ranks it is over, once, however often it is asked for."""
        if self.state is GradState.REDUCED:
            if self.replicas > 1:
                self.reduced /= self.replicas
            self._divisor = self.replicas
            self._become(GradState.AVERAGED)

    def mean(self) -> torch.Tensor:
        """Return the averaged gradients of the owned range, to look at: the sum itself stays as it is."""
        return self.reduced if self.state is GradState.AVERAGED else self.reduced / self.replicas

    def free_local(self) -> None:
        """Free this rank's unreduced gradients, after every stream that wrote to them or waited for them."""
        if self.local is not None:
            self.producers.note()
            self.producers.hold(self.local)
        self.local = None
        self._report()

    def narrow_local(self) -> torch.Tensor:
        """Keep the owned range of ``local`` alone, and free the rest. Returns it: [S]."""
        own = self.local[self.owned].clone()
        self._report(own)
        self.free_local()
        self.local = own
        self._report()
        return own

    # The user clears.

    def clear(self) -> None:
        """Forget every gradient, as zero_grad does."""
        self._become(GradState.EMPTY)
        self.reduced, self._divisor = None, 1
        self.free_local()
        self._forget_arrivals()
        self.filled.clear()
        self.used.clear()
        with as_plain_tensors():
            for span in self.spans:
                span.parameter.grad = None
        self._drop_kept_markers(self.spans)

    def _drop_kept_markers(self, cleared: Iterable[Span]) -> None:
        """Leave to the user the markers that they keep, as in ``[p.grad for p in model.parameters()]``.

        Such a marker stands for a gradient that is gone. If it were left for the next gradient too, the user
        could put it back and have the next gradient instead.
        """
        for span in cleared:
            marker = self._markers.get(span)
            if marker is not None and sys.getrefcount(marker) > _OWN_REFERENCES:
                del self._markers[span]

    def zero(self) -> None:
        """Set every gradient to zero and keep it, as zero_grad(set_to_none=False) does."""
        self._forget_arrivals()
        self.filled.clear()
        if self.reduced is not None:
            self.reduced.zero_()
            self._divisor = 1
        if self.state is GradState.COLLECTING:
            self._become(GradState.EMPTY if self.reduced is None else self._state_when_reduced)

    def cleared(self) -> list[Span]:
        """The spans whose marker is gone, because the user cleared that gradient, as model.zero_grad() does.

        Raises: RuntimeError for a gradient that was set by hand.
        """
        cleared = []
        with as_plain_tensors():
            gradients = [span.parameter.grad for span in self.spans]
        for span, gradient in zip(self.spans, gradients, strict=True):
            if gradient is None and span in self.used:
                cleared.append(span)
            elif gradient is not None and gradient is not self._markers.get(span):
                raise RuntimeError(
                    f"{span.name}.grad was set by hand, and gradients are in the optimizer's flat buffers: "
                    "change the loss, or register a hook on the parameter, which may replace its gradient"
                )
        return cleared

    def forget(self, span: Span) -> None:
        """Forget one parameter's gradient."""
        self.move()
        self._drop_kept_markers([span])
        self.used.discard(span)
        self.filled.discard(span)
        if self.reduced is not None:
            self.reduced[span.within(self.owned.start, self.owned.stop)].zero_()

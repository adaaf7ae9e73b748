"""FlatGrads: the gradients of one flat unit, from autograd's hand to the sum over the ranks.

A gradient comes from autograd as a tensor of its own. It is moved into the flat buffer of this rank's
gradients, ``local``; when the unit's last has come, the stage reduces the buffer and says what to keep of the
sum, ``reduced``.
"""

import torch

from zerolab.precision import reduces_to_mean
from zerolab.storages import storage_bytes
from zerolab.unit.producers import Producers
from zerolab.unit.sharded import ReducedGradient, as_plain_tensors
from zerolab.unit.span import Span


class FlatGrads:
    """The gradients of one unit. P and S as in FlatUnit: the padded and the owned numel.

    Attributes:
        local: [P] this rank's own gradients on their way to the reduction, or None.
        reduced: [S] the gradients of the owned range, summed over micro-batches and ranks, or None.
        averaged: whether ``reduced`` is divided by N: later in fp32, from the start in 16 bits.
        crest_bytes: what gradients took while the last sum was taken over, its old and new buffers together.
        producers: the GPU streams that wrote to ``local``.
        filled: the spans with a gradient in ``local``.
        used: the spans with a gradient anywhere since they were last cleared.
    """

    def __init__(
        self, spans: list[Span], padded_numel: int, dtype: torch.dtype, device: torch.device, world_size: int
    ):
        self.spans, self.padded_numel, self.dtype, self.device = spans, padded_numel, dtype, device
        self.world_size = world_size
        self.producers = Producers(device)
        self.owned = slice(0, padded_numel)
        self.local: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None
        self.averaged = False
        self.crest_bytes = 0
        self.filled: set[Span] = set()
        self.used: set[Span] = set()
        self._markers: dict[Span, ReducedGradient] = {}
        self._lifted: set[Span] = set()

    def make_room(self, span: Span) -> None:
        """Before autograd stores a gradient: take away the marker of the one before, moved out already."""
        if span in self.used and span.parameter.grad is self._markers[span]:
            span.parameter.grad = None
            self._lifted.add(span)

    def put_markers_back(self) -> None:
        """After a pass: where no gradient was stored after all, as torch.autograd.grad stores none."""
        for span in self._lifted:
            if span.parameter.grad is None:
                span.parameter.grad = self._markers[span]
        self._lifted.clear()

    def collect(self, span: Span) -> None:
        """Move a parameter's fresh gradient into ``local``, on top of no_sync's, and mark its place.

        Memory: P elements from the first gradient on; the parameter's own gradient tensor is let go at once.
        """
        if not self.filled:
            self._open_local()
        gradient = span.parameter.grad
        if gradient.layout != torch.strided:
            raise RuntimeError(f"{span.name} has a sparse gradient: build its module with sparse=False")
        place = span.view(self.local)
        if span in self.filled:
            place += gradient
        else:
            place.copy_(gradient)
            self.filled.add(span)
        self.producers.note()
        self.used.add(span)
        if span not in self._markers:
            self._markers[span] = ReducedGradient(span.parameter)
        span.parameter.grad = self._markers[span]
        self._lifted.discard(span)

    def _open_local(self) -> None:
        """A buffer for this rank's gradients: a new one, or the last one, whose sum moves out first."""
        if self.local is None:
            self.local = torch.empty(self.padded_numel, dtype=self.dtype, device=self.device)
        elif self.reduced is not None:
            self.reduced = self.reduced.clone()

    def fill_gaps(self) -> None:
        """Zero what no gradient was written to: padding, and parameters unused here, zero in the mean.

        What was written to, from whatever stream, is complete for what comes after this on the current one.
        """
        if not self.filled:
            self._open_local()
        self.producers.join(self.local)
        stop = 0
        for span in self.spans:
            if span in self.filled:
                if stop < span.offset:
                    self.local[stop : span.offset].zero_()
                stop = span.stop
        self.local[stop:].zero_()

    def keep(self, reduced: torch.Tensor) -> None:
        """Take the reduced gradients of ``owned``, on top of those of earlier micro-batches."""
        mean = reduces_to_mean(self.dtype)
        self.crest_bytes = storage_bytes((self.local, reduced, self.reduced))
        if self.reduced is not None:
            reduced += self.reduced * self.world_size if self.averaged and not mean else self.reduced
        self.reduced, self.averaged = reduced, mean
        self.filled.clear()

    def average(self) -> None:
        """Divide the sum by N, once, however often it is asked for."""
        if not self.averaged and self.world_size > 1:
            self.reduced /= self.world_size
            self.averaged = True

    def mean(self) -> torch.Tensor:
        """The averaged gradients of the owned range, to look at: the sum itself stays as it is."""
        return self.reduced if self.averaged else self.reduced / self.world_size

    def free_local(self) -> None:
        """Let this rank's unreduced gradients go, on whatever stream they were waited for."""
        if self.local is not None:
            self.producers.note()
            self.producers.hold(self.local)
        self.local = None

    def clear(self) -> None:
        """Forget every gradient, as zero_grad does."""
        self.free_local()
        self.reduced = None
        self.averaged = False
        self.filled.clear()
        self.used.clear()
        with as_plain_tensors():
            for span in self.spans:
                span.parameter.grad = None

    def zero(self) -> None:
        """Set every gradient to zero and keep it, as zero_grad(set_to_none=False) does."""
        self.filled.clear()
        if self.reduced is not None:
            self.reduced.zero_()

    def notice_cleared(self) -> None:
        """Where a marker is gone the user cleared that gradient, as model.zero_grad() does: forget it too."""
        with as_plain_tensors():
            gradients = [span.parameter.grad for span in self.spans]
        for span, gradient in zip(self.spans, gradients, strict=True):
            if gradient is None and span in self.used:
                self._forget(span)
            elif gradient is not None and gradient is not self._markers.get(span):
                raise RuntimeError(
                    f"{span.name}.grad was set by hand, and gradients live in the optimizer's flat buffers: "
                    "change the loss, or register a hook on the parameter, which may replace its gradient"
                )

    def _forget(self, span: Span) -> None:
        self.used.discard(span)
        self.filled.discard(span)
        if self.reduced is not None:
            self.reduced[span.within(self.owned.start, self.owned.stop)].zero_()

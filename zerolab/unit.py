"""FlatUnit: one group of parameters, laid end to end in one flat buffer, which can be cut into equal shards.

Sharding by whole parameters leaves ranks unbalanced and remainders unowned; a flat buffer can be cut
anywhere. Each parameter becomes a view into it, so the model never notices, and a collective moves the whole
group in one message. What is sharded, and when, is for the stages to say: a unit only knows how to lay out,
free, refill and cut.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from zerolab.sharded import ReducedGradient, Sharded

ALIGNMENT_BYTES = 64
"""Every parameter and every shard starts on such a boundary, as torch's own allocations do: with weights that
start elsewhere, small CPU matrix products take another kernel and the last bits differ from plain PyTorch's.
"""


@dataclass(frozen=True, eq=False)
class Span:
    """Where one parameter lies: ``flat[offset : offset + numel]``."""

    name: str
    parameter: nn.Parameter
    offset: int

    @property
    def numel(self) -> int:
        return self.parameter.numel()

    @property
    def stop(self) -> int:
        return self.offset + self.numel

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    def within(self, start: int, stop: int) -> slice:
        """The part of ``flat[start:stop]`` that is this parameter's, counted from ``start``; it may be empty."""
        low = min(max(self.offset, start), stop)
        high = max(min(self.stop, stop), low)
        return slice(low - start, high - start)


class FlatUnit:
    """The flat buffers of one group of parameters, all trainable or all frozen, of one dtype.

    Attributes, with P = padded_numel and S = the numel of the owned range:
        flat: [P] the parameters, every one a view of it. Its storage may be away; `whole` tells. owned: the
        range of ``flat`` whose gradient this rank keeps and whose parameters it updates; its stage chooses.
        shard: [S] what the optimizer updates: a view of ``flat[owned]``, or a tensor of its own at stage 3.
        local_grads: [P] this rank's own gradients on their way to the reduction, or None. grads: [S] the sum
        over ranks (and micro-batches) of the gradients of ``owned``, or None. filled: the spans with a
        gradient in ``local_grads``; used: those with one anywhere since the last zero_grad.
    """

    def __init__(
        self, name: str, index: int, named_parameters: list[tuple[str, nn.Parameter]], world_size: int
    ):
        parameters = [parameter for _, parameter in named_parameters]
        self.name, self.index = name, index
        self.trainable = parameters[0].requires_grad
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        align = ALIGNMENT_BYTES // self.dtype.itemsize
        self.spans: list[Span] = []
        stop = 0
        for parameter_name, parameter in named_parameters:
            self.spans.append(Span(parameter_name, parameter, stop))
            stop += _round_up(parameter.numel(), align)
        self.numel = sum(span.numel for span in self.spans)
        self.shard_numel = _round_up(math.ceil(stop / world_size), align)
        self.padded_numel = self.shard_numel * world_size
        self.world_size = world_size
        self.owned = slice(0, self.padded_numel)
        self.local_grads: torch.Tensor | None = None
        self.grads: torch.Tensor | None = None
        self.averaged = False
        self.filled: set[Span] = set()
        self.used: set[Span] = set()
        self._markers: dict[Span, ReducedGradient] = {}
        self._versions: tuple[int, ...] = ()
        self._described: dict[tuple[int, int], tuple[str, ...]] = {}
        self.whole = True
        self.flat = self._adopt()
        self.shard = self.flat

    def _adopt(self) -> torch.Tensor:
        """Copy the parameters into a new flat buffer and make each a view of it. Padding is zero."""
        flat = torch.zeros(self.padded_numel, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            for span in self.spans:
                view = flat[span.offset : span.stop].view(span.shape)
                view.copy_(span.parameter)
                span.parameter.data = view
        return flat

    def own(self, owned: slice) -> None:
        """Choose the range this rank keeps and updates; until it is detached, ``shard`` is a view of
        ``flat``.
        """
        self.owned = owned
        self.shard = self.flat[owned]

    # Parameters: whole, or away.

    def detach_shard(self) -> None:
        """Give the shard a storage of its own, so that the flat buffer can be freed around it."""
        self.shard = self.flat[self.owned].clone()

    def free(self) -> None:
        """Let the flat storage go and put `Sharded` in the parameters' place.

        The version counters move on, so that a backward pass that would read the freed storage, because
        nothing told the engine to refill it, ends in autograd's error and not in a crash. Memory: 4P bytes
        less in fp32.
        """
        parameters = [span.parameter for span in self.spans]
        self._versions = tuple(parameter._version for parameter in parameters)
        torch.autograd.graph.increment_version(parameters)
        for parameter in parameters:
            parameter.__class__ = Sharded
        self.flat.untyped_storage().resize_(0)
        self.whole = False

    def refill(self) -> None:
        """Bring the flat storage back with the own shard in place; the rest is for an all-gather to fill."""
        self.flat.untyped_storage().resize_(self.padded_numel * self.dtype.itemsize)
        self.flat[self.owned].copy_(self.shard)

    def reveal(self) -> None:
        """After refill and gather: let the model use its parameters again, saved activations' references
        included.
        """
        parameters = tuple(span.parameter for span in self.spans)
        for parameter in parameters:
            parameter.__class__ = nn.Parameter
        torch._C._autograd._unsafe_set_version_counter(parameters, self._versions)
        self.whole = True

    def write_back(self) -> None:
        """Keep in the shard what was written to the whole parameters while they were there."""
        if self.shard.untyped_storage()._cdata != self.flat.untyped_storage()._cdata:
            self.shard.copy_(self.flat[self.owned])

    def mark_updated(self) -> None:
        """Move the version counters on, so that backward through a forward from before the update is an
        error.
        """
        if self.whole:
            torch.autograd.graph.increment_version([span.parameter for span in self.spans])
        else:
            self._versions = tuple(version + 1 for version in self._versions)

    # Gradients: collected locally, then reduced.

    def collect(self, span: Span) -> None:
        """Move one parameter's fresh gradient into ``local_grads``, adding to what no_sync left there.

        Memory: P elements from the first gradient on; the parameter's own gradient tensor is let go at once.
        """
        if not self.filled:
            self._open_local_grads()
        gradient, span.parameter.grad = span.parameter.grad, None
        if gradient.layout != torch.strided:
            raise RuntimeError(f"{span.name} has a sparse gradient: build its module with sparse=False")
        place = self.local_grads[span.offset : span.stop].view(span.shape)
        if span in self.filled:
            place += gradient
        else:
            place.copy_(gradient)
            self.filled.add(span)
        self.used.add(span)

    def _open_local_grads(self) -> None:
        """A buffer for this rank's gradients: a new one, or the one that holds the last reduction's result,
        moved out.
        """
        if self.local_grads is None:
            self.local_grads = torch.empty(self.padded_numel, dtype=self.dtype, device=self.device)
        elif self.grads is not None:
            self.grads = self.grads.clone()

    def fill_gaps(self) -> None:
        """Zero what no gradient was written to, padding included: an unused parameter counts as zero in the
        mean.
        """
        if not self.filled:
            self._open_local_grads()
        stop = 0
        for span in self.spans:
            if span in self.filled:
                self.local_grads[stop : span.offset].zero_()
                stop = span.stop
        self.local_grads[stop:].zero_()

    def keep_grads(self, reduced: torch.Tensor) -> None:
        """Take the reduced gradients of ``owned``, on top of those of earlier micro-batches."""
        if self.grads is not None:
            reduced += self.grads * self.world_size if self.averaged else self.grads
        self.grads, self.averaged = reduced, False
        self.filled.clear()

    def average(self) -> None:
        """Divide the sum by N, once, however often it is asked for."""
        if not self.averaged:
            self.grads /= self.world_size
            self.averaged = True

    def free_local_grads(self) -> None:
        """Let this rank's unreduced gradients go."""
        self.local_grads = None

    def clear_grads(self) -> None:
        """Forget every gradient, as zero_grad does."""
        self.local_grads = self.grads = None
        self.averaged = False
        self.filled.clear()
        self.used.clear()
        for span in self.spans:
            span.parameter.grad = None

    def zero_grads(self) -> None:
        """Set every gradient to zero and keep it, as zero_grad(set_to_none=False) does."""
        self.filled.clear()
        if self.grads is not None:
            self.grads.zero_()

    # The markers in parameter.grad, by which the user's own zero_grad is noticed.

    def place_markers(self) -> None:
        """Leave a `ReducedGradient` in the place of every gradient this unit holds."""
        for span in self.used:
            if span not in self._markers:
                self._markers[span] = ReducedGradient(span.parameter)
            span.parameter.grad = self._markers[span]

    def notice_cleared(self) -> None:
        """Where a marker is gone, the user cleared that gradient, with model.zero_grad() say: forget it here
        too.
        """
        for span in [span for span in self.used if span.parameter.grad is None]:
            self._forget(span)

    def lift_markers(self) -> None:
        """Take the markers away before a backward pass, so that autograd can put gradients there."""
        self.notice_cleared()
        for span in self.used:
            span.parameter.grad = None

    def _forget(self, span: Span) -> None:
        self.used.discard(span)
        self.filled.discard(span)
        if self.grads is not None:
            self.grads[span.within(self.owned.start, self.owned.stop)].zero_()

    # Seen from outside.

    def describe(self, start: int, stop: int) -> tuple[str, ...]:
        """The parameter slices in ``flat[start:stop]``, each counted in its parameter's own elements."""
        if (start, stop) not in self._described:
            pieces = []
            for span in self.spans:
                part = span.within(start, stop)
                if part.stop > part.start:
                    first = start + part.start - span.offset
                    pieces.append(f"{span.name}[{first}:{first + part.stop - part.start}]")
            self._described[start, stop] = tuple(pieces)
        return self._described[start, stop]

    def __repr__(self) -> str:
        kind = "trainable" if self.trainable else "frozen"
        return f"FlatUnit({self.name!r}, {kind}, {len(self.spans)} parameters, {self.numel} + {self.padded_numel - self.numel} padding)"


def _round_up(numel: int, multiple: int) -> int:
    return math.ceil(numel / multiple) * multiple

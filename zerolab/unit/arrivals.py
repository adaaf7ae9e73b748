"""Arrivals: gradients from autograd that have not been moved into the unit's flat buffer yet."""

import torch

from zerolab.unit.producers import Producers
from zerolab.unit.span import Span

MOVED_TOGETHER = 2**12
"""Gradients are moved when there are this many elements of them: a call for each bias and each norm's weight
would take most of a short step's time.
"""

ZEROS = 2**4
"""How many zeros a unit keeps for its padding. Longer padding takes them several times. One zero that is
expanded would need less memory, but is not contiguous: torch.cat then takes twice as long on CPUs.
"""


class Arrivals:
    """The gradients of one unit that wait to be moved, each in the tensor that autograd stored it in.

    Attributes:
        producers: the GPU streams that gradients came on.
        held_bytes: what the tensors that wait take.
    Memory: fewer elements than `MOVED_TOGETHER`, beside the gradient that comes.
    """

    def __init__(self, spans: list[Span], padded_numel: int, dtype: torch.dtype, device: torch.device):
        self.producers = Producers(device)
        self._waiting: dict[Span, torch.Tensor] = {}
        self.held_bytes = self._numel = 0
        self._spans = spans
        self._contiguous = all(span.layout.is_contiguous() for span in spans)
        stops = [*(span.offset for span in spans[1:]), padded_numel]
        gaps = {span: slice(span.stop, stop) for span, stop in zip(spans, stops, strict=True)}
        self._padding = {span: gap for span, gap in gaps.items() if gap.start < gap.stop}
        zeros = torch.zeros(ZEROS, dtype=dtype, device=device)
        self._zeros = {span: _repeated(zeros, gap.stop - gap.start) for span, gap in self._padding.items()}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The gradients that have not been moved yet."""
        return list(self._waiting.values())

    def add(self, span: Span, gradient: torch.Tensor) -> bool:
        """Take a gradient, on the stream it was computed on; whether it is time to move what waits."""
        self._waiting[span] = gradient
        self._numel += span.numel
        self.held_bytes += gradient.untyped_storage().nbytes()
        if self.producers.has_streams:
            self.producers.note()
        return self._numel >= MOVED_TOGETHER

    def move_one(self, span: Span, gradient: torch.Tensor, local: torch.Tensor, filled: set[Span]) -> None:
        """The same as `add` and `move` for a gradient that waits for no other."""
        part = span.view(local)
        if span in filled:
            part += gradient
        else:
            part.copy_(gradient)
            if span in self._padding:
                local[self._padding[span]].zero_()
            filled.add(span)
        self.producers.note()

    def move(self, local: torch.Tensor, filled: set[Span]) -> None:
        """Add what waits to the gradients in ``local`` of the spans that are ``filled``, and copy the rest.

        The padding after a gradient that is copied becomes zero.
        """
        self.producers.join(*self.tensors)
        copied = [span for span in self._waiting if span not in filled]
        added = [span for span in self._waiting if span in filled]
        if len(copied) == len(self._spans) and self._contiguous:
            self._concatenate(local)
        elif copied:
            gaps = [self._padding[span] for span in copied if span in self._padding]
            torch._foreach_copy_([span.view(local) for span in copied], [self._waiting[s] for s in copied])
            if gaps:
                torch._foreach_zero_([local[gap] for gap in gaps])
        if added:
            torch._foreach_add_([span.view(local) for span in added], [self._waiting[span] for span in added])
        filled.update(copied)
        self.producers.note()
        self.clear()

    def _concatenate(self, local: torch.Tensor) -> None:
        """Copy all gradients of the unit, and zeros between them, in one call that needs no view of each."""
        parts = []
        for span in self._spans:
            parts.append(self._waiting[span].flatten())
            parts.extend(self._zeros.get(span, ()))
        torch.cat(parts, out=local)

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        self.held_bytes = self._numel = 0


def _repeated(zeros: torch.Tensor, numel: int) -> list[torch.Tensor]:
    """``zeros`` as often as it fits into ``numel`` elements, and a part of it for the rest."""
    times, rest = divmod(numel, len(zeros))
    return [zeros] * times + ([zeros[:rest]] if rest else [])

"""Arrivals: gradients that autograd has brought, until they are moved into the unit's flat buffer."""

import torch

from zerolab.unit.producers import Producers
from zerolab.unit.span import Span

MOVED_TOGETHER = 2**16
"""Gradients are moved when there are this many elements of them, or as many as the unit's largest parameter
has. A call for each small gradient would take most of a short step's time.
"""


class Arrivals:
    """The gradients of one unit that wait to be moved, each in the tensor that autograd stored it in.

    Attributes: producers: the GPU streams that gradients came on.
    Memory: fewer elements than `MOVED_TOGETHER` or than the unit's largest parameter; and zeros for padding.
    """

    def __init__(self, spans: list[Span], padded_numel: int, dtype: torch.dtype, device: torch.device):
        self.producers = Producers(device)
        self._waiting: dict[Span, torch.Tensor] = {}
        self._numel = 0
        self._most = max(MOVED_TOGETHER, *(span.numel for span in spans))
        stops = [*(span.offset for span in spans[1:]), padded_numel]
        self._padding = {span: slice(span.stop, stop) for span, stop in zip(spans, stops, strict=True)}
        largest = max(stop - span.stop for span, stop in zip(spans, stops, strict=True))
        self._zeros = torch.zeros(largest, dtype=dtype, device=device)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, span: Span, gradient: torch.Tensor) -> bool:
        """Take a gradient, on the stream it was computed on; whether it is time to move what waits."""
        self._waiting[span] = gradient
        self._numel += span.numel
        self.producers.note()
        return self._numel >= self._most

    def move(self, local: torch.Tensor, filled: set[Span]) -> None:
        """Add what waits to the gradients in ``local`` of the spans that are ``filled``, and copy the rest.

        The padding after a gradient that is copied becomes zero.
        """
        self.producers.join(*self._waiting.values())
        copied = [span for span in self._waiting if span not in filled]
        added = [span for span in self._waiting if span in filled]
        if copied:
            padding = [part for span in copied if (part := self._padding[span]).start < part.stop]
            zeros = [self._zeros[: part.stop - part.start] for part in padding]
            places = [span.view(local) for span in copied] + [local[part] for part in padding]
            torch._foreach_copy_(places, [self._waiting[span] for span in copied] + zeros)
        if added:
            torch._foreach_add_([span.view(local) for span in added], [self._waiting[span] for span in added])
        filled.update(copied)
        self.producers.note()
        self.clear()

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        self._numel = 0

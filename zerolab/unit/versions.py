"""Versions: the version counters of a unit's parameters, which tell whether somebody wrote to them.

PyTorch increases a tensor's counter at every write in place, other than one through ``.data``. The engine's
own writes go to the flat buffer, whose counter is another one.
"""

import torch

from zerolab.unit.span import Span


class Versions:
    """The counters of one unit, as they were when its values were last taken note of."""

    def __init__(self, spans: list[Span]):
        self._spans = spans
        self.note()

    def note(self) -> None:
        """Take the parameters' values as they are now: writes until now are known."""
        self._noted = tuple(span.parameter._version for span in self._spans)

    def written(self) -> Span | None:
        """The first parameter that was written to since `note`."""
        noted = zip(self._spans, self._noted, strict=True)
        return next((span for span, version in noted if span.parameter._version != version), None)

    def spoil(self) -> None:
        """Before the storage is freed: a backward pass that would read it ends in autograd's error."""
        torch.autograd.graph.increment_version([span.parameter for span in self._spans])

    def restore(self) -> None:
        """The storage is there again with the same values: set the counters back."""
        parameters = tuple(span.parameter for span in self._spans)
        torch._C._autograd._unsafe_set_version_counter(parameters, self._noted)

    def advance(self, updated: set[Span], whole: bool) -> None:
        """These parameters were updated: backward through an older forward that used them has to fail."""
        if whole:
            torch.autograd.graph.increment_version([s.parameter for s in self._spans if s in updated])
            self.note()
        else:
            noted = zip(self._spans, self._noted, strict=True)
            self._noted = tuple(version + (span in updated) for span, version in noted)

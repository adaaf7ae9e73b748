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

    def advance(self, whole: bool) -> None:
        """The values were updated: increase the counters, so that backward through an older forward fails."""
        if whole:
            self.spoil()
            self.note()
        else:
            self._noted = tuple(version + 1 for version in self._noted)

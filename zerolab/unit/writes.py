"""Writes: detect writes to the parameters of one unit that the engine did not make.

PyTorch increases a tensor's version counter at every write in place, and a `WatchedParameter` has another for
writes through ``.data``. The engine's own writes go to the flat buffer, whose counter is neither. Writes by
code other than PyTorch's are found only where the values are compared, which takes time.
"""

from collections.abc import Callable

import torch

from zerolab.unit.span import Span
from zerolab.unit.watched_parameter import DataAliases


class Writes:
    """The version counters of one unit, as they were when its values were last taken note of.

    Attributes:
        compare_next: whether to compare the values too, when the flat buffer is freed next.
        data: what ``parameter.data`` returned, with counters of its own.
    """

    def __init__(self, unit: str, spans: list[Span]):
        self._unit, self._spans = unit, spans
        self._parameters = tuple(span.parameter for span in spans)
        self.data = DataAliases(self._parameters)
        self.compare_next = False
        self.note()

    def note(self) -> None:
        """Take the parameters' values as they are now: writes until now are known."""
        self._noted = self._versions()
        self._noted_data = self.data.versions()
        self._gathered: bytes | None = None

    def _versions(self) -> tuple[int, ...]:
        return tuple([parameter._version for parameter in self._parameters])

    def written(self) -> Span | None:
        """Return the first parameter that was written to since `note`, directly or through ``.data``."""
        versions = self._versions()
        now_data = self.data.versions().items()
        through_data = {key[0] for key, version in now_data if version != self._noted_data.get(key, 0)}
        if versions == self._noted and not through_data:
            return None
        rows = zip(self._spans, versions, self._noted, strict=True)
        return next(span for span, now, then in rows if now != then or id(span.parameter) in through_data)

    def refuse(self, checksum: Callable[[], bytes]) -> None:
        """Before the flat buffer is freed, with what was written to it.

        Args: checksum: gives that of the whole parameters.
        Raises: RuntimeError where something was written.
        """
        span, gathered = self.written(), self._gathered
        if span is None and gathered is None:
            return
        if span is None and gathered == checksum():
            self.compare_next = False
            return
        self.note()  # this error is raised once
        what = f"parameter {span.name}" if span else f"a parameter of unit {self._unit}"
        raise RuntimeError(
            f"{what} was written to while it was gathered, and at stage 3 the written values are lost when "
            "it is sharded again. Write inside `with optimizer.full_params():`, between steps. If forward "
            "itself writes to its weights, as nn.Embedding(max_norm=...) and clamping do, take stage 2, "
            "where forward may write the same values on every rank"
        )

    def spoil(self) -> None:
        """Before the storage is freed: a backward pass that would read it ends in autograd's error."""
        torch.autograd.graph.increment_version(self._parameters)

    def restore(self, checksum: Callable[[], bytes]) -> None:
        """The storage is there again with the same values: set the counters back."""
        torch._C._autograd._unsafe_set_version_counter(self._parameters, self._noted)
        self._gathered = checksum() if self.compare_next else None

    def advance(self, updated: set[Span], whole: bool) -> None:
        """These parameters were updated: backward through an older forward that used them has to fail."""
        if whole:
            torch.autograd.graph.increment_version([s.parameter for s in self._spans if s in updated])
            self.note()
        else:
            noted = zip(self._spans, self._noted, strict=True)
            self._noted = tuple(version + (span in updated) for span, version in noted)

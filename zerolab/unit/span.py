"""Span: where one parameter lies in its unit's flat buffer."""

from dataclasses import dataclass

from torch import nn


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
        """The part of ``flat[start:stop]`` that is this parameter's, counted from ``start``. May be empty."""
        low = min(max(self.offset, start), stop)
        high = max(min(self.stop, stop), low)
        return slice(low - start, high - start)

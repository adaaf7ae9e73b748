"""Matrices: what Muon updates of a model, which ranks own whole, where other parameters are cut."""

from dataclasses import dataclass

from zerolab import memory


@dataclass(frozen=True)
class Matrices:
    """The matrices in a GPT's blocks: 3h x h and h x h in attention, 4h x h and h x 4h in the MLP.

    Attributes:
        layers, hidden: how many blocks there are, and their width h.
        k: bytes of optimizer state for each of their parameters.
    """

    layers: int
    hidden: int
    k: float

    @property
    def sizes(self) -> list[int]:
        """How many parameters each has."""
        return [multiple * self.hidden**2 for multiple in (3, 1, 4, 4)] * self.layers

    @property
    def psi(self) -> int:
        return sum(self.sizes)

    def largest_share(self, ranks: int) -> float:
        """The part of them on the rank that owns most: 1/N where they can be shared evenly."""
        return memory.largest_share(self.sizes, ranks)

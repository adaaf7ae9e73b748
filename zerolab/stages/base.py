"""Stage: the six methods that a stage is made of. The engine decides WHEN they run, a stage WHAT they do."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from zerolab.collectives import Comm, Work
from zerolab.unit import FlatUnit


class Stage(ABC):
    """What one rank keeps of each unit, and how it gets the rest.

    The methods are in the order in which a training step calls them for a unit.

    Attributes:
        comm: the ranks over which it shards: all data-parallel ranks, or with hybrid sharding a part of them.
        copies: with hybrid sharding the ranks that own the same part of the model as this one, or None.
    """

    def __init__(self, comm: Comm):
        self.comm = comm
        self.copies: Comm | None = None

    @abstractmethod
    def setup(self, unit: FlatUnit) -> None:
        """Once: choose the range this rank owns, and free what it need not keep."""

    @abstractmethod
    def unshard(self, unit: FlatUnit) -> Work:
        """Before a unit's forward or backward, where its parameters are sharded: make them whole."""

    @abstractmethod
    def reshard(self, unit: FlatUnit) -> None:
        """After a unit's forward or backward: free the parameters that are not this rank's."""

    @abstractmethod
    def reduce_grads(self, unit: FlatUnit) -> Work:
        """When all of a unit's gradients are there: reduce them over the ranks, to ``unit.grads.op``."""

    @abstractmethod
    def after_reduce(self, unit: FlatUnit) -> None:
        """When the result is there: keep what this rank's update needs."""

    def share(self, unit: FlatUnit) -> slice:
        """The part of a unit that is this rank's: each element is on one rank only.

        Stages 1 to 3 own it. At all stages this rank counts it in norms and writes it into checkpoints.
        """
        return self.comm.shard_range(unit.padded_numel, cuts=unit.cuts)

    @abstractmethod
    def update(self, units: list[FlatUnit], step: Callable[[FlatUnit], None]) -> None:
        """Update what this rank owns of each unit by calling ``step`` with it.

        Where ranks keep whole parameters, start to send them the result.
        """

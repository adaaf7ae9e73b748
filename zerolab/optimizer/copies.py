"""Hybrid sharding: divide the ranks of a training into groups that have a copy of the model each."""

from collections.abc import Callable

from zerolab.collectives import Comm, connect, subgroup
from zerolab.stages.base import Stage
from zerolab.stages.hybrid import HybridStage3
from zerolab.stages.stage3 import Stage3

HYBRID: dict[type[Stage], Callable[[Comm, Comm], Stage]] = {Stage3: HybridStage3}
"""By the class that shards over all ranks, the one that shards over groups of them."""


def check_shard_size(shard_size: int | None, stage_class: type[Stage], world_size: int) -> None:
    """Refuse groups that do not divide the ranks, and other stages. Raises: TypeError, ValueError."""
    if shard_size is None:
        return
    way_out = (
        f"shard_size is {shard_size!r}: pass how many ranks share one copy of the parameters, a divisor of "
        f"the {world_size} ranks, such as the GPUs of a node; or None, and all ranks share one"
    )
    if isinstance(shard_size, bool) or not isinstance(shard_size, int):
        raise TypeError(way_out)
    if shard_size < 1 or world_size % shard_size:
        raise ValueError(way_out)
    if stage_class not in HYBRID:
        raise ValueError(
            f"shard_size is {shard_size} at {stage_class.__name__}: hybrid sharding divides the parameters "
            "over a part of the ranks, so pass stage=3 with it, or leave shard_size out"
        )


def over_groups(shard_size: int | None, reduces_in_flight: int) -> str:
    """Return the settings of hybrid sharding in words, because they have to be equal on every rank.

    With two collectives for a reduction ``reduces_in_flight`` decides when the second one is issued.
    """
    if shard_size is None:
        return ""
    return f" over groups of {shard_size} ranks, reduces_in_flight {reduces_in_flight},"


def connect_stage(stage_class: type[Stage], shard_size: int | None, comm: Comm) -> Stage:
    """Return the stage over all ranks; or over groups of consecutive ranks, after connecting this rank's two.

    Args: comm: all ranks of the training.
    """
    if shard_size is None:
        return stage_class(comm)
    first = comm.rank - comm.rank % shard_size
    group = range(first, first + shard_size)
    same_part = range(comm.rank % shard_size, comm.world_size, shard_size)
    return HYBRID[stage_class](_part(comm, group), _part(comm, same_part))


def _part(comm: Comm, places: range) -> Comm:
    """Connect the ranks at these places among all ranks."""
    group = subgroup(comm.group, places)
    part = connect(group, comm.device, comm.trace, comm.meter, comm.bucket_bytes, whole=comm)
    part.numbers = places
    return part

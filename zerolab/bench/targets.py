"""The project's targets, set before the measurements: each with what was measured.

They were set for the 11M GPT on two ranks and two cores. On other machines and sizes the same targets are
printed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from zerolab import cost
from zerolab.bench.contestants import FLOOR
from zerolab.bench.footprint import Footprint
from zerolab.bench.ratios import Spread, pairwise

OF_DDP, OF_DEEPSPEED, OF_STAGE_3 = 1.00, 0.70, 0.75
OF_WIRE_MINIMUM = 1.02
OF_PLAIN_LOOP = 1.03  # on one rank: the engine may add 3 % to a step


@dataclass(frozen=True)
class Target:
    """``found``, of one contestant, should be at most ``bound``; quartiles where it was timed.

    ``floor``: what it would be for a contestant that never communicates: no engine can be below.
    """

    contestant: str
    what: str
    bound: float
    found: float
    quartiles: tuple[float, float] | None = None
    floor: float | None = None

    @property
    def held(self) -> bool:
        return self.found <= self.bound

    @property
    def verdict(self) -> str:
        return "held" if self.held else f"missed by {self.found - self.bound:.3f}"


def times(seconds: Mapping[str, list[float]]) -> Iterator[Target]:
    """The targets of a race, for those contestants that took part."""
    data_parallel = [name for name in ("ddp", "ddp+zero") if name in seconds]
    better = min(data_parallel, key=lambda name: median(seconds[name]), default="")
    wanted = [
        ("zerolab-0", "ddp", OF_DDP),
        ("zerolab-1", better, OF_DDP),
        ("zerolab-1", "deepspeed-1", OF_DEEPSPEED),
        ("zerolab-2", better, OF_DDP),
        ("zerolab-2", "deepspeed-2", OF_DEEPSPEED),
        ("zerolab-3", "fully_shard", OF_STAGE_3),
        ("zerolab-3", "deepspeed-3", OF_STAGE_3),
    ]
    for ours, theirs, bound in wanted:
        if ours in seconds and theirs in seconds:
            floor = pairwise(seconds[FLOOR], seconds[theirs]).median if FLOOR in seconds else None
            ratio = pairwise(seconds[ours], seconds[theirs])
            yield _timed(ours, f"step, of {theirs}'s", bound, ratio, floor)


def on_one_rank(ratios: Mapping[str, Spread]) -> Iterator[Target]:
    """The engine's own share, where nothing is sent."""
    for name, ratio in ratios.items():
        yield _timed(name, "step on one rank, of the plain loop's", OF_PLAIN_LOOP, ratio)


def bytes_held_and_sent(
    found: Mapping[str, Footprint], stages: Mapping[str, int], psi: int, world_size: int
) -> Iterator[Target]:
    """Bytes on the wire against the least that can do it, and states against the formula."""
    for name, stage in stages.items():
        if name not in found:
            continue
        least, held = minimum_wire_bytes(psi, world_size, stage), found[name]
        if held.wire_bytes is not None and least:
            yield Target(name, "bytes sent, of the minimum", OF_WIRE_MINIMUM, held.wire_bytes / least)
        assert held.states_bytes is not None and held.formula_bytes is not None  # as for zerolab's own
        off_bytes = abs(held.states_bytes - held.formula_bytes)
        yield Target(name, "bytes of states off the formula", 0.5, off_bytes)  # the formula may end in halves


def minimum_wire_bytes(psi: int, world_size: int, stage: int) -> float:
    """(N-1)/N of 2Ψ or 3Ψ in fp32: what each rank must send, however it is done."""
    return cost.wire_bytes(4 * cost.communication_volume(psi, stage), world_size, "all_gather")


def _timed(contestant: str, what: str, bound: float, ratio: Spread, floor: float | None = None) -> Target:
    return Target(contestant, what, bound, ratio.median, (ratio.low, ratio.high), floor)

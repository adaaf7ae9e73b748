"""Collect the measurements of one table, and write all of them as JSON."""

from dataclasses import asdict, dataclass, field

from zerolab.bench import targets
from zerolab.bench.contestants import FLOOR
from zerolab.bench.footprint import Footprint
from zerolab.bench.links import Link
from zerolab.bench.overhead import Shares
from zerolab.bench.race import Result
from zerolab.bench.ratios import Spread, pairwise, spread
from zerolab.bench.sweep import Point
from zerolab.bench.targets import Target
from zerolab.optimizer import STAGES

STAGE_OF = {f"zerolab-{stage}": stage for stage in STAGES}


@dataclass
class Table:
    """One table: everybody with the same update.

    Attributes:
        race: by contestant, in the order in which they are listed.
        absent: why a contestant did not take part.
        footprints, one_rank, shares: what footprint.py and overhead.py found, by contestant.
    """

    update: str
    psi: int
    world_size: int
    race: Result
    absent: dict[str, str]
    footprints: dict[str, Footprint]
    one_rank: dict[str, Spread]
    shares: dict[str, Shares]

    @property
    def baseline(self) -> str:
        """Whose steps the ratios are of: DDP's, or the first one's where it does not take part."""
        return "ddp" if "ddp" in self.race.seconds else next(iter(self.race.seconds))

    @property
    def reference(self) -> str:
        """Whose parameters the others' are compared with: see `Result.differences`."""
        return next((name for name in self.race.seconds if name != FLOOR), FLOOR)

    def seconds(self, name: str) -> Spread:
        return spread(self.race.seconds[name])

    def ratio(self, name: str) -> Spread:
        return pairwise(self.race.seconds[name], self.race.seconds[self.baseline])

    def targets(self) -> list[Target]:
        return [
            *targets.times(self.race.seconds),
            *targets.on_one_rank(self.one_rank),
            *targets.bytes_held_and_sent(self.footprints, STAGE_OF, self.psi, self.world_size),
        ]

    def as_json(self) -> dict:
        """Everything measured, and what follows from it."""
        contestants = {
            name: {
                "step_seconds": asdict(self.seconds(name)),
                f"of_{self.baseline}": asdict(self.ratio(name)),
                "rounds_seconds": self.race.seconds[name],
                "rounds_cpu_seconds": self.race.cpu_seconds[name],
                "parameters_off_by": self.race.differences.get(name),
                **asdict(self.footprints[name]),
            }
            for name in self.race.seconds
        }
        for name, reason in self.absent.items():
            contestants[name] = {"absent": reason}
        return {
            "update": self.update,
            "psi": self.psi,
            "world_size": self.world_size,
            "contestants": contestants,
            "of_plain_loop_on_one_rank": {name: asdict(each) for name, each in self.one_rank.items()},
            "main_thread_seconds": {name: asdict(each) for name, each in self.shares.items()},
            "targets": [asdict(each) | {"held": each.held} for each in self.targets()],
        }


@dataclass
class Report:
    """All of one run."""

    machine: dict
    settings: dict
    tables: list[Table] = field(default_factory=list)
    by_ranks: list[Point] = field(default_factory=list)
    by_parameters: list[Point] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)

    def as_json(self) -> dict:
        return {
            "machine": self.machine,
            "settings": self.settings,
            "tables": {table.update: table.as_json() for table in self.tables},
            "sweep": {
                "by_ranks": [asdict(point) for point in self.by_ranks],
                "by_parameters": [asdict(point) for point in self.by_parameters],
            },
            "links": [link.as_json() for link in self.links],
        }

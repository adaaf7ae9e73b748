"""One race for each rate of the cables between hosts: what a step takes beside the least that it can."""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from zerolab.bench.cable import race_over
from zerolab.bench.contestants import FLOOR
from zerolab.bench.hosts import hold, hosts
from zerolab.bench.race import Result, Settings
from zerolab.bench.ratios import Spread, pairwise, spread

UNLIMITED = "unlimited"
_UNITS = {"Gbit": 1e9, "Mbit": 1e6}


def parse_rate(text: str) -> float | None:
    """Bits per second and direction from "1Gbit" or "400Mbit"; None from "unlimited".

    Raises: ValueError for anything else, and for less than 1 Mbit/s.
    """
    if text == UNLIMITED:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(Gbit|Mbit)", text)
    rate = float(match[1]) * _UNITS[match[2]] if match else 0
    if rate < 1e6:
        known = f"write a rate of at least 1Mbit, as 1Gbit or 400Mbit, or {UNLIMITED}"
        raise ValueError(f"--link is {text!r}: {known}")
    return rate


def in_words(bits_per_second: float | None) -> str:
    """Return a rate as it is written."""
    if bits_per_second is None:
        return UNLIMITED
    unit = "Gbit" if bits_per_second >= 1e9 else "Mbit"
    return f"{bits_per_second / _UNITS[unit]:g}{unit}"


@dataclass(frozen=True)
class Link:
    """A race over cables of one rate.

    Attributes: bits_per_second: in each direction; None where nothing held it.
    """

    bits_per_second: float | None
    race: Result

    @property
    def gigabits(self) -> float:
        """Gbit/s in each direction; 0 where nothing held it."""
        return (self.bits_per_second or 0) / 1e9

    @property
    def names(self) -> list[str]:
        return list(self.race.seconds)

    @property
    def baseline(self) -> str:
        """Whose steps the ratios are of: DDP's, or the first one's where it does not take part."""
        return "ddp" if "ddp" in self.race.seconds else self.names[0]

    def seconds(self, name: str) -> Spread:
        return spread(self.race.seconds[name])

    def ratio(self, name: str) -> Spread:
        return pairwise(self.race.seconds[name], self.race.seconds[self.baseline])

    def sent_bytes(self, name: str) -> float:
        """What a cable carried in one direction in a step, by its own counter."""
        return median(self.race.sent_bytes[name])

    def messages(self, name: str) -> float:
        """Seconds that the cable needs for the bytes; none where its rate is not held."""
        return 8 * self.sent_bytes(name) / self.bits_per_second if self.bits_per_second else 0.0

    def over_least(self, name: str) -> Spread | None:
        """A step over the least that it can take, which computes and sends at once; None without the floor.

        Round by round: that is the floor's step of the same round, or `messages` if these take longer.
        """
        if FLOOR not in self.race.seconds:
            return None
        floor, messages = self.race.seconds[FLOOR], self.messages(name)
        return pairwise(self.race.seconds[name], [max(each, messages) for each in floor])

    def as_json(self) -> dict:
        return {
            "bits_per_second": self.bits_per_second,
            "rounds_seconds": self.race.seconds,
            "rounds_cpu_seconds": self.race.cpu_seconds,
            "rounds_sent_bytes": self.race.sent_bytes,
            "parameters_off_by": self.race.differences,
        }


def by_rate(settings: Settings, rates: list[float | None]) -> Iterator[Link]:
    """Race once for each rate, on as many hosts as there are ranks.

    Raises: Unavailable where this machine cannot make hosts; RaceFailed.
    """
    with tempfile.TemporaryDirectory() as folder, hosts(settings.world_size, Path(folder)) as made:
        for rate in rates:
            hold(made, rate)
            title = f"{in_words(rate)} between hosts"
            yield Link(rate, race_over(made, replace(settings, title=title, on_hosts=True), Path(folder)))

"""Which rule a wrong sum follows on all wrong ranks: whose numbers count how often in it.

The factors of one rank say what is missing there. The rule behind them shows where the ranks are compared:
its own numbers twice, the last other rank alone, another chunk, or the numbers of an earlier step.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerolab.course.reading import Factors, present

Wrong = Mapping[int, tuple[Factors, Factors]]
"""By rank: how often each part counts, and how often it should."""


class Part(NamedTuple):
    """Whose numbers a part is, of which step or micro-batch, and of which chunk; -1 where it has none."""

    rank: int
    time: int
    chunk: int


Ratios = Mapping[Part, float]
Ranks = Sequence[tuple[int, Ratios]]
"""Of each wrong value: the rank whose shard it is, and how many times what it should each part counts."""


def rule(wrong: Wrong, owner: int | None = None) -> str | None:
    """The rule that the factors of all wrong ranks follow. `owner`: whose shard all of them are about."""
    ranks = [(rank if owner is None else owner, _ratios(*factors)) for rank, factors in wrong.items()]
    extra = [_extra(*factors) for factors in wrong.values()]
    if any(extra):
        return _of_another_chunk(ranks, extra)
    for own, ratios in ranks:
        if own not in {part.rank for part in ratios} or any(part.rank < 0 for part in ratios):
            return None
    names = [name for have, _ in wrong.values() for name in have]
    unit = next((word for word in ("step", "micro-batch") if any(f"{word} " in name for name in names)), "")
    return _own_again(ranks) or _one_other(ranks) or _own_alone(ranks, unit) or _of_times(ranks, unit)


def _part(name: str) -> Part:
    found = (re.search(word + r" (\d+)", name) for word in ("^rank", "(?:step|micro-batch)", "chunk"))
    return Part(*(int(each[1]) if each else -1 for each in found))


def _ratios(have: Factors, should: Factors) -> dict[Part, float]:
    """By part, how many times what it should the part counts; a part of no rank is there only if wrong."""
    found = {_part(name): round(have[name] / should[name], 4) for name in present(should)}
    return {part: ratio for part, ratio in found.items() if part.rank >= 0 or ratio != 1}


def _extra(have: Factors, should: Factors) -> list[Part]:
    wanted = present(should)
    return [_part(name) for name in present(have) if name not in wanted]


def _of_another_chunk(ranks: Ranks, extra: list[list[Part]]) -> str | None:
    """Whether each rank that is missing is there with another chunk."""
    for (_, ratios), others in zip(ranks, extra, strict=True):
        missing = sorted(part.rank for part, ratio in ratios.items() if not ratio)
        if not missing or missing != sorted(part.rank for part in others) or others[0].chunk < 0:
            return None
    return (
        "numbers of other chunks are added to this chunk. The chunk that a rank sends has to be the one that "
        "the next rank adds it to, in the same round"
    )


def _own_again(ranks: Ranks) -> str | None:
    """Whether each rank's own numbers count once more than those of the others."""
    for own, ratios in ranks:
        mine = {ratio for part, ratio in ratios.items() if part.rank == own}
        if mine != {2} or {ratio for part, ratio in ratios.items() if part.rank != own} != {1}:
            return None
    return "each rank adds its own numbers once more, and the sum over the ranks has them already"


def _one_other(ranks: Ranks) -> str | None:
    """Whether each rank has its own numbers and those of one other: the first one, or the last."""
    for word, place in (("first", 0), ("last", -1)):
        if all(_there(ratios) == {own, _others(ratios, own)[place]} for own, ratios in ranks):
            return (
                f"each rank has its own numbers and those of the {word} of the others alone. Add up all of "
                "them, one after the other, in the loop"
            )
    return None


def _there(ratios: Ratios) -> set[int]:
    return {part.rank for part, ratio in ratios.items() if ratio}


def _others(ratios: Ratios, own: int) -> list[int]:
    return sorted({part.rank for part in ratios} - {own}) or [own]


def _own_alone(ranks: Ranks, unit: str) -> str | None:
    """Whether the other ranks' numbers are missing, all of them or those from some time on."""
    begins = set()
    for own, ratios in ranks:
        missing = {part for part, ratio in ratios.items() if not ratio}
        begin = min((part.time for part in missing), default=None)
        if begin is None or missing != {p for p in ratios if p.rank != own and p.time >= begin}:
            return None
        begins.add(f", from {unit} {begin} on" if begin > 0 else "")
    return f"nothing of the other ranks is in it{begins.pop()}" if len(begins) == 1 else None


def _of_times(ranks: Ranks, unit: str) -> str | None:
    """Whether all ranks' numbers of a step or micro-batch count alike, and another number of times."""
    by_time = {part.time: ratio for _, ratios in ranks for part, ratio in ratios.items()}
    if any(by_time[part.time] != ratio for _, ratios in ranks for part, ratio in ratios.items()):
        return None
    counts = [by_time[time] for time in sorted(by_time)]
    if len(counts) < 2 or len(set(counts)) == 1:
        return None
    if counts[-1] == 0 and counts[0] == 2 and set(counts[1:-1]) <= {1}:
        return f"each update uses the numbers of the {unit} before, and the first of them twice"
    if set(counts) == {1, -1}:
        return "what should be added is subtracted"
    listed = ", ".join(f"{count + 0:g}" for count in counts)  # -0.0 + 0 is 0.0
    return f"from {unit} 0 to {unit} {len(counts) - 1} the numbers count {listed} times what they should"

"""Lesson 05's second exercise: what a wrong shard was made of, where no known mistake explains it.

Until the first wrong micro-batch `kept` is right. So a wrong value can be compared with `kept`, with the new
shard, and with what the other ranks had kept.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from zerolab.course.evidence import Finding, same
from zerolab.course.lessons.zero_stage_2.kept_sums import Case
from zerolab.course.reading import coefficients, factors, present

# What may be made of `kept` and the new shard, besides sums of multiples of them.
OF_BOTH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "`kept` times the new shard": torch.mul,
    "the smaller of `kept` and the new shard, element by element": torch.minimum,
    "`kept` divided by the new shard": torch.div,
    "the new shard divided by `kept`": lambda kept, new: new / kept,
    "`kept` with the new shard behind it": lambda kept, new: torch.cat([kept, new]),
    "the new shard with `kept` behind it": lambda kept, new: torch.cat([new, kept]),
    "`kept` and the new shard in a tensor of two rows": lambda kept, new: torch.stack([kept, new]),
}


def read(case: Case, findings: Sequence[Finding], micro: int) -> str | None:
    """Say what the ranks' first wrong values are made of."""
    finding = findings[micro]
    seen = [finding.seen[rank] for rank in finding.wrong]
    values = {
        rank: value for rank, value in zip(finding.wrong, seen, strict=True) if isinstance(value, Tensor)
    }
    if len(values) < len(seen):
        return None
    if all(_has_own_sum(case, rank, value, finding) for rank, value in values.items()):
        return (
            "it keeps the whole buffer after the reduction, and only this rank's chunk of that is a sum: "
            "keep a clone of the chunk, which ring.reduce_scatter returns"
        )
    if told := _of_partial_sums(finding, values):
        return told
    if not case.even:
        return _of_uneven(case, values)
    if micro == 0:
        return None
    before = findings[micro - 1].right
    return _of_others(finding, values, micro) or _of_two(finding, values, before)


def _of_partial_sums(finding: Finding, values: Mapping[int, Tensor]) -> str | None:
    """Whether every wrong rank has another chunk of flat, where the ring leaves the sums of a few ranks."""
    chunks = {}
    for rank, value in values.items():
        found = factors(value, finding.right[rank], finding.parts(rank))
        there = [tuple(map(int, re.findall(r"\d+", name))) for name in present(found[0])] if found else []
        peers = {int(re.findall(r"\d+", name)[0]) for name in found[1]} if found else set()
        here = {chunk for _, _, chunk in there}
        if len(here) != 1 or here == {rank} or {peer for peer, _, _ in there} == peers:
            return None
        chunks[rank] = here.pop()
    if not chunks:
        return None
    rank, chunk = next(iter(chunks.items()))
    return (
        f"rank {rank} keeps chunk {chunk} of flat. ring.reduce_scatter leaves rank r the sum in chunk r "
        "alone, and partial sums in the others: keep what it returns"
    )


def _has_own_sum(case: Case, rank: int, value: Tensor, finding: Finding) -> bool:
    """Whether a value is as long as flat, and right in the rank's chunk."""
    return value.shape == (case.numel,) and same(value[case.cut(rank)], finding.right[rank])


def _of_uneven(case: Case, values: Mapping[int, Tensor]) -> str:
    """All lengths that N divides were right before."""
    cut = "Chunk r is ring.chunks(numel, N)[r], whose parts differ by one"
    other = next((rank for rank, value in values.items() if value.shape != (case.length(rank),)), None)
    if other is None:
        return f"where N divides the length of flat the sums are right, and here they are not. {cut}"
    has, right = values[other].numel(), case.length(other)
    rest = case.numel % case.world_size
    last = "last element is" if rest == 1 else f"last {rest} elements are"
    lost = f", which is numel // N: the {last} lost" * (has == case.numel // case.world_size)
    return (
        f"N does not divide the length of flat here. Rank {other} keeps {has} elements{lost}. Its chunk has "
        f"{right}. {cut}"
    )


def _of_others(finding: Finding, values: Mapping[int, Tensor], micro: int) -> str | None:
    """Whether a rank has what other ranks had kept, instead of its own or beside it."""
    foreign: dict[int, list[int]] = {}
    lost = []
    for rank, value in values.items():
        found = factors(value, finding.right[rank], finding.parts(rank))
        if not found:
            return None
        chunks = _chunks_of_earlier(found[0], micro, rank)
        if chunks is None:
            return None
        foreign[rank] = sorted(chunks - {rank})
        lost += [rank] * (rank not in chunks)
    with_others = [rank for rank, others in foreign.items() if others]
    if not with_others:
        return None
    rank = with_others[0]
    others = " and ".join(map(str, foreign[rank]))
    instead = ", and not what it had kept itself" if rank in lost else ""
    return (
        f"rank {rank}'s sum has what rank{'s' * (len(foreign[rank]) > 1)} {others} had kept{instead}, as if "
        "`kept` were added to another rank's chunk of flat before the reduction. Add it to this rank's own "
        "chunk, or to what ring.reduce_scatter returned"
    )


def _chunks_of_earlier(have: Mapping[str, float], micro: int, rank: int) -> set[int] | None:
    """At which chunks the earlier micro-batches of all ranks count; None if the new one is not right."""
    there = [tuple(map(int, re.findall(r"\d+", name))) for name in present(have)]
    peers = {int(re.findall(r"\d+", name)[0]) for name in have}
    if {(peer, chunk) for peer, each, chunk in there if each == micro} != {(peer, rank) for peer in peers}:
        return None
    earlier = {(peer, each, chunk) for peer, each, chunk in there if each < micro}
    chunks = {chunk for _, _, chunk in earlier}
    expected = {(peer, each, chunk) for peer in peers for each in range(micro) for chunk in chunks}
    return chunks if earlier == expected else None


def _of_two(finding: Finding, values: Mapping[int, Tensor], before: Sequence[Tensor]) -> str | None:
    """What a value is of `kept` and the new shard, on all wrong ranks."""
    both = {rank: (before[rank], finding.right[rank] - before[rank]) for rank in values}
    for said, of_both in OF_BOTH.items():
        if all(same(value, of_both(*both[rank])) for rank, value in values.items()):
            return f"it is {said}: return their sum"
    found = set()
    for rank, value in values.items():
        kept, new = both[rank]
        known = coefficients(value, {"kept": kept, "new": new}) if value.shape == new.shape else None
        if not known:
            return None
        found.add((round(known["kept"], 6) + 0.0, round(known["new"], 6) + 0.0))
    return _sum_in_words(*found.pop()) if len(found) == 1 else None


def _sum_in_words(kept: float, new: float) -> str | None:
    if (kept, new) == (1, 1):
        return None
    terms = [
        f"{_times(factor)}{name}" for factor, name in ((kept, "`kept`"), (new, "the new shard")) if factor
    ]
    said = " + ".join(terms).replace("+ -", "- ") or "zeros"
    missing = [name for factor, name in ((kept, "`kept`"), (new, "the new shard")) if not factor]
    also = f", and {missing[0]} is not in it" if len(missing) == 1 else ""
    subtracted = ": what should be added is subtracted" * (min(kept, new) == -1)
    return f"it is {said}{also}{subtracted}. Return `kept` + the new shard"


def _times(factor: float) -> str:
    return "" if factor == 1 else "-" if factor == -1 else f"{factor:g} × "

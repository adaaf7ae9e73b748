"""Find the mistake that explains the numbers: compare what ranks returned with each candidate.

A candidate is a sentence and the values that the mistake leads to. The check names each candidate that
explains every rank in two cases. If there is none, it describes the value itself.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce

import torch

from zerolab.course.attempts import Odd
from zerolab.course.patterns import rule
from zerolab.course.reading import (
    Explain,
    Factors,
    Parts,
    elsewhere,
    factors,
    made_of,
    not_a_tensor,
    scaled_or_shifted,
    silent,
    unlike,
)
from zerolab.course.targets import before_it, lowest
from zerolab.course.turned import turned


@dataclass
class Finding:
    """One case of an exercise, run and compared.

    Attributes:
        where: the case, in words.
        stopped: why there is nothing to compare.
        seen, right: by rank.
        mistakes: by sentence, what each rank would have ended with.
        parts: what the seen values may be sums of, by rank, from the fewest parts to the most.
        whole: the right values end to end; a wrong value may be a slice of it.
        lengths: by sentence, how many elements each rank would have ended with.
        cost: what is wrong although the values are right.
        also: what else there is to say of wrong values.
        reason: why they are wrong, by the messages; said where no mistake explains them, or only a symptom.
        symptoms: those of the mistakes that say what the values are, and not why.
        cause: why values are wrong that no mistake explains, known because earlier cases were right.
        told: the same, where it names its ranks itself.
        explain: what the messages tell of parts that are missing, or count too often, on a rank.
        went: where missing parts went, by the messages; said where no rule of all ranks is found.
        owner: the rank whose shard the values are, where all ranks' values are of one shard.
        within: the part of each rank's value that these values are, in words.
    """

    where: str
    stopped: str | None = None
    seen: Sequence[torch.Tensor | Odd] = ()
    right: Sequence[torch.Tensor] = ()
    mistakes: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    parts: Callable[[int], Sequence[Parts]] = lambda rank: ()
    whole: torch.Tensor | None = None
    lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    cost: str | None = None
    also: str | None = None
    reason: str | None = None
    symptoms: Collection[str] = ()
    cause: str | None = None
    told: str | None = None
    explain: Callable[[int], Explain] = lambda rank: silent
    went: Callable[[int], Explain] = lambda rank: silent
    owner: int | None = None
    within: str = ""

    @property
    def wrong(self) -> list[int]:
        """The ranks whose values are not right."""
        return [rank for rank, want in enumerate(self.right) if not same(self.seen[rank], want)]

    def part(
        self,
        where: str,
        own: Callable[[torch.Tensor], torch.Tensor],
        parts: Callable[[int], Sequence[Parts]],
    ) -> "Finding":
        """The same for a part of each value, that `own` takes out, which may be a sum of other `parts`."""
        cut = lambda values: [own(value) for value in values]
        return replace(
            self,
            where=f"{self.where}, in {where}",
            seen=cut(self.seen),
            right=cut(self.right),
            mistakes={why: cut(values) for why, values in self.mistakes.items()},
            parts=parts,
            within=where,
        )

    def fitting(self, ranks: Iterable[int] | None = None) -> list[str]:
        """Return the mistakes that explain the values of the ranks, of all of them by default."""
        if self.stopped:
            return []
        ranks = range(len(self.right)) if ranks is None else list(ranks)
        return [
            sentence
            for sentence, predicted in self.mistakes.items()
            if all(same(self.seen[rank], predicted[rank]) for rank in ranks)
        ]


def examine(cases: Iterable, look: Callable[..., Finding]) -> str | None:
    """Look at the cases in turn until one mistake explains two of them or more, or all are right.

    Wrong values come before costs, whichever case they show in.
    """
    suspects, first, excluded = [], None, set()
    costs: list[str] = []
    for finding in map(look, cases):
        fits = finding.fitting()
        if finding.stopped:
            stopped = f"{finding.stopped} (seen with {finding.where})"
            return _named(first, suspects) if first else "; ".join(filter(None, [stopped, before_it(costs)]))
        if first is None and finding.wrong:
            first, suspects = finding, [why for why in fits if why not in excluded] or fits
            if not suspects:
                break
        elif first:  # what explains one case may be ruled out by the next
            suspects = [why for why in suspects if why in fits]
            if len(suspects) < 2:
                break
        excluded |= finding.mistakes.keys() - set(fits)
        if finding.cost:
            costs.append(type(finding.cost)(f"{finding.cost} (seen with {finding.where})"))
    return _named(first, suspects) if first else lowest(costs)


def _named(first: Finding, suspects: Sequence[str]) -> str:
    """Return the mistakes that are left; if none is, what the first wrong value is made of."""
    named = ", or else ".join(suspects) or _of_some_ranks(first)
    reason = first.reason if not suspects or set(suspects) & set(first.symptoms) else None
    return f"{'; '.join(filter(None, [named, reason, first.also]))} (seen with {first.where})"


def first_wrong(findings: Iterable[Finding], whole: Finding) -> Finding:
    """Return the first part that is wrong, or the whole where each part is right by itself."""
    return next((each for each in findings if each.wrong), whole)


def sum_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of one tensor or more. Python's sum begins with 0, so it may return an int."""
    return reduce(torch.add, tensors)


def same(got: torch.Tensor | Odd, want: torch.Tensor, rtol: float = 1e-9) -> bool:
    """Equal up to the order of a sum in float64, or up to float32's rounding."""
    if isinstance(got, Odd) or got.shape != want.shape or got.dtype != want.dtype:
        return False
    rtol, atol = (rtol, 1e-12) if want.dtype == torch.float64 else (1e-4, 1e-5)
    return torch.allclose(got.cpu(), want, rtol=rtol, atol=atol)


def _of_some_ranks(finding: Finding) -> str:
    """No mistake explains all cases and ranks: look at the first wrong rank, and at its value itself."""
    wrong = finding.wrong
    rank = wrong[0]
    good = [each for each in range(len(finding.right)) if each not in wrong]
    where = f"in {finding.within}, " if good and finding.within else ""
    where += f"rank {good[0]} is right, but rank {rank} is not: " if good else f"on rank {rank}: "
    got, want = finding.seen[rank], finding.right[rank]
    ruled_out = finding.fitting()
    if not finding.fitting(wrong) and (told := _told_by_messages(finding, rank)):
        return where + told
    if named := [why for why in finding.fitting(wrong) or finding.fitting([rank]) if why not in ruled_out]:
        return where + ", or else ".join(named)
    lengths = [None if isinstance(value, Odd) else value.numel() for value in finding.seen]
    named = [why for why, predicted in finding.lengths.items() if list(predicted) == lengths]
    if named and lengths != [value.numel() for value in finding.right]:
        return ", or else ".join(named)
    if finding.told:
        return finding.told
    if isinstance(got, Odd):
        return where + (finding.cause or not_a_tensor(got, want))
    reading = _reading(finding, rank, got)
    if reading or ruled_out:
        return where + (reading or ", or else ".join(ruled_out))
    unknown = "" if finding.also or finding.reason else ", and no known mistake explains it"
    first = int((~torch.isclose(got, want, rtol=1e-4, atol=1e-5)).flatten().nonzero()[0])
    begin = f" from element {first} on" if first else ""
    shown = _short(got.flatten()[first:]), _short(want.flatten()[first:])
    return f"{where}its value{begin} is {shown[0]}, right is {shown[1]}{unknown}"


def _reading(finding: Finding, rank: int, got: torch.Tensor) -> str | None:
    """What a rank's value shows by itself, beside the right one."""
    want = finding.right[rank]
    return (
        finding.cause
        or unlike(got, want)
        or elsewhere(got, want, finding.whole)
        or made_of(got, want, finding.parts(rank), partial(_why, finding, rank))
        or turned(got, want, finding.parts(rank))
        or scaled_or_shifted(got, want)
    )


def _told_by_messages(finding: Finding, rank: int) -> str | None:
    """What a rank's value is made of, where the messages tell why. That says more than one rank's mistake."""
    got, parts = finding.seen[rank], finding.parts(rank)
    if isinstance(got, Odd) or finding.reason:
        return None
    found = factors(got, finding.right[rank], parts)
    if not found or not finding.explain(rank)(*found):
        return None
    return made_of(got, finding.right[rank], parts, finding.explain(rank))


def _why(finding: Finding, rank: int, have: Factors, should: Factors) -> str | None:
    """Why a rank's parts are missing or count too often: by the messages, or a rule of all ranks."""
    if finding.reason:
        return None
    found = {
        each: factors(value, finding.right[each], finding.parts(each))
        for each, value in enumerate(finding.seen)
        if each in finding.wrong and not isinstance(value, Odd)
    }
    if told := finding.explain(rank)(have, should):
        return told
    known = {each: pair for each, pair in found.items() if pair}
    found_rule = rule(known, finding.owner) if len(known) == len(finding.wrong) else None
    return found_rule or finding.went(rank)(have, should)


def _short(value: torch.Tensor, most: int = 3) -> str:
    shown = ", ".join(f"{each:.5g}" for each in value.flatten()[:most].tolist())
    return f"[{shown}{', …' if value.numel() > most else ''}]"

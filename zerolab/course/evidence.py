"""Which mistake explains the numbers: candidates are compared with what the ranks returned.

A candidate is a sentence and the values that the mistake leads to. One that explains every rank in two cases
is named; if several do, all of them are. Where none does, the value is taken apart: it is a sum of known
parts, and the coefficients tell which part is missing, doubled or scaled.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch

from zerolab.course.attempt import Odd

Parts = Mapping[str, torch.Tensor]


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
        cause: why values are wrong that no mistake explains, known because earlier cases were right.
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
    cause: str | None = None

    @property
    def wrong(self) -> list[int]:
        """The ranks whose values are not right."""
        return [rank for rank, want in enumerate(self.right) if not same(self.seen[rank], want)]

    def fitting(self, ranks: Iterable[int] | None = None) -> list[str]:
        """The mistakes that explain the values of the ranks, of all of them by default."""
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
    suspects, first, cost, excluded = [], None, None, set()
    for finding in map(look, cases):
        fits = finding.fitting()
        if finding.stopped:
            stopped = f"{finding.stopped} (seen with {finding.where})"
            return (
                _named(first, suspects) if first else f"{stopped}; and elsewhere {cost}" if cost else stopped
            )
        if first is None and finding.wrong:
            first, suspects = finding, [why for why in fits if why not in excluded] or fits
            if not suspects:
                break
        elif first:  # what explains one case may be ruled out by the next
            suspects = [why for why in suspects if why in fits]
            if len(suspects) < 2:
                break
        excluded |= finding.mistakes.keys() - set(fits)
        cost = cost or (finding.cost and f"{finding.cost} (seen with {finding.where})")
    return _named(first, suspects) if first else cost


def _named(first: Finding, suspects: Sequence[str]) -> str:
    """The mistakes that are left; if none is, what the first wrong value is made of."""
    named = ", or else ".join(suspects) or _of_some_ranks(first)
    return f"{'; '.join(filter(None, [named, first.also]))} (seen with {first.where})"


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
    where = f"rank {good[0]} is right, but rank {rank} is not: " if good else f"on rank {rank}: "
    got, want = finding.seen[rank], finding.right[rank]
    ruled_out = finding.fitting()
    if named := [why for why in finding.fitting(wrong) or finding.fitting([rank]) if why not in ruled_out]:
        return where + ", or else ".join(named)
    lengths = [None if isinstance(value, Odd) else value.numel() for value in finding.seen]
    named = [why for why, predicted in finding.lengths.items() if list(predicted) == lengths]
    if named and lengths != [value.numel() for value in finding.right]:
        return ", or else ".join(named)
    reading = (
        finding.cause
        or unlike(got, want)
        or elsewhere(got, want, finding.whole)
        or made_of(got, want, finding.parts(rank))
    )
    if reading or ruled_out:
        return where + (reading or ", or else ".join(ruled_out))
    unknown = "" if finding.also else ", and no known mistake explains it"
    return f"{where}its value is {_short(got)}, right is {_short(want)}{unknown}"


def unlike(got: torch.Tensor | Odd, want: torch.Tensor) -> str | None:
    """How a value differs from the right one in kind: type, dtype, shape, finiteness, precision."""
    if isinstance(got, Odd):
        text = f", {got.text}" if got.text else ""
        return f"it returned {got.kind}{text}, where a tensor of shape {tuple(want.shape)} is right"
    if got.dtype != want.dtype:
        return f"it returned {_name(got.dtype)}, and its input is {_name(want.dtype)}: keep the type"
    if got.shape != want.shape:
        return f"its value has shape {tuple(got.shape)}, and the right one {tuple(want.shape)}"
    if not got.isfinite().all():
        what = "nan" if got.isnan().any() else "inf"
        return f"its value holds {what}: look for a division by 0, or for memory that was never written"
    if not got.any() and want.any():
        return "its value is all zeros: the buffer was never filled, or what was received was thrown away"
    return _rounded(got, want)


def _rounded(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Whether a value is right up to the rounding of a shorter type."""
    off = float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
    if off > 2e-2:
        return None
    exactly = [dtype for dtype in (torch.bfloat16, torch.float16) if got.equal(got.to(dtype).to(got.dtype))]
    through = _name(exactly[0]) if exactly else "float32" if off < 1e-5 else "a 16-bit type"
    return (
        f"its value is right up to rounding, with an error of {off:.1g}: somewhere it went through {through}."
        f" Add up and send in {_name(want.dtype)}"
    )


def elsewhere(got: torch.Tensor, want: torch.Tensor, whole: torch.Tensor | None) -> str | None:
    """Whether a value is right for another place, or holds the right numbers in another order."""
    flat, wanted = got.flatten(), want.flatten()
    if whole is not None and 1 < flat.numel() < whole.numel():
        found = (whole.unfold(0, flat.numel(), 1) - flat).abs().amax(dim=1) < 1e-9
        if found.any():
            start = int(found.nonzero()[0])
            return (
                f"its value is what belongs to elements {start} to {start + flat.numel()} of "
                f"{whole.numel()}: the cut is at the wrong place, or in the wrong order"
            )
    if flat.numel() > 2 and torch.allclose(flat.sort().values, wanted.sort().values, rtol=1e-9, atol=1e-12):
        return "its value holds the right numbers in the wrong order"
    return None


def made_of(got: torch.Tensor, want: torch.Tensor, choices: Sequence[Parts]) -> str | None:
    """Take a value apart into the first of `choices` that it is a sum of; say what differs from `want`."""
    for parts in choices:
        have, should = coefficients(got, parts), coefficients(want, parts)
        if have and should:
            return _difference(have, should)
    return None


def coefficients(value: torch.Tensor, parts: Parts) -> dict[str, float] | None:
    """The factors with which the parts add up to the value, if they do and it is no accident."""
    length = min(value.numel(), *(part.numel() for part in parts.values()))  # chunks may differ by one
    if length <= len(parts):
        return None
    table = torch.stack([part.flatten()[:length].double() for part in parts.values()], dim=1)
    flat = value.flatten()[:length].double()
    factors = torch.linalg.lstsq(table, flat.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    tolerance = 1e-8 if value.dtype == torch.float64 else 1e-4
    if not torch.allclose(table @ factors, flat, rtol=tolerance, atol=tolerance):
        return None
    return {name: float(factor) for name, factor in zip(parts, factors, strict=True)}


def _difference(have: dict[str, float], should: dict[str, float]) -> str:
    """In words: what is missing, what should not be there, and what is counted a wrong number of times."""
    zero = lambda factor: abs(factor) < 1e-3
    missing = [name for name, factor in should.items() if not zero(factor) and zero(have[name])]
    extra = [name for name, factor in should.items() if zero(factor) and not zero(have[name])]
    ratios = {n: have[n] / f for n, f in should.items() if not zero(f) and not zero(have[n])}
    found = [f"{_list(missing)} {'is' if len(missing) == 1 else 'are'} missing"] if missing else []
    if not ratios:
        found = ["nothing of what should be in it is there"]
    if extra:
        found.append(f"it has {_list([f'{_factor(have[n])} × {n}' for n in extra])} in it instead")
    factors = {round(ratio, 4) for ratio in ratios.values()} - {1}
    if len(ratios) > 1 and factors == {round(ratio, 4) for ratio in ratios.values()} and len(factors) == 1:
        return "; ".join([*found, f"what is there is {_factor(factors.pop())} times what it should be"])
    for factor in sorted(factors):
        names = [name for name, ratio in ratios.items() if round(ratio, 4) == factor]
        verb = "counts" if len(names) == 1 else "count"
        found.append(f"{_list(names)} {verb} {_factor(factor)} times what it should")
    return "; ".join(found)


def _list(names: Sequence[str], most: int = 4) -> str:
    shown = [*names[:most], *([f"{len(names) - most} more"] if len(names) > most else [])]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _factor(value: float) -> str:
    simple = Fraction(value).limit_denominator(64)
    return str(simple) if abs(simple - value) < 1e-4 else f"{value:.4g}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(value: torch.Tensor, most: int = 3) -> str:
    shown = ", ".join(f"{each:.5g}" for each in value.flatten()[:most].tolist())
    return f"[{shown}{', …' if value.numel() > most else ''}]"

"""Describe a wrong value that no known mistake explains.

Its type, shape or precision is not right; or it is right for another place; or it is a sum of known
parts, and the coefficients tell which of them is missing, doubled or scaled.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import torch

from zerolab.course.attempts import Odd

Parts = Mapping[str, torch.Tensor]
Factors = Mapping[str, float]
"""How often each part counts in a value, by the part's name."""
Explain = Callable[[Factors, Factors], str | None]
"""From the factors as they are and as they should be: what the messages tell of the difference."""


def silent(have: Factors, should: Factors) -> None:
    """Where nothing more is known."""


def number_in(name: str) -> int:
    """Return the rank that a part's name begins with."""
    return int(re.findall(r"rank (\d+)", name)[0])


def not_a_tensor(got: Odd, want: torch.Tensor) -> str:
    """Return what was returned instead of a tensor; its numbers may be the right ones."""
    numbers = torch.tensor(got.numbers, dtype=torch.float64)
    if numbers.numel() == want.numel() and torch.allclose(numbers, want.double().flatten(), 1e-4, 1e-5):
        way = ", without a comma after it" if got.kind == "tuple" else ""
        return f"it returned {got.kind}, with the right numbers in it: return the tensor itself{way}"
    text = f", {got.text}" if got.text else ""
    kind = "None" if got.kind == "NoneType" else got.kind
    return f"it returned {kind}{text}, where a tensor of shape {tuple(want.shape)} is right"


def unlike(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Return how a tensor differs from the right one in kind: dtype, shape, finiteness, precision."""
    if got.dtype != want.dtype:
        return f"it returned {_name(got.dtype)}, and its input is {_name(want.dtype)}: keep the type"
    if got.shape != want.shape:
        return f"its value has shape {tuple(got.shape)}, and the right one {tuple(want.shape)}"
    if not got.isfinite().all():
        return _not_finite(got)
    if not got.any() and want.any():
        return (
            "its value is all zeros: the buffer was never filled, or what was received was thrown away, or "
            "it is a view of a tensor that was cleared"
        )
    if (found := got[_denormal(got)]).numel() and not _denormal(want).any():
        return f"its value holds numbers such as {found[0]:.4g}, as memory does that was never written"
    return rounded(got, want) or _function_of(got, want) or _in_part(got, want)


def _not_finite(got: torch.Tensor) -> str:
    what, there = ("nan", got.isnan()) if got.isnan().any() else ("inf", got.isinf())
    places = there.flatten().nonzero().flatten()
    where = f" in {len(places)} of {got.numel()} elements, from element {int(places[0])} on"
    return (
        f"its value holds {what}{where * (len(places) < got.numel())}. Look for a division by 0, or for a "
        "tensor of torch.empty that is used before it is filled"
    )


def _denormal(value: torch.Tensor) -> torch.Tensor:
    """Where a value is closer to 0 than a computed one usually is, as an address read as a float is."""
    return (value != 0) & (value.abs() < torch.finfo(value.dtype).tiny)


def rounded(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Return whether a value is right up to the rounding of a shorter type."""
    if got.equal(got.round()) and not want.equal(want.round()) and (got - want).abs().max() <= 1:
        return "its value is rounded to whole numbers: divide with / and keep the floating-point type"
    off = float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
    if off > 2e-2 or _scaled(got, want):
        return None
    exactly = [dtype for dtype in (torch.bfloat16, torch.float16) if got.equal(got.to(dtype).to(got.dtype))]
    went = "went" if exactly or off < 1e-5 else "may have gone"
    through = _name(exactly[0]) if exactly else "float32" if off < 1e-5 else "a 16-bit type"
    return (
        f"its value is right up to rounding, with an error of {off:.1g}: somewhere it {went} through "
        f"{through}. Add up and send in {_name(want.dtype)}"
    )


def _scaled(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether a value of several elements is the right one times one factor that is not 1."""
    flat, wanted = got.double().flatten(), want.double().flatten()
    factor = float(flat @ wanted / (wanted @ wanted))
    return (
        len(flat) > 1
        and abs(factor - 1) > 1e-5
        and torch.allclose(flat, factor * wanted, rtol=1e-9, atol=1e-12)
    )


def _in_part(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Where a value is wrong, if most of it is right."""
    wrong = (~torch.isclose(got, want, rtol=1e-4, atol=1e-5)).flatten().nonzero().flatten()
    if not 0 < len(wrong) < got.numel() / 2:
        return None
    place = f"element {int(wrong[0])}" if len(wrong) == 1 else f"elements {int(wrong[0])} to {int(wrong[-1])}"
    if wrong[-1] - wrong[0] + 1 > len(wrong):
        return (
            f"all is right but {len(wrong)} of {got.numel()} elements, of which {int(wrong[0])} is the first"
        )
    said = f"all is right but {place} of {got.numel()}"
    return f"{said}: look at how the tensor is cut, and where a loop over it ends"


def elsewhere(got: torch.Tensor, want: torch.Tensor, whole: torch.Tensor | None) -> str | None:
    """Return whether a value is right for another place, or holds the right numbers in another order."""
    flat, wanted = got.flatten(), want.flatten()
    if whole is not None and 1 < flat.numel() < whole.numel():
        found = (whole.unfold(0, flat.numel(), 1) - flat).abs().amax(dim=1) < 1e-9
        if found.any():
            start = int(found.nonzero()[0])
            return (
                f"its value is what belongs to elements {start} to {start + flat.numel()} of "
                f"{whole.numel()}: the cut is at the wrong place, or in the wrong order"
            )
    turned = want.permute(tuple(reversed(range(want.dim())))).flatten()
    if want.dim() > 1 and torch.allclose(flat, turned, rtol=1e-9, atol=1e-12):
        return "its value holds the right numbers in the order of the transposed tensor"
    if flat.numel() > 2 and torch.allclose(flat.sort().values, wanted.sort().values, rtol=1e-9, atol=1e-12):
        return "its value holds the right numbers in the wrong order"
    return None


def _function_of(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Whether a value of several elements is a function of the right one, element by element."""
    low, high = got.min(), got.max()
    if low == high:
        one = f"its value is {float(low):.4g} in all elements, and those of the right one differ"
        return one if want.min() < want.max() else None
    for said, value in {
        "the absolute value of the right one": want.abs(),
        "the right one with zeros for what is negative": want.clamp(min=0),
        "the square of the right one": want.square(),
        "the root of the right one's size": want.abs().sqrt(),
        "the sign of the right one": want.sign(),
        f"the right one, cut off at {float(low):.4g} and {float(high):.4g}": want.clamp(low, high),
    }.items():
        if torch.allclose(got, value, rtol=1e-6, atol=1e-9 * float(got.abs().max())):
            return f"its value is {said}"
    return None


def scaled_or_shifted(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Whether a value is the right one times a factor, or plus a number; one number alone proves little."""
    flat, wanted = got.double().flatten(), want.double().flatten()
    tolerance = 1e-9 if got.dtype == torch.float64 else 1e-5
    factor, shift = float(flat @ wanted / (wanted @ wanted)), float((flat - wanted).mean())
    if (len(flat) > 1 or _simple(factor)) and torch.allclose(
        flat, factor * wanted, rtol=tolerance, atol=tolerance
    ):
        return f"its value is {_factor(factor)} times the right one"
    if (len(flat) > 1 or _simple(shift)) and torch.allclose(
        flat, wanted + shift, rtol=tolerance, atol=tolerance
    ):
        return f"its value is {_factor(abs(shift))} {'more' if shift > 0 else 'less'} than the right one"
    return None


def _simple(value: float) -> bool:
    near = Fraction(value).limit_denominator(8)
    return near != 0 and abs(near - value) < 1e-5 * max(1, abs(value))


def made_of(
    got: torch.Tensor, want: torch.Tensor, choices: Sequence[Parts], explain: Explain = silent
) -> str | None:
    """Take a value apart into the first of `choices` that it is a sum of; say what differs from `want`."""
    for parts in choices:
        for word, reduce in (("largest", torch.amax), ("smallest", torch.amin), ("product", torch.prod)):
            each = [part.flatten() for part in parts.values() if part.numel() == got.numel()]
            if each and _close(got.flatten(), reduce(torch.stack(each), dim=0)):
                return f"its value is the {word} of {listed(list(parts))}, where the sum is right"
        have, should = coefficients(got, parts), coefficients(want, parts)
        if have and should:
            return ": ".join(filter(None, (difference(have, should), explain(have, should))))
    return None


def _close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.dtype == want.dtype and torch.allclose(got, want, rtol=1e-6, atol=1e-12)


def factors(
    got: torch.Tensor, want: torch.Tensor, choices: Sequence[Parts]
) -> tuple[Factors, Factors] | None:
    """How often each part counts in a value, and how often it should, with the first choice that tells."""
    if got.shape != want.shape or not got.isfinite().all():
        return None
    for parts in choices:
        have, should = coefficients(got, parts), coefficients(want, parts)
        if have and should:
            return have, should
    return None


def coefficients(value: torch.Tensor, parts: Parts) -> dict[str, float] | None:
    """Return the factors with which the parts add up to the value, if they do and it is no accident."""
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


def present(factors: Factors) -> list[str]:
    """The parts that count, against the one that counts most; the others' factors are rounding."""
    least = 1e-3 * max(map(abs, factors.values()))
    return [name for name, factor in factors.items() if abs(factor) > least]


def difference(have: dict[str, float], should: dict[str, float]) -> str:
    """In words: what is missing, what should not be there, and what is counted a wrong number of times."""
    wanted, there = present(should), present(have)
    missing = [name for name in wanted if name not in there]
    extra = [name for name in there if name not in wanted]
    ratios = {name: have[name] / should[name] for name in wanted if name in there}
    found = [f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} missing"] if missing else []
    if not ratios:
        found = ["nothing of what should be in it is there"]
    if extra:
        found.append(f"it has {listed([f'{_factor(have[n])} × {n}' for n in extra])} in it instead")
    factors = {round(ratio, 4) for ratio in ratios.values()} - {1}
    if len(ratios) > 1 and factors == {round(ratio, 4) for ratio in ratios.values()} and len(factors) == 1:
        return "; ".join([*found, f"what is there is {_factor(factors.pop())} times what it should be"])
    for factor in sorted(factors):
        names = [name for name, ratio in ratios.items() if round(ratio, 4) == factor]
        verb = "counts" if len(names) == 1 else "count"
        found.append(f"{listed(names)} {verb} {_factor(factor)} times what it should")
    if missing and not extra and factors == {len(missing) + 1} and len(ratios) > 1:
        found.append(
            "all messages seem to have arrived in one tensor, where the last is left: add up or copy each of "
            "them before the next one arrives"
        )
    return "; ".join(found)


def listed(names: Sequence[str], most: int = 4) -> str:
    shown = [*names[:most], *([f"{len(names) - most} more"] if len(names) > most else [])]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _factor(value: float) -> str:
    simple = Fraction(value).limit_denominator(64)
    return str(simple) if abs(simple - value) < 1e-4 else f"{value:.4g}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Find out whether all numbers are the right ones up to rounding, up to one factor, or up to one addend."""

from collections.abc import Mapping
from fractions import Fraction

Numbers = Mapping[tuple, float]
_UNITS = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30}
_STEPS = [10.0**power for power in range(-3, 13)] + [2.0**10, 2.0**20, 2.0**30]


def rounded(got: Numbers, right: Numbers) -> str | None:
    """Return whether the numbers are the right bytes, rounded, in bytes or in a larger unit."""
    for unit, size in _UNITS.items():
        want = {case: value / size for case, value in right.items()}
        steps = [
            step
            for step in _STEPS
            if step <= max(want.values())
            and all(_multiple(has, step) and abs(has - want[case]) <= step for case, has in got.items())
        ]
        if steps and any(abs(value - want[case]) > 1e-9 * want[case] for case, value in got.items()):
            return (
                f"that is rounded {_way(got, want)} {_name(max(steps), unit)}: return the bytes as they are"
            )
    return None


def _multiple(value: float, step: float) -> bool:
    return abs(value - step * round(value / step)) <= 1e-9 * abs(value)


def _way(got: Numbers, want: Numbers) -> str:
    off = [value - want[case] for case, value in got.items()]
    return "down to" if max(off) <= 1e-9 else "up to" if min(off) >= -1e-9 else "to"


def _name(step: float, unit: str) -> str:
    named = {size: name for name, size in _UNITS.items() if size > 1}
    if unit == "bytes" and step in named:
        return f"whole {named[step]}"
    return f"whole {unit}" if step == 1 else f"multiples of {step:g} {unit}"


def overall(got: Numbers, right: Numbers, unit: str) -> str | None:
    """Return the one factor, or the one addend, by which all numbers are wrong."""
    ratios = [value / right[case] for case, value in got.items() if right[case]]
    if ratios and max(ratios) - min(ratios) <= 1e-9 * abs(ratios[0]) and all(right.values()):
        simple = Fraction(ratios[0]).limit_denominator(64)
        factor = str(simple) if abs(simple - ratios[0]) < 1e-9 else f"{ratios[0]:.6g}"
        return f"each answer is {factor} times the right one"
    addends = [value - right[case] for case, value in got.items()]
    if max(addends) - min(addends) <= 1e-9 * max(map(abs, got.values())) and addends[0]:
        than = "more" if addends[0] > 0 else "less"
        return f"each answer is {abs(addends[0]):.6g} {unit} {than} than the right one"
    return None

"""Name what of a parameter's 16 bytes a formula keeps whole, divides or leaves out, against a stage's rule.

They are the bytes of the weights, of the gradients and of the optimizer state: master weights, m and v.
"""

from itertools import product
from typing import NamedTuple

# Bytes that stay whole, and bytes that are divided by the number of GPUs, for each parameter, by stage.
RIGHT = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}
_OF_STATE = {
    1: "the master weights, of m or of v",
    2: "two of the master weights, m and v",
    3: "the optimizer state",
}


class Part(NamedTuple):
    """Something that is kept of a parameter: its bytes, and from which stage on it is sharded."""

    name: str
    size: int
    sharded_from: int


_PARTS = (
    Part("the weights", 2, 3),
    Part("the gradients", 2, 2),
    *(Part(name, 4, 1) for name in ("master weights", "m", "v")),
)
Moved = tuple[bool, ...]
"""By part: whether it is treated in another way than the stage's."""


def named(whole: float, divided: float, stage: int) -> str | None:
    """Return the parts that are whole, divided or missing against a stage's rule, or a wrong share."""
    for change in ("whole", "divided", "missing"):
        found = [
            moved
            for moved in product((False, True), repeat=len(_PARTS))
            if any(moved) and _after(change, moved, stage) == (whole, divided)
        ]
        if found:
            fewest = min(map(sum, found))
            return _said(change, [moved for moved in found if sum(moved) == fewest], stage)
    return _wrong_share(whole, divided, stage)


def _after(change: str, moved: Moved, stage: int) -> tuple[int, int] | None:
    """What is whole and what is divided then; nothing if a part is treated as it should be."""
    bytes_of = {True: 0, False: 0}  # by whether they are divided
    for part, other in zip(_PARTS, moved, strict=True):
        sharded = stage >= part.sharded_from
        if other and change != "missing" and sharded == (change == "divided"):
            return None
        if not (other and change == "missing"):
            bytes_of[sharded != other] += part.size
    return bytes_of[False], bytes_of[True]


def _said(change: str, found: list[Moved], stage: int) -> str:
    """In words: how many bytes, and which parts have as many."""
    size = sum(part.size for part, other in zip(_PARTS, found[0], strict=True) if other)
    parts = f"the size of {' or of '.join(dict.fromkeys(map(_names, found)))}"
    if change == "missing":
        return f"{size} bytes for each parameter are missing at stage {stage}, {parts}"
    if change == "whole":
        return f"stage {stage} divides {size} bytes more, {parts}"
    return f"stage {stage} keeps {size} bytes more on every GPU, {parts}"


def _names(moved: Moved) -> str:
    names = [part.name for part, other in zip(_PARTS[:2], moved, strict=False) if other]
    return " and of ".join([*names, *([_OF_STATE[sum(moved[2:])]] if any(moved[2:]) else [])])


def _wrong_share(whole: float, divided: float, stage: int) -> str | None:
    """Whether the share is another one than 1/N, or bytes come on top."""
    right_whole, right_divided = RIGHT[stage]
    if divided and (whole, divided) == (right_whole + right_divided, -right_divided):
        return "the sharded part is multiplied by (N-1)/N, which is what a GPU saves. A GPU keeps 1/N of it"
    if whole == right_whole and right_divided and divided:
        for times in (2, 3, 4, 8, 16):
            if abs(divided * times - right_divided) < 1e-3:
                return f"the sharded part is divided by {times} * N: divide it by N, the number of GPUs"
            if abs(divided - right_divided * times) < 1e-3:
                return f"the sharded part counts {times} times: it is there once"
    if divided == right_divided and whole > right_whole:
        extra = f"{whole - right_whole:.4g} bytes for each parameter come on top, on every GPU"
        return f"{extra}. Model states are 16 bytes, and temporary buffers or activations are none of them"
    if whole == right_whole and divided > right_divided:
        return f"{divided - right_divided:.4g} bytes too many for each parameter are divided among the GPUs"
    return None

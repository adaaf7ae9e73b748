"""Lesson 07's exercise on tensor parallelism: which parts of the weights a wrong block was computed from."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from zerolab.course.attempts import Odd
from zerolab.course.evidence import same, sum_of
from zerolab.course.lessons.residual_memory.mlp import HIDDEN, Mlp, Parts

# Whose part of a weight rank r of N takes, in words.
TAKES: dict[str, Callable[[int, int], int]] = {
    "its own": lambda r, size: r,
    "rank 0's": lambda r, size: 0,
    "the next rank's": lambda r, size: (r + 1) % size,
    "the previous rank's": lambda r, size: (r - 1) % size,
    "rank N - 1 - r's": lambda r, size: size - 1 - r,
}


def of_output(outputs: Sequence[Tensor | Odd], parts: Parts) -> str | None:
    """Say which parts add up to the output, if it is the same on every rank and some cut explains it."""
    if any(isinstance(each, Odd) for each in outputs):
        return None
    for why, values in (*_mixed(parts), *_short(parts), *_added_too_early(parts)):
        if all(same(got, value) for got, value in zip(outputs, values, strict=True)):
            return why
    return None


def _mixed(parts: Parts) -> Iterator[tuple[str, list[Tensor]]]:
    """The parts of the three weights belong to different ranks, or one rank alone adds b1."""
    size = parts.size
    cut = [parts.mlp.part(rank, size) for rank in range(size)]
    hidden = {(a, b): gelu(linear(parts.mlp.x, cut[a].w1, cut[b].b1)) for a, b in _pairs(size)}
    fewest_first = lambda words: sum(word != "its own" for word in words)
    for words in sorted(product(TAKES, repeat=3), key=fewest_first):
        takes = [[TAKES[word](rank, size) for rank in range(size)] for word in words]
        total = sum_of(linear(hidden[a, b], cut[c].w2) for a, b, c in zip(*takes, strict=True))
        others = [pair for pair in zip(words, ("w1", "b1", "w2"), strict=True) if pair[0] != "its own"]
        named = " and ".join(f"{word} part of {name}" for word, name in others)
        yield (
            f"rank r takes {named}. w1, b1 and w2 belong together: rank r takes part r of each",
            [total + parts.mlp.b2] * size,
        )
    without = [each._replace(b1=torch.zeros_like(each.b1)) if rank else each for rank, each in enumerate(cut)]
    yield (
        "b1 is added on rank 0 alone. Each rank adds its own part of b1",
        [sum_of(each.product() for each in without) + parts.mlp.b2] * size,
    )


def _pairs(size: int) -> Iterator[tuple[int, int]]:
    return product(range(size), range(size))


def _short(parts: Parts) -> Iterator[tuple[str, list[Tensor]]]:
    """One hidden feature of every part is left out."""
    width = HIDDEN // parts.size
    for word, place in (("last", width - 1), ("first", 0)):
        kept = torch.arange(HIDDEN) % width != place
        mlp = parts.mlp
        some = Mlp(mlp.x, mlp.w1[kept], mlp.b1[kept], mlp.w2[:, kept], mlp.b2)
        yield (
            f"the {word} hidden feature of every part is left out: rank r has the features from r * width to "
            "(r + 1) * width, where a slice ends before its second number",
            [some.product() + mlp.b2] * parts.size,
        )


def _added_too_early(parts: Parts) -> Iterator[tuple[str, list[Tensor]]]:
    """The hidden features of all ranks are added up, before or after gelu, with or without g at the end."""
    why = (
        "the hidden features of all ranks are added up, and each rank has other features. Only the products "
        "of the second layer are parts of one sum: g stands there"
    )
    cut = [parts.mlp.part(rank, parts.size) for rank in range(parts.size)]
    sums = [linear(each.x, each.w1, each.b1) for each in cut]
    for hidden in (gelu(sum_of(sums)), sum_of(map(gelu, sums))):
        products = [linear(hidden, each.w2) for each in cut]
        yield why, [each + parts.mlp.b2 for each in products]
        yield why, [sum_of(products) + parts.mlp.b2] * parts.size


def of_gradient(name: str, gradient: Tensor, right: Tensor) -> str | None:
    """Say where a gradient is not zero, if that is not where it should be."""
    places = [_place(each) for each in (gradient, right)]
    if not all(places) or places[0] == places[1]:
        return None
    if name == "x":
        return f"x.grad is zeros outside {places[0]}, so x is cut. Every rank takes all of x: cut the weights"
    return (
        f"{name}.grad is zeros outside {places[0]}, and right are zeros outside {places[1]}: look at how "
        f"{name} is cut"
    )


def _place(gradient: Tensor) -> str:
    """The least block of rows and columns that holds all that is not zero; "" where all is zero."""
    flat = gradient.reshape(-1, gradient.shape[-1]) if gradient.dim() > 1 else gradient[:, None]
    found = flat.nonzero()
    if not len(found):
        return ""
    (top, left), (bottom, right) = found.min(dim=0).values.tolist(), found.max(dim=0).values.tolist()
    rows = f"rows {top} to {bottom}" if gradient.dim() > 1 else f"elements {top} to {bottom}"
    whole = gradient.dim() == 1 or (left, right) == (0, flat.shape[1] - 1)
    return rows if whole else f"{rows} and columns {left} to {right}"

"""Lesson 07's exercise on tensor parallelism: blocks whose operators stand at other places.

A block is a chain: x, the first layer, gelu, the second layer, b2. At each place an operator may add up in
the forward pass, in the backward pass, or in both. All ranks are computed in one process. The output and all
gradients together tell which chain a reader wrote.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from zerolab.course.attempts import Odd
from zerolab.course.evidence import same, sum_of
from zerolab.course.lessons.residual_memory.mlp import NAMES, Mlp, inputs, output_gradient

SAME, SUM, MEAN, TWICE = "same", "sum", "mean", "sum of sums"
Ways = tuple[str, str]  # in the forward pass and in the backward pass
NOTHING, F, G, BOTH = (SAME, SAME), (SAME, SUM), (SUM, SAME), (SUM, SUM)


class Chain(NamedTuple):
    """The operator at each place; where gelu stands; how the biases are added, and what b2 passes through."""

    x: Ways = F
    first: Ways = NOTHING  # around what the first layer returns
    hidden: Ways = NOTHING  # around what gelu returns
    product: Ways = G
    output: Ways = NOTHING
    acts: tuple[str, ...] = ("between",)
    b1: str = "before gelu"
    b2: str = "after"
    of_b2: Ways = NOTHING


_FEATURES = "Each rank has other features there, and their gradients do not add up"
# What may be wrong at each place: in words, and as a change of the chain.
WRONG: dict[str, dict[str, dict]] = {
    "x": {
        "f around x is missing": dict(x=NOTHING),
        "`x` passes through f twice, so its gradient is added up twice": dict(x=(SAME, TWICE)),
        "f's backward is the mean": dict(x=(SAME, MEAN)),
        "f adds up in the forward pass": dict(x=G),
        "f adds up in the forward pass, too": dict(x=BOTH),
    },
    "first": {
        f"f stands around what the first layer returns, before gelu. {_FEATURES}": dict(first=F),
        "g stands around what the first layer returns, before gelu": dict(first=G),
        "what the first layer returns is added up in both passes": dict(first=BOTH),
    },
    "hidden": {
        f"f stands around the hidden features, after gelu. {_FEATURES}": dict(hidden=F),
        "g stands around the hidden features, after gelu": dict(hidden=G),
        "the hidden features are added up in both passes": dict(hidden=BOTH),
    },
    "product": {
        "g around the product is missing": dict(product=NOTHING),
        "f stands around the product, in place of g": dict(product=F),
        "g adds up in the backward pass, too": dict(product=BOTH),
        "the product passes through g twice": dict(product=(TWICE, SAME)),
        "g is the mean": dict(product=(MEAN, SAME)),
        "g is the mean in both passes": dict(product=(MEAN, MEAN)),
    },
    "output": {
        "f stands around the output": dict(output=F),
        "g stands around the output": dict(output=G),
        "the output is added up in both passes": dict(output=BOTH),
        "the output is the mean over the ranks": dict(output=(MEAN, SAME)),
    },
    "gelu": {
        "`gelu` is missing": dict(acts=()),
        "`gelu` stands before g, and not between the layers": dict(acts=("before g",)),
        "`gelu` stands after g, and not between the layers": dict(acts=("after g",)),
        "`gelu` stands after b2, and not between the layers": dict(acts=("at last",)),
        "`gelu` stands before g, too": dict(acts=("between", "before g")),
        "`gelu` stands after g, too": dict(acts=("between", "after g")),
        "`gelu` stands after b2, too": dict(acts=("between", "at last")),
    },
    "b1": {
        "b1 is added after gelu": dict(b1="after gelu"),
        "b1 is missing": dict(b1="missing"),
    },
    "b2": {
        "b2 is missing": dict(b2="missing"),
        "every rank adds b2 before g": dict(b2="before"),
        "every rank adds b2 / N before g": dict(b2="before, / N"),
        "b2 is added on rank 0 alone, before g": dict(b2="before, rank 0"),
        "b2 is added before g and after it": dict(b2="twice"),
        "b2 passes through f": dict(of_b2=F),
    },
}
RIGHT = (
    "Right are f around x, b1 before gelu, gelu between the two layers, g around the product, and b2 after g"
)


def told(outputs: Sequence[Tensor | Odd], gradients: Sequence[Mapping[str, Tensor | None]]) -> str | None:
    """Which wrong chain leads to the outputs and to the gradients of all ranks: one wrong place, or two."""
    seen = [each for each in outputs if isinstance(each, Tensor)]
    if len(seen) < len(outputs):
        return None
    for why, chain in _chains():
        mlps = [inputs() for _ in seen]
        made = run(chain, mlps)
        agrees = all(same(got, want.detach()) for got, want in zip(seen, made, strict=True))
        if agrees and _agree(_gradients(mlps, made), gradients):
            return f"{why}. {RIGHT}"
    return None


def _chains() -> Iterator[tuple[str, Chain]]:
    for number in (1, 2):
        for places in combinations(WRONG, number):
            for words in product(*(WRONG[place] for place in places)):
                changes: dict[str, Any] = {}
                for place, word in zip(places, words, strict=True):
                    changes |= WRONG[place][word]
                yield "; and ".join(words), Chain(**changes)


def run(chain: Chain, mlps: Sequence[Mlp]) -> list[Tensor]:
    """Return every rank's output, with autograd's graph through all ranks."""
    size = len(mlps)
    cut = [mlp.part(rank, size) for rank, mlp in enumerate(mlps)]
    act = lambda place, tensors: list(map(gelu, tensors)) if place in chain.acts else tensors
    x = _operated(chain.x, [mlp.x for mlp in mlps])
    first = [linear(each, own.w1) for each, own in zip(x, cut, strict=True)]
    b1 = lambda place, tensors: _added(tensors, cut) if chain.b1 == place else tensors
    active = act("between", _operated(chain.first, b1("before gelu", first)))
    hidden = _operated(chain.hidden, b1("after gelu", active))
    products = act("before g", [linear(each, own.w2) for each, own in zip(hidden, cut, strict=True)])
    b2 = _operated(chain.of_b2, [mlp.b2 for mlp in mlps])
    before = {"before": 1.0, "before, / N": 1 / size, "twice": 1.0}.get(chain.b2, 0.0)
    if before:
        products = [each + before * own for each, own in zip(products, b2, strict=True)]
    if chain.b2 == "before, rank 0":
        products = [products[0] + b2[0], *products[1:]]
    total = act("after g", _operated(chain.product, products))
    if chain.b2 in ("after", "twice"):
        total = [each + own for each, own in zip(total, b2, strict=True)]
    return _operated(chain.output, act("at last", total))


def _added(tensors: list[Tensor], cut: Sequence[Mlp]) -> list[Tensor]:
    return [each + own.b1 for each, own in zip(tensors, cut, strict=True)]


def _operated(ways: Ways, tensors: list[Tensor]) -> list[Tensor]:
    return tensors if ways == NOTHING else list(_Operators.apply(*ways, *tensors))


class _Operators(torch.autograd.Function):
    """An operator on the tensors of all ranks at once."""

    @staticmethod
    def forward(ctx, there: str, back: str, *tensors: Tensor):
        ctx.back = back
        return tuple(_over_ranks(there, tensors))

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return None, None, *_over_ranks(ctx.back, gradients)


def _over_ranks(way: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    if way == SAME:
        return [tensor.clone() for tensor in tensors]
    size = len(tensors)
    total = sum_of(tensors) * {SUM: 1.0, MEAN: 1 / size, TWICE: float(size)}[way]
    return [total.clone() for _ in tensors]


def _gradients(mlps: Sequence[Mlp], outputs: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Return each rank's gradients; zeros where there is none."""
    leaves = [tensor for mlp in mlps for tensor in mlp]
    weights = [output_gradient()] * len(mlps)
    found = torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
    filled = [
        torch.zeros_like(leaf) if each is None else each for each, leaf in zip(found, leaves, strict=True)
    ]
    many = len(NAMES)
    return [dict(zip(NAMES, filled[many * r : many * (r + 1)], strict=True)) for r in range(len(mlps))]


def _agree(made: Sequence[Mapping[str, Tensor]], seen: Sequence[Mapping[str, Tensor | None]]) -> bool:
    for of_rank, own in zip(made, seen, strict=True):
        for name, want in of_rank.items():
            got = own[name]
            if not same(torch.zeros_like(want) if got is None else got, want):
                return False
    return True

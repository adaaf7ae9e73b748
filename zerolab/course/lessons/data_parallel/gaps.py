"""Lesson 03's exercise: what goes wrong with a missing gradient, or with a transposed one."""

from collections.abc import Callable, Iterator, Sequence

import torch

from zerolab.course.evidence import same
from zerolab.course.lessons.data_parallel.cases import (
    SHAPES,
    SIZES,
    Case,
    flat,
    gradient,
    parameter,
    weighted,
)

Values = list[torch.Tensor]


def named(case: Case, seen: Sequence[torch.Tensor]) -> str | None:
    """What explains the averages of all ranks, of that which the cases before did not have."""
    known: list[tuple[str, Values]] = []
    if case.gap is not None:
        known += [*_not_counted(case), *_skipped(case)]
    if case.transposed is not None:
        known += _turned(case, case.transposed)
    fits = [why for why, of in known if all(same(got, want) for got, want in zip(seen, of, strict=True))]
    return ", or else ".join(fits) or counted_as(case, seen)


def _mean(case: Case) -> torch.Tensor:
    return weighted(case.brought(), case.counts) / sum(case.counts)


def _not_counted(case: Case) -> Iterator[tuple[str, Values]]:
    """The mean over those ranks only that have a gradient."""
    brought, ranks = case.brought(), len(case.counts)
    present = sum(count for rank, count in enumerate(case.counts) if rank != case.gap)
    mean = _mean(case).split(SIZES)
    without = {name: sum(case.counts) / present for name in case.missing}
    value = flat(piece * without.get(name, 1) for name, piece in zip(SHAPES, mean, strict=True))
    counts = tuple(count * (rank != case.gap) for rank, count in enumerate(case.counts))
    yield (
        "the tokens of a rank without a gradient were left out of the count: its gradient is zero, and its "
        "tokens count",
        [value] * ranks,
    )
    yield (
        "a rank that lacks one gradient was left out for all parameters: its other gradients and its tokens "
        "count",
        [weighted(brought, counts) / present] * ranks,
    )


def _skipped(case: Case) -> Iterator[tuple[str, Values]]:
    """A message without the missing gradients, or averages that are put back without a place for them."""
    ranks = range(len(case.counts))
    own = [
        piece for name, piece in _named(case.brought()[case.gap or 0]) if not case.lacks(name, case.gap or 0)
    ]
    short = flat([*own, torch.zeros(sum(SIZES) - sum(map(len, own)), dtype=case.dtype)])
    sent = [short if rank == case.gap else each for rank, each in enumerate(case.brought())]
    yield (
        f"rank {case.gap} skipped the parameter without a gradient, so the ranks added different parameters "
        "to each other: send zeros for it",
        [weighted(sent, case.counts) / sum(case.counts)] * len(ranks),
    )
    mean = _mean(case)
    found, at = [], 0
    for name, piece in _named(mean):
        there = not case.lacks(name, case.gap or 0)
        found.append(mean[at : at + len(piece)] if there else torch.zeros_like(piece))
        at += len(piece) * there
    yield (
        f"on rank {case.gap} the averages are put back without a place for the missing gradient, so each one "
        "behind it gets that of another parameter: step over it, and put its average there",
        [flat(found) if rank == case.gap else mean for rank in ranks],
    )


def _turned(case: Case, rank: int) -> Iterator[tuple[str, Values]]:
    """The elements of a transposed gradient in the order of its storage: sent so, written so, or both."""
    brought, mean, ranks = case.brought(), _mean(case), range(len(case.counts))
    sent = [_weight(each, torch.t) if each is brought[rank] else each for each in brought]
    mixed = weighted(sent, case.counts) / sum(case.counts)
    follows = "flatten() and reshape(-1) follow the elements by themselves"
    yield (
        f"rank {rank}'s transposed gradient stands in the message in the order of its storage. {follows}, "
        "and need no t() before them",
        [mixed] * len(ranks),
    )
    yield (
        f"rank {rank}'s averages are written in the order of its gradient's storage, which is transposed: "
        "parameter.grad.copy_(piece.view_as(parameter)) follows the elements",
        [_weight(mean, _from_storage) if each == rank else mean for each in ranks],
    )
    yield (
        "the right numbers in the wrong places: an all-reduce adds storages element by element, and this "
        "gradient is transposed on one rank. Flatten first: flatten() follows the elements, not the storage",
        [_weight(mixed, _from_storage) if each == rank else mixed for each in ranks],
    )


def _weight(value: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The same with the weight alone changed, in its shape."""
    weight, *others = value.split(SIZES)
    return flat([change(weight.view(SHAPES["weight"])), *others])


def _from_storage(weight: torch.Tensor) -> torch.Tensor:
    """The elements of a transposed tensor whose storage holds these numbers."""
    return weight.flatten().view(*reversed(weight.shape)).T


def _named(value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return list(zip(SHAPES, value.split(SIZES), strict=True))


def counted_as(case: Case, seen: Sequence[torch.Tensor]) -> str | None:
    """What the missing gradients count as, if everything else is right, and all ranks have one average."""
    gap, mean = case.gap, _mean(case)
    if gap is None or (any(not same(each, seen[0]) for each in seen[1:]) and not seen[0].isnan().any()):
        return None
    others = [each for rank, each in enumerate(case.brought()) if rank != gap]
    counts = tuple(count for rank, count in enumerate(case.counts) if rank != gap)
    rest = seen[0] * sum(case.counts) - (weighted(others, counts) if others else 0)
    for (name, got), (_, want), (_, left) in zip(_named(seen[0]), _named(mean), _named(rest), strict=True):
        if same(got, want):
            continue
        if name not in case.missing:
            return None
        what = _known(case, name, left / case.counts[gap])
        return (
            f"the {name}'s average is the one in which the gradient that rank {gap} lacks counts as {what}: "
            "count it as zeros"
        )
    return None


def _known(case: Case, name: str, filler: torch.Tensor) -> str:
    """What a missing gradient was replaced by."""
    if filler.isnan().all():
        return "nan"
    if filler.max() - filler.min() < 1e-6:
        return f"{float(filler[0]):.4g} in all elements"
    gap, size = case.gap or 0, len(filler)
    if same(filler, parameter(name, gap, case.dtype).flatten()):
        return "the parameter's own values"
    for rank in range(len(case.counts)):
        for other in SHAPES:
            if same(filler, gradient(other, rank, case.dtype).flatten()[:size]):
                return f"rank {rank}'s gradient of the {other}"
    return f"{', '.join(f'{each:.3g}' for each in filler[:3].tolist())}, …"

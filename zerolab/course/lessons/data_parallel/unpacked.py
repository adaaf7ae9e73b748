"""Lesson 03's exercise: which parameters have which averages, by what they are and where they are from."""

from collections.abc import Mapping, Sequence
from itertools import permutations

import torch

from zerolab.course.evidence import same
from zerolab.course.lessons.data_parallel.cases import SHAPES, SIZES, Case, weighted

NAMES = list(SHAPES)
BEFORE = "what it was before"
STATES = {  # what a gradient may be, and what to do
    BEFORE: "flatten() and reshape() can return a copy, so copy the average into parameter.grad itself",
    "zeros": "put the average there",
    "the sum of count · gradient, which was never divided": "divide by the sum of the counts",
}


def states(case: Case, seen: Sequence[torch.Tensor]) -> str | None:
    """Which gradients of which ranks are right, and what the others are, if that is known of all of them."""
    mean = weighted(case.brought(), case.counts) / sum(case.counts)
    found: dict[tuple[tuple[str, ...], str], list[int]] = {}  # the ranks, by parameters and by what these are
    for rank, value in enumerate(seen):
        known = dict(
            zip(STATES, (case.brought()[rank], torch.zeros_like(mean), mean * sum(case.counts)), strict=True)
        )
        wrong: dict[str, list[str]] = {}
        for name, got, want, *of in _pieces(value, mean, *known.values()):
            if same(got, want):
                continue
            fits = [state for state, each in zip(known, of, strict=True) if same(got, each)]
            if case.lacks(name, rank):  # there was none before
                fits = [state for state in fits if state != BEFORE]
            if not fits:
                return None
            wrong.setdefault(fits[0], []).append(name)
        for state, names in wrong.items():
            found.setdefault((tuple(names), state), []).append(rank)
    said = [_of_ranks(ranks, names, state, len(seen)) for (names, state), ranks in found.items()]
    advice = STATES[next(iter(found))[1]] if found else ""
    return f"{'; '.join(said)}. All others are right: {advice}" if found else None


def _pieces(*values: torch.Tensor) -> list[tuple]:
    """Each parameter's name, and its piece of each value."""
    return list(zip(NAMES, *(value.split(SIZES) for value in values), strict=True))


def _of_ranks(ranks: Sequence[int], names: Sequence[str], state: str, size: int) -> str:
    numbers = [str(rank) for rank in ranks]
    where = f"rank {numbers[0]}" if len(ranks) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
    if len(ranks) == size:
        where = "all ranks"
    if len(names) == len(NAMES):
        return f"on {where} each gradient is {state}"
    return f"on {where} the gradient of {_and(names)} is {state}"


def _and(names: Sequence[str]) -> str:
    *first, last = (f"the {name}" for name in names)
    return f"{', '.join(first)} and {last}" if first else last


def shared(places: Sequence[Mapping[str, int]]) -> str | None:
    """Whether two parameters of a rank have one tensor as their gradient. `places`: the addresses."""
    for rank, own in enumerate(places):
        for name, place in own.items():
            others = [other for other, there in own.items() if there == place and other != name]
            if others:
                return (
                    f"on rank {rank} {_and([name, *others])} have one tensor as their gradient, so the "
                    "average that is copied last is in all of them: give each parameter a tensor of its own"
                )
    return None


def one_place_off(seen: list[torch.Tensor], right: torch.Tensor) -> str | None:
    """Whether each element is, times some factor, the one beside it; and whether the count is at the end."""
    but_first, but_last = slice(1, None), slice(None, -1)
    for side, own, others, end, place in (
        ("before", but_first, but_last, 0, "first"),
        ("behind", but_last, but_first, -1, "last"),
    ):
        want = right[others]
        ranks = [(flat, flat[own] @ want / (want @ want)) for flat in seen]
        if not all(factor and same(flat[own], factor * want) for flat, factor in ranks):
            continue
        said = f"where an element of a gradient should be, there is the one {side} it in the message"
        if all(same(flat[end], factor) for flat, factor in ranks):
            said += (
                f", and the {place} element is the count. So the count stands {place} in the message, and is "
                "read as if it stood at the other end"
            )
        return said
    return None


def begins(case: Case, seen: Sequence[torch.Tensor]) -> str | None:
    """Which parameter of which rank begins with an average that has another place in the message."""
    mean = weighted(case.brought(), case.counts) / sum(case.counts)
    offsets = [sum(SIZES[:index]) for index in range(len(SIZES))]
    for rank, value in enumerate(seen):
        places = [_place(piece, mean) for piece in value.split(SIZES)]
        moved = [index for index, place in enumerate(places) if place not in (offsets[index], None)]
        if moved:
            index = moved[0]
            return (
                f"on rank {rank} the {NAMES[index]} begins with the average of element {places[index]} of "
                f"the message, and its own averages begin with element {offsets[index]}: split the message "
                "at the parameters' sizes, in the order in which they were put together"
            )
    return None


def _place(piece: torch.Tensor, mean: torch.Tensor, length: int = 6) -> int | None:
    """Where the first elements of a piece stand in the right message."""
    windows = mean.unfold(0, length, 1)
    found = (windows - piece[:length]).abs().amax(dim=1) < 1e-5
    return int(found.nonzero()[0]) if found.any() else None


Order = tuple[int, ...]
ORDERS: list[Order] = list(permutations(range(len(SIZES))))


def _in_order(value: torch.Tensor, order: Order) -> torch.Tensor:
    pieces = value.split(SIZES)
    return torch.cat([pieces[index] for index in order])


def orders(case: Case, seen: Sequence[torch.Tensor]) -> str | None:
    """Whether ranks went through the parameters in orders of their own, to send or to put back."""
    if len(case.counts) > 3:
        return None
    sums = torch.zeros(1, sum(SIZES), dtype=case.dtype)  # of every order on every rank
    for count, each in zip(case.counts, case.brought(), strict=True):
        sent = torch.stack([count * _in_order(each, order) / sum(case.counts) for order in ORDERS])
        sums = (sums[:, None] + sent).flatten(0, 1)
    for back in ORDERS:
        message = _in_order(seen[0], back)
        off = (sums - message).abs().amax(dim=1)
        if off.min() < 1e-6 and all(_some_order(each, message) for each in seen):
            index, found = int(off.argmin()), list[Order]()
            for _ in case.counts:
                index, last = divmod(index, len(ORDERS))
                found.insert(0, ORDERS[last])
            return None if set(found) == {back} else _of_orders(found, back)
    return None


def _some_order(value: torch.Tensor, message: torch.Tensor) -> bool:
    return any(same(_in_order(value, order), message) for order in ORDERS)


def _of_orders(sent: Sequence[Order], back: Order) -> str:
    listed = lambda order: ", ".join(NAMES[index] for index in order)
    if len(set(sent)) > 1:
        by_rank = "; ".join(f"rank {rank}: {listed(order)}" for rank, order in enumerate(sent))
        return (
            f"the ranks put the gradients into the message in different orders ({by_rank}): go through the "
            "list of parameters as it is given, and through no set"
        )
    return (
        f"the message has the gradients in the order {listed(sent[0])}, and rank 0 takes the averages out of "
        f"it in the order {listed(back)}: both have to be the same"
    )

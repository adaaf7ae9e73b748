"""Lesson 09: what wrong parameters tell where no known mistake explains them.

An update is a sum of gradients and of the momentum, so its factors are computed.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch

from zerolab import ring
from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.lockstep import Lockstep, Tensors, chunk, mean
from zerolab.course.lessons.incident_room.room import LR, NAMES, Case, batches, start
from zerolab.course.patterns import rule
from zerolab.course.reading import coefficients, factors, made_of, rounded

_NO_MOMENTUM = (
    "the second begins with no momentum. The optimizer keeps the momentum in its state: keep one optimizer "
    "and its state for all steps, and clear only the gradients"
)


def updates_told(case: Case, after: Sequence[torch.Tensor], right: Callable[[Case], Tensors]) -> str | None:
    """What a rank's first two updates tell, from its parameters after each step."""
    if any(flat.shape != start().shape or not flat.isfinite().all() for flat in after):
        return None
    rights = [start(), *(right(case._replace(steps=steps))[0] for steps in (1, 2))]
    got, want = after[0] - rights[0], rights[1] - rights[0]
    if not close(got, want):
        return _first_update(case, got, want)
    return _second_update(after[1] - after[0], want, rights[2] - rights[1])


def _first_update(case: Case, got: torch.Tensor, want: torch.Tensor) -> str:
    factor = float(got @ want / (want @ want))
    if close(got, factor * want):
        return f"the first update is {_named(factor, case)}"
    if told := rounded(got, want):
        return told.replace("its value", "the first update", 1)
    wrong = _wrong(got, want)
    said = (
        _unchanged(case, got[wrong], wrong)
        or _shifted(got, want)
        or (_uses(case, got, want) if case.tied else _summands(case, got, want))
        or "no known mistake explains it: follow one of them through the four verbs"
    )
    return f"{_places(case, wrong, len(want))} are wrong after the first update: {said}"


def _places(case: Case, wrong: torch.Tensor, numel: int) -> str:
    """Which elements are wrong."""
    first, last = int(wrong[0]), int(wrong[-1])
    if len(wrong) == numel:
        return f"all {numel} elements"
    name, begin = "", 0
    for each, size in NAMES.items():
        if case.by_name and begin <= first and last < begin + size:
            name = f", of {each} alone"
        begin += size
    return f"{len(wrong)} of {numel} elements, from {first} to {last}{name},"


def _unchanged(case: Case, got: torch.Tensor, wrong: torch.Tensor) -> str | None:
    """Whether the wrong elements are as they were, and whose shards they are."""
    if got.any():
        return None
    where = [torch.arange(len(start()))[chunk(rank, case.ranks)] for rank in range(case.ranks)]
    whose = [rank for rank, mine in enumerate(where) if torch.isin(mine, wrong).all()]
    if not case.by_name and sum(len(where[rank]) for rank in whose) == len(wrong):
        ranks = f"rank{'s' * (len(whose) > 1)} {', '.join(map(str, whose))}"
        return (
            f"they did not change, and are the shard{'s' * (len(whose) > 1)} of {ranks}. They have to be "
            "updated there, and gathered in each step"
        )
    return "they did not change: they are not reduced, or not updated, or not gathered, or never copied back"


def _shifted(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Whether each element is updated with the gradient of another, as many places away."""
    for by in (*range(1, 5), *range(-4, 0)):
        if close(got[4 + by : len(got) - 4 + by], want[4 : len(want) - 4]):
            return (
                f"each of them gets the gradient of the element {abs(by)} {'before' if by > 0 else 'after'} "
                "it. Parameters and gradients are cut or padded at different places"
            )
    return None


def _named(factor: float, case: Case) -> str:
    """The factor, and what it is made of."""
    n, m = case.ranks, case.micro_batches
    sizes = {"N": n, "N²": n**2} | ({"M": m, "N·M": n * m, "M²": m**2} if m > 1 else {})
    same = lambda number: [name for name, size in sizes.items() if abs(number - size) < 1e-6 * size]
    with_m = f" and M={m} micro-batches" if m > 1 else ""
    said = f"{factor:.3g} times the right one"
    if abs(factor) < 1e-9:
        return "nothing: no gradient reached the parameters"
    if names := same(factor):
        return f"{said}, {' or '.join(names)} with N={n} ranks{with_m}: a division by that is missing"
    if names := same(1 / factor):
        made = " or ".join(f"1/({name})" if "·" in name else f"1/{name}" for name in names)
        return f"{said}, {made} with N={n} ranks{with_m}: it is divided by that once too often"
    if whole(factor):
        return f"{said}: is a gradient counted, or a step taken, {factor:.0f} times?"
    return said + (_of_samples(factor, case) if case.uneven else _of_a_number(factor, n, m))


def _of_samples(factor: float, case: Case) -> str:
    """How many samples such a gradient would be the mean of."""
    total = sum(len(batch) for rank in range(case.ranks) for batch in batches(case, rank))
    return f": as if there were {total / factor:.4g} samples, and all ranks together have {total}"


def _of_a_number(factor: float, ranks: int, micro_batches: int) -> str:
    """Whether a number that fits other cases stands in the place of N or M."""
    for name, size in (("N", ranks), ("M", micro_batches)):
        for made, number in (("{}/" + name, size * factor), (name + "/{}", size / factor)):
            if not whole(1 / factor) and whole(number):
                return f", {made.format(round(number))} with {name}={size}: is {name} a fixed number there?"
    return ": what scales the gradient?"


def whole(number: float) -> bool:
    """Whether a number is 1, 2, 3 or so."""
    return number > 0.5 and abs(number - round(number)) < 1e-6


def _uses(case: Case, got: torch.Tensor, want: torch.Tensor) -> str | None:
    """How often each use of the tied weight counts."""
    parts, tied = {}, slice(NAMES["body"], None)
    for name, uses in (("its use in the embedding", (1.0, 0.0)), ("its use in the head", (0.0, 1.0))):
        world = Lockstep(case.ranks)
        world.uses = uses
        gradients = [
            [world.gradient(batch, start()) for batch in batches(case, rank)] for rank in range(case.ranks)
        ]
        parts[name] = -LR * mean(gradients)[tied]
    said = made_of(got[tied], want[tied], [parts])
    return f"{said}, in the tied weight" if said else None


def _summands(case: Case, got: torch.Tensor, want: torch.Tensor) -> str | None:
    """What the first wrong shard's update is a sum of: the ranks' gradients in the first step."""
    world = Lockstep(case.ranks)
    parts = {}
    for rank in range(case.ranks):
        for micro, batch in enumerate(batches(case, rank)):
            which = f"'s micro-batch {micro}" if case.micro_batches > 1 else "'s gradient"
            parts[f"rank {rank}{which}"] = -LR * world.gradient(batch, world.flats[rank])
    found, first = {}, None
    for owner, name, mine, others in _shards(case):
        if first and name != first[0]:
            break  # one parameter tells enough
        if len(_wrong(got[mine], want[mine])):
            own = {name: part[mine] for name, part in parts.items()}
            own |= {f"{n} of {at}": part[cut] for at, cut in others.items() for n, part in parts.items()}
            found[owner] = factors(got[mine], want[mine], [own])
            first = first or (name, owner, mine, own)
    if first is None:
        return None
    name, owner, mine, own = first
    known = {rank: pair for rank, pair in found.items() if pair}
    explain = lambda *_: rule(known) if len(known) == len(found) else None
    said = made_of(got[mine], want[mine], [own], explain)
    return f"in rank {owner}'s shard{f' of {name}' * bool(name)} {said}" if said else None


def _shards(case: Case) -> Iterator[tuple[int, str, slice, dict[str, slice]]]:
    """Each shard's owner, name and place; of parameters by name, also the same place in the other ones."""
    if not case.by_name:
        for owner in range(case.ranks):
            yield owner, "", chunk(owner, case.ranks), {}
        return
    begins = dict(zip(NAMES, accumulate(NAMES.values(), initial=0), strict=False))
    for name, size in NAMES.items():
        for owner, cut in enumerate(ring.chunks(size, case.ranks)):
            others = {
                each: slice(begins[each] + cut.start, begins[each] + cut.stop)
                for each in NAMES
                if each != name and cut.stop <= NAMES[each]
            }
            yield (
                owner,
                name,
                slice(begins[name] + cut.start, begins[name] + cut.stop),
                others,
            )


def _second_update(got: torch.Tensor, first: torch.Tensor, want: torch.Tensor) -> str:
    """The first update was right; the second is momentum times the first, and its own gradient."""
    wrong = _wrong(got, want)
    if not len(wrong):
        return "the first two steps are right, and a later one is not: what is left over from step to step?"
    begin = "the first step is right, and "
    if len(wrong) < len(got):
        many = len(wrong) > 1
        which = f"elements {int(wrong[0])} to {int(wrong[-1])} are" if many else f"element {int(wrong[0])} is"
        begin += f"{which} wrong after the second: "
    got, first, gradient = got[wrong], first[wrong], (want - MOMENTUM * first)[wrong]
    if not got.any():
        return f"{begin}the second does not change them: they are not updated, or not gathered, any more"
    if close(got, gradient):
        return f"{begin}{_NO_MOMENTUM}"
    found = coefficients(got, {"first": first, "second": gradient})
    if found is None:
        return (
            f"{begin}the second update is no sum of the first step's gradient and of its own: what does the "
            "first step change that the second one uses?"
        )
    return begin + _of_factors(*(0.0 if abs(each) < 1e-3 else round(each, 4) for each in found.values()))


def _of_factors(kept: float, new: float) -> str:
    """How often the first step's gradient and the second's count in the second update."""
    counts = f"in the second the first step's gradient counts {kept:.3g} times"
    left = kept - MOMENTUM
    if new == 0:
        again = f", and the gradient of the first step counts again, {left:.3g} times"
        return (
            "the second has nothing of the second step's gradient in it"
            f"{again if left > 0 else ''}: is it computed with parameters of before the update?"
        )
    if kept == MOMENTUM:
        return (
            f"in the second the gradient counts {new:.3g} times what it should: what it is divided by, or "
            "multiplied with, is left over from step to step and grows"
        )
    if new == 1:
        what = "is left over from" if left > 0 else "takes away a part of"
        return f"{counts}, and its momentum makes that {MOMENTUM:g}: what {what} the first step?"
    said = (
        f"{counts}, where momentum makes that {MOMENTUM:g}, and its own counts {new:.3g} times, where 1 is "
        "right"
    )
    if abs(left - new) < 1e-3:
        return (
            f"{said}. That is {new:.3g} times the sum of both steps' gradients: the sum is not cleared, and "
            "what it is divided by grows, too. Clear the sum after each update"
        )
    return said


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.allclose(got, want, rtol=1e-6, atol=1e-9)


def _wrong(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (~torch.isclose(got, want, rtol=1e-6, atol=1e-9)).nonzero().flatten()

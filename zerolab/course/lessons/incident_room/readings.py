"""Lesson 09: what wrong parameters tell where no known mistake explains them.

An update is a sum of gradients and of the momentum, so its factors are computed.
"""

from collections.abc import Callable, Sequence

import torch

from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.lockstep import Lockstep, Tensors, chunk
from zerolab.course.lessons.incident_room.room import LR, Case, batches, start
from zerolab.course.reading import coefficients, made_of


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
        return f"the first update is {_named(factor, case)} times the right one: what scales the gradient?"
    wrong = _wrong(got, want)
    said = "and no known mistake explains it: follow one of them through the four verbs"
    if not case.tied:
        said = _summands(case, got, want) or said
    return (
        f"{len(wrong)} of {len(want)} elements are wrong after the first update, from {int(wrong[0])} to "
        f"{int(wrong[-1])}, {said}"
    )


def _named(factor: float, case: Case) -> str:
    """The factor, and what it is made of."""
    sizes = {"N": case.ranks, "M": case.micro_batches, "N·M": case.ranks * case.micro_batches}
    sizes |= {"N²": case.ranks**2, "M²": case.micro_batches**2}
    names = [name for name, size in sizes.items() if size > 1 and abs(factor - size) < 1e-6 * size]
    names += [f"1/({name})" for name, size in sizes.items() if size > 1 and abs(factor * size - 1) < 1e-6]
    told = {"N": f"N={case.ranks} ranks", "M": f"M={case.micro_batches} micro-batches"}
    known = [text for letter, text in told.items() if any(letter in name for name in names)]
    return f"{factor:.3g}" + (f" = {' or '.join(names)} ({', '.join(known)})" if names else "")


def _summands(case: Case, got: torch.Tensor, want: torch.Tensor) -> str | None:
    """What the first wrong shard's update is a sum of: the ranks' gradients in the first step."""
    world = Lockstep(case.ranks)
    parts = {}
    for rank in range(case.ranks):
        for micro, batch in enumerate(batches(case, rank)):
            which = f"'s micro-batch {micro}" if case.micro_batches > 1 else "'s gradient"
            parts[f"rank {rank}{which}"] = -LR * world.gradient(batch, world.flats[rank])
    for owner in range(case.ranks):
        mine = chunk(owner, case.ranks)
        if len(_wrong(got[mine], want[mine])):
            own = {name: part[mine] for name, part in parts.items()}
            said = made_of(got[mine], want[mine], [own])
            return f"and in rank {owner}'s shard {said}" if said else None
    return None


def _second_update(got: torch.Tensor, first: torch.Tensor, want: torch.Tensor) -> str:
    """The first update was right; the second is momentum times the first, and its own gradient."""
    gradient = want - MOMENTUM * first
    begin = "the first step is right, and "
    found = coefficients(got, {"first": first, "second": gradient})
    if found is None:
        return f"{begin}a later one is not: what is left over from step to step?"
    kept, new = (0.0 if abs(factor) < 1e-3 else round(factor, 4) for factor in found.values())
    if (kept, new) == (MOMENTUM, 1):
        return f"{begin}the second, too. A later one is not: what is left over from step to step?"
    if (kept, new) == (0, 1):
        return (
            f"{begin}the second begins with no momentum. The optimizer keeps the momentum in its state: keep "
            "one optimizer and its state for all steps, and clear only the gradients"
        )
    if new == 0:
        again = f", and the gradient of the first step counts again, {kept - MOMENTUM:.3g} times"
        return (
            f"{begin}the second has nothing of the second step's gradient in it"
            f"{again if kept > MOMENTUM else ''}: is it computed with parameters of before the update?"
        )
    if kept == MOMENTUM:
        return (
            f"{begin}in the second the gradient counts {new:.3g} times what it should: what it is divided "
            "by, or multiplied with, is left over from step to step and grows"
        )
    if new == 1:
        return (
            f"{begin}in the second the first step's gradient counts {kept:.3g} times, and its momentum makes "
            f"that {MOMENTUM:g}: what is left over from the first step?"
        )
    return (
        f"{begin}in the second the first step's gradient counts {kept:.3g} times, where momentum makes that "
        f"{MOMENTUM:g}, and its own counts {new:.3g} times, where 1 is right"
    )


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.allclose(got, want, rtol=1e-6, atol=1e-9)


def _wrong(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (~torch.isclose(got, want, rtol=1e-6, atol=1e-9)).nonzero().flatten()

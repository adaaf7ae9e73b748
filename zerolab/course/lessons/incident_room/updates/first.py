"""Lesson 09: what a wrong first update tells: whose gradients are in it, how often, and of which elements."""

from collections.abc import Sequence

import torch

from zerolab.course.lessons.incident_room.lockstep import chunk, mean
from zerolab.course.lessons.incident_room.room import LR, PSI, Case
from zerolab.course.lessons.incident_room.updates import clipped, counted, moved, weighed
from zerolab.course.lessons.incident_room.updates.counted import names
from zerolab.course.lessons.incident_room.updates.mixed import summands, uses
from zerolab.course.lessons.incident_room.updates.steps import (
    Piece,
    Step,
    close,
    counts,
    gradients,
    pieces,
    wrong_elements,
)
from zerolab.course.reading import rounded, unlike

UNKNOWN = "no known mistake explains it: follow one of them through the four verbs"


def told(step: Step, by_name: bool, most: float | None) -> str:
    """What it is. ``most``: the norm that gradients are clipped to, if they are."""
    every = pieces(step.case, by_name)
    got = torch.cat([step.got(piece) for piece in every])
    want = torch.cat([step.right(piece) for piece in every])
    scale = float(got @ want / (want @ want))
    if close(got, scale * want) and most is None:
        return f"the first update is {scaled(scale, step)}"
    wrong = wrong_elements(got, want)
    where = f"{_places(step.case, wrong)} wrong after the first update: "
    if said := _unchanged(step, got[wrong], wrong) or (uses(step) if step.case.tied else None):
        return where + said
    if said := _counted(step, every, most):
        return where + said if _in_part(step, every) else f"in the first update {said}"
    if close(got, scale * want):
        return f"the first update is {scaled(scale, step)}"
    said = (
        _of_numbers(got / -LR, want / -LR)
        or moved.shifted(got, want, step.case)
        or (None if step.case.tied else summands(step, every))
    )
    return where + (said or UNKNOWN)


def _in_part(step: Step, every: Sequence[Piece]) -> bool:
    """Whether a part of some shard is right."""
    wrong = [(len(wrong_elements(step.got(piece), step.right(piece))), piece) for piece in every]
    return any(0 < many < piece.cut.stop - piece.cut.start for many, piece in wrong)


def _counted(step: Step, every: Sequence[Piece], most: float | None) -> str | None:
    """How often the gradients count, where the update is a sum of them; of parameters by name, of each."""
    said: dict[str, str] = {}
    for name in dict.fromkeys(piece.name for piece in every):
        tables = [counts(step, piece) for piece in every if piece.name == name]
        if any(table is None for table in tables):
            return None
        table = torch.stack([each for each in tables if each is not None])
        if not torch.allclose(table, torch.ones_like(table), rtol=1e-6):
            found = in_words(table, step, most)
            if found is None:
                return None
            said[name] = found
    if len(set(said.values())) != 1:
        return None
    name, text = next(iter(said.items()))
    return f"{text} (of {name})" if len(said) < len({piece.name for piece in every}) else text


def in_words(table: torch.Tensor, step: Step, most: float | None) -> str | None:
    """What is in the numbers by owner, rank and micro-batch, where 1 is right."""
    case = step.case
    if case.uneven and (said := weighed.told(table, case)):
        return said
    found = gradients(step)
    norm = float(mean(found).norm())
    clip = 1.0 if most is None else min(1.0, most / norm)
    of_norms = clipped.told(table * clip, case, found, step.before, most)
    if most is not None:  # the length is that of the clipping, whatever is in the sum
        table = table / table.abs().max().clamp(min=1e-9)
    return of_norms or counted.told(table, case)


def scaled(times: float, step: Step) -> str:
    """The factor of an update, and what it is made of."""
    case, n, m = step.case, step.case.ranks, step.case.micro_batches
    said = f"{times:.3g} times the right one"
    if rate := _other_rate(step):
        gradient = counted.factor(times / rate, case)
        return (
            f"{said}. The learning rate is {rate:.3g} times the given one, and the gradient {gradient} what "
            "it should be: repair the gradient, and leave the rate"
        )
    with_m = f" and M={m} micro-batches" if m > 1 else ""
    if abs(times) < 1e-9:
        return "nothing: no gradient reached the parameters"
    if made := counted.momentum_of(times):
        return said + made
    if found := names(times, case):
        return f"{said}, {' or '.join(found)} with N={n} ranks{with_m}: a division by that is missing"
    if found := names(1 / times, case):
        made = " or ".join(f"1/({name})" if "·" in name else f"1/{name}" for name in found)
        return f"{said}, {made} with N={n} ranks{with_m}: it is divided by that once too often"
    if whole(times):
        return f"{said}: is a gradient counted, or a step taken, {times:.0f} times?"
    return said + (weighed.of_samples(times, case) if case.uneven else _of_a_number(times, n, m))


def _other_rate(step: Step) -> float | None:
    """How many times the given one the learning rate of all optimizers is, where it is another one."""
    rates = {rate / LR for each in step.ended for rate in each.rates}
    return rates.pop() if len(rates) == 1 and abs(max(rates) - 1) > 1e-9 else None


def _of_a_number(times: float, ranks: int, micro_batches: int) -> str:
    """Whether a number that fits other cases stands in the place of N or M."""
    for name, size in (("N", ranks), ("M", micro_batches)):
        for made, number in (("{}/" + name, size * times), (name + "/{}", size / times)):
            if not whole(1 / times) and whole(number):
                return f", {made.format(round(number))} with {name}={size}: is {name} a fixed number there?"
    return ": what scales the gradient?"


def whole(number: float) -> bool:
    """Whether a number is 1, 2, 3 or so."""
    return number > 0.5 and abs(number - round(number)) < 1e-6


def _of_numbers(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Whether the gradients are right, and then rounded or changed element by element."""
    near = got.round()
    got = torch.where((got - near).abs() < 1e-9 * got.abs().clamp(min=1), near, got)
    size = got.abs()
    if float(size.max() - size.min()) < 1e-4 * float(size.max()):
        return f"all have changed by {float(size[0]) * LR:.3g}, up or down: another optimizer, such as Adam?"
    said = rounded(got, want) or unlike(got, want)
    if said is None or said.startswith("all is right but"):
        return None
    return said.replace("its value", "the gradient", 1)


def _places(case: Case, wrong: torch.Tensor) -> str:
    """Which elements are wrong."""
    if len(wrong) == PSI:
        return f"all {PSI} elements are"
    if len(wrong) == wrong[-1] - wrong[0] + 1:
        return f"{moved.span(wrong.tolist(), case)} {'are' if len(wrong) > 1 else 'is'}"
    return f"{len(wrong)} of {PSI} elements, from {int(wrong[0])} to {int(wrong[-1])}, are"


def _unchanged(step: Step, got: torch.Tensor, wrong: torch.Tensor) -> str | None:
    """Whether the wrong elements are as they were, and whose shards they are."""
    if got.any():
        return None
    case = step.case
    held = sum(each.state for each in step.ended)
    if case.tied and held > PSI + case.ranks:
        return (
            f"they did not change. The ranks together hold {held} elements of momentum, so the tied weight "
            "stands in flat twice: the copy that was not updated is written over the new one"
        )
    where = [torch.arange(PSI)[chunk(rank, case.ranks)] for rank in range(case.ranks)]
    whose = [rank for rank, mine in enumerate(where) if torch.isin(mine, wrong).all()]
    if not case.by_name and sum(len(where[rank]) for rank in whose) == len(wrong):
        ranks = f"rank{'s' * (len(whose) > 1)} {', '.join(map(str, whose))}"
        return (
            f"they did not change, and are the shard{'s' * (len(whose) > 1)} of {ranks}. They have to be "
            "updated there, and gathered in each step"
        )
    return "they did not change: they are not reduced, or not updated, or not gathered, or never copied back"

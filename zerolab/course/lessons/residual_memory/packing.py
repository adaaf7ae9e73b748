"""Lesson 07's exercise on P_a: each rank keeps 1/N of a checkpointed input, and backward gathers it."""

import re
from collections.abc import Callable
from functools import partial
from math import prod

from zerolab.course.attempts import Attempt, Odd, attempt
from zerolab.course.evidence import Finding, examine, same
from zerolab.course.exercise import graded
from zerolab.course.lessons.residual_memory.by_hand import by_hand
from zerolab.course.lessons.residual_memory.held import Kept, packed_and_unpacked
from zerolab.course.lessons.residual_memory.inputs import (
    ALL_LAST,
    CASES,
    CUT,
    MISTAKES,
    PLACES,
    UNEVEN,
    Case,
    as_another,
)
from zerolab.course.lessons.residual_memory.packing_costs import cost
from zerolab.course.lessons.residual_memory.packing_readings import of_cut, of_parts
from zerolab.course.lessons.residual_memory.solution import Packed

_OF_SIZES = (
    "invalid for input of size",
    "must have the same size",
    "must make the same calls",
    "index out of range",
    "must match the existing size",
)
_UNEVEN = (
    ". N does not divide the number of elements of every input: ring.chunks cuts parts that differ by one, "
    "and torch's all_gather needs parts of one size, so pad the last one. Each rank keeps part number "
    "dist.get_rank(), and puts it where that part was"
)
_MOST_RANKS = max(case.world_size for case in CASES)  # more than the elements of padding
_BESIDE = "the input whose number of elements N divides is right, and this one is not: "
HINTS = (
    "in __init__ keep three things: the tensor's shape, where this rank's part lies in the flat tensor, and "
    "the part. Nothing may be sent yet. In unpack make an empty flat tensor, put the part to its place, and "
    "gather.",
    "ring.chunks(numel, N)[rank] is a slice of the flat tensor, and works for every numel. ring.all_gather("
    "flat) fills the rest of a flat tensor that has this rank's slice in it.",
    "the part is tensor.detach().flatten()[self.mine].clone(). Without .clone() it is a view, and without "
    ".detach() it has a graph: both keep the whole input in memory. Return flat.view(self.shape).",
)


@graded(
    "Gold: every input comes back as it was, also where N does not divide it, a rank keeps 1/N of it and "
    "nothing else, and one all-gather in backward is all that is sent. That is P_a.",
    call="Packed(tensor)",
    hints=HINTS,
    solution=[Packed],
)
def check_packing(cls: Callable) -> str | None:
    """Pack several inputs with cls(tensor) on 2 to 4 ranks, and get them back, the last one first.

    Bronze for the inputs, with shape and dtype; silver for an all-gather of 1/N from each rank, in unpack;
    gold if nothing but 1/N of the inputs is in memory.
    """
    return examine(CASES, partial(_look, cls))


def _keep(cls: Callable, case: Case, rank: int) -> Kept:
    """In the worker: what the class gives back, and what it keeps."""
    with by_hand("ring.all_gather"):
        return packed_and_unpacked(cls, case)


def _look(cls: Callable, case: Case) -> Finding:
    outcome = attempt(_keep, [(cls, case, rank) for rank in range(case.world_size)])
    if stopped := _stopped(outcome, case):
        return Finding(str(case), stopped)
    findings = [_of_input(case, outcome, number) for number in range(len(case.shapes))]
    wrong = next((finding for finding in findings if finding.wrong), None)
    if wrong:
        wrong.also = outcome.hint_of_calls
        return wrong
    if any(not same(values.again, case.whole()[0]) for values in outcome.values):
        return Finding(
            str(case),
            "all inputs come back, and the first one does not when it is packed once more after them: keep "
            "what belongs to one input in self, and nothing in the class or in a global variable",
        )
    findings[0].where, findings[0].cost = str(case), cost(case, outcome)
    return findings[0]


def _of_input(case: Case, outcome: Attempt, number: int) -> Finding:
    whole, ranks = case.whole(), range(case.world_size)
    uneven = bool(whole[number].numel() % case.world_size)
    last = [same(value, whole[-1]) for values in outcome.values for value in values.values]
    others = {ALL_LAST: whole[-1]} if all(last) else as_another(whole, number)
    mistakes = {why: [value] * len(ranks) for why, value in others.items()}
    if number == 0:
        mistakes |= {why: [value(case, whole, rank) for rank in ranks] for why, value in MISTAKES.items()}
    elif uneven:
        mistakes |= {why: [value(whole[number], len(ranks))] * len(ranks) for why, value in UNEVEN.items()}
    found = Finding(
        f"{case}, in the {PLACES[number]} input",
        None,
        [values.values[number] for values in outcome.values],
        [whole[number]] * len(ranks),
        mistakes,
        whole=whole[number].flatten(),
    )
    if found.wrong:
        of_length = of_cut(case, outcome, number) if uneven else None
        found.told = (_BESIDE * (number > 0) + of_length) if of_length else of_parts(case, outcome, number)
        found.cause = f"{_BESIDE}{CUT[0].lower()}{CUT[1:]}" if number and uneven else None
    return found


def _padded(stopped: str) -> str | None:
    """Whether `unpack` gives the input its shape with the padding still behind it."""
    sizes = re.search(r"shape '\[([\d, ]+)\]' is invalid for input of size (\d+)", stopped)
    if not sizes:
        return None
    numel, size = prod(map(int, sizes[1].split(","))), int(sizes[2])
    if not numel < size < numel + _MOST_RANKS:
        return None
    return (
        f"{stopped}. The {size} elements are the input's {numel} and padding: take flat[:{numel}] before you "
        "restore the shape"
    )


def _of_another(stopped: str, case: Case) -> str | None:
    """Whether two sizes that do not fit are those of parts of two inputs."""
    sizes = re.search(
        r"expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\)", stopped
    )
    if not sizes or abs(int(sizes[1]) - int(sizes[2])) < 2:  # the parts of one input differ by one at most
        return None
    of_part = {number: numel / case.world_size for number, numel in enumerate(map(prod, case.shapes))}
    places = [
        [number for number, size in of_part.items() if abs(size - int(found)) < 1] for found in sizes.groups()
    ]
    if not all(len({case.shapes[number] for number in each}) == 1 for each in places):
        return None
    asked, kept = (PLACES[each[0]] for each in places)
    return (
        f"{stopped}. {sizes[2]} elements are a part of the {kept} input, and the {asked} one is unpacked "
        "here: keep the part in self, and not in the class or in a global variable. The last input that is "
        "packed is unpacked first"
    )


def _stopped(outcome: Attempt, case: Case) -> str | None:
    if stopped := outcome.failure or (any(outcome.calls) and outcome.unsound):
        lost = "lost the rank that it exchanged" in stopped and "all_gather" in str(outcome.collectives)
        named = _padded(stopped) or _of_another(stopped, case)
        return named or stopped + _UNEVEN * (lost or any(word in stopped for word in _OF_SIZES))
    if any(values.changed for values in outcome.values):
        return (
            "Packed(tensor) writes to the tensor that it is given, and the forward pass computes with that: "
            "write to a copy"
        )
    odd = next((values.odd for values in outcome.values if values.odd), None)
    if odd and odd.kind != "NoneType":
        return (
            f"Packed(tensor) returned {odd.kind}, {odd.text}, which has no method unpack: write a class. Its "
            "__init__ keeps what is needed, and its unpack() returns the tensor"
        )
    kinds = {each.kind for values in outcome.values for each in values.values if isinstance(each, Odd)}
    if odd or (kinds == {"NoneType"} and not any(outcome.calls)):
        if any(values.keeps for values in outcome.values):
            return "unpack sends nothing and returns None: gather the parts, and return the whole tensor"
        return "not written yet: nothing was sent and unpack returned None"
    return None

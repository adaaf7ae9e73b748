"""Lesson 07's exercise on P_a: each rank keeps 1/N of a checkpointed input, and backward gathers it."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from zerolab.course.attempts import Attempt, Odd, attempt
from zerolab.course.evidence import Finding, examine
from zerolab.course.exercise import graded
from zerolab.course.lessons.residual_memory.by_hand import by_hand
from zerolab.course.lessons.residual_memory.held import SMALL, Kept, packed_and_unpacked
from zerolab.course.lessons.residual_memory.inputs import (
    CASES,
    IN_ITS_CHUNK,
    LOST_REST,
    MISTAKES,
    UNEVEN,
    Case,
    arrived,
    parts,
)
from zerolab.course.lessons.residual_memory.solution import Packed
from zerolab.course.targets import bronze, silver
from zerolab.course.wire import sent_bytes

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
_BESIDE = f"the input whose number of elements N divides is right, and this one is not: {LOST_REST}"
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
    "nothing else, and each rank sends its part once, in backward. That is P_a.",
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
    if stopped := _stopped(outcome):
        return Finding(str(case), stopped)
    findings = [_of_input(case, outcome, number) for number in range(len(case.shapes))]
    wrong = next((finding for finding in findings if finding.wrong), None)
    if wrong:
        wrong.also = outcome.hint_of_calls
        return wrong
    findings[0].where, findings[0].cost = str(case), _cost(case, outcome)
    return findings[0]


def _of_input(case: Case, outcome: Attempt, number: int) -> Finding:
    whole, ranks = case.whole(), range(case.world_size)
    if number == 0:
        mistakes = {why: [value(case, whole, rank) for rank in ranks] for why, value in MISTAKES.items()}
    else:
        mistakes = {why: [value(whole[number], len(ranks))] * len(ranks) for why, value in UNEVEN.items()}
    return Finding(
        f"{case}, in the {('first', 'second', 'third', 'fourth')[number]} input",
        None,
        [values.values[number] for values in outcome.values],
        [whole[number]] * len(ranks),
        mistakes,
        whole=whole[number].flatten(),
        told=_of_parts(case, outcome, whole[0]) if number == 0 else None,
        cause=_BESIDE if number and whole[number].numel() % len(ranks) else None,
    )


def _of_parts(case: Case, outcome: Attempt, whole: Tensor) -> str | None:
    """Say whose parts of the first input are not at their places."""
    seen = [values.values[0] for values in outcome.values]
    if all(not isinstance(each, Odd) and _in_8_bits(case, each, whole) for each in seen):
        return (
            "the parts are rounded to whole multiples of 1/127 of their largest element, as int8 does it: "
            "keep each part in the input's own dtype"
        )
    found = arrived(case, [each for each in seen if not isinstance(each, Odd)], whole)
    everyone = list(range(case.world_size))
    if not found or len(found) < case.world_size or all(own == everyone for own in found):
        return None
    if all(own == [rank] for rank, own in enumerate(found)):
        return (
            "each rank's own part is at its place, and none of the others' is: unpack has to gather them, "
            "and to wait until they are there"
        )
    if "dist.all_reduce" in outcome.collectives:
        return "dist.all_reduce adds up what all ranks have: there have to be zeros outside a rank's own part"
    if found[0] and all(own == found[0] for own in found):
        missing = [rank for rank in everyone if rank not in found[0]]
        is_right, is_not = _parts_of(found[0]), _parts_of(missing)
        return (
            f"on every rank {is_right} right, and {is_not} not: what is sent is not the part. {IN_ITS_CHUNK}"
        )
    rank = next(rank for rank, own in enumerate(found) if own != everyone)
    missing = [peer for peer in everyone if peer not in found[rank]]
    if not found[rank]:
        return None
    return f"on rank {rank} {_parts_of(missing)} not there: every rank needs those of all ranks"


def _in_8_bits(case: Case, got: Tensor, whole: Tensor) -> bool:
    """Whether each part of a value is near the right one, and on the grid of int8."""
    if got.shape != whole.shape or got.dtype != whole.dtype:
        return False
    near = (got - whole).abs().max() <= 0.02 * whole.abs().max()
    steps = [127 * part / part.abs().max() for part in parts(got, case.world_size)]
    return bool(near) and all(bool(((each - each.round()).abs() < 1e-3).all()) for each in steps)


def _parts_of(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}'s part is"
    return f"the parts of ranks {' and '.join(map(str, ranks))} are"


def _stopped(outcome: Attempt) -> str | None:
    if stopped := outcome.failure or (any(outcome.calls) and outcome.unsound):
        lost = "lost the rank that it exchanged" in stopped and "all_gather" in str(outcome.collectives)
        return stopped + _UNEVEN * (lost or any(word in stopped for word in _OF_SIZES))
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


def _cost(case: Case, outcome: Attempt) -> str | None:
    """What keeps right inputs from a target, or from passing."""
    whole = sum(case.numels) * case.item
    if not any(outcome.calls) and all(values.held >= whole for values in outcome.values):
        return (
            "every rank keeps all of every input, and unpack sends nothing: that is checkpointing without "
            "P_a. Keep this rank's part, 1/N, and gather the others' in unpack"
        )
    return _sent_too_much(case, outcome) or _held_too_much(case, outcome)


def _sent_too_much(case: Case, outcome: Attempt) -> str | None:
    allowed, least = ((case.world_size - 1) * part for part in (case.share, case.least))
    for rank, values in enumerate(outcome.values):
        before = [call for call in outcome.calls[rank][: values.calls] if not call.received]
        if early := sent_bytes(before, case.world_size):
            return bronze(
                f"rank {rank} sends {early:,.0f} bytes in Packed(tensor), which runs in the forward pass. "
                "Every rank has the whole input then: cut it without a message, and gather in unpack"
            )
        if objects := [name for name in outcome.collectives if "object" in name]:
            return bronze(
                f"{objects[0]} pickles Python objects, and sends more than their numbers: gather tensors "
                "with ring.all_gather or dist.all_gather"
            )
        sent = sent_bytes(outcome.messages[rank], case.world_size)
        if sent > allowed + 1:
            return bronze(_too_many(case, outcome, rank, sent, allowed))
        if sent < least - 1:
            return bronze(
                f"the check sees {sent:,.0f} bytes that rank {rank} sends, and an all-gather of parts of 1/N "
                f"sends {least:,} at least: use ring.all_gather or dist.all_gather"
            )
    return None


def _too_many(case: Case, outcome: Attempt, rank: int, sent: float, allowed: int) -> str:
    said = f"rank {rank} sends {sent:,.0f} bytes, and an all-gather of parts of 1/N sends {allowed:,}"
    times = sent / allowed
    if case.world_size > 2 and abs(times - case.world_size) < 0.2:
        return f"{said}: it sends whole inputs, and the other ranks miss its part alone"
    if "dist.all_reduce" in outcome.collectives and abs(times - 2) < 0.2:
        return f"{said}. Twice as many are an all-reduce, which adds up zeros where nothing has to be added"
    if found := {message.dtype for message in outcome.messages[rank]} - {case.dtype}:
        other = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
        own = str(case.dtype).removeprefix("torch.")
        return f"{said}. It sends parts of another dtype: {other}, and the inputs are {own}"
    if abs(times - round(times)) < 0.05:
        return f"{said}. It gathers {round(times)} times in an unpack: once is enough"
    return f"{said}, so it sends {times:.3g} times what it has to"


def _held_too_much(case: Case, outcome: Attempt) -> str | None:
    """More than a rank's part, from packing to backward or after an unpack."""
    allowed = case.share + SMALL * len(case.shapes)
    whole = sum(case.numels) * case.item
    for rank, values in enumerate(outcome.values):
        keeps = f"rank {rank} keeps {values.held:,} bytes of inputs of {whole:,}, and 1/N are {case.share:,}"
        if values.held > allowed and "graph" in values.why:
            return silver(
                f"{keeps}. The part has a graph, which keeps the whole input: tensor.detach() before you cut"
            )
        if values.held > allowed and "view" in values.why:
            return silver(f"{keeps}. {values.why[0].upper()}{values.why[1:]}, keeps the whole: .clone() it")
        if values.held > allowed:
            return silver(f"{keeps}. {f'Look at {values.why}' if values.why else 'Keep one part'}")
    for rank, values in enumerate(outcome.values):
        if values.left > allowed:
            name = f", in `{values.name}`" if values.name else ""
            return silver(
                f"after an unpack rank {rank} keeps {values.left:,} bytes{name}, and its parts are "
                f"{case.share:,}: return what was gathered, and keep nothing of it"
            )
    return None

"""Lesson 07's exercise on P_a: what a class that gives right inputs back sends, and what it keeps."""

from collections.abc import Sequence

from zerolab.course.attempts import Attempt
from zerolab.course.lessons.residual_memory.held import SMALL
from zerolab.course.lessons.residual_memory.inputs import Case
from zerolab.course.messages import Message, sent_bytes
from zerolab.course.targets import bronze, silver


def cost(case: Case, outcome: Attempt) -> str | None:
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
        messages = [call for call in outcome.calls[rank][: values.ended] if not call.received]
        sent = sent_bytes(messages, case.world_size)
        if sent > allowed + 1:
            return bronze(_too_many(case, messages, f"rank {rank}", sent, allowed))
        if sent < least - 1:
            return bronze(
                f"the check sees {sent:,.0f} bytes that rank {rank} sends, and an all-gather of parts of 1/N "
                f"sends {least:,} at least: use ring.all_gather or dist.all_gather"
            )
    return None


def _too_many(case: Case, messages: Sequence[Message], who: str, sent: float, allowed: int) -> str:
    said = f"{who} sends {sent:,.0f} bytes, and an all-gather of parts of 1/N sends {allowed:,}"
    times, calls = sent / allowed, {message.call for message in messages}
    if all("all_reduce" in call for call in calls):
        return f"{said}. {min(calls)} adds up zeros where nothing has to be added, with twice the bytes"
    if case.world_size > 2 and abs(times - case.world_size) < 0.2:
        return f"{said}: it sends whole inputs, and the other ranks miss its part alone"
    if found := {message.dtype for message in messages} - {case.dtype}:
        other = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
        own = str(case.dtype).removeprefix("torch.")
        return f"{said}. It sends parts of another dtype: {other}, and the inputs are {own}"
    if abs(times - round(times)) < 0.05 and all("all_gather" in call for call in calls):
        return f"{said}. It gathers {round(times)} times in an unpack: once is enough"
    return f"{said}, so {' and '.join(sorted(calls))} send {times:.3g} times what a rank has to"


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

"""Lesson 05's exercise on order: units are ready in any order, and all ranks reduce them in the same one."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from zerolab.course.alive import Alive, kept_by
from zerolab.course.attempts import Attempt, Odd, attempt, returned
from zerolab.course.evidence import Finding, examine
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_2.backward_passes import CASES, MISTAKES, Case
from zerolab.course.lessons.zero_stage_2.solution import InOrder
from zerolab.course.targets import bronze, silver

HINTS = (
    "keep a unit that is ready in a dictionary until it is the next one in the order of sizes. Then reduce "
    "it, and look whether the one after it is waiting, too.",
    "a while loop in ready: as long as the first unit of your list is waiting, take it out of both, reduce "
    "it, and keep a clone of the chunk in self.shards.",
    "in finish a unit without a gradient is still missing, and the other ranks wait for this rank's part of "
    "its sum: call self.ready(name, torch.zeros(sizes[name])) for each that is neither waiting nor reduced.",
)


class Reduced(NamedTuple):
    """A rank's shards, and how many whole buffers were alive after each unit got ready, and at the end.

    Attributes:
        kept: of the first buffer too many, what keeps it; "" where that is not known.
        overlap: whether two shards begin at the same place in memory.
        stale: whether a new object begins with the shards of this one.
    """

    shards: dict[str, torch.Tensor | Odd] | Odd
    whole: list[int]
    kept: str
    overlap: bool
    stale: bool


@graded(
    "Gold: every rank reduces every unit in one order, whichever is ready first, nothing is sent twice, and "
    "only the units that wait for their turn stay in memory.",
    call="InOrder(sizes)",
    hints=HINTS,
    solution=[InOrder],
)
def check_order(cls: Callable) -> str | None:
    """Run cls(sizes) through four backward passes in which the ranks' units get ready in different orders.

    Bronze for right shards, silver for one reduce-scatter of each unit, gold if a buffer is freed once it is
    its turn.
    """
    return examine(CASES, partial(_look, cls))


def _backward(cls: Callable, case: Case, rank: int) -> Reduced:
    """In the worker: units get ready in this rank's order; look at what is alive after each of them."""
    alive, whole, kept = Alive(), [], ""
    units: dict[int, str] = {}  # by storage
    mine = cls(dict(case.sizes))
    for step in [*case.orders[rank], None]:
        if step is None:
            mine.finish()
        else:
            _hand_over(mine, step, case.gradient(rank, step), units)
        found = alive.storages(at_least=4 * min(case.sizes.values()))
        whole.append(len(found))
        if step is None or len(found) > case.waiting(rank)[len(whole) - 1]:
            said = (_keeper(mine, list(case.sizes), found[key], units.get(key)) for key in found)
            kept = kept or next(filter(None, said), "")
        found.clear()
    shards = mine.shards
    return Reduced(_plain(shards), whole, kept, _overlap(shards), bool(cls(dict(case.sizes)).shards))


def _hand_over(mine: Any, name: str, gradient: torch.Tensor, units: dict[int, str]) -> None:
    """Call ready, and remember whose buffer that was. No name here keeps it alive afterwards."""
    units[gradient.untyped_storage()._cdata] = name
    mine.ready(name, gradient)


def _keeper(mine: Any, names: list[str], buffer: torch.Tensor, unit: str | None) -> str:
    """Under which name a buffer is kept, and whether its unit is reduced already; "" if it waits rightly."""
    name = kept_by(buffer, self=mine)
    if not name or not isinstance(mine.shards, dict):
        return ""
    if name.startswith("self.shards"):
        return f"`{name}` is a view, which keeps the whole buffer: keep a clone of the chunk"
    if unit is None:
        return f"look at `{name}`"
    if unit in mine.shards:
        return f"unit {unit} is reduced, and `{name}` still keeps its buffer: take it out there"
    turn = next(each for each in names if each not in mine.shards)
    return f"`{name}` keeps unit {unit}, and it is its turn: reduce it at once" if unit == turn else ""


def _overlap(shards: Any) -> bool:
    values = shards.values() if isinstance(shards, dict) else ()
    places = [each.data_ptr() for each in values if isinstance(each, torch.Tensor) and each.numel()]
    return len(set(places)) < len(places)


def _plain(shards: Any) -> dict | Odd:
    if not isinstance(shards, dict):
        return Odd(type(shards).__name__, repr(shards)[:60])
    return {name: returned(shard) for name, shard in shards.items()}


def _look(cls: Callable, case: Case) -> Finding:
    outcome = attempt(_backward, [(cls, case, rank) for rank in range(case.world_size)])
    if stopped := _stopped(outcome, case):
        return Finding(str(case), stopped)
    if any(values.stale for values in outcome.values):
        return Finding(
            str(case),
            "a new object begins with the shards of the one before, so the next step goes wrong: make "
            "self.shards = {} in __init__, and so with every dictionary and list",
        )
    findings = [_of_unit(case, outcome, name) for name in case.sizes]
    wrong = [finding for finding in findings if finding.wrong]
    if not wrong:
        return Finding(str(case), cost=_sent_too_much(outcome, case) or _held_too_much(outcome, case))
    named = set.intersection(*(set(finding.fitting()) for finding in findings))
    wrong[0].mistakes = {why: values for why, values in wrong[0].mistakes.items() if why in named}
    wrong[0].told = _one_buffer(outcome) or _orders_that_differ(
        [list(values.shards) for values in outcome.values]
    )
    return wrong[0]


def _one_buffer(outcome: Attempt) -> str | None:
    if not any(values.overlap for values in outcome.values):
        return None
    return (
        "several shards are views of the same memory, so each unit overwrites the one before: keep a clone "
        "for each unit"
    )


def _orders_that_differ(orders: list[list[str]]) -> str | None:
    """Two ranks that kept their shards in different orders reduced in different orders."""
    other = next((rank for rank, order in enumerate(orders) if order != orders[0]), None)
    if other is None:
        return None
    return (
        f"rank 0 reduces the units in the order {', '.join(orders[0])}, and rank {other} in the order "
        f"{', '.join(orders[other])}, so numbers of one unit are added to those of another. Reduce in the "
        "order of sizes, in finish, too: what waits, and zeros for a unit that never got ready"
    )


def _of_unit(case: Case, outcome: Attempt, name: str) -> Finding:
    """Return a unit's shards, beside what the mistakes would have made of them."""
    ranks, names = range(case.world_size), [n for n in case.sizes if case.sizes[n] == case.sizes[name]]
    own = [f"rank {peer}'s {name}" for peer in ranks]
    parts = {
        f"rank {peer}'s {other}": (peer, other) for other in [name, *names] for peer in ranks
        if other in case.orders[peer]
    }  # fmt: skip
    at = lambda rank: {each: case.gradient(*of)[case.cut(name, rank)] for each, of in parts.items()}
    return Finding(
        f"{case}, in unit {name}",
        None,
        [values.shards[name] for values in outcome.values],
        [case.total(name)[case.cut(name, rank)] for rank in ranks],
        {why: [f(case, name, rank) for rank in ranks] for why, f in MISTAKES.items()},
        lambda rank: [
            parts for parts in ({k: v for k, v in at(rank).items() if k in own}, at(rank)) if parts
        ],
        also=outcome.hint_of_calls,
    )


def _stopped(outcome: Attempt, case: Case) -> str | None:
    if outcome.failure:
        missing = [name for name in case.sizes if any(name not in order for order in case.orders)]
        crossed = "must have the same size" in outcome.failure or "that was never sent" in outcome.failure
        if crossed and (again := _reduced_again(outcome, case)):
            return f"{again}. {outcome.failure[0].upper()}{outcome.failure[1:]}"
        if crossed and missing:
            return (
                f"{outcome.failure}. Some ranks have no gradient of {', '.join(missing)}: finish has to "
                "reduce zeros for each such unit, torch.zeros(sizes[name]), because the other ranks wait for "
                "them"
            )
        order = ". Every rank must reduce every unit, and all of them in one order" if crossed else ""
        return outcome.failure + order
    all_shards = [values.shards for values in outcome.values]
    if not any(outcome.calls) and not any(all_shards):
        return "not written yet: nothing was sent and self.shards is empty"
    if outcome.collectives:
        return f"that calls torch's own {outcome.collectives[0]}: use ring.reduce_scatter"
    for rank, shards in enumerate(all_shards):
        if isinstance(shards, Odd):
            return (
                f"self.shards is of type {shards.kind}: it is a dictionary, from a unit's name to its shard"
            )
        if missing := [name for name in case.sizes if name not in shards]:
            late = [name for name in missing if name not in case.orders[rank]]
            zeros = ". A unit without a gradient is reduced in finish, with zeros" if late else ""
            return f"rank {rank} has no shard of {', '.join(missing)} in self.shards after finish(){zeros}"
    return None


def _reduced_again(outcome: Attempt, case: Case) -> str | None:
    """Return whether a rank began more reduce-scatters than there are units, told by the messages of each."""
    once = len(case.sizes) * (case.world_size - 1)
    for rank, messages in enumerate(outcome.messages):
        if sum(message.call == "ring.reduce_scatter" for message in messages) > once:
            return (
                f"rank {rank} begins more than {len(case.sizes)} reduce-scatters, and there are "
                f"{len(case.sizes)} units. Reduce each unit once: finish takes only those that ready has not "
                "reduced"
            )
    return None


def _sent_too_much(outcome: Attempt, case: Case) -> str | None:
    for rank in range(case.world_size):
        sent = outcome.bytes_sent(rank)
        own = [case.cut(name, rank) for name in case.sizes]
        allowed = 4 * (sum(case.sizes.values()) - sum(cut.stop - cut.start for cut in own))
        if sent > allowed:
            calls = ", ".join(sorted({message.call for message in outcome.messages[rank]}))
            return bronze(
                f"rank {rank} sends {sent} bytes ({calls}), {sent / allowed:.3g} times the {allowed} of one "
                "reduce-scatter of each unit"
            )
    return None


def _held_too_much(outcome: Attempt, case: Case) -> str | None:
    """More whole buffers than wait for their turn, after a call of ready or at the end."""
    advice = "reduce a unit as soon as it is its turn, and keep a clone of the chunk: a view keeps the buffer"
    for rank, values in enumerate(outcome.values):
        moments = [f"unit {unit} got ready" for unit in case.orders[rank]] + ["finish()"]
        for when, held, waiting in zip(moments, values.whole, [*case.waiting(rank), 0], strict=True):
            made = list(values.shards)
            if held > waiting and made != list(case.sizes):
                orders = ", ".join(made), ", ".join(case.sizes)
                return silver(
                    f"rank {rank} reduces the units in the order {orders[0]}; the one of sizes is {orders[1]}"
                )
            if held > waiting:
                return silver(
                    f"after {when} rank {rank} holds {held} whole buffer{'s' * (held > 1)}, and {waiting} "
                    f"wait{'s' * (waiting == 1)} for {'its' if waiting == 1 else 'their'} turn: "
                    f"{values.kept or advice}"
                )
    return None

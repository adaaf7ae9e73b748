"""Lesson 05's exercise on order: units are ready in any order, and all ranks reduce them in the same one."""

from collections.abc import Callable
from functools import partial

from zerolab.course.attempts import Attempt, attempt
from zerolab.course.evidence import Finding, examine, same
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_2.backward_passes import CASES, MISTAKES, Case
from zerolab.course.lessons.zero_stage_2.order_readings import stopped, told
from zerolab.course.lessons.zero_stage_2.reductions import backward
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


def _look(cls: Callable, case: Case) -> Finding:
    outcome = attempt(backward, [(cls, case, rank) for rank in range(case.world_size)])
    if problem := stopped(outcome, case):
        return Finding(str(case), problem)
    if any(values.stale for values in outcome.values):
        return Finding(
            str(case),
            "a new object begins with the shards of the one before, so the next step goes wrong: make "
            "self.shards = {} in __init__, and so with every dictionary and list",
        )
    findings = [_of_unit(case, outcome, name) for name in case.sizes]
    wrong = [finding for finding in findings if finding.wrong]
    if not wrong:
        return Finding(str(case), _not_again(case, outcome), cost=_cost(outcome, case))
    named = set.intersection(*(set(finding.fitting(finding.wrong)) for finding in wrong))
    wrong[0].mistakes = {why: values for why, values in wrong[0].mistakes.items() if why in named}
    wrong[0].told = told(case, wrong[0].where.rpartition(" ")[2], outcome)
    return wrong[0]


def _not_again(case: Case, outcome: Attempt) -> str | None:
    """Whether a second object ends with other shards than the first one, which were right."""
    for values in outcome.values:
        for name, shard in values.shards.items():
            if name in case.sizes and not (name in values.again and same(values.again[name], shard)):
                return (
                    "a first object of your class is right, and a second one with the same gradients is not: "
                    "keep what belongs to one backward pass in self, and make it in __init__"
                )
    return None


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


def _cost(outcome: Attempt, case: Case) -> str | None:
    return _sent_too_much(outcome, case) or _held_too_much(outcome, case)


def _sent_too_much(outcome: Attempt, case: Case) -> str | None:
    for rank in range(case.world_size):
        first = outcome.calls[rank][: outcome.values[rank].calls]
        messages = [message for message in first if message.sent]
        sent = sum(message.nbytes for message in messages)
        own = [case.cut(name, rank) for name in case.sizes]
        allowed = 4 * (sum(case.sizes.values()) - sum(cut.stop - cut.start for cut in own))
        if sent > allowed:
            calls = ", ".join(sorted({message.call for message in messages}))
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
                return silver(
                    f"rank {rank} reduces the units in the order {', '.join(made)}; the order of sizes is "
                    f"{', '.join(case.sizes)}"
                )
            if held > waiting:
                wait = "wait for their" if waiting > 1 else "waits for its"
                return silver(
                    f"after {when} rank {rank} holds {held} whole buffer{'s' * (held > 1)}, and "
                    f"{waiting or 'none'} {wait} turn: {values.kept or advice}"
                )
    return None

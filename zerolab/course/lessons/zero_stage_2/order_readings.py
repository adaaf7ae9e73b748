"""Lesson 05's exercise on order: why shards are wrong or missing, told by what was reduced when."""

from collections.abc import Sequence

import torch

from zerolab.course.attempts import Attempt, Odd
from zerolab.course.evidence import same
from zerolab.course.lessons.zero_stage_2.backward_passes import Case
from zerolab.course.lessons.zero_stage_2.reductions import JOINED, ZEROS, Reduced, Reduction
from zerolab.course.messages import Message

_PLACES = ("first", "second", "third", "fourth")


def stopped(outcome: Attempt, case: Case) -> str | None:
    """Why there are no shards to compare."""
    if outcome.failure:
        return _failed(outcome, case)
    all_shards = [values.shards for values in outcome.values]
    if not any(outcome.calls) and not any(all_shards):
        return "not written yet: nothing was sent and self.shards is empty"
    if outcome.collectives:
        return f"that calls torch's own {outcome.collectives[0]}: use ring.reduce_scatter"
    return outcome.unsound or _no_shards(case, all_shards)


def _no_shards(case: Case, all_shards: Sequence[dict | Odd]) -> str | None:
    for rank, shards in enumerate(all_shards):
        if isinstance(shards, Odd):
            return (
                f"self.shards is of type {shards.kind}: it is a dictionary, from a unit's name to its shard"
            )
        if missing := [name for name in case.sizes if name not in shards]:
            late = [name for name in missing if name not in case.orders[rank]]
            zeros = ". A unit without a gradient is reduced in finish, with zeros" if late else ""
            keys = ", ".join(map(repr, list(shards)[:4]))
            others = f". Its keys are {keys}" if shards and not set(shards) & set(case.sizes) else ""
            return (
                f"rank {rank} has no shard of {', '.join(missing)} in self.shards after "
                f"finish(){others or zeros}"
            )
    return None


def _failed(outcome: Attempt, case: Case) -> str:
    failure = outcome.failure or ""
    missing = [name for name in case.sizes if any(name not in order for order in case.orders)]
    crossed = "must have the same size" in failure or "that was never sent" in failure
    if crossed and (again := _reduced_again(outcome, case)):
        return f"{again}. {failure[0].upper()}{failure[1:]}"
    if crossed and (other := _waits_in_another_call(outcome)):
        return other
    if crossed and (left := _left_waiting(outcome, case)):
        return f"{left}. {failure[0].upper()}{failure[1:]}"
    if crossed and missing:
        return (
            f"{failure}. Some ranks have no gradient of {', '.join(missing)}: finish has to reduce zeros for "
            "each such unit, because the other ranks wait for them; as many as the unit has elements, and in "
            "its type: torch.zeros(sizes[name])"
        )
    return failure + ". Every rank must reduce every unit, and all of them in one order" * crossed


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


def _waits_in_another_call(outcome: Attempt) -> str | None:
    """Whether a rank waits in a barrier or another collective while one waits in a reduce-scatter."""
    last: dict[int, Message] = {rank: own[-1] for rank, own in enumerate(outcome.calls) if own}
    together = {rank: call for rank, call in last.items() if call.op == "barrier" or call.collective}
    alone = {rank: call for rank, call in last.items() if rank not in together}
    if not together or not alone:
        return None
    (rank, call), (other, sends) = next(iter(together.items())), next(iter(alone.items()))
    return (
        f"deadlock: rank {rank} waits in {call.call} ({call.place}), and rank {other} in {sends.call} "
        f"({sends.place}). Units get ready in another order on each rank, so ready may call nothing that all "
        "ranks have to call together, but the reduction of the unit whose turn it is"
    )


def _left_waiting(outcome: Attempt, case: Case) -> str | None:
    """Whether a rank ended with fewer reductions than others, while units that were ready waited for them."""
    names, rounds = list(case.sizes), case.world_size - 1
    firsts = [[m for m in own if m.call == "ring.reduce_scatter"][::rounds] for own in outcome.messages]
    rank = min(range(case.world_size), key=lambda each: len(firsts[each]))
    done, left = names[: len(firsts[rank])], names[len(firsts[rank]) :]
    if not done or max(map(len, firsts)) == len(done) or not set(left) <= set(case.orders[rank]):
        return None
    for name, first in zip(done, firsts[rank], strict=True):  # the first round sends the rank's own numbers
        own = case.gradient(rank, name)[case.cut(name, rank - 1)]
        if first.content != tuple(own.double().tolist()):
            return None
    they = "It was" if len(left) == 1 else "They were"
    return (
        f"rank {rank} reduces {', '.join(done)}, and never {', '.join(left)}. {they} ready before the turn "
        "came, and a reduction may leave the next unit waiting, too: in ready, reduce with while, and not "
        "with if"
    )


def told(case: Case, name: str, outcome: Attempt) -> str | None:
    """Why the shards of a unit are wrong on some rank."""
    if any(values.overlap for values in outcome.values):
        return (
            "several shards are views of the same memory, so each unit overwrites the one before: keep a "
            "clone for each unit"
        )
    reductions = [values.reductions for values in outcome.values]
    return (
        _whole_buffers(case, name, outcome.values)
        or _joined(case, reductions)
        or _twice(reductions)
        or _zeros_for_what_waits(case, reductions)
        or _different_units(reductions)
        or _orders_that_differ([list(values.shards) for values in outcome.values])
    )


def _whole_buffers(case: Case, name: str, values: Sequence[Reduced]) -> str | None:
    for rank, each in enumerate(values):
        if isinstance(each.shards, Odd):
            return None
        shard, own = each.shards[name], case.cut(name, rank)
        if not isinstance(shard, torch.Tensor) or shard.shape != (case.sizes[name],):
            return None
        if not same(shard[own], case.total(name)[own]):
            return None
    return (
        "each rank keeps the whole buffer after the reduction, and only its own chunk of that is a sum: keep "
        "a clone of the chunk, which ring.reduce_scatter returns"
    )


def _joined(case: Case, reductions: Sequence[Sequence[Reduction]]) -> str | None:
    if not all(any(each.what == JOINED for each in own) for own in reductions):
        return None
    return (
        f"the units are reduced as one buffer of {sum(case.sizes.values())} elements. Its chunk r is not "
        "chunk r of each unit: reduce each unit's buffer by itself"
    )


def _twice(reductions: Sequence[Sequence[Reduction]]) -> str | None:
    """Whether a unit's buffer was reduced more than once."""
    for rank, own in enumerate(reductions):
        for place, each in enumerate(own):
            if each.what in {before.what for before in own[:place]} - {"", ZEROS}:
                there = " in finish" * each.in_finish
                return (
                    f"rank {rank} reduces unit {each.what}'s buffer a second time{there}, and its chunk is "
                    "the sum over the ranks already. Reduce each unit once"
                )
    return None


def _zeros_for_what_waits(case: Case, reductions: Sequence[Sequence[Reduction]]) -> str | None:
    """Whether a rank reduced zeros for a unit whose gradient it had."""
    for rank, own in enumerate(reductions):
        reduced = {each.what for each in own}
        lost = [name for name in case.orders[rank] if name not in reduced]
        without = len(case.sizes) - len(case.orders[rank])
        if lost and sum(each.what == ZEROS for each in own) > without:
            there = " in finish" * all(each.in_finish for each in own if each.what == ZEROS)
            return (
                f"rank {rank} reduces zeros for unit {lost[0]}{there}, whose gradient got ready on this "
                "rank. Zeros are for units that never got ready"
            )
    return None


def _different_units(reductions: Sequence[Sequence[Reduction]]) -> str | None:
    """Whether two ranks gave the buffers of different units to one reduction."""
    for place, together in enumerate(zip(*reductions, strict=False)):
        known = {rank: each.what for rank, each in enumerate(together) if each.what not in ("", ZEROS)}
        other = next((rank for rank in known if known[rank] != next(iter(known.values()))), None)
        if other is not None:
            first = next(iter(known))
            return (
                f"the {_PLACES[place]} reduction takes unit {known[first]}'s buffer on rank {first}, and "
                f"unit {known[other]}'s on rank {other}, so numbers of one unit are added to those of "
                "another. Reduce in the order of sizes, in finish, too: what waits, and zeros for a unit "
                "that never got ready"
            )
    return None


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

"""Lesson 09: what is wrong with an engine whose values are right: its bytes, its memory, or its rate."""

from collections.abc import Mapping, Sequence

from zerolab.course.lessons.incident_room.room import LR, PSI, Case
from zerolab.course.lessons.incident_room.runs import Seen


def costs_too_much(case: Case, ended: Sequence[Seen], passes: float = 2) -> str | None:
    """What is wrong with right values of stage 1: too many bytes, or optimizer state that is not sharded."""
    passes += case.micro_batches - 1
    return unsharded(case, ended) or too_much_sent(ended, passes)


def unsharded(case: Case, ended: Sequence[Seen]) -> str | None:
    """Whether a rank holds more of the momentum than its shard."""
    share = -(-PSI // len(ended))
    for rank, each in enumerate(ended):
        more = each.state - share
        if more > 1:  # two parameters that are cut by themselves can make one more
            if sum(each.state for each in ended) <= PSI:
                return (
                    f"the values are right, but the shards are uneven: rank {rank} has one of {each.state} "
                    f"elements, and the smallest has {min(each.state for each in ended)}. The largest shard "
                    f"decides how much memory a GPU needs, and ceil(Ψ / N) = {share} elements are enough"
                )
            if each.behind > sum(values.numel() for values in each.momentum if values is not None):
                return (
                    f"the values are right, but rank {rank}'s momentum is a view of a tensor of "
                    f"{each.behind} elements, and keeps all of it in memory: add .clone()"
                )
            what = "is not" if each.state >= PSI else "is not all"
            return (
                f"the values are right, but rank {rank} holds {each.state} elements of momentum, and its "
                f"share is {share}: the optimizer state {what} sharded any more"
            )
    return None


def too_much_sent(ended: Sequence[Seen], passes: float) -> str | None:
    """Whether a rank moves more than so many Ψ a step. Counts and norms are small, and allowed."""
    for rank, each in enumerate(ended):
        if each.passes[-1] > passes + 0.3:
            calls = {call: sent for call, sent in each.calls.items() if sent > 0.1}
            listed = ", ".join(f"{sent:.1f}Ψ in {call}" for call, sent in calls.items())
            return (
                f"the values are right, but rank {rank} moves {each.passes[-1]:.1f}Ψ a step ({listed}), and "
                f"{passes:.0f}Ψ are enough{_why_more(calls, round(passes) - 1)}"
            )
    return None


def _why_more(calls: Mapping[str, float], micro_batches: int) -> str:
    """What the functions that sent tell: what is all-reduced, or reduced or gathered more than once."""
    if any("all_reduce" in call for call in calls):
        reduces = any("reduce_scatter" in call for call in calls)
        if reduces:
            return (
                ". An all-reduce of the parameters moves 2Ψ, because every rank gets the whole sum. Each "
                "rank has its own shard to send and no more, so all-gather them: Ψ"
            )
        return (
            ". An all-reduce of the gradients moves 2Ψ, because every rank gets the whole sum. Each rank "
            "needs its own shard of the sum and no more, so reduce-scatter them: Ψ"
        )
    gathers = sum(sent for call, sent in calls.items() if "all_gather" in call)
    if gathers > 1.3:
        return f". {gathers:.0f}Ψ are gathered, where a gather of the parameters alone, once in a step, is Ψ"
    reduced = sum(sent for call, sent in calls.items() if "reduce_scatter" in call)
    more = (
        f". {reduced:.1f}Ψ are reduced, where {micro_batches}Ψ are the gradients of each micro-batch once. "
        "Add up what belongs together before you reduce it, and reduce nothing twice"
    )
    return more * (reduced > micro_batches + 0.3)


def other_rate(case: Case, ended: Sequence[Seen]) -> str | None:
    """Whether right values come from another learning rate than the engine was given."""
    sizes = {"N": case.ranks, "M": case.micro_batches}
    for rank, each in enumerate(ended):
        for factor in (rate / LR for rate in each.rates if abs(rate / LR - 1) > 1e-9):
            names = [name for name, size in sizes.items() if size > 1 and abs(factor - size) < 1e-9]
            return (
                f"the values are right, but rank {rank}'s optimizer has the learning rate {factor * LR:.3g}, "
                f"{' or '.join(names) or f'{factor:.3g}'} times the {LR:.3g} that the engine was given. The "
                "gradient is still scaled wrongly, and the rate makes up for it. Adam, clipping and weight "
                "decay would see the wrong gradient: mend the gradient, and leave the rate as it is"
            )
    return None

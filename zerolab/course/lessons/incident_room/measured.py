"""Lesson 09's last exercise: what is wrong with a stage, in words, from what was measured of it."""

import re
from collections.abc import Mapping, Sequence

from zerolab.course.lessons.incident_room.installed import Misused
from zerolab.course.lessons.incident_room.stage_trial import Seen
from zerolab.measure import MeasuredStates
from zerolab.memory import ModelStates
from zerolab.parity import Report
from zerolab.rehearsal import Rehearsal

CATEGORIES = {
    "params_bytes": "of parameters",
    "grads_bytes": "of gradients",
    "optimizer_bytes": "of optimizer state",
}
SHARDED_FROM = {"params_bytes": 3, "grads_bytes": 2, "optimizer_bytes": 1}
RIGHT = "right"


def problem(number: int, by_rank: Sequence[Seen]) -> str | None:
    """What is wrong with a stage, on any rank: in values, traffic or memory."""
    seen = by_rank[0]
    values = _values(number, by_rank)
    traffic = _traffic(number, seen)
    memories = (_memory(number, each.memory, each.right_memory) or _copies(each) for each in by_rank)
    memory = next(filter(None, memories), None)
    if not (values or traffic or memory):
        return None
    return f"values: {values or RIGHT}. Traffic: {traffic or RIGHT}. Memory: {memory or RIGHT}"


def _values(number: int, by_rank: Sequence[Seen]) -> str | None:
    if waiting := by_rank[0].waiting:
        return (
            f"nobody waits for the {waiting[0]} that was started, so its result may come too late: return "
            "its Work, or hand unit.expect its wait"
        )
    if all(seen.equal for seen in by_rank):
        return None
    if not number and (said := _owns_a_part(by_rank)):
        return said
    common = [why for why in by_rank[0].fits if all(why in seen.fits for seen in by_rank)]
    if common:
        return ", or else ".join(common) + _elsewhere(by_rank)
    ranks = [rank for rank, seen in enumerate(by_rank) if not seen.equal]
    off = f"off by {max(seen.off for seen in by_rank):.1e}".replace("off by inf", "NaN")
    where = "on all ranks" if len(ranks) == len(by_rank) else f"on rank {', '.join(map(str, ranks))}"
    if by_rank[0].steps > 1:
        return (
            f"right after the first step, and {off} after the second {where}: what the first "
            "update wrote does not reach the next forward"
        )
    return f"{off} after one step, {where}{_elsewhere(by_rank)}"


def _owns_a_part(by_rank: Sequence[Seen]) -> str | None:
    """Whether a rank of stage 0 updates less than all, so that nobody tells it the rest."""
    for rank, seen in enumerate(by_rank):
        if seen.elsewhere:
            name, owned, every = seen.elsewhere
            return (
                f"rank {rank} owns elements {owned.start} to {owned.stop} of unit {name} alone, and updates "
                "no others. At stage 0 each rank owns and updates everything: "
                f"unit.own(slice(0, unit.padded_numel)), which is {every.start} to {every.stop}"
            )
    return None


def _elsewhere(by_rank: Sequence[Seen]) -> str:
    """Where a rank owns another part of a unit than the one that is reduced on it."""
    found = {rank: seen.elsewhere for rank, seen in enumerate(by_rank) if seen.elsewhere}
    if not found:
        return ""
    rank, (name, owned, part) = next(iter(found.items()))
    alike = len(found) == len(by_rank) - 1 and all(each[:2] == (name, owned) for each in found.values())
    who = "Every rank" if alike and owned.start == 0 < part.start else f"Rank {rank}"
    return (
        f". {who} owns elements {owned.start} to {owned.stop} of unit {name}, and what is reduced on rank "
        f"{rank} is {part.start} to {part.stop}: unit.own(self.comm.shard_range(unit.padded_numel))"
    )


def _traffic(number: int, seen: Seen) -> str | None:
    """What is wrong with the payload of a step, and with the collectives that it took."""
    moved, right, passes = sum(seen.passes.values()), seen.right_traffic, seen.passes
    if abs(moved - right) < 1e-6:
        return None
    each = " and ".join(f"{amount:.3g}Ψ in {op}" for op, amount in passes.items()) or "nothing in self.comm"
    return f"a step moves {moved:.3g}Ψ ({each}), and stage {number} moves {right:.3g}Ψ{_why(number, passes)}"


def _why(number: int, passes: Mapping[str, float]) -> str:
    gathered = passes.get("all_gather", 0)
    if number and "all_reduce" in passes:
        return ": an all-reduce gives every rank all of the sum, and it needs its own part"
    if not passes.get("reduce_scatter", 0) + passes.get("all_reduce", 0):
        return ": the gradients are not reduced with self.comm"
    if number == 3 and gathered > 2:
        return ": parameters are gathered after the update too, and the next forward gathers them anyway"
    if number == 3:
        return ": a unit is gathered for forward and, once more, for backward"
    return ": the parameters are gathered once, after the update" if number else ""


def _memory(number: int, held: MeasuredStates, right: ModelStates) -> str | None:
    """The first category in which a rank holds more or less than the formula says."""
    for name, words in CATEGORIES.items():
        got, want = getattr(held, name), getattr(right, name)
        if abs(got - want) >= 1:
            why = _less(number, name, got) if got < want else _more(number, name, held)
            return f"a rank holds {got:,.0f} bytes {words}, and stage {number} holds {want:,.0f}: {why}"
    return None


def _less(number: int, name: str, got: float) -> str:
    if not got:
        return "no step was taken"
    if number < SHARDED_FROM[name]:
        return f"they are sharded from stage {SHARDED_FROM[name]} on"
    return "some elements have no owner. The ranks' parts come from self.comm.shard_range(unit.padded_numel)"


def _more(number: int, name: str, held: MeasuredStates) -> str:
    if number < SHARDED_FROM[name]:
        return "that is more than one copy"
    if name == "optimizer_bytes":
        return "a rank owns its own part alone, unit.own(self.comm.shard_range(unit.padded_numel))"
    if name == "params_bytes":
        return "parameters are freed in setup, after detach_shard, and in every reshard"
    whole = held.params_bytes if number == 2 else None
    if whole and held.grads_bytes > whole + 1:
        return "the shard is there, and so is the whole gradient: unit.grads.free_local()"
    return (
        "the whole gradient is still there. Keep a clone of the own part, and free the rest: a view keeps all"
    )


def _copies(seen: Seen) -> str | None:
    size, name = seen.copies
    if not size or not name:
        return None
    unit = ", and adds none to a unit" * name.startswith("unit.")
    return f"{size:,} bytes more are kept in {name}: a stage keeps no tensors of its own{unit}"


def stopped(failure: str) -> str:
    """Why the training did not come to its end."""
    if any(sign in failure for sign in ("SIGSEGV", "SIGBUS", "setStorage", "out of bounds for storage")):
        return (
            "a rank used a buffer whose storage is freed. detach_shard comes before free, and refill before "
            "all_gather"
        )
    if "cannot become ARRIVING" in failure:
        return (
            "update gathers into a unit that is sharded: at stage 3 it calls step(unit) and gathers nothing"
        )
    if "this parameter is sharded" in failure:
        return (
            "a parameter was used while it was sharded. setup ends with free, and unshard makes the unit "
            "whole: refill, all_gather, then restore_parameters"
        )
    if "'NoneType' object is not subscriptable" in failure and "unit.grads.local[" in failure:
        return f"{failure}. free_local() ran, and after that local is None: keep a clone, then free"
    told = re.sub(rf"^rank \d+ stopped with {Misused.__name__}: ", "", failure)
    return told.partition(" Every rank must make")[0]


def report_problem(report: Report, precision: str) -> str:
    """What `verify` found."""
    values = None if report.bit_identical else f"off by {report.max_abs_diff:.1e} from one process"
    memory = traffic = None
    if values and precision != "fp32":
        values += (
            ", and right in fp32. unit.own makes the fp32 originals that are updated, and unit.grads.op says "
            "what 16-bit gradients are reduced to"
        )
    if not report.traffic_matches:
        got, want = report.traffic, report.predicted_traffic
        traffic = (
            f"rank 0 moves {got.logical_bytes:,} bytes of payload and {got.wire_bytes:,} on the wire, and "
            f"{want.logical_bytes:,} and {want.wire_bytes:,} were predicted"
        )
    if not report.memory_matches:
        memory = _memory(report.stage, report.memory, report.predicted_memory) or "a rank holds too much"
    return f"values: {values or RIGHT}. Traffic: {traffic or RIGHT}. Memory: {memory or RIGHT}"


def rehearsal_problem(got: Rehearsal | str, right: Rehearsal) -> str | None:
    """What differs from zerolab's own stage with 10¹² parameters on 1,024 ranks."""
    where = "with 10¹² parameters on 1,024 ranks"
    if isinstance(got, str):
        return f"{where} it stops with {got.splitlines()[0]}"
    moved, enough = got.traffic.logical_bytes, right.traffic.logical_bytes
    if moved != enough:
        return f"{where} a step moves {moved / 1e9:,.1f} GB, and zerolab's moves {enough / 1e9:,.1f}"
    held, least = got.memory.total_bytes, right.memory.total_bytes
    peak, lowest = max(got.peak_by_phase.values()), max(right.peak_by_phase.values())
    if held > least + 1:
        return f"{where} a rank holds {held / 1e9:,.1f} GB, and {least / 1e9:,.1f} are enough"
    if held < least - 1:
        return f"{where} a rank holds only {held / 1e9:,.1f} GB, and what it owns takes {least / 1e9:,.1f}"
    if peak > lowest:
        return f"{where} a rank holds {peak / 1e9:,.1f} GB at the peak, and {lowest / 1e9:,.1f} are enough"
    return None

"""Lesson 06's exercise on prefetching: gather layers ahead, and hold no more than the bound."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from zerolab.course.attempts import Attempt, Odd, attempt, returned
from zerolab.course.evidence import Finding, examine
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_3.gathered_layers import GatheredLayer, Moment, output_of
from zerolab.course.lessons.zero_stage_3.layers import DEPTH, Use, input_of, out_of_order
from zerolab.course.lessons.zero_stage_3.solution import forward_ahead
from zerolab.course.targets import bronze, silver

HINTS = (
    "before the loop, begin the gathers of the first `prefetch` layers. In the loop, before layer i "
    "computes, begin the gather of layer i + prefetch, if there is one.",
    "the order for layer i is: gather layer i + prefetch, wait for layer i, layer i computes, free layer i. "
    "With prefetch 0 the layer that is gathered is layer i itself.",
    "for i, layer in enumerate(layers): if i + prefetch < len(layers): layers[i + prefetch].gather(); then "
    "layer.wait(), x = layer.forward(x), layer.free().",
)


class Case(NamedTuple):
    """The number of ranks, and how many layers are gathered ahead."""

    world_size: int
    prefetch: int

    def __str__(self) -> str:
        return f"{self.world_size} ranks, prefetch={self.prefetch}"


_AT_FIRST = ", before layer 0 computes"
CASES = (Case(2, 1), Case(3, 0), Case(2, 2), Case(3, 3), Case(2, 6))


class Forward(NamedTuple):
    """What one rank returned, what it called, and why its output may be wrong."""

    output: torch.Tensor | Odd
    moments: list[Moment]
    wrong: str | None


@graded(
    "Gold: the outputs are right, each layer is gathered once and early enough, and at most prefetch + 1 "
    "layers are there at any time.",
    call="forward_ahead(layers, x, prefetch)",
    hints=HINTS,
    solution=[forward_ahead],
)
def check_prefetch(fn: Callable) -> str | None:
    """Run fn(layers, x, prefetch) on 2 and 3 ranks with prefetch from 0 to more than there are layers.

    Bronze for right outputs, silver if each layer is gathered once and `prefetch` layers ahead, gold if no
    more than prefetch + 1 layers are there at once.
    """
    return examine(CASES, partial(_look, fn))


def _forward(fn: Callable, case: Case, rank: int) -> Forward:
    """In the worker: run fn on layers that note what it calls."""
    layers: list[GatheredLayer] = []
    moments: list[Moment] = []
    uses: list[Use] = []
    for index in range(DEPTH):
        GatheredLayer(index, layers, moments, uses)
    with _told_when(moments):
        output = returned(fn(list(layers), input_of(rank), case.prefetch))
    wrong = out_of_order(uses, input_of(rank), ["forward"]) if uses else None
    if wrong is None and not (isinstance(output, Odd) and output.kind == "NoneType"):
        kind = f"it returned {output.kind}, and " if isinstance(output, Odd) else ""
        wrong = f"{kind}every layer computed as it should: return what the last layer's forward returned"
    return Forward(output, moments, wrong)


@contextmanager
def _told_when(moments: list[Moment]) -> Iterator[None]:
    """Say of an IndexError whether it came before the first layer computed."""
    try:
        yield
    except IndexError as error:
        if any(moment.call == "forward" for moment in moments):
            raise
        raise IndexError(f"{error}{_AT_FIRST}").with_traceback(error.__traceback__) from error


def _look(fn: Callable, case: Case) -> Finding:
    ranks = range(case.world_size)
    outcome = attempt(_forward, [(fn, case, rank) for rank in ranks])
    if stopped := _stopped(outcome, case.prefetch):
        return Finding(str(case), stopped)
    finding = Finding(
        str(case),
        None,
        [values.output for values in outcome.values],
        [output_of(rank) for rank in ranks],
    )
    if finding.wrong:
        finding.cause = outcome.values[finding.wrong[0]].wrong
    else:
        costs = (_cost(case, rank, values.moments) for rank, values in enumerate(outcome.values))
        finding.cost = next(filter(None, costs), None)
    return finding


def _beyond_the_list(failure: str, prefetch: int) -> str:
    """Where there are too few layers, if an IndexError came: at the beginning, or near the end."""
    if "IndexError" not in failure:
        return ""
    if _AT_FIRST in failure:
        return (
            f". There are {DEPTH} layers, and prefetch is {prefetch}: at the start begin no more gathers "
            "than there are layers"
        )
    return f". There are {DEPTH} layers, and near the end fewer than prefetch are left to gather"


def _stopped(outcome: Attempt, prefetch: int) -> str | None:
    if outcome.failure:
        told = outcome.failure.replace("stopped with RuntimeError: layer", "stopped: layer")
        told += _beyond_the_list(outcome.failure, prefetch)
        return told.replace("stopped with RuntimeError: wait", "stopped: wait")
    orders = [[m.layer for m in values.moments if m.call == "gather"] for values in outcome.values]
    for rank, order in enumerate(orders):
        if order != orders[0]:
            return (
                f"rank 0 and rank {rank} begin their gathers in different orders, {orders[0]} and {order}: "
                "the messages have one size, and end in the wrong layers without an error"
            )
    if not any(values.moments for values in outcome.values):
        nothing = all(isinstance(values.output, Odd) for values in outcome.values)
        return "not written yet: no layer was gathered and nothing was returned" if nothing else None
    if outcome.collectives:
        return f"that calls torch's own {outcome.collectives[0]}: layer.gather() does that"
    return None


def _cost(case: Case, rank: int, moments: list[Moment]) -> str | None:
    """Return what keeps right outputs from silver or from gold."""
    return _gathered_twice(rank, moments) or _late(case, rank, moments) or _too_many(case, rank, moments)


def _gathered_twice(rank: int, moments: list[Moment]) -> str | None:
    gathered = [moment.layer for moment in moments if moment.call == "gather"]
    twice = sorted({layer for layer in gathered if gathered.count(layer) > 1})
    if not twice:
        return None
    return bronze(f"rank {rank} gathers layer {twice[0]} {gathered.count(twice[0])} times: once is enough")


def _late(case: Case, rank: int, moments: list[Moment]) -> str | None:
    """Return whether a gather began too late, or was waited for before an earlier layer computed."""
    calls = [(moment.call, moment.layer) for moment in moments]
    for index in range(DEPTH):
        before = calls[: calls.index(("forward", index))]
        for later in range(index + 1, min(index + case.prefetch, DEPTH - 1) + 1):
            if ("gather", later) not in before:
                ahead = "layer is on its" if case.prefetch == 1 else f"{case.prefetch} layers are on their"
                return bronze(
                    f"on rank {rank} the gather of layer {later} has not begun when layer {index} computes. "
                    f"With prefetch={case.prefetch} the next {ahead} way by then"
                )
            if ("wait", later) in before:
                return bronze(
                    f"rank {rank} waits for layer {later} before layer {index} computes, so sending and "
                    "computing take turns. Wait for a layer just before it computes itself"
                )
    return None


def _too_many(case: Case, rank: int, moments: list[Moment]) -> str | None:
    """More layers in memory than the bound, or some that are left at the end."""
    allowed = min(case.prefetch + 1, DEPTH)
    worst = max(moments, key=lambda moment: len(moment.present))
    if moments[-1].present and len(worst.present) <= allowed:
        return silver(
            f"the layers {list(moments[-1].present)} are still there at the end on rank {rank}: free each "
            "layer once it has computed"
        )
    if len(worst.present) <= allowed:
        return None
    if not any(moment.call == "free" for moment in moments):
        return silver(f"rank {rank} frees no layer, so all {DEPTH} are there in the end: layer.free()")
    return silver(
        f"on rank {rank} the layers {list(worst.present)} are there at once, {len(worst.present)} of them, "
        f"and prefetch={case.prefetch} allows {allowed}: {_why_there(moments, worst)}"
    )


def _why_there(moments: list[Moment], worst: Moment) -> str:
    """Which layers are there that have computed; if there is none, which gather begins too early."""
    place = moments.index(worst)
    computed = [m.layer for m in moments[:place] if m.call == "forward" and m.layer in worst.present]
    if not computed:
        first = min(worst.present)
        return f"the gather of layer {worst.layer} begins before layer {first} has computed and was freed"
    stale = computed[0]
    until = next((m for m in moments[place:] if (m.call, m.layer) == ("free", stale)), None)
    later = [m for m in moments[: moments.index(until) if until else None] if m.call != "free"]
    last = later[-1]
    when = f"is freed only after the {last.call} of layer {last.layer}" if until else "is never freed"
    return f"layer {stale} has computed, and it {when}. Free each layer right after its forward"

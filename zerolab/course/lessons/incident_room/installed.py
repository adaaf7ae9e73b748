"""Lesson 09: puts a stage that the reader wrote into zerolab's engine, and looks at how it is used.

All of this runs in worker processes, which end with the trial: nothing is put back.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import zerolab
from zerolab.collectives import Comm, Work
from zerolab.optimizer import STAGES
from zerolab.rehearsal import Rehearsal
from zerolab.stages.base import Stage
from zerolab.unit import FlatUnit

VERBS = ("setup", "unshard", "reshard", "reduce_grads", "after_reduce", "update")
COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce")
OWN_STAGES = dict(STAGES)
TRILLION_RANKS = 1024


_EARLY = (
    "unshard calls restore_parameters before the all_gather of unit {} {}: the parameters are not there yet. "
    "Chain it, self.comm.all_gather(unit.flat, unit).then(unit.restore_parameters), without parentheses "
    "after its name"
)


class Misused(RuntimeError):
    """A method of a stage does not do what the engine relies on."""


def install(stage_class: type[Stage], number: int) -> list[tuple[str, Work]]:
    """Let ZeroOptimizer build this class as its stage `number`; what it returns, and sends, is looked at.

    Returns: the collectives that it will start.
    """
    started: list[tuple[str, Work]] = []
    for other, own in OWN_STAGES.items():
        for verb in VERBS:
            setattr(own, verb, _refusal(other))
    STAGES[number] = _watched(stage_class, number, started)
    return started


def _watched(stage_class: type[Stage], number: int, started: list[tuple[str, Work]]) -> type[Stage]:
    """The reader's class, with a look at each verb. The collectives that it starts go into ``started``."""

    class Watched(stage_class):  # type: ignore[misc, valid-type]
        def __init__(self, comm):
            super().__init__(comm)
            self.not_updated: set[FlatUnit] = set()
            self.gathers: dict[FlatUnit, Work] = {}
            for name in COLLECTIVES:
                setattr(comm, name, _noting(name, getattr(comm, name), started))
            comm.all_gather = _refusing_old(comm.all_gather, self.not_updated, self.gathers)

        def unshard(self, unit):
            self.gathers.pop(unit, None)
            with _refusing_early(self.comm, unit, self.gathers):
                work = _work(super().unshard(unit), "unshard")
            return work.then(partial(_see_whole, unit))

        def reduce_grads(self, unit):
            return _work(super().reduce_grads(unit), "reduce_grads")

        def after_reduce(self, unit):
            super().after_reduce(unit)
            _see_kept(unit, number)

        def update(self, units, step):
            def updated(unit):
                if not isinstance(unit, FlatUnit):
                    raise Misused(
                        f"update calls step with a {type(unit).__name__}, and step takes one unit: call it "
                        "for each of units"
                    )
                step(unit)
                self.not_updated.discard(unit)

            with _updating(units, self.not_updated):
                super().update(units, updated)
                _see_updated(units, self.not_updated)

    return Watched


@contextmanager
def _updating(units: list[FlatUnit], not_updated: set[FlatUnit]) -> Iterator[None]:
    """Inside update: ``not_updated`` are the units that step was not called with, and expect is checked."""
    not_updated.update(units)
    for unit in units:
        unit.expect = partial(_expect, unit)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for unit in units:
            del unit.expect
        not_updated.clear()


def _see_updated(units: list[FlatUnit], not_updated: set[FlatUnit]) -> None:
    """The engine updates small units together, so that values alone do not show a unit that is left out."""
    if not_updated and len(not_updated) < len(units):
        done = [unit.name for unit in units if unit not in not_updated]
        why = " Does a return end the loop?" * (done == [units[0].name])
        raise Misused(
            f"update calls step for {len(done)} of {len(units)} units ({', '.join(done)}): call it for each "
            f"of them.{why}"
        )


def _expect(unit: FlatUnit, gather: Any) -> None:
    if not callable(gather):
        raise Misused(
            f"update calls unit.expect with a {type(gather).__name__}, and it takes a function: "
            "write unit.expect(self.comm.all_gather(unit.flat, unit).wait), without parentheses after wait"
        )
    FlatUnit.expect(unit, gather)


def _noting(name: str, collective: Callable, started: list) -> Callable:
    def noted(*args, **kwargs):
        work = collective(*args, **kwargs)
        started.append((name, work))
        return work

    return noted


def _refusing_old(
    all_gather: Callable, not_updated: set[FlatUnit], gathers: dict[FlatUnit, Work]
) -> Callable:
    """A gather that is issued before its unit's update may send old values or new ones: a matter of time."""

    def gather(flat, unit):
        if flat.numel() != unit.padded_numel:
            raise Misused(
                f"all_gather gets {flat.numel()} elements of unit {unit.name}, which has "
                f"{unit.padded_numel}: it takes all of unit.flat, and fills in what the other ranks have"
            )
        if unit in not_updated:
            raise Misused(
                f"update gathers unit {unit.name} before it calls step(unit): gather the parts after that, "
                "and not before it"
            )
        gathers[unit] = all_gather(flat, unit)
        return gathers[unit]

    return gather


@contextmanager
def _refusing_early(comm: Comm, unit: FlatUnit, gathers: Mapping[FlatUnit, Work]) -> Iterator[None]:
    """Inside unshard: a parameter that is restored before the gather is over has old values, or none.

    What a gather would fill in is NaN until then, and not what the memory held before.
    """
    restore, all_gather, before = unit.restore_parameters, comm.all_gather, []
    refill = unit.refill

    def refilled() -> None:
        refill()
        if unit.dtype.is_floating_point:
            unit.flat[: unit.owned.start].fill_(math.nan)
            unit.flat[unit.owned.stop :].fill_(math.nan)

    def restored() -> None:
        work = gathers.get(unit)
        if work and work.waits:
            raise Misused(_EARLY.format(unit.name, "is over"))
        before.append(work is None)
        restore()

    def gather(flat, gathered):
        if gathered is unit and any(before):
            raise Misused(_EARLY.format(unit.name, "has begun"))
        return all_gather(flat, gathered)

    unit.restore_parameters, comm.all_gather = restored, gather  # type: ignore[method-assign]
    unit.refill = refilled  # type: ignore[method-assign]
    try:
        yield
    finally:
        del unit.restore_parameters, unit.refill
        comm.all_gather = all_gather  # type: ignore[method-assign]


def _work(returned: Any, verb: str) -> Work:
    if not isinstance(returned, Work):
        raise Misused(
            f"{verb} returned {type(returned).__name__}, and the engine waits for the Work that it returns: "
            "return the one of the collective, or an empty Work()"
        )
    return returned


def _see_whole(unit: FlatUnit) -> None:
    if not unit.whole:
        raise Misused(
            f"unit {unit.name} is not whole when the Work of unshard ends: chain unit.restore_parameters to "
            "it, with then"
        )


def _see_kept(unit: FlatUnit, number: int) -> None:
    kept, owned = unit.grads.reduced, unit.owned.stop - unit.owned.start
    if kept is None or len(kept) != owned:
        what = "nothing" if kept is None else f"{len(kept)} elements"
        if number == 0 and kept is not None and len(kept) == unit.padded_numel:
            raise Misused(
                f"after_reduce kept {what} of unit {unit.name}, whose owned range has {owned}. At stage 0 "
                "each rank owns everything: call unit.own(slice(0, unit.padded_numel)) in setup"
            )
        raise Misused(
            f"after_reduce kept {what} of unit {unit.name}, whose owned range has {owned} elements: hand "
            "unit.grads.keep the gradients of unit.owned"
        )


def _refusal(number: int) -> Callable:
    def refuse(*_):
        raise Misused(f"this uses zerolab's own Stage{number}, which is what you write here")

    return refuse


def trillion() -> nn.Module:
    """A GPT of 1.001 · 10¹² parameters in a few large blocks, which a rehearsal goes through quickly."""
    return zerolab.models.GPT(vocab=50_257, width=143_360, depth=4, heads=8, context=1024)


def rehearsals(stages: Mapping[int, type[Stage]]) -> dict[int, Rehearsal | str]:
    """By stage, a step of a trillion parameters on 1,024 ranks, or the error that it ended with."""
    dist.destroy_process_group()  # a rehearsal makes its own
    found: dict[int, Rehearsal | str] = {}
    with _disable_current_modes():
        for number, stage_class in stages.items():
            install(stage_class, number)
            try:
                found[number] = zerolab.rehearse(trillion, TRILLION_RANKS, number)
            except Exception as error:
                found[number] = f"{type(error).__name__}: {error}"
    return found

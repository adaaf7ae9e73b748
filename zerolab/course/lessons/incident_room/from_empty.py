"""Lesson 09's last exercise: stages 0 to 3 from an empty file, on zerolab's units and collectives.

Each stage trains on real ranks, with everything measured. Those that are right go through `verify` and are
rehearsed with a trillion parameters on 1,024 ranks.
"""

import inspect
import signal
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from torch import nn

import zerolab
from zerolab.course.attempts import attempt
from zerolab.course.exercise import graded
from zerolab.course.lessons.incident_room import measured
from zerolab.course.lessons.incident_room.installed import (
    TRILLION_RANKS,
    VERBS,
    install,
    rehearsals,
    trillion,
)
from zerolab.course.lessons.incident_room.part_two_solution import Stage0, Stage1, Stage2, Stage3
from zerolab.course.lessons.incident_room.stage_trial import trials
from zerolab.optimizer import STAGES
from zerolab.parity.parity import random_tokens, small_gpt
from zerolab.rehearsal import Rehearsal
from zerolab.stages.base import Stage

Stages = Mapping[int, type[Stage]]  # by number
Said = dict[int, str | None]  # by number: what is wrong with a stage, or None

RANKS, SECONDS = 3, 20.0  # of a trial, and how long it may take before the first stage
STAGE_SECONDS = 10.0
VERIFY_SECONDS = 60
NOT_WRITTEN = "not written yet"
OWN = "unit.own(self.comm.shard_range(unit.padded_numel))"
HINTS = (
    "stage 0: unit.own(slice(0, unit.padded_numel)), self.comm.all_reduce(unit.grads.local, unit, "
    "unit.grads.op), unit.grads.keep(unit.grads.local[unit.owned]), and step(unit) for each unit. unshard "
    "returns Work(), and reshard does nothing. Stage 1 differs in setup, reduce_grads and update.",
    f"stage 1: {OWN}, reduce_scatter for all_reduce, and after step(unit) "
    "unit.expect(self.comm.all_gather(unit.flat, unit).wait). Stage 2 differs from it in after_reduce alone: "
    "keep a clone, then unit.grads.free_local().",
    "stage 3: setup goes on with unit.detach_shard() and unit.free(). unshard is unit.refill(), and "
    "self.comm.all_gather(unit.flat, unit).then(unit.restore_parameters). reshard is unit.free(). update "
    "gathers nothing.",
)


@graded(
    "You wrote ZeRO. Your four stages leave the bits of one process, in the predicted bytes of memory and "
    "messages: `verify` says so on 3 ranks in fp32, and on 2 in mixed precision. Each has run a step of 10¹² "
    "parameters as one of 1,024 ranks.",
    call=None,
    hints=HINTS,
    solution=[Stage0, Stage1, Stage2, Stage3],
)
def check_stages(stages: Sequence[type[Stage]]) -> str | None:
    """Train with each of the four classes, and say which of them fails in values, traffic or memory."""
    if problem := _not_four(stages):
        return problem
    said: Said = {n: _not_a_stage(each, stages[:n]) for n, each in enumerate(stages)}
    if set(said.values()) == {NOT_WRITTEN}:
        return f"{NOT_WRITTEN}: begin with the six methods of Stage0, and run the check after each class"
    for look in (on_ranks, partial(verified, ranks=2, precision="mixed")):
        said |= look(_right(stages, said))
    for look in (partial(verified, ranks=RANKS, precision="fp32"), at_a_trillion):
        if not any(said.values()):
            said |= look(_right(stages, said))
    said |= {n: f"{problem}{_other_place(stages, n)}" for n, problem in said.items() if problem}
    return _summary(said) if any(said.values()) else None


def _right(stages: Sequence[type[Stage]], said: Said) -> dict[int, type[Stage]]:
    return {number: each for number, each in enumerate(stages) if not said[number]}


def _other_place(stages: Sequence[type[Stage]], number: int) -> str:
    """Whether the class in this place of the list has another stage's number in its name."""
    name = getattr(stages[number], "__name__", "")
    other = next((each for each in range(4) if name.endswith(str(each))), number)
    if other == number:
        return ""
    return f". The list has {name} in this place: write check_stages([Stage0, Stage1, Stage2, Stage3])"


def _summary(said: Said) -> str:
    right = sum(not problem for problem in said.values())
    lines = [f"\n  stage {number}: {problem or 'right'}" for number, problem in said.items()]
    return f"{right or 'none'} of the four stages {'is' if right < 2 else 'are'} right{''.join(lines)}"


def _not_four(stages: Any) -> str | None:
    if isinstance(stages, list | tuple) and len(stages) == 4:
        return None
    got = f"{len(stages)} things" if isinstance(stages, list | tuple) else f"a {type(stages).__name__}"
    return f"the check got {got}: write check_stages([Stage0, Stage1, Stage2, Stage3])"


def _not_a_stage(stage: Any, earlier: Sequence[Any] = ()) -> str | None:
    """Why a class cannot be tried, if it cannot. `earlier`: the classes of the stages before it."""
    if not isinstance(stage, type):
        return f"this is a {type(stage).__name__}, and no class: write the class's name without parentheses"
    if not issubclass(stage, Stage):
        name = stage.__name__
        return f"{name} does not derive from Stage, which holds self.comm: write class {name}(Stage)"
    used = {getattr(stage, verb).__module__ for verb in VERBS} | {base.__module__ for base in stage.__mro__}
    if borrowed := [module for module in used if module.startswith("zerolab.stages.stage")]:
        return f"this uses {borrowed[0]}, which is what you write here"
    if any(_same_methods(stage, base) for base in (Stage, *earlier)):
        return NOT_WRITTEN
    if missing := sorted(stage.__abstractmethods__, key=VERBS.index):
        return f"it lacks {', '.join(missing)}: a stage has the methods {', '.join(VERBS)}"
    return next(filter(None, (_cannot_be_called(stage, verb) for verb in VERBS)), None)


def _same_methods(stage: type[Stage], base: Any) -> bool:
    """Whether a class derives from another and takes all six methods from it, as a stub does."""
    if stage is base or not isinstance(base, type) or not issubclass(stage, base):
        return False
    return all(getattr(stage, verb) is getattr(base, verb, None) for verb in VERBS)


def _cannot_be_called(stage: type[Stage], verb: str) -> str | None:
    """Whether a method takes what the engine calls it with."""
    given = ("units", "step") if verb == "update" else ("unit",)
    try:
        inspect.signature(getattr(stage, verb)).bind("self", *given)
    except TypeError as error:
        return f"{verb} is called as self.{verb}({', '.join(given)}), and that does not fit yours: {error}"
    return None


# The three trials. Each takes the stages that are right so far.


def on_ranks(stages: Stages) -> Said:
    """Two steps of training: together if possible, and one stage after the other where one of them stops."""
    if not stages:
        return {}
    outcome = attempt(trials, [(dict(stages),)] * RANKS, timeout=SECONDS + STAGE_SECONDS * len(stages))
    if not outcome.failure:
        by_rank = outcome.values
        return {number: measured.problem(number, [seen[number] for seen in by_rank]) for number in stages}
    if len(stages) == 1:
        return dict.fromkeys(stages, measured.stopped(outcome.failure))
    alone = [on_ranks({number: stage}) for number, stage in stages.items()]
    return {number: problem for said in alone for number, problem in said.items()}


def verified(stages: Stages, ranks: int, precision: str) -> Said:
    """The package's own `verify`."""
    return {number: _verified(stage, number, ranks, precision) for number, stage in stages.items()}


def _verified(stage: type[Stage], number: int, ranks: int, precision: str) -> str | None:
    build, where = partial(_model_of, stage, number), f"on {ranks} ranks in {precision} precision"
    try:
        report = zerolab.verify(number, ranks, build, random_tokens, steps=2, precision=precision)
    except zerolab.WorkerError as error:
        return f"verify stops {where}: {str(error).splitlines()[0]}"
    return None if report.ok else f"{where}: {measured.report_problem(report, precision)}"


def _model_of(stage: type[Stage], number: int) -> nn.Module:
    """On each rank: from now on the engine takes this stage; and the rank ends if it takes too long."""
    signal.alarm(VERIFY_SECONDS)
    install(stage, number)
    return small_gpt()


def at_a_trillion(stages: Stages) -> Said:
    """A rehearsal, compared with one of the package's own stage."""
    outcome = attempt(rehearsals, [(dict(stages),)], timeout=SECONDS + STAGE_SECONDS * len(stages))
    if outcome.failure:
        return dict.fromkeys(stages, f"at 10¹² parameters {outcome.failure}")
    return {
        number: measured.rehearsal_problem(outcome.values[0][number], own_rehearsal(number))
        for number in stages
    }


@cache
def own_rehearsal(number: int) -> Rehearsal:
    """What zerolab's own stage holds and sends."""
    return zerolab.rehearse(trillion, TRILLION_RANKS, number)


def show_trillion(stages: Sequence[type[Stage]]) -> None:
    """Rehearse the reader's stages with 10¹² parameters on 1,024 ranks; print what a rank holds and sends."""
    for number, stage in enumerate(stages):
        if problem := _not_a_stage(stage, stages[:number]):
            print(f"stage {number}: {problem}")
            continue
        own, STAGES[number] = STAGES[number], stage
        try:
            run = zerolab.rehearse(trillion, TRILLION_RANKS, number)
        finally:
            STAGES[number] = own
        states, sent = run.memory.total_bytes / 1e9, run.traffic.logical_bytes / run.psi / 2
        print(f"stage {number}: {states:8,.1f} GB of model states on each rank, {sent:.2f}Ψ sent in a step")

"""Lesson 04's exercise on checkpoints: load a rank's shard from the files of other ranks."""

from collections.abc import Callable, Mapping

import torch

from zerolab.course.attempts import Odd, attempt
from zerolab.course.evidence import Finding, examine
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_1.assembled import cut_of_other_bases, made
from zerolab.course.lessons.zero_stage_1.checkpoints import CASES, Case
from zerolab.course.lessons.zero_stage_1.loaded import CALLS, Call, Loaded, load_all
from zerolab.course.lessons.zero_stage_1.misplaced import described, equal, right
from zerolab.course.lessons.zero_stage_1.other_cuts import explaining
from zerolab.course.lessons.zero_stage_1.read_patterns import by_files
from zerolab.course.lessons.zero_stage_1.solution import load_shard
from zerolab.course.lessons.zero_stage_1.stopped_reads import stopped
from zerolab.course.names import asks_the_job
from zerolab.course.targets import bronze

HINTS = (
    "a shard of the files has ceil(numel / saved_by) elements, and yours has ceil(numel / world_size).",
    "your shard is a range of the flat buffer that ends at numel at most. File f holds another range. Read "
    "where the two overlap, counted from the file's first element.",
    "begin with torch.zeros(own), and for each file copy read(f, start - f * saved, stop - f * saved) into "
    "[start - rank * own : stop - rank * own], where start and stop are the ends of the overlap.",
)


@graded(
    "Silver: any number of ranks loads what any other has saved, without the old padding, and no rank reads "
    "more than its shard.",
    call="load_shard(read, saved_by, numel, world_size, rank)",
    hints=HINTS,
    solution=[load_shard],
)
def check_load(fn: Callable) -> str | None:
    """Let fn(read, saved_by, numel, world_size, rank) load every rank's shard of eleven checkpoints.

    Bronze for right values, silver if a rank reads no more elements than its shard has.
    """
    outcome = attempt(load_all, [(fn,)])
    if outcome.failure:
        return outcome.failure.replace("rank 0", "your function", 1).replace(", not waiting", "")
    loaded = dict(zip(CALLS, outcome.values[0], strict=True))
    if all(isinstance(done.value, Odd) and done.value.kind == "NoneType" for done in loaded.values()):
        return outcome.nothing_returned
    if why := stopped(loaded):
        return why
    wrong = [call for call, done in loaded.items() if not equal(done.value, right(call))]
    by_rank = ((call.case, done.value) for call, done in loaded.items())
    if wrong and (asks := asks_the_job(fn, by_rank)):
        return f"{asks} (seen with {wrong[0].case})"
    if wrong and (named := _named(loaded)):
        return f"{', or else '.join(named)} (seen with {wrong[0].case})"
    told = described(loaded) if wrong else None
    return examine(CASES, lambda case: _compared(case, loaded, told))


def _compared(case: Case, loaded: Mapping[Call, Loaded], told: str | None) -> Finding:
    """Compare what the ranks of a case loaded. `told`: what is wrong with the first wrong shard."""
    calls = [call for call in loaded if call.case == case]
    wants = [right(call) for call in calls]
    return Finding(
        str(case),
        None,
        [loaded[call].value for call in calls],
        wants,
        parts=lambda rank: [{"the right shard": wants[rank]}],
        whole=torch.cat(wants),
        cost=_read_too_much(case, [loaded[call] for call in calls]),
        told=told,
    )


def _named(loaded: Mapping[Call, Loaded]) -> list[str]:
    """The mistakes that explain what all calls have read, or what they have returned, if they ended."""
    ended = {call: done for call, done in loaded.items() if not done.error}
    return made(ended) or explaining(loaded) or cut_of_other_bases(ended) or by_files(ended)


def _read_too_much(case: Case, loaded: list[Loaded]) -> str | None:
    for rank, own in enumerate(loaded):
        if own.read > case.own:
            all_of_it = ", all there are" if own.read >= case.numel else ""
            return bronze(
                f"rank {rank} reads {own.read} elements{all_of_it}, and its shard has {case.own}: read a "
                "file only where your shard overlaps it"
            )
    return None

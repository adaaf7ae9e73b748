"""Campaign: many loops in few launches of ranks that stay alive, and what came of each."""

import contextlib
import datetime
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

import zerolab
from support.loops.odd_rank import run_odd
from support.loops.plans import Loop
from support.loops.session import Report, Session
from zerolab.parity.reference import compute_deterministically

MOST_RANKS = 3
PATIENCE_SECONDS = 60  # of a message between ranks: none is meant to come near it
Planned = tuple[int, Loop]


def groups_by_size() -> dict[int, dist.ProcessGroup]:
    """A process group of the first ranks for each world size, in which a hang is an error after a while."""
    patience = datetime.timedelta(seconds=PATIENCE_SECONDS)
    return {n: dist.new_group(list(range(n)), timeout=patience) for n in range(1, dist.get_world_size() + 1)}


def run_batch(planned: list[Planned], scratch: Path) -> list[Report]:
    """On a rank: one loop after the other, up to the first that shows a problem and may have left a mess."""
    compute_deterministically()
    warnings.simplefilter("ignore")  # torch's, of schedules and groups that no user would choose
    groups, reports = groups_by_size(), []
    for seed, loop in planned:
        reports.append(Session(seed, loop, groups, scratch / f"loop-{seed}").run())
        if reports[-1].problem:
            break
    return reports


def run(planned: list[Planned], backend: str = "gloo") -> Iterator[Report]:
    """What came of these loops, in order. Ranks are started anew only after a problem."""
    waiting = list(planned)
    while waiting:
        odd = bool(waiting[0][1].odd)
        count = next((i for i, (_, loop) in enumerate(waiting) if bool(loop.odd) != odd), len(waiting))
        found = [run_odd(*waiting[0], backend)] if odd else launched(waiting[:count], backend)
        yield from found
        waiting = waiting[len(found) :]


def launched(planned: list[Planned], backend: str) -> list[Report]:
    """A batch in one launch. Where that failed as a whole, the loop it was at has the problem."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            deadline = 2 * PATIENCE_SECONDS + 5 * len(planned)
            return zerolab.launch(
                run_batch, MOST_RANKS, planned, Path(folder), backend=backend, timeout=deadline
            )[0]
        except (zerolab.WorkerError, zerolab.LaunchTimeout) as error:
            return after_a_crash(planned, Path(folder), str(error).splitlines()[0])


def after_a_crash(planned: list[Planned], folder: Path, text: str) -> list[Report]:
    """The loops before the one that ended the ranks are taken as well; their actions are not known."""
    seed, done = planned[0][0], 0
    with contextlib.suppress(FileNotFoundError, ValueError):
        seed, done = map(int, (folder / "progress-0").read_text().split())
    place = next(index for index, (each, _) in enumerate(planned) if each == seed)
    reports = [Report(each, len(loop.actions) + 1) for each, loop in planned[:place]]
    action = (*planned[place][1].actions, ("look",))[done]
    return [*reports, Report(seed, done + 1, f"the ranks ended: {text}", action)]

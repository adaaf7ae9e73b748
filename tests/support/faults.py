"""A training run with a fault: one rank is killed, raises an exception, or hangs, in a phase of a step.

The run saves a checkpoint after every step. Then it is resumed, and the result is compared with the same
training without a fault in one process (support/training.py). So a bit that differs is found.
"""

import contextlib
import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import zerolab
from support import training
from support.references import seeded
from support.user_models import Net, squares
from zerolab.checkpoint import records

KINDS = ("kill", "raise", "hang")
PHASES = ("forward", "backward", "reduce", "update", "gather", "save")
STAGES = (1, 2, 3)
STEPS = 3
PATIENCE_SECONDS = 120.0  # a kill or an exception is reported long before
LEAVE_SECONDS = 10.0  # for processes to end on a busy machine


class Injected(Exception):
    """What a rank raises whose fault is an exception."""


@dataclass(frozen=True)
class Fault:
    """What happens to which rank of how many, in which phase of which step, and at which call in that phase.

    ``late``: after the call, when what it issues is under way; otherwise before it.
    """

    kind: str
    phase: str
    world_size: int
    rank: int
    stage: int
    step: int
    call: int = 0
    late: bool = False

    def __str__(self) -> str:
        place = f"rank {self.rank} of {self.world_size}, stage {self.stage}, step {self.step}"
        return f"{self.kind:<5} {'late in' if self.late else 'in':>7} {self.phase:<9} {place}"

    def happen(self, folder: Path) -> None:
        """Note the time, and then be killed, raise or hang."""
        (folder / "happened").write_text(repr(time.monotonic()))
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "raise":
            raise Injected(f"in {self.phase}")
        while True:
            time.sleep(1.0)


def calls_of(phase: str) -> int:
    """How many calls of a phase every rank makes in each step, at the least."""
    return 1 if phase == "update" else 2


# On a rank.


def train(folder: Path, fault: Fault) -> None:
    """Train, and save after every step, until the fault happens."""
    (folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    model = seeded(Net)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=fault.stage, **training.DEFAULTS)
    zerolab.save(optimizer, folder / "run", extra=0)
    for step in range(STEPS):
        if (optimizer.rank, step) == (fault.rank, fault.step):
            inject(fault, optimizer, functools.partial(fault.happen, folder))
        take(optimizer, step)
        zerolab.save(optimizer, folder / "run", extra=step + 1)


def take(optimizer: zerolab.ZeroOptimizer, step: int) -> None:
    """One step of training.py's training."""
    for _ in training.passes(squares, optimizer.model, step, optimizer.rank):
        pass
    optimizer.step()
    optimizer.zero_grad()


def inject(fault: Fault, optimizer: zerolab.ZeroOptimizer, happen: Callable[[], None]) -> None:
    """From now on call ``happen`` when this rank comes to the fault's call in its phase."""
    calls = 0

    def around(function: Callable) -> Callable:
        def called(*args, **kwargs):
            nonlocal calls
            now, calls = calls == fault.call, calls + 1
            if now and not fault.late:
                happen()
            result = function(*args, **kwargs)
            if now and fault.late:
                happen()
            return result

        return called

    def at_gradient(module, args, output) -> None:
        output.register_hook(around(lambda gradient: None))

    blocks = optimizer.model.blocks
    if fault.phase == "backward":
        for block in blocks:
            block.register_forward_hook(at_gradient)
        return
    owners, name = {
        "forward": (blocks, "forward"),
        "reduce": ([optimizer.stage], "reduce_grads"),
        "update": (optimizer.local.optimizers, "step"),
        "gather": ([optimizer.comm], "all_gather"),
        "save": ([records], "_put"),
    }[fault.phase]
    for owner in owners:
        setattr(owner, name, around(getattr(owner, name)))


def resume(folders: list[Path], stages: list[int]) -> list[tuple[int, list[str]]]:
    """Go on from what each run left, at these stages: the steps it had saved, and what differs."""
    found = []
    for folder, stage in zip(folders, stages, strict=True):
        torch.manual_seed(1)  # other weights than any checkpoint's
        optimizer = zerolab.ZeroOptimizer(Net(), torch.optim.AdamW, stage=stage, **training.DEFAULTS)
        saved = zerolab.load(optimizer, folder / "run")
        found.append((saved, lost(optimizer, saved)))
    return found


def lost(optimizer: zerolab.ZeroOptimizer, saved: int) -> list[str]:
    """The parameters that are not as in undisturbed training: as they were loaded, then at its end."""
    found = differing(optimizer, saved)
    for step in range(saved, STEPS):
        take(optimizer, step)
    return found + differing(optimizer, STEPS)


def differing(optimizer: zerolab.ZeroOptimizer, steps: int) -> list[str]:
    expected = training.train_plain(Net, squares, optimizer.world_size, steps)
    names = training.differing(training.whole(optimizer.model, optimizer), expected)
    return [f"{name} after {steps} steps" for name in names]


# In the process that launches them.


@dataclass
class Outcome:
    """What the parent reported of a fault, after how many seconds, and what it left.

    ``seconds``: from the fault to the report; for a hang, from the deadline to the report.
    """

    fault: Fault
    error: Exception | None
    seconds: float
    left: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def named(self) -> tuple[int, ...]:
        """The ranks that the parent named."""
        if isinstance(self.error, zerolab.WorkerError):
            return (self.error.rank,)
        return self.error.ranks if self.error else ()

    @property
    def named_rightly(self) -> bool:
        """Whether it named the rank with the fault, that one alone, and what happened to it."""
        said = str(self.error)
        rightly = {
            "kill": lambda: self.error.exitcode == -signal.SIGKILL,
            "raise": lambda: f"Injected: in {self.fault.phase}" in said,
            "hang": lambda: "in happen" in said,
        }[self.fault.kind]
        kind = zerolab.LaunchTimeout if self.fault.kind == "hang" else zerolab.WorkerError
        return isinstance(self.error, kind) and self.named == (self.fault.rank,) and rightly()

    @property
    def wrong(self) -> list[str]:
        """All that should not have been."""
        misnamed = [] if self.named_rightly else [f"not named: {self.error or 'nothing was reported'}"]
        return misnamed + [f"left over: {each}" for each in self.left] + [f"lost: {e}" for e in self.lost]


def run_with(fault: Fault, folder: Path, deadline_seconds: float) -> Outcome:
    """Launch a run with the fault. What it lost is not known yet."""
    folder.mkdir()
    started, error = time.monotonic(), None
    timeout = deadline_seconds if fault.kind == "hang" else PATIENCE_SECONDS
    try:
        zerolab.launch(train, fault.world_size, folder, fault, backend="gloo", timeout=timeout)
    except (zerolab.WorkerError, zerolab.LaunchTimeout) as caught:
        error = caught
    reported = time.monotonic()
    happened = folder / "happened"
    since = float(happened.read_text()) if happened.exists() and fault.kind != "hang" else started + timeout
    return Outcome(fault, error, reported - since, list(leftovers(folder)))


def leftovers(folder: Path) -> Iterator[str]:
    """The ranks of a run that still exist after a while, and their files in shared memory."""
    pids = {path.read_text() for path in folder.glob("pid-*")}
    end = time.monotonic() + LEAVE_SECONDS
    for pid in sorted(pids):
        while (exists := Path(f"/proc/{pid}").exists()) and time.monotonic() < end:
            time.sleep(0.02)
        if exists:
            yield f"process {pid}"
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/dev/shm"):
            if pids & set(re.findall(r"\d+", name)):
                yield f"/dev/shm/{name}"


def judge(outcomes: list[Outcome], folders: list[Path]) -> None:
    """Resume the runs, all of one world size, from their last checkpoints, each at another stage."""
    world_size = outcomes[0].fault.world_size
    stages = [(outcome.fault.stage + 1) % 4 for outcome in outcomes]
    try:
        found = zerolab.launch(resume, world_size, folders, stages, backend="gloo", timeout=PATIENCE_SECONDS)
    except (zerolab.WorkerError, zerolab.LaunchTimeout) as error:
        found = [[(None, [str(error)])] * len(outcomes)]
    for outcome, *ranks in zip(outcomes, *found, strict=True):
        for saved, lost in ranks:
            wanted = outcome.fault.step
            late = [] if saved == wanted else [f"{saved} steps were saved, not {wanted}"]
            outcome.lost += late + lost

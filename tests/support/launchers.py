"""Launchers as a user starts them: the commands that docs/launchers.md gives, run as they stand there."""

import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from conftest import PYTHONPATH, descendants

import zerolab
from support import guides
from support.losses import losses_by_rank
from zerolab import models, train

LAUNCHERS_VARIABLES = re.compile(r"(OMPI|PMIX?|SLURM|GLOO)_|(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_")


class Done(NamedTuple):
    """A command that came to its end; `output` is what it printed, errors too."""

    returncode: int
    output: str

    @property
    def losses(self) -> dict[int, list[float]]:
        return losses_by_rank(self.output)


def guide_command(launcher: str) -> str:
    """The command in the row of that name in the table of docs/launchers.md."""
    page = guides.text("docs/launchers.md")
    return re.search(rf"^\| {re.escape(launcher)} \| `([^`]+)` \|", page, re.M)[1]


def environment() -> dict[str, str]:
    """The user's shell: the virtual environment active, one thread a rank, no GPU, no launcher around."""
    kept = {name: text for name, text in os.environ.items() if not LAUNCHERS_VARIABLES.match(name)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    mpirun = {  # it refuses root, and more ranks than cores, unless told otherwise
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    ours = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return kept | mpirun | ours | {"PATH": path}


def run(command: list[str], cwd: Path, timeout: float = 120, **settings: str) -> Done:
    """Run a command to its end; one that passes the deadline is ended with all it started, and fails."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # srun cuts characters in two
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment() | settings,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            for pid in descendants(process.pid) | {process.pid}:
                os.kill(pid, signal.SIGKILL)
            process.wait()
            output.seek(0)
            raise AssertionError(f"{command} had not ended after {timeout} s:\n{output.read()}") from None
        output.seek(0)
        return Done(process.returncode, output.read())


def run_all(commands: Iterable[list[str]], cwd: Path, **settings: str) -> list[Done]:
    """Run commands at the same time, each to its end."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda command: run(command, cwd, **settings), commands))


def shell(command: str) -> list[str]:
    """The words that run a line as a shell would."""
    return ["sh", "-c", f"exec {command}"]


@functools.cache
def expected() -> tuple[dict, dict]:
    """Each rank's losses, and the parameters, when plain python starts the training of the table."""
    with tempfile.TemporaryDirectory() as folder:
        done = run(shell(f"{guide_command('plain python')} --save {folder}/saved"), Path(folder))
        assert done.returncode == 0, done.output
        return done.losses, saved_parameters(Path(folder, "saved"))


def check(runs: list[Done], saved: Path) -> None:
    """Both ranks of the runs printed the losses that were expected, and left the very same parameters."""
    assert [done.returncode for done in runs] == [0] * len(runs), "\n".join(done.output for done in runs)
    losses, parameters = expected()
    assert {rank: values for done in runs for rank, values in done.losses.items()} == losses
    assert losses.keys() == {0, 1} and same_bits(saved_parameters(saved), parameters)


def saved_parameters(folder: Path) -> dict[str, torch.Tensor]:
    """The logistic model's parameters in a checkpoint."""

    def read() -> dict[str, torch.Tensor]:
        model = models.make("logistic")
        optimizer = train.shard(model, train.RECIPES["logistic"])
        zerolab.load(optimizer, folder)
        with optimizer.full_params():
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    return zerolab.launch(read, 1, backend="gloo")[0]


def same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)

"""Promise: SLURM's own srun starts the ranks, on one host or two, and a rank that fails ends the job."""

import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT
from support.hosts import ADDRESSES, two_hosts
from support.launchers import check, guide_command, run, shell
from support.slurm import Node, cluster, needs_slurm, this_host

pytestmark = needs_slurm()


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    with cluster([this_host()]) as settings:
        yield settings


@pytest.mark.long("test_two_hosts runs the same program on two nodes")
def test_the_training_program_ends_with_the_bits_that_plain_python_gives_it(slurm, tmp_path: Path):
    done = run(shell(f"{guide_command('srun')} --save {tmp_path / 'saved'}"), tmp_path, **slurm)
    check([done], tmp_path / "saved")


PROGRAM = """
    import os, sys, torch, torch.distributed as dist, zerolab
    from support import network
    from zerolab.launcher.rendezvous import find_place
    zerolab.init_process_group()
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    place = find_place(os.environ)
    line = f"{place.rank} of {int(ranks)}, {place.local_rank} of {place.local_world_size} here"
    sys.stdout.write(f"{line}, network: {network.listens() - network.LOOPBACK != set()}\\n")
"""


def places(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if " here, " in line)


def test_a_batch_job_listens_on_the_loopback_only(slurm, tmp_path: Path):
    """Its first step ends before the second starts, under the same job's number."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    step = "srun --ntasks 2 --kill-on-bad-exit python program.py"
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\n{step} && {step}\necho ended with $? >ended\n")
    done = run(["sbatch", "--ntasks", "2", "--output", "printed", "job.sh"], tmp_path, **slurm)
    assert done.returncode == 0, done.output
    deadline = time.monotonic() + 120
    while not (tmp_path / "ended").exists() and time.monotonic() < deadline:  # sbatch --wait sleeps too long
        time.sleep(0.1)
    printed = (tmp_path / "printed").read_text()
    expected = [f"{rank} of 2, {rank} of 2 here, network: False" for rank in range(2)]
    assert places(printed) == sorted(2 * expected), printed


@pytest.mark.long("the other tests run the commands that the recipe has")
def test_the_recipe_for_a_cluster_of_gpus(slurm, tmp_path: Path):
    """On CPUs, and smaller: flags of sbatch go before the script's own, and those of train come last."""
    smaller = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--wait", "--output", "printed"]
    flags = ["--model", "logistic", "--epochs", "1", "--steps", "5", "--save", str(tmp_path / "saved")]
    recipe = str(ROOT / "cloud" / "slurm.sh")
    done = run(["sbatch", *smaller, recipe, *flags], tmp_path, **slurm, ZEROLAB_PYTHON=sys.executable)
    printed = (tmp_path / "printed").read_text()
    assert done.returncode == 0, printed + done.output
    assert "rank 1  epoch  1" in printed and (tmp_path / "saved").exists()


FAILING_PROGRAM = """
    import os, signal, torch, torch.distributed as dist, zerolab
    how, failing = os.environ["HOW"], os.environ["SLURM_PROCID"] == "1"
    if failing and how == "before it joins":
        raise RuntimeError("rank 1 has no data")
    zerolab.init_process_group()
    if failing:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    "how, words", [("before it joins", "rank 1 has no data"), ("killed", "task 1: Killed")]
)
def test_a_rank_that_fails_ends_the_job(slurm, how: str, words: str, tmp_path: Path):
    (tmp_path / "program.py").write_text(textwrap.dedent(FAILING_PROGRAM))
    srun = guide_command("srun").partition(" -m zerolab")[0]
    done = run(shell(f"{srun} program.py"), tmp_path, **slurm, HOW=how)
    assert done.returncode != 0 and words in done.output, done.output


def test_two_hosts(tmp_path: Path):
    """The guide's command; and tasks that SLURM spreads unevenly, of which each finds its place."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    with two_hosts(tmp_path) as hosts:
        nodes = [Node(host.name, address, host.on()) for host, address in zip(hosts, ADDRESSES, strict=True)]
        with cluster(nodes) as slurm:
            command = f"{guide_command('srun, two hosts')} --save {tmp_path / 'saved'}"
            check([run(hosts[0].on(*shell(command)), tmp_path, **slurm)], tmp_path / "saved")
            start = "srun --nodes 2 --ntasks 3 --kill-on-bad-exit"
            meet = "--export=ALL,MASTER_ADDR=node01,MASTER_PORT=29500"
            spread = run(hosts[0].on(*shell(f"{start} {meet} python program.py")), tmp_path, **slurm)
            lost = run(hosts[0].on(*shell(f"{start} python program.py")), tmp_path, **slurm)
    assert places(spread.output) == [
        "0 of 3, 0 of 2 here, network: True",
        "1 of 3, 1 of 2 here, network: True",
        "2 of 3, 0 of 1 here, network: True",
    ], spread.output
    assert lost.returncode != 0 and "set MASTER_ADDR" in lost.output, lost.output

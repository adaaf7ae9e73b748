"""Promise: Open MPI's own mpirun starts the ranks, on one host or two, and a rank that fails ends the job."""

import runpy
import shlex
import shutil
import textwrap
from pathlib import Path

import pytest
import torch
from support.hosts import two_hosts
from support.launchers import check, guide_command, run, same_bits, shell

import zerolab

pytestmark = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="needs Open MPI: apt-get install -y openmpi-bin"
)

PROGRAM = """
    import torch, zerolab

    def train(stage):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=0.05)
        for step in range(5):
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + optimizer.rank))
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with optimizer.full_params():
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    if __name__ == "__main__":
        zerolab.init_process_group()
        rank = torch.distributed.get_rank()
        torch.save([train(stage) for stage in range(4)], f"rank{rank}.pt")
"""


def test_a_program_ends_with_the_bits_that_launch_gives_the_same_function(tmp_path: Path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    done = run(["mpirun", "-np", "2", "python", "program.py"], tmp_path)
    assert done.returncode == 0, done.output
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    train = runpy.run_path(str(program))["train"]
    for stage in range(4):
        for rank, expected in enumerate(zerolab.launch(train, 2, stage, backend="gloo")):
            assert same_bits(torch.load(tmp_path / f"rank{rank}.pt")[stage], expected)


@pytest.mark.long("the test with two hosts runs the same program")
def test_the_training_program_ends_with_the_bits_that_plain_python_gives_it(tmp_path: Path):
    done = run(shell(f"{guide_command('mpirun')} --save {tmp_path / 'saved'}"), tmp_path)
    check([done], tmp_path / "saved")


def test_two_hosts_when_they_are_told_where_rank_0_is(tmp_path: Path):
    mpirun = f"{guide_command('mpirun, two hosts')} --save {tmp_path / 'saved'}"
    with two_hosts(tmp_path) as hosts:
        agent = in_place_of_ssh(tmp_path, hosts)
        settings = {"OMPI_MCA_plm_rsh_agent": agent, "PRTE_MCA_plm_ssh_agent": agent}
        done = run(hosts[0].on(*shell(mpirun)), tmp_path, **settings)
    check([done], tmp_path / "saved")


def in_place_of_ssh(folder: Path, hosts: list) -> str:
    """A program that runs ``ssh HOST COMMAND`` on one of the hosts, which have no ssh."""
    path = folder / "agent"
    cases = [f'{host.name}) exec {shlex.join(host.on("sh", "-c"))} "$*" ;;' for host in hosts]
    path.write_text("\n".join(["#!/bin/sh", "host=$1", "shift", "case $host in", *cases, "esac", "exit 1"]))
    path.chmod(0o755)
    return str(path)


FAILING_PROGRAM = """
    import os, signal, sys, torch, torch.distributed as dist, zerolab

    def rank_1_has_no_data():
        raise RuntimeError("rank 1 has no data")

    failures = {
        "before it joins": rank_1_has_no_data,
        "by raising": rank_1_has_no_data,
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "by leaving": lambda: sys.exit(0),
    }
    how, failing = sys.argv[1], os.environ["OMPI_COMM_WORLD_RANK"] == "1"
    if failing and how == "before it joins":
        failures[how]()
    zerolab.init_process_group()
    if failing:
        failures[how]()
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    "how, words",
    [
        ("before it joins", "rank 1 has no data"),
        ("by raising", "rank 1 has no data"),
        ("killed", "signal 9"),
        ("by leaving", "closed by peer"),
    ],
)
def test_a_rank_that_fails_ends_the_job(how: str, words: str, tmp_path: Path):
    (tmp_path / "program.py").write_text(textwrap.dedent(FAILING_PROGRAM))
    done = run(["mpirun", "-np", "2", "python", "program.py", how], tmp_path)
    assert done.returncode != 0 and words in done.output, done.output

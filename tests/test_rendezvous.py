"""Promise: the same program joins whichever launcher started it, and works alone."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import PYTHONPATH, run_script

import zerolab
from zerolab.launcher.rendezvous import LAUNCHERS, Place, find_place, first_host, job_port

MEETING = {"MASTER_ADDR": "node7", "MASTER_PORT": "1234"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **MEETING}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}


def test_each_launcher_tells_a_place():
    assert find_place(TORCHRUN) == Place(3, 8, 1, 2, "node7", 1234)
    assert find_place(OPEN_MPI) == Place(1, 2, 1, 2, "127.0.0.1", job_port(["prterun-host-1@1", ""]))
    assert find_place(SLURM) == Place(5, 6, 1, 2, "gpu07", job_port(["77", "0"]))
    assert find_place(SLURM | MEETING) == Place(5, 6, 1, 2, "node7", 1234)
    assert find_place(SLURM | OPEN_MPI | TORCHRUN) == find_place(TORCHRUN), "the innermost launcher counts"
    assert len(LAUNCHERS) == 3, "each has a line above"


def test_a_process_started_alone_has_no_place():
    assert find_place({}) is None
    assert find_place({"RANK": "0", "WORLD_SIZE": "1"}) is None
    batch_script = {name: text for name, text in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert find_place(batch_script) is None, "python in a batch script, without srun"


@pytest.mark.parametrize(
    "nodes, host",
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[01-04,7],m", "n01"),
        ("n[3,5]", "n3"),
        ("n1,n[2-3]", "n1"),
        ("n[07-09]", "n07"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str):
    assert first_host(nodes) == host


def test_ports_of_jobs_differ_and_are_free_for_the_taking():
    ports = {job_port([str(job), "0"]) for job in range(100)}
    assert len(ports) > 90 and min(ports) >= 10_000 and max(ports) < 32_768


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a number, got 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be from 0 to WORLD_SIZE - 1, got 2 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "torchrun does not tell where rank 0 runs; set MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT must be a number, got None"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun does not tell where rank 0 runs"),
    ],
)
def test_an_incomplete_place_is_refused(environment: dict, words: str):
    with pytest.raises(ValueError, match=words):
        find_place(environment)


@pytest.mark.parametrize("launcher", ["mpirun", "srun", "torchrun by hand"])
def test_processes_with_a_launchers_variables_meet(launcher: str):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def join() -> tuple:
        rank = dist.get_rank()
        dist.barrier()
        dist.destroy_process_group()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        os.environ |= {
            "mpirun": OPEN_MPI | {"OMPI_COMM_WORLD_RANK": str(rank), "PMIX_NAMESPACE": str(port)},
            "srun": SLURM
            | {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
            | {"SLURM_JOB_ID": str(port)},
            "torchrun by hand": {"RANK": str(rank), "WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        }[launcher]
        zerolab.init_process_group()
        zerolab.init_process_group()
        ranks = torch.tensor([0, 0])
        ranks[rank] = rank + 1
        dist.all_reduce(ranks)
        return dist.get_rank(), ranks.tolist()

    assert zerolab.launch(join, 2, backend="gloo") == [(0, [1, 2]), (1, [1, 2])]


PROGRAM = """
    import torch, torch.distributed as dist, zerolab
    zerolab.init_process_group()
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    if dist.get_rank() == 0:
        gpu = torch.cuda.is_available()
        print(dist.get_world_size(), ranks.item(), dist.get_backend() == ("nccl" if gpu else "gloo"))
    dist.destroy_process_group()
"""


def test_a_program_alone(tmp_path: Path):
    assert run_script(PROGRAM, tmp_path).split() == ["1", "1.0", "True"]


def test_the_same_program_under_torchrun(tmp_path: Path):
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["2", "2.0", "True"], done.stderr

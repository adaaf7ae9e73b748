"""Promise: the same program joins whichever launcher started it, and works alone."""

import os
import socket
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import run_script
from support.launchers import check, guide_command, run, shell

import zerolab
from zerolab import train
from zerolab.launcher.rendezvous import (
    LAUNCHERS,
    Place,
    choose_interface,
    find_place,
    gpus_of_node,
)

MEETING = {"MASTER_ADDR": "node7", "MASTER_PORT": "1234"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **MEETING}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
SLURM = {  # task 6 of `srun --ntasks 7 --nodes 4` in an allocation of five nodes for 9 tasks
    **MEETING,
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "gpu[01,07-09,12]",
    "SLURM_JOB_NUM_NODES": "5",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_NTASKS": "9",
    "SLURM_PROCID": "6",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_TASKS_PER_NODE": "2(x4),1",
}
INTERACTIVE_STEP = SLURM | {  # the shell of `salloc --ntasks 9`, whose SLURM_NTASKS is the allocation's
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "gpu01",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}


def test_each_launcher_tells_a_place():
    assert find_place(TORCHRUN) == Place(3, 8, 1, 2)
    assert find_place(OPEN_MPI) == Place(1, 2, 1, 2, "mpirun-prterun-host-1@1")
    assert find_place(SLURM) == Place(6, 7, 0, 1)
    assert find_place(SLURM | OPEN_MPI | TORCHRUN) == find_place(TORCHRUN), "the innermost launcher counts"
    assert len(LAUNCHERS) == 3, "each has a line above"


def test_ranks_that_all_run_here_need_no_address():
    here = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "0"}
    here |= {"SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_ADDR": ""}
    assert find_place(SLURM | here).job == "srun-77-0"
    assert find_place(TORCHRUN | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}).job == "torchrun-1234--"
    assert find_place(TORCHRUN | {"MASTER_ADDR": "127.0.0.1"}).job == "torchrun-1234--"


def test_a_process_started_alone_has_no_place():
    assert find_place({}) is None
    batch_script = {name: text for name, text in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert find_place(batch_script) is None, "python in a batch script, without srun"


@pytest.mark.parametrize("environment", [{"RANK": "0", "WORLD_SIZE": "1"}, INTERACTIVE_STEP])
def test_a_world_of_one_was_launched_and_has_nobody_to_meet(environment: dict):
    place = find_place(environment)
    assert (place.rank, place.world_size) == (0, 1)


def test_the_shell_of_an_allocation_launched_nothing(monkeypatch):
    for name, text in INTERACTIVE_STEP.items():
        monkeypatch.setenv(name, text)
    assert train.launched_world_size() is None, "so `train` starts its ranks here"


@pytest.mark.parametrize("node, count", [("0", 2), ("2", 2), ("3", 1)])
def test_srun_may_start_fewer_ranks_on_one_node(node: str, count: int):
    assert find_place(SLURM | {"SLURM_NODEID": node}).local_world_size == count


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a number, got 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be from 0 to WORLD_SIZE - 1, got 2 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "torchrun does not tell where rank 0 runs; set MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT must be a number, got None"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "MASTER_PORT is not set"),
        (SLURM | {"MASTER_ADDR": ""}, "set MASTER_ADDR .* export MASTER_ADDR=.*scontrol show hostnames"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun does not tell where rank 0 runs"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE must be counts .* 'two'"),
        (SLURM | {"SLURM_NODEID": "4"}, "SLURM_STEP_TASKS_PER_NODE .* for node 4, got '2\\(x3\\),1'"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_SIZE is '2'.* Open MPI's mpirun"),
    ],
)
def test_an_incomplete_place_is_refused(environment: dict, words: str):
    with pytest.raises(ValueError, match=words):
        find_place(environment)


@pytest.mark.parametrize(
    "visible, on_node, gpus",
    [
        (8, 0, 8),
        (8, 8, 8),
        (1, 8, 8),  # srun --gpus-per-task 1: each task sees its own GPU alone
        (0, 0, 0),
        (0, 8, 0),  # srun without --gpus: the node has some, and this task may use none
    ],
)
def test_the_gpus_of_a_node_are_counted(visible: int, on_node: int, gpus: int):
    assert gpus_of_node(Place(5, 16, 1, 8, node_gpus=on_node), visible) == gpus


def test_srun_tells_how_many_gpus_the_node_has():
    assert find_place(SLURM).node_gpus == 0
    assert find_place(SLURM | {"SLURM_GPUS_ON_NODE": "4"}).node_gpus == 4


def test_a_host_that_others_cannot_reach_by_its_name_is_named(monkeypatch):
    """As Debian and Ubuntu set a machine up: gloo would listen on 127.0.1.1, and the others wait in vain."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    two_hosts = Place(1, 2, 0, 1)
    found = [(socket.AF_INET, 0, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **named: found)
    with pytest.raises(ValueError, match=r"127\.0\.1\.1.* GLOO_SOCKET_IFNAME"):
        choose_interface(two_hosts, os.environ)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    choose_interface(two_hosts, os.environ)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    found[:] = [(socket.AF_INET, 0, 0, "", ("10.0.0.7", 0))]
    choose_interface(two_hosts, os.environ)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize("launcher", ["mpirun", "srun", "torchrun by hand"])
def test_processes_with_a_launchers_variables_meet_on_the_loopback_only(launcher: str):
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
            | {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2"}
            | {"SLURM_JOB_ID": str(port), "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"},
            "torchrun by hand": {"RANK": str(rank), "WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        }[launcher]
        from support import network

        zerolab.init_process_group()
        zerolab.init_process_group()
        ranks = torch.tensor([0, 0])
        ranks[rank] = rank + 1
        dist.all_reduce(ranks)
        return dist.get_rank(), ranks.tolist(), network.listens() == network.LOOPBACK

    assert zerolab.launch(join, 2, backend="gloo") == [(0, [1, 2], True), (1, [1, 2], True)]


PROGRAM = """
    import torch, torch.distributed as dist, zerolab
    from support import network
    zerolab.init_process_group()
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    local = network.listens() <= network.LOOPBACK
    if dist.get_rank() == 0:
        gpu = torch.cuda.is_available()
        print(dist.get_world_size(), ranks.item(), zerolab.device().type == ("cuda" if gpu else "cpu"), local)
    dist.destroy_process_group()
"""


def test_a_program_alone(tmp_path: Path):
    assert run_script(PROGRAM, tmp_path).split() == ["1", "1.0", "True", "True"]


def test_a_program_may_choose_how_long_a_rank_waits(tmp_path: Path):
    program = """
    import torch, torch.distributed as dist, zerolab

    if __name__ == "__main__":
        for wrong in (0, float("nan"), "60", True):
            try:
                zerolab.init_process_group(timeout=wrong)
            except (TypeError, ValueError) as error:
                print(error)
        zerolab.init_process_group(timeout=7.5)
        group = dist.distributed_c10d._get_default_group()
        print(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
        dist.destroy_process_group()
    """
    *refused, seconds = run_script(program, tmp_path).splitlines()
    assert seconds == "7.5"
    assert [each.partition(", got")[0] for each in refused] == [
        *["timeout must be positive and finite"] * 2,
        *["timeout must be a number of seconds or None"] * 2,
    ]


def test_the_same_program_under_torchrun(tmp_path: Path):
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    torchrun = guide_command("torchrun").partition(" -m zerolab")[0]
    done = run(shell(f"{torchrun} program.py"), tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and "2 2.0 True True" in done.output.splitlines(), done.output


def test_the_training_program_under_torchrun_ends_with_the_bits_that_plain_python_gives_it(tmp_path: Path):
    done = run(shell(f"{guide_command('torchrun')} --save {tmp_path / 'saved'}"), tmp_path)
    check([done], tmp_path / "saved")


def test_one_rank_under_torchrun_is_one_rank(tmp_path: Path):
    torchrun = guide_command("torchrun").replace("--nproc-per-node 2", "--nproc-per-node 1")
    done = run(shell(f"{torchrun} --epochs 1 --steps 5"), tmp_path)
    assert done.returncode == 0 and done.losses.keys() == {0}, done.output

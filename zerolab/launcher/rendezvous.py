"""Joins the process group of whichever launcher started this process: torchrun, mpirun, srun, or none."""

import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from typing import NamedTuple

Environment = Mapping[str, str]


class Launcher(NamedTuple):
    """The variables in which a launcher tells a process who it is; `rank` and `mark` together give it away.

    `host` and `job` serve where MASTER_ADDR and MASTER_PORT are not set: the host of rank 0, and the
    variables whose values all ranks of a job share and no other job on these machines has."""

    name: str
    mark: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    host: Callable[[Environment], str | None]
    job: tuple[str, ...]


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: "gpu[07-09,12],login" gives "gpu07"."""
    name, _, numbers = re.match(r"([^,\[]*)(\[([^\]]*)\])?", nodes).groups(default="")
    return name + re.split("[-,]", numbers)[0]


def slurm_host(environment: Environment) -> str | None:
    """The host of SLURM's first task."""
    return first_host(environment["SLURM_STEP_NODELIST"])


def open_mpi_host(environment: Environment) -> str | None:
    """This host where all ranks share it; Open MPI tells nobody where rank 0 of a larger job runs."""
    alone = environment["OMPI_COMM_WORLD_LOCAL_SIZE"] == environment["OMPI_COMM_WORLD_SIZE"]
    return "127.0.0.1" if alone else None


LAUNCHERS = (
    Launcher(
        name="torchrun",
        mark="WORLD_SIZE",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
        host=lambda environment: None,
        job=(),
    ),
    Launcher(
        name="mpirun",
        mark="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        host=open_mpi_host,
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        name="srun",
        mark="SLURM_STEP_NODELIST",  # absent from a batch script that calls python without srun
        rank="SLURM_PROCID",
        world_size="SLURM_NTASKS",
        local_rank="SLURM_LOCALID",
        local_world_size="SLURM_STEP_TASKS_PER_NODE",
        host=slurm_host,
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)


class Place(NamedTuple):
    """A process's place in a job, and where the job meets."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int


def find_place(environment: Environment) -> Place | None:
    """This process's place as its launcher tells it; None where it was started alone.

    Raises: ValueError for a variable that is missing or no number, or a meeting point nobody can know.
    """
    for launcher in LAUNCHERS:
        if launcher.rank in environment and launcher.mark in environment:
            return place_in(launcher, environment)
    if "RANK" in environment:
        raise ValueError(
            f"RANK is {environment['RANK']!r} but WORLD_SIZE is not set; set both, or start with torchrun"
        )
    return None


def place_in(launcher: Launcher, environment: Environment) -> Place | None:
    """The place that one launcher's variables describe."""
    rank = number(environment, launcher.rank)
    world_size = number(environment, launcher.world_size)
    if not 0 <= rank < world_size:
        raise ValueError(
            f"{launcher.rank} must be from 0 to {launcher.world_size} - 1, got {rank} of {world_size}"
        )
    if world_size == 1:
        return None
    address = environment.get("MASTER_ADDR") or launcher.host(environment)
    if not address:
        raise ValueError(
            f"{launcher.name} does not tell where rank 0 runs; set MASTER_ADDR to that host on every rank, "
            "and MASTER_PORT to a port that is free there"
        )
    if "MASTER_PORT" in environment or not launcher.job:
        port = number(environment, "MASTER_PORT")
    else:
        port = job_port([environment.get(name, "") for name in launcher.job])
    return Place(
        rank,
        world_size,
        number(environment, launcher.local_rank, default=rank),
        number(environment, launcher.local_world_size, default=1),
        address,
        port,
    )


def job_port(identity: list[str]) -> int:
    """The port all ranks of a job agree on unasked; below the range that systems hand out by themselves."""
    return 10_000 + zlib.crc32("/".join(identity).encode()) % 20_000


def number(environment: Environment, name: str, default: int | None = None) -> int:
    """A variable's value; SLURM's counts per node, such as "4(x2)", read as their first number."""
    text = environment.get(name)
    if text is None and default is not None:
        return default
    match = re.match(r"(\d+)(\(x|,|$)", text or "")
    if match is None:
        raise ValueError(f"the environment variable {name} must be a number, got {text!r}")
    return int(match[1])


def init_process_group() -> None:
    """Join the group of the launcher that started this process, or make a group of one where none did.

    The same program then runs under torchrun, mpirun and srun, as a plain script, and inside ``launch``,
    where nothing is left to join. NCCL where every local rank has a GPU, then its current device; else gloo.

    Raises: ValueError where the launcher's variables are incomplete.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    place = find_place(os.environ)
    local_rank, local_world_size = (place.local_rank, place.local_world_size) if place else (0, 1)
    devices = torch.cuda.device_count() if dist.is_nccl_available() else 0
    device = torch.device("cuda", local_rank % devices) if devices >= local_world_size else None
    if device:
        torch.cuda.set_device(device)
    if place is None or place.local_world_size == place.world_size:
        use_loopback(os.environ)
    if place is None:
        meeting = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    else:
        os.environ |= {"MASTER_ADDR": place.address, "MASTER_PORT": str(place.port)}
        meeting = {"rank": place.rank, "world_size": place.world_size}
    dist.init_process_group("nccl" if device else "gloo", device_id=device, **meeting)


def use_loopback(environment: MutableMapping[str, str]) -> None:
    """Keep gloo on this machine: it works without a network then, and whatever its name resolves to."""
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            environment.setdefault("GLOO_SOCKET_IFNAME", name)

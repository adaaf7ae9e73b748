"""Join the process group of the launcher that started this process: torchrun, mpirun, srun, or none.

Ranks that all run on this host meet through a file (local_store.py) and talk over the loopback, whatever
started them; no other host can reach them. Ranks on several hosts meet at MASTER_ADDR and MASTER_PORT."""

import datetime
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping, MutableMapping
from typing import NamedTuple

from zerolab.launcher import local_store
from zerolab.launcher.deadline import check_timeout
from zerolab.launcher.gpus import GROUP_BACKENDS, check_sharing, choose_backend, take_gpu, visible_gpus

Environment = Mapping[str, str]


class Launcher(NamedTuple):
    """The variables in which a launcher tells its processes their place; all of them have `rank` and `mark`.

    `job`: variables that together name a job among those that run on a host; the first is always there.
    """

    name: str
    mark: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: Callable[[Environment], int]
    job: tuple[str, ...]
    hint: str = ""


def slurm_local_world_size(environment: Environment) -> int:
    """How many tasks srun started on this node: "4(x2),1" is 4 on either of the first two, 1 on the third."""
    name, node = "SLURM_STEP_TASKS_PER_NODE", number(environment, "SLURM_NODEID", default=0)
    text = environment.get(name, "")
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    counts = [int(count) for count, nodes in groups for _ in range(int(nodes or 1))]
    if node >= len(counts):
        raise ValueError(f"{name} must be counts such as 4(x2),1 with one for node {node}, got {text!r}")
    return counts[node]


LAUNCHERS = (
    Launcher(
        name="torchrun",
        mark="WORLD_SIZE",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size=lambda environment: number(environment, "LOCAL_WORLD_SIZE", default=1),
        job=("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ),
    Launcher(
        name="mpirun",
        mark="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size=lambda environment: number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        job=("PMIX_NAMESPACE",),
    ),
    Launcher(
        name="srun",
        mark="SLURM_STEP_NODELIST",  # absent from a batch script that calls python without srun
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",  # SLURM_NTASKS may be that of the whole allocation
        local_rank="SLURM_LOCALID",
        local_world_size=slurm_local_world_size,
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        hint=': export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    ),
)


class Place(NamedTuple):
    """A process's place in a job.

    `job`: its name, if it has other ranks and all are on this host. `node_gpus`: 0 if nobody counted them.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    job: str = ""
    node_gpus: int = 0


ALONE = Place(0, 1, 0, 1)
LOOPBACKS = ("lo", "lo0")


def find_place(environment: Environment) -> Place | None:
    """This process's place as its launcher tells it; None where it was started alone.

    Raises: ValueError for a variable that is missing or no number, and where nothing says how ranks meet.
    """
    for launcher in LAUNCHERS:
        if launcher.rank in environment and launcher.mark in environment:
            return place_in(launcher, environment)
    if "RANK" in environment:
        raise ValueError(
            f"RANK is {environment['RANK']!r} but WORLD_SIZE is not set; set both, or start with torchrun"
        )
    if environment.get("PMI_SIZE", "1") != "1":  # else each of them would train alone
        raise ValueError(
            f"PMI_SIZE is {environment['PMI_SIZE']!r}, as MPICH and the libraries made from it set it. These "
            "are not supported; use torchrun, srun or Open MPI's mpirun, or set RANK, WORLD_SIZE and "
            "MASTER_ADDR"
        )
    return None


def place_in(launcher: Launcher, environment: Environment) -> Place:
    """Return the place that one launcher's variables describe."""
    rank = number(environment, launcher.rank)
    world_size = number(environment, launcher.world_size)
    if not 0 <= rank < world_size:
        raise ValueError(
            f"{launcher.rank} must be from 0 to {launcher.world_size} - 1, got {rank} of {world_size}"
        )
    local_world_size = launcher.local_world_size(environment)
    return Place(
        rank,
        world_size,
        number(environment, launcher.local_rank, default=rank),
        local_world_size,
        local_job(launcher, environment, local_world_size == world_size) if world_size > 1 else "",
        number(environment, "SLURM_GPUS_ON_NODE", default=0) if launcher.name == "srun" else 0,
    )


def local_job(launcher: Launcher, environment: Environment, here: bool) -> str:
    """The name of a job whose ranks are all on this host; empty for one whose ranks meet at MASTER_ADDR."""
    address = environment.get("MASTER_ADDR", "")
    if here or is_loopback(address):
        if not environment.get(launcher.job[0]):
            raise ValueError(
                f"{launcher.job[0]} is not set, and it has to distinguish this job from others on this host; "
                "set it to the same number on every rank, and to another number for each job"
            )
        return "-".join([launcher.name, *(environment.get(name, "") for name in launcher.job)])
    if not address:
        raise ValueError(
            f"{launcher.name} does not tell where rank 0 runs; set MASTER_ADDR to that host on every rank, "
            f"and MASTER_PORT to a port that is free there{launcher.hint}"
        )
    number(environment, "MASTER_PORT")
    return ""


def number(environment: Environment, name: str, default: int | None = None) -> int:
    """Return a variable's value."""
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise ValueError(f"the environment variable {name} must be a number, got {text!r}")
    return int(text)


def init_process_group(backend: str = "auto", timeout: float | None = None) -> None:
    """Join the group of the launcher that started this process, or make a group of one where none did.

    The same program then runs under torchrun, mpirun and srun, as a plain script, and inside ``launch``,
    where nothing is left to join. ``backend`` is as for ``launch``: by default NCCL where every local rank
    has a GPU, which then is `zerolab.device()`, and gloo elsewhere. ``timeout`` is in seconds: so long may a
    rank wait for another one in a collective. By default it is PyTorch's: 30 minutes over gloo, 10 over NCCL.
    Inside ``launch`` its own timeout counts, and this one does not.

    Raises: ValueError for a launcher's variables that are incomplete, for a host that others cannot reach,
    for NCCL without a GPU, and for a timeout that is not positive and finite; TypeError for one that is no
    number.
    """
    import torch.distributed as dist

    check_timeout(timeout)
    if dist.is_initialized():
        return
    place = find_place(os.environ) or ALONE
    choose_interface(place, os.environ)
    gpus = gpus_of_node(place, visible_gpus())
    backend = choose_backend(backend, place.local_world_size, gpus, say=place.rank == 0)
    if backend == "nccl":
        take_gpu(place.local_rank, place.local_world_size, gpus)
    if place.world_size == 1:
        store: dist.Store | None = dist.HashStore()
    elif place.job:
        store = dist.FileStore(local_store.store_file(place.job, place.rank), place.world_size)
        store.set_timeout(datetime.timedelta(seconds=local_store.MEET_SECONDS))
    else:
        store = None  # torch makes one from MASTER_ADDR and MASTER_PORT, or takes that of torchrun's agent
    dist.init_process_group(
        GROUP_BACKENDS[backend],
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=None if timeout is None else datetime.timedelta(seconds=timeout),
    )
    if backend == "nccl" and place.local_world_size == place.world_size:
        check_sharing(place.world_size, gpus)


def gpus_of_node(place: Place, visible: int) -> int:
    """Return how many GPUs the ranks of this node have: SLURM may show each of them its own alone."""
    return max(visible, place.node_gpus) if visible else 0


def choose_interface(place: Place, environment: MutableMapping[str, str]) -> None:
    """Keep messages on this host where all ranks are; else check that gloo will listen where others reach it.

    Raises: ValueError where gloo would listen on the loopback alone, because this host's name
    resolves to it: the other hosts would time out after 30 s with an error that does not name the cause.
    """
    if place.job or place.world_size == 1:
        use_loopback(environment)
    elif "GLOO_SOCKET_IFNAME" not in environment:
        name = socket.gethostname()
        address = address_of(name)
        if is_loopback(address):
            others = ", ".join(each for _, each in socket.if_nameindex() if each not in LOOPBACKS)
            raise ValueError(
                f"other hosts cannot reach this one: its name {name} resolves to {address}; correct "
                "/etc/hosts, or set GLOO_SOCKET_IFNAME to the network interface that they see, of these: "
                f"{others}"
            )


def address_of(name: str) -> str:
    """Return the first address of a host's name; the loopback's where it has none, as gloo does."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror:
        return "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Return whether an address, a number or the name localhost, is one of this host's loopback."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:  # a host's name
        return False


def use_loopback(environment: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL listen on the loopback: no other host reaches them, and they need no network."""
    for _, name in socket.if_nameindex():
        if name in LOOPBACKS:
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
            environment.setdefault("NCCL_SOCKET_IFNAME", name)

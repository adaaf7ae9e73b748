"""The probes, in the order in which they run, and how to fix what fails.

The probe that needs an optional module imports it, so a missing module fails that line alone.
"""

import contextlib
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from importlib import metadata
from pathlib import Path

from zerolab.doctor.examine import Probe

# What pyproject.toml asks for, and JupyterLab, in which ./zero lab opens the notebooks.
ENGINE = ("torch>=2.11,<2.14", "numpy", "cloudpickle>=3.0", "tqdm>=4.64")
NOTEBOOKS = ("matplotlib>=3.7", "ipywidgets>=7.7", "ipython>=7.34", "pygments")
FRONT_END = "jupyterlab"
IMPORTED_AS = {"ipython": "IPython"}

PYTHONS = ((3, 11), (3, 14))  # from the first, below the second
LEAST_MEMORY_BYTES = 1e9  # a notebook, the launcher's server and four ranks of a small model
SHARED_BYTES = 32_000_000
LAUNCH_SECONDS = 60.0  # below a probe's deadline, because a launch that is late names the late ranks


def python() -> str:
    """Return the Python that runs this."""
    version = "{}.{}.{}".format(*sys.version_info[:3])
    if not PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]:
        raise RuntimeError(f"Python {version} is outside 3.11, 3.12 and 3.13, for which zerolab is made")
    return f"{version}, {sys.executable}"


def zerolab() -> str:
    """Return the package itself, which this is part of."""
    face = sys.modules["zerolab"]
    return f"{face.__version__}, {Path(str(face.__file__)).parent}"


def package(requirement: str) -> str:
    """Import a package, and check that its version is within its bounds."""
    name = re.findall(r"[\w-]+", requirement)[0]
    importlib.import_module(IMPORTED_AS.get(name, name))
    version = metadata.version(name)
    for sign, bound in re.findall(r"(>=|<)([\d.]+)", requirement):
        if (numbers(version) >= numbers(bound)) != (sign == ">="):
            raise RuntimeError(f"{name} {version} is here, but {requirement} is needed")
    return version


def numbers(version: str) -> tuple[int, ...]:
    """Return a version to compare: "2.13.0+cpu" is (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def kernel() -> str:
    """The Python in which notebooks run, which need not be this one; JupyterLab brings jupyter_client."""
    manager = importlib.import_module("jupyter_client.manager").KernelManager(kernel_name="python3")
    interpreter = manager.format_kernel_cmd()[0]
    command = [interpreter, "-c", "import ipykernel, zerolab, sys; print(sys.executable)"]
    done = subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{interpreter}: {done.stderr.strip().splitlines()[-1]}")
    return f"python3 runs in {done.stdout.strip()}"


def cores() -> str:
    """Return the cores that ranks share."""
    from zerolab.launcher.launcher import core_count, threads_per_rank

    each = threads_per_rank(2)
    return f"{core_count()} of {os.cpu_count()} may be used; two ranks compute with {each} thread(s) each"


def memory() -> str:
    """Return the memory that is free now, within a container's limit."""
    from zerolab.launcher.launcher import memory_bytes

    total = memory_bytes()
    available = min(total, *available_bytes(total))
    text = f"{available / 1e9:.1f} GB available of {total / 1e9:.1f} GB"
    if available < LEAST_MEMORY_BYTES:
        raise RuntimeError(f"{text}, and the course takes {LEAST_MEMORY_BYTES / 1e9:.0f} GB")
    return text


def available_bytes(limit: int) -> Iterable[int]:
    """What the kernel would give out, and what a container's limit leaves; only what this system tells."""
    with contextlib.suppress(OSError):
        yield 1024 * int(re.findall(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[0])
    with contextlib.suppress(OSError):
        yield limit - int(Path("/sys/fs/cgroup/memory.current").read_text())


def shared_memory() -> str:
    """Room in /dev/shm, through which NCCL's ranks on one machine talk."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return "this system has no /dev/shm, and without NVIDIA GPUs nothing needs it"
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, SHARED_BYTES)
    room = os.statvfs(folder)
    return f"{room.f_bavail * room.f_frsize / 1e9:.1f} GB free in {folder}"


def gpus() -> str:
    """Return each GPU that torch sees, after it has computed something."""
    import torch

    if torch.cuda.device_count() == 0:
        if Path("/proc/driver/nvidia/version").exists():
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU build"
            raise RuntimeError(f"a driver is here, but torch {torch.__version__}, {built}, sees no GPU")
        return "none: ranks are processes on the CPU, which is all the course needs"
    return "; ".join(map(gpu, range(torch.cuda.device_count())))


def gpu(index: int) -> str:
    """One GPU: its name, its memory, and whether bf16 runs in hardware (compute capability 8.0 and up)."""
    import torch

    if torch.ones(1000, device=f"cuda:{index}").sum().item() != 1000:
        raise RuntimeError(f"cuda:{index} adds up 1000 ones to something else")
    free, total = torch.cuda.mem_get_info(index)
    native = torch.cuda.get_device_capability(index) >= (8, 0)
    memory = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f} GB"
    return f"{torch.cuda.get_device_name(index)}, {memory}, {'native' if native else 'no native'} bf16"


def gloo() -> str:
    """Start two ranks on the CPU."""
    return two_ranks_add("gloo")


def nccl() -> str:
    """Start two ranks on GPUs, on one GPU if there is only one."""
    import torch

    if torch.cuda.device_count() == 0:
        return "not tried: no GPU"
    return two_ranks_add("nccl")


def two_ranks_add(backend: str) -> str:
    """Start two ranks, and have them add up one from each."""
    import torch

    from zerolab.devices import device
    from zerolab.launcher import launch

    def add() -> float:
        ones = torch.ones(1, device=device())
        torch.distributed.all_reduce(ones)
        return ones.item()

    sums = launch(add, 2, backend=backend, timeout=LAUNCH_SECONDS)
    if sums != [2.0, 2.0]:
        raise RuntimeError(f"two ranks added 1 and 1 to {sums[0]} and {sums[1]}")
    return "two ranks were started and added 1 and 1"


def engine() -> str:
    """Compare a training step at stage 3 with the same step in one process."""
    from zerolab.parity import verify

    report = verify(stage=3, world_size=2, steps=1, backend="gloo")
    if not report.ok:
        raise RuntimeError(f"stage 3 on two ranks differs from one process by {report.max_abs_diff:.1e}")
    return "stage 3 on two ranks: bit-identical to one process, in the predicted bytes"


def install(requirement: str) -> str:
    """Return how to get a package."""
    cpu = "; ZEROLAB_TORCH=cpu takes the small CPU build" if requirement.startswith("torch") else ""
    return f"./zero lab sets everything up{cpu}; or: {sys.executable} -m pip install '{requirement}'"


PROBES = (
    Probe("python", python, "PYTHON=/path/to/python3.12 ./zero lab"),
    Probe("zerolab", zerolab, f"in the clone: {sys.executable} -m pip install -e ."),
    *(
        Probe(re.findall(r"\w+", each)[0], partial(package, each), install(each))
        for each in ENGINE + NOTEBOOKS
    ),
    Probe(FRONT_END, partial(package, FRONT_END), install(FRONT_END), needed=False),
    Probe("kernel", kernel, f"./zero lab has one; or: {sys.executable} -m ipykernel install --sys-prefix"),
    Probe("cores", cores, "OMP_NUM_THREADS=1 gives each rank one thread"),
    Probe("memory", memory, "close other programs and notebooks; a container may be given more"),
    Probe("shared memory", shared_memory, "docker run --shm-size=1g, or NCCL_SHM_DISABLE=1", needed=False),
    Probe(
        "GPUs",
        gpus,
        "the CPU build: ZEROLAB_TORCH=default ./zero lab; else unset CUDA_VISIBLE_DEVICES, or a newer driver",
        needed=False,
    ),
    Probe("gloo", gloo, "ranks talk over the loopback: ip link set lo up; unset GLOO_SOCKET_IFNAME"),
    Probe("NCCL", nccl, "NCCL_DEBUG=INFO says why; backend='gloo' does without", needed=False),
    Probe("engine", engine, "./zero verify shows stage by stage what differs"),
)

"""Whether the ranks of a host use its GPUs, and which rank gets which.

With fewer GPUs than ranks the ranks run on the CPU, unless NCCL is asked for by name: then they share GPUs,
which is right for checking results and useless for timings.
"""

import logging
import os
import socket

BACKENDS = ("auto", "gloo", "nccl")
GROUP_BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
"""What a process group is made with: on GPUs it has gloo too, for tensors on the CPU."""
SHARED = {
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",  # kernels of several ranks have to fit on the GPU at once
}
"""NCCL's settings for ranks that share a GPU: they talk through sockets."""

log = logging.getLogger("zerolab")


def visible_gpus() -> int:
    """How many GPUs this process could use with NCCL."""
    import torch

    return torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0


def choose_backend(backend: str, ranks: int, gpus: int) -> str:
    """ "nccl" where each of a host's ranks can have one of its GPUs, else "gloo". An explicit choice is kept.

    It logs a line where there are GPUs that are not used.
    Raises: ValueError for another name, and for "nccl" without a GPU.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "nccl" and gpus == 0:
        raise ValueError(
            f'backend "nccl" needs at least 1 CUDA device for {ranks} ranks, found 0; use "gloo"'
        )
    if backend == "auto" and 0 < gpus < ranks:
        log.warning(
            '%d ranks run on the CPU, over gloo, because there are GPUs for %d: pass backend="nccl" to let '
            "ranks share them",
            ranks,
            gpus,
        )
    return "nccl" if backend == "nccl" or (backend == "auto" and 0 < ranks <= gpus) else "gloo"


def take_gpu(local_rank: int, ranks: int, gpus: int) -> None:
    """Make one of the host's GPUs this rank's current device."""
    import torch

    torch.cuda.set_device(local_rank % torch.cuda.device_count())  # SLURM may show each rank its own alone
    if gpus < ranks:
        # NCCL refuses two ranks of one host on one GPU, so each rank says that it is a host of its own.
        os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{local_rank}"
        os.environ |= SHARED
        torch.cuda.set_per_process_memory_fraction(1 / -(-ranks // gpus))

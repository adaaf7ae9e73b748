"""Decide whether the ranks of a host use its GPUs, and which rank gets which.

With fewer GPUs than ranks the ranks run on the CPU, unless NCCL is asked for by name: then they share GPUs,
which is right for checking results and useless for timings.
"""

import logging
import math
import os
import socket

BACKENDS = ("auto", "gloo", "nccl")
GROUP_BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
"""What a process group is made with: on GPUs it has gloo too, for tensors on the CPU."""
NCCL_ON_A_SHARED_GPU = {
    "NCCL_NET": "Socket",  # the ranks are on one GPU, which NCCL cannot connect with itself
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",  # it would recognise the GPU by its fabric
    "NCCL_MAX_CTAS": "2",  # kernels of several ranks have to fit on the GPU at once
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # NCCL 2.30 and later let ranks share a GPU by this
}
"""What NCCL needs for ranks that share a GPU. What the user has set stays."""

REFUSALS = ("Duplicate GPU detected", "using the same GPU")
"""What NCCL says where it does not let ranks share a GPU: up to version 2.29, and later."""

UNUSED = (
    '%d ranks run on the CPU, over gloo, because there are GPUs for %d: pass backend="nccl" to let ranks '
    "share them"
)
SHARED = (
    "%d ranks share GPUs, over NCCL, because there are GPUs for %d: the results are right, and the times "
    "mean nothing"
)

log = logging.getLogger("zerolab")


def visible_gpus() -> int:
    """Return how many GPUs this process could use with NCCL."""
    import torch

    return torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0


def choose_backend(backend: str, ranks: int, gpus: int, say: bool = True) -> str:
    """Whether ranks use NCCL: by default where each rank of a host can have one of its GPUs, else gloo.

    An explicit choice is kept. A line is logged where GPUs are not used, and where ranks share them.
    Args: ranks, gpus: how many this host has. say: whether to log that line.
    Raises: ValueError for another name, and for "nccl" without a GPU.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "nccl" and gpus == 0:
        raise ValueError(
            f'backend "nccl" needs at least 1 CUDA device for {ranks} ranks, found 0; use "gloo"'
        )
    if say and backend != "gloo" and 0 < gpus < ranks:
        log.warning(SHARED if backend == "nccl" else UNUSED, ranks, gpus)
    return "nccl" if backend == "nccl" or (backend == "auto" and 0 < ranks <= gpus) else "gloo"


def take_gpu(local_rank: int, ranks: int, gpus: int) -> None:
    """Make one of the host's GPUs this rank's current device.

    Where ranks share it, NCCL is set up for that in the environment, and each gets its part of the memory.
    Args: ranks, gpus: how many this host has.
    """
    import torch

    torch.cuda.set_device(local_rank % torch.cuda.device_count())  # SLURM may show each rank its own alone
    if gpus < ranks:
        # NCCL refuses two ranks of one host on one GPU, so each rank says that it is a host of its own.
        settings = NCCL_ON_A_SHARED_GPU | {"NCCL_HOSTID": f"{socket.gethostname()}-{local_rank}"}
        for name, value in settings.items():
            os.environ.setdefault(name, value)
        ranks_per_gpu = math.ceil(ranks / gpus)
        torch.cuda.set_per_process_memory_fraction(1 / ranks_per_gpu)


def check_sharing(ranks: int, gpus: int) -> None:
    """Where ranks share GPUs: let NCCL connect the ranks now, so that a refusal ends in a clear error.

    All ranks of the job are on this host, and each calls this.
    Args: ranks, gpus: how many this host has.
    Comm: one number over NCCL.
    Raises: RuntimeError where this NCCL does not let ranks share a GPU.
    """
    import torch

    if ranks <= gpus:
        return
    try:
        torch.distributed.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
    except RuntimeError as error:
        if not any(refusal in str(error) for refusal in REFUSALS):
            raise
        version = ".".join(map(str, torch.cuda.nccl.version()))
        raise RuntimeError(
            f"{ranks} ranks were to share {gpus} GPU{'s' * (gpus > 1)}, and NCCL {version} refused: use at "
            f'most {gpus} ranks, or backend="gloo", which computes on the CPU. If NCCL_HOSTID or '
            "NCCL_MULTI_RANK_GPU_ENABLE is set in your environment, unset it: zerolab sets both"
        ) from error

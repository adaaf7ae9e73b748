"""Comm: the three collectives that the engine is made of, on a process group, each written into the trace.

On gloo they are built from tagged sends and receives, for three reasons that were measured: torch's own gloo
reduce-scatter is an all-reduce plus a slice (twice the bytes); the pair built here takes about a third of the
time of torch's own pair; and only a sum written out in rank order gives the same bits at every stage. On any
other backend the native collective is used.

A tensor here is always a whole flat buffer of ``world_size`` equal shards, and the rank's own part of it is
`Comm.own(tensor)`. Results are left in place. Read base.py, then direct.py; comm_thread.py runs what
direct.py writes, collective_check.py finds ranks that issue different collectives, and native.py is for NCCL.
"""

import torch.distributed as dist

from zerolab.collectives.base import GRADIENTS_FROM, Comm, Subject, Work
from zerolab.collectives.direct import DirectComm
from zerolab.collectives.native import NativeComm
from zerolab.storages import MemoryMeter
from zerolab.trace import Trace

__all__ = ["GRADIENTS_FROM", "Comm", "DirectComm", "NativeComm", "Subject", "Work", "connect"]


def connect(group: dist.ProcessGroup | None, trace: Trace, meter: MemoryMeter) -> Comm:
    """The Comm for a process group, the default one when none is given.

    Comm: on other backends than gloo a second group is made for control messages, on CPUs.
    Raises: RuntimeError where torch.distributed was not initialized; ValueError where this rank is no member.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "no process group: run inside zerolab.launch(fn, world_size), or under torchrun after "
            "zerolab.init_process_group(), which also makes a world of one"
        )
    group = group or dist.group.WORLD
    if dist.get_rank(group) < 0:
        raise ValueError(
            "this rank is not a member of the process_group given: build the optimizer on its members"
        )
    backend = dist.get_backend(group)
    if backend == "gloo":
        return DirectComm(group, trace, meter)
    members = dist.get_process_group_ranks(group)
    control_backend = "gloo" if backend == "nccl" else backend
    control = dist.new_group(list(members), backend=control_backend, use_local_synchronization=True)
    return NativeComm(group, trace, meter, control)

"""Comm: the engine's three collectives on a process group. Each is recorded in the trace.

On gloo they are built from tagged sends and receives, for three reasons that were measured: torch's own gloo
reduce-scatter is an all-reduce plus a slice (twice the bytes); the pair built here takes about a third of the
time of torch's own pair; and only a sum written out in rank order gives the same bits at every stage. On any
other backend the native collective is used.

A tensor here is always a whole flat buffer of ``world_size`` equal shards, and the rank's own part of it is
`Comm.own(tensor)`. Results are left in place. Read base.py, then direct.py and native.py, which is for NCCL.
control.py has the small messages beside them, comm_thread.py the thread that runs gloo's collectives, and
collective_check.py finds ranks that issue different ones.
"""

import weakref
from typing import cast

import torch
import torch.distributed as dist

from zerolab.collectives.base import GRADIENTS_FROM, Comm, Subject, Work
from zerolab.collectives.control import Control, SilentControl
from zerolab.collectives.direct import DirectComm
from zerolab.collectives.native import NativeComm
from zerolab.devices import backend_for, describe_backends, device, timing_mark
from zerolab.storages import MemoryMeter
from zerolab.trace import Trace

__all__ = ["GRADIENTS_FROM", "Comm", "DirectComm", "NativeComm", "Subject", "Work", "connect", "subgroup"]


def connect(
    group: dist.ProcessGroup | None,
    parameters: torch.device,
    trace: Trace,
    meter: MemoryMeter,
    bucket_bytes: int | None = None,
    whole: Comm | None = None,
) -> Comm:
    """Return the Comm for the ranks of a process group, by default of all, and for parameters on that device.

    Args:
        parameters: the meta device stands for `zerolab.device()`.
        bucket_bytes: as in `Comm`.
        whole: the Comm of all ranks of a training, where the group is a part of them.
    Comm: where the group has no gloo for CPUs, a second group is made for control messages.
    Raises: RuntimeError where torch.distributed was not initialized; ValueError where this rank is no member,
        and where the group cannot send tensors of that device.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "no process group: run inside zerolab.launch(fn, world_size), or under torchrun after "
            "zerolab.init_process_group(), which also makes a world of one"
        )
    group = group or dist.group.WORLD
    assert group is not None  # there is a default group, as was just checked
    if dist.get_rank(group) < 0:
        raise ValueError(
            "this rank is not a member of the process_group given: build the optimizer on its members"
        )
    if dist.get_backend(group) == "fake":
        return NativeComm(group, parameters, trace, meter, SilentControl(group), bucket_bytes)
    where = device() if parameters.type == "meta" else parameters
    backend = backend_for(where.type, group)
    if backend is None or (backend == "gloo" and where.type != "cpu"):
        raise ValueError(
            f"the model's parameters are on {where}, and this process group has {describe_backends(group)}, "
            f"with which they cannot be reduced. Build the model on zerolab.device(), which is {device()} "
            'here; on GPUs use zerolab.launch(..., backend="nccl") or zerolab.init_process_group()'
        )
    trace.mark = timing_mark if where.type == "cuda" else None
    comm = DirectComm if backend == "gloo" else NativeComm
    control = Control(gloo_group(group), None if whole is None else whole.control)
    return comm(group, where, trace, meter, control, bucket_bytes)


def gloo_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group itself where it has gloo for CPUs, or a new one of the same ranks.

    The new one has the timeout of the group's own collectives: a shorter one would end a run that these
    collectives allow to continue. With gloo's default of 30 minutes the CPUs would still wait for a rank
    after the devices' collectives have timed out.
    """
    if backend_for("cpu", group) == "gloo":
        return group
    return _new_group(group, list(dist.get_process_group_ranks(group)), "gloo")


def subgroup(group: dist.ProcessGroup, places: range) -> dist.ProcessGroup:
    """Return a new group of the ranks at these places of a group, with its backends and its timeout.

    Every rank that is to be in it calls this; no other rank has to.
    """
    ranks = dist.get_process_group_ranks(group)
    return _new_group(group, [ranks[place] for place in places], dist.get_backend_config(group))


_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict]" = weakref.WeakKeyDictionary()
"""By group: those that were made of its ranks. They have sockets and threads, and live as long as the process
group does, so that each optimizer takes those of the one before.
"""


def _new_group(group: dist.ProcessGroup, ranks: list[int], backend: str) -> dist.ProcessGroup:
    if dist.get_backend(group) == "fake":  # this process is the only one, and it may stand for any rank
        return cast(dist.ProcessGroup, dist.new_group(ranks))
    known, key = _made.setdefault(group, {}), (tuple(ranks), backend)
    if key not in known:
        timeout = group._get_backend(group._device_types[0]).options._timeout
        known[key] = dist.new_group(ranks, timeout, backend=backend, use_local_synchronization=True)
    return cast(dist.ProcessGroup, known[key])

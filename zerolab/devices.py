"""Choose the device on which a rank computes, and the backend of its process group for that device.

A group can have a backend for each kind of device. If ranks have GPUs, the group has NCCL for GPUs and gloo
for CPUs, so a tensor's own device decides how it is sent.
"""

import torch
import torch.distributed as dist


def device() -> torch.device:
    """This rank's device: its GPU where the default process group has NCCL, and the CPU everywhere else.

    Call it inside ``zerolab.launch``, or after ``zerolab.init_process_group()``; before that it is the CPU.
    Build models and batches on it, and the same code runs on both: ``model.to(zerolab.device())``.
    """
    if dist.is_available() and dist.is_initialized() and backend_for("cuda") == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def backend_for(device_type: str, group: dist.ProcessGroup | None = None) -> str | None:
    """Return the name of a group's backend for one kind of device; None where it has none.

    Without ``group``: of the default group.
    """
    return _backends(group).get(device_type)


def describe_backends(group: dist.ProcessGroup | None = None) -> str:
    """For a message: "gloo for cpu, nccl for cuda"."""
    return ", ".join(f"{backend} for {device_type}" for device_type, backend in _backends(group).items())


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}
"""By a GPU's index and the address of the stream."""


def current_stream(index: int) -> torch.cuda.Stream:
    """The stream that is current on a GPU. Args: index: the GPU's.

    torch.cuda.current_stream() builds a new object in each call, which takes the CPU about as long as it
    takes to issue a kernel. A step asks several hundred times, so each stream's object is kept here.
    """
    place = index, torch._C._cuda_getCurrentRawStream(index)
    if place not in _streams:
        _streams[place] = torch.cuda.current_stream(index)
    return _streams[place]


def timing_mark() -> torch.cuda.Event:
    """A mark in this GPU's queue, on the current stream; nobody waits for it until its time is read."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record(current_stream(torch.cuda.current_device()))
    return mark


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """By kind of device; torch tells them as "cpu:gloo,cuda:nccl"."""
    pairs = (each.split(":") for each in dist.get_backend_config(group).split(","))
    return {device_type: backend for device_type, backend in pairs}

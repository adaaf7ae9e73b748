"""A stand-in for a GPU that counts: the kernels a step would launch, and where the CPU would wait for them.

The model is on the CPU, and its tensors are taken for the GPU's: the parameters and inputs that are named at
the start, what is computed from them, and what is created with a ``device=``. What is copied to the CPU, by
``.cpu()`` or ``.to("cpu")``, is the CPU's from then on. Each operation on the GPU's tensors is a kernel,
unless it is a view or only allocates. One that needs a value on the CPU is a wait.

The counts are estimates of a real device's: a kernel of torch's may be several of cuBLAS's. They are compared
with those of the plain loop, which are counted alike.
"""

import collections
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import zerolab

PACKAGE = str(Path(zerolab.__file__).parent)

ALLOCATES = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_",
    "record_stream",
}  # fmt: skip
READS_A_VALUE = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2"}
TENSORS_A_KERNEL = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""How many tensors of each list one kernel of a foreach or fused operation takes, by the number of lists.

Source: depth_to_max_tensors in ATen/native/cuda/MultiTensorApply.cuh
"""


@dataclass
class Counts:
    """What was asked of the device, by the operation and the line of the package that called it, or ""."""

    kernels: collections.Counter = field(default_factory=collections.Counter)
    waits: collections.Counter = field(default_factory=collections.Counter)

    def waits_by_file(self) -> dict[str, int]:
        """How often the CPU would wait in each file of the package, and in "" outside it."""
        found: collections.Counter = collections.Counter()
        for (_, line), count in self.waits.items():
            found[line.partition(":")[0]] += count
        return dict(found)


class StandIn:
    """Which tensors are the GPU's, by their storages, and what was counted."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        self.counts = Counts()
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no address comes twice
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage

    def has(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata in self._storages

    def kernel(self, name: str, count: int = 1) -> None:
        self._count(self.counts.kernels, name, count)

    def wait(self, name: str) -> None:
        self._count(self.counts.waits, name, 1)

    @staticmethod
    def _count(counter: collections.Counter, name: str, count: int) -> None:
        line = _line()
        if line is not None:
            counter[name, line] += count


class _Operations(TorchDispatchMode):
    """Every operation, those of autograd too."""

    def __init__(self, stand_in: StandIn):
        super().__init__()
        self.stand_in = stand_in

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, device = kwargs or {}, self.stand_in
        on_gpu = any(map(device.has, _tensors(tree_leaves((args, kwargs)))))
        name = func.overloadpacket.__name__
        if on_gpu and _waits(name, args, device):
            device.wait(name)
        out = func(*args, **kwargs)
        if on_gpu:
            if not (name in ALLOCATES or func.is_view or name in ("detach", "alias", "_local_scalar_dense")):
                device.kernel(name, _kernels(name, args, device))
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
                    device.add(tensor)
        return out


class _Calls(TorchFunctionMode):
    """The calls that tell the GPU from the CPU, which the operations below them cannot tell apart here."""

    def __init__(self, stand_in: StandIn):
        super().__init__()
        self.stand_in = stand_in

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if _copies_to_the_cpu(name, args, kwargs) and self.stand_in.has(args[0]):
            self.stand_in.wait(name)
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                copied = args[0].detach().clone()
            return func(copied, *args[1:], **kwargs)
        if func is torch.Tensor.backward:  # inside of what it sees the mode is off, and hooks run in there
            with self:
                return _backward(args[0])
        out = func(*args, **kwargs)
        if isinstance(kwargs.get("device"), torch.device) and isinstance(out, torch.Tensor):
            if name == "tensor":  # its values come from the CPU
                self.stand_in.wait(name)
            elif name not in ALLOCATES and not self.stand_in.has(out):
                self.stand_in.kernel(name)
            self.stand_in.add(out)
        return out


def _backward(loss: torch.Tensor) -> None:
    """Of a scalar, without torch.autograd's own functions, each of which would turn the mode off."""
    start = (torch.ones_like(loss),)
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), start, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _copies_to_the_cpu(name: str, args: tuple, kwargs: dict) -> bool:
    targets = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, str | torch.device)]
    return name in ("cpu", "tolist", "numpy") or (name == "to" and "cpu" in targets)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Those that are the GPU's in training: parameters, flat buffers, and the optimizer's state.

    The optimizer's step counters are there too where it is fused, and on the CPU otherwise.
    """
    if isinstance(optimizer, zerolab.ZeroOptimizer):
        found = [t for unit in optimizer.units for t in (unit.flat, unit.shard, unit.master)]
    else:
        found = list(model.parameters())
    fused = optimizer.param_groups[0].get("fused") or optimizer.defaults.get("fused")
    state = [t for each in optimizer.state.values() for t in each.values() if isinstance(t, torch.Tensor)]
    return found + [t for t in state if fused or t.dim()]


@contextmanager
def counting(tensors: Iterable[torch.Tensor]) -> Iterator[Counts]:
    """Count what is asked of the device inside. ``tensors``: those that are the GPU's from the start."""
    stand_in = StandIn(tensors)
    with _Calls(stand_in), _Operations(stand_in):
        yield stand_in.counts


def _tensors(args: tuple) -> list[torch.Tensor]:
    """Those with elements: nothing is launched or copied for the others."""
    return [each for each in args if isinstance(each, torch.Tensor) and each.numel()]


def _waits(name: str, args: tuple, device: StandIn) -> bool:
    """Whether the operation needs a value on the CPU, or copies between the CPU and the GPU.

    An index by a mask is turned into numbers on the CPU; one by numbers is not.
    """
    if name in ("index", "index_put_"):
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    return name in READS_A_VALUE or (name == "copy_" and not all(map(device.has, _tensors(args))))


def _kernels(name: str, args: tuple, device: StandIn) -> int:
    """One, or as many as a foreach or fused operation needs for its lists of tensors."""
    lists = [each for each in args if isinstance(each, list | tuple) and each and device.has(each[0])]
    if not (name.startswith(("_foreach", "_fused")) and lists):
        return 1
    return math.ceil(max(map(len, lists)) / TENSORS_A_KERNEL[min(len(lists), 5)])


def _line() -> str | None:
    """The nearest line of the package that asked for this, or ""; None inside a collective of hostile.py."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith("support/hostile.py"):
            return None
        if file.startswith(PACKAGE):
            return f"zerolab{file.removeprefix(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""

"""Record each call on torch.distributed that a rank makes, before it begins, with the reader's line.

Each record is written to a file at once, so it remains if the rank hangs or dies.
"""

import pickle
import sys
from collections.abc import Callable
from math import nan
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from zerolab.course.messages import Early, Message, Place, own_place
from zerolab.course.pending import Pending

_PASS_ON = (__name__, "zerolab.course.peak")  # modes that may stand between the reader and a Wire
_STARTS = {"dist.isend", "dist.irecv", "dist.batch_isend_irecv"}
_WAITING = ("wait", "is_completed", "get_future")  # of a handle: each of them can be used to wait
_FUNCTIONAL = {
    "all_reduce": "allreduce_",
    "all_gather_into_tensor": "_allgather_base_",
    "reduce_scatter_tensor": "_reduce_scatter_base_",
    "broadcast": "broadcast_",
    "all_to_all_single": "alltoall_base_",
}
"""By operator of torch's functional collectives: the one of torch.distributed that sends as much."""
_NAMES = {"all_gather_tensor": "all_gather_into_tensor"}  # of functions that have another one there
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_WITH_NAN = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_FEW = 1024  # the numbers of a message that are kept: the exercises' tensors are not longer


class Wire(TorchDispatchMode):
    """Note what the code inside it calls: torch.distributed's calls are operators, and this mode sees them.

    It sees send and isend, batched or not, and every collective, under whatever name they were imported. It
    fills what torch.empty returns with nan, so that a use of that shows.
    """

    def __init__(self, trail: Path | None = None):
        super().__init__()
        self.calls: list[Message] = []
        self.waits = 0  # how often the reader's code waited on a handle
        self._pending = Pending()  # what was started since the last wait
        self._given: dict[int, bool] = {}  # by storage: whether it was written to
        self._inputs: list[torch.Tensor] = []  # keeps those storages, so that no other gets their place
        self._plain = {name: getattr(dist.Work, name) for name in _WAITING}
        self._trail = trail.open("wb", buffering=0) if trail else None

    @property
    def messages(self) -> list[Message]:
        """What was sent. Receives are left out, because each of them is a send of another rank."""
        return [call for call in self.calls if call.sent]

    def __enter__(self):
        for name, plain in self._plain.items():
            setattr(dist.Work, name, self._counted(plain))
        return super().__enter__()

    def __exit__(self, *error):
        for name, plain in self._plain.items():
            setattr(dist.Work, name, plain)
        return super().__exit__(*error)

    def _counted(self, plain: Callable) -> Callable:
        """The method of a handle, which counts its calls by the reader's code, and not those of torch's."""
        original = SimpleNamespace(wait=plain)  # the launcher reads in this line that a rank waits

        def counted(work, *args, **kwargs):
            frame = sys._getframe(1)
            if _own(frame) is not None or _of_a_lesson(frame):
                self.waits += 1
                self._pending.clear()
            return original.wait(work, *args, **kwargs)

        return counted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for number in self._pending.used_by(func, args, kwargs or {}):
            self._note_early(number, sys._getframe(1))
        if func.namespace == "c10d":
            tensors = _tensors(args[0])
            self.note(call := self._message(func._opname, args, tensors, sys._getframe(1)))
            if call.started:
                self._pending.add(len(self.calls) - 1, tensors, call.op == "send")
        elif func.namespace == "_c10d_functional" and func._opname in _FUNCTIONAL:
            self.note(self._functional(func._opname, args, sys._getframe(1)))
        result = func(*args, **(kwargs or {}))
        is_new = func.namespace == "aten" and func._opname in _EMPTY
        if is_new and result.dtype in _WITH_NAN and result.layout is torch.strided:
            result.fill_(nan)  # what memory holds may be zeros by chance, and the right answer
        if self._given and (func._schema.is_mutable or (func.namespace == "c10d" and func._opname != "send")):
            written = _tensors([args[:1], (kwargs or {}).get("out")])
            self._given |= {key: True for key in map(_storage, written) if key in self._given}
        return result

    def _message(self, op: str, args: tuple, tensors: list[torch.Tensor], frame: FrameType) -> Message:
        mine = [self._given[key] for key in map(_storage, tensors) if key in self._given]
        call, place, async_op = _called_by(frame)
        return Message(
            op,
            args[2] if op in ("send", "recv_") else None,
            sum(t.numel() for t in tensors),
            sum(t.nbytes for t in tensors),
            tensors[0].dtype if tensors else None,
            call,
            place,
            async_op or call in _STARTS,
            self.waits,
            tensors[0].data_ptr() if tensors else 0,
            bool(mine),
            any(mine),
            torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
            _content(tensors) if op == "send" else None,
            tag=args[3] if op in ("send", "recv_") else 0,
        )

    def _functional(self, op: str, args: tuple, frame: FrameType) -> Message:
        """A functional collective returns a new tensor, and is noted by the size of that tensor."""
        (tensor,) = _tensors(args[0])
        numel = tensor.numel()
        if op == "all_gather_into_tensor":
            numel *= args[1]
        elif op == "reduce_scatter_tensor":
            numel //= args[2]
        call, place, _ = _called_by(frame)
        nbytes, recorded = numel * tensor.itemsize, torch.is_grad_enabled() and tensor.requires_grad
        return Message(
            _FUNCTIONAL[op],
            None,
            numel,
            nbytes,
            tensor.dtype,
            call,
            place,
            waited=self.waits,
            recorded=recorded,
            functional=True,
        )

    def _note_early(self, number: int, frame: FrameType | None) -> None:
        """Note that the reader's code uses the tensor of a call that it has not waited for."""
        while frame is not None and not (place := _own(frame)):
            frame = frame.f_back
        if frame is None or place is None or self.calls[number].early:
            return
        self.calls[number] = self.calls[number]._replace(early=place)
        if self._trail:
            pickle.dump(Early(number, place), self._trail)

    def note(self, call: Message | int | str) -> None:
        """Remember a call; the number of waits and the word RETURNED go to the file alone."""
        if isinstance(call, Message):
            self.calls.append(call)
        if self._trail:
            pickle.dump(call, self._trail)


def given(tensor: torch.Tensor) -> torch.Tensor:
    """In the worker: the tensor itself, which the reader's function is called with and which is watched."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Wire):
            mode._inputs.append(tensor)
            mode._given[_storage(tensor)] = False
    return tensor


def calls_made() -> int:
    """In the worker: how many calls the reader's function has made until now."""
    return sum(len(mode.calls) for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Wire))


def _tensors(arguments: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _content(tensors: list[torch.Tensor]) -> tuple[float, ...] | None:
    """The numbers of a short message, which tell whose they are."""
    sent = tensors[0] if len(tensors) == 1 else None
    if sent is None or sent.numel() > _FEW or sent.is_complex() or sent.is_meta:
        return None
    return tuple(sent.detach().double().flatten().tolist())


def _own(frame: FrameType) -> Place | None:
    return own_place([(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)])


def _of_a_lesson(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").startswith("zerolab.course.lessons")


def _called_by(frame: FrameType | None) -> tuple[str, Place | None, bool]:
    """The function of torch.distributed or of zerolab that the reader called, where, and if with async_op."""
    name, async_op = "", False
    while frame is not None:
        place = _own(frame)
        module = frame.f_globals.get("__name__", "")
        if place or (module.startswith("zerolab.course") and module not in _PASS_ON):
            return name, place, async_op
        if module in _PASS_ON:
            pass
        elif module.startswith("zerolab."):
            name, async_op = f"{module.removeprefix('zerolab.')}.{frame.f_code.co_name}", False
        elif module == "torch.distributed._functional_collectives":
            name = f"dist.{_NAMES.get(frame.f_code.co_name, frame.f_code.co_name)}"
        elif module == "torch.distributed.distributed_c10d":
            name = f"dist.{frame.f_code.co_name}"
            async_op = frame.f_locals.get("async_op") is True
            reduce_op = frame.f_locals.get("op")
            if isinstance(reduce_op, dist.ReduceOp.RedOpType) and reduce_op != dist.ReduceOp.SUM:
                name += f" with ReduceOp.{reduce_op.name}"
        frame = frame.f_back
    return name, None, async_op

"""Placeholders for a freed parameter and for a moved gradient. Using their values raises an error.

At stage 3 a parameter's storage is freed between uses. PyTorch does not know that: its sum, a clone or a
state dict reads freed memory and ends the process, and torch.save writes wrong values without an error. So
while its storage is freed a parameter's class is `Sharded`. Its shape, dtype, numel and repr can be read, and
everything else raises an error that says what to do.

A gradient that has moved into the optimizer's flat buffer leaves a `ReducedGradient` in ``parameter.grad``.
If it left None instead, torch.nn.utils.clip_grad_norm_ would find nothing to clip and return 0, and
model.zero_grad() would find nothing to clear, so that gradients would add up for ever.
"""

from collections.abc import Sequence

import torch
from torch import nn

_ATTRIBUTES = {
    "shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "requires_grad", "is_leaf", "is_cuda",
    "is_meta", "is_sparse", "grad", "grad_fn", "_version", "_backward_hooks", "_post_accumulate_grad_hooks",
}  # fmt: skip
_METHODS = {
    "size", "numel", "nelement", "dim", "element_size", "is_floating_point", "is_complex", "__len__",
    "__format__", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
}  # fmt: skip

_LAYOUT = {"stride", "is_contiguous"}

as_plain_tensors = torch._C.DisableTorchFunctionSubclass
"""A context for loops over every parameter's flags and ``grad``, which `Sharded` would answer one by one."""


def describes(func) -> bool:
    """Return whether a torch function only reads or sets what a tensor is, and never what it holds."""
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        return func.__self__.__name__ in _ATTRIBUTES
    return func.__name__ in _METHODS | _LAYOUT


class Sharded(nn.Parameter):
    """A parameter whose storage is away: it says what it is; any use of its values is an error.

    Raises: RuntimeError from every operation on it, copying and pickling included.
    """

    layout_when_whole: torch.Tensor

    @classmethod
    def take_places(cls, parameters: Sequence[nn.Parameter], layouts: Sequence[torch.Tensor]) -> None:
        """Make parameters ``Sharded``. ``layouts`` have the strides they get again when they are whole."""
        for parameter, layout in zip(parameters, layouts, strict=True):
            parameter.layout_when_whole = layout  # type: ignore[attr-defined]  # it is ``Sharded`` next
            parameter.__class__ = cls

    @classmethod
    def give_way(cls, parameters: Sequence[nn.Parameter], own_classes: Sequence[type]) -> None:
        """Make ``Sharded`` parameters of their own classes again."""
        for parameter, own_class in zip(parameters, own_classes, strict=True):
            parameter.__class__ = own_class
            del parameter.layout_when_whole  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ in _LAYOUT:
            args = (args[0].layout_when_whole, *args[1:])
        refusal = _NOT_MOVED if func.__name__ in _MOVES else _PARAMETER_AWAY
        return _describe_or_refuse(refusal, func, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]  # mypy loses the name of torch's keyword
        return f"Sharded(shape={tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad})"

    def __deepcopy__(self, memo):
        raise RuntimeError(f"deepcopy: {_PARAMETER_AWAY}")

    def __reduce_ex__(self, protocol):
        raise RuntimeError(f"pickling: {_PARAMETER_AWAY}")


class ReducedGradient(torch.Tensor):
    """Stands in ``parameter.grad`` for a gradient that was moved into the optimizer's flat buffer.

    Autograd adds the gradient of the next micro-batch to what is in ``parameter.grad``. Here it leaves that
    gradient in ``arrived``, for the engine to move. Setting ``parameter.grad = None``, as model.zero_grad()
    does, is understood as clearing the gradient that was moved.
    Raises: RuntimeError from every other operation on it.
    """

    arrived: torch.Tensor | None

    @staticmethod
    def __new__(cls, parameter: nn.Parameter, layout: torch.Tensor):
        marker = torch.Tensor._make_wrapper_subclass(
            cls, layout.shape, layout.stride(), dtype=parameter.dtype, device=parameter.device
        )
        marker.arrived = None
        return marker

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if isinstance(func, torch._ops.OpOverload):  # as a TorchDispatchMode calls it, for autograd
            return cls.__torch_dispatch__(func, types, args, kwargs)
        return _describe_or_refuse(_GRADIENT_AWAY, func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]  # typed as static
        marker = args[0] if args else None
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and isinstance(marker, cls) and marker.arrived is None:
            if func is torch.ops.aten.add_.Tensor:
                marker.arrived = args[1]
                return marker
            if func is torch.ops.aten.add.Tensor:  # with create_graph=True autograd stores what this returns
                marker.arrived = args[1].clone()
                return marker.arrived
        raise RuntimeError(f"{func}: {_GRADIENT_AWAY}")

    def __repr__(self) -> str:  # type: ignore[override]  # mypy loses the name of torch's keyword
        return f"ReducedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


_PARAMETER_AWAY = (
    "this parameter is sharded: use full_params(), as in `with optimizer.full_params(): ...` on every rank, "
    "which makes parameters whole inside the with block. Where a forward reads a parameter of another unit, "
    "build the optimizer with units=[], which makes the whole model one unit. To store a model use "
    "zerolab.save(optimizer, path) or zerolab.export(optimizer, path)"
)
_MOVES = {"to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type"}
_NOT_MOVED = f"{_PARAMETER_AWAY}. To move or cast a model, do so before the optimizer is built"
_GRADIENT_AWAY = (
    "this gradient was moved into the optimizer's flat buffer and is not in parameter.grad. Clip with "
    "optimizer.clip_grad_norm_(max_norm) or optimizer.clip_grad_value_(clip_value), clear with "
    "optimizer.zero_grad(), read with optimizer.full_grads()"
)

_NO_GRAD_SCALER = (
    "torch.amp.GradScaler cannot scale gradients that were moved into the optimizer's flat buffers. Build "
    'the optimizer with precision="mixed_fp16" and call optimizer.scale(loss).backward(), without a '
    "GradScaler; or make it GradScaler(enabled=False)"
)


def _describe_or_refuse(refusal: str, func, args: tuple, kwargs: dict | None):
    """Answer a question about what the tensor is; refuse one about what it holds."""
    if not describes(func):
        way_out = _NO_GRAD_SCALER if func.__name__.startswith("_amp_") else refusal
        raise RuntimeError(f"{func.__name__}: {way_out}")
    with as_plain_tensors():
        return func(*args, **(kwargs or {}))

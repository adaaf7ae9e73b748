"""Models: which a ZeroOptimizer holds, and which it cannot train."""

import weakref

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from zerolab.optimizer.shared_memory import refuse_shared_memory
from zerolab.storages import is_dtensor

engaged: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that have a ZeroOptimizer: a second one would move the parameters out of the first one's buffers."""

held: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The parameters that a ZeroOptimizer holds, with the class of its model."""

_WRAPPERS = {
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DeepSpeedEngine",
}


def refuse_engaged(model: nn.Module) -> None:
    """Refuse what is no model, or has an optimizer or a wrapper already. Raises: TypeError, ValueError."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, not a torch.nn.Module: pass the module to train")
    if model in engaged:
        raise ValueError("this model has a ZeroOptimizer already: use that one, or build the model anew")
    _refuse_wrapped(model)


def refuse_model(model: nn.Module) -> None:
    """Refuse a model that cannot be trained. Raises: ValueError."""
    _refuse_scripted(model)
    _refuse_without_shape(model)
    refuse_shared_memory(model)
    _refuse_other_processes(model)
    _refuse_untrainable(model)


def _refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model that something else synchronizes already, and parameters that are sharded or held."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS:
                where = f"submodule {name}" if name else "the model"
                raise ValueError(
                    f"{where} is a {kind.__name__}, which averages gradients itself: pass the bare module "
                    "that it was made from, in a process where it was not wrapped"
                )
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise ValueError(
                f"parameter {name} is a DTensor, as after fully_shard() or parallelize_module(): pass a "
                "model of plain parameters, and ZeroOptimizer shards them"
            )
        if parameter in held:
            raise ValueError(
                f"parameter {name} belongs to another ZeroOptimizer, that of a {held[parameter]}: build one "
                "optimizer for a model that holds all of it, with a parameter group for each part"
            )


def _refuse_scripted(model: nn.Module) -> None:
    """Refuse modules that run outside Python, where no hook of the engine is called. Raises: ValueError."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"module {name}" if name else "the model"
            raise ValueError(
                f"{where} is a {type(module).__name__}, which runs outside Python and takes no hooks: build "
                "the optimizer for the module that was scripted or traced, and use torch.compile for speed"
            )


def _refuse_without_shape(model: nn.Module) -> None:
    """Refuse parameters that get their shape in the first forward. Raises: ValueError."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name} has no shape yet, as in nn.LazyLinear: call the model once, with a batch, "
                "before building the optimizer"
            )


def _refuse_other_processes(model: nn.Module) -> None:
    """Refuse parameters that other processes see: these would keep the old values. Raises: ValueError."""
    for name, parameter in model.named_parameters():
        if parameter.device.type == "cpu" and parameter.is_shared():
            raise ValueError(
                f"parameter {name} is in memory that other processes share, as share_memory() makes it. "
                "ZeroOptimizer moves it into a buffer of its own, and the others would keep the old values: "
                "send them copies of the weights"
            )


def _refuse_untrainable(model: nn.Module) -> None:
    """Refuse a model without trainable parameters, and dtypes that are not trained. Raises: ValueError."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError(
            f"the {type(model).__name__} has no trainable parameters: build it with some, and call "
            "requires_grad_(True) before the optimizer is built"
        )
    for name, parameter in trainable:
        if parameter.is_complex():
            raise ValueError(
                f"parameter {name} is {parameter.dtype}, and only torch.float32 is trained: make its real "
                "view, torch.view_as_real(...), the parameter, and call torch.view_as_complex(...) in forward"
            )
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"parameter {name} is {parameter.dtype}: call model.float() first, and for training in 16 "
                'bits pass precision="mixed", which rounds the parameters itself'
            )

"""Give each tensor of a state dict a storage of its own, although the parameters share a flat buffer.

Tools that save state dicts, such as Accelerate's save_model, take tensors on one storage for tied weights:
they keep one of them and leave out the others, with no more than a line in the log. So each parameter in
``model.state_dict()`` has a storage of its own. The memory is still the parameter's, and so is the version
counter: what is written to a state dict is written to the model.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from zerolab.engine.hook import Hook
from zerolab.unit import FlatUnit

Place = tuple[int, int | torch.SymInt]


def separate_storages(model: nn.Module, units: list[FlatUnit], full_params_open: Callable[[], bool]) -> None:
    """Have the state dicts of ``model`` and of its modules hold a storage for each parameter.

    Not at stage 3 outside full_params(), where a flat storage is freed while somebody may still view it.
    """
    lasting = lambda: full_params_open() or not any(unit.shard_is_detached for unit in units)
    for module in model.modules():
        module.register_state_dict_post_hook(Hook(partial(_separate, module is model, lasting)))


def _separate(
    is_model: bool, lasting: Callable[[], bool], module: nn.Module, state_dict: dict, prefix: str, _
) -> None:
    """After a state dict was made. That of a part of the model is left to the model's own hook."""
    if (prefix and not is_model) or not lasting():
        return
    storages: dict[Place, torch.UntypedStorage] = {}
    named = module.named_parameters(prefix=prefix.removesuffix("."), remove_duplicate=False)
    for name, parameter in named:
        value = state_dict.get(name)
        if isinstance(value, torch.Tensor) and value is not parameter and value.numel():
            _give_own_storage(value, storages)


def _give_own_storage(value: torch.Tensor, storages: dict[Place, torch.UntypedStorage]) -> None:
    """Have ``value`` view no more than its own part of its storage; a tied weight the same as the first."""
    storage, size = value.untyped_storage(), value.element_size()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    start, stop = value.storage_offset() * size, (value.storage_offset() + extent) * size
    if value.is_meta or stop - start == storage.nbytes():
        return
    part = storages.setdefault((value.data_ptr(), stop - start), storage[start:stop])
    own = torch.empty(0, dtype=value.dtype, device=value.device)
    value.data = own.set_(part, 0, value.shape, value.stride())  # keeps the version counter

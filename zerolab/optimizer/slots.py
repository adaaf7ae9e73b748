"""Slots: record where a model keeps its modules and parameters, to detect a replaced one.

After construction the parameters are views of flat buffers. ``model.to(...)``, ``parameter.data = ...``,
``load_state_dict(assign=True)`` and ``model.head = nn.Linear(...)`` replace them by tensors that would never
be updated.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from torch import nn

from zerolab.engine.hook import Hook
from zerolab.unit import FlatUnit
from zerolab.unit.sharded import as_plain_tensors
from zerolab.unit.span import Span


class ParameterSlot(NamedTuple):
    """One place where a module keeps a parameter."""

    parameters: dict[str, nn.Parameter | None]
    key: str
    span: Span
    unit: FlatUnit


class ModuleSlot(NamedTuple):
    """One place where a module keeps a submodule."""

    modules: dict[str, nn.Module | None]
    key: str
    module: nn.Module
    name: str


class Slots:
    """Every place in ``model`` that holds a submodule or a parameter of ``units``; a tied one has several.

    Args: trains_all: whether the user gave no parameter groups, which stands for the whole model.
    """

    def __init__(self, model: nn.Module, units: list[FlatUnit], trains_all: bool):
        self._trains_all = trains_all
        places = {id(span.parameter): (span, unit) for unit in units for span in unit.spans}
        self.parameters = [
            ParameterSlot(module._parameters, key, *places[id(parameter)])
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        self.units = units
        self.modules = [
            ModuleSlot(parent._modules, key, module, f"{name}.{key}".lstrip("."))
            for name, parent in model.named_modules()
            for key, module in parent._modules.items()
            if module is not None
        ]

    def check(self, in_groups: Callable[[list[Span]], Collection[Span]]) -> None:
        """See that every parameter that would be trained in PyTorch is trained here.

        Args: in_groups: says which parameters are in a parameter group.
        Raises: RuntimeError that names a module or parameter that was replaced, or a parameter that was
            frozen at construction and requires a gradient now, or has one.
        """
        self.require_in_place()
        frozen = [span for unit in self.units if not unit.trainable for span in unit.spans]
        with as_plain_tensors():
            thawed = [span for span in frozen if span.parameter.requires_grad]
            given = [span for span in frozen if span.parameter.grad is not None]
        listed = in_groups(given) if given and not self._trains_all else given
        found = [(span, "requires a gradient") for span in thawed]
        found += [(span, "has a gradient") for span in given if span in listed]
        for span, now in found:
            raise RuntimeError(
                f"parameter {span.name} was frozen when its ZeroOptimizer was built, {now} now and would not "
                "be trained: build the optimizer while it requires one, and freeze it afterwards; to train "
                "it no more, freeze it and call zero_grad()"
            )

    def require_in_place(self) -> None:
        """Raises: RuntimeError that names a module or parameter that was replaced."""
        names = [name for modules, key, module, name in self.modules if modules.get(key) is not module]
        if names:
            raise RuntimeError(
                f"module {names[0]} was replaced or removed after its ZeroOptimizer was built, and a new "
                "module would not be trained: change the model first, then build the optimizer"
            )
        replaced = [span for held, key, span, _ in self.parameters if held.get(key) is not span.parameter]
        replaced += [span for unit in self.units if (span := unit.replaced())]
        if replaced:
            _refuse_replaced(replaced[0])


def _refuse_replaced(span: Span) -> None:
    raise RuntimeError(
        f"parameter {span.name} was replaced after its ZeroOptimizer was built, as model.to(), "
        "parameter.data = ..., load_state_dict(assign=True) and pruning do, and would never be updated: move "
        "or prune the model before you build the optimizer, and write to parameters inside full_params()"
    )


def guard_loading(model: nn.Module, slots: Slots, full_params_open: Callable[[], bool]) -> None:
    """Refuse load_state_dict into sharded parameters before it changes anything.

    This includes parameters that are unsharded for a while, as between a forward and its backward.
    """
    for module in model.modules():
        mine = [slot for slot in slots.parameters if slot.parameters is module._parameters]
        if mine:
            module.register_load_state_dict_pre_hook(Hook(partial(_refuse_loading, mine, full_params_open)))


def _refuse_loading(slots: list[ParameterSlot], full_params_open: Callable[[], bool], *_) -> None:
    for slot in slots:
        if slot.unit.shard_is_detached and not full_params_open():
            raise RuntimeError(
                f"load_state_dict: parameter {slot.span.name} is sharded: load inside full_params(), as in "
                "`with optimizer.full_params(): model.load_state_dict(...)`, on every rank"
            )

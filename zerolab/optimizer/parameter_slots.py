"""Parameter slots: where each module keeps its parameters, so that a parameter that was replaced is noticed.

After construction the parameters are views of flat buffers. ``model.to(...)``, ``parameter.data = ...`` and
``load_state_dict(assign=True)`` would put other tensors in their place, which nothing would update.
"""

from functools import partial
from typing import NamedTuple

from torch import nn

from zerolab.engine.hook import Hook
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span


class Slot(NamedTuple):
    """One place where a module keeps a parameter."""

    parameters: dict[str, nn.Parameter]
    key: str
    span: Span
    unit: FlatUnit


def parameter_slots(model: nn.Module, units: list[FlatUnit]) -> list[Slot]:
    """Every place in ``model`` that holds a parameter of ``units``; a tied one has several."""
    places = {id(span.parameter): (span, unit) for unit in units for span in unit.spans}
    return [
        Slot(module._parameters, key, *places[id(parameter)])
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]


def check_slots(slots: list[Slot]) -> None:
    """Raises: RuntimeError, naming the parameter, where its slot holds another tensor or another storage."""
    for slot in slots:
        if slot.parameters.get(slot.key) is not slot.span.parameter or slot.unit.was_replaced(slot.span):
            raise RuntimeError(
                f"parameter {slot.span.name} was replaced after its ZeroOptimizer was built, as model.to(), "
                "parameter.data = ... and load_state_dict(assign=True) do, and would never be updated: move "
                "the model before building the optimizer, and write into parameters inside full_params()"
            )


def guard_loading(model: nn.Module, slots: list[Slot]) -> None:
    """Have load_state_dict into parameters that are sharded away refused before it changes anything."""
    for module in model.modules():
        mine = [slot for slot in slots if slot.parameters is module._parameters]
        if mine:
            module.register_load_state_dict_pre_hook(Hook(partial(_refuse_loading, mine)))


def _refuse_loading(slots: list[Slot], *_) -> None:
    for slot in slots:
        if not slot.unit.whole:
            raise RuntimeError(
                f"load_state_dict: parameter {slot.span.name} is sharded: load inside full_params(), as in "
                "`with optimizer.full_params(): model.load_state_dict(...)`, on every rank"
            )

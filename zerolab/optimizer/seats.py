"""Seats: where each parameter sits in its module, so that one that was moved away is noticed.

After construction the parameters are views of flat buffers. ``model.to(...)``, ``parameter.data = ...`` and
``load_state_dict(assign=True)`` would put other tensors in their place, which nothing would ever update
again.
"""

from functools import partial
from typing import NamedTuple

from torch import nn

from zerolab.engine.hook import Hook
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span


class Seat(NamedTuple):
    """One place where a module keeps a parameter."""

    parameters: dict[str, nn.Parameter]
    key: str
    span: Span
    unit: FlatUnit


def take_seats(model: nn.Module, units: list[FlatUnit]) -> list[Seat]:
    """Every place in ``model`` that holds a parameter of ``units``; a tied one has several."""
    places = {id(span.parameter): (span, unit) for unit in units for span in unit.spans}
    return [
        Seat(module._parameters, key, *places[id(parameter)])
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]


def check_seats(seats: list[Seat]) -> None:
    """Raises: RuntimeError, naming the parameter, where another tensor or storage sits in its place."""
    for seat in seats:
        if seat.parameters.get(seat.key) is not seat.span.parameter or seat.unit.lost(seat.span):
            raise RuntimeError(
                f"parameter {seat.span.name} was replaced after its ZeroOptimizer was built, as model.to(), "
                "parameter.data = ... and load_state_dict(assign=True) do, and would never be updated: move "
                "the model before building the optimizer, and write into parameters inside full_params()"
            )


def guard_loading(model: nn.Module, seats: list[Seat]) -> None:
    """Have load_state_dict into parameters that are sharded away refused before it changes anything."""
    for module in model.modules():
        mine = [seat for seat in seats if seat.parameters is module._parameters]
        if mine:
            module.register_load_state_dict_pre_hook(Hook(partial(_refuse_loading, mine)))


def _refuse_loading(seats: list[Seat], *_) -> None:
    for seat in seats:
        if not seat.unit.whole:
            raise RuntimeError(
                f"load_state_dict: parameter {seat.span.name} is sharded: load inside full_params(), as in "
                "`with optimizer.full_params(): model.load_state_dict(...)`, on every rank"
            )

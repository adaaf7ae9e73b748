"""Seats: where each parameter sits in its module, so that one that was moved away is noticed.

After construction the parameters are views of flat buffers. ``model.to(...)``, ``parameter.data = ...`` and
``load_state_dict(assign=True)`` would put other tensors in their place, which nothing would ever update
again.
"""

from typing import NamedTuple

from torch import nn

from zerolab.span import Span
from zerolab.unit import FlatUnit


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
        parameter = seat.parameters.get(seat.key)
        moved = parameter is not seat.span.parameter
        if not moved and seat.unit.whole:
            same_storage = parameter.untyped_storage()._cdata == seat.unit.flat.untyped_storage()._cdata
            moved = not same_storage or parameter.storage_offset() != seat.span.offset
        if moved:
            raise RuntimeError(
                f"{seat.span.name} was replaced after its ZeroOptimizer was built, as model.to(...), "
                "parameter.data = ... and load_state_dict(assign=True) do, and would never be updated: move "
                "the model before building the optimizer, and write into parameters inside full_params()"
            )

"""ParameterViews: the parameters of one unit as views of its flat buffer, and their placeholders."""

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from zerolab.unit.sharded import Sharded, as_plain_tensors
from zerolab.unit.span import Span


class ParameterViews:
    """Points the model's parameters at a flat buffer, or at nothing while the buffer cannot be read.

    While they point at nothing, their class is a placeholder, and C++ code that goes around it reads NaN.

    Args: dtype: of the parameters when they will be replaced: the lowered one in mixed precision.
    """

    def __init__(self, spans: list[Span], dtype: torch.dtype, device: torch.device):
        self._spans = spans
        self._parameters = [span.parameter for span in spans]
        self._layouts = [span.layout for span in spans]
        self._views: list[torch.Tensor] = []
        self._classes: list[type[nn.Parameter]] = []
        scalar = torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
        self._of_nothing = [scalar.expand(span.shape) for span in spans]

    def move_into(self, flat: torch.Tensor) -> None:
        """Copy the parameters into a flat buffer and make each a view of it."""
        self._views = [span.view(flat) for span in self._spans]
        for span, view in zip(self._spans, self._views, strict=True):
            view.copy_(span.parameter)
            span.parameter.data = view

    def follow(self, flat: torch.Tensor) -> None:
        """Make each parameter a view of another flat buffer, with the values that are there."""
        self._views = [span.view(flat) for span in self._spans]
        for span, view in zip(self._spans, self._views, strict=True):
            span.parameter.data = view

    def replace(self, take_places: Callable[[list[nn.Parameter], list[torch.Tensor]], None]) -> None:
        """Let placeholders take the parameters' places.

        A parameter is a placeholder before its values go, and until they are back: threads may read it.
        Args: take_places: makes placeholders of parameters, which have these layouts.
        """
        self._classes = list(map(type, self._parameters))
        with as_plain_tensors():
            take_places(self._parameters, self._layouts)
            for parameter, nothing in zip(self._parameters, self._of_nothing, strict=True):
                parameter.data = nothing

    def restore(self) -> None:
        """Make the parameters views of the flat buffer again, as autograd saved them."""
        with as_plain_tensors():
            for parameter, view in zip(self._parameters, self._views, strict=True):
                parameter.data = view
            placeholder = cast(type[Sharded], type(self._parameters[0]))
            placeholder.give_way(self._parameters, self._classes)

    def moved_away(self) -> Span | None:
        """Return the first parameter that should be a view of the flat buffer and is another one, or none."""
        for span, view in zip(self._spans, self._views, strict=True):
            parameter = span.parameter
            if parameter.data_ptr() != view.data_ptr():
                return span
            if parameter.shape != view.shape or parameter.stride() != view.stride():  # as p.data = p.data.t()
                return span
        return None

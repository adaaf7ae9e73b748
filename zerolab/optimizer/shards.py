"""Shards: this rank's slices of parameters and optimizer state, by name, whatever the stage and the units."""

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from zerolab.optimizer.slices import Slice, in_memory_order
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span, overlap


@dataclass(frozen=True, eq=False)
class Shard:
    """Elements ``start`` to ``stop`` of a flattened tensor: a parameter, or a tensor of its optimizer state.

    Attributes:
        name: the parameter's, as in ``model.named_parameters()``.
        key: which tensor of its optimizer state, such as "exp_avg"; None for the parameter itself.
        numel: how many elements the whole tensor has. They are in the order of memory.
        values: [stop - start] the elements themselves: what is written here is what the optimizer updates.
        part: what the name of the stored tensor has beside these, where tensor-parallel ranks have one each.
    """

    name: str
    key: str | None
    numel: int
    start: int
    values: torch.Tensor
    part: str = ""

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()

    def within(self, start: int, stop: int) -> "Shard":
        """Return the part of it between elements ``start`` and ``stop`` of the whole tensor. May be empty."""
        part = overlap(slice(start, stop), slice(self.start, self.stop))
        values = self.values[part.start - self.start : part.stop - self.start]
        return Shard(self.name, self.key, self.numel, part.start, values)


def owned_shards(
    units: list[FlatUnit],
    slices: list[Slice],
    state: MutableMapping,
    values_of: Callable[[Any], torch.Tensor],
) -> Iterator[tuple[FlatUnit, Span, Shard]]:
    """This rank's part of each parameter and of its optimizer state, and where in its unit that lies.

    Args: values_of: what to yield of a unit's parameters, and of a tensor in the state.
    """
    for unit in units:
        values = values_of(unit)
        for span in unit.spans:
            part = span.within(unit.owned.start, unit.owned.stop)
            yield unit, span, _shard(unit, span, None, part, values[part])
    for each in slices:
        for key, value in state.get(each.tensor, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                yield each.unit, each.span, _of_state(each, key, values_of(value))


def _shard(unit: FlatUnit, span: Span, key: str | None, part: slice, values: torch.Tensor) -> Shard:
    return Shard(span.name, key, span.numel, unit.owned.start + part.start - span.offset, values)


def _of_state(each: Slice, key: str, values: torch.Tensor) -> Shard:
    """The shard of a tensor in the optimizer's state: one value for each element, or all of a tensor."""
    if _has_form_of(each, values):
        return _shard(each.unit, each.span, key, each.part, in_memory_order(values))
    return Shard(each.span.name, key, values.numel(), 0, values.contiguous().view(-1))


def _has_form_of(each: Slice, value: torch.Tensor) -> bool:
    """Whether a tensor has one value for each element of a slice, in the same order in memory."""
    return value.shape == each.tensor.shape and value.stride() == each.tensor.stride()


def describe_state(slices: list[Slice], state: MutableMapping) -> dict[str, dict]:
    """Return the optimizer state by parameter name and key: scalars themselves, of other tensors the dtype.

    Of the tensors of a parameter that one rank owns whole, the shape too where it is not the parameter's.
    Raises: ValueError for another tensor that has neither one value nor one for each element.
    """
    return {
        each.span.name: {key: _described(each, key, value) for key, value in state[each.tensor].items()}
        for each in slices
        if each.tensor in state
    }


def _described(each: Slice, key: str, value):
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0:
        return value.cpu()
    if _has_form_of(each, value):
        return value.dtype
    if each.whole:
        return value.dtype, tuple(value.shape)
    raise ValueError(
        f"the optimizer's {key} for {each.span.name} has shape {tuple(value.shape)}, neither one value "
        "nor one for each element: it cannot be stored by element"
    )


def contents(whose: FlatUnit | torch.Tensor) -> torch.Tensor:
    """The values of a unit's owned parameters, or of a tensor in the optimizer's state."""
    return whose.values() if isinstance(whose, FlatUnit) else whose


def form(whose: FlatUnit | torch.Tensor) -> torch.Tensor:
    """The same on the meta device, which needs no values: shape and dtype."""
    return torch.empty_like(whose.updated if isinstance(whose, FlatUnit) else whose, device="meta")


def allocate_state(each: Slice, present: dict, described: dict[str, dict]) -> dict | None:
    """State of a slice as `describe_state` describes it, with tensors that are not filled yet.

    Tensors that are ``present`` already are reused, so that loading a checkpoint takes no more memory.
    """
    entries = described.get(each.span.name, {})
    if not entries or not each.unit.trainable:
        return None
    return {key: _allocated(each, value, present.get(key)) for key, value in entries.items()}


def _allocated(each: Slice, value, old):
    like: torch.Tensor = each.tensor
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.dtype):
        value, shape = value
        like = like.new_empty(shape)
    if not isinstance(value, torch.dtype):
        return value
    fits = isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (like.shape, value)
    return old if fits else torch.empty_like(like, dtype=value, requires_grad=False)

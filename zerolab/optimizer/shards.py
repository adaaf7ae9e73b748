"""Shards: this rank's slices of parameters and optimizer state, by name, whatever the stage and the units."""

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from zerolab.optimizer.probe.values import (
    described,
    has_gaps,
    named_tensors,
    tensors_in,
    without_contents,
)
from zerolab.optimizer.slices import Slice, in_memory_order
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span, overlap


@dataclass(frozen=True, eq=False)
class Shard:
    """Elements ``start`` to ``stop`` of a flattened tensor: a parameter, or a tensor of its optimizer state.

    Attributes:
        name: the parameter's, as in ``model.named_parameters()``.
        key: which tensor of its optimizer state, such as "exp_avg", or "factors.0" of a list; None for the
            parameter itself.
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
        for name, value in state.get(each.tensor, {}).items():
            for key, tensor in named_tensors(name, value):
                yield each.unit, each.span, _of_state(each, key, values_of(tensor))


def _shard(unit: FlatUnit, span: Span, key: str | None, part: slice, values: torch.Tensor) -> Shard:
    return Shard(span.name, key, span.numel, unit.owned.start + part.start - span.offset, values)


def _of_state(each: Slice, key: str, values: torch.Tensor) -> Shard:
    """The shard of a tensor in the optimizer's state: one value for each element, or all of a tensor."""
    if _has_form_of(each, values):
        return _shard(each.unit, each.span, key, each.part, in_memory_order(values))
    return Shard(each.span.name, key, values.numel(), 0, in_memory_order(values))


def _has_form_of(each: Slice, value: torch.Tensor) -> bool:
    """Whether a tensor has one value for each element of a slice, in the same order in memory."""
    return value.shape == each.tensor.shape and value.stride() == each.tensor.stride()


def describe_state(slices: list[Slice], state: MutableMapping) -> dict[str, dict]:
    """Return the optimizer state by parameter name and key, without the contents of its tensors.

    Of a tensor with one value for each element it has the dtype, because a slice has another shape on each
    rank. Of the other tensors of a parameter that one rank owns whole it has a tensor on the meta device, in
    lists and dicts too. A tensor without dimensions, such as a step counter, is there as it is.
    Raises: ValueError for another tensor of a parameter that is cut.
    """
    return {
        each.span.name: {key: _described(each, key, value) for key, value in state[each.tensor].items()}
        for each in slices
        if each.tensor in state
    }


def _described(each: Slice, key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() and _has_form_of(each, value):
        return value.dtype
    if not each.whole and any(tensor.dim() for tensor in tensors_in(value)):
        raise ValueError(
            f"the optimizer's {key} for {each.span.name} is {described(value)}, neither one value nor one "
            "for each element: it cannot be stored by element"
        )
    if any(map(has_gaps, tensors_in(value))):
        raise ValueError(
            f"the optimizer's {key} for {each.span.name} is {described(value)}: keep tensors without gaps in "
            "memory, as after .contiguous()"
        )
    return tree_map(_leaf_described, value)


def _leaf_described(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return without_contents(leaf) if leaf.dim() else leaf.detach().cpu().clone()


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
    if not entries:
        return None
    return {key: _allocated(each, value, present.get(key)) for key, value in entries.items()}


def _allocated(each: Slice, form: Any, old: Any) -> Any:
    """What `_described` describes, in tensors of ``old`` that have the same form, and in new ones."""
    if isinstance(form, torch.dtype):
        form = torch.empty_like(each.tensor, dtype=form, device="meta", requires_grad=False)
    spare = list({t.untyped_storage()._cdata: t for t in tensors_in(old) if t.dim()}.values())

    def leaf(like: Any) -> Any:
        if not isinstance(like, torch.Tensor) or not like.is_meta:
            return like
        for place, tensor in enumerate(spare):
            if (tensor.shape, tensor.dtype, tensor.stride()) == (like.shape, like.dtype, like.stride()):
                return spare.pop(place)
        return torch.empty_like(like, device=each.tensor.device)

    return tree_map(leaf, form)

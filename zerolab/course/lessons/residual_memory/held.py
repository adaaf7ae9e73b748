"""What stays in memory of inputs that the reader's class has packed: lesson 07's exercise on P_a."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from zerolab.course.alive import Alive, kept_by, nbytes
from zerolab.course.attempts import Odd, returned, told
from zerolab.course.lessons.residual_memory.inputs import Case
from zerolab.course.wire import calls_made

SMALL = 32  # bytes that may stay beside each part, for a tensor with a shape or a length


class Kept(NamedTuple):
    """What a rank got back, and what stayed in memory.

    Attributes:
        values: what unpack returned, by input.
        again: the same of the first input, which is packed once more after all others.
        shapes: of the tensors in the attributes, by input.
        calls: how many calls were made when all inputs were packed, and `ended`: when they were unpacked.
        held: the bytes that were in memory then, of tensors and in attributes of other types.
        why: what kept a whole input then; "" where nothing did.
        left: the most bytes in memory after an unpack, and `name`: a name that keeps some of it.
        odd: what the class returned, if it has no unpack.
        keeps: whether its objects have attributes.
        changed: whether the class wrote to an input.
    """

    values: Sequence[torch.Tensor | Odd]
    again: torch.Tensor | Odd = Odd("NoneType", "")
    shapes: Sequence[Sequence[tuple[int, ...]]] = ()
    calls: int = 0
    ended: int = 0
    held: int = 0
    why: str = ""
    left: int = 0
    name: str = ""
    odd: Odd | None = None
    keeps: bool = False
    changed: bool = False


def packed_and_unpacked(cls: Callable, case: Case) -> Kept:
    """In the worker: pack all inputs, look at what is alive, and unpack them as backward does."""
    leaves = case.leaves()
    alive = Alive()
    packed, written = zip(*(_packed(cls, case.made_of(leaf)) for leaf in leaves), strict=True)
    for each in packed:
        if not callable(getattr(each, "unpack", None)):
            text = "" if each is None else repr(each)[:60]
            return Kept([], odd=Odd(type(each).__name__, text))
    calls, found = calls_made(), alive.storages()
    others, name_of_other = _of_other_types(packed)
    held, why = nbytes(found) + others, _why_whole(found, packed, case) or name_of_other
    keeps, shapes = any(getattr(each, "__dict__", None) for each in packed), list(map(_shapes, packed))
    found.clear()
    values: list[torch.Tensor | Odd] = []
    left, name = 0, ""
    for each in reversed(packed):
        values.append(returned(each.unpack()))
        found = alive.storages(leave_out=values)
        if nbytes(found) > left:
            left, name = nbytes(found), _name_of_largest(found, packed)
        found.clear()
    ended = calls_made()
    if not why and held > case.share + SMALL * len(case.shapes):
        why = _told_by_dropping(cls, case)
    try:
        again = returned(cls(case.made_of(leaves[0])).unpack())
    except Exception as error:
        raise told(error, "the first input, which is packed once more after all others") from None
    return Kept(
        values[::-1], again, shapes, calls, ended, held, why, left, name, keeps=keeps, changed=any(written)
    )


def _shapes(packed: Any) -> list[tuple[int, ...]]:
    leaves = tree_leaves(getattr(packed, "__dict__", {}))
    return [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]


def _told_by_dropping(cls: Callable, case: Case) -> str:
    """Return the attribute without which a new object keeps one whole input less."""
    largest = max(range(len(case.numels)), key=lambda number: case.numels[number])
    alive = Alive()
    packed, _ = _packed(cls, case.made_of(case.leaves()[largest]))
    before = nbytes(alive.storages())
    for name in list(getattr(packed, "__dict__", {})):
        kind = type(getattr(packed, name)).__name__
        delattr(packed, name)
        now = nbytes(alive.storages())
        if before - now >= case.numels[largest] * case.item:
            return f"`self.{name}`, of type {kind}, which keeps a whole input"
        before = now
    return ""


def _packed(cls: Callable, tensor: torch.Tensor) -> tuple[Any, bool]:
    """Return cls(tensor), and whether it wrote to the tensor. No name keeps the tensor alive after this."""
    before = tensor.detach().clone()
    packed = cls(tensor)
    return packed, not torch.equal(tensor, before)


def _of_other_types(packed: Sequence[Any]) -> tuple[int, str]:
    """The bytes of numbers that attributes keep, but not in tensors, and the attribute with most of them.

    A shape, a rank or a length counts nothing.
    """
    sizes = [
        (size, f"`self.{name}`")
        for each in packed
        for name, value in getattr(each, "__dict__", {}).items()
        if (size := sum(map(_bytes_of, tree_leaves(value)))) > SMALL
    ]
    return sum(size for size, _ in sizes), max(sizes, default=(0, ""))[1]


def _bytes_of(leaf: Any) -> int:
    """Of an array that looks at other memory none, because a tensor's is counted."""
    if isinstance(leaf, np.ndarray):
        return leaf.nbytes if leaf.base is None else 0
    if isinstance(leaf, bytes | bytearray):
        return len(leaf)
    return 8 * isinstance(leaf, int | float)


def _why_whole(found: dict[int, torch.Tensor], packed: Sequence[Any], case: Case) -> str:
    """Return what keeps a storage that is larger than a part."""
    largest = case.item * -(-max(case.numels) // case.world_size) + SMALL
    whole = [tensor for tensor in found.values() if tensor.untyped_storage().nbytes() > largest]
    for tensor in whole:
        name = _name(tensor, packed)
        if name and tensor.nbytes < tensor.untyped_storage().nbytes():
            return f"`{name}`, which is a view of it"
        if name:
            return f"`{name}`"
    return "a graph" if whole and any(tensor.grad_fn for tensor in found.values()) else ""


def _name_of_largest(found: dict[int, torch.Tensor], packed: Sequence[Any]) -> str:
    largest = max(found.values(), key=lambda tensor: tensor.untyped_storage().nbytes())
    return _name(largest, packed)


def _name(tensor: torch.Tensor, packed: Sequence[Any]) -> str:
    return next(filter(None, (kept_by(tensor, self=each) for each in packed)), "")

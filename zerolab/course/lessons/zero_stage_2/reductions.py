"""Lesson 05's exercise on order: run a reader's InOrder through backward, and watch what it reduces."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zerolab import ring
from zerolab.course.alive import Alive, kept_by
from zerolab.course.attempts import Odd, returned, told
from zerolab.course.lessons.zero_stage_2.backward_passes import Case
from zerolab.course.wire import calls_made

ZEROS, JOINED = "zeros", "a joined buffer"


class Reduction(NamedTuple):
    """What ring.reduce_scatter was given: a unit's buffer or a copy of it, ZEROS, JOINED, or ""."""

    what: str
    numel: int
    in_finish: bool


class Reduced(NamedTuple):
    """A rank's shards, and what was seen on the way to them.

    Attributes:
        whole: how many whole buffers were alive after each unit got ready, and at the end.
        kept: of the first buffer too many, what keeps it; "" where that is not known.
        overlap: whether two shards begin at the same place in memory.
        stale: whether a new object begins with the shards of this one.
        reductions: what was given to ring.reduce_scatter, in order.
        calls: how many calls were made by then.
        again: the shards of a second object, with the same gradients.
    """

    shards: dict[str, torch.Tensor | Odd] | Odd
    whole: list[int]
    kept: str
    overlap: bool
    stale: bool
    reductions: list[Reduction]
    calls: int
    again: dict[str, torch.Tensor | Odd] | Odd


class Handed:
    """The units whose buffers were handed over, by storage.

    The weak references see to it that no later storage gets the identity of an earlier one.
    """

    def __init__(self):
        self.units: dict[int, str] = {}
        self._refs: list[StorageWeakRef] = []

    def over(self, mine: Any, name: str, gradient: torch.Tensor) -> None:
        """Call ready, and remember whose buffer that was. No name here keeps it alive afterwards."""
        self._refs.append(StorageWeakRef(gradient.untyped_storage()))
        self.units[gradient.untyped_storage()._cdata] = name
        mine.ready(name, gradient)


def backward(cls: Callable, case: Case, rank: int) -> Reduced:
    """In the worker: units get ready in this rank's order; look at what is alive after each of them."""
    alive, whole, kept = Alive(), [], ""
    handed, mine = Handed(), cls(dict(case.sizes))
    with _watched(case, rank, handed.units) as reductions:
        for step in [*case.orders[rank], None]:
            if step is None:
                mine.finish()
            else:
                handed.over(mine, step, case.gradient(rank, step))
            found = alive.storages(at_least=4 * min(case.sizes.values()))
            whole.append(len(found))
            if step is None or len(found) > case.waiting(rank)[len(whole) - 1]:
                said = (_keeper(mine, list(case.sizes), found[key], handed.units.get(key)) for key in found)
                kept = kept or next(filter(None, said), "")
            found.clear()
    shards, overlap, calls = _plain(mine.shards), _overlap(mine.shards), calls_made()
    stale = bool(cls(dict(case.sizes)).shards)
    # A rank that lacks a shard goes no further, so that all messages so far are of the first object.
    again = _again(cls, case, rank) if _complete(shards, case) else {}
    return Reduced(shards, whole, kept, overlap, stale, reductions, calls, again)


def _complete(shards: dict | Odd, case: Case) -> bool:
    return isinstance(shards, dict) and case.sizes.keys() <= shards.keys()


def _again(cls: Callable, case: Case, rank: int) -> dict | Odd:
    """The shards of a second object."""
    try:
        second = cls(dict(case.sizes))
        for name in case.orders[rank]:
            second.ready(name, case.gradient(rank, name))
        second.finish()
    except Exception as error:
        raise told(error, "a second object of the class") from None
    return _plain(second.shards)


@contextmanager
def _watched(case: Case, rank: int, units: dict[int, str]) -> Iterator[list[Reduction]]:
    """Note what ring.reduce_scatter is given, under whatever name it was imported.

    A function around it would hide the reader's line from the notes of the messages.
    """
    seen: list[Reduction] = []
    code = ring.reduce_scatter.__code__

    def note(frame, event, _) -> None:
        if event == "call" and frame.f_code is code:
            tensor, handed = frame.f_locals["tensor"], list(units.values())
            what = units.get(tensor.untyped_storage()._cdata) or _told_by_values(tensor, case, rank, handed)
            seen.append(Reduction(what, tensor.numel(), _in_finish(frame)))

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def _in_finish(frame) -> bool:
    while frame is not None and frame.f_code.co_name != "finish":
        frame = frame.f_back
    return frame is not None


def _told_by_values(tensor: torch.Tensor, case: Case, rank: int, handed: list[str]) -> str:
    if tensor.numel() == sum(case.sizes.values()) and len(case.sizes) > 1:
        return JOINED
    if not tensor.any():
        return ZEROS
    return next((name for name in handed if tensor.equal(case.gradient(rank, name))), "")


def _keeper(mine: Any, names: list[str], buffer: torch.Tensor, unit: str | None) -> str:
    """Under which name a buffer is kept, and whether its unit is reduced already; "" if it waits rightly."""
    name = kept_by(buffer, self=mine)
    if not name or not isinstance(mine.shards, dict):
        return ""
    if name.startswith("self.shards"):
        return f"`{name}` is a view, which keeps the whole buffer: keep a clone of the chunk"
    if unit is None:
        return f"look at `{name}`"
    if unit in mine.shards:
        return f"unit {unit} is reduced, and `{name}` still keeps its buffer: take it out there"
    turn = next(each for each in names if each not in mine.shards)
    return f"`{name}` keeps unit {unit}, and it is its turn: reduce it at once" if unit == turn else ""


def _overlap(shards: Any) -> bool:
    values = shards.values() if isinstance(shards, dict) else ()
    places = [each.data_ptr() for each in values if isinstance(each, torch.Tensor) and each.numel()]
    return len(set(places)) < len(places)


def _plain(shards: Any) -> dict | Odd:
    if not isinstance(shards, dict):
        return Odd(type(shards).__name__, repr(shards)[:60])
    return {name: returned(shard) for name, shard in shards.items()}

"""Lesson 04's exercise on loading: describe wrong shards that no known mistake explains.

Where the first wrong element comes from, which lengths are wrong, and what wrong calls have in common.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from zerolab.course.attempts import Odd
from zerolab.course.lessons.zero_stage_1.checkpoints import zeros_behind
from zerolab.course.lessons.zero_stage_1.loaded import Call, Loaded
from zerolab.course.lessons.zero_stage_1.where import only_where


def right(call: Call) -> torch.Tensor:
    """Return the shard that the call should return."""
    return zeros_behind(call.case.state(), call.case.shard(call.rank))


# fmt: off
FEATURES: Mapping[str, Callable[[Call], bool]] = {
    "the shard is padding alone": lambda c: c.first >= c.case.numel,
    "the shard ends with padding": lambda c: c.first + c.case.own > c.case.numel,
    "the shard overlaps one file alone": lambda c: len(c.needed()) == 1,
    "the shard overlaps several files": lambda c: len(c.needed()) > 1,
    "the shard overlaps three files or more": lambda c: len(c.needed()) > 2,
    "the shard begins inside a file": lambda c: bool(c.needed()) and c.needed()[0][1] > 0,
    "rank is 0": lambda c: c.rank == 0,
    "rank is above 0": lambda c: c.rank > 0,
    "rank is that of the last rank": lambda c: c.rank == c.case.world_size - 1,
    "rank is saved_by or more": lambda c: c.rank >= c.case.saved_by,
    "saved_by and world_size differ": lambda c: c.case.saved_by != c.case.world_size,
    "world_size is larger than saved_by": lambda c: c.case.world_size > c.case.saved_by,
    "world_size is smaller than saved_by": lambda c: c.case.world_size < c.case.saved_by,
    "world_size is no multiple of saved_by": lambda c: bool(c.case.world_size % c.case.saved_by),
    "saved_by is no multiple of world_size": lambda c: bool(c.case.saved_by % c.case.world_size),
    "saved_by does not divide numel": lambda c: bool(c.case.numel % c.case.saved_by),
    "world_size does not divide numel": lambda c: bool(c.case.numel % c.case.world_size),
    "old padding fills a file": lambda c: c.case.saved * c.case.saved_by - c.case.numel >= c.case.saved,
}
# fmt: on


def in_common(wrong: Sequence[Call], loaded: Mapping[Call, Loaded], what: str) -> str:
    """Which calls are wrong, if they have something in common that no other call has."""
    padded = any(
        call.first >= call.case.numel for call in wrong
    )  # else it is no wonder that others are right
    others = [call for call in loaded if call not in wrong and (padded or call.first < call.case.numel)]
    where = only_where(FEATURES, wrong, others)
    return f". {what} {where}" if where else ""


def described(loaded: Mapping[Call, Loaded]) -> str | None:
    """What is wrong with the first wrong shard: its length, or where its first wrong element is from."""
    wrong = [call for call, done in loaded.items() if not done.error and not equal(done.value, right(call))]
    call, got, want = wrong[0], loaded[wrong[0]].value, right(wrong[0])
    if not isinstance(got, torch.Tensor) or got.dtype != want.dtype or got.dim() != 1:
        return None
    said = _length(call, got) if got.shape != want.shape else _element(call, loaded[call], got)
    return said and f"on rank {call.rank}: {said}{in_common(wrong, loaded, 'Shards are wrong')}"


def equal(got: torch.Tensor | Odd, want: torch.Tensor) -> bool:
    """Whether a call returned just this."""
    return isinstance(got, torch.Tensor) and got.dtype == want.dtype and got.equal(want)


def _length(call: Call, got: torch.Tensor) -> str:
    """Of a shard of another length: whether its values are right."""
    values = call.case.state()[call.first : call.last]
    has = f"{len(got)} element{'s' * (len(got) != 1)}"
    said = f"its shard has {has}, and ceil(numel / world_size) = {call.case.own} are right"
    alike = got[: len(values)].equal(values[: len(got)]) and not got[len(values) :].any()
    if not alike:
        return said
    return f"{said}. Its values are right, so look at where it ends, and at the zeros behind the values"


def _element(call: Call, done: Loaded, got: torch.Tensor) -> str | None:
    """Where the first wrong element comes from; all numbers of a state differ."""
    case, element = call.case, int((got != right(call)).nonzero()[0])
    at = (case.joined() == got[element]).nonzero().flatten()
    where = case.own * call.rank + element
    if where >= case.numel:
        return f"element {element} of its shard is padding, which has to be 0, and is {got[element]:.4g}"
    if not got[element]:
        return f"element {element} of its shard is 0, and was never filled{_not_opened(call, done, element)}"
    if not at.numel():
        return None
    file, place = divmod(int(at[0]), case.saved)
    return (
        f"element {element} of its shard is element {place} of file {file}, and element {where} of the state "
        f"belongs there, which is in file {where // case.saved} at {where % case.saved}"
    )


def _not_opened(call: Call, done: Loaded, element: int) -> str:
    """Whether the file that has an element was never read, and which were."""
    needed = [file for file, _, _ in call.needed()]
    file = (call.first + element) // call.case.saved
    place = (call.first + element) % call.case.saved
    if any(each == file and start <= place < stop for each, start, stop in done.reads):
        return f". You have read it: it is in file {file}, at {place}"
    if file in done.opened:
        start, stop = next((start, stop) for each, start, stop in done.reads if each == file)
        return (
            f". It is in file {file}, at {place}, and read({file}, {start}, {stop}) does not reach it: stop "
            "is the place behind the last"
        )
    if not done.opened:
        return f". It is in file {file}, and nothing was read"
    return (
        f". It is in file {file}. The shard overlaps {_files(needed)}, and {_files(done.opened)} alone "
        f"{'was' if len(done.opened) == 1 else 'were'} read: go on until the shard is full"
    )


def _files(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"files {', '.join(first)} and {last}" if first else f"file {last}"

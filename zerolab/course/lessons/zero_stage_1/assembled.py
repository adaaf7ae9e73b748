"""Lesson 04's exercise on loading: what was made of the elements that were read, by the values returned."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch

from zerolab.course.lessons.zero_stage_1.checkpoints import MISTAKES, Case, zeros_behind
from zerolab.course.lessons.zero_stage_1.cut_tables import SHARDS
from zerolab.course.lessons.zero_stage_1.loaded import Call, Loaded

Value = Callable[[Call], torch.Tensor]


def _pieces(call: Call) -> list[tuple[int, torch.Tensor]]:
    """The parts of the files that belong to the shard, and where each begins in its file."""
    files = call.case.files()
    return [(start, files[file][start:stop]) for file, start, stop in call.needed()]


def _put(call: Call, place: Callable[[int, torch.Tensor], int], add: bool = False) -> torch.Tensor:
    """The shard with each piece written where `place` says, or added to what is there."""
    shard = torch.zeros(max(call.case.own, call.case.saved))
    for start, piece in _pieces(call):
        at = place(start, piece)
        shard[at : at + len(piece)] = piece + shard[at : at + len(piece)] * add
    return shard[: call.case.own]


def _values(call: Call) -> torch.Tensor:
    return torch.cat([torch.zeros(0), *(piece for _, piece in _pieces(call))])


def _filled(call: Call, fill: Callable[[torch.Tensor], torch.Tensor | float]) -> torch.Tensor:
    """The right values, and behind them something else than zeros."""
    values, shard = _values(call), torch.zeros(call.case.own)
    if len(values):
        shard[len(values) :] = fill(values)
    shard[: len(values)] = values
    return shard


def _padding(case: Case) -> int:
    return case.saved * case.saved_by - case.numel


# fmt: off
ASSEMBLED: Mapping[str, Value] = {
    "each part is put where it stands in its file: it belongs where it stands in your shard":
        lambda c: _put(c, lambda start, piece: start),
    "each part is put at the end of the shard: parts follow each other":
        lambda c: _put(c, lambda start, piece: c.case.own - len(piece)),
    "the parts are added to each other, at the beginning of the shard: they follow each other":
        lambda c: _put(c, lambda start, piece: 0, add=True),
    "the parts of the files stand in reverse order: begin with the first file":
        lambda c: zeros_behind(torch.cat([torch.zeros(0), *(piece for _, piece in _pieces(c)[::-1])]),
                               slice(0, c.case.own)),
    "the elements of the shard stand in reverse order":
        lambda c: _filled(c, lambda values: 0.0).flip(0),
    "the last value is repeated in the padding, which has to be zeros":
        lambda c: _filled(c, lambda values: values[-1]),
    "as many elements are dropped from the end of each shard as there is old padding: padding stands only at "
    "the end of the last files":
        lambda c: zeros_behind(_values(c)[: len(_values(c)) - _padding(c.case)], slice(0, c.case.own)),
    "as many zeros stand behind each shard as there was old padding: only the last shards need zeros, up to "
    "ceil(numel / world_size) elements":
        lambda c: torch.cat([_values(c), torch.zeros(_padding(c.case))]),
    "the values are right, and the zeros make each shard as long as a file: it has ceil(numel / world_size) "
    "elements":
        lambda c: zeros_behind(_values(c), slice(0, max(len(_values(c)), c.case.saved))),
}
WITH_PADDING = "the old padding is not dropped: stop at numel"
BASES: Mapping[str, Callable[[Case], torch.Tensor]] = {
    "": lambda c: c.state(),
    WITH_PADDING: lambda c: c.joined(),
    "the files are in reverse order": lambda c: torch.cat(c.files()[::-1]),
    "as many elements are dropped from the end of each file as there is old padding: it stands only at the "
    "end of the last files":
        lambda c: torch.cat([file[: max(c.saved - _padding(c), 0)] for file in c.files()]),
    "the old padding is dropped at the beginning, and it stands at the end":
        lambda c: c.joined()[_padding(c) :],
}
# fmt: on


def _cut_of(base: Callable[[Case], torch.Tensor], shards: str, pad: bool) -> Value:
    """The value where one cut of some base is returned, with zeros behind it or without."""

    def value(call: Call) -> torch.Tensor:
        cuts = SHARDS[shards][1](call.case)
        part = base(call.case)[cuts[call.rank] if call.rank < len(cuts) else slice(0, 0)]
        return zeros_behind(part, slice(0, max(call.case.own, len(part)))) if pad else part

    return value


def _cuts() -> list[tuple[str, Value]]:
    """Each base with each cut. Zeros may be there, or missing.

    Padding that is not dropped shows only where a cut reaches into it, which the cut's sentence says.
    """
    said = lambda base, cut: [cut or base] if base == WITH_PADDING else [why for why in (base, cut) if why]
    return [
        ("; besides, ".join(said(base, cut)), _cut_of(BASES[base], cut, pad))
        for base, cut, pad in product(BASES, SHARDS, (True, False))
        if base or cut
    ]


def made(loaded: Mapping[Call, Loaded]) -> list[str]:
    """Return the mistakes from which all values of all calls result."""
    return _fitting(
        [*((why, lambda call, of=of: of(*call)) for why, of in MISTAKES.items()), *ASSEMBLED.items()], loaded
    )


def cut_of_other_bases(loaded: Mapping[Call, Loaded]) -> list[str]:
    """The same with another order or another padding of the files, and another cut of them."""
    return _fitting(_cuts(), loaded)


def _fitting(candidates: Sequence[tuple[str, Value]], loaded: Mapping[Call, Loaded]) -> list[str]:
    fits = [why for why, value in candidates if all(_is(d.value, value(c)) for c, d in loaded.items())]
    fewest = min((why.count("; besides, ") for why in fits), default=0)
    return list(dict.fromkeys(why for why in fits if why.count("; besides, ") == fewest))


def _is(got: object, want: torch.Tensor) -> bool:
    return isinstance(got, torch.Tensor) and got.dtype == want.dtype and got.equal(want)

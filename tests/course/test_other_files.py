"""Lesson 04's exercise on loading: other cuts, other files and other ways to put parts together are named."""

import math

import pytest
import torch
from support.answers import together
from support.lessons import solutions_travel_by_value

from zerolab.course.lessons.zero_stage_1 import check_load

solutions_travel_by_value(__name__)


def up(numel, parts):
    return -(-numel // parts)


def gather(read, saved, start, stop):
    """The elements start to stop of the state, from files of `saved` elements."""
    parts = [torch.zeros(0)]
    while start < stop:
        file = start // saved
        end = min(stop, saved * (file + 1))
        parts.append(read(file, start - file * saved, end - file * saved))
        start = end
    return torch.cat(parts)


def padded(values, size):
    return torch.cat([values, torch.zeros(max(size - values.numel(), 0))])


def cut(
    saved=up, own=up, end=None, first=0, last=0, pad=padded, ask=lambda file, start, stop: (file, start, stop)
):
    """The right shards, with a knob for each length, for the end of the state, and for each end of a shard.

    `pad`: what is made of the values and of the length; `ask`: the arguments of read.
    """

    def load(read, saved_by, numel, n, rank):
        size, stop = own(numel, n), end(numel, saved_by) if end else numel
        low, high = min(size * rank + first, stop), max(min(size * (rank + 1) + last, stop), 0)
        asked = lambda file, start, stop: read(*ask(file, start, stop))
        return pad(gather(asked, saved(numel, saved_by), low, high), max(size, up(numel, n)))

    return load


def parts(put=None, choose=lambda reads: reads):
    """The right reads, changed by `choose`; `put` says where a part goes."""

    def load(read, saved_by, numel, n, rank):
        saved, own = up(numel, saved_by), up(numel, n)
        low, high, reads, shard = own * rank, min(own * (rank + 1), numel), [], torch.zeros(max(own, saved))
        for file in range(saved_by):
            start, stop = max(low, saved * file), min(high, saved * (file + 1))
            if start < stop:
                reads.append((file, start - saved * file, stop - saved * file))
        found = [(start, read(file, start, stop)) for file, start, stop in choose(reads) if start < stop]
        if put is None:
            return padded(torch.cat([torch.zeros(0), *(part for _, part in found)]), own)
        for start, part in found:
            at = put(start, len(part), own)
            shard[at : at + len(part)] += part - shard[at : at + len(part)] * (put is not begin)
        return shard[:own]

    return load


def begin(start, length, own):
    return 0


def all_padding_in_the_last_file(numel, saved_by):
    saved = up(numel, saved_by)
    return saved * (saved_by - 1) + max(numel - saved * (saved_by - 1), 0)


def numbers_of(files):
    """Whole files, chosen by files(rank, saved_by, n)."""

    def load(read, saved_by, numel, n, rank):
        saved, own = up(numel, saved_by), up(numel, n)
        chosen = [file for file in files(rank, saved_by, n) if file < saved_by]
        return padded(torch.cat([torch.zeros(0), *(read(file, 0, saved) for file in chosen)])[:own], own)

    return load


def a_part_of_each_file(read, saved_by, numel, n, rank):
    saved, own = up(numel, saved_by), up(numel, n)
    each = up(saved, n)
    low, high = min(each * rank, saved), min(each * (rank + 1), saved)
    return padded(torch.cat([read(file, low, high) for file in range(saved_by)])[:own], own)


def growing_only(read, saved_by, numel, n, rank):
    """A file is cut into n // saved_by shards."""
    times, saved, own = max(n // saved_by, 1), up(numel, saved_by), up(numel, n)
    part = rank % times
    file = min(rank // times, saved_by - 1)
    return padded(read(file, min(own * part, saved), min(own * (part + 1), saved)), own)


def lcm_of_both(read, saved_by, numel, n, rank):
    shared = math.lcm(saved_by, n)
    return cut(own=lambda numel, n: up(numel, shared) * shared // n)(read, saved_by, numel, n, rank)


def from_all(change):
    """All files are read, and `change` makes a state of them."""

    def load(read, saved_by, numel, n, rank):
        saved, own = up(numel, saved_by), up(numel, n)
        state = change([read(file, 0, saved) for file in range(saved_by)], saved * saved_by - numel)
        return padded(state[own * rank : own * (rank + 1)], own)

    return load


def filled(change):
    """The right shard, with something made of the values and of the number of zeros behind them."""

    def load(read, saved_by, numel, n, rank):
        values = gather(
            read, up(numel, saved_by), min(up(numel, n) * rank, numel), min(up(numel, n) * (rank + 1), numel)
        )
        return change(values, up(numel, n) - len(values), up(numel, saved_by) * saved_by - numel)

    return load


def padding_is_not_handled(read, saved_by, numel, n, rank):
    own, saved = up(numel, n), up(numel, saved_by)
    found, start, stop = [], own * rank, min(own * (rank + 1), numel)
    while start < stop:
        end = min(stop, saved * (start // saved + 1))
        found.append(read(start // saved, start % saved, start % saved + end - start))
        start = end
    return padded(torch.cat(found), own)


def start_is_never_cut_off(read, saved_by, numel, n, rank):
    """A shard of padding alone gets too many zeros."""
    own = up(numel, n)
    stop = min(own * (rank + 1), numel)
    values = gather(read, up(numel, saved_by), own * rank, stop)
    return torch.cat([values, torch.zeros(own * (rank + 1) - stop)])


def only_of_as_many(read, saved_by, numel, n, rank):
    """Nobody expects this: zeros where the number of ranks is another one."""
    return cut()(read, saved_by, numel, n, rank) if saved_by == n else torch.zeros(up(numel, n))


def even_alone(read, saved_by, numel, n, rank):
    assert numel % n == 0
    return cut()(read, saved_by, numel, n, rank)


RIGHT = [cut(), parts(), parts(choose=list)]
WRONG = [
    (cut(saved=lambda numel, parts: round(numel / parts)), "you take a file for round(numel / saved_by)"),
    (
        lambda read, saved_by, numel, n, rank: cut(saved=lambda numel, _: up(numel, n))(
            read, saved_by, numel, n, rank
        ),
        "ou take a file for ceil(numel / world_size) elements, which is the length of a new shard",
    ),
    (cut(end=all_padding_in_the_last_file), "you take all padding to be in the last file, and it can fill"),
    (cut(end=lambda numel, s: up(numel, s) * s - numel % s), "you drop numel % saved_by elements as the old"),
    (cut(end=lambda numel, s: numel - 1), "the last element of the state is never read"),
    (cut(first=1), "each new shard begins one element too late"),
    (cut(last=-1), "each new shard ends one element too early"),
    (
        cut(end=lambda numel, s: up(numel, s) * s, last=1, pad=lambda values, size: padded(values, size)),
        "you read one element too many at the end of each shard",
    ),
    (lcm_of_both, "the state is padded to a multiple of both saved_by and world_size"),
    (parts(choose=lambda reads: reads[:1]), "takes the first one's part only"),
    (parts(choose=lambda reads: reads[-1:]), "takes the last one's part only"),
    (parts(choose=lambda reads: reads[::-1]), "the parts of the files stand in reverse order"),
    (
        parts(choose=lambda reads: [(f, a + (i > 0), b) for i, (f, a, b) in enumerate(reads)]),
        "you leave out the first element of each file that follows the first one",
    ),
    (parts(put=lambda start, length, own: start), "each part is put where it stands in its file"),
    (parts(put=lambda start, length, own: own - length), "each part is put at the end of the shard"),
    (parts(put=begin), "the parts are added to each other, at the beginning of the shard"),
    (cut(ask=lambda f, a, b: (f + 1, a, b)), "the number of each file is one too large"),
    (cut(ask=lambda f, a, b: (a, f, b)), "and yours is start, file, stop"),
    (cut(ask=lambda f, a, b: (f, b, a)), "Start and stop are exchanged: read(file, start, stop)"),
    (numbers_of(lambda rank, saved_by, n: [rank]), "each rank reads the file with its own number alone"),
    (
        numbers_of(lambda rank, saved_by, n: range(rank, saved_by, n)),
        "whole files are given to the ranks in turn",
    ),
    (
        numbers_of(lambda rank, s, n: range(up(s, n) * rank, up(s, n) * (rank + 1))),
        "in blocks of ceil(saved_by / world_size)",
    ),
    (a_part_of_each_file, "each file was cut into world_size parts"),
    (growing_only, "needs a world_size which is a multiple of saved_by"),
    (from_all(lambda files, pad: torch.cat(files[::-1])), "the files are in reverse order"),
    (
        from_all(lambda files, pad: torch.cat([file[: max(len(file) - pad, 0)] for file in files])),
        "as many elements are dropped from the end of each file as there is old padding",
    ),
    (from_all(lambda files, pad: torch.cat(files)[pad:]), "the old padding is dropped at the beginning"),
    (
        filled(lambda values, zeros, pad: padded(values, len(values) + zeros).flip(0)),
        "stand in reverse order",
    ),
    (
        filled(
            lambda values, zeros, pad: torch.cat(
                [values, values[-1:].repeat(zeros) if len(values) else torch.zeros(zeros)]
            )
        ),
        "the last value is repeated in the padding",
    ),
    (
        filled(lambda values, zeros, pad: torch.cat([values, torch.zeros(pad)])),
        "as many zeros stand behind each",
    ),
    (
        padding_is_not_handled,
        "It stops wherever the shard is padding alone, and nowhere else. Nothing is to be read there: return",
    ),
    (
        start_is_never_cut_off,
        "on rank 4: its shard has 4 elements, and ceil(numel / world_size) = 3 are right. Its values are "
        "right, so look at where it ends, and at the zeros behind the values. Shards are wrong only where "
        "the shard is padding alone",
    ),
    (only_of_as_many, "Shards are wrong wherever saved_by and world_size differ, and nowhere else"),
    (even_alone, "It stops wherever world_size does not divide numel, and nowhere else"),
]
loaded_by = together(check_load, [*RIGHT, *(wrong for wrong, _ in WRONG)])


@pytest.mark.parametrize("right", RIGHT)
def test_the_helpers_without_a_mistake_pass(right):
    assert loaded_by(right) is None


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_other_cuts_files_and_parts_are_named(wrong, words):
    assert words in loaded_by(wrong)

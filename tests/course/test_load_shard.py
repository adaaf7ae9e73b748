"""Lesson 04's exercise on loading: whatever the style, right answers pass, and each mistake is named."""

from operator import floordiv

import pytest
import torch
import torch.distributed as dist
from support.answers import alone, together
from support.lessons import solutions_travel_by_value

from zerolab import ring
from zerolab.course.lessons.zero_stage_1 import check_load
from zerolab.course.lessons.zero_stage_1.solution import load_shard

solutions_travel_by_value(__name__)


def up(numel, parts):
    return (numel + parts - 1) // parts


def piece_by_piece(read, saved_by, numel, n, rank):
    """Right: pieces end to end, then padding."""
    saved, own = up(numel, saved_by), up(numel, n)
    low, high = min(own * rank, numel), min(own * (rank + 1), numel)
    pieces = [torch.zeros(0)]
    for file in range(saved_by):
        start, stop = max(low, file * saved), min(high, (file + 1) * saved)
        if start < stop:
            pieces.append(read(file, start - file * saved, stop - file * saved))
    shard = torch.cat(pieces)
    return torch.nn.functional.pad(shard, (0, own - shard.numel()))


def one_at_a_time(read, saved_by, numel, n, rank):
    """Right, and slow: one element a read."""
    saved, own = up(numel, saved_by), up(numel, n)
    at = range(own * rank, own * (rank + 1))
    return torch.tensor([read(i // saved, i % saved, i % saved + 1).item() if i < numel else 0.0 for i in at])


def file_after_file(read, saved_by, numel, n, rank):
    """Right: walks on from the first element, file by file."""
    saved, own = up(numel, saved_by), up(numel, n)
    shard, at, end = torch.zeros(own), own * rank, min(own * (rank + 1), numel)
    while at < end:
        file, place = divmod(at, saved)
        count = min(saved - place, end - at)
        shard[at - own * rank :][:count] = read(file, place, place + count)
        at += count
    return shard


def everything(read, saved_by, numel):
    saved = up(numel, saved_by)
    return torch.cat([read(file, 0, saved) for file in range(saved_by)])


def padded(values, size):
    return torch.cat([values, torch.zeros(size - values.numel())])


def reads_everything(read, saved_by, numel, n, rank):
    own = up(numel, n)
    return padded(everything(read, saved_by, numel)[:numel][own * rank : own * (rank + 1)], own)


def whole_files(read, saved_by, numel, n, rank):
    saved, own = up(numel, saved_by), up(numel, n)
    low, high = min(own * rank, numel), min(own * (rank + 1), numel)
    if low == high:
        return torch.zeros(own)
    files = range(low // saved, (high - 1) // saved + 1)
    joined = torch.cat([read(file, 0, saved) for file in files])
    return padded(joined[low - files[0] * saved : high - files[0] * saved], own)


def padding_kept(read, saved_by, numel, n, rank):
    joined = everything(read, saved_by, numel)
    own = up(joined.numel(), n)
    return padded(joined[own * rank : own * (rank + 1)], own)


def garbage_behind(read, saved_by, numel, n, rank):
    own = up(numel, n)
    return padded(everything(read, saved_by, numel)[own * rank : own * (rank + 1)], own)


def cut_from_all_files(read, saved_by, numel, n, rank):
    """The same without zeros where the files end."""
    own = up(numel, n)
    return everything(read, saved_by, numel)[own * rank : own * (rank + 1)]


def no_padding(read, saved_by, numel, n, rank):
    own = up(numel, n)
    return everything(read, saved_by, numel)[:numel][own * rank : own * (rank + 1)]


def chunked(read, saved_by, numel, n, rank):
    return everything(read, saved_by, numel)[:numel][ring.chunks(numel, n)[rank]]


def own_file(read, saved_by, numel, n, rank):
    return read(rank % saved_by, 0, up(numel, saved_by))


def all_of_it(read, saved_by, numel, n, rank):
    return everything(read, saved_by, numel)[:numel]


def first_file(read, saved_by, numel, n, rank):
    saved, own = up(numel, saved_by), up(numel, n)
    file, place = divmod(own * rank, saved)
    stop = min(place + own, saved, numel - file * saved)
    return padded(read(file, place, stop) if stop > place else torch.zeros(0), own)


def padding_first(read, saved_by, numel, n, rank):
    own = no_padding(read, saved_by, numel, n, rank)
    return torch.cat([torch.zeros(up(numel, n) - own.numel()), own])


def nan_behind(read, saved_by, numel, n, rank):
    own = no_padding(read, saved_by, numel, n, rank)
    return torch.cat([own, torch.full((up(numel, n) - own.numel(),), float("nan"))])


def in_turn(read, saved_by, numel, n, rank):
    own = everything(read, saved_by, numel)[:numel][rank::n]
    return padded(own, up(numel, n))


def last_piece(read, saved_by, numel, n, rank):
    saved, own = up(numel, saved_by), up(numel, n)
    for file in range(up(min(own * (rank + 1), numel), saved)):
        shard = torch.zeros(own)
        start, stop = max(own * rank, file * saved), min(own * (rank + 1), numel, (file + 1) * saved)
        if start < stop:
            read_here = read(file, start - file * saved, stop - file * saved)
            shard[start - own * rank : stop - own * rank] = read_here
    return shard if own * rank < numel else torch.zeros(own)


def few_files(read, saved_by, numel, n, rank):
    own = up(numel, n)
    joined = everything(read, saved_by, numel)[:numel][: up(numel, saved_by) * n]
    return padded(joined[own * rank : own * (rank + 1)], own)


def scaled(read, saved_by, numel, n, rank):
    return piece_by_piece(read, saved_by, numel, n, rank) * saved_by / n


def next_rank(read, saved_by, numel, n, rank):
    return reads_everything(read, saved_by, numel, n, (rank + 1) % n)


def in_half(read, saved_by, numel, n, rank):
    return piece_by_piece(read, saved_by, numel, n, rank).half().float()


def in_float64(read, saved_by, numel, n, rank):
    return piece_by_piece(read, saved_by, numel, n, rank).double()


def beyond(read, saved_by, numel, n, rank):
    return read(rank, 0, up(numel, n))


def pieces_at(read, saved_by, numel, n, rank, ask):
    """Right where `ask` is (start - begins, stop - begins); it gets both ends, and where the file begins."""
    saved, own = up(numel, saved_by), up(numel, n)
    first, last = own * rank, min(own * (rank + 1), numel)
    pieces = [torch.zeros(0)]
    for file in range(saved_by):
        start, stop = max(first, file * saved), min(last, (file + 1) * saved)
        if start < stop:
            pieces.append(read(file, *ask(start, stop, file * saved, first, last)))
    return padded(torch.cat(pieces), own)


def short_files(read, saved_by, numel, n, rank):
    """One element a read, and files that are taken for shorter ones."""
    saved, own = numel // saved_by, numel // n
    at = range(own * rank, own * (rank + 1))
    return torch.tensor([read(i // saved, i % saved, i % saved + 1).item() for i in at])


def rounded_down(read, saved_by, numel, n, rank):
    """The new shards are right; files are taken for shorter ones, of which the last has the rest."""
    saved, own = numel // saved_by, up(numel, n)
    shard = torch.zeros(own)
    for place in range(own * rank, min(own * (rank + 1), numel)):
        file = min(place // saved, saved_by - 1)
        start = place - file * saved
        shard[place - own * rank] = read(file, start, start + 1).item()
    return shard


def two_files_at_most(read, saved_by, numel, n, rank):
    """The part of the file in which the shard begins, and of the next one."""
    saved, own = up(numel, saved_by), up(numel, n)
    first, last = min(own * rank, numel), min(own * (rank + 1), numel)
    pieces = [torch.zeros(0)]
    for file in range(first // saved, min(first // saved + 2, saved_by)):
        start, stop = max(first, file * saved), min(last, (file + 1) * saved)
        if start < stop:
            pieces.append(read(file, start - file * saved, stop - file * saved))
    return padded(torch.cat(pieces), own)


def last_of_a_file_is_forgotten(read, saved_by, numel, n, rank):
    """Each element is read, and the last one of a file is not put into the shard."""
    shard = one_at_a_time(read, saved_by, numel, n, rank)
    saved, own = up(numel, saved_by), up(numel, n)
    shard[[at for at in range(own) if (own * rank + at) % saved == saved - 1]] = 0
    return shard


def all_at(ask):
    return lambda *given: pieces_at(*given, ask)


LOAD_RIGHT = [piece_by_piece, one_at_a_time, file_after_file]


def of_old_length(read, saved_by, numel, n, rank, put=lambda first, start: start - first, new=False):
    """Right with `new`, the length of a new shard; `put`: where a piece goes."""
    saved = -(-numel // saved_by)
    own = -(-numel // n) if new else saved
    first, shard = own * rank, torch.zeros(own)
    for file in range(saved_by):
        start, stop = max(first, saved * file), min(first + own, numel, saved * (file + 1))
        if start < stop:
            at = put(first, start)
            shard[at : at + stop - start] = read(file, start - saved * file, stop - saved * file)
    return shard


def on_top_of_each_other(read, saved_by, numel, n, rank):
    return of_old_length(read, saved_by, numel, n, rank, lambda first, start: 0, new=True)


def one_more(numel, n):
    return numel // n + 1


def in_pieces(saved=up, own=up, chunks_of=(), files=lambda saved_by: range(saved_by), less=0, swap=False):
    """Reads where the shard and a file overlap, with a knob for how each of them is cut."""

    def load(read, saved_by, numel, n, rank):
        saved_by, n = (n, saved_by) if swap else (saved_by, n)
        sizes = {"files": saved(numel, saved_by), "shards": own(numel, n)}
        cut = lambda what, count, index: (
            ring.chunks(numel, count)[index] if what in chunks_of
            else slice(sizes[what] * index, min(sizes[what] * (index + 1), numel))
        )  # fmt: skip
        mine, shard = cut("shards", n, rank), torch.zeros(max(own(numel, n), up(numel, n)))
        for file in files(saved_by):
            there = cut("files", saved_by, file)
            start, stop = max(mine.start, there.start), min(mine.stop, there.stop)
            if start < stop:
                part = read(file, start - there.start, stop - there.start - less)
                shard[start - mine.start :][: len(part)] = part
        return shard

    return load


def stops_one_short(read, saved_by, numel, n, rank):
    """The last element of each file is never read."""
    old, new = -(-numel // saved_by), -(-numel // n)
    low, high, shard = rank * new, min((rank + 1) * new, numel), torch.zeros(new)
    for file in range(saved_by):
        start, stop = max(low, file * old), min(high, (file + 1) * old - 1)
        if start < stop:
            shard[start - low : stop - low] = read(file, start - file * old, stop - file * old)
    return shard


LOAD_WRONG = [
    (stops_one_short, "does not reach it: stop is the place behind the last"),
    (in_pieces(saved=floordiv), "you take a file for numel // saved_by elements"),
    (in_pieces(chunks_of=["files"]), "you take the files for those that ring.chunks cuts"),
    (in_pieces(chunks_of=["shards"]), "you cut the new shards with ring.chunks"),
    (in_pieces(chunks_of=["files", "shards"]), "files and shards are cut with ring.chunks"),
    (in_pieces(saved=one_more), "a file for numel // saved_by + 1 elements, one too many"),
    (in_pieces(saved=one_more, own=one_more), "umel // N + 1 is one too many where N divides numel"),
    (in_pieces(files=lambda saved_by: range(saved_by - 1)), "the last file is never read"),
    (in_pieces(less=1), "one element too few of each file"),
    (in_pieces(swap=True), "aved_by and world_size are exchanged"),
    (
        rounded_down,
        "you take a file for numel // saved_by elements, and the last file for all the rest: each file has "
        "ceil(numel / saved_by)",
    ),
    (
        two_files_at_most,
        "It is in file 3. The shard overlaps files 1, 2 and 3, and files 1 and 2 alone were read: go on "
        "until the shard is full",
    ),
    (last_of_a_file_is_forgotten, "element 2 of its shard is 0, and was never filled. You have read it"),
    (of_old_length, "the shards begin at rank times the length of an old file, and have that length"),
    (on_top_of_each_other, "each piece is put at the beginning of the shard, over the one before"),
    (lambda read, saved_by, numel, n, rank: None, "not written yet"),
    (alone(lambda read, saved_by, numel, n, rank: print(numel)), "your function prints something and ret"),
    (
        lambda read, saved_by, numel, n, rank: load_shard(read, saved_by, numel, n, dist.get_rank()),
        "your function calls dist.get_rank(). The check calls it in one process, once for each rank, so use "
        "the argument rank (seen",
    ),
    (lambda read, saved_by, numel, n, rank: [1.0], "it returned list, [1.0]"),
    (reads_everything, "For silver: rank 0 reads 12 elements, all there are, and its shard has 4"),
    (whole_files, "For silver: rank 0 reads 6 elements, and its shard has 4"),
    (padding_kept, "the old padding is not dropped"),
    (garbage_behind, "the old padding is still there, where the new padding belongs"),
    (cut_from_all_files, "your shards go on into the old padding: stop at numel (seen with"),
    (no_padding, "the last shards are shorter"),
    (chunked, "the first shards are one longer"),
    (own_file, "each rank returns the file with its own number"),
    (all_of_it, "each rank returns the whole state"),
    (first_file, "takes the first one's part only"),
    (padding_first, "the new padding stands before the values"),
    (nan_behind, "element 2 of its shard is padding, which has to be 0, and is nan"),
    (in_turn, "element 1 of its shard is element 0 of file 1, and element 1 of the state belongs there"),
    (last_piece, "only the last one's part is left: make the shard once"),
    (few_files, "only the first world_size files were read"),
    (scaled, "the right shard counts 4/3 times"),
    (next_rank, "the next rank's elements"),
    (in_half, "went through float16"),
    (in_float64, "it returned float64"),
    (beyond, "stopped with IndexError: read(0, 0, 4): a file has the elements 0 to 3: cut both ends off"),
    (short_files, "numel // saved_by and numel // world_size round down"),
    (
        all_at(lambda start, stop, begins, first, last: (start, stop)),
        "3 to 4 is where they stand in the whole state: subtract 3, where file 1 begins",
    ),
    (
        all_at(lambda start, stop, begins, first, last: (first - begins, last - begins)),
        "read(0, 0, 4): a file has the elements 0 to 3: cut both ends off there",
    ),
    (
        all_at(lambda start, stop, begins, first, last: (start - begins, stop - start)),
        "you pass how many elements you need: pass stop, and not the length",
    ),
    (lambda read, saved_by, numel, n, rank: read(saved_by + rank, 0, 1), "begin and end in file"),
    (lambda read, saved_by, numel, n, rank: torch.zeros(up(numel, n)), "made and never filled"),
]  # fmt: skip
loaded_by = together(check_load, [*LOAD_RIGHT, *(wrong for wrong, _ in LOAD_WRONG)])


@pytest.mark.parametrize("right", LOAD_RIGHT)
def test_right_loading_passes_however_it_is_written(right):
    assert loaded_by(right) is None


@pytest.mark.parametrize(("wrong", "words"), LOAD_WRONG)
def test_wrong_loading_is_named(wrong, words):
    assert words in loaded_by(wrong)


def test_padding_that_is_not_dropped_is_said_once():
    said = loaded_by(cut_from_all_files)
    assert said.count("padding") == 1 and "besides" not in said

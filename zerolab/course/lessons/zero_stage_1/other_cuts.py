"""Lesson 04's exercise on loading: from what was read, tell how the files and the new shards were cut."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import NamedTuple

from zerolab.course.lessons.zero_stage_1.checkpoints import Case
from zerolab.course.lessons.zero_stage_1.cut_tables import BOTH, FILES, SHARDS, Cut
from zerolab.course.lessons.zero_stage_1.loaded import Call, Loaded, Read, elements

Change = Callable[[Call, list[Read]], list[Read]]
# fmt: off
CHANGES: Mapping[str, Change] = {
    "the last file is never read: there are saved_by of them":
        lambda call, reads: [each for each in reads if each[0] < call.case.saved_by - 1],
    "the first file is never read: it has number 0":
        lambda call, reads: [each for each in reads if each[0] > 0],
    "you read one element too few of each file: stop is the first element that is not read, as in Python":
        lambda call, reads: [(file, start, stop - 1) for file, start, stop in reads],
    "you read one element too many of each file: stop is the first element that is not read, as in Python":
        lambda call, reads: [(file, start, stop + 1) for file, start, stop in reads],
    "you leave out the first element of what you need of each file":
        lambda call, reads: [(file, start + 1, stop) for file, start, stop in reads],
    "you leave out the first element of each file that follows the first one":
        lambda call, reads: reads[:1] + [(file, start + 1, stop) for file, start, stop in reads[1:]],
    "a shard can overlap several files, and this takes the first one's part only":
        lambda call, reads: reads[:1],
    "a shard can overlap several files, and this takes the last one's part only":
        lambda call, reads: reads[-1:],
    "only files that lie in the shard as a whole are read: a shard can begin and end inside a file":
        lambda call, reads: [each for each in reads if call.first <= call.case.saved * each[0]
                             and call.case.saved * (each[0] + 1) <= call.first + call.case.own],
    "the number of each file is one too large: the first file has number 0":
        lambda call, reads: [(file + 1, start, stop) for file, start, stop in reads],
    "the files are counted modulo world_size: there are saved_by of them":
        lambda call, reads: [(file % call.case.world_size, start, stop) for file, start, stop in reads],
    "the parts of the files stand in reverse order: begin with the first file":
        lambda call, reads: reads[::-1],
}
ARGUMENTS: Mapping[str, Change] = {
    "you pass how many elements you need: pass stop, and not the length":
        lambda call, reads: [(file, start, stop - start) for file, start, stop in reads],
    "the order of the arguments is read(file, start, stop), and yours is start, file, stop":
        lambda call, reads: [(start, file, stop) for file, start, stop in reads],
    "start and stop are exchanged: the order of the arguments is read(file, start, stop)":
        lambda call, reads: [(file, stop, start) for file, start, stop in reads],
    "start and stop are places in the whole state: subtract the element with which the file begins":
        lambda call, reads: [(file, start + call.case.saved * file, stop + call.case.saved * file)
                             for file, start, stop in reads],
    "start and stop are places in your shard: count from the file's first element":
        lambda call, reads: [(file, start + call.case.saved * file - call.first,
                              stop + call.case.saved * file - call.first) for file, start, stop in reads],
}
# fmt: on


class Hypothesis(NamedTuple):
    """How the files were taken to be cut, how the new shards were cut, and what was made of the right reads.

    `swapped`: whether saved_by and world_size stand for each other.
    """

    files: Cut
    shards: Cut
    change: Change = lambda call, reads: reads
    swapped: bool = False

    def reads(self, call: Call) -> list[Read]:
        """What a call would read."""
        numel, saved_by, world_size = call.case
        case = Case(numel, world_size, saved_by) if self.swapped else call.case
        shards = self.shards(case)
        mine = shards[call.rank] if call.rank < len(shards) else slice(numel, numel)
        found = []
        for file, there in enumerate(self.files(case)):
            start, stop = max(mine.start, there.start), min(mine.stop, there.stop)
            found += [(file, start - there.start, stop - there.start)] if start < stop else []
        return self.change(call, found)

    def explains(self, loaded: Mapping[Call, Loaded]) -> bool:
        """Whether these are all reads of all calls, up to the one at which a call stopped.

        Shards of padding alone do not count: what is read for them depends on where an end is cut off. Files
        that do not exist may be left out, because a loop ended before.
        """
        return any(self._explains(loaded, only) for only in (False, True))

    def _explains(self, loaded: Mapping[Call, Loaded], existing: bool) -> bool:
        for call, done in loaded.items():
            if call.first >= call.case.numel:
                continue
            reads = [each for each in self.reads(call) if not existing or each[0] < call.case.saved_by]
            expected, read = elements(reads), elements(done.reads)
            if read != (expected[: len(read)] if done.error else expected):
                return False
        return True


RIGHT = Hypothesis(FILES[""][1], SHARDS[""][1])


def explaining(loaded: Mapping[Call, Loaded]) -> list[str]:
    """Return the cuts, or the change of the right reads, that explain what all calls have read."""
    if RIGHT.explains(loaded) or not any(elements(done.reads) for done in loaded.values()):
        return []
    single = {
        **{why: RIGHT._replace(files=cut) for why, (_, cut) in FILES.items()},
        **{why: RIGHT._replace(shards=cut) for why, (_, cut) in SHARDS.items()},
        **{why: RIGHT._replace(change=change) for why, change in {**CHANGES, **ARGUMENTS}.items()},
        "saved_by and world_size are exchanged: saved_by is the number of files":
            RIGHT._replace(swapped=True),
    }  # fmt: skip
    if found := [why for why, each in single.items() if each.explains(loaded)]:
        return found
    pairs = product(list(FILES.items())[1:], list(SHARDS.items())[1:])
    return [
        BOTH[kind] if kind and kind == other else f"{why}; besides, {besides}"
        for (why, (kind, files)), (besides, (other, shards)) in pairs
        if Hypothesis(files, shards).explains(loaded)
    ]

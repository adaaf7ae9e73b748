"""Lesson 04's exercise on loading: which rank reads which files, where no cut explains the reads."""

from collections.abc import Callable, Mapping, Sequence

from zerolab.course.lessons.zero_stage_1.loaded import Call, Loaded

RUN = "a shard is one run of neighbouring elements of the state"


def _in_turn(call: Call) -> Sequence[int]:
    return range(call.rank, call.case.saved_by, call.case.world_size)


def _blocks(call: Call, size: int) -> Sequence[int]:
    return range(min(size * call.rank, call.case.saved_by), min(size * (call.rank + 1), call.case.saved_by))


def _parts_of_a_file(call: Call) -> Sequence[int]:
    times = max(call.case.world_size // call.case.saved_by, 1)
    return [min(call.rank // times, call.case.saved_by - 1)]


def _own(call: Call) -> Sequence[int]:
    """The file with the rank's number, where there is one."""
    return [call.rank] if call.rank < call.case.saved_by else []


# fmt: off
FILES: Mapping[str, Callable[[Call], Sequence[int]]] = {
    f"each rank reads the file with its own number alone. The new cuts are at other places: {RUN}, which may "
    "begin in another file and overlap several":
        _own,
    f"each rank reads one file alone, its own number modulo saved_by: {RUN}, which may begin in another file "
    "and overlap several":
        lambda call: [call.rank % call.case.saved_by],
    "each rank reads one file alone, as if each file were cut into world_size // saved_by shards. That needs "
    "a world_size which is a multiple of saved_by":
        _parts_of_a_file,
    f"whole files are given to the ranks in turn: {RUN}":
        _in_turn,
    f"whole files are given to the ranks in blocks of ceil(saved_by / world_size): {RUN}, and it may "
    "begin and end inside a file":
        lambda call: _blocks(call, -(-call.case.saved_by // call.case.world_size)),
    f"whole files are given to the ranks in blocks of saved_by // world_size: {RUN}, and it may begin "
    "and end inside a file":
        lambda call: _blocks(call, max(call.case.saved_by // call.case.world_size, 1)),
}
# fmt: on


def by_files(loaded: Mapping[Call, Loaded]) -> list[str]:
    """Return the rule by which all calls chose their files, or that each cut every file in the same way."""
    right = all(done.opened == [file for file, _, _ in call.needed()] for call, done in loaded.items())
    if right or sum(bool(done.opened) for done in loaded.values()) <= len(loaded) / 2:
        return []
    # A part that lies behind the end of a file is empty, and may not be read at all.
    found = [
        why
        for why, rule in FILES.items()
        if all(done.opened in ([*rule(call)], []) for call, done in loaded.items())
    ]
    return found[:1] or _each_file_alike(loaded)


def _each_file_alike(loaded: Mapping[Call, Loaded]) -> list[str]:
    """Whether each rank reads the same range of every file, and another range than the other ranks."""
    for call, done in loaded.items():
        ranges = {(start, stop) for _, start, stop in done.reads if start < stop}
        if ranges and (len(ranges) > 1 or done.opened != [*range(call.case.saved_by)]):
            return []
    if all(done.read >= call.case.numel for call, done in loaded.items()):
        return []  # all of everything
    return [f"each file was cut into world_size parts, and a rank reads its part of every file: {RUN}"]

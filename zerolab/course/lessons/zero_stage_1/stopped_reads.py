"""Lesson 04's exercise on loading: why a call stopped, compared with what it needs to read."""

from collections.abc import Mapping

from zerolab.course.lessons.zero_stage_1.loaded import CALLS, Call, Error, Loaded, Read
from zerolab.course.lessons.zero_stage_1.misplaced import equal, in_common, right
from zerolab.course.lessons.zero_stage_1.other_cuts import ARGUMENTS, explaining


def stopped(loaded: Mapping[Call, Loaded]) -> str | None:
    """Return what stopped the first call that stopped, and why, from what all calls have read.

    None where an earlier call returned a wrong shard, which tells more.
    """
    wrong = [call for call, done in loaded.items() if done.error]
    bad = [call for call, done in loaded.items() if not done.error and not equal(done.value, right(call))]
    if not wrong or (bad and CALLS.index(bad[0]) < CALLS.index(wrong[0])):
        return None
    call, done = wrong[0], loaded[wrong[0]]
    error = done.error or Error("", "", "")
    said = f"your function stopped with {error.kind}: {_short(error.text)}"
    known = explaining(loaded)
    why = "" if known and known[0] not in ARGUMENTS else _of_the_read(call, done)
    why = why or "".join(f". {_sentence(each)}" for each in known[:1])
    place = f" ({error.place})" if error.place else ""
    common = "" if known else in_common(wrong, loaded, "It stops")
    if "padding alone" in common:
        common += ". Nothing is to be read there: return zeros"
    return f"{said}{why}{place}{common} (seen with {call})"


def _short(text: str) -> str:
    """The first line, up to the end of a sentence."""
    line = (text.strip().splitlines() or ["(no message)"])[0]
    return line if len(line) <= 200 else f"{line[:200].rpartition(' ')[0]} …"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}" if text.split()[0].isalpha() else text


def _of_the_read(call: Call, done: Loaded) -> str:
    """Why the last read was refused, if it was."""
    if not done.reads or "read(" not in (done.error.text if done.error else ""):
        return ""
    file, start, stop = done.reads[-1]
    if not 0 <= file < call.case.saved_by:
        return _no_such_file(call, done.reads[-1])
    return _outside(call, file, start, stop)


def _no_such_file(call: Call, read: Read) -> str:
    """Where the elements of the shard are."""
    needed = [file for file, _, _ in call.needed()]
    if not needed:
        return f", and rank {call.rank}'s shard is padding alone: nothing is to be read"
    if (read[1], read[0], read[2]) in call.needed():
        return ". The order of the arguments is read(file, start, stop)"
    where = " and ".join(str(each) for each in sorted({needed[0], needed[-1]}))
    return f", and the elements of rank {call.rank}'s shard begin and end in file {where}"


def _outside(call: Call, file: int, start: int, stop: int) -> str:
    """Why a call asks for elements that a file does not have, compared with those that it needs of it."""
    begins, saved = call.case.saved * file, call.case.saved
    right = max(call.first - begins, 0), min(call.last - begins, saved)
    if (start, file, stop) in call.needed():
        return ". The order of the arguments is read(file, start, stop)"
    if right[0] >= right[1]:
        return f", and rank {call.rank} needs nothing of file {file}"
    moved = lambda by: (right[0] + by, right[1] + by)
    if (stop, start) == right:
        return ". Start and stop are exchanged: read(file, start, stop)"
    if (start, stop) == moved(begins):
        return (
            f". {start} to {stop} is where they stand in the whole state: subtract {begins}, where file "
            f"{file} begins"
        )
    if (start, stop) == moved(begins - call.first):
        return f". {start} to {stop} is where they belong in your shard: count from the file's first element"
    if (max(start, 0), min(stop, saved)) == right:
        return ": cut both ends off there"
    if (start, stop) == (right[0], right[1] - right[0]):
        return f". {stop} is how many you need: pass stop, and not the length"
    return f", and rank {call.rank} needs {right[0]} to {right[1]} of file {file}"

"""Shorten the report of a hang to the reader's own lines."""

from zerolab import LaunchTimeout
from zerolab.course.messages import Place, own_place


def hang_report(error: LaunchTimeout) -> str:
    """Return what `launch` found at its deadline, with stacks that leave out the lines of torch and zerolab.

    ``str(error)`` has all of them, with the paths of files.
    """
    first, *parts = str(error).split("\n\n")
    said = [first]
    for rank in error.ranks or sorted(error.stacks):
        own = [str(Place(*frame)) for frame in reversed(error.stacks[rank]) if own_place([frame])]
        said.append(f"rank {rank}'s stack:\n  " + "\n  ".join(own or ["none of your lines"]))
    return "\n\n".join(said + [part for part in parts if "'s stack (" not in part])

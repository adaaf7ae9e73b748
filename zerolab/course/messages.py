"""What is known of a call on torch.distributed: which one, with whom, how large, from which line.

`zerolab.course.wire` records the calls, and the modules that explain a failure read them.
"""

import linecache
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import zerolab

_OURS = str(Path(zerolab.__file__).parent)
_TORCH, _PYTHON = Path(torch.__file__).parent, Path(linecache.__file__).parent
_WRAPPERS = _TORCH.with_name("typing_extensions")  # torch needs it, and wraps what is deprecated in it
_LIBRARIES = (_OURS, str(_TORCH), str(_PYTHON), str(_WRAPPERS), "<frozen", "<__")
_RECEIVES = {"recv_", "recv_any_source_"}
# What a rank sends on a ring for each byte that is noted. A reduce-scatter is noted by its result.
_SHARE: dict[str, Callable[[int], float]] = {
    "send": lambda n: 1,
    "allreduce_": lambda n: 2 * (n - 1) / n,
    "reduce_scatter_": lambda n: n - 1,
    "_reduce_scatter_base_": lambda n: n - 1,
}
RETURNED = "returned"  # the last note of a rank whose function came to its end


class Place(NamedTuple):
    """A line of the reader's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return f"line {self.line} of {self.function}" + (f": `{source}`" if source else "")


def own_place(places: Iterable[tuple[str, int, str]]) -> Place | None:
    """Return the first of the places, innermost first, that is neither torch's nor Python's nor zerolab's."""
    return next((Place(*place) for place in places if not place[0].startswith(_LIBRARIES)), None)


def place_in_ticket(places: Iterable[tuple[str, int, str]]) -> Place | None:
    """The first of the places in the code of a ticket of lesson 09, which the reader has before them."""
    of_tickets = (place for place in places if Path(place[0]).parent.name == "tickets")
    return next((Place(file, line, f"the ticket's {name}") for file, line, name in of_tickets), None)


class Message(NamedTuple):
    """One call on the process group: operation, the other rank (None for a collective), size, and who called.

    `call` is the function that the reader called, such as ``dist.all_reduce`` or ``ring.reduce_scatter``.
    `started`: the reader gets a handle to wait on. `waited`: on how many handles the reader waited before.
    `buffer`: where in memory the tensor is.
    `given`: whether it is the tensor that the function was given, or a slice of it; `changed`: and whether
    that had been written to by then. `recorded`: whether autograd recorded what was done to the tensor.
    `tag`: of a send or a receive. `functional`: whether it returns a new tensor.
    `content`: the numbers that were sent, where they are few. `early`: where the tensor was used although
    nothing had been waited for since the call.
    """

    op: str
    peer: int | None
    numel: int
    nbytes: int
    dtype: torch.dtype | None = None
    call: str = ""
    place: Place | None = None
    started: bool = False
    waited: int = 0
    buffer: int = 0
    given: bool = False
    changed: bool = False
    recorded: bool = False
    content: tuple[float, ...] | None = None
    early: Place | None = None
    tag: int = 0
    functional: bool = False

    @property
    def received(self) -> bool:
        return self.op in _RECEIVES

    @property
    def sent(self) -> bool:
        """Whether it sends a tensor: a barrier has none."""
        return self.op != "barrier" and not self.received

    @property
    def collective(self) -> bool:
        return self.sent and self.op != "send"


class Early(NamedTuple):
    """A note: the tensor of the call with this number was used at this place, before a wait."""

    number: int
    place: Place


Calls = Sequence[Sequence[Message]]
"""By rank: what it called."""
Notes = Sequence[Sequence[Message | int | str]]
"""By rank: what it called; if it came to its end, how often it waited on a handle, and RETURNED."""


def of_messages(notes: Notes) -> list[list[Message]]:
    """Return the calls alone."""
    return [[note for note in own if isinstance(note, Message)] for own in notes]


def last_place(notes: Notes, rank: int | None) -> Place | None:
    """Return the line of a rank's last call."""
    own = notes[rank] if rank is not None else []
    return next((note.place for note in reversed(own) if isinstance(note, Message)), None)


def at(place: object) -> str:
    """Return a line of the reader's code as an addition to a sentence."""
    return f" ({place})" if place else ""


def sent_bytes(messages: Iterable[Message], world_size: int) -> float:
    """Return the bytes that a rank sends for its messages, if each collective runs on a ring."""
    share = lambda op: _SHARE.get(op, lambda n: (n - 1) / n)(world_size)
    return sum(message.nbytes * share(message.op) for message in messages)


def read_trail(path: Path) -> list[Message | int | str]:
    """The notes of a rank, in order; a note that a dying rank began and did not end is left out."""
    notes: list[Message | int | str] = []
    if not path.exists():
        return notes
    with path.open("rb") as file:
        while True:
            try:
                note = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return notes
            if isinstance(note, Early):
                _mark(notes, note)
            else:
                notes.append(note)


def _mark(notes: list[Message | int | str], early: Early) -> None:
    """Note in a call that its tensor was used before a wait."""
    places = [place for place, note in enumerate(notes) if isinstance(note, Message)]
    call = notes[places[early.number]]
    if isinstance(call, Message):
        notes[places[early.number]] = call._replace(early=early.place)

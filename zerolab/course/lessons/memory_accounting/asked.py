"""Ask a reader's function for a number in every case, in a process of its own."""

import contextlib
import io
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TextIO

from zerolab.course.attempts import Odd, told
from zerolab.course.wording import shortened

Case = tuple


class Raised(NamedTuple):
    """What a function raised in a case, as a sentence of it."""

    said: str


Answer = float | Odd | Raised


class Asked(NamedTuple):
    """What a function returned, or raised, in every case.

    `used`: the function of zerolab that it may not call, or nothing. `printed`: whether it printed anything.
    """

    answers: dict[Case, Answer]
    used: str
    printed: bool


class _Heard(io.TextIOBase):
    """A stream that passes everything on, and knows whether there was anything."""

    def __init__(self, stream: TextIO):
        self.stream, self.anything = stream, False

    def write(self, text: str) -> int:
        self.anything = True
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()


def ask(
    fn: Callable, cases: Mapping[Case, str], forbidden: Collection[str], allowed: Collection[str]
) -> Asked:
    """In the worker: call fn with every case. One that raises does not end the others.

    Args: forbidden: modules whose functions fn may not call, other than those with the names in `allowed`.
    """
    answers: dict[Case, Answer] = {}
    heard = _Heard(sys.stdout)
    with contextlib.redirect_stdout(heard), _calls_of(forbidden, allowed) as used:
        for case, where in cases.items():
            try:
                answers[case] = _number(fn(*case))
            except Exception as error:
                answers[case] = _raised(error, where)
    return Asked(answers, next(iter(used), ""), heard.anything)


@contextlib.contextmanager
def _calls_of(modules: Collection[str], allowed: Collection[str]) -> Iterator[list[str]]:
    """The functions of these modules that other code calls inside, without those that are allowed."""
    used: list[str] = []
    of = lambda frame: frame.f_globals.get("__name__", "").startswith(tuple(modules))

    def note(frame, event, _):
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if event == "call" and of(frame) and not of(frame.f_back) and name not in ("<module>", *allowed):
            used.append(f"{module.removeprefix('zerolab.')}.{name}")

    sys.setprofile(note)
    try:
        yield used
    finally:
        sys.setprofile(None)


def _raised(error: Exception, where: str) -> Raised:
    found = told(error)
    text = (found.text.strip().splitlines() or [""])[0]
    place = f" ({found.place})" if found.place else ""
    return Raised(f"your function stopped with {found.kind}: {shortened(text, 300)}, with {where}{place}")


def _number(value: Any) -> float | Odd:
    if not isinstance(value, str | bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    return Odd(type(value).__name__, "" if value is None else shortened(repr(value)))

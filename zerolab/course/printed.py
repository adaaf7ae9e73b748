"""Show the first lines of what a reader's function prints, and leave out what is written for programmers."""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TextIO

LINES_SHOWN = 20  # of what one attempt prints


class Brief(io.TextIOBase):
    """A stream that passes on the first lines of what is written, and says once that it left out the rest."""

    def __init__(self, stream: TextIO, lines: int, characters: int = 4000):
        self.stream, self.lines, self.characters = stream, lines, characters
        self.used = False

    def write(self, text: str) -> int:
        self.used = True
        if self.lines > 0:
            shown = "".join(text[: self.characters].splitlines(keepends=True)[: self.lines])
            self.lines -= shown.count("\n")
            self.characters -= len(shown)
            if len(shown) < len(text) or self.lines <= 0:
                self.lines = 0
                shown += (
                    "" if shown.endswith("\n") else "\n"
                ) + "… (your function prints more; the rest is left out)\n"
            self.stream.write(shown)
        return len(text)

    def flush(self) -> None:
        self.stream.flush()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Show little of what ranks print, and nothing of stderr, where gloo and Python report to programmers."""
    with (
        contextlib.redirect_stdout(Brief(sys.stdout, LINES_SHOWN)),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield

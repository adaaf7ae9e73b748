"""Send prints from a rank to its launcher: rank 0's through pipes, live, the others' through files."""

import codecs
import io
import os
import sys

from zerolab.launcher.protocol import STDERR, STDOUT, path


def redirect_output(rank: int, directory: str, stdout: int, stderr: int) -> None:
    """Rank 0 writes to the launcher's pipes, the others to files that are shown when all is over."""
    sources = [os.open(os.devnull, os.O_RDONLY), stdout, stderr]
    if rank != 0:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        files = (path(directory, name, rank) for name in (STDOUT, STDERR))
        sources[1:] = [os.open(file, flags) for file in files]
    for target, source in enumerate(sources):
        os.dup2(source, target)
    for fd in {*sources, stdout, stderr} - {0, 1, 2}:
        os.close(fd)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class Relay:
    """Shows what a rank wrote in the stream of that name here, which in a notebook is no file."""

    def __init__(self, source: io.RawIOBase | io.BufferedReader, name: str) -> None:
        self.source, self.name = source, name
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.shown = "\n"

    def pass_on(self) -> bool:
        """Show what there is by now; False at the end of the source."""
        return self.show() != b""

    def drain(self, end_line: bool) -> None:
        """Show all that is there. ``end_line``: end a line that is left unfinished, as by a progress bar."""
        while self.show():
            pass
        if end_line and not self.shown.endswith(("\n", "\r")):
            self.write("\n")

    def show(self) -> bytes | None:
        """Show the next piece and return it: empty at the end, None where there is nothing yet."""
        data = self.source.read(65536)
        text = self.decoder.decode(data or b"", final=data == b"")
        if text:
            self.write(text)
        return data

    def write(self, text: str) -> None:
        """Show a text at once."""
        stream = getattr(sys, self.name)
        stream.write(text)
        stream.flush()
        self.shown = text

"""A script that asks the reader's function for owners in an interpreter of its own, and prints them.

It imports neither torch nor the lesson, so that it takes a tenth of a second.
"""

import contextlib
import io
import signal
import sys

from zerolab.launcher.payload import load_payload

SECONDS = 16  # then the process ends


def main() -> None:
    """Read a call from standard input; print what it returns for each of its arguments, a line for each."""
    signal.alarm(SECONDS)
    fn, asked, _ = load_payload(sys.stdin.buffer)
    with contextlib.redirect_stdout(io.StringIO()):
        plans = [list(map(int, fn(*each))) for each in asked]
    for plan in plans:
        print(*plan)


if __name__ == "__main__":
    main()

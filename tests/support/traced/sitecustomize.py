"""Note which functions of zerolab each test calls, in every process of the test.

Python imports a module of this name at its start, so the processes that tests start have it too. It is a
plugin of pytest as well. `support.reached` uses both.
"""

import os
import sys
import threading
from contextlib import suppress

_called: set[int] = set()
"""The ids of the code objects that were called in this test."""


def _write(*fields: object) -> None:
    line = "\t".join(map(str, (*fields, "end"))) + "\n"
    path = os.path.join(os.environ["ZEROLAB_REACHED"], str(os.getpid()))
    with suppress(OSError), open(path, "a") as file:  # a test may limit the size of files
        file.write(line)


def _note(frame, event: str, argument: object) -> None:
    code = frame.f_code
    if id(code) in _called:
        return
    _called.add(id(code))
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if test and "/zerolab/" in code.co_filename:
        _write("called", test, code.co_filename.rpartition("/zerolab/")[2], code.co_firstlineno)


def pytest_runtest_logstart(nodeid: str, location: tuple) -> None:
    _called.clear()


def pytest_runtest_logreport(report) -> None:
    _write("took", report.nodeid, report.when, report.duration)


if "ZEROLAB_REACHED" in os.environ:
    os.register_at_fork(after_in_child=_called.clear)
    threading.settrace(_note)
    sys.settrace(_note)

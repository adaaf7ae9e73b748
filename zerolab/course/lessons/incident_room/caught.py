"""Lesson 09: which asserts of the reader's test fail, also where the test catches the error itself."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

from zerolab.course.messages import own_place


@contextmanager
def failed_asserts() -> Iterator[list[str]]:
    """The places in the reader's code at which an AssertionError was raised inside the with block."""
    places: list[str] = []
    of_reader = cache(lambda file: own_place([(file, 0, "")]) is not None)

    def in_frame(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "exception" and issubclass(arg[0], AssertionError):
            places.append(str(own_place([(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)])))
        return in_frame

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        return in_frame if of_reader(frame.f_code.co_filename) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield places
    finally:
        sys.settrace(before)

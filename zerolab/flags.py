"""Types of the command line's flags: each converts an argument, or raises an error with what is accepted.

A value is checked before a rank starts, and not at the end of a long training.
"""

import importlib.util
import math
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from zerolab.checkpoint import generations


def at_least(least: int, kind: type = int) -> Callable[[str], float]:
    """A flag's type: a finite number of at least `least`, and below 2**63, as torch wants its seeds."""

    def parse(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not least <= number < 2**63:
            noun = "whole number" if kind is int else "number"
            raise ArgumentTypeError(f"{text!r}: pass a {noun} of {least} or more, and below 2**63")
        return number

    return parse


def writable(text: str) -> Path:
    """A flag's type: a file that can be written, checked now and not at the end of a long training."""
    path = Path(text).resolve()
    taken = path.exists() and not path.is_file()  # a directory, or a device that must not be replaced
    if taken or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ArgumentTypeError(f"{text!r} must be a file in a directory that exists and can be written")
    return path


def folder(text: str) -> Path:
    """A flag's type: a folder that can be written, or made, with those it is to be in."""
    path = Path(text).resolve()
    nearest = next(each for each in (path, *path.parents) if each.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ArgumentTypeError(f"{text!r} must be a folder that can be written, or made")
    return path


def log_file(text: str) -> Path:
    """A flag's type: a file that can be written, in a folder that is there or can be made."""
    path = Path(text).resolve()
    folder(str(path.parent))
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        raise ArgumentTypeError(f"{text!r} must be a file that can be written")
    return path


def tensorboard_folder(text: str) -> Path:
    """A flag's type: a folder for TensorBoard, whose package torch's writer needs."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ArgumentTypeError(
            f"the package tensorboard is missing: {sys.executable} -m pip install tensorboard"
        )
    return folder(text)


def saved(text: str) -> Path:
    """A flag's type: a folder with a checkpoint in it."""
    try:
        generations.find(Path(text).resolve())
    except OSError as error:
        raise ArgumentTypeError(str(error)) from None
    return Path(text).resolve()

"""Warnings that name the line of the user's program, however deep in the package they are raised."""

import sys
import warnings
from types import FrameType


def warn_user(message: str) -> None:
    """Warn at the nearest line outside this package, PyTorch and the context managers of the library."""
    frame: FrameType | None = sys._getframe(1)
    level = 2  # 1 would be the line below
    while frame is not None and _package_of(frame) in ("zerolab", "torch", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _package_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]

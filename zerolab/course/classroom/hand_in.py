"""Record, in the kernel of a graded notebook, what a reader handed over.

The grader puts a call of this module below each cell that calls a check, predict or answer.
"""

import json
import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerolab.launcher.payload import dumps


def hand_in(folder: str, number: int, kind: str, value_of: Callable[[], Any]) -> None:
    """Write the value into the folder as NUMBER.ok, or why that is not possible as NUMBER.error."""
    path = Path(folder, str(number))
    try:
        value = value_of()
        data = _with_source(value) if kind == "exercise" else json.dumps(_plain(value)).encode()
    except Exception as error:
        path.with_suffix(".error").write_text(f"{type(error).__name__}: {error}"[:500], "utf-8")
    else:
        path.with_suffix(".ok").write_bytes(data)


def _with_source(value: Any) -> bytes:
    """Return the object, with the lines of the cells, so that a check can quote them."""
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    return dumps((cells, value))


def _plain(value: Any) -> Any:
    """Return a guess or letters as JSON has them: None for `...`, and text for what is neither."""
    if value is ... or value is None:
        return None
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value[:100]]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)[:200]
    return float(value) if abs(value) < float("inf") else str(value)

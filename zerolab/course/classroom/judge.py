"""Call a lesson's check, in a process of its own, with an object from a notebook.

    python -m zerolab.course.classroom.judge LESSON CHECK OBJECT RESULT

The check is imported before the object is loaded, in a process in which no cell of the notebook ran.
"""

import importlib
import json
import linecache
import pickle
import sys
from pathlib import Path


def main(lesson: str, name: str, handed_in: str, result: str) -> None:
    """Write the check's Result as JSON."""
    check = getattr(importlib.import_module(f"zerolab.course.lessons.{lesson}"), name)
    cells, answer = pickle.loads(Path(handed_in).read_bytes())
    linecache.cache.update(cells)
    Path(result).write_text(json.dumps(check(answer).to_dict()), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

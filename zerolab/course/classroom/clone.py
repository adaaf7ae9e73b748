"""Find the lessons: their notebooks in the clone, and their folders in the package."""

import importlib
from pathlib import Path
from types import ModuleType

import zerolab
from zerolab.course.questions import Prediction

NOTEBOOKS = Path(zerolab.__file__).parents[1] / "notebooks"
ROOMS = "zerolab.course.lessons."


def lesson_paths() -> dict[str, Path]:
    """Return the lessons' notebooks in this clone, by the lesson's name.

    Raises: ValueError where there are none.
    """
    paths = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    if not paths:
        raise ValueError(f"{NOTEBOOKS} holds no lesson: clone the repository, and use the ./zero in it")
    return {path.stem.partition("_")[2]: path for path in paths}


def room(name: str) -> ModuleType:
    """Return the package of a lesson, which has its checks."""
    return importlib.import_module(f"{ROOMS}{name}")


def quiz(name: str) -> ModuleType:
    """Return the module of a lesson that has its questions and predictions."""
    return importlib.import_module(f"{ROOMS}{name}.quiz")


def predictions(name: str) -> int:
    """Return how many numbers a lesson lets the reader guess."""
    made = [getattr(each, "__annotations__", {}).get("return") for each in vars(quiz(name)).values()]
    found = [each for each in vars(quiz(name)).values() if isinstance(each, Prediction)]
    return len(found) + made.count(Prediction)


def checks(name: str) -> list[str]:
    """Return the names of a lesson's checks."""
    return [each for each in room(name).__all__ if each.startswith("check_")]

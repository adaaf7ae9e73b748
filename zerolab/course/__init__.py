"""Tools of the notebooks: figures, sliders, predictions, quizzes, live source, exercises, lessons.

Nothing in the engine imports this package. Names load on first use, because the checks run in worker
processes that have no use for IPython and widgets.

How a lesson is made
--------------------
1. ``zerolab/course/lessons/NAME/``: a folder with ``__init__.py``, which exports the check, and with
   ``figures.py``, ``check.py``, ``solution.py`` and ``quiz.py``, those that the lesson needs.
2. ``notebooks/source/NN_NAME.py``, a jupytext percent script of ``# %% [markdown]`` and ``# %%`` cells, all
   imports in the first code cell, at most 15 lines in a code cell. ``python notebooks/build.py NN_NAME`` adds
   badges and a bootstrap cell, runs it and writes ``notebooks/NN_NAME.ipynb`` with its outputs. It refuses
   errors, anything on stderr, absolute paths and images without alt text.
3. A row of the README's table.

Nothing else lists the lessons: the builder and the tests look into these folders. What is special about a
lesson is tested in ``tests/course/test_NAME.py``. nbval compares the outputs on other machines, so a lesson
prints what is true everywhere ("bit-identical: True", bytes, shapes), never a time, a path or a device.

What a lesson uses
------------------
``predict(my_guess, answer, quiz.NAME, *measured)``
    Compare the reader's number with the right one, and name the mistake behind a known wrong one. The
    lesson's ``quiz.py`` holds the mistakes. Measured lines that give the answer away go into ``measured``:
    they are folded until there is a guess. In the committed notebook the guess is ``...``.
``answer(my_answers, quiz.QUESTIONS)``
    Ask the lesson's five questions, with a button for each answer, and in text where a page has no buttons.
``figure(height)`` and ``show(figure, alt)``
    An empty figure of matplotlib, and its display as SVG. The cell draws the data with ``ax.plot`` and
    ``ax.barh``, so that a reader can change it. Whatever has a ``label`` gets a legend. ``look`` holds the
    settings and the colours.
``explore(draw, height=3, **controls)``
    The same with sliders (``slider``, ``choice``, ``number``): ``draw(figure, **values)`` draws on an empty
    figure and returns its alt text. A lesson's ``figures.py`` holds its diagrams, which show no data.
``show_source(function)`` and ``show_diff(module_a, module_b)``
    The live source of the package, never a copy in the notebook.
``timeline.draw(axes, ranks)``
    A step in time, of what ``optimizer.trace.timeline()`` returned on each rank.
``zerolab.device()`` and ``zerolab.parity.compute_deterministically()``
    What ranks train is built on their device, so a lesson runs unchanged on GPUs. The single process of a
    comparison is launched like a rank: device and threads decide the last bits.
``hang_report(error)``
    What `zerolab.launch` reports at its deadline, with the lines of the reader alone, and no path.
``verify_on_gpus(stage)``
    The same promise over NCCL, where there is a GPU. The cell has the tag ``nbval-ignore-output``.
``progress(title, model_fn)``
    For `zerolab.rehearse`: a line that says how far it is. The cell has the tag ``nbval-ignore-output``.
``check_THING(solution)``
    Made by ``@graded`` of a function that names the mistake in a solution: `examine` runs it in several cases
    (`attempt`) and finds the known mistake that explains what came back. A mistake is one entry of the
    check's ``MISTAKES``: a sentence, and the values that it leads to. It returns a `Result`. The exercise's
    cell begins with ``# Exercise`` and ends with the call of the check. ``check_THING.hint(1)`` to
    ``hint(3)`` and ``check_THING.solution()`` print what ``check.py`` and ``solution.py`` hold, so that none
    stands in view.
``bronze``, ``silver`` and ``Peak``
    What a check returns of a right solution that can still be better: see targets.py. ``Peak`` counts the
    bytes of tensors that a solution holds at once.
``my_progress()``
    What the reader has done of each lesson. `check_THING`, `predict` and `answer` record it on this machine.
"""

import importlib
import logging
import os

_said: set[str] = set()


def _once(record: logging.LogRecord) -> bool:
    """Let `launch` say once in a lesson which backend it has chosen and why.

    With ``ZEROLAB_BACKEND_LINE=off`` it never does: where outputs are compared, they are the same everywhere.
    """
    new = record.msg not in _said and os.environ.get("ZEROLAB_BACKEND_LINE") != "off"
    _said.add(record.msg)
    return new


logging.getLogger("zerolab").addFilter(_once)

_NAMES_IN = {
    "questions": ("predict",),
    "quizzes": ("answer",),
    "look": ("figure", "show"),
    "sliders": ("explore", "slider", "choice", "number"),
    "source": ("show_source", "show_diff"),
    "attempts": ("attempt",),
    "gpus": ("verify_on_gpus",),
    "hangs": ("hang_report",),
    "rehearsing": ("progress",),
    "classroom.progress_page": ("my_progress",),
}

__all__ = [name for names in _NAMES_IN.values() for name in names]


def __getattr__(name: str):
    for module, names in _NAMES_IN.items():
        if name in names:
            return getattr(importlib.import_module(f"zerolab.course.{module}"), name)
    raise AttributeError(f"module 'zerolab.course' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)

"""What only the notebooks need: figures, sliders, predictions, quizzes, live source, exercises, checks.

Nothing in the engine imports this package. Names load on first use, because the checks run in worker
processes that have no use for IPython and widgets.

How a lesson is made
--------------------
1. Write ``notebooks/source/NN_name.py``, a jupytext percent script of ``# %% [markdown]`` and ``# %%``
   cells, all imports in the first code cell. The badges and the bootstrap cell are not in it: the build
   stamps them after the title. Code cells have at most 15 lines; about 7 is typical.
2. ``python notebooks/build.py NN_name`` turns it into ``notebooks/NN_name.ipynb``, runs it and keeps the
   outputs. It refuses errors, anything on stderr, absolute paths and images without alt text.
   ``--stamp`` restamps badges and bootstrap without running.
3. nbval compares the outputs on other machines, so print only what is true everywhere, such as
   "bit-identical: True", bytes and shapes; never a time, a path, a device or the order of a set.

What a lesson uses
------------------
``predict(my_guess, answer, "GB", {"a classic mistake": its_value})``
    How far off the reader was, and which mistake a known wrong number comes from. ``my_guess = ...``
    stays unanswered in the committed notebook, which then prints the answer and the known mistakes.
``quiz("name", my_answer)``
    The same for a question with letters. The question and what its letters say stand in markdown above; the
    right letter and the reasons in ``questions.py``, so that nobody reads the answer with the question. With
    ``my_answer = ...`` the reasons are folded away in the output.
``show(draw, height=3, **values)`` and ``explore(draw, height=3, **controls)``
    ``draw(sketch, **values)`` draws on an empty ``Sketch`` and returns its alt text. ``show``
    displays it once; ``explore`` puts controls above it (``slider(low, high, value)`` or
    ``choice(options, value)``), shows the default state as a plain image, and redraws it in place.
    Drawings live in ``zerolab/course/figures/``, one module per lesson; colours in ``look``.
``show_source(function)`` and ``show_diff(module_a, module_b)``
    The live source of the package, never a copy in the notebook.
``from zerolab.course.checks.NAME import check_THING``
    Runs the reader's function on real ranks (``attempt`` brings values, messages and time-outs home as one
    ``Attempt``) and names the one mistake that explains what came back. The exercise cell is committed
    with its stub, marked by a ``# Exercise`` comment; the solution is the ```` ```python ```` block in a
    ``<details>`` of the next markdown cell. ``tests/course/test_course.py`` runs that block through the
    check, and feeds the check every classic wrong solution.
"""

import importlib

_HOMES = {
    "predict": "quizzes",
    "quiz": "quizzes",
    "show": "look",
    "CATEGORY_COLOURS": "look",
    "rank_colour": "look",
    "explore": "sliders",
    "slider": "sliders",
    "choice": "sliders",
    "show_source": "source",
    "show_diff": "source",
    "attempt": "exercise",
    "report": "exercise",
}

__all__ = list(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"zerolab.course.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'zerolab.course' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)

"""An exercise: a check that names the mistake, hints one at a time, and a solution on request."""

import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zerolab.course.attempts import quiet
from zerolab.course.classroom.record import remember
from zerolab.course.targets import Reached
from zerolab.course.wording import ended, sentences

Diagnose = Callable[[Any], str | None]


@dataclass(frozen=True)
class Result:
    """What a check found: true where the solution passed.

    A notebook shows nothing for it as a cell's last value, because the check has printed the message.
    """

    check: str
    passed: bool
    message: str

    def __bool__(self) -> bool:
        return self.passed

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain values, for JSON."""
        return asdict(self)

    def _ipython_display_(self) -> None:
        """Display nothing."""


def graded(
    passed: str, call: str | None = "", hints: Sequence[str] = (), solution: Sequence[Callable] = ()
) -> Callable[[Diagnose], Callable[[Any], Result]]:
    """Turn a function that diagnoses a solution into a check that prints `passed` or the mistake.

    A diagnosis is the sentence that names the mistake, or None, or a target that a right solution has
    `Reached`. `call` is how the check calls the reader's function, such as ``average(own)``, or None where
    the answer is no function. The check has its diagnosis as ``diagnose``, and ``hint(number)`` and
    ``solution()`` for the reader.
    """

    def checked_by(diagnose: Diagnose) -> Callable[[Any], Result]:
        def mistake_of(answer: Any) -> str | None:
            uncallable = None if call is None else cannot_call(answer, call, diagnose.__name__)
            return uncallable or diagnose(answer)

        @functools.wraps(diagnose)
        def check(answer: Any) -> Result:
            try:
                with quiet():
                    mistake = mistake_of(answer)
            except Exception as error:  # the reader is not to blame for what a check did not foresee
                mistake = f"this check has a bug and cannot judge your answer: {error!r}"
            right = mistake is None or isinstance(mistake, Reached)
            message = passed if mistake is None else ended(sentences(mistake))
            print(f"{'✓' if right else '✗'} {message}")
            remember(diagnose.__module__, "exercise", diagnose.__name__, right)
            return Result(diagnose.__name__, right, message)

        def hint(number: int = 1) -> None:
            """Print one of the hints; they begin with 1, and each says more than the one before."""
            if type(number) is not int or number not in range(1, len(hints) + 1):
                raise ValueError(f"there is no hint {number!r}: {diagnose.__name__} has 1 to {len(hints)}")
            print(f"Hint {number} of {len(hints)}: {hints[number - 1]}")

        def show_solution() -> None:
            """Print a solution. It passes the check; others do, too."""
            print(solution_text(solution))

        vars(check).update(diagnose=mistake_of, hint=hint, solution=show_solution, source=solution)
        return check

    return checked_by


def solution_text(parts: Sequence[Callable]) -> str:
    """Return the source of a solution, as it could stand in the exercise's cell."""
    return "\n\n\n".join(textwrap.dedent(inspect.getsource(part)).strip() for part in parts)


def cannot_call(answer: Any, call: str, check: str) -> str | None:
    """Return why `answer` cannot be called as `call`, or None if it can."""
    name, _, arguments = call.rstrip(")").partition("(")
    if not callable(answer):
        return (
            f"the check needs a function, and got a value of type {type(answer).__name__}: write "
            f"{check}({name or 'my_function'}), with the function's name and no parentheses after it"
        )
    kind = "async def" if inspect.iscoroutinefunction(answer) else "a generator (it has a yield)"
    if inspect.iscoroutinefunction(answer) or inspect.isgeneratorfunction(answer):
        return f"your function is {kind}, which does not run when it is called: use def and return"
    if not call:
        return None
    try:
        inspect.signature(answer).bind(*filter(None, arguments.split(", ")))
    except TypeError as error:
        return f"your function is called as {call}, and that does not fit yours: {error}"
    except ValueError:  # it has no signature that Python knows
        return None
    return None

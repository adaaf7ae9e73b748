"""Lesson 09's checks: each runs a repaired engine on ranks, and says what is still wrong with it.

Values are compared with one process, bytes with the ledger, and memory with what the engine keeps alive.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch

from zerolab.course.attempts import attempt
from zerolab.course.evidence import Finding, examine
from zerolab.course.exercise import graded
from zerolab.course.lessons.incident_room.lockstep import COMMON, Tensors, trained
from zerolab.course.lessons.incident_room.room import PSI, Case, Seen, one_thread, start, train

CASES = (Case(3), Case(2), Case(4))


@dataclass(frozen=True)
class Ticket:
    """What a check has to know of a ticket beyond the engines.

    Attributes:
        broken: the engine as it was found.
        real: which real engine had the fault, with its public thread; the check says it at the end.
        hints: three of them.
        cases: to run it with.
        right: where the ranks should end.
        mistakes: by sentence, where they end instead.
        cost: what is wrong although the values are right, from the case and what the ranks ended with.
        gathers: whether its parameters are read with `gather()`, because no rank has them whole.
        memory: whether `cost` looks at what the engine keeps.
    """

    broken: type
    real: str
    hints: Sequence[str]
    cases: Sequence[Case] = CASES
    right: Callable[[Case], Tensors] = trained
    mistakes: Mapping[str, Callable[[Case], Tensors]] = field(default_factory=dict)
    cost: Callable[[Case, Sequence[Seen]], str | None] = lambda case, ended: too_dear(case, ended)
    gathers: bool = False
    memory: bool = False

    def check(self, number: int, solution: Sequence[Callable]) -> Callable:
        """The ticket's check, for the reader."""
        first = "parameters" if self.cases[0].by_name else "flat"

        def diagnose(engine: Callable) -> str | None:
            if not _changed(engine, self.broken):
                return f"not written yet: that is {self.broken.__name__} as it was. Override what is wrong"
            return examine(self.cases, partial(look, self, engine))

        diagnose.__name__, diagnose.__qualname__ = f"check_{number}", f"check_{number}"
        diagnose.__doc__ = (
            f"Run the repaired engine of ticket {number} on ranks, and say what is still wrong."
        )
        passed = f"Ticket {number} is closed. {self.real}"
        return graded(passed, f"Repaired({first}, lr)", self.hints, solution)(diagnose)


def _changed(engine: Callable, broken: type) -> bool:
    """Whether any method of the engine is not that of the broken one."""
    if not isinstance(engine, type) or not issubclass(engine, broken):
        return True
    own = [vars(each) for each in engine.__mro__[: engine.__mro__.index(broken)]]
    return any(not name.startswith("__") or name == "__init__" for names in own for name in names)


def look(ticket: Ticket, engine: Callable, case: Case) -> Finding:
    """Run the job with the engine, and compare what the ranks end with."""
    how = (ticket.gathers, ticket.memory)
    outcome = attempt(train, [(engine, case, rank, None, *how) for rank in range(case.ranks)])
    if case.resumed_on and not outcome.failure:
        again = outcome.values[0].flat, [ended.saved for ended in outcome.values]
        outcome = attempt(train, [(engine, case, rank, again, *how) for rank in range(case.resumed_on)])
    where = str(case)
    if outcome.failure or outcome.engine:
        own = "that uses zerolab's own ZeroOptimizer: repair this engine"
        return Finding(where, outcome.failure or own)
    seen = [ended.flat for ended in outcome.values]
    alike = all(torch.equal(flat, seen[0]) for flat in seen)
    others = {why: ends for why, ends in COMMON.items() if ends not in ticket.mistakes.values()}
    right = _end(ticket.right, case)
    told = any(map(_differ, seen, right)) and not case.resumed_on
    return Finding(
        where,
        seen=seen,
        right=right,
        mistakes={why: _end(ends, case) for why, ends in {**ticket.mistakes, **others}.items()},
        cost=ticket.cost(case, outcome.values),
        also=None if alike else "the ranks end with different parameters",
        cause=_first_update(ticket, case, outcome.values[0]) if told else None,
    )


@cache
def _end(ends: Callable[[Case], Tensors], case: Case) -> Tensors:
    """Where the ranks end; computed once, because a reader checks more than one repair."""
    with one_thread():
        return ends(case)


def _first_update(ticket: Ticket, case: Case, ended: Seen) -> str | None:
    """What rank 0's first update tells, where no known mistake explains the values."""
    before = start()
    if ended.first.shape != before.shape or not ended.flat.isfinite().all():
        return None
    got, want = ended.first - before, _end(ticket.right, case._replace(steps=1))[0] - before
    factor = float(got @ want / (want @ want))
    if torch.allclose(got, want, rtol=1e-6, atol=1e-9):
        return "the first step is right, and a later one is not: what is left over from step to step?"
    if torch.allclose(got, factor * want, rtol=1e-6, atol=1e-9):
        return f"the first update is {factor:.3g} times the right one: what scales the gradient?"
    wrong = (~torch.isclose(got, want, rtol=1e-6, atol=1e-9)).nonzero().flatten()
    return (
        f"{len(wrong)} of {len(want)} elements are wrong after the first update, from {int(wrong[0])} to "
        f"{int(wrong[-1])}, and no known mistake explains it: follow one of them through the four verbs"
    )


def _differ(seen: torch.Tensor, right: torch.Tensor) -> bool:
    return seen.shape != right.shape or not torch.allclose(seen, right, rtol=1e-9, atol=1e-12)


def too_dear(case: Case, ended: Sequence[Seen], passes: float = 2) -> str | None:
    """What is wrong with right values of stage 1: too many bytes, or optimizer state that is not sharded."""
    passes += case.micro_batches - 1
    return unsharded(case, ended) or too_much_sent(ended, passes)


def unsharded(case: Case, ended: Sequence[Seen]) -> str | None:
    """Whether a rank holds more of the momentum than its shard."""
    share = -(-PSI // len(ended))
    for rank, each in enumerate(ended):
        if each.state > share + 8:
            return (
                f"the values are right, but rank {rank} holds {each.state} elements of momentum, and its "
                f"share is {share}: the optimizer state is not sharded any more"
            )
    return None


def too_much_sent(ended: Sequence[Seen], passes: float) -> str | None:
    """Whether a rank moves more than so many Ψ a step. Counts and norms are small, and allowed."""
    for rank, each in enumerate(ended):
        if each.passes[-1] > passes + 0.3:
            return (
                f"the values are right, but rank {rank} moves {each.passes[-1]:.1f}Ψ a step, and "
                f"{passes:.0f}Ψ are enough"
            )
    return None

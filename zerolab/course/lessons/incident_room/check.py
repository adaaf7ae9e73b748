"""Lesson 09's checks: each runs a repaired engine on ranks, and says what is still wrong with it.

Values are compared with one process, bytes with the ledger, and memory with what the engine keeps alive.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from zerolab.course.attempts import Attempt, attempt
from zerolab.course.evidence import Finding, examine
from zerolab.course.exercise import graded
from zerolab.course.lessons.incident_room.common import common
from zerolab.course.lessons.incident_room.lockstep import Tensors, trained
from zerolab.course.lessons.incident_room.readings import updates_told
from zerolab.course.lessons.incident_room.resumes import Owned, momentum_told, none_saved
from zerolab.course.lessons.incident_room.room import LR, PSI, Case, one_thread
from zerolab.course.lessons.incident_room.runs import Seen, train

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
        stopped: what ranks that did not come to their end tell of this ticket.
        owned: which elements of the momentum each shard has, where a momentum is loaded.
    """

    broken: type
    real: str
    hints: Sequence[str]
    cases: Sequence[Case] = CASES
    right: Callable[[Case], Tensors] = trained
    mistakes: Mapping[str, Callable[[Case], Tensors]] = field(default_factory=dict)
    cost: Callable[[Case, Sequence[Seen]], str | None] = lambda case, ended: costs_too_much(case, ended)
    gathers: bool = False
    memory: bool = False
    stopped: Callable[[Case, Attempt], str | None] = lambda case, outcome: None
    owned: Owned | None = None

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
    how, files = (ticket.gathers, ticket.memory), []
    outcome = attempt(train, [(engine, case, rank, None, *how) for rank in range(case.ranks)])
    if case.resumed_on and not outcome.failure:
        files = [ended.saved for ended in outcome.values]
        again = outcome.values[0].flat, files
        outcome = attempt(train, [(engine, case, rank, again, *how) for rank in range(case.resumed_on)])
    where = str(case)
    if outcome.failure or outcome.engine:
        own = "that uses zerolab's own ZeroOptimizer: repair this engine"
        return Finding(where, none_saved(outcome, files) or _stopped(ticket, engine, case, outcome) or own)
    seen = [ended.flat for ended in outcome.values]
    alike = all(torch.equal(flat, seen[0]) for flat in seen)
    others = {why: ends for why, ends in common(case).items() if ends not in ticket.mistakes.values()}
    right = _end(ticket.right, case)
    return Finding(
        where,
        seen=seen,
        right=right,
        mistakes={why: _end(ends, case) for why, ends in {**ticket.mistakes, **others}.items()},
        cost=other_rate(case, outcome.values) or ticket.cost(case, outcome.values),
        also=None if alike else "the ranks end with different parameters",
        cause=_of_updates(ticket, case, outcome.values),
        told=_of_momentum(ticket, case, outcome.values, files),
    )


def _stopped(ticket: Ticket, engine: Any, case: Case, outcome: Attempt) -> str | None:
    """Why the ranks did not come to their end; an error in the ticket's code comes with the reader's."""
    if not outcome.failure or (said := ticket.stopped(case, outcome)):
        return said if outcome.failure else None
    own = _of_own_methods(engine, ticket.broken)
    yours = f" (you wrote {own})" if own else ""
    if sizes := re.search(r"gradient of size '\[(\d+)\]' to a tensor of size '\[(\d+)\]'", outcome.failure):
        return (
            f"the shard has {sizes[2]} elements, and the gradient that it gets has {sizes[1]}: cut and "
            "reduce do not agree on which slice of flat is the rank's. ring.reduce_scatter leaves the one of "
            f"ring.chunks(numel, world_size)[rank], of {sizes[1]} here{yours}"
        )
    if "of the ticket's" not in outcome.failure:
        return outcome.failure
    if sizes := re.search(r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\)", outcome.failure):
        whole = f", and {PSI} are all of them" if str(PSI) in sizes.groups() else ""
        return (
            f"a tensor of {sizes[1]} elements meets one of {sizes[2]}{whole}: parameters, gradient and "
            f"momentum of a shard are equally long, those of this rank's slice{yours} ({outcome.failure})"
        )
    return f"{outcome.failure}{yours}"


@cache
def _end(ends: Callable[[Case], Tensors], case: Case) -> Tensors:
    """Where the ranks end; computed once, because a reader checks more than one repair."""
    with one_thread():
        return ends(case)


def _of_updates(ticket: Ticket, case: Case, ended: Sequence[Seen]) -> str | None:
    """What the updates of the first wrong rank tell."""
    if case.resumed_on:
        return None
    right = _end(ticket.right, case)
    wrong = [each for each, want in zip(ended, right, strict=True) if _differ(each.flat, want)]
    return updates_told(case, wrong[0].after, partial(_end, ticket.right)) if wrong else None


def _of_momentum(ticket: Ticket, case: Case, ended: Sequence[Seen], files: Sequence[Any]) -> str | None:
    """What is wrong with the momentum that the ranks loaded."""
    if not case.resumed_on or ticket.owned is None:
        return None
    return momentum_told(case, ticket.owned, [each.loaded for each in ended], files)


def _of_own_methods(engine: Any, broken: type) -> str:
    """The reader's methods and their lines, for an error that shows in a method of the ticket's engine."""
    own = [
        (each.__code__.co_firstlineno, name)
        for name, each in vars(engine).items()
        if inspect.isfunction(each) and isinstance(engine, type) and issubclass(engine, broken)
    ]
    return ", ".join(f"`{name}` in line {line}" for line, name in sorted(own))


def _differ(seen: torch.Tensor, right: torch.Tensor) -> bool:
    return seen.shape != right.shape or not torch.allclose(seen, right, rtol=1e-9, atol=1e-12)


def costs_too_much(case: Case, ended: Sequence[Seen], passes: float = 2) -> str | None:
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
            calls = {call: sent for call, sent in each.calls.items() if sent > 0.1}
            listed = ", ".join(f"{sent:.1f}Ψ in {call}" for call, sent in calls.items())
            return (
                f"the values are right, but rank {rank} moves {each.passes[-1]:.1f}Ψ a step ({listed}), and "
                f"{passes:.0f}Ψ are enough{_why_more(calls)}"
            )
    return None


def _why_more(calls: Mapping[str, float]) -> str:
    """What the functions that sent tell: gradients or parameters all-reduced, or gathered more than once."""
    if any("all_reduce" in call for call in calls):
        reduces = any("reduce_scatter" in call for call in calls)
        whole = "parameters" if reduces else "gradients"
        better = "all-gather" if reduces else "reduce-scatter"
        return (
            f". An all-reduce of the {whole} moves 2Ψ, because every rank gets the whole sum. Each rank has "
            f"or needs its shard alone, so {better} them: Ψ"
        )
    gathers = sum(sent for call, sent in calls.items() if "all_gather" in call)
    more = f". {gathers:.0f}Ψ are gathered, where a gather of the parameters alone, once in a step, is Ψ"
    return more * (gathers > 1.3)


def other_rate(case: Case, ended: Sequence[Seen]) -> str | None:
    """Whether right values come from another learning rate than the engine was given."""
    sizes = {"N": case.ranks, "M": case.micro_batches}
    for rank, each in enumerate(ended):
        for factor in (rate / LR for rate in each.rates if abs(rate / LR - 1) > 1e-9):
            names = [name for name, size in sizes.items() if size > 1 and abs(factor - size) < 1e-9]
            return (
                f"the values are right, but rank {rank}'s optimizer has the learning rate {factor * LR:.3g}, "
                f"{' or '.join(names) or f'{factor:.3g}'} times the {LR:.3g} that the engine was given. The "
                "gradient is still scaled wrongly, and the rate makes up for it. Adam, clipping and weight "
                "decay would see the wrong gradient: mend the gradient, and leave the rate as it is"
            )
    return None

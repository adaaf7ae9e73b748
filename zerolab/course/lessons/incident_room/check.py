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

from zerolab import ring
from zerolab.course.attempts import Attempt, attempt
from zerolab.course.evidence import Finding, examine, same
from zerolab.course.exercise import graded
from zerolab.course.lessons.incident_room.common import common
from zerolab.course.lessons.incident_room.costs import costs_too_much, other_rate
from zerolab.course.lessons.incident_room.loaded import Owned
from zerolab.course.lessons.incident_room.loaded.told import momentum_told
from zerolab.course.lessons.incident_room.lockstep import Tensors, trained
from zerolab.course.lessons.incident_room.resumes import before_resume, none_saved
from zerolab.course.lessons.incident_room.room import NAMES, PSI, Case, one_thread
from zerolab.course.lessons.incident_room.runs import Seen, train
from zerolab.course.lessons.incident_room.updates import updates_told

CASES = (Case(3), Case(2), Case(4, micro_batches=2))


@dataclass(frozen=True)
class Ticket:
    """What a check has to know of a ticket beyond the engines.

    Attributes:
        broken: the engine as it was found.
        real: which real engine had the fault, with its public thread; the check says it at the end.
        hints: three of them.
        cases: to run it with.
        right: where the ranks should end.
        also_right: where they may end, too.
        mistakes: by sentence, where they end instead.
        cost: what is wrong although the values are right, from the case and what the ranks ended with.
        saving: the same of `save`, from the ranks before the resume.
        gathers: whether its parameters are read with `gather()`, because no rank has them whole.
        memory: whether `cost` looks at what the engine keeps.
        stopped: what ranks that did not come to their end tell of this ticket.
        owned: which elements of the momentum each shard has, where a momentum is loaded.
        max_norm: the norm that gradients are clipped to, where they are.
        last: what is looked at when all cases are right.
    """

    broken: type
    real: str
    hints: Sequence[str]
    cases: Sequence[Case] = CASES
    right: Callable[[Case], Tensors] = trained
    also_right: Callable[[Case], Tensors] | None = None
    mistakes: Mapping[str, Callable[[Case], Tensors]] = field(default_factory=dict)
    cost: Callable[[Case, Sequence[Seen]], str | None] = lambda case, ended: costs_too_much(case, ended)
    saving: Callable[[Sequence[Seen]], str | None] = lambda before: None
    gathers: bool = False
    memory: bool = False
    stopped: Callable[[Case, Attempt], str | None] = lambda case, outcome: None
    owned: Owned | None = None
    max_norm: float | None = None
    last: Callable[[Any], str | None] = lambda engine: None

    def check(self, number: int, solution: Sequence[Callable]) -> Callable:
        """The ticket's check, for the reader."""
        first = "parameters" if self.cases[0].by_name else "flat"

        def diagnose(engine: Callable) -> str | None:
            if not _changed(engine, self.broken):
                return f"not written yet: that is {self.broken.__name__} as it was. Override what is wrong"
            return examine(self.cases, partial(look, self, engine)) or self.last(engine)

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
    how, before = (ticket.gathers, ticket.memory), []
    outcome = attempt(train, [(engine, case, rank, None, *how) for rank in range(case.ranks)])
    if case.resumed_on and not outcome.failure:
        before = outcome.values
        again = before[0].flat, [seen.saved for seen in before]
        outcome = attempt(train, [(engine, case, rank, again, *how) for rank in range(case.resumed_on)])
    if outcome.failure or outcome.engine:
        why = none_saved(outcome, [seen.saved for seen in before]) or _stopped(ticket, engine, case, outcome)
        return Finding(str(case), why or "that uses zerolab's own ZeroOptimizer: repair this engine")
    return _compared(ticket, case, outcome.values, before)


def _compared(ticket: Ticket, case: Case, ended: Sequence[Seen], before: Sequence[Seen]) -> Finding:
    """What the ranks end with, beside what is right and where the mistakes lead. `before`: a resume."""
    seen = [each.flat for each in ended]
    alike = all(torch.equal(flat, seen[0]) for flat in seen)
    calls = {call for each in ended for call, sent in each.calls.items() if sent > 0.1}
    others = {why: ends for why, ends in common(case, calls).items() if ends not in ticket.mistakes.values()}
    right = _end(ticket.right, case)
    if ticket.also_right and all(map(same, seen, _end(ticket.also_right, case))):
        right = _end(ticket.also_right, case)
    if not all(map(same, seen, right)) and not any(any(each.backwards) for each in ended):
        why = "no rank computed a gradient: step calls batch.gradient for none of its micro-batches"
        return Finding(str(case), why)
    return Finding(
        str(case),
        seen=seen,
        right=right,
        mistakes={why: _end(ends, case) for why, ends in {**ticket.mistakes, **others}.items()},
        cost=other_rate(case, ended) or ticket.cost(case, ended) or ticket.saving(before),
        also=None if alike else "the ranks end with different parameters",
        told=None if all(map(same, seen, right)) else _told(ticket, case, ended, before),
    )


def _stopped(ticket: Ticket, engine: Any, case: Case, outcome: Attempt) -> str | None:
    """Why the ranks did not come to their end; an error in the ticket's code comes with the reader's."""
    if not outcome.failure or (said := ticket.stopped(case, outcome)):
        return said if outcome.failure else None
    if case.resumed_on and re.search(r"non-empty list|index out of range", outcome.failure):
        return (
            f"{outcome.failure}. There are {case.ranks} files, of the {case.ranks} ranks that saved, and "
            f"{case.resumed_on} ranks load: which files a rank needs depends on both"
        )
    if re.search(r"grad expected to be a Tensor or None but got grad of type '?(int|float)", outcome.failure):
        return (
            f"{outcome.failure}. The sum of the gradients is a number here, and no tensor: either nothing "
            "was added to it, or it was cleared before the update"
        )
    own = _of_own_methods(engine, ticket.broken)
    yours = f" (you wrote {own})" if own else ""
    if sizes := re.search(r"gradient of size '\[(\d+)\]' to a tensor of size '\[(\d+)\]'", outcome.failure):
        return _other_length(case, int(sizes[2]), int(sizes[1])) + yours
    if "of the ticket's" not in outcome.failure:
        return outcome.failure
    if sizes := re.search(r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\)", outcome.failure):
        whole = f", and {PSI} are all of them" if str(PSI) in sizes.groups() else ""
        return (
            f"a tensor of {sizes[1]} elements meets one of {sizes[2]}{whole}: parameters, gradient and "
            f"momentum of a shard are equally long, those of this rank's slice{yours} ({outcome.failure})"
        )
    return f"{outcome.failure}{yours}"


def _other_length(case: Case, shard: int, gradient: int) -> str:
    """A gradient that is not as long as its shard, and what is known of the two by their lengths."""
    cuts = [(name, cut) for name, numel in NAMES.items() for cut in ring.chunks(numel, case.ranks)]
    of = {cut.stop - cut.start: name for name, cut in cuts} if case.by_name and not case.tied else {}
    name, other = of.get(shard), of.get(gradient)
    if name and other and name != other:
        return (
            f"the shard of {name} has {shard} elements, and it gets a gradient of {gradient}, as many as "
            f"that of {other} has: keep each gradient with its name, from batch.gradients to reduce"
        )
    return (
        f"the shard has {shard} elements, and the gradient that it gets has {gradient}: cut and reduce do "
        "not agree on which slice of flat is the rank's. ring.reduce_scatter leaves the one of "
        f"ring.chunks(numel, world_size)[rank], of {gradient} here"
    )


@cache
def _end(ends: Callable[[Case], Tensors], case: Case) -> Tensors:
    """Where the ranks end; computed once, because a reader checks more than one repair."""
    with one_thread():
        return ends(case)


def _told(ticket: Ticket, case: Case, ended: Sequence[Seen], before: Sequence[Seen]) -> str | None:
    """What wrong parameters tell that no mistake explains: their updates, or the momentum after a load."""
    if any(each.replaced for each in ended):
        return (
            "self.flat is another tensor than the one that the engine was given, and the job reads that one: "
            "write to it in place"
        )
    if case.resumed_on:
        return _of_a_resume(ticket, case, ended, before)
    return updates_told(case, ended, partial(_end, ticket.right), ticket.max_norm)


def _of_a_resume(ticket: Ticket, case: Case, ended: Sequence[Seen], before: Sequence[Seen]) -> str | None:
    """What is wrong with the training before it, or with the momentum that the ranks loaded."""
    saved = before_resume(case)
    if not all(map(same, (each.flat for each in before), saved.flats)):
        return (
            "the parameters are wrong before the resume already: the mistake is in the training step, and "
            "not in save or load"
        )
    if ticket.owned is None:
        return None
    return momentum_told(case, ticket.owned, ended, [each.saved for each in before], saved)


def _of_own_methods(engine: Any, broken: type) -> str:
    """The reader's methods and their lines, for an error that shows in a method of the ticket's engine."""
    own = [
        (each.__code__.co_firstlineno, name)
        for name, each in vars(engine).items()
        if inspect.isfunction(each) and isinstance(engine, type) and issubclass(engine, broken)
    ]
    return ", ".join(f"`{name}` in line {line}" for line, name in sorted(own))

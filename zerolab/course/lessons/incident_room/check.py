"""Lesson 09's checks: each runs a repaired engine on ranks, and says what is still wrong with it.

Values are compared with one process, bytes with the ledger, and memory with what the engine keeps alive.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerolab.course.alive import Alive, kept_by
from zerolab.course.attempts import attempt
from zerolab.course.evidence import Finding, examine
from zerolab.course.exercise import graded
from zerolab.course.lessons.incident_room.lockstep import COMMON, Tensors, trained
from zerolab.course.lessons.incident_room.room import LR, PSI, Case, batches, named, start
from zerolab.course.lessons.zero_stage_1.check import sent_bytes
from zerolab.course.wire import Wire

CASES = (Case(3), Case(2), Case(4))
ITEM = 8  # bytes of an element


class Ended(NamedTuple):
    """What a rank ended with.

    Attributes:
        flat: its parameters; passes: what it sent in the last step, in Ψ.
        kept: bytes that the engine keeps before the last micro-batch and after the last step, and their names.
        state: elements of optimizer state, in all optimizers.
        saved: what `save` returned.
    """

    flat: torch.Tensor
    passes: float
    kept: tuple[dict[str, int], ...]
    state: int
    saved: Any = None


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
        by_name: whether the engine gets its parameters by name.
        gathers: whether its parameters are read with `gather()`, because no rank has them whole.
    """

    broken: type
    real: str
    hints: Sequence[str]
    cases: Sequence[Case] = CASES
    right: Callable[[Case], Tensors] = trained
    mistakes: Mapping[str, Callable[[Case], Tensors]] = field(default_factory=dict)
    cost: Callable[[Case, Sequence[Ended]], str | None] = lambda case, ended: too_dear(case, ended)
    by_name: bool = False
    gathers: bool = False

    def check(self, number: int, solution: Sequence[Callable]) -> Callable:
        """The ticket's check, for the reader."""
        first = "parameters" if self.by_name else "flat"

        def diagnose(engine: Callable) -> str | None:
            if not _changed(engine, self.broken):
                return (
                    f"not written yet: that is {self.broken.__name__} as it was. Override the verb at fault"
                )
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
    outcome = attempt(_train, [(ticket, engine, case, rank) for rank in range(case.ranks)])
    if case.resumed_on and not outcome.failure:
        flat, files = outcome.values[0].flat, [ended.saved for ended in outcome.values]
        again = [(ticket, engine, case, rank, flat, files) for rank in range(case.resumed_on)]
        outcome = attempt(_train, again)
    where = str(case)
    if outcome.failure or outcome.engine:
        own = "that uses zerolab's own ZeroOptimizer: repair this engine"
        return Finding(where, outcome.failure or own)
    seen = [ended.flat for ended in outcome.values]
    known = {**ticket.mistakes, **COMMON}
    right = ticket.right(case)
    mistakes = {why: value(case) for why, value in known.items()} if any(map(_differ, seen, right)) else {}
    return Finding(
        where,
        seen=seen,
        right=right,
        mistakes=mistakes,
        cost=ticket.cost(case, outcome.values),
        also=None
        if all(torch.equal(flat, seen[0]) for flat in seen)
        else "the ranks end with different parameters",
    )


def _differ(seen: torch.Tensor, right: torch.Tensor) -> bool:
    return seen.shape != right.shape or not torch.allclose(seen, right, rtol=1e-9, atol=1e-12)


def _train(
    ticket: Ticket,
    engine: Callable,
    case: Case,
    rank: int,
    flat: torch.Tensor | None = None,
    files: Any = None,
) -> Ended:
    """In the worker: steps with the reader's engine, then a look at what it sent and keeps."""
    world_size = dist.get_world_size()
    given = start() if flat is None else flat.clone()
    given = named(case, given) if ticket.by_name else given
    alive, data, kept = Alive(), batches(case, rank), []
    mine = engine(given, LR)
    if files is not None:
        mine.load(files)
    look = lambda: kept.append(_kept(alive, mine, given))
    for step in range(case.steps):
        data[-1].watch = look if step == case.steps - 1 else data[-1].watch
        with Wire() as wire:
            mine.step(data)
    look()
    whole = mine.gather() if ticket.gathers else given
    whole = torch.cat(_tensors(whole)) if ticket.by_name else whole
    sent = sent_bytes(wire.messages, world_size) / (ITEM * PSI * (world_size - 1) / world_size)
    saved = mine.save() if case.resumed_on and files is None else None
    return Ended(whole.detach().clone(), sent, tuple(kept), _state(mine), saved)


def _tensors(given: Any) -> list[torch.Tensor]:
    """Each of the given parameters once."""
    return list({id(each): each for each in given.values()}.values()) if isinstance(given, dict) else [given]


def _kept(alive: Alive, engine: Any, given: Any) -> dict[str, int]:
    """The bytes of each new storage that the engine keeps, by the name under which it does."""
    found = alive.storages(leave_out=_tensors(given))
    names = {kept_by(tensor, self=engine): tensor.untyped_storage().nbytes() for tensor in found.values()}
    return {name: size for name, size in names.items() if name}


def _state(engine: Any) -> int:
    """The elements of state in the engine's optimizers."""
    optimizers = [each for each in vars(engine).values() if isinstance(each, torch.optim.Optimizer)]
    values = [value for each in optimizers for state in each.state.values() for value in state.values()]
    return sum(value.numel() for value in values if isinstance(value, torch.Tensor))


def too_dear(case: Case, ended: Sequence[Ended], passes: float = 2) -> str | None:
    """What is wrong with right values of stage 1: too many bytes, or optimizer state that is not sharded."""
    passes += case.micro_batches - 1
    return unsharded(case, ended) or too_much_sent(ended, passes)


def unsharded(case: Case, ended: Sequence[Ended]) -> str | None:
    """Whether a rank holds more of the momentum than its shard."""
    share = -(-PSI // len(ended))
    for rank, each in enumerate(ended):
        if each.state > share + 8:
            return (
                f"the values are right, but rank {rank} holds {each.state} elements of momentum, and its "
                f"share is {share}: the optimizer state is not sharded any more"
            )
    return None


def too_much_sent(ended: Sequence[Ended], passes: float) -> str | None:
    """Whether a rank moves more than so many Ψ a step. Counts and norms are small, and allowed."""
    for rank, each in enumerate(ended):
        if each.passes > passes + 0.3:
            return (
                f"the values are right, but rank {rank} moves {each.passes:.1f}Ψ a step, and "
                f"{passes:.0f}Ψ are enough"
            )
    return None

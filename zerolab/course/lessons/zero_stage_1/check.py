"""Lesson 04's exercise: a ZeRO-1 step on a flat buffer, graded on values, on state and on bytes sent.

An unsharded AdamW has the right values, so values alone are not enough.
"""

import gc
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch

from zerolab import ring
from zerolab.course.exercise import Attempt, Message, attempt, graded, total
from zerolab.measure import storage_bytes

STEPS, LR = 3, 0.05


class Case(NamedTuple):
    """The number of ranks, the length of the flat buffer, and the optimizer to shard."""

    world_size: int
    numel: int
    optimizer_class: Callable[..., torch.optim.Optimizer]


# SGD first: its step depends on the gradient's scale, Adam's does not. Then state, then a remainder.
CASES = (
    Case(2, 64, torch.optim.SGD),
    Case(4, 1000, torch.optim.AdamW),
    Case(4, 1003, torch.optim.AdamW),
    Case(1, 10, torch.optim.AdamW),
)


class Ended(NamedTuple):
    """What one rank ended with: its parameters, and the bytes of state in its optimizers, None if none."""

    flat: torch.Tensor
    state_bytes: int | None


@graded(
    "Your stage 1 is right on 1, 2 and 4 ranks: the same parameters on every rank, the remainder too, 8Ψ/N "
    "bytes of state, 2Ψ sent."
)
def check_zero1(cls: Callable) -> str | None:
    """Train with cls(flat, optimizer_class, lr) on 1 to 4 ranks and print the mistake, or that there is none.

    cls.step(gradient) gets this rank's own gradient. Afterwards `flat` holds the updated parameters on every
    rank, each rank keeps 1/N of the optimizer's state, and no more than 2Ψ elements are sent.
    """
    for case in CASES:
        outcome = attempt(_train, [(cls, case, rank) for rank in range(case.world_size)])
        ended = [Ended(*value) for value in outcome.values]
        problem = (
            outcome.failure
            or _wrong_value([each.flat for each in ended], outcome, case)
            or _whole_state([each.state_bytes for each in ended], case)
            or _too_much_sent(outcome, case)
        )
        if problem:
            where = f"{case.world_size} ranks, {case.numel} elements, {case.optimizer_class.__name__}"
            return f"{problem} (seen with {where})"
    return None


def start(numel: int) -> torch.Tensor:
    """The parameters that every rank begins with."""
    return torch.linspace(-1, 1, numel)


def gradient(case: Case, step: int, rank: int) -> torch.Tensor:
    """A rank's gradient: different for every rank and step, and no mean is near zero."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.rand(case.numel, generator=generator) + 0.5 * (rank + 1)


def expected(case: Case, combine: Callable[[list[torch.Tensor]], torch.Tensor], fresh: bool = False):
    """Where one process ends if each step's gradient is what `combine` makes of the ranks' gradients."""
    flat = start(case.numel)
    optimizer = case.optimizer_class([flat], lr=LR)
    for step in range(STEPS):
        if fresh:
            optimizer = case.optimizer_class([flat], lr=LR)
        flat.grad = combine([gradient(case, step, rank) for rank in range(case.world_size)])
        optimizer.step()
    return flat


def _train(cls: Callable, case: Case, rank: int) -> Ended:
    """In the worker: three steps with the reader's class, then a look at the state of its optimizers."""
    flat = start(case.numel)
    mine = cls(flat, case.optimizer_class, LR)
    for step in range(STEPS):
        mine.step(gradient(case, step, rank))
    return Ended(flat.detach().clone(), _state_bytes())


def _state_bytes() -> int | None:
    """The bytes of state in all optimizers that are alive, wherever the reader keeps them."""
    gc.collect()
    optimizers = [thing for thing in gc.get_objects() if isinstance(thing, torch.optim.Optimizer)]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    tensors = (t for state in states for t in state.values() if torch.is_tensor(t))
    return storage_bytes(tensors) if states else None


def _wrong_value(flats: list[torch.Tensor], outcome: Attempt, case: Case) -> str | None:
    right, begin = expected(case, _mean), start(case.numel)
    if all(_equal(flat, right) for flat in flats):
        return None
    if all(torch.equal(flat, begin) for flat in flats):
        if not any(outcome.messages):
            return "not written yet: nothing was sent and flat is what it was"
        return (
            "flat is what it was: let your shard be a view, flat[...], or copy the updated shard back into it"
        )
    cut = case.numel - case.numel % case.world_size
    if cut < case.numel and all(_equal(flat[:cut], right[:cut]) for flat in flats):
        return (
            f"the remainder is dropped: {case.numel} elements on {case.world_size} ranks, and the last "
            f"{case.numel - cut} never change. Cut with ring.chunks, or pad"
        )
    return _by_shard(flats, case, right) or _by_recipe(flats, case)


def _by_shard(flats: list[torch.Tensor], case: Case, right: torch.Tensor) -> str | None:
    """Ranks that changed their own shard, and nothing else."""
    begin, pieces = start(case.numel), ring.chunks(case.numel, case.world_size)
    only_its_own = all(
        torch.equal(flat[piece], begin[piece])
        for rank, flat in enumerate(flats)
        for owner, piece in enumerate(pieces)
        if owner != rank
    )
    if only_its_own and all(
        _equal(flat[piece], right[piece]) for flat, piece in zip(flats, pieces, strict=True)
    ):
        return (
            "each rank updated its own shard, and no rank got the others': all-gather flat after the "
            "update, or every rank continues with another model"
        )
    for rank, (flat, piece) in enumerate(zip(flats, pieces, strict=True)):
        alone = expected(case, itemgetter(rank))
        if case.world_size > 1 and _equal(flat[piece], alone[piece]):
            return (
                f"rank {rank} updated its shard with its own gradient alone: reduce-scatter first, which "
                "adds the other ranks' gradients"
            )
    return None


def _by_recipe(flats: list[torch.Tensor], case: Case) -> str:
    """All ranks agree on wrong values, or they do not agree."""
    if all(_equal(flat, expected(case, total)) for flat in flats):
        return (
            "that is the sum of the gradients and not the mean: divide by the number of ranks. (Adam would "
            "hide this mistake, because its step does not depend on the gradient's scale; SGD shows it)"
        )
    if all(_equal(flat, expected(case, _mean, fresh=True)) for flat in flats):
        return "the optimizer forgets m and v at every step: build it once, in __init__"
    if any(not torch.equal(flat, flats[0]) for flat in flats):
        return "the ranks ended with different parameters: after step() flat must be the same on all of them"
    return "all ranks agree, but not with one process that steps on the mean gradient"


def _whole_state(state_bytes: list[int | None], case: Case) -> str | None:
    if case.optimizer_class is torch.optim.SGD or case.world_size == 1:
        return None
    share = 8 * case.numel / case.world_size
    for rank, held in enumerate(state_bytes):
        if held is None:
            return "no optimizer holds any state: build optimizer_class([shard], lr=lr) once, and keep it"
        if held > 1.1 * share + 64:
            return (
                f"the parameters are right, but the state is not sharded: rank {rank} holds {held:,} bytes "
                f"of m and v, and its share is 8Ψ/N = {share:,.0f}. Give the optimizer your shard, not flat"
            )
    return None


def _too_much_sent(outcome: Attempt, case: Case) -> str | None:
    """Right and sharded, but more bytes than two passes over the model."""
    ring_pass = 4 * case.numel * (case.world_size - 1) / case.world_size
    for rank, messages in enumerate(outcome.messages):
        passes = sent_bytes(messages, case.world_size) / STEPS / ring_pass if ring_pass else 0
        if passes > 2.1:
            return (
                f"right and sharded, but rank {rank} moves {passes:.1f}Ψ a step where 2Ψ is enough. An "
                "all-reduce gives every rank the whole gradient, and each needs 1/N of it: use its first "
                "half, the reduce-scatter"
            )
    return None


# What a rank sends on a ring for each byte that is recorded. A reduce-scatter is recorded by its result.
_SHARE = {
    "send": lambda n: 1,
    "allreduce_": lambda n: 2 * (n - 1) / n,
    "reduce_scatter_": lambda n: n - 1,
    "_reduce_scatter_base_": lambda n: n - 1,
}


def sent_bytes(messages: Sequence[Message], world_size: int) -> float:
    """The bytes that a rank sends for its messages, if each collective runs on a ring."""
    share = lambda op: _SHARE.get(op, lambda n: (n - 1) / n)(world_size)
    return sum(message.nbytes * share(message.op) for message in messages)


def _mean(gradients: list[torch.Tensor]) -> torch.Tensor:
    return total(gradients) / len(gradients)


def _equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal up to rounding: a ring does not add in the order of the ranks."""
    return torch.allclose(got, want, rtol=1e-4, atol=1e-5)

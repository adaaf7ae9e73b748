"""Lesson 09: zerolab's engine as it is, and broken on purpose in 14 ways, for the reader's test to find.

A broken engine is the real one in which one function is replaced while it trains.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch

from zerolab.collectives import Comm, Work, direct
from zerolab.optimizer import STAGES, ZeroOptimizer, gradients
from zerolab.optimizer.whole_tensors import WholeTensors
from zerolab.unit import FlatUnit
from zerolab.unit.grads import FlatGrads


@dataclass(frozen=True, eq=False)
class Engine:
    """An engine for the reader's test.

    Attributes:
        does: what it does wrong, after "an engine that".
        broken: a context in which it trains.
        settings: keywords of ZeroOptimizer.
    """

    does: str
    broken: Callable[[], Any] = nullcontext
    settings: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def replaced(owner: Any, **functions: Callable) -> Iterator[None]:
    """Attributes of a class or a module are others inside the with block."""
    before = {name: vars(owner)[name] for name in functions}
    try:
        for name, function in functions.items():
            setattr(owner, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(owner, name, function)


def never_divides():
    return replaced(FlatGrads, average=lambda grads: None)


def divides_by_two():
    average = FlatGrads.average

    def broken(grads: FlatGrads) -> None:
        ranks, grads.replicas = grads.replicas, min(grads.replicas, 2)
        average(grads)
        grads.replicas = ranks

    return replaced(FlatGrads, average=broken)


def loses_the_remainder():
    average = FlatGrads.average

    def broken(grads: FlatGrads) -> None:
        average(grads)
        numel = sum(span.numel for span in grads.spans)
        cut = numel - numel % grads.replicas
        grads.reduced[max(0, cut - grads.owned.start) :] = 0

    return replaced(FlatGrads, average=broken)


def adds_in_the_order_of_a_ring():
    def broken(own: torch.Tensor, others: torch.Tensor, rank: int) -> None:
        own += others.roll(-rank, dims=0).sum(dim=0)

    return replaced(direct, add_in_rank_order=broken)


def keeps_the_last_micro_batch():
    keep = FlatGrads.keep

    def broken(grads: FlatGrads, reduced: torch.Tensor) -> None:
        grads.reduced = None
        keep(grads, reduced)

    return replaced(FlatGrads, keep=broken)


def forgets_the_momentum():
    step = ZeroOptimizer.step

    def broken(optimizer: ZeroOptimizer) -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"].zero_()
        step(optimizer)

    return replaced(ZeroOptimizer, step=broken)


def clips_by_its_own_norm():
    def broken(comm: Comm, own: Any, norm_type: float, about: str = "norms") -> torch.Tensor:
        return torch.linalg.vector_norm(torch.cat([each.flatten() for each in own]), norm_type)

    return replaced(gradients, global_norm=broken)


@contextmanager
def leaves_the_last_rank_behind():
    def broken(self, units: list[FlatUnit], step: Callable[[FlatUnit], None]) -> None:
        last = self.comm.rank == self.comm.world_size - 1
        for unit in units:
            step(unit)
            unit.expect(self.comm.all_gather(unit.flat.clone() if last else unit.flat, unit).wait)

    with replaced(STAGES[1], update=broken), replaced(STAGES[2], update=broken):
        yield


def all_reduces_and_gathers():
    return replaced(STAGES[1], reduce_grads=STAGES[0].reduce_grads)


def keeps_the_whole_state():
    verbs = ("setup", "reduce_grads", "after_reduce", "update")
    return replaced(STAGES[1], **{verb: getattr(STAGES[0], verb) for verb in verbs})


def keeps_a_view():
    def broken(self, unit: FlatUnit) -> None:
        unit.grads.keep(unit.grads.local[unit.owned])
        unit.grads.free_local()

    return replaced(STAGES[2], after_reduce=broken)


def keeps_a_copy_on_the_last_rank():
    detach_shard = FlatUnit.detach_shard

    def broken(unit: FlatUnit) -> None:
        if unit.owned.stop == unit.padded_numel:
            unit.shard = unit.master = unit.flat.clone()[unit.owned]
        else:
            detach_shard(unit)

    return replaced(FlatUnit, detach_shard=broken)


def adds_nothing_at_stage_0():
    return replaced(STAGES[0], reduce_grads=lambda self, unit: Work())


def exchanges_two_elements():
    full_params = WholeTensors.full_params

    @contextmanager
    def broken(optimizer: ZeroOptimizer, *args: Any) -> Iterator[None]:
        with full_params(optimizer, *args):
            _exchange([parameter.detach().view(-1) for parameter in optimizer.model.parameters()])
            yield

    return replaced(WholeTensors, full_params=broken)


def _exchange(parameters: list[torch.Tensor]) -> None:
    """Exchange two elements of the first parameter that are far apart and leave the bits of the sum."""
    whole = torch.cat(parameters).cpu()
    for pair in map(list, combinations(range(len(parameters[0])), 2)):
        exchanged = whole.clone()
        exchanged[pair] = whole[pair[::-1]]
        if abs(whole[pair[0]] - whole[pair[1]]) > 0.1 and torch.equal(exchanged.sum(), whole.sum()):
            parameters[0].copy_(exchanged[: len(parameters[0])])
            return


RIGHT = (
    Engine("is right, with prefetch=1 and reduces_in_flight=1, the engine's defaults"),
    Engine(
        "is right, with prefetch=0 and reduces_in_flight=0", settings={"prefetch": 0, "reduces_in_flight": 0}
    ),
)
BROKEN = (
    Engine("adds the gradients of the ranks up and never divides", never_divides),
    Engine("divides the sum of the gradients by 2, whatever the number of ranks", divides_by_two),
    Engine("never updates the elements that are left over when N does not divide them", loses_the_remainder),
    Engine("adds the ranks up in another order, so that the last bits differ", adds_in_the_order_of_a_ring),
    Engine("keeps the gradient of the last micro-batch alone", keeps_the_last_micro_batch),
    Engine("begins each step with a momentum of zero", forgets_the_momentum),
    Engine("clips by the norm of a rank's own part of the gradient", clips_by_its_own_norm),
    Engine(
        "never tells the last rank at stages 1 and 2 what the others have updated",
        leaves_the_last_rank_behind,
    ),
    Engine("moves 3Ψ bytes in a step at stage 1", all_reduces_and_gathers),
    Engine("keeps all of the optimizer state on every rank at stage 1", keeps_the_whole_state),
    Engine("keeps the whole gradient in memory behind a view of its shard, at stage 2", keeps_a_view),
    Engine(
        "keeps all parameters in memory behind the last rank's shard, at stage 3",
        keeps_a_copy_on_the_last_rank,
    ),
    Engine("never adds the ranks' gradients up at stage 0", adds_nothing_at_stage_0),
    Engine("exchanges two elements of the parameters, so that their sum is right", exchanges_two_elements),
)

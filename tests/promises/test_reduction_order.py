"""Promise: gradients are reduced as they come, in one order on every rank, and do not pile up."""

import sys

import cloudpickle
import pytest
import torch
from support import training
from support.references import seeded
from support.training import WIDTH
from support.user_models import Block
from support.watched_steps import DEPTH, Backwards, Routed, blocks, gathered, launched
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.mark.parametrize("in_flight", [0, 1, 2])
@pytest.mark.parametrize("model_class", [Routed, Backwards])
def test_gradients_are_reduced_as_they_come_and_do_not_pile_up(model_class, in_flight: int):
    for stage in (2, 3):
        for steps in launched(2, stage, model_class, [range(DEPTH)] * 3, reduces_in_flight=in_flight):
            for (_, grads, _), _ in steps[1:]:
                backward = grads[len(grads) // 2 :]
                assert max(map(len, backward)) <= 1 + in_flight
            reduced = [unit for op, unit, _ in steps[-1][1] if op == "reduce_scatter"]
            assert len(reduced) == len(set(reduced)) == DEPTH + 1
            assert reduced[-1] == ("root" if model_class is Routed else "encoder.0")  # what comes last


class Partly(Routed):
    """Blocks with a weight each that only the last rank uses, first of all; and one that nobody does."""

    class Part(Block):
        def __init__(self):
            super().__init__()
            self.sometimes, self.never = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

        def forward(self, x):
            last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
            return super().forward(x * self.sometimes if last else x)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Part() for _ in range(DEPTH))


@pytest.mark.parametrize("prefetch, in_flight", [(0, 0), (1, 1), (2, 0)])
def test_a_unit_of_which_ranks_use_different_weights_is_reduced_in_its_turn(prefetch, in_flight):
    settings = {"prefetch": prefetch, "reduces_in_flight": in_flight}
    ranks = launched(3, 3, Partly, [range(DEPTH)] * 3, **settings)
    for step in range(3):
        every = [steps[step][1] for steps in ranks]
        assert all(events == every[0] for events in every)
        for events in every:
            assert gathered(events, "backward") == blocks(*reversed(range(DEPTH)))
            collectives = [(op, unit) for op, unit, when in events if when == "backward"]
            for later in range(2, DEPTH):
                before = collectives.index(("reduce_scatter", f"blocks.{later}"))
                ahead = max(later - 1 - prefetch, 0)
                assert ahead == 0 or before < collectives.index(("all_gather", f"blocks.{ahead}"))
    for (_, grads, _), _ in (step for steps in ranks for step in steps[1:]):
        assert max(map(len, grads[DEPTH:])) <= 1 + in_flight


def divergent(stage: int, in_flight: int) -> tuple:
    """Ranks that take other paths by their data, at stages where no collective belongs to a forward."""

    class ByData(Routed):
        def forward(self, x):
            kind = int(x.sum().abs() * 1000) % 4
            self.path = ([0, 1, 2, 3, 4, 5], [5, 3, 1], [], [2, 2, 0])[kind]
            return super().forward(x)

    def losses(model, x, step):
        yield model(x).square().mean()
        if step != 1:
            yield model(-2 * x).square().mean()

    expected = training.train_plain(ByData, losses, 3, steps=5)
    model = seeded(ByData)
    optimizer = zerolab.ZeroOptimizer(
        model, torch.optim.AdamW, stage=stage, reduces_in_flight=in_flight, **training.DEFAULTS
    )
    events = []
    for step in range(5):
        for _ in training.passes(losses, model, step, optimizer.rank):
            pass
        number = optimizer.trace.step_number
        optimizer.step()
        optimizer.zero_grad()
        events += [(each.op, each.unit) for each in optimizer.trace.step(number)]
    return events, training.differing(training.whole(model, optimizer), expected)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_that_take_other_paths_still_call_the_same_collectives(stage: int):
    for in_flight in (0, 2):
        results = zerolab.launch(divergent, 3, stage, in_flight, timeout=60)
        assert all(differing == [] for _, differing in results)
        assert results[0][0] and all(events == results[0][0] for events, _ in results)

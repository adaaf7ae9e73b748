"""Promise: collectives run in one order on every rank, gathers run ahead as far as they were told to, and no
more of the model is whole than that. Seen from the trace and from the real storages at each module's call.
"""

import sys
from dataclasses import dataclass, field

import cloudpickle
import pytest
import torch
from support import training
from support.references import seeded
from support.training import WIDTH
from support.user_models import Block, Net
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

DEPTH = 6


class Routed(Net):
    """Goes through the blocks it is told to, in the order it is told."""

    def __init__(self):
        super().__init__(depth=DEPTH)
        self.path = range(DEPTH)

    def forward(self, x):
        x = self.before(x)
        for index in self.path:
            x = self.blocks[index](x)
        return self.after(x)


@dataclass
class Watch:
    """What is seen half-way through each block, in forward and in backward, of one step."""

    optimizer: zerolab.ZeroOptimizer
    whole: list[list[str]] = field(default_factory=list)
    grads: list[list[str]] = field(default_factory=list)
    gathers: list[int] = field(default_factory=list)

    def inside_a_block(self, module: nn.Module, args: tuple) -> None:
        self.look()
        args[0].register_hook(lambda gradient: self.look())

    def look(self) -> None:
        units = [unit for unit in self.optimizer.units if unit.name != "root"]
        self.whole.append([u.name for u in units if u.flat.untyped_storage().nbytes()])
        self.grads.append([u.name for u in units if u.grads.local is not None])
        events = self.optimizer.trace.step(self.optimizer.trace.step_number)
        self.gathers.append(sum(event.op == "all_gather" and event.unit != "root" for event in events))


def watched_steps(stage: int, model_class, paths: list, **settings) -> list[tuple[Watch, list]]:
    """For each step, with the path to take: what was seen, and the collectives as (op, unit, phase)."""
    torch.manual_seed(0)
    model = model_class()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1, **settings)
    watch = Watch(optimizer)
    for block in model.blocks:
        block.second.register_forward_pre_hook(watch.inside_a_block)
    found = []
    for step, path in enumerate(paths):
        watch.whole, watch.grads, watch.gathers = [], [], []
        model.path = path
        model(training.micro_batch(step, optimizer.rank)).square().mean().backward()
        number = optimizer.trace.step_number
        optimizer.step()
        optimizer.zero_grad()
        events = [(each.op, each.unit, each.phase) for each in optimizer.trace.step(number)]
        found.append(((watch.whole, watch.grads, watch.gathers), events))
    return found


def launched(world_size: int, *args, **settings) -> list:
    return zerolab.launch(watched_steps, world_size, *args, timeout=60, **settings)


def gathered(events: list, phase: str) -> list[str]:
    return [unit for op, unit, when in events if op == "all_gather" and when == phase and unit != "root"]


def blocks(*indices: int) -> list[str]:
    return [f"blocks.{index}" for index in indices]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_stage_3_gathers_in_the_order_of_use_and_each_pass_once(prefetch: int):
    for steps in launched(2, 3, Routed, [range(DEPTH)] * 3, prefetch=prefetch):
        for _, events in steps:
            assert gathered(events, "forward") == blocks(*range(DEPTH))
            assert gathered(events, "backward") == blocks(*reversed(range(DEPTH)))
            assert sum(unit == "root" for op, unit, _ in events if op == "all_gather") == 1


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_no_more_is_whole_than_was_asked_for_and_all_that_was(prefetch: int):
    for steps in launched(2, 3, Routed, [range(DEPTH)] * 3, prefetch=prefetch):
        for number, ((whole, _, _), _) in enumerate(steps):
            assert len(whole) == 2 * DEPTH
            for place, names in enumerate(whole):
                ahead = (
                    0 if number == 0 and place < DEPTH else prefetch
                )  # the first forward has nothing to go by
                first = place if place < DEPTH else 2 * DEPTH - 1 - place
                last = min(first + ahead, DEPTH - 1) if place < DEPTH else max(first - ahead, 0)
                assert sorted(names) == blocks(*range(min(first, last), max(first, last) + 1))


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_gathers_are_issued_before_the_block_that_runs(prefetch: int):
    ((_, _, gathers), _) = launched(2, 3, Routed, [range(DEPTH)] * 2, prefetch=prefetch)[0][1]
    ahead = [min(place + 1 + prefetch, DEPTH) for place in range(DEPTH)]
    assert gathers == ahead + [DEPTH + count for count in ahead]


def test_another_path_is_learned_and_then_followed():
    first, other = [0, 1, 2, 3], [4, 1, 5, 2]
    paths = [first, first, other, other, other, first, first]
    for steps in launched(2, 3, Routed, paths, prefetch=1):
        for number, (_, events) in enumerate(steps):
            known = number > 0 and paths[number - 1] == paths[number]
            if known:
                assert gathered(events, "forward") == blocks(*paths[number])
            assert set(gathered(events, "forward")) >= set(blocks(*paths[number]))
            assert gathered(events, "backward") == blocks(*reversed(paths[number]))
        for (whole, _, _), _ in steps:
            assert max(map(len, whole)) <= 2


def test_a_block_that_comes_twice_is_gathered_twice_in_forward_and_kept_in_backward_until_its_last_gradient():
    path = [0, 1, 2, 1, 3]
    for steps in launched(2, 3, Routed, [path] * 2, prefetch=0):
        events = steps[1][1]
        assert gathered(events, "forward") == blocks(*path)
        assert gathered(events, "backward") == blocks(3, 1, 2, 0)


class Backwards(nn.Module):
    """A decoder registered before its encoder: the order of registration is not the order of use."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)
        self.decoder = nn.ModuleList(Block() for _ in range(3))
        self.encoder = nn.ModuleList(Block() for _ in range(3))

    @property
    def blocks(self) -> list[Block]:
        return [*self.encoder, *self.decoder]

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_the_order_of_use_counts_and_not_the_order_of_registration():
    order = [f"encoder.{i}" for i in range(3)] + [f"decoder.{i}" for i in range(3)]
    for steps in launched(2, 3, Backwards, [None] * 3, prefetch=1):
        for (whole, _, _), events in steps[1:]:
            assert gathered(events, "forward") == order and gathered(events, "backward") == order[::-1]
            assert max(map(len, whole)) == 2


# Reductions.


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


@pytest.mark.parametrize("stage", [0, 3])
def test_knobs_turn_the_trace_and_not_the_bits(stage: int):
    def losses(model, x, step):
        yield model(x).square().mean()

    for prefetch, in_flight in ((0, 0), (9, 9)):
        training.assert_same_bits(
            lambda: (Routed, losses), 3, (stage,), prefetch=prefetch, reduces_in_flight=in_flight
        )

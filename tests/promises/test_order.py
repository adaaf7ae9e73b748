"""Promise: stage 3 gathers in the order of use, runs ahead as far as ``prefetch`` says, and has no more of
the model whole than that. Seen from the trace and from the real storages at each module's call.
"""

import sys

import cloudpickle
import pytest
import torch
from support import training
from support.training import WIDTH
from support.watched_steps import DEPTH, Backwards, Routed, blocks, gathered, launched

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


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


def test_the_order_of_use_counts_and_not_the_order_of_registration():
    order = [f"encoder.{i}" for i in range(3)] + [f"decoder.{i}" for i in range(3)]
    for steps in launched(2, 3, Backwards, [None] * 3, prefetch=1):
        for (whole, _, _), events in steps[1:]:
            assert gathered(events, "forward") == order and gathered(events, "backward") == order[::-1]
            assert max(map(len, whole)) == 2


def gathered_ahead_of_blocks_called_one_by_one(passes: int) -> list[list[str]]:
    """Which blocks are gathered before their turn, in each forward pass that never calls the model."""
    model = Routed()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1, prefetch=1)
    found = []
    for _ in range(passes):
        x, ahead = torch.zeros(2, WIDTH), []
        for index, block in enumerate(model.blocks):
            unit = next(unit for unit in optimizer.units if unit.name == f"blocks.{index}")
            if unit.flat.untyped_storage().nbytes():
                ahead.append(unit.name)
            x = block(x)
        found.append(ahead)
    return found


@pytest.mark.parametrize("path", [[*range(1, DEPTH), 0], [*range(DEPTH)]])
def test_units_are_reduced_in_the_order_in_which_their_gradients_were_complete(path: list[int]):
    """The first block of the model may be the last that is used: then it is reduced first."""
    for steps in launched(2, 2, Routed, [path] * 3):
        for _, events in steps[1:]:  # the first backward has nothing to go by
            reduced = [unit for op, unit, _ in events if op == "reduce_scatter" and unit != "root"]
            assert reduced == blocks(*reversed(path))


def test_blocks_that_are_called_one_by_one_are_gathered_ahead_in_every_pass_but_the_first():
    for passes in zerolab.launch(gathered_ahead_of_blocks_called_one_by_one, 2, 4, timeout=60):
        assert passes == [[]] + [blocks(*range(1, DEPTH))] * 3


def gathered_ahead_at_the_call_of_the_model(passes: int, prefetch: int) -> list[list[str]]:
    """Which blocks are gathered when a forward pass begins, before the root's own layers have computed."""
    model = Routed()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1, prefetch=prefetch)
    found: list[list[str]] = []

    def note(*_) -> None:
        gathered = [unit for unit in optimizer.units if unit.flat.untyped_storage().nbytes()]
        found.append([unit.name for unit in gathered if unit.name != "root"])

    model.register_forward_pre_hook(note)
    for step in range(passes):
        model(training.micro_batch(step, optimizer.rank)).square().mean().backward()
        optimizer.step()
    return found


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_first_blocks_are_gathered_while_the_root_computes(prefetch: int):
    for passes in zerolab.launch(gathered_ahead_at_the_call_of_the_model, 2, 3, prefetch, timeout=60):
        assert passes == [[]] + [blocks(*range(prefetch))] * 2


@pytest.mark.parametrize("stage", [0, 3])
def test_knobs_turn_the_trace_and_not_the_bits(stage: int):
    def losses(model, x, step):
        yield model(x).square().mean()

    for prefetch, in_flight in ((0, 0), (9, 9)):
        training.assert_same_bits(
            lambda: (Routed, losses), 3, (stage,), prefetch=prefetch, reduces_in_flight=in_flight
        )

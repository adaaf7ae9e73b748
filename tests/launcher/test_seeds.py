"""Promise: ranks draw different random numbers, new ones in each launch; a seed makes a launch repeatable."""

import random

import numpy
import pytest
import torch
import torch.distributed as dist

import zerolab


def draw() -> tuple:
    """One number of each generator, a dropout mask, and the order in which a DataLoader shuffles."""
    mask = torch.nn.functional.dropout(torch.ones(64)).tolist()
    shuffled = torch.utils.data.DataLoader(range(50), shuffle=True, batch_size=None)
    order = [int(each) for each in shuffled]
    return random.random(), numpy.random.random(), torch.rand(1).item(), tuple(mask), tuple(order)


def test_no_two_ranks_and_no_two_launches_draw_the_same():
    ranks = [rank for _ in range(2) for rank in zerolab.launch(draw, 2)]
    for values in zip(*ranks, strict=True):
        assert len(set(values)) == 4


def test_a_seed_makes_a_launch_repeatable_and_leaves_ranks_different():
    first, again, other = (zerolab.launch(draw, 2, seed=seed) for seed in (7, 7, 9))
    assert first == again
    for values in zip(*first, *other, strict=True):
        assert len(set(values)) == 4


def test_the_seed_of_a_rank_is_the_seed_plus_its_number():
    def seeds() -> tuple[int, float]:
        return torch.initial_seed(), torch.rand(1).item()

    (_, of_0), (seed, of_1) = zerolab.launch(seeds, 2, seed=7)
    assert seed == 8
    torch.manual_seed(8)
    assert torch.rand(1).item() == of_1 != of_0


def test_a_seed_that_the_function_sets_counts():
    def seeded() -> float:
        torch.manual_seed(0)
        return torch.rand(1).item()

    assert len({*zerolab.launch(seeded, 2), *zerolab.launch(seeded, 2, seed=3)}) == 1


def test_ranks_start_from_rank_0s_parameters_whatever_they_draw():
    def build() -> list:
        model = torch.nn.Linear(3, 3)
        drawn = model.weight.tolist()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=1, lr=0.1)
        with optimizer.full_params():
            return [dist.get_rank(), drawn, model.weight.tolist()]

    (_, drawn, first), (_, other, second) = zerolab.launch(build, 2)
    assert drawn == first == second != other


@pytest.mark.parametrize(
    "seed, error, words",
    [
        (-1, ValueError, "between 0 and 4294967294 on 2 ranks, got -1"),
        (2**32 - 1, ValueError, "got 4294967295"),
        (0.5, TypeError, "an int or None, got 0.5"),
        (True, TypeError, "an int or None, got True"),
    ],
)
def test_a_seed_that_some_generator_cannot_take_is_refused(seed, error, words: str):
    with pytest.raises(error, match=f"seed must be .*{words}"):
        zerolab.launch(draw, 2, seed=seed)


def test_the_largest_seed_works():
    assert len(zerolab.launch(draw, 2, seed=2**32 - 2)) == 2

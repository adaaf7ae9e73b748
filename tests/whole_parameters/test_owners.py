"""Which rank updates which parameter: each exactly one, and nobody much more than the others."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zerolab.optimizer.owners import choose_owners, imbalance, update_flops

GPT_BLOCK = ((3, 1), (1, 1), (4, 1), (1, 4))
"""The matrices of a block in multiples of its width: queries, keys and values; output; up; down."""


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))


def gpt(width: int, depth: int) -> list[list[nn.Parameter]]:
    return [[parameter(rows * width, columns * width) for rows, columns in GPT_BLOCK] for _ in range(depth)]


def loads(units: list[list[nn.Parameter]], ranks: int, cost) -> list[float]:
    """What each rank has of a cost, by its parameters."""
    owners, found = choose_owners(units, ranks), [0.0] * ranks
    for each in itertools.chain.from_iterable(units):
        found[owners[id(each)]] += cost(each)
    return found


@pytest.mark.parametrize(
    "shape, flops", [((3, 5), 117), ((5, 3), 117), ((4, 3, 2, 2), 448), ((7,), 7), ((), 1), ((0, 3), 0)]
)
def test_the_multiplications_of_a_step_of_newton_schulz(shape: tuple[int, ...], flops: int):
    assert update_flops(parameter(*shape)) == flops


@pytest.mark.parametrize("shape", [(24, 8), (8, 8), (32, 8), (8, 32)])
def test_muon_does_as_many_in_each_of_its_five_steps(shape: tuple[int, int]):
    weight = nn.Parameter(torch.ones(shape))
    weight.grad = torch.randn(shape)
    with FlopCounterMode(display=False) as counter:
        torch.optim.Muon([weight], ns_steps=5).step()
    assert counter.get_total_flops() == 2 * 5 * update_flops(weight)  # a multiplication and an addition each


@pytest.mark.parametrize("ranks, most", [(1, 1.0), (2, 1.0), (4, 1.02), (8, 1.05), (16, 1.1)])
def test_a_gpt_is_balanced_in_flops_and_in_elements(ranks: int, most: float):
    units = gpt(1024, 24)
    for cost in (update_flops, torch.numel):
        assert 1 <= imbalance(loads(units, ranks, cost)) <= most


def test_with_more_ranks_than_matrices_each_has_one_at_most():
    assert set(loads(gpt(8, 2), 1024, lambda _: 1)) == {0.0, 1.0}


def test_the_matrices_of_a_unit_go_to_different_ranks():
    """A unit's gradients are sent at the same time: in equal parts that takes the least."""
    for matrices in (units := [[parameter(8, 8) for _ in range(4)] for _ in range(6)]):
        owners = choose_owners(units, 4)
        assert sorted(owners[id(each)] for each in matrices) == [0, 1, 2, 3]


shapes = st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple)


@settings(deadline=None, max_examples=60)
@given(units=st.lists(st.lists(shapes, max_size=5), max_size=5), ranks=st.integers(1, 9))
def test_every_parameter_has_one_owner_and_nobody_has_far_more_than_the_mean(units, ranks):
    """The rank with the smallest sum of both shares has at most 2/N of them before it is given another."""
    parameters = [[parameter(*shape) for shape in unit] for unit in units]
    owners = choose_owners(parameters, ranks)
    every = list(itertools.chain.from_iterable(parameters))
    assert owners.keys() == {id(each) for each in every}
    assert all(0 <= owner < ranks for owner in owners.values())
    costs = (update_flops, torch.numel)
    totals = [max(1, sum(map(cost, every))) for cost in costs]
    largest = max(
        (cost(p) / total for cost, total in zip(costs, totals, strict=True) for p in every), default=0
    )
    for cost, total in zip(costs, totals, strict=True):
        assert max(loads(parameters, ranks, cost)) <= total * (2 / ranks + largest) + 1e-6


def test_a_long_update_and_many_elements_count_alike():
    """The square one has most multiplications, and each of the others four times its elements."""
    square, flat, vector = parameter(8, 8), parameter(2, 128), parameter(256)
    owners = choose_owners([[square, flat, vector]], 2)
    assert owners[id(flat)] != owners[id(vector)]


def test_the_same_choice_whatever_the_default_device():
    units = gpt(8, 3)
    expected = choose_owners(units, 3)
    with torch.device("meta"):
        assert choose_owners(units, 3) == expected


@pytest.mark.parametrize("given_loads, expected", [([1.0, 1.0], 1.0), ([3.0, 1.0], 1.5), ([0.0, 0.0], 1.0)])
def test_imbalance_is_the_largest_over_the_mean(given_loads: list[float], expected: float):
    assert imbalance(given_loads) == expected

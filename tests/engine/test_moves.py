"""Promise: the flat buffer holds the sum of the gradients that came, and zeros between them."""

import math
import sys
import weakref

import cloudpickle
import pytest
import torch
from torch import nn

import zerolab
from zerolab.precision import PRECISIONS
from zerolab.unit import FlatUnit
from zerolab.unit.arrivals import MOVED_TOGETHER

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

SIZES = {
    "small": (3, 5),
    "large": (MOVED_TOGETHER + 3, MOVED_TOGETHER + 1),
    "mixed": (3, MOVED_TOGETHER + 3, 5),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_local_holds_the_sum_and_zeros(sizes: tuple[int, ...], micro_batches: int, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *shape, **kind: torch.full(shape, math.nan, **kind))
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    unit = FlatUnit(
        "unit", 0, [(str(index), each) for index, each in enumerate(parameters)], 2, PRECISIONS["fp32"]
    )
    for number in range(micro_batches):
        unit.grads.expect()
        for index, span in enumerate(unit.grads.spans):
            span.parameter.grad = torch.full_like(span.parameter, 10.0**number * (index + 1))
            unit.grads.collect(span, unit.grads.take(span))
        unit.grads.move()
    unit.grads.prepare_to_reduce()
    expected = torch.zeros(unit.padded_numel)
    for index, span in enumerate(unit.grads.spans):
        span.view(expected).fill_((index + 1) * (1.0 if micro_batches == 1 else 11.0))
    assert torch.equal(unit.grads.local, expected)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("size", [32, 5], ids=["dense", "padded"])
def test_small_gradients_keep_their_places(memory_format: torch.memory_format, dtypes: tuple, size: int):
    own_dtype, grads_dtype = dtypes
    weight = nn.Parameter(torch.zeros(4, 2, 2, 2, dtype=own_dtype).to(memory_format=memory_format))
    bias = nn.Parameter(torch.zeros(size, dtype=own_dtype))
    precision = PRECISIONS["fp32" if own_dtype == grads_dtype else "mixed_fp32_grads"]
    unit = FlatUnit("unit", 0, [("weight", weight), ("bias", bias)], 1, precision)
    unit.grads.expect()
    expected = {}
    for span in reversed(unit.grads.spans):  # backward brings the last parameter's gradient first
        gradient = torch.randn(span.shape).to(own_dtype)
        expected[span] = span.parameter.grad = gradient
        unit.grads.collect(span, unit.grads.take(span))
    unit.grads.prepare_to_reduce()
    assert unit.grads.local.dtype == grads_dtype
    for span, gradient in expected.items():
        assert torch.equal(span.view(unit.grads.local), gradient.to(grads_dtype))
    assert unit.grads.local.count_nonzero() == 32 + size  # padding is zero


@pytest.mark.parametrize("how", ["clear", "zero"])
def test_a_gradient_that_waits_to_be_moved_can_be_cleared(how: str):
    """As after a backward pass in no_sync that is thrown away: the next one may use other parameters."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in SIZES["small"]]
    unit = FlatUnit("unit", 0, [("first", parameters[0]), ("second", parameters[1])], 2, PRECISIONS["fp32"])
    first, second = unit.grads.spans
    unit.grads.expect()
    parameters[0].grad = torch.ones(3)
    unit.grads.collect(first, unit.grads.take(first))
    (gradient,) = unit.grads.arrivals.tensors
    gone = weakref.ref(gradient)
    del gradient
    getattr(unit.grads, how)()
    assert gone() is None and unit.grads.arrivals.held_bytes == 0
    unit.grads.expect()
    parameters[1].grad = torch.full((5,), 2.0)
    unit.grads.collect(second, unit.grads.take(second))
    unit.grads.prepare_to_reduce()
    assert second.view(unit.grads.local).tolist() == [2.0] * 5
    assert unit.grads.local.count_nonzero() == 5


def test_the_buffer_is_no_users_gradient():
    parameter = nn.Parameter(torch.zeros(16))
    unit = FlatUnit("unit", 0, [("weight", parameter)], 1, PRECISIONS["fp32"])
    assert unit.padded_numel == 16  # without padding nothing has to be added to the gradient
    unit.grads.expect()
    kept = parameter.grad = torch.ones(16)
    unit.grads.collect(unit.grads.spans[0], unit.grads.take(unit.grads.spans[0]))
    unit.grads.prepare_to_reduce()
    assert unit.grads.local.data_ptr() != kept.data_ptr()


@pytest.mark.parametrize("size", [3, MOVED_TOGETHER + 3])
def test_the_peak_counts_a_gradient_beside_the_buffer(size: int):
    parameter = nn.Parameter(torch.zeros(size))
    unit = FlatUnit("unit", 0, [("weight", parameter)], 1, PRECISIONS["fp32"])
    before = unit.meter.held_bytes
    unit.grads.expect()
    parameter.grad = torch.ones(size)
    unit.grads.collect(unit.grads.spans[0], unit.grads.take(unit.grads.spans[0]))
    unit.grads.move()
    assert unit.meter.peak_bytes == before + 4 * unit.padded_numel + 4 * size
    assert unit.meter.held_bytes == before + 4 * unit.padded_numel


def gradients_alive_at_reduction(stage: int) -> int:
    """How many of autograd's own gradients are in memory when their unit's reduction is issued."""
    model, seen, alive = nn.Linear(MOVED_TOGETHER, 1, bias=False), [], []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(weakref.ref(p.grad)))
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    reduce_grads = optimizer.stage.reduce_grads

    def reduce(unit: FlatUnit):
        alive.append(sum(each() is not None for each in seen))
        return reduce_grads(unit)

    optimizer.stage.reduce_grads = reduce
    model(torch.ones(1, MOVED_TOGETHER)).sum().backward()
    (number,) = alive
    return number


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_that_was_moved_is_freed_before_its_unit_is_reduced(stage: int):
    assert zerolab.launch(gradients_alive_at_reduction, 1, stage, timeout=60) == [0]

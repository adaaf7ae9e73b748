"""Promise: clip_grad_value_ limits each element of the mean gradients, with one process's bits everywhere."""

import sys

import cloudpickle
import pytest
import torch
from support import training
from support.references import Replicas, copies, seeded
from support.user_models import Net
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

CLIP_VALUE = 0.004  # between the sizes of this model's gradients
PRECISIONS = ("fp32", "mixed", "mixed_fp32_grads", "mixed_fp16")


def reference(precision: str, world_size: int) -> dict[str, torch.Tensor]:
    """The parameters after some steps of replicas in one process; in each some elements are limited."""
    replicas = Replicas(Net, world_size, torch.optim.AdamW, precision=precision, lr=0.05)
    for step in range(training.STEPS):
        for micro in range(2):
            for rank, model in enumerate(replicas.models):
                replicas.scaled(loss(model, 2 * step + micro, rank)).backward()
            replicas.collect()
            replicas.clip_grad_value_(CLIP_VALUE)
        sizes = torch.cat([each.abs().flatten() for each in replicas.total.values()]) / replicas.applied
        assert 0.1 < (sizes >= 0.99 * CLIP_VALUE).float().mean() < 0.9
        replicas.step()
        replicas.zero_grad()
    dtype = replicas.dtype
    return {name: p.to(dtype) for name, p in copies(replicas.whole.named_parameters()).items()}


def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(training.micro_batch(step, rank)).float().square().mean()


def train(precision: str, stage: int) -> dict[str, torch.Tensor]:
    """The same as one rank: a clip after each of two micro-batches."""
    model = seeded(Net)
    settings = {"stage": stage, "precision": precision}
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, **settings, lr=0.05)
    scaled = optimizer.scale if precision == "mixed_fp16" else lambda loss: loss
    for step in range(training.STEPS):
        for micro in range(2):
            scaled(loss(model, 2 * step + micro, optimizer.rank)).backward()
            optimizer.clip_grad_value_(CLIP_VALUE)
        optimizer.step()
        optimizer.zero_grad()
    return training.whole(model, optimizer)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_stage_has_the_bits_of_one_process(precision: str, world_size: int):
    expected = reference(precision, world_size)
    every = lambda: [train(precision, stage) for stage in range(4)]
    for by_stage in zerolab.launch(every, world_size, timeout=60):
        for found in by_stage:
            assert training.differing(found, expected) == []


def test_pytorchs_own_function_limits_the_same_elements():
    def train() -> list[str]:
        model, plain = seeded(Net), seeded(Net)
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=2, lr=0.1)
        loss(model, 0, 0).backward()
        loss(plain, 0, 0).backward()
        optimizer.clip_grad_value_(CLIP_VALUE)
        nn.utils.clip_grad_value_(plain.parameters(), CLIP_VALUE)
        return training.differing(optimizer.full_grads(), {n: p.grad for n, p in plain.named_parameters()})

    assert zerolab.launch(train, 1, timeout=60) == [[]]


@pytest.mark.parametrize("stage", [0, 3])
def test_an_overflow_of_fp16_is_not_clipped_away(stage: int):
    """A clipped infinity would be a finite gradient of no meaning, and the step would be taken."""

    def train() -> tuple:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        settings = {"stage": stage, "precision": "mixed_fp16"}
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, **settings, lr=0.5)
        weights = []
        for value in (60000.0, 1.0, -60000.0):  # times the loss scale, both ends of the range are left
            given = torch.tensor([[value if optimizer.rank == 1 else 1.0]])
            optimizer.scale(model(given).float().sum()).backward()
            optimizer.clip_grad_value_(10.0)  # times the loss scale, more than fp16 holds
            optimizer.step()
            optimizer.zero_grad()
            with optimizer.full_params():
                weights.append(model.weight.item())
        return weights, optimizer.loss_scale.skipped_steps

    assert zerolab.launch(train, 2, timeout=60) == [([1.0, 0.5, 0.5], 2)] * 2


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_a_bad_value_is_refused_before_anything_changes(bad: float):
    def train() -> str:
        model = Net()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=2, lr=0.1)
        model(torch.ones(1, training.WIDTH)).sum().backward()
        before = optimizer.full_grads()
        try:
            optimizer.clip_grad_value_(bad)
        except ValueError as error:
            assert training.differing(optimizer.full_grads(), before) == []
            return str(error)
        return "no error"

    (message,) = zerolab.launch(train, 1, timeout=60)
    assert f"clip_value is {bad}" in message and "clip_value >= 0" in message


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_pass_other_values_are_told_both(stage: int):
    def train() -> None:
        model = seeded(Net)
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
        loss(model, 0, optimizer.rank).backward()
        optimizer.clip_grad_value_(0.2 if optimizer.rank == 1 else 0.1)
        optimizer.step()

    with pytest.raises(zerolab.WorkerError, match="values to clip to") as caught:
        zerolab.launch(train, 2, timeout=60)
    assert "clip to 0.1" in str(caught.value) and "clip to 0.2" in str(caught.value)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_that_clips_alone_is_named(stage: int):
    def train() -> None:
        model = seeded(Net)
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
        loss(model, 0, optimizer.rank).backward()
        if optimizer.rank == 1:
            optimizer.clip_grad_value_(0.1)
        optimizer.step()
        loss(model, 1, optimizer.rank).backward()
        optimizer.step()

    with pytest.raises(zerolab.WorkerError, match=r"values to clip to 0\.1"):
        zerolab.launch(train, 3, timeout=60)


def test_without_any_gradient_nothing_is_clipped():
    def train() -> int:
        optimizer = zerolab.ZeroOptimizer(Net(), torch.optim.SGD, stage=3, lr=0.1)
        optimizer.clip_grad_value_(1.0)
        return len(optimizer.full_grads())

    assert zerolab.launch(train, 2, timeout=60) == [0, 0]

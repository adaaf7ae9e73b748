"""Promise: fp16 trains with a loss scale that finds itself; overflow anywhere skips the step everywhere."""

from pathlib import Path

import pytest
import torch
from torch import nn

import zerolab
from zerolab.optimizer.loss_scale import LossScale


class Line(nn.Linear):
    """One weight. Its gradient is the mean of the inputs."""

    def __init__(self):
        super().__init__(1, 1, bias=False)
        nn.init.ones_(self.weight)


def build(stage: int = 2) -> zerolab.ZeroOptimizer:
    return zerolab.ZeroOptimizer(Line(), torch.optim.SGD, stage=stage, precision="mixed_fp16", lr=0.5)


def step(optimizer: zerolab.ZeroOptimizer, value: float) -> float:
    """One step on the input given; the weight after it."""
    loss = optimizer.model(torch.tensor([[value]])).float().sum()
    optimizer.scale(loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    with optimizer.full_params():
        return optimizer.model.weight.item()


def overflow_on_rank_1(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For `verify`: in step 1 rank 1's tokens repeat so often that its gradients leave fp16."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(4, 8, generator=generator)
    return x * (30000 if (step, rank) == (1, 1) else 1), torch.randn(4, generator=generator)


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x, y):
        return (self.layers(x).float().squeeze(1) - y.float()).square().mean()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bits_of_one_process_that_skips_the_same_step(stage: int):
    report = zerolab.verify(
        stage, 2, Regression, overflow_on_rank_1, torch.optim.Adam, steps=4, precision="mixed_fp16", lr=0.01
    )
    assert report.ok, report
    assert report.losses == report.reference_losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(stage: int):
    def run():
        optimizer = build(stage)
        values = [60000.0 if step_number == 1 and optimizer.rank == 1 else 1.0 for step_number in range(3)]
        weights = [step(optimizer, value) for value in values]
        return weights, optimizer.loss_scale.value, optimizer.loss_scale.skipped_steps

    for weights, value, skipped in zerolab.launch(run, 3):
        assert weights == [0.5, 0.5, 0.0]
        assert (value, skipped) == (2.0**14, 1)


def test_gradients_that_fp16_cannot_hold_are_kept_by_the_scale():
    """2e-7 is a few of fp16's smallest steps, and exact to three digits once it is scaled."""

    def run():
        optimizer = build()
        (optimizer.scale(optimizer.model(torch.ones(1, 1)).float().sum() * 2e-7)).backward()
        (gradient,) = optimizer.full_grads().values()
        norm = optimizer.clip_grad_norm_(1.0)
        return gradient.item(), norm.item()

    for gradient, norm in zerolab.launch(run, 2):
        assert gradient == pytest.approx(2e-7, rel=1e-3)
        assert norm == pytest.approx(2e-7, rel=1e-3)


def test_clipping_is_of_the_gradient_and_not_of_its_multiple():
    def run():
        optimizer = build()
        optimizer.scale(optimizer.model(torch.full((1, 1), 1.5)).float().sum()).backward()
        norm = optimizer.clip_grad_norm_(1.0).item()
        optimizer.step()
        return norm, optimizer.model.weight.item()

    assert zerolab.launch(run, 2) == [(1.5, 0.5)] * 2


def test_micro_batches_of_one_scale_add_up():
    def run():
        optimizer = build(stage=1)
        with optimizer.no_sync():
            optimizer.scale(optimizer.model(torch.full((1, 1), 0.25)).float().sum()).backward()
        optimizer.scale(optimizer.model(torch.full((1, 1), 0.5)).float().sum()).backward()
        optimizer.step()
        return optimizer.model.weight.item()

    assert zerolab.launch(run, 2) == [0.625] * 2


def test_a_loss_that_was_not_scaled_is_refused():
    def run():
        optimizer = build()
        optimizer.model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    with pytest.raises(zerolab.WorkerError, match=r"call optimizer.scale\(loss\).backward\(\)"):
        zerolab.launch(run, 2)


def test_a_loss_that_was_not_scaled_after_a_step_with_one_that_was_is_refused():
    def train() -> None:
        model = nn.Linear(4, 1)
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, precision="mixed_fp16", lr=0.1)
        optimizer.scale(model(torch.ones(2, 4)).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    with pytest.raises(zerolab.WorkerError, match="the loss was not scaled"):
        zerolab.launch(train, 1)


def test_a_nan_in_the_data_is_not_skipped_for_ever():
    def run():
        optimizer = build()
        for _ in range(40):
            step(optimizer, float("nan"))

    with pytest.raises(zerolab.WorkerError, match="look for inf or NaN in the data"):
        zerolab.launch(run, 2)


def test_in_other_precisions_the_loss_is_itself():
    def run():
        loss = torch.ones(())
        optimizer = zerolab.ZeroOptimizer(Line(), torch.optim.SGD, precision="mixed", lr=0.5)
        return optimizer.scale(loss) is loss, optimizer.loss_scale

    assert zerolab.launch(run, 1) == [(True, None)]


def test_it_doubles_after_enough_good_steps_and_halves_at_an_overflow():
    def run():
        optimizer = build()
        optimizer.loss_scale.value, optimizer.loss_scale.growth_interval = 1024.0, 2
        seen = []
        for value in (0.0, 0.0, 0.0, float("inf"), 0.0, 0.0):
            step(optimizer, value)
            seen.append(optimizer.loss_scale.value / 1024)
        return seen

    assert zerolab.launch(run, 1) == [[1, 2, 2, 1, 1, 2]]


def test_it_goes_into_the_checkpoint_and_the_state_dict(tmp_path: Path):
    def run():
        optimizer = build()
        step(optimizer, 60000.0)
        zerolab.save(optimizer, tmp_path)
        again, third = build(stage=3), build()
        zerolab.load(again, tmp_path)
        third.load_state_dict(optimizer.state_dict())
        return [each.loss_scale.state_dict() for each in (optimizer, again, third)]

    for first, second, third in zerolab.launch(run, 2):
        assert first == second == third == LossScale(2.0**14).state_dict() | {"skipped_steps": 1}


def test_a_checkpoint_of_another_precision_starts_with_a_fresh_scale(tmp_path: Path):
    def run():
        exact = zerolab.ZeroOptimizer(Line(), torch.optim.SGD, lr=0.5)
        zerolab.save(exact, tmp_path)
        optimizer = build()
        zerolab.load(optimizer, tmp_path)
        return optimizer.loss_scale.state_dict()

    assert zerolab.launch(run, 1) == [LossScale().state_dict()]


def test_a_rehearsal_counts_the_same_bytes_as_bf16():
    def inputs():
        return torch.ones(4, 8), torch.ones(4)

    def numbers(precision: str):
        found = zerolab.rehearse(Regression, 64, 3, precision, inputs=inputs)
        return found.memory, found.traffic.wire_bytes

    assert numbers("mixed_fp16") == numbers("mixed")

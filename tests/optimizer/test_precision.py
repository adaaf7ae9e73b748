"""Mixed precision: the same bits as one process in the same dtypes, and the paper's 2 + 2 + 12 bytes."""

import dataclasses
import sys

import cloudpickle
import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp

import zerolab
from zerolab.precision import PRECISIONS, reduce_op

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

BYTES = {"fp32": (4, 4, 8), "mixed": (2, 2, 12), "mixed_fp32_grads": (2, 4, 12), "mixed_fp16": (2, 2, 12)}


@pytest.mark.parametrize("precision", BYTES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bits_bytes_and_messages(precision: str, stage: int):
    """Three ranks, so that no division is exact, and Adam, so that the masters' digits matter."""
    report = zerolab.verify(stage, 3, precision=precision)
    assert report.bit_identical and report.traffic_matches and report.memory_matches
    assert report.losses == report.reference_losses
    psi = report.predicted_memory.params_bytes * (3 if stage == 3 else 1) / BYTES[precision][0]
    params, grads, state = BYTES[precision]
    assert report.memory.params_bytes == pytest.approx(params * psi / (3 if stage >= 3 else 1))
    assert report.memory.grads_bytes == pytest.approx(grads * psi / (3 if stage >= 2 else 1))
    assert report.memory.optimizer_bytes == pytest.approx(state * psi / (3 if stage >= 1 else 1))


def test_sixteen_bit_gradients_are_rounded_once():
    """256 + 1 + 1 is 256 in bf16 at every partial sum, and 258 where the sum is kept in fp32."""

    def gradient():
        model = nn.Linear(1, 1, bias=False)
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=2, precision="mixed", lr=0.0)
        part = torch.tensor([[256.0], [1.0], [1.0]])[optimizer.rank]
        model(part).sum().backward()
        return optimizer.full_grads()["weight"].item()

    assert zerolab.launch(gradient, 3) == [86.0] * 3


def test_a_master_remembers_what_bf16_cannot():
    """A thousand updates of 1e-4 move a weight of 1.0 by 0.1; in bf16 alone each would be rounded away."""

    def walk():
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=1, precision="mixed", lr=1e-4)
        for _ in range(1000):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.dtype, model.weight.item()

    for dtype, weight in zerolab.launch(walk, 2):
        assert dtype == torch.bfloat16
        assert weight == pytest.approx(0.9, abs=0.005)


@pytest.mark.parametrize("stage", [2, 3])
def test_inputs_are_cast_and_whole_numbers_are_not(stage: int):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 1)

        def forward(self, tokens, *, scale):
            assert tokens.dtype == torch.int64 and scale.dtype == self.head.weight.dtype == torch.bfloat16
            return (self.head(self.embedding(tokens)) * scale).mean()

    def step():
        optimizer = zerolab.ZeroOptimizer(Model(), torch.optim.Adam, stage=stage, precision="mixed")
        optimizer.model(torch.arange(8), scale=torch.ones(8, 1)).backward()
        optimizer.step()
        return True

    assert zerolab.launch(step, 2) == [True, True]


@pytest.mark.parametrize("stage", [1, 3])
def test_what_full_params_shows_is_rounded_and_what_was_not_written_keeps_its_digits(stage: int):
    def write():
        torch.manual_seed(0)
        model = nn.Linear(8, 8, bias=False)
        start = model.weight.detach().clone()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, precision="mixed", lr=0.1)
        with torch.no_grad(), optimizer.full_params():
            assert torch.equal(model.weight, start.bfloat16())
            model.weight[0] = 2.0
        (unit,) = optimizer.units
        start[0] = 2.0
        return torch.equal(unit.values()[: unit.numel], start.view(-1)[unit.owned][: unit.numel])

    assert zerolab.launch(write, 2) == [True, True]


@pytest.mark.parametrize("precision", ["fp64", "bf16", None, 16])
def test_a_precision_that_is_none_is_refused(precision):
    with pytest.raises(ValueError, match=r"precision is .*choose from 'fp32', 'mixed', 'mixed_fp32_grads'"):
        zerolab.verify(1, 1, precision=precision)


def test_only_sixteen_bits_reduce_to_their_mean():
    ops = [reduce_op(each.gradients) for each in PRECISIONS.values()]
    assert ops == [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.SUM, ReduceOp.AVG]


class Normed(nn.Module):
    """A batch norm between two layers that are trained in 16 bits."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 1, 3))

    def forward(self, images):
        return self.layers(images).float().square().mean()


def images(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("precision", BYTES)
@pytest.mark.parametrize("stage", [1, 3])
def test_batch_norm_stays_in_fp32_and_trains(stage: int, precision: str):
    report = zerolab.verify(stage, 2, Normed, images, torch.optim.AdamW, precision=precision, lr=0.05)
    assert report.ok, report


def frozen_in_part() -> nn.Module:
    model = zerolab.models.GPT(vocab=16, width=8, depth=3, heads=2, context=8)
    model.blocks[1].requires_grad_(False)
    model.embedding.requires_grad_(False)
    return model


def text(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))
    return tokens[:, :-1], tokens[:, 1:]


OTHERS = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("precision", ["mixed", "mixed_fp32_grads", "mixed_fp16"])
def test_other_optimizers_and_frozen_parameters(precision: str, name: str):
    optimizer_class, defaults = OTHERS[name]
    for stage in (1, 3):
        report = zerolab.verify(
            stage, 2, frozen_in_part, text, optimizer_class, precision=precision, **defaults
        )
        assert report.ok, report


def write_in_place(model) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.75)


def write_through_data(model) -> None:
    for p in model.parameters():
        p.data.clamp_(0.75, 0.75)


def load_a_state_dict(model) -> None:
    model.load_state_dict({name: torch.full_like(value, 0.75) for name, value in model.state_dict().items()})


@pytest.mark.parametrize("precision", ["mixed", "fp32"])
@pytest.mark.parametrize("write", [write_in_place, write_through_data, load_a_state_dict])
def test_what_is_written_to_parameters_is_what_is_trained_and_saved(write, precision: str, tmp_path):
    """Not only inside full_params(): below stage 3 parameters are there to be written to at any time."""

    def train(stage: int) -> tuple:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, precision=precision, lr=0.5)
        inputs = torch.ones(2, 8, dtype=model[0].weight.dtype)
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        write(model)
        zerolab.export(optimizer, tmp_path / f"{stage}.pt")
        written = model[0].weight.clone()
        (0 * model(inputs)).sum().backward()
        optimizer.step()
        return written, model[0].weight.clone()

    for stage in (0, 1, 2):
        for written, after in zerolab.launch(train, 2, stage):
            assert (written == 0.75).all() and (after == 0.75).all()
        assert all((value == 0.75).all() for value in torch.load(tmp_path / f"{stage}.pt").values())


@dataclasses.dataclass
class Batch:
    features: torch.Tensor
    labels: torch.Tensor
    names: list[str]


class OfBatches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, batch: Batch, extra: dict):
        assert batch.names == ["a"] and batch.labels.dtype == torch.int64
        return self.layer(batch.features + extra["batch"].features)


def train_on_a_dataclass() -> torch.dtype:
    model = OfBatches()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, lr=0.1, precision="mixed")
    batch = Batch(torch.randn(2, 2), torch.ones(2, dtype=torch.int64), ["a"])
    model(batch, {"batch": batch}).sum().backward()
    optimizer.step()
    return batch.features.dtype


def test_dataclasses_among_the_inputs_are_cast_and_the_users_own_stay_as_they_are():
    assert zerolab.launch(train_on_a_dataclass, 2) == [torch.float32] * 2

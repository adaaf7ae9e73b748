"""Promise: a model built on the meta device gets its memory and its start unit by unit, all of it."""

import pytest
import torch
from support.resident_memory import give_memory_back_when_freed, growth
from torch import nn

import zerolab
from zerolab.models import GPT


def on_meta(build):
    with torch.device("meta"):
        return build()


def small_gpt(tied: bool = False) -> GPT:
    return GPT(vocab=64, width=32, depth=3, heads=2, context=16, tied=tied)


def train_from_meta(stage: int, tied: bool, seed_by_rank: bool) -> dict[str, torch.Tensor]:
    model = on_meta(lambda: small_gpt(tied))
    torch.manual_seed(torch.distributed.get_rank() if seed_by_rank else 0)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    tokens = torch.arange(32).view(2, 16)
    for _ in range(2):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.full_params():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_every_stage_starts_from_rank_0s_values(tied: bool):
    """The same start at every stage, whatever the other ranks drew."""
    (expected,) = zerolab.launch(train_from_meta, 1, 0, tied, False)
    assert not any(p.isnan().any() for p in expected.values())
    for stage in (1, 3):
        for found in zerolab.launch(train_from_meta, 2, stage, tied, True):
            assert found.keys() == expected.keys()
            assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)


def test_the_start_is_the_models_own():
    """GPT-2's: deviations of 0.02, smaller by √(2·depth) where a block writes to the stream; biases zero."""

    def start() -> dict[str, float]:
        model = on_meta(lambda: GPT(vocab=256, width=128, depth=2, heads=2, context=64))
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1)
        with optimizer.full_params():
            return {name: p.float().std().item() for name, p in model.named_parameters() if p.dim() == 2}

    (deviations,) = zerolab.launch(start, 1)
    for name, deviation in deviations.items():
        expected = 0.01 if name.endswith("_out.weight") else 0.02
        assert deviation == pytest.approx(expected, rel=0.05), name


def test_a_stage_3_model_is_never_whole_on_a_rank():
    """A rank that starts 400 MB of parameters at N = 4 needs its quarter and a few units, not all of it."""

    def shard(depth: int) -> zerolab.ZeroOptimizer:
        model = on_meta(lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(depth))))
        return zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1)

    def peak_bytes(depth: int) -> tuple[int, int]:
        give_memory_back_when_freed()
        shard(2)  # what a first model costs once
        made = []
        grown_bytes = growth(lambda: made.append(shard(depth)))
        return 4 * sum(unit.numel for unit in made[0].units), grown_bytes

    for psi_bytes, grown_bytes in zerolab.launch(peak_bytes, 4, 96):
        assert psi_bytes > 384e6
        assert grown_bytes < psi_bytes / 4 + 64e6


class Angles(nn.Module):
    """Only a buffer, computed when it is made, as a table of rotary angles is."""

    def __init__(self, fills: bool = True):
        super().__init__()
        self.fills = fills
        self.register_buffer("angles", torch.arange(4.0))

    def reset_parameters(self) -> None:
        if self.fills:
            self.angles.copy_(torch.arange(4.0))

    def forward(self, x):
        return x * self.angles


class Scale(nn.Module):
    """A parameter, and nothing that says how it starts."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Negligent(Scale):
    def reset_parameters(self) -> None:
        pass


def test_buffers_and_frozen_parameters_start_too():
    def run():
        model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Angles(), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        model[0].requires_grad_(False)
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        assert not model[0].weight.requires_grad
        return {name: buffer.tolist() for name, buffer in model.named_buffers()}

    for buffers in zerolab.launch(run, 2):
        assert buffers["1.angles"] == [0, 1, 2, 3]
        assert buffers["2.num_batches_tracked"] == 1


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (
            lambda: nn.Sequential(nn.Linear(4, 4), Scale()),
            r"1 \(Scale\) is on the meta .* has no reset_parameters",
        ),
        (lambda: nn.Sequential(nn.Linear(4, 4), Negligent()), r"1 \(Negligent\) .* leaves scale unwritten"),
        (lambda: nn.Sequential(nn.Linear(4, 4), Angles(False)), r"1 \(Angles\) .* leaves angles unwritten"),
    ],
)
def test_what_cannot_start_is_named(build, complaint: str):
    def construct():
        zerolab.ZeroOptimizer(on_meta(build), torch.optim.SGD, stage=3, lr=0.1)

    with pytest.raises(zerolab.WorkerError, match=complaint):
        zerolab.launch(construct, 2)

"""Promise: pairs of layers that the user names train with the bits of the same products in one process."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

RANKS, STEPS = 2, 3


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Gated(nn.Module):
    """Two pairs between which features stay apart: a gate beside its values, and a plain pair with a norm."""

    def __init__(self):
        super().__init__()
        self.gate_and_up, self.down = nn.Linear(6, 16), nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.wide, self.narrow = nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x).chunk(2, -1)
        x = self.norm(x + self.down(F.silu(gate) * up))
        return self.narrow(self.wide(x).tanh()).square().mean()


class InParts(Gated):
    """The same in one process, with the products of each rank, added up in rank order."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + (self.sum_of(x, self.gated) + self.down.bias))
        return self.sum_of(x, self.plain).square().mean()

    def sum_of(self, x: Tensor, part) -> Tensor:
        first, second = (part(x, rank) for rank in range(RANKS))
        return first + second

    def gated(self, x: Tensor, rank: int) -> Tensor:
        halves = zip(self.gate_and_up.weight.chunk(2), self.gate_and_up.bias.chunk(2), strict=True)
        own = [(weight.chunk(RANKS)[rank], bias.chunk(RANKS)[rank]) for weight, bias in halves]
        (gate, gate_bias), (up, up_bias) = own
        both = F.linear(x, torch.cat([gate, up]), torch.cat([gate_bias, up_bias]))
        gated, up = both.chunk(2, -1)
        return F.linear(
            F.silu(gated) * up,
            self.down.weight.chunk(RANKS, 1)[rank].clone(memory_format=torch.contiguous_format),
        )

    def plain(self, x: Tensor, rank: int) -> Tensor:
        wide = F.linear(x, self.wide.weight.chunk(RANKS)[rank].clone())  # aligned, as a part is
        return F.linear(
            wide.tanh(), self.narrow.weight.chunk(RANKS, 1)[rank].clone(memory_format=torch.contiguous_format)
        )


def batch(step: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(step))


def train(stage: int) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    parallel = zerolab.TensorParallel(dist.group.WORLD)
    model = Gated()
    pairs = [(model.gate_and_up, model.down, 2), (model.wide, model.narrow)]
    zerolab.parallelize(model, parallel, pairs)
    alone = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    optimizer = zerolab.ZeroOptimizer(
        model,
        torch.optim.SGD,
        stage=stage,
        lr=0.1,
        momentum=0.9,
        process_group=alone,
        tensor_parallel=parallel,
    )
    for step in range(STEPS):
        model(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.full_params():
        return {name: optimizer.axes.whole(p, p.detach().clone()) for name, p in model.named_parameters()}


def train_alone() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = InParts()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        model(batch(step)).backward()
        sgd.step()
        sgd.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [1, 3])
def test_pairs_that_the_user_names_have_the_bits_of_one_process(stage: int):
    (expected,) = zerolab.launch(train_alone, 1, timeout=60)
    for found in zerolab.launch(train, RANKS, stage, timeout=60):
        assert [name for name, values in expected.items() if not torch.equal(found[name], values)] == []


def dtype_under_autocast(ranks: int) -> torch.dtype:
    up, down = nn.Linear(8, 16), nn.Linear(16, 8)
    model = nn.Sequential(up, nn.ReLU(), down)
    if ranks > 1:
        zerolab.parallelize(model, zerolab.TensorParallel(dist.group.WORLD), pairs=[(up, down)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(torch.ones(2, 8)).dtype


def test_under_autocast_a_layer_returns_the_dtype_of_nn_linear():
    assert (
        zerolab.launch(dtype_under_autocast, 1, 1) + zerolab.launch(dtype_under_autocast, 2, 2)
        == [torch.bfloat16] * 3
    )

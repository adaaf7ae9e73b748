"""The same promises on GPUs over NCCL, whose sums may come in another order: values instead of bits.

One GPU is enough: ranks that share it talk through the loopback.
"""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from support import training
from support.user_models import Block, Net

import zerolab
from zerolab import cost, memory

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device and NCCL"
)
STAGES = (0, 1, 2, 3)


def on_gpus(function, world_size: int, *args) -> list:
    return zerolab.launch(function, world_size, *args, backend="nccl", timeout=180)


def squares(model, x, step):
    yield model(x.cuda()).square().mean()


def two_losses(model, x, step):
    for part in x.cuda().chunk(2):
        yield model(part).square().mean()


class Aside(Block):
    """Its second layer computes on a stream of its own, and so in backward do its gradients."""

    def forward(self, x):
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        inner = torch.tanh(self.first(x))
        side.wait_stream(main)
        with torch.cuda.stream(side):
            out = self.second(inner)
        main.wait_stream(side)
        return x + out


BUILDS = {"one stream": Net, "two streams": lambda: Net(Aside)}


def furthest(kind: str, losses, stage: int, **settings) -> float:
    """On a rank: how far any parameter ended from plain training."""
    build = lambda: BUILDS[kind]().cuda()
    expected = training.train_plain(build, losses, dist.get_world_size())
    found = training.train_sharded(build, losses, stage, **settings)
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("losses", [squares, two_losses])
def test_values_of_plain_training(kind: str, losses, stage: int):
    assert max(on_gpus(furthest, 2, kind, losses, stage)) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_bytes_held_and_sent(stage: int):
    def train() -> tuple:
        model = Net().cuda()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=stage, lr=0.1)
        x = torch.ones(2, training.WIDTH, device="cuda")
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        root = sum(unit.numel for unit in optimizer.units if unit.name == "root")
        psi = sum(unit.numel for unit in optimizer.units)
        return optimizer.memory(), optimizer.trace.traffic(1).logical_bytes, psi, root

    for held, logical_bytes, psi, root in on_gpus(train, 2):
        formula = memory.model_states(psi, 2, stage, "fp32")
        assert held.params_bytes == pytest.approx(formula.params_bytes)
        assert held.grads_bytes == pytest.approx(formula.grads_bytes)
        assert held.optimizer_bytes == pytest.approx(formula.optimizer_bytes)
        kept = root if stage == 3 else 0
        assert logical_bytes == 4 * (cost.communication_volume(psi, stage) - kept)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_fails_is_named(stage: int):
    def train() -> None:
        optimizer = zerolab.ZeroOptimizer(Net().cuda(), torch.optim.SGD, stage=stage, lr=0.1)
        if optimizer.rank == 1:
            raise ArithmeticError("on purpose")
        optimizer.model(torch.ones(2, training.WIDTH, device="cuda")).sum().backward()
        optimizer.step()

    with pytest.raises(zerolab.WorkerError, match="rank 1 failed: ArithmeticError: on purpose"):
        on_gpus(train, 2)

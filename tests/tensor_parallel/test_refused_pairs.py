"""Promise: a layer with something that its part would lack is refused; so is a parameter within a pair."""

import sys
from collections.abc import Callable

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


class Mlp(nn.Module):
    def __init__(self, activation: nn.Module | None = None):
        super().__init__()
        self.up, self.activation, self.down = nn.Linear(4, 8), activation or nn.Tanh(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(x)))


def two_blocks() -> nn.Sequential:
    return nn.Sequential(Mlp(), Mlp())


def tied_weights() -> nn.Module:
    model = two_blocks()
    model[1].up.weight = model[0].up.weight
    return model


def tied_outside() -> nn.Module:
    model = two_blocks()
    model.append(nn.Linear(4, 8))
    model[2].weight = model[0].up.weight
    return model


def one_layer_twice() -> nn.Module:
    model = two_blocks()
    model[1].down = model[0].down
    return model


def weight_norm() -> nn.Module:
    model = two_blocks()
    parametrizations.weight_norm(model[0].up)
    return model


def old_weight_norm() -> nn.Module:
    model = two_blocks()
    nn.utils.weight_norm(model[0].down)
    return model


def a_forward_hook() -> nn.Module:
    model = two_blocks()
    model[0].down.register_forward_hook(lambda module, args, output: 2 * output)
    return model


def a_gradient_hook() -> nn.Module:
    model = two_blocks()
    model[0].up.weight.register_hook(lambda gradient: 2 * gradient)
    return model


def a_forward_of_its_own() -> nn.Module:
    model = two_blocks()
    original = model[0].up.forward
    model[0].up.forward = lambda x: 2 * original(x)
    return model


REFUSED = {
    tied_weights: r"0\.up\.weight and 1\.up\.weight are tied",
    tied_outside: r"0\.up\.weight and 2\.weight are tied",
    one_layer_twice: r"0\.down and 1\.down are one layer",
    weight_norm: r"0\.up is no plain linear layer, because of parametrizations",
    old_weight_norm: r"0\.down is no plain linear layer, because of weight_g, weight_v",
    a_forward_hook: r"0\.down has hooks, which would be lost .* after parallelize\(\)",
    a_gradient_hook: r"0\.up has hooks",
    a_forward_of_its_own: r"0\.up is a Linear with a forward of its own",
}


def refused(build: Callable[[], nn.Module]) -> tuple[str, bool]:
    """On a rank: what is said, and whether the model is as it was."""
    model = build()
    before = [type(each) for each in model.modules()]
    try:
        pairs = [(block.up, block.down) for block in model[:1]]
        zerolab.parallelize(model, zerolab.TensorParallel(dist.group.WORLD), pairs)
    except ValueError as error:
        return str(error), before == [type(each) for each in model.modules()]
    return "", True


@pytest.mark.parametrize("build", REFUSED, ids=lambda build: build.__name__)
def test_what_a_part_would_lack_is_refused_before_anything_is_cut(build: Callable):
    for said, unchanged in zerolab.launch(refused, 2, build, timeout=60):
        with pytest.raises(ValueError, match=REFUSED[build]):
            raise ValueError(said)
        assert unchanged


def tied_bias_of_the_row() -> list[str]:
    """It is not cut, so it may be tied."""
    model = two_blocks()
    model[1].down.bias = model[0].down.bias
    zerolab.parallelize(
        model, zerolab.TensorParallel(dist.group.WORLD), [(block.up, block.down) for block in model]
    )
    return [name for name, each in model.named_parameters() if each is model[1].down.bias]


def test_a_parameter_that_is_not_cut_may_be_tied():
    assert zerolab.launch(tied_bias_of_the_row, 2, timeout=60) == [["0.down.bias"]] * 2


def train(stage: int, activation: nn.Module, by: str) -> str:
    """On a rank of two that share a copy: what the first use of the gradients says."""
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(activation), nn.Linear(4, 4))
    parallel = zerolab.TensorParallel(dist.group.WORLD)
    zerolab.parallelize(model, parallel, [(model[0].up, model[0].down)])
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    optimizer = zerolab.ZeroOptimizer(
        model, torch.optim.SGD, stage=stage, lr=0.1, process_group=alone, tensor_parallel=parallel
    )
    for seed in range(2):
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
        try:
            optimizer.clip_grad_norm_(1.0) if by == "clip" else optimizer.step()
        except RuntimeError as error:
            return str(error)
        optimizer.zero_grad()
    return "trained"


@pytest.mark.parametrize("by", ["step", "clip"])
@pytest.mark.parametrize("stage", range(4))
def test_a_trainable_parameter_between_the_layers_is_refused_at_the_first_step(stage: int, by: str):
    """Each rank has the gradient of its own features; a parameter that is not trained stays the same."""
    for said in zerolab.launch(train, 2, stage, nn.PReLU(), by, timeout=60):
        assert said.startswith("ranks disagree about a step of tensor-parallel ranks")
        assert "the gradient of 0.activation.weight" in said and "trainable parameter between them" in said
    frozen = nn.PReLU().requires_grad_(False)
    assert zerolab.launch(train, 2, stage, frozen, by, timeout=60) == ["trained"] * 2

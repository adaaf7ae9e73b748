"""A small model and its optimizer, on the way: what the tests of the sharded life of a model start from."""

import torch

import zerolab
from support import training
from support.user_models import Net


def build(stage: int = 3, model_class=Net, **settings):
    torch.manual_seed(0)
    model = model_class()
    return model, zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=0.05, **settings)


def train(model, optimizer, steps: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(training.micro_batch(step, optimizer.rank)).square().mean().backward()
        optimizer.step()


def train_a_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step of a model with four inputs, with either kind of optimizer; its gradients are cleared."""
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def on_two_ranks(fn, *args):
    return zerolab.launch(fn, 2, *args, timeout=60)


def values_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}

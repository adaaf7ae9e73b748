"""Optimizers that update whole parameters, and models for them."""

from collections.abc import Callable, Iterable

import torch
from torch import nn


class Orthogonal(torch.optim.Optimizer):
    """Momentum, orthogonalized by a few Newton-Schulz steps, for parameters of any number of dimensions.

    A written-out Muon: one with more than two dimensions is a matrix with a row for each of its first, and
    one with fewer is divided by its norm.
    """

    def __init__(self, params: Iterable, lr: float = 0.02, momentum: float = 0.9, weight_decay: float = 0.1):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["momentum"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["momentum"].mul_(group["momentum"]).add_(p.grad)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(orthogonalized(state["momentum"]), alpha=-group["lr"])


def orthogonalized(x: torch.Tensor) -> torch.Tensor:
    if x.dim() < 2 or not x.numel():
        return x / (x.norm() + 1e-7)
    matrix = x.reshape(len(x), -1)
    matrix = matrix / (matrix.norm() + 1e-7)
    for _ in range(3):
        product = matrix @ matrix.T
        matrix = 1.5 * matrix - 0.5 * product @ matrix
    return matrix.view(x.shape)


class Together:
    """Stock optimizers that are stepped one after the other, as by one who trains in one process."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict:
        return {p: each for optimizer in self.optimizers for p, each in optimizer.state.items()}

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def together(groups: list[dict], main: type = torch.optim.AdamW, **defaults) -> Together:
    """The optimizers of groups, some of which name their class, as ZeroOptimizer takes them."""
    plain = [group for group in groups if "optimizer" not in group]
    own = [dict(group) for group in groups if "optimizer" in group]
    optimizers = [main(plain, **defaults)] if plain else []
    return Together(
        [*optimizers, *(group.pop("optimizer")([{"params": group.pop("params")}], **group) for group in own)]
    )


def matrices_and_others(model: nn.Module) -> list[dict]:
    """Two groups: the matrices by Muon, and everything else by the optimizer's own class."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() != 2]},
        {
            "params": [p for p in trainable if p.dim() == 2],
            "optimizer": torch.optim.Muon,
            "lr": 0.02,
            "momentum": 0.9,
        },
    ]


def everything(optimizer_class: type = Orthogonal) -> Callable[[nn.Module], list[dict]]:
    """One group of all trainable parameters."""
    return lambda model: [
        {"params": [p for p in model.parameters() if p.requires_grad], "optimizer": optimizer_class}
    ]


class Signed(Orthogonal):
    """Keeps one of its keywords in an attribute, where no parameter group shows it."""

    def __init__(self, params: Iterable, lr: float, sign: float = 1.0):
        super().__init__(params, lr)
        self.sign = sign

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad.mul_(self.sign)
        super().step()


class SignedByElement(torch.optim.Optimizer):
    """The same, elementwise."""

    def __init__(self, params: Iterable, lr: float, sign: float = 1.0):
        super().__init__(params, {"lr": lr})
        self.sign = sign

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.add_(p.grad, alpha=-group["lr"] * self.sign)


class Asks(Orthogonal):
    """Asks for an entry in each group that is no keyword of its own."""

    def __init__(self, params: Iterable, lr: float = 0.02):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["lr"] *= group["strength"]


class Trusting(torch.optim.Optimizer):
    """Elementwise, unless it decays weights: then it divides by the parameter's norm, as LAMB does."""

    def __init__(self, params: Iterable, lr: float = 0.1, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                update = p.grad + group["weight_decay"] * p
                p.add_(update / (1 + p.norm()) if group["weight_decay"] else update, alpha=-group["lr"])

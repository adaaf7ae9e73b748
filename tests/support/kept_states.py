"""Optimizers that keep their state in forms that torch's own do not have."""

import torch

from support.odd_optimizers import SignSGD


class Factors(SignSGD):
    """Keeps a matrix for each dimension in a list, as Shampoo does, and the last traces in a dict."""

    def update(self, group: dict, p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state["factors"], state["last"] = [torch.zeros(size, size) for size in p.shape], {}
        for dim, factor in enumerate(state["factors"]):
            rows = gradient.movedim(dim, 0).reshape(len(factor), -1)
            factor.add_(rows @ rows.T)
        state["last"]["traces"] = [factor.trace() for factor in state["factors"]]
        return gradient / (1e-3 + sum(factor.diagonal().sqrt().sum() for factor in state["factors"]))


class Columns(SignSGD):
    """Keeps a momentum column by column, as torch.linalg.qr returns matrices."""

    def update(self, group: dict, p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if not state:
            dims = range(p.dim())
            state["momentum"] = torch.zeros(p.shape[::-1]).permute(*reversed(dims)) if p.dim() else 0.0
        state["momentum"] = state["momentum"] * 0.9 + gradient
        return state["momentum"] / (1e-3 + state["momentum"].norm())


class Gaps(SignSGD):
    """Keeps a momentum in every other element of its memory."""

    def update(self, group: dict, p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros(*p.shape, 2)[..., 0]
        state["momentum"].mul_(0.9).add_(gradient)
        return state["momentum"] / (1e-3 + state["momentum"].norm())


class Half(SignSGD):
    """Elementwise, with a momentum in 16 bits and a count in 64."""

    def update(self, group: dict, p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p, dtype=torch.bfloat16)
            state["count"] = torch.zeros((), dtype=torch.int64)
        state["count"] += 1
        state["momentum"].mul_(0.9).add_(gradient.bfloat16())
        return self.scaled(state["momentum"].float()) / (1 + state["count"] % 3)

    def scaled(self, momentum: torch.Tensor) -> torch.Tensor:
        return momentum


class WholeHalf(Half):
    """The same for whole parameters."""

    def scaled(self, momentum: torch.Tensor) -> torch.Tensor:
        return momentum / (1e-3 + momentum.norm())


class Flags(SignSGD):
    """Keeps one byte for each element."""

    def update(self, group: dict, p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state["flags"] = torch.zeros(p.shape, dtype=torch.int8)
        state["flags"] ^= (gradient > 0).to(torch.int8)
        return state["flags"] * gradient / (1e-3 + gradient.norm())


STORABLE = (Factors, Columns, Half, WholeHalf, Flags)

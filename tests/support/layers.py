"""Three small layers that are trained one step at a time, by a plain optimizer or by the engine."""

from collections.abc import Iterable

import torch
from torch import nn

from support.together import update_together


class Layers(nn.Sequential):
    def forward(self, x: torch.Tensor, layers: slice) -> torch.Tensor:
        for layer in list(self)[layers]:
            x = layer(x)
        return x


def three_layers() -> Layers:
    """Layers that are units, and are updated one by one as large units are."""
    update_together(False)
    torch.manual_seed(0)
    return Layers(*(nn.Linear(4, 4) for _ in range(3)))


def step(optimizer: torch.optim.Optimizer, model: Layers, number: int, layers: slice = slice(None)):
    """A step on a few of the layers."""
    optimizer.zero_grad()
    drawn = torch.randn(2, 4, generator=torch.Generator().manual_seed(number))
    loss = model(drawn, layers).float().square().mean()
    (optimizer.scale(loss) if hasattr(optimizer, "scale") else loss).backward()
    optimizer.step()


def parameters(model: nn.Module, optimizer) -> list[torch.Tensor]:
    with optimizer.full_params():
        return [p.detach().clone() for p in model.parameters()]


def same(ours: list[torch.Tensor], theirs: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))

"""Models made of stock layers, drawn by kind: each block maps [BATCH, WIDTH] to the same shape."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import zerolab

WIDTH, BATCH = 6, 3


class Residual(nn.Module):
    """A stock layer between an input and an output of the block's shape."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Convolution(nn.Module):
    def __init__(self, *more: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(1, 3, 3, padding=1), *more)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x[:, None]).mean(1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = x.view(len(x), 3, 2)
        return self.attend(steps, steps, steps)[0].reshape(x.shape)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.recur, self.out = nn.GRU(2, 4, batch_first=True), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.recur(x.view(len(x), 3, 2))[0].flatten(1))


class Embedded(nn.Module):
    """Looks rows up by the signs of its input."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(WIDTH + 1, WIDTH, padding_idx=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rows((x > 0).sum(1))


class Twice(nn.Module):
    """One layer used twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.form = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(x, x)


class Sometimes(nn.Module):
    """Parameters used by the data: always, where the first input is positive, and never."""

    def __init__(self):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(WIDTH))
        self.never, self.nothing = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.gain + self.nothing.sum()
        return x + self.shift if x[0, 0] > 0 else x


class Checkpointed(nn.Module):
    """A block that is computed again in backward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 9), nn.Dropout(0.2), nn.Linear(9, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def frozen_in_part() -> nn.Module:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    layers[0].weight.requires_grad_(False)
    return layers


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)),
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
    "convolution": lambda: Convolution(nn.GroupNorm(3, 3), nn.PReLU()),
    "convolution, batch norm": lambda: Convolution(nn.BatchNorm1d(3)),
    "attention": Attention,
    "recurrent": Recurrent,
    "embedding": Embedded,
    "dropout": lambda: nn.Sequential(nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH, bias=False)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "twice": Twice,
    "bilinear": Bilinear,
    "sometimes": Sometimes,
    "checkpointed": Checkpointed,
    "frozen in part": frozen_in_part,
}


class Stack(nn.Module):
    """Blocks of these kinds between layers. ``tied``: the first layer's weight is used again at the end."""

    def __init__(self, kinds: tuple[str, ...], tied: bool, frozen: tuple[int, ...]):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Residual(KINDS[kind]()) for kind in kinds)
        self.again = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.again.weight = self.before.weight
        self.after = nn.Linear(WIDTH, 4)
        for parameter in picked(self, frozen):
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.after(self.again(x)).square().mean()


def picked(model: nn.Module, places: tuple[int, ...]) -> list[nn.Parameter]:
    """The parameters in these places, counted round and round; never the first."""
    others = list(model.parameters())[1:]
    return [others[index] for index in sorted({place % len(others) for place in places})]


def micro_batch(data: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(997 * data + rank)
    return torch.randn(BATCH, WIDTH, generator=generator).to(zerolab.device())

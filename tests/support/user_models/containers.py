"""Models that keep their modules and parameters in every way there is."""

import torch
from torch import nn

from support.training import WIDTH
from support.user_models import Block, Net, cases, squares

case = cases()


@case
def lists_of_lists():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))

        def forward(self, x):
            for stage in self.stages:
                for block in stage:
                    x = block(x)
            return x

    return Nested, squares


@case
def lists_of_dicts_and_a_dict_of_lists():
    class Keyed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "mix": Block()}) for _ in range(2)
            )
            self.heads = nn.ModuleDict({"a": nn.ModuleList([Block()]), "b": nn.Linear(WIDTH, 3)})

        def forward(self, x):
            for layer in self.layers:
                x = layer["mix"](layer["norm"](x))
            return self.heads["b"](self.heads["a"][0](x))

    return Keyed, squares


@case
def a_list_of_parameter_lists():
    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ParameterList([torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)]) for _ in range(2)
            )
            self.more = nn.ModuleList([nn.ParameterDict({"scale": torch.randn(WIDTH)})])

        def forward(self, x):
            for weight, bias in self.layers:
                x = torch.tanh(x @ weight + bias)
            return x * self.more[0]["scale"]

    return Lists, squares


@case
def a_sequential_as_the_model():
    return lambda: nn.Sequential(
        nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 3)
    ), squares


@case
def sequentials_in_sequentials():
    def build():
        inner = [nn.Sequential(Block(), nn.Sequential(Block(), nn.ReLU())) for _ in range(2)]
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*inner), nn.Linear(WIDTH, 3))

    return build, squares


@case
def a_list_with_a_forward_of_its_own():
    class Layers(nn.ModuleList):
        def __init__(self):
            super().__init__([Block(), Block()])
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            for block in self:
                x = block(x) * self.scale
            return x

    return lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleList([Layers()])[0], Layers()), squares


@case
def no_containers():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, 12), nn.Linear(12, 3)

        def forward(self, x):
            return self.two(torch.tanh(self.one(x)))

    return Bare, squares


@case
def parameters_on_the_root():
    class Direct(Net):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
            self.temperature = nn.Parameter(torch.tensor(0.3))
            self.nothing = nn.Parameter(torch.empty(0))
            self.register_buffer("shift", torch.ones(WIDTH))

        def forward(self, x):
            return super().forward((x + self.shift) * self.scale) * self.temperature + self.nothing.sum()

    return Direct, squares


@case
def one_parameter_on_the_root_and_nothing_else():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.5]))

        def forward(self, x):
            return x * self.weight

    return Single, squares


@case
def uneven_blocks_smaller_than_the_ranks():
    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1), nn.Linear(1, 17), nn.PReLU()]
            )

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    return Uneven, squares

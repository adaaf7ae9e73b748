"""Parameters without a gradient: frozen ones, and ones that nobody uses."""

import torch
from torch import nn

from support.training import WIDTH
from support.user_models import Block, Net, cases, squares

case = cases()


class Adapted(Block):
    """A frozen block with a trainable low-rank path beside each layer."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 12, bias=False)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x) + self.up(self.down(x))))


@case
def frozen_weights_with_trainable_adapters():
    class Tuned(Net):
        def __init__(self):
            super().__init__(Adapted)
            self.before.requires_grad_(False)
            self.after.requires_grad_(False)

    return Tuned, squares


@case
def frozen_blocks_in_the_middle():
    class Frozen(Net):
        def __init__(self):
            super().__init__(depth=4)
            self.blocks[1].requires_grad_(False)
            self.blocks[2].requires_grad_(False)

    return Frozen, squares


@case
def frozen_blocks_at_the_start_and_at_the_end():
    class Frozen(Net):
        def __init__(self):
            super().__init__(depth=4)
            for module in (self.before, self.blocks[0], self.blocks[3]):
                module.requires_grad_(False)

    return Frozen, squares


@case
def a_frozen_block_of_two_inputs_that_holds_its_parameters_itself():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3, requires_grad=False)
            self.right = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3, requires_grad=False)

        def forward(self, x, y):
            return torch.tanh(x @ self.left) @ self.left + torch.tanh(y @ self.right) @ self.right

    class Pairs(Net):
        def __init__(self):
            super().__init__()
            self.blocks[0] = Frozen()

        def forward(self, x, y):
            return self.after(self.blocks[2](self.blocks[1](self.blocks[0](x, y))))

    def losses(model, x, step):
        output = model(x.clone().requires_grad_(), x.flip(0).requires_grad_())
        yield lambda: output.square().mean().backward(retain_graph=True)
        yield output.abs().mean()

    return Pairs, losses


@case
def everything_frozen_but_one_bias():
    class Frozen(Net):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)
            self.blocks[1].first.bias.requires_grad_(True)

    return Frozen, squares


@case
def frozen_parameters_of_other_types_and_integer_buffers():
    class Quantised(Block):
        def __init__(self):
            super().__init__()
            scale = torch.linspace(0.5, 1.5, WIDTH)
            self.low = nn.Parameter(scale.bfloat16(), requires_grad=False)
            self.high = nn.Parameter(scale.double(), requires_grad=False)
            self.codes = nn.Parameter(torch.arange(WIDTH, dtype=torch.int8), requires_grad=False)
            self.register_buffer("zeros", torch.arange(WIDTH, dtype=torch.int8))

        def forward(self, x):
            x = super().forward(x * self.low.float() + self.high.float())
            return x * (self.codes - self.zeros + 1).float()

    return lambda: Net(Quantised), squares


# Parameters without a gradient.


@case
def parameters_that_nobody_uses():
    class Spare(Net):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(WIDTH, WIDTH)
            self.blocks.append(Block())
            self.blocks[0].spare = nn.Parameter(torch.ones(5))

        def forward(self, x):
            x = self.before(x)
            for block in self.blocks[:3]:
                x = block(x)
            return self.after(x)

    return Spare, squares


@case
def a_block_whose_gradient_is_stopped():
    class Stopped(Net):
        def forward(self, x):
            x = self.before(x)
            with torch.no_grad():
                aside = self.blocks[0](x)
            return self.after(self.blocks[2](self.blocks[1](x).detach() + aside))

    return Stopped, squares

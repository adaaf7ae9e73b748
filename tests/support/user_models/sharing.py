"""Modules and weights used more than once."""

import torch
import torch.nn.functional as F
from torch import nn

from support.training import WIDTH
from support.user_models import Block, Net, cases, squares

case = cases()


@case
def a_layer_used_twice_in_one_forward():
    class Twice(Block):
        def __init__(self):
            super().__init__()
            self.square = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return super().forward(self.square(torch.tanh(self.square(x))))

    return lambda: Net(Twice), squares


@case
def a_block_used_twice():
    class Loop(Net):
        def forward(self, x):
            x = self.before(x)
            for block in [*self.blocks, *self.blocks[::-1], self.blocks[1]]:
                x = block(x)
            return self.after(x)

    return Loop, squares


@case
def one_block_listed_three_times():
    class Shared(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block()] * 3 + [Block()])

    return Shared, squares


@case
def a_submodule_shared_by_two_blocks():
    class Shared(Net):
        def __init__(self):
            super().__init__()
            self.blocks[2].first = self.blocks[0].first

    return Shared, squares


@case
def weights_tied_inside_a_block():
    class Tied(Block):
        def __init__(self):
            super().__init__()
            self.again = nn.Linear(WIDTH, 12)
            self.again.weight = self.first.weight

        def forward(self, x):
            return super().forward(x) + self.second(self.again(x))

    return lambda: Net(Tied), squares


@case
def weights_tied_across_blocks():
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.blocks[2].second.weight = self.blocks[0].second.weight
            self.blocks[1].first.weight = self.blocks[0].first.weight

    return Tied, squares


@case
def embedding_and_head_tied():
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, WIDTH, padding_idx=0)
            self.after = nn.Linear(WIDTH, 11, bias=False)
            self.after.weight = self.embedding.weight

        def forward(self, x):
            return super().forward(self.embedding(x))

    def losses(model, x, step):
        tokens = (x * 3).long().abs() % 11
        yield F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return Tied, losses


@case
def a_head_that_is_the_embedding_transposed_by_hand():
    class Tied(Net):
        def forward(self, x):
            return F.linear(super().forward(x) @ self.after.weight, self.before.weight)

    return Tied, squares

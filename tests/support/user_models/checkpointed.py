"""Blocks whose forward is computed again in backward."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from support.user_models import Block, Net, cases, squares

case = cases()


@case
def blocks_checkpointed():
    class Checkpointed(Net):
        def forward(self, x):
            x = self.before(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.after(x)

    return lambda: Checkpointed(Dropping), squares


class Dropping(Block):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.3))


@case
def a_segment_of_several_blocks_checkpointed():
    class Checkpointed(Net):
        def forward(self, x):
            x = checkpoint(self.segment, x, 0, 2, use_reentrant=False)
            return self.after(checkpoint(self.segment, x, 2, 4, use_reentrant=False))

        def segment(self, x, start, stop):
            x = self.before(x)
            for block in self.blocks[start:stop]:
                x = block(x)
            return x

    return lambda: Checkpointed(Dropping, depth=4), squares


@case
def parts_of_blocks_checkpointed():
    class Partly(Block):
        def forward(self, x):
            return x + checkpoint(lambda x: self.second(torch.tanh(self.first(x))), x, use_reentrant=False)

    return lambda: Net(Partly), squares


@case
def the_whole_model_checkpointed():
    def losses(model, x, step):
        yield checkpoint(model, x, use_reentrant=False).square().mean()

    return lambda: Net(Dropping), losses


@case
def a_checkpoint_inside_a_checkpoint():
    class Inner(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    class Outer(Net):
        def forward(self, x):
            x = self.before(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.after(x)

    return lambda: Outer(Inner), squares


@case
def a_checkpointed_block_used_twice():
    class Twice(Net):
        def forward(self, x):
            x = self.before(x)
            for block in [*self.blocks, *self.blocks]:
                x = checkpoint(block, x, use_reentrant=False)
            return self.after(x)

    return lambda: Twice(Dropping), squares


@case
def a_checkpointed_sequential():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(Dropping() for _ in range(4)))

        def forward(self, x):
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)

    return Sequence, squares


@case
def frozen_blocks_checkpointed():
    class Checkpointed(Net):
        def __init__(self):
            super().__init__()
            self.blocks[1].requires_grad_(False)

        def forward(self, x):
            x = self.before(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.after(x)

    return Checkpointed, squares

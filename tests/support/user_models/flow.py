"""Passes that go another way each time, or in which something else happens on the way."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.training import WIDTH
from support.user_models import Block, Net, cases, squares

case = cases()


class Router(Net):
    """Takes the blocks in whatever order it is told."""

    def forward(self, x, path):
        x = self.before(x)
        for index in path:
            x = self.blocks[index](x)
        return self.after(x)


@case
def blocks_skipped_on_some_steps():
    def losses(model, x, step):
        yield model(x, ([0, 1, 2], [0, 2], [2, 1])[step]).square().mean()
        yield model(x, ([1], [0, 1, 2, 0], [])[step]).square().mean()

    return Router, losses


@case
def a_decoder_registered_before_its_encoder():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(WIDTH, 3)
            self.decoder = nn.ModuleList(Block() for _ in range(2))
            self.encoder = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for block in self.encoder:
                x = block(x)
            memory = x
            for block in self.decoder:
                x = block(x + memory)
            return self.head(x)

    return Backwards, squares


@case
def experts_of_which_some_stay_idle():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x, step):
            chances = self.gate(x).softmax(-1)
            return sum(chances[:, k, None] * self.experts[k](x) for k in range(3) if k != step)

    def losses(model, x, step):
        yield model(x, step).square().mean()

    return Mixture, losses


class Choosing(Block):
    """Asks its input which of its weights to use, so that ranks use different ones."""

    def __init__(self):
        super().__init__()
        self.either, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        chosen = self.either if x[0, 0] > 0 else self.other
        return chosen(super().forward(x))


@case
def weights_that_the_data_chooses_inside_a_block():
    return lambda: Net(Choosing), squares


@case
def weights_chosen_twice_in_one_backward():
    def losses(model, x, step):
        yield model(x).square().mean() + model(-x).square().mean()

    return lambda: Net(Choosing), losses


@case
def weights_chosen_in_a_block_that_is_computed_anew_in_backward():
    class Recomputed(Net):
        def forward(self, x):
            x = self.before(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.after(x)

    return lambda: Recomputed(Choosing), squares


@case
def a_block_that_the_data_passes_by_inside():
    class Optional(Block):
        def forward(self, x):
            return super().forward(x) if x[0, 0] > 0 else x * 2

    return lambda: Net(Optional), squares


@case
def a_weight_that_is_only_looked_through_beside_one_that_is_chosen():
    class Constant(Choosing):
        """``fixed`` passes its input's gradient on, and gets none itself."""

        def __init__(self):
            super().__init__()
            self.fixed = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return super().forward(nn.functional.linear(x, self.fixed.weight.detach()))

    return lambda: Net(Constant), squares


class Around(nn.Module):
    """Calls its neighbour in the middle of its own forward, with weights of its own before and after."""

    def __init__(self):
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.eye(WIDTH) * scale) for scale in (0.5, 0.7))

    def forward(self, x, inner):
        linear = nn.functional.linear
        return linear(inner(linear(x, self.w.detach())), self.v)


@case
def a_block_that_calls_its_neighbour_midway_and_looks_through_a_weight_before():
    class Nested(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Around(), Block()])

        def forward(self, x):
            return self.after(self.blocks[0](self.before(x), self.blocks[1]))

    return Nested, squares


class Recomputing(torch.autograd.Function):
    """A checkpoint of somebody's own: in backward it differentiates inside, for its input alone."""

    @staticmethod
    def forward(context, module, x):
        context.module = module
        context.save_for_backward(x.detach())
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(context, gradient):
        x = context.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = context.module(x)
        return None, torch.autograd.grad(y, x, gradient)[0]


@case
def a_backward_inside_backward_for_an_input_between_two_uses_of_a_block():
    class Twice(Net):
        def forward(self, x):
            x = self.blocks[2](self.blocks[0](self.before(x)))
            return self.after(self.blocks[2](Recomputing.apply(self.blocks[1], x)))

    return Twice, squares


@case
def hooks_of_the_user():
    def build():
        model = Net()
        model.before.weight.register_hook(lambda gradient: gradient * 2)
        model.blocks[1].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 3,))
        model.blocks[2].register_full_backward_pre_hook(lambda module, grad_out: (grad_out[0] * 0.5,))
        model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        model.blocks[0].register_forward_hook(lambda module, args, output: output + args[0])
        return model

    def losses(model, x, step):
        if step == 1:  # others come after the optimizer
            model.blocks[0].first.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            model.blocks[1].register_forward_hook(lambda module, args, output: output * 0.9)
        yield model(x).square().mean()

    return build, losses


@case
def parameters_frozen_and_freed_between_steps():
    def losses(model, x, step):
        model.blocks[0].requires_grad_(step == 2)
        model.before.bias.requires_grad_(step != 1)
        yield model(x).square().mean()

    return Net, losses


@case
def all_but_the_last_bias_frozen_for_one_step():
    def losses(model, x, step):
        for block in model.blocks:
            for name, parameter in block.named_parameters():
                parameter.requires_grad_(step != 1 or name == "second.bias")
        yield model(x).square().mean()

    return Net, losses


@case
def autocast():
    def losses(model, x, step):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        yield y.float().square().mean()

    return Net, losses


@case
def saved_tensors_on_their_way_through_hooks():
    def losses(model, x, step):
        with torch.autograd.graph.save_on_cpu():
            loss = model(x).square().mean()
        yield loss

    return Net, losses

"""Forward and backward passes in other numbers and orders than one of each."""

import torch
from torch import nn

from support.training import WIDTH
from support.user_models import Block, Net, cases, squares

case = cases()


@case
def two_forwards_before_one_backward():
    def losses(model, x, step):
        yield (model(x) - model(x.flip(0)).detach() * model(-x)).square().mean()

    return Net, losses


@case
def a_backward_for_each_of_two_forwards_made_before():
    def losses(model, x, step):
        first, second = model(x).square().mean(), model(-x).abs().mean()
        yield first
        yield second

    return Net, losses


@case
def two_forwards_taken_backward_the_other_way_round():
    def losses(model, x, step):
        first, second = model(x).square().mean(), model(-x).abs().mean()
        yield second
        yield first

    return Net, losses


@case
def three_micro_batches():
    def losses(model, x, step):
        for part in (x, x * 2, x[:2]):
            yield model(part).square().mean()

    return Net, losses


@case
def two_losses_of_one_forward():
    def losses(model, x, step):
        y = model(x)
        yield lambda: y.square().mean().backward(retain_graph=True)
        yield y.abs().mean()

    return Net, losses


@case
def a_graph_taken_backward_twice():
    def losses(model, x, step):
        loss = model(x).square().mean()
        yield lambda: loss.backward(retain_graph=True)
        yield loss

    return Net, losses


@case
def two_losses_from_different_depths():
    def losses(model, x, step):
        x = model.before(x)
        early = model.blocks[0](x)
        late = model.after(model.blocks[1](early))
        yield lambda: early.square().mean().backward(retain_graph=True)
        yield late.square().mean()

    return Net, losses


@case
def gradients_of_the_input_alone_in_between():
    def losses(model, x, step):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        yield model(x + 0.1 * slope.sign()).square().mean()
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        yield (model(x) * slope.mean()).square().mean()

    return Net, losses


@case
def backward_for_the_input_alone():
    def losses(model, x, step):
        x.requires_grad_()
        model(x).sum().backward(inputs=[x])
        yield model(x.grad).square().mean()

    return Net, losses


@case
def evaluation_between_steps():
    def losses(model, x, step):
        model.eval()
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(-x)
        model.train()
        yield model(x).square().mean()
        with torch.inference_mode():
            model(x)

    return lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), Block(), nn.BatchNorm1d(WIDTH)
    ), losses


@case
def forwards_with_gradients_that_nobody_takes_backward():
    def losses(model, x, step):
        model(x)
        yield model(x).square().mean()
        model(-x)

    return Net, losses


@case
def graphs_kept_from_earlier_steps():
    def losses(model, x, step):
        model.history = [*getattr(model, "history", ()), model(x).sum()]
        yield model(x).square().mean()

    return Net, losses


@case
def submodules_called_directly():
    class Coder(Net):
        def encode(self, x):
            return self.blocks[0](self.before(x))

        def decode(self, x):
            return self.after(self.blocks[2].second(torch.tanh(self.blocks[2].first(x))))

    def losses(model, x, step):
        yield model.decode(model.encode(x)).square().mean() + model.blocks[1](x).abs().mean()
        yield model.blocks[0](x).square().mean()

    return Coder, losses


@case
def forward_called_by_name():
    class ByName(Net):
        def forward(self, x):
            x = self.before(x)
            for block in self.blocks:
                x = block.forward(x)
            return self.after(x)

    def losses(model, x, step):
        yield model(x).square().mean()
        yield model.forward(x).square().mean()

    return ByName, losses


@case
def dropout_and_noise():
    class Noisy(Block):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.3) + torch.randn_like(x))

    return lambda: Net(Noisy), squares


@case
def an_auxiliary_loss_kept_by_each_block():
    class Gated(Block):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(WIDTH, 2)

        def forward(self, x):
            chances = self.gate(x).softmax(-1)
            self.balance = chances.mean(0).square().sum()
            return super().forward(x) * chances[:, :1]

    def losses(model, x, step):
        yield model(x).square().mean() + sum(block.balance for block in model.blocks)

    return lambda: Net(Gated), losses


@case
def an_auxiliary_loss_computed_after_the_output():
    class Gated(Block):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(WIDTH, 2)

        def forward(self, x):
            output = super().forward(x)
            self.balance = self.gate(torch.tanh(x)).square().mean()
            return output

    def losses(model, x, step):
        yield model(x).square().mean() + sum(block.balance for block in model.blocks)

    return lambda: Net(Gated), losses


@case
def a_loss_of_nothing_but_what_the_blocks_kept():
    class Keeping(Block):
        def forward(self, x):
            self.kept = super().forward(x)
            return self.kept.detach()

    def losses(model, x, step):
        model(x)
        yield sum(block.kept.square().mean() for block in model.blocks)

    return lambda: Net(Keeping), losses


@case
def a_penalty_on_the_weights_of_the_root():
    class Penalised(Net):
        def forward(self, x):
            return super().forward(x).square().mean() + self.before.weight.square().sum()

    def losses(model, x, step):
        yield model(x)

    return Penalised, losses


@case
def a_step_without_any_backward():
    def losses(model, x, step):
        if step != 1:
            yield model(x).square().mean()

    return Net, losses

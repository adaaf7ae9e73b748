"""What is rare and allowed."""

import torch
from torch import nn
from torch.nn.utils import prune

import zerolab
from support.training import WIDTH
from support.user_models import Block, Net, cases, squares

case = cases()


@case
def submodules_called_directly_after_a_backward_that_failed():
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError

    def losses(model, x, step):
        try:
            model.blocks[1](Refuses.apply(model.blocks[0](x))).sum().backward()
        except ArithmeticError:
            model.zero_grad()
        yield model.after(model.blocks[2](model.before(x))).square().mean()

    return Net, losses


@case
def opaque_outputs_of_a_block_that_holds_its_parameters_itself():
    class Sealed:
        __slots__ = ("value",)

        def __init__(self, value):
            self.value = value

    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

        def forward(self, x):
            return Sealed(torch.tanh(x @ self.weight))

    class Unsealing(Net):
        def forward(self, x):
            x = self.before(x)
            for block in self.blocks:
                x = block(x).value
            return self.after(x)

    return lambda: Unsealing(Direct), squares


@case
def a_block_that_holds_its_parameters_itself_and_owes_one_gradient_for_a_step():
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
            self.outer = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

        def forward(self, x):
            return torch.tanh(x @ self.inner) @ self.outer

    def losses(model, x, step):
        for block in model.blocks:
            block.inner.requires_grad_(step != 1)
        yield model(x).square().mean()

    return lambda: Net(Direct), losses


@case
def a_forward_that_is_a_generator():
    class Yields(Block):
        def forward(self, x):
            yield self.first(x)
            yield x + self.second(torch.tanh(self.first(x)))

    class Consumes(Net):
        def forward(self, x):
            x = self.before(x)
            for block in self.blocks:
                *_, x = block(x)
            return self.after(x)

    return lambda: Consumes(Yields), squares


@case
def parameters_laid_out_otherwise():
    class Strided(Block):
        def __init__(self):
            super().__init__()
            self.turned = nn.Parameter(torch.randn(17, WIDTH).t())
            self.convolution = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)

        def forward(self, x):
            images = (
                (x @ self.turned)[:, :12].reshape(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
            )
            return super().forward(x) + self.convolution(images).flatten(1)[:, :WIDTH]

    return lambda: Net(Strided), squares


class Named(nn.Parameter):
    """A parameter class of the author's own."""


@case
def parameters_of_a_class_of_their_own():
    class Typed(Block):
        def __init__(self):
            super().__init__()
            ones = torch.ones(WIDTH, device=zerolab.device())  # .to() another device makes a plain Parameter
            self.scale = Named(ones)
            self.scale.role = "scale"

        def forward(self, x):
            assert type(self.scale) is Named and self.scale.role == "scale"
            return super().forward(x) * self.scale

    return lambda: Net(Typed), squares


@case
def gradients_that_were_there_before_the_optimizer():
    def build():
        model = Net()
        model(torch.ones(2, WIDTH)).sum().backward()
        model.zero_grad()
        return model

    return build, squares


@case
def norms_and_masks_that_hooks_put_on():
    class Hooked(Block):
        def __init__(self):
            super().__init__()
            nn.utils.spectral_norm(self.first)
            prune.random_unstructured(self.second, "weight", 0.5)

    return lambda: Net(Hooked), squares


@case
def hooks_on_gradients_as_they_are_accumulated():
    def halve(p):
        p.grad.mul_(0.5)

    def build():
        model = Net()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(halve)
        return model

    return build, squares


@case
def only_some_ranks_have_a_loss_with_gradients():
    class Twisted(Net):
        def forward(self, x):
            return super().forward(x) * (0.0 if x.sum() > 0 else 1.0)

    return Twisted, squares


@case
def functional_calls():
    def losses(model, x, step):
        names = dict(model.named_parameters())
        yield torch.func.functional_call(model, names, (x,)).square().mean()

    return Net, losses


@case
def very_deep_and_very_small():
    return lambda: nn.Sequential(*(nn.PReLU() for _ in range(40)), nn.Linear(WIDTH, 1)), squares


@case
def anomaly_detection():
    def losses(model, x, step):
        with torch.autograd.set_detect_anomaly(True):
            yield model(x).square().mean()

    return Net, losses

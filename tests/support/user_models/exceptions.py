"""Passes that raise half-way, and training that goes on after it."""

import contextlib

import torch

from support.user_models import Block, Net, cases

case = cases()


class Refusal(Exception):
    pass


@case
def exceptions_in_a_forward_that_are_caught():
    class Failing(Block):
        fails = False

        def forward(self, x):
            x = super().forward(x)
            if self.fails:
                raise Refusal
            return x

    def losses(model, x, step):
        for block in (model.blocks[1], model.blocks[2]):
            block.fails = True
            try:
                model(x)
            except Refusal:
                block.fails = False
        yield model(x).square().mean()

    return lambda: Net(Failing), losses


@case
def exceptions_from_wrong_input_that_are_caught():
    def losses(model, x, step):
        for attempt in (lambda: model(x[:, :3]), lambda: model.blocks[1](x[:, :3]), lambda: model(x, x)):
            with contextlib.suppress(RuntimeError, TypeError):
                attempt()
        yield model(x).square().mean()

    return Net, losses


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Refusal


@case
def exceptions_in_a_backward_that_are_caught():
    def losses(model, x, step):
        state = model.before(x)
        for index, block in enumerate(model.blocks):
            state = FailsBackward.apply(state) if index == step else state
            state = block(state)
        try:
            model.after(state).sum().backward()
        except Refusal:
            model.zero_grad()
        else:
            raise AssertionError("backward was to fail")
        yield model(x).square().mean()

    return Net, losses


class Shifted(Block):
    """Uses a parameter where the data say so, which differs from rank to rank."""

    shifts = False

    def __init__(self):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x):
        x = super().forward(x)
        return x + self.shift if self.shifts else x


@case
def exceptions_in_a_backward_in_which_ranks_have_reduced_different_units():
    def losses(model, x, step):
        for block in model.blocks:
            block.shifts = bool(x[0, 5] > 0)
        state = FailsBackward.apply(model.before(x))
        for block in model.blocks:
            state = block(state)
        with contextlib.suppress(Refusal):
            model.after(state).sum().backward()
        model.zero_grad()
        yield model(x).square().mean()

    return lambda: Net(Shifted), losses

"""What both sides do in the same way: build a model, write to it, load into it, and have it raise."""

import contextlib
import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import zerolab
from support.loops.models import Stack, micro_batch, picked
from support.loops.plans import Loop
from support.seeding import seed_all


class Refusal(Exception):
    """What a model raises in the middle of a pass."""


def build(loop: Loop) -> nn.Module:
    return Stack(loop.kinds, loop.tied, loop.frozen).to(zerolab.device())


def held_back(loop: Loop, model: nn.Module) -> list[nn.Parameter]:
    """The parameters that were built trainable and are in no group at the start."""
    own, built = picked(model, loop.held), picked(build(loop), loop.held)
    return [p for p, as_built in zip(own, built, strict=True) if as_built.requires_grad]


def groups_of(loop: Loop, model: nn.Module) -> list[dict]:
    """Two groups, the second with a learning rate of its own, and an empty one."""
    held = {id(p) for p in held_back(loop, model)}
    listed = [p for p in model.parameters() if (p.requires_grad or loop.lists_frozen) and id(p) not in held]
    return [{"params": listed[::2]}, {"params": listed[1::2], "lr": 0.03}, {"params": [], "lr": 0.5}]


def among(loop: Loop, model: nn.Module, place: int, frozen: bool) -> list[nn.Parameter]:
    """The parameter in this place among those that were built frozen, or those that were not."""
    flags = [p.requires_grad for p in build(loop).parameters()]
    found = [p for p, flag in list(zip(model.parameters(), flags, strict=True))[1:] if flag != frozen]
    return [found[place % len(found)]] if found else []


def write(parameter: torch.Tensor, how: str) -> None:
    """Change a parameter's values in one of the ways in which users do."""
    if how == "fill":
        parameter.fill_(0.25)
    elif how == "multiply":
        parameter.mul_(0.5)
    elif how == "copy":
        parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    elif how == "through data":
        parameter.data.clamp_(-0.1, 0.1)
    else:
        torch.manual_seed(5)
        nn.init.uniform_(parameter, -0.5, 0.5)


def stored_weights(loop: Loop, seed: int) -> dict:
    """The state dict of another model of the same class."""
    torch.manual_seed(seed)
    model = build(loop)
    return {
        key: value + 0.01 if value.is_floating_point() else value for key, value in model.state_dict().items()
    }


@contextlib.contextmanager
def raising_in_forward(model: nn.Module, block: int):
    """The block raises when it is called."""

    def refuse(*_):
        raise Refusal("in forward")

    target = [*model.blocks, model.after][block % (len(model.blocks) + 1)]
    hook = target.register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def raising_in_backward(model: nn.Module, block: int):
    """The gradient of the block's output raises."""

    def refuse(gradient):
        raise Refusal("in backward")

    target = [model.before, *model.blocks, model.after][block % (len(model.blocks) + 2)]
    hook = target.register_forward_hook(lambda module, args, output: output.register_hook(refuse) and None)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def removing_gradients(parameter: nn.Parameter, when: str, forget: Callable[[], None]):
    """A hook removes the parameter's gradient, before or after autograd adds that of the pass to it.

    ``forget`` is called too, for the sums of earlier passes that are kept elsewhere.
    """

    def remove(*_) -> None:
        parameter.grad = None
        forget()

    if not parameter.requires_grad:
        yield
        return
    register = parameter.register_hook
    if when == "after":
        register = parameter.register_post_accumulate_grad_hook
    hook = register(remove)
    try:
        yield
    finally:
        hook.remove()


def loss_of(model: nn.Module, data: int, rank: int, x: torch.Tensor | None = None) -> torch.Tensor:
    """The loss of a micro-batch, or of ``x`` with the micro-batch's random numbers."""
    seed_all(7919 * data + rank)
    return model(micro_batch(data, rank) if x is None else x)


def loss_by_parts(model: nn.Module, data: int, rank: int) -> torch.Tensor:
    """The loss from calls of the submodules, without a call of the model."""
    seed_all(7919 * data + rank)
    x = model.before(micro_batch(data, rank).to(model.before.weight.dtype))
    for block in model.blocks:
        x = block(x)
    return model.after(model.again(x)).square().mean()


def loss_of_part(model: nn.Module, data: int, rank: int, part: str) -> torch.Tensor:
    """A loss that reaches the first layers only, or the last ones only."""
    seed_all(7919 * data + rank)
    x = micro_batch(data, rank).to(model.before.weight.dtype)
    if part == "last":
        return model.after(model.again(x)).square().mean()
    x = model.before(x)
    for block in model.blocks:
        x = block(x)
    return x.square().mean()


def calls_of_a_hook(step: Callable[[], None]) -> int:
    """How often a hook on all optimizers is called in a step."""
    calls = []
    hook = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        step()
    finally:
        hook.remove()
    return len(calls)


def listed(optimizer: torch.optim.Optimizer, place: int) -> nn.Parameter:
    """The parameter in this place among those in the optimizer's groups."""
    found = [p for group in optimizer.param_groups for p in group["params"]]
    return found[place % len(found)]


def trained_copy(model: nn.Module, data: int, rank: int) -> dict[str, torch.Tensor]:
    """What a deep copy of a model comes to after a step of its own."""
    copied = copy.deepcopy(model)
    copied.zero_grad()
    loss_of(copied, data, rank, micro_batch(data, rank).to(model.before.weight.dtype)).backward()
    torch.optim.SGD(copied.parameters(), lr=0.1).step()
    return {name: p.detach() for name, p in copied.named_parameters()}


def slope_of(loss: torch.Tensor, x: torch.Tensor, by_hand: bool) -> torch.Tensor:
    """The gradient of the input. ``by_hand``: without any of the parameters' gradients."""
    if by_hand:
        return torch.autograd.grad(loss, x)[0]
    loss.backward()
    return x.grad


def load_part(model: nn.Module, state: dict, part: str) -> None:
    """Load a state dict into a model, or into one of its parts."""
    prefix = f"{part}." if part else ""
    target = model.get_submodule(part) if part else model
    target.load_state_dict(
        {key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)}
    )


def set_flags(model: nn.Module, flags: list[bool]) -> None:
    """Freeze and thaw parameters."""
    for p, flag in zip(model.parameters(), flags, strict=True):
        p.requires_grad_(flag)

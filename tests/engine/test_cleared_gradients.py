"""Promise: gradients are cleared on every rank or refused; a forward grows stale only where it must."""

import contextlib
import sys
from collections.abc import Callable, Iterator

import cloudpickle
import pytest
import torch
from support.trained import build, on_two_ranks
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


def clear_on_rank_1(stage: int, how: str) -> str:
    """Between two micro-batches. What a rank clears is its share of the gradients of both."""
    model, optimizer = build(stage)
    x = torch.randn(4, 8)
    model(x).sum().backward()
    if optimizer.rank == 1:
        clear = {"optimizer": optimizer.zero_grad, "model": model.zero_grad}
        clear.get(how, lambda: setattr(next(model.parameters()), "grad", None))()
    model(x).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("how", ["optimizer", "model", "one parameter"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_cleared_on_one_rank_alone_are_refused(stage: int, how: str):
    for said in on_two_ranks(clear_on_rank_1, stage, how):
        assert "ranks disagree about the gradients that were cleared" in said


def clear_before_step_on_rank_1(stage: int, steps: int) -> str:
    """On a rank: rank 1 clears its gradients before the last step."""
    model, optimizer = build(stage)
    for step in range(steps):
        model(torch.randn(4, 8)).sum().backward()
        if optimizer.rank == 1 and step == steps - 1:
            optimizer.zero_grad()
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        optimizer.zero_grad()
    return "accepted"


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_cleared_before_a_step_on_one_rank_alone_are_refused(stage: int, steps: int):
    """That rank reduces zeros in the step, which the others do not, so the collectives differ first."""
    for said in on_two_ranks(clear_before_step_on_rank_1, stage, steps):
        assert "ranks took different paths" in said and "and clear gradients where they do" in said


def clear_twice_on_rank_1() -> str:
    """The second time there is nothing to clear."""
    model, optimizer = build(2)
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        for _ in range(1 + optimizer.rank):
            optimizer.zero_grad()
    return "accepted"


def test_clearing_nothing_makes_no_difference():
    assert on_two_ranks(clear_twice_on_rank_1) == ["accepted"] * 2


class SometimesGained(nn.Module):
    """A gain that rank 0 alone uses, as an expert, or a branch that depends on the data."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(64))
        self.out = nn.Linear(64, 1)

    def forward(self, x, rank: int):
        return self.out(x * self.gain if rank == 0 else x).sum()


def train_cleared_by(stage: int, by: str) -> torch.Tensor:
    torch.manual_seed(0)
    model = SometimesGained()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    for value in (1.0, 2.0):
        (model if by == "model" else optimizer).zero_grad()
        model(torch.full((2, 64), value), optimizer.rank).backward()
    optimizer.step()
    with optimizer.full_params():
        return model.gain.detach().clone()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_model_zero_grad_clears_what_other_ranks_alone_used(stage: int):
    by_optimizer = on_two_ranks(train_cleared_by, stage, "optimizer")
    for found, expected in zip(on_two_ranks(train_cleared_by, stage, "model"), by_optimizer, strict=True):
        assert torch.equal(found, expected)


class Loop:
    """A training loop of actions on a model whose gain some ranks alone use, and clear."""

    def __init__(self, stage: int, users: tuple[int, ...], clearing: tuple[int, ...]):
        torch.manual_seed(0)
        self.model = SometimesGained()
        self.optimizer = zerolab.ZeroOptimizer(self.model, torch.optim.SGD, stage=stage, lr=0.1)
        rank = self.optimizer.rank
        self.gained, self.clears = (0 if rank in users else 1), rank in clearing

    def train(self) -> None:
        self.model(torch.ones(2, 64), self.gained).backward()

    def train_without_gain(self) -> None:
        self.model(torch.ones(2, 64), 1).backward()

    def train_unsynced(self) -> None:
        with self.optimizer.no_sync():
            self.train_without_gain()

    def clear_gain(self) -> None:
        if self.clears:
            self.model.gain.grad = None

    def clear_all(self) -> None:
        self.optimizer.zero_grad()

    def compare(self) -> None:
        self.optimizer.full_grads()

    def step(self) -> None:
        self.optimizer.step()


def run_loop(stage: int, users: tuple[int, ...], clearing: tuple[int, ...], actions: list[str]):
    """On a rank: the norm of all gradients and whether the gain has one, after the actions; or the error."""
    loop = Loop(stage, users, clearing)
    try:
        for name in actions:
            getattr(loop, name)()
        return "gain" in loop.optimizer.full_grads(), loop.optimizer.clip_grad_norm_(1e9).item()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("user", [0, 1])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("actions", "alike"),
    [
        (["train", "clear_gain"], ["train_without_gain"]),
        (["train", "clear_gain", "compare", "train"], ["train_without_gain", "train"]),
        (["train", "clear_gain", "step", "train"], ["train_without_gain", "step", "train"]),
        (["train", "clear_gain", "train_unsynced", "clear_all", "train"], ["train"]),
    ],
)
def test_one_parameter_that_other_ranks_alone_used_is_cleared_on_every_rank(
    stage: int, user: int, actions: list[str], alike: list[str]
):
    """A rank that did not use it has None for a gradient before a user sets it to None."""
    found = on_two_ranks(run_loop, stage, (user,), (0, 1), actions)
    assert found == on_two_ranks(run_loop, stage, (user,), (0, 1), alike)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_parameter_that_a_rank_used_and_does_not_clear_is_refused(stage: int):
    for said in zerolab.launch(run_loop, 3, stage, (0, 2), (0, 1), ["train", "clear_gain"], timeout=60):
        assert "ranks disagree about the gradients that were cleared" in said and "gain" in said


@pytest.mark.parametrize("later", ["train", "train_without_gain", "train_unsynced"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_parameter_cleared_before_a_pass_where_a_rank_cannot_know_of_it_is_refused(
    stage: int, later: str
):
    """The other rank has added the later pass to a sum that still holds the gain's gradient from rank 0."""
    for said in on_two_ranks(run_loop, stage, (0,), (0, 1), ["train", "clear_gain", later]):
        assert "ranks disagree about the gradients that were cleared" in said
        assert "after the last backward pass before a step, or clear all with optimizer.zero_grad()" in said


def clear_after_different_passes(stage: int):
    """On a rank: rank 0 clears after the first of three passes, rank 1 after the second."""
    passes = ["train", "train", "train"]
    passes.insert(1 + torch.distributed.get_rank(), "clear_gain")
    return run_loop(stage, (0, 1), (0, 1), passes)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_parameter_cleared_after_different_passes_is_refused(stage: int):
    for said in on_two_ranks(clear_after_different_passes, stage):
        assert "rank 0 has gain, after 1 reduction, rank 1 has gain, after 2 reductions" in said


class TwoLosses(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)) for _ in range(2))

    def forward(self, x):
        return [layer(x).sum() for layer in self.layers]


def step_between_two_losses(stage: int) -> str:
    model = TwoLosses()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    first, second = model(torch.ones(2, 4))
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    second.backward()
    optimizer.step()
    first, _ = model(torch.ones(2, 4))
    model(torch.ones(2, 4))[0].backward()
    optimizer.step()
    try:
        first.backward()
    except RuntimeError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_makes_an_older_forward_stale_where_it_updated_its_parameters_and_nowhere_else(stage: int):
    for said in on_two_ranks(step_between_two_losses, stage):
        assert "modified by an inplace operation" in said


def freeze_between_forward_and_backward(stage: int | None, earlier: bool) -> list[torch.Tensor]:
    """``earlier``: the parameter that is frozen already has the gradient of another micro-batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    if stage is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    if earlier:
        model(torch.full((2, 4), 0.5)).sum().backward()
    loss = model(torch.ones(2, 4)).sum()
    model[0].weight.requires_grad_(False)
    loss.backward()
    optimizer.step()
    if stage is None:
        return [p.detach() for p in model.parameters()]
    with optimizer.full_params():
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_parameter_frozen_after_its_forward_gets_no_gradient_as_in_torch(stage: int, earlier: bool):
    (plain,) = zerolab.launch(freeze_between_forward_and_backward, 1, None, earlier, timeout=60)
    for found in on_two_ranks(freeze_between_forward_and_backward, stage, earlier):
        assert all(map(torch.equal, found, plain))


class Broken(RuntimeError):
    """What a user's hook raises."""


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def clear_after_a_broken_backward(stage: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The second micro-batch breaks off when the last layer has its gradients; then all are cleared."""
    x, plain, model = torch.ones(2, 4), layers(), layers()
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, units=[], lr=0.1)

    def refuse(gradient: torch.Tensor) -> None:
        raise Broken

    model(x).sum().backward()
    handle = model[0].register_forward_hook(lambda module, args, out: out.register_hook(refuse) and None)
    with pytest.raises(Broken):
        model(x).sum().backward()
    handle.remove()
    model.zero_grad()
    for each, net in ((expected, plain), (optimizer, model)):
        net(3 * x).sum().backward()
        each.step()
    with optimizer.full_params():
        return [p.detach().clone() for p in model.parameters()], [p.detach() for p in plain.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_cleared_after_a_broken_backward_stay_cleared(stage: int):
    for ours, theirs in on_two_ranks(clear_after_a_broken_backward, stage):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def break_off(
    stage: int,
    clears: bool,
    plain: nn.Module,
    model: nn.Module,
    breaking: Callable[[nn.Module], contextlib.AbstractContextManager],
) -> list[list[torch.Tensor]]:
    """The second of three micro-batches raises. The parameters after a step, of the engine and of PyTorch."""
    x = torch.ones(2, 4)
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, units=[], lr=0.1)
    for each, net in ((expected, plain), (optimizer, model)):
        net(x).sum().backward()
        with breaking(net), pytest.raises(Broken):
            net(x).sum().backward()
        if clears:
            net.zero_grad()
        net(3 * x).sum().backward()
        each.step()
    with optimizer.full_params():
        return [[p.detach().clone() for p in net.parameters()] for net in (model, plain)]


def break_off_before_a_gradient_is_stored(stage: int, clears: bool, alone: bool) -> list[list[torch.Tensor]]:
    """A user's hook raises before autograd stores the gradient."""
    plain, model = layers(), layers()
    if alone:  # a model with one parameter
        plain, model = plain[:1], model[:1]
        plain[0].bias = model[0].bias = None

    def refuse(gradient: torch.Tensor) -> None:
        raise Broken

    @contextlib.contextmanager
    def breaking(net: nn.Module) -> Iterator[None]:
        handle = net[0].weight.register_hook(refuse)
        yield
        handle.remove()

    return break_off(stage, clears, plain, model, breaking)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_hook_that_raises_before_a_gradient_is_stored_leaves_what_pytorch_leaves(
    stage: int, clears: bool, alone: bool
):
    for ours, theirs in on_two_ranks(break_off_before_a_gradient_is_stored, stage, clears, alone):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def break_off_after_a_gradient_is_stored(stage: int, clears: bool) -> list[list[torch.Tensor]]:
    """A user's hook, from before the optimizer, raises when autograd has stored the gradient. It counts."""
    plain, model, armed = layers(), layers(), []

    def refuse(parameter: nn.Parameter) -> None:
        if armed:
            raise Broken

    @contextlib.contextmanager
    def breaking(net: nn.Module) -> Iterator[None]:
        armed.append(net)
        yield
        armed.clear()

    for net in (plain, model):
        net[0].weight.register_post_accumulate_grad_hook(refuse)
    return break_off(stage, clears, plain, model, breaking)


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_hook_that_raises_after_a_gradient_is_stored_leaves_what_pytorch_leaves(stage: int, clears: bool):
    for ours, theirs in on_two_ranks(break_off_after_a_gradient_is_stored, stage, clears):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))

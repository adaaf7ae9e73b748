"""Promise: the clip norm is the norm of all gradients on all ranks, whatever the stage and the world size."""

import sys

import cloudpickle
import pytest
import torch
from support import training
from support.user_models import Net
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

NORMS = (1.0, 2.0, 3.0, float("inf"))
BATCHES = 6  # in all, whatever the number of ranks, so that the mean gradient is the same up to rounding


class Tied(Net):
    """A tied weight, a frozen block, a parameter that nobody uses, sizes that do not divide."""

    def __init__(self):
        super().__init__()
        self.blocks[2].first.weight = self.blocks[0].first.weight
        self.blocks[1].requires_grad_(False)
        self.unused = nn.Parameter(torch.full((7,), 1e6))


def gradients(model: nn.Module, ranks: range, world_size: int) -> None:
    for rank in ranks:
        each = BATCHES // world_size
        for place in range(rank * each, (rank + 1) * each):
            (model(training.micro_batch(0, place)).square().mean() / each).backward()


def expected(norm_type: float, max_norm: float, world_size: int) -> tuple[torch.Tensor, dict]:
    """Torch's own norm, and the parameters after a step with the gradients it clipped."""
    torch.manual_seed(0)
    model = Tied()
    gradients(model, range(world_size), world_size)
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= world_size
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    clipped = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5).step()
    return norm, clipped, {name: p.detach() for name, p in model.named_parameters()}


def clip(stage: int, max_norm: float) -> list[tuple]:
    found = []
    for norm_type in NORMS:
        torch.manual_seed(0)
        model = Tied()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.5)
        gradients(model, range(optimizer.rank, optimizer.rank + 1), optimizer.world_size)
        norm = optimizer.clip_grad_norm_(max_norm, norm_type)
        clipped = optimizer.full_grads()
        optimizer.step()
        found.append((norm, clipped, training.whole(model, optimizer)))
    return found


def clip_at_every_stage(max_norms: tuple[float, ...]) -> dict:
    return {(stage, max_norm): clip(stage, max_norm) for stage in range(4) for max_norm in max_norms}


MAX_NORMS = (0.05, 1e4, 0.0)


@pytest.fixture(scope="module")
def found() -> dict:
    """By world size, rank, and (stage, max_norm)."""
    return {n: zerolab.launch(clip_at_every_stage, n, MAX_NORMS, timeout=60) for n in (1, 2, 3)}


@pytest.mark.parametrize("max_norm", MAX_NORMS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_norm_and_clipped_gradients_are_torchs_on_the_whole_model(world_size: int, max_norm: float, found):
    for index, norm_type in enumerate(NORMS):
        norm, clipped, parameters = expected(norm_type, max_norm, world_size)
        for by_case in found[world_size]:
            for stage in range(4):
                ours = by_case[stage, max_norm][index]
                torch.testing.assert_close(ours[0], norm, rtol=2e-6, atol=0)
                assert ours[1].keys() == clipped.keys() and "unused" not in clipped
                torch.testing.assert_close(ours[1], clipped, rtol=1e-5, atol=1e-7)
                torch.testing.assert_close(ours[2], parameters, rtol=1e-5, atol=1e-6)


def test_every_stage_and_rank_clips_to_the_same_bits(found):
    for by_rank in found.values():
        for max_norm in MAX_NORMS:
            for index in range(len(NORMS)):
                first = by_rank[0][0, max_norm][index]
                for by_case in by_rank:
                    for stage in range(4):
                        norm, clipped, parameters = by_case[stage, max_norm][index]
                        assert torch.equal(norm, first[0])
                        assert not training.differing(clipped, first[1]) + training.differing(
                            parameters, first[2]
                        )


def test_the_norm_is_the_same_at_every_world_size(found):
    """To rounding: the ranks' gradients are added up in another order."""
    for max_norm in MAX_NORMS:
        for index in range(len(NORMS)):
            norms = [by_rank[0][3, max_norm][index][0] for by_rank in found.values()]
            torch.testing.assert_close(norms, [norms[0]] * len(norms), rtol=1e-6, atol=0)


def test_clipping_goes_on_through_micro_batches_and_steps():
    """A clip in the middle of an accumulation scales what is there, and what comes after is added to it."""

    def train(stage: int) -> list[str]:
        torch.manual_seed(0)
        model, reference = Tied(), Tied()
        reference.load_state_dict(model.state_dict())
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
        theirs = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1)
        for step in range(3):
            for place in range(2):
                model(training.micro_batch(step, place)).square().mean().backward()
                reference(training.micro_batch(step, place)).square().mean().backward()
                optimizer.clip_grad_norm_(0.3)
                nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
            optimizer.step(), optimizer.zero_grad(), theirs.step(), theirs.zero_grad()
        expected = {name: p.detach() for name, p in reference.named_parameters()}
        torch.testing.assert_close(training.whole(model, optimizer), expected, rtol=1e-5, atol=1e-6)

    for stage in range(4):
        zerolab.launch(train, 2, stage, timeout=60)


def test_not_finite_gradients_give_a_not_finite_norm_on_every_rank():
    def train(stage: int, bad: float) -> float:
        model = Net()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
        (model(torch.ones(1, training.WIDTH)).sum() * (bad if optimizer.rank == 1 else 1.0)).backward()
        return [optimizer.clip_grad_norm_(1.0, norm_type).item() for norm_type in NORMS]

    for stage in (0, 3):
        for bad in (float("nan"), float("inf")):
            for norms in zerolab.launch(train, 2, stage, bad, timeout=60):
                assert not any(torch.isfinite(torch.tensor(norms)))


@pytest.mark.parametrize("bad", [{"max_norm": -1.0}, {"max_norm": float("nan")}, {"norm_type": 0.0},
                                 {"norm_type": -2.0}, {"norm_type": float("nan")}])  # fmt: skip
def test_bad_norms_are_refused_before_anything_changes(bad: dict):
    def train(bad: dict) -> str:
        model = Net()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=2, lr=0.1)
        model(torch.ones(1, training.WIDTH)).sum().backward()
        before = optimizer.full_grads()
        try:
            optimizer.clip_grad_norm_(**{"max_norm": 1.0} | bad)
        except ValueError as error:
            assert training.differing(optimizer.full_grads(), before) == []
            return str(error)
        return "no error"

    (message,) = zerolab.launch(train, 1, bad, timeout=60)
    (value,) = bad.values()
    assert str(value) in message and ">" in message


def test_clipping_without_any_gradient_is_a_norm_of_zero():
    def train() -> float:
        optimizer = zerolab.ZeroOptimizer(Net(), torch.optim.SGD, stage=3, lr=0.1)
        return [optimizer.clip_grad_norm_(1.0, norm_type).item() for norm_type in NORMS]

    assert zerolab.launch(train, 2, timeout=60) == [[0.0] * len(NORMS)] * 2

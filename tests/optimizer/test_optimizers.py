"""Promise: keywords, groups, schedulers, closures and clipping mean what they mean in any torch optimizer."""

import sys

import cloudpickle
import pytest
import torch
from support import subjects
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

STEPS = 3


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def two_groups(model: nn.Module) -> list[dict]:
    """Weights decay, biases and norms do not; and a group with nothing in it, as scripts leave them."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.2, "lr": 0.02},
        {"params": [], "lr": 0.5},
        {"params": [p for p in trainable if p.dim() <= 1]},
    ]


def one_cycle(optimizer: torch.optim.Optimizer):
    """Turns both the learning rate and the momentum of each group."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.01, 0.03], total_steps=STEPS + 1)


def by_group(optimizer: torch.optim.Optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.5**n, lambda n: 1.0, lambda n: 0.9**n])


@pytest.mark.parametrize("schedule", [None, one_cycle, by_group])
@pytest.mark.parametrize("subject, stage", [("patchwork", 3), ("tiny", 1)])
def test_groups_and_schedules_mean_the_same_on_every_rank(subject: str, stage: int, schedule):
    def train() -> tuple:
        keywords = {"groups": two_groups, "schedule": schedule, "lr": 0.01}
        run, optimizer = subjects.train_sharded(subject, stage, torch.optim.AdamW, STEPS, **keywords)
        groups = [(len(group["params"]), group["lr"], group["betas"]) for group in optimizer.param_groups]
        whole = None
        if optimizer.rank == 0:
            whole = subjects.train_replicas(subject, 3, torch.optim.AdamW, STEPS, **keywords)[0]
        return run, groups, whole

    results = zerolab.launch(train, 3)
    assert all(subjects.same(run, results[0][2]) for run, *_ in results)
    assert results[0][1] == results[1][1] == results[2][1]
    assert [count for count, *_ in results[0][1]] == ([6, 0, 7] if subject == "patchwork" else [1, 0, 1])
    assert schedule is None or len({lr for _, lr, _ in results[0][1]}) == 3


def test_param_groups_are_the_models_own_parameters_and_a_change_to_them_counts():
    def look() -> tuple:
        model = nn.Linear(3, 2)
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.5)
        own = [p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)]
        with optimizer.full_params():
            before = model.bias.detach().clone()
        optimizer.param_groups[0]["lr"] = 0.25
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        with optimizer.full_params():
            return own, before - model.bias.detach(), isinstance(optimizer, torch.optim.Optimizer)

    for own, moved, is_optimizer in zerolab.launch(look, 2):
        assert own == [True, True] and is_optimizer
        torch.testing.assert_close(moved, torch.full((2,), 0.25))


def test_a_group_may_be_added_later():
    def look() -> tuple:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        optimizer = zerolab.ZeroOptimizer(
            model, torch.optim.Adam, stage=3, lr=0.1, params=model[1].parameters()
        )
        moved = []
        for step in range(2):
            if step == 1:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.2})
            with optimizer.full_params():
                before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            with optimizer.full_params():
                pairs = zip(before, model.parameters(), strict=True)
                moved.append([not torch.equal(old, new) for old, new in pairs])
        return moved

    assert zerolab.launch(look, 2) == [[[False, False, True, True], [True] * 4]] * 2


@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_foreach_and_fused_are_passed_through(flag: str):
    """foreach is the loop, batched: the same bits. fused may round otherwise where a tensor is cut."""

    def train() -> tuple:
        run, optimizer = subjects.train_sharded("gpt", 2, torch.optim.AdamW, STEPS, **{flag: True})
        whole = subjects.train_replicas("gpt", 2, torch.optim.AdamW, STEPS, **{flag: True})[0]
        locally = [group[flag] for each in optimizer.local.optimizers for group in each.param_groups]
        return run, whole, locally, optimizer.param_groups[0][flag]

    for run, whole, locally, shown in zerolab.launch(train, 2):
        assert all(locally) and shown is True
        torch.testing.assert_close(run.parameters, whole.parameters, rtol=1e-5, atol=1e-6)
        assert flag == "fused" or subjects.same(run, whole)


def test_step_takes_a_closure():
    def train(with_closure: bool) -> tuple:
        torch.manual_seed(0)
        model = subjects.gpt()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1, momentum=0.9)
        losses = []
        for step in range(STEPS):
            arguments = subjects.tokens(step, optimizer.rank)

            def closure(arguments: tuple = arguments) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(*arguments)
                loss.backward()
                return loss

            loss = optimizer.step(closure) if with_closure else closure()
            losses.append(loss.item())
            if not with_closure:
                optimizer.step()
        with optimizer.full_params():
            return losses, subjects.copies(model.named_parameters())

    for (losses, with_closure), (expected, without) in zip(
        zerolab.launch(train, 2, True), zerolab.launch(train, 2, False), strict=True
    ):
        assert losses == expected
        assert all(torch.equal(with_closure[name], without[name]) for name in without)


def test_clipping_uses_the_norm_of_all_gradients_on_every_rank():
    """Not of the shard: the same norm and the same parameters at every stage and world size, as torch's."""

    def train(stages: list[int]) -> list[tuple]:
        results = []
        for stage in stages:
            torch.manual_seed(0)
            model = subjects.gpt()
            optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=1.0)
            model(*subjects.tokens(0, 0)).backward()  # the same on all: the mean is one rank's gradient
            norm = optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            with optimizer.full_params():
                results.append((norm.item(), subjects.copies(model.named_parameters())))
        return results

    torch.manual_seed(0)
    model = subjects.gpt()
    model(*subjects.tokens(0, 0)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
    assert norm > 0.2, "or nothing would be clipped"
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for world_size in (1, 3):
        for each in (each for rank in zerolab.launch(train, world_size, [0, 1, 2, 3]) for each in rank):
            assert each[0] == pytest.approx(norm, rel=1e-6)
            torch.testing.assert_close(each[1], subjects.copies(model.named_parameters()))

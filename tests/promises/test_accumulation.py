"""Promise: gradients of several micro-batches add up, in the order that is written down.

Without no_sync each micro-batch is reduced when its backward ends: the sum over micro-batches of the sum over
ranks. With it each rank adds up its own first: the sum over ranks of the sum over micro-batches. Both are
divided once by N.
"""

import sys

import cloudpickle
import pytest
import torch
from support import training
from support.references import Replicas, Tensors, copies, seeded
from support.user_models import Net

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

STEPS = 3
# What one step does, letter by letter: s a micro-batch that is reduced, n one under no_sync; Z a zero_grad,
# z one that keeps zeros, m the model's own; g a look at the gradients, c a clip that changes nothing.
SCHEDULES = ("sss", "nns", "nn", "sns", "szs", "sZs", "smns", "nzs", "nZn", "nz", "sgs", "scns", "nsc")


def train_by_hand(schedule: str, world_size: int) -> Tensors:
    """The same in one process."""
    replicas = Replicas(one_block, world_size, torch.optim.AdamW, **training.DEFAULTS)
    for step in range(STEPS):
        for place, what in enumerate(schedule):
            if what in "sn":
                for rank, model in enumerate(replicas.models):
                    model(training.micro_batch(10 * step + place, rank)).square().mean().backward()
                replicas.collect()
            if what == "s":
                replicas.reduce()
            if what in "Zmz":
                replicas.zero_grad(set_to_none=what != "z")
            if what == "c":
                replicas.clip_grad_norm_(1e9)
        replicas.step()
        if step != 1:  # the second step leaves its gradients to the third
            replicas.zero_grad()
    return copies(replicas.masters.items())


def one_block() -> Net:
    return Net(depth=1)


def train_sharded(schedule: str, stage: int, rank: int) -> Tensors:
    model = seeded(one_block)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, **training.DEFAULTS)
    for step in range(STEPS):
        for place, what in enumerate(schedule):
            if what == "s":
                model(training.micro_batch(10 * step + place, rank)).square().mean().backward()
            if what == "n":
                with optimizer.no_sync():
                    model(training.micro_batch(10 * step + place, rank)).square().mean().backward()
            if what == "z":
                optimizer.zero_grad(set_to_none=False)
            if what == "Z":
                optimizer.zero_grad()
            if what == "m":
                model.zero_grad()
            if what == "g":
                optimizer.full_grads()
            if what == "c":
                optimizer.clip_grad_norm_(1e9)
        optimizer.step()
        if step != 1:  # the second step leaves its gradients to the third
            optimizer.zero_grad()
    return training.whole(model, optimizer)


def train_all(schedules: tuple[str, ...]) -> dict[tuple[str, int], list[str] | str]:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = {}
    for schedule in schedules:
        expected = train_by_hand(schedule, world_size)
        for stage in range(4):
            print(schedule, stage, flush=True)
            found[schedule, stage] = training.differing(train_sharded(schedule, stage, rank), expected)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_micro_batches_add_up_in_the_order_that_is_written_down(world_size: int, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for found in zerolab.launch(train_all, world_size, SCHEDULES, timeout=60):
        assert found == {each: [] for each in found}


def test_the_two_orders_are_not_the_same_bits():
    """Or the test above could not tell them apart."""
    assert training.differing(train_by_hand("sss", 3), train_by_hand("nns", 3))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_learning_rate_schedules_and_data_loaders_need_no_care(stage: int):
    def train(stage: int) -> list[str]:
        rank = torch.distributed.get_rank()
        results = []
        for sharded in (False, True):
            torch.manual_seed(0)
            model = Net(depth=1)
            make = lambda p, m: zerolab.ZeroOptimizer(m, torch.optim.SGD, stage=stage, params=p, lr=0.1)
            groups = [
                {"params": list(model.blocks.parameters()), "lr": 0.05, "momentum": 0.9},
                {"params": [*model.before.parameters(), *model.after.parameters()]},
            ]
            optimizer = make(groups, model) if sharded else torch.optim.SGD(groups, lr=0.1)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.2, 0.1], total_steps=6)
            data = torch.utils.data.TensorDataset(torch.randn(24, training.WIDTH))
            samplers = [
                torch.utils.data.DistributedSampler(data, 2, each, shuffle=True, seed=3) for each in range(2)
            ]
            samplers = samplers[rank : rank + 1] if sharded else samplers
            loaders = [torch.utils.data.DataLoader(data, 4, sampler=each) for each in samplers]
            for epoch in range(2):
                for each in samplers:
                    each.set_epoch(epoch)
                for batches in zip(*loaders, strict=True):
                    for (batch,) in batches:
                        model(batch).square().mean().backward()
                    if not sharded:
                        for p in model.parameters():
                            p.grad /= 2
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            results.append(training.whole(model, optimizer) if sharded else dict(model.named_parameters()))
        return training.differing(results[1], {name: p.detach() for name, p in results[0].items()})

    assert zerolab.launch(train, 2, stage, timeout=60) == [[], []]


def test_several_models_with_optimizers_of_their_own():
    """Generator and discriminator: gradients go through one model into the other."""

    def train(stage: int) -> list[str]:
        results = []
        for sharded in (0, stage):
            torch.manual_seed(0)
            generator, judge = (
                Net(depth=1),
                torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
            )
            make = lambda each: zerolab.ZeroOptimizer(each, torch.optim.Adam, stage=sharded, lr=0.01)  # noqa: B023
            ours, theirs = make(generator), make(judge)
            for step in range(3):
                x = training.micro_batch(step, ours.rank)
                fake = generator(x)
                theirs.zero_grad()
                (judge(fake.detach()).mean() - judge(x[:, :5]).mean()).backward()
                theirs.step()
                ours.zero_grad()
                judge.requires_grad_(step != 1)  # as some do, to save work
                (-judge(fake).mean()).backward()
                ours.step()
                judge.requires_grad_(True)
            judged = {f"judge.{name}": p for name, p in training.whole(judge, theirs).items()}
            results.append(training.whole(generator, ours) | judged)
        return training.differing(*results)

    for stage in (1, 2, 3):
        assert zerolab.launch(train, 2, stage, timeout=60) == [[], []]

"""Promise: a process_group of some of the ranks trains by itself, whatever the other ranks do meanwhile."""

import pytest
import torch
import torch.distributed as dist
from support import training
from support.user_models import Net

import zerolab

STEPS = 3


def train(
    group: dist.ProcessGroup | None, stage: int, seed: int
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Parameters and gradient norms of a run whose numbers depend on its seed and its ranks alone."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=group, lr=0.05)
    norms = []
    for step in range(STEPS + seed):  # one group takes more steps than the other
        model(training.micro_batch(10 * seed + step, optimizer.rank)).square().mean().backward()
        norms.append(optimizer.clip_grad_norm_(0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return training.whole(model, optimizer), norms


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_groups_of_interleaved_ranks_train_two_models(stage: int):
    def in_groups():
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine = dist.get_rank() % 2
        return train(groups[mine], stage, mine)

    found = zerolab.launch(in_groups, 4)
    for seed in (0, 1):
        (expected, norms), _ = zerolab.launch(train, 2, None, stage, seed)
        for parameters, its_norms in (found[seed], found[seed + 2]):
            assert its_norms == norms
            assert training.differing(parameters, expected) == []


def test_one_rank_may_train_in_two_groups():
    """A large model over all ranks and a small one over each pair, their steps interleaved."""

    def in_both():
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pair = pairs[dist.get_rank() // 2]
        runs = []
        for group, stage in ((None, 3), (pair, 2)):
            torch.manual_seed(0)
            model = Net()
            runs.append(
                (model, zerolab.ZeroOptimizer(model, torch.optim.SGD, stage, process_group=group, lr=0.1))
            )
        for step in range(STEPS):
            losses = [model(training.micro_batch(step, each.rank)).square().mean() for model, each in runs]
            sum(losses).backward()
            for _, each in runs:
                each.step()
                each.zero_grad()
        return [training.whole(*run) for run in runs]

    def alone(stage: int):
        torch.manual_seed(0)
        model = Net()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage, lr=0.1)
        for step in range(STEPS):
            model(training.micro_batch(step, optimizer.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return training.whole(model, optimizer)

    of_four, of_two = zerolab.launch(alone, 4, 3)[0], zerolab.launch(alone, 2, 2)[0]
    for large, small in zerolab.launch(in_both, 4):
        assert training.differing(large, of_four) == training.differing(small, of_two) == []

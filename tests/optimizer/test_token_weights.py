"""Promise: where ranks have unequal numbers of tokens, the gradient is that of the mean over all of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zerolab

COUNTS = ((5, 1, 2), (1, 7, 0))  # by step and rank
VOCABULARY = 11


def tokens(step: int, rank: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, 4, generator=generator), torch.randint(
        VOCABULARY, (count,), generator=generator
    )


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, VOCABULARY))


def in_one_process(losses_of_step) -> dict[str, torch.Tensor]:
    """Train on what each step is said to add up to."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(len(COUNTS)):
        optimizer.zero_grad()
        losses_of_step(model, step)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def by_rank(model: nn.Module, step: int) -> None:
    """The same sums in rank order, as a sharded run adds them: the last bits depend on the order."""
    total = sum(COUNTS[step])
    for rank, count in enumerate(COUNTS[step]):
        x, y = tokens(step, rank, count)
        (F.cross_entropy(model(x), y, reduction="sum") * (3 / total)).backward()
    for parameter in model.parameters():
        parameter.grad /= 3


def all_at_once(model: nn.Module, step: int) -> None:
    parts = [tokens(step, rank, count) for rank, count in enumerate(COUNTS[step])]
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))
    F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_as_one_process_with_all_tokens(stage: int):
    def train():
        model = build_model()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.5)
        for step, counts in enumerate(COUNTS):
            x, y = tokens(step, optimizer.rank, counts[optimizer.rank])
            loss_sum = F.cross_entropy(model(x), y, reduction="sum")
            optimizer.mean_loss(loss_sum, len(y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with optimizer.full_params():
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    in_order, at_once = in_one_process(by_rank), in_one_process(all_at_once)
    for found in zerolab.launch(train, 3):
        assert all(torch.equal(found[name], in_order[name]) for name in in_order)
        assert all(torch.allclose(found[name], at_once[name], atol=1e-6) for name in at_once)


def test_a_mean_of_means_would_be_another_gradient():
    """So the test above can fail."""

    def mean_of_means(model: nn.Module, step: int) -> None:
        for rank, count in enumerate(COUNTS[step]):
            x, y = tokens(step, rank, count)
            (F.cross_entropy(model(x), y, reduction="sum") / max(count, 1) / 3).backward()

    wrong, right = in_one_process(mean_of_means), in_one_process(all_at_once)
    assert not any(torch.allclose(wrong[name], right[name], atol=1e-3) for name in right)


def test_micro_batches_share_one_total():
    """Step 0's tokens in two micro-batches of their own sizes, all in one mean."""

    def train():
        model = build_model()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=2, lr=0.5)
        counts = [COUNTS[micro][optimizer.rank] for micro in range(2)]
        total = optimizer.total(sum(counts))
        for micro, count in enumerate(counts):
            x, y = tokens(micro, optimizer.rank, count)
            loss_sum = F.cross_entropy(model(x), y, reduction="sum")
            optimizer.mean_loss(loss_sum, total_count=total).backward()
        optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    model = build_model()
    parts = [tokens(micro, rank, COUNTS[micro][rank]) for micro in range(2) for rank in range(3)]
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))
    F.cross_entropy(model(x), y).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for found in zerolab.launch(train, 3):
        assert all(torch.allclose(found[name], p, atol=1e-6) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("counts", "complaint"),
    [
        ((1, -2), "count is -2.0 on rank 1: pass how many tokens it has, 0 or more"),
        ((float("nan"), 1), "count is nan on rank 0"),
        ((1, float("inf")), "count is inf on rank 1"),
        ((0, 0), "there are 0.0 tokens on all ranks together: pass counts whose total is more than 0"),
    ],
)
def test_counts_that_cannot_be_are_refused_on_every_rank(counts: tuple, complaint: str):
    def run() -> str:
        optimizer = zerolab.ZeroOptimizer(build_model(), torch.optim.SGD, lr=0.5)
        try:
            optimizer.mean_loss(torch.zeros(()), counts[optimizer.rank])
        except ValueError as error:
            return str(error)
        return "accepted"

    assert all(answer.startswith(complaint) for answer in zerolab.launch(run, 2))


@pytest.mark.parametrize("counts", [{}, {"count": 1, "total_count": 2}])
def test_one_of_both_counts_is_asked_for(counts: dict):
    def run() -> None:
        optimizer = zerolab.ZeroOptimizer(build_model(), torch.optim.SGD, lr=0.5)
        optimizer.mean_loss(torch.zeros(()), **counts)

    with pytest.raises(zerolab.WorkerError, match="pass this rank's count of tokens, or the total_count"):
        zerolab.launch(run, 1)

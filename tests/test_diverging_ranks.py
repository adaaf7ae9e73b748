"""Promise: ranks whose control flow parts are told so at the first collective that differs; none hangs."""

import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from unprepared import WIDTH, Net

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

DEPTH = 3


class Routed(Net):
    """Goes through the blocks it is told to, in the order it is told."""

    def __init__(self):
        super().__init__(depth=DEPTH)
        self.path = list(range(DEPTH))

    def forward(self, x):
        x = self.before(x)
        for index in self.path:
            x = self.blocks[index](x)
        return self.after(x)


def loss(optimizer: zerolab.ZeroOptimizer) -> torch.Tensor:
    return optimizer.model(torch.ones(2, WIDTH)).sum()


def odd_one_out(optimizer: zerolab.ZeroOptimizer) -> bool:
    return optimizer.rank == optimizer.world_size - 1


def another_path(path: list[int]):
    def step(optimizer) -> None:
        if odd_one_out(optimizer):
            optimizer.model.path = path
        loss(optimizer).backward()
        optimizer.step()

    return step


def one_more_backward(optimizer) -> None:
    for _ in range(1 + odd_one_out(optimizer)):
        loss(optimizer).backward()
    optimizer.step()


def one_more_step(optimizer) -> None:
    loss(optimizer).backward()
    for _ in range(1 + odd_one_out(optimizer)):
        optimizer.step()
    loss(optimizer).backward()


def clipped_on_one_rank(optimizer) -> None:
    loss(optimizer).backward()
    if odd_one_out(optimizer):
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    loss(optimizer).backward()


def saved_by_one_rank(optimizer) -> None:
    if odd_one_out(optimizer):
        zerolab.save(optimizer, Path("never"))
    loss(optimizer).backward()
    optimizer.step()


def whole_on_one_rank(optimizer) -> None:
    if odd_one_out(optimizer):
        with optimizer.full_params():
            pass
    loss(optimizer).backward()
    optimizer.step()


A_GATHER, A_REDUCTION, CONTROL = "all_gather of ", "reduce_scatter of ", "an exchange of control messages"
DIVERGING = {
    # what the ranks do: the stages at which they then differ, what the odd one issues, and what the others do
    "a block skipped": (another_path([0, 2]), (3,), A_GATHER + "blocks.2", A_GATHER + "blocks.1"),
    "a block twice": (another_path([0, 0, 1, 2]), (3,), A_GATHER + "blocks.0", A_GATHER + "blocks.1"),
    "another order": (another_path([1, 0, 2]), (3,), A_GATHER + "blocks.1", A_GATHER + "blocks.0"),
    "one more backward": (one_more_backward, (1, 2), A_REDUCTION, CONTROL),
    "one more forward and backward": (one_more_backward, (3,), A_GATHER, CONTROL),
    "one more step": (one_more_step, (1, 2), CONTROL, A_REDUCTION),
    "one clips": (clipped_on_one_rank, (1, 2, 3), CONTROL, A_GATHER),
    "one saves": (saved_by_one_rank, (0, 1, 2, 3), "save", ""),
    "one looks inside full_params": (whole_on_one_rank, (3,), A_GATHER + "blocks.0", A_GATHER + "root"),
}
CASES = [(name, stage) for name, (_, stages, _, _) in DIVERGING.items() for stage in stages]


@pytest.mark.parametrize(("name", "stage"), CASES, ids=[f"{name}, stage {stage}" for name, stage in CASES])
def test_the_first_difference_is_named(name: str, stage: int, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    step, _, odd, others = DIVERGING[name]

    def train() -> None:
        torch.manual_seed(0)
        step(zerolab.ZeroOptimizer(Routed(), torch.optim.SGD, stage=stage, lr=0.1))

    with pytest.raises(zerolab.WorkerError, match="ranks took different paths") as caught:
        zerolab.launch(train, 3, timeout=60)
    said = str(caught.value)
    assert f"{odd}" in said.split(" on rank 2")[0]
    assert others in said
    assert not any(tmp_path.iterdir())
    assert "pass units= with the module that holds all branches" in said


def test_a_rank_that_ends_early_is_not_waited_for():
    def train() -> None:
        optimizer = zerolab.ZeroOptimizer(Routed(), torch.optim.SGD, stage=3, lr=0.1)
        for _ in range(2 - odd_one_out(optimizer)):
            loss(optimizer).backward()
            optimizer.step()

    with pytest.raises(zerolab.WorkerError, match=r"rank \d failed"):
        zerolab.launch(train, 3, timeout=60)


def test_several_models_in_one_process_do_not_confuse_each_other():
    """Two optimizers on one group, their passes interleaved: each has a count of its own."""

    def train() -> list[int]:
        torch.manual_seed(0)
        pair = [zerolab.ZeroOptimizer(Routed(), torch.optim.SGD, stage=3, lr=0.1) for _ in range(2)]
        for optimizer in pair:
            optimizer.model.path = [0, 1, 2] if optimizer is pair[0] else [2, 1]
        for _ in range(2):
            sum(loss(optimizer) for optimizer in pair).backward()
            for optimizer in pair:
                optimizer.step()
        return [optimizer.trace.step_number for optimizer in pair]

    assert zerolab.launch(train, 2, timeout=60) == [[2, 2]] * 2


class Gate(torch.nn.Module):
    """A block with a parameter that only the last rank uses."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = (torch.nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

    def forward(self, x):
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        return x * self.always * (self.sometimes if last else 1.0)


def test_a_parameter_inside_a_unit_that_some_ranks_use_trains_below_stage_3_and_is_refused_at_it():
    """A unit that lacks a gradient is reduced at the end of backward: with other gathers before it."""

    def train(stage: int) -> int:
        model = Net(depth=5)
        model.blocks[3] = Gate()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
        loss(optimizer).backward()
        optimizer.step()
        return optimizer.trace.step_number

    assert zerolab.launch(train, 3, 2, timeout=60) == [1, 1, 1]
    with pytest.raises(zerolab.WorkerError, match="ranks took different paths"):
        zerolab.launch(train, 3, 3, timeout=60)

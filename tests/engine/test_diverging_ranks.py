"""Promise: where control flow differs by rank, the first collective that differs is an error; none hangs."""

import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from support.user_models import WIDTH, Net

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


def counted_on_one_rank(optimizer) -> None:
    loss(optimizer).backward()
    if odd_one_out(optimizer):
        optimizer.total(1.0)
    optimizer.step()


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


A_GATHER, A_REDUCTION, CONTROL = "all_gather of ", "reduce_scatter of ", "exchange of "
DIVERGING = {
    # what the ranks do: the stages at which they then differ, what the odd one issues, and what the others do
    "a block skipped": (another_path([0, 2]), (3,), A_GATHER + "blocks.2", A_GATHER + "blocks.1"),
    "a block twice": (another_path([0, 0, 1, 2]), (3,), A_GATHER + "blocks.0", A_GATHER + "blocks.1"),
    "another order": (another_path([1, 0, 2]), (3,), A_GATHER + "blocks.1", A_GATHER + "blocks.0"),
    "one more backward": (one_more_backward, (1, 2), A_REDUCTION, CONTROL),
    "one more forward and backward": (one_more_backward, (3,), A_GATHER, CONTROL),
    "one more step": (one_more_step, (1, 2), CONTROL, A_REDUCTION),
    "one clips": (clipped_on_one_rank, (1, 2, 3), CONTROL, A_GATHER),
    "one counts": (counted_on_one_rank, (0, 3), CONTROL + "token counts", CONTROL + "unit order"),
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
    assert "pass units=[], which makes the whole model one unit" in said


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


def test_names_too_long_for_the_roll_call_are_told_apart_and_shown_by_their_ends():
    name = "a_container_whose_name_alone_is_longer_than_the_message"

    def train() -> None:
        model = torch.nn.ModuleDict({name: torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))})
        zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1)
        model[name][torch.distributed.get_rank()](torch.ones(2, 3))

    with pytest.raises(zerolab.WorkerError, match=r"message\.[01] on rank \d and .*message\.[01] on rank \d"):
        zerolab.launch(train, 2, timeout=60)


@pytest.mark.parametrize("precision", ["fp32", "mixed_fp32_grads"])
def test_gradients_that_one_rank_gathers_are_not_taken_for_parameters(precision: str):
    def train() -> None:
        optimizer = zerolab.ZeroOptimizer(Routed(), torch.optim.SGD, stage=2, precision=precision, lr=0.1)
        for _ in range(2):
            loss(optimizer).backward()
            if odd_one_out(optimizer) and optimizer.trace.step_number == 1:
                optimizer.full_grads()
            optimizer.step()

    with pytest.raises(zerolab.WorkerError, match=r"all_gather of gradients of blocks\.0 on rank"):
        zerolab.launch(train, 2, timeout=60)


def test_messages_of_the_user_s_own_on_the_same_group_do_not_meet_the_engine_s():
    def train() -> list[float]:
        optimizer = zerolab.ZeroOptimizer(Routed(), torch.optim.SGD, stage=3, lr=0.1)
        peer, mine, theirs = 1 - optimizer.rank, torch.full((3,), float(optimizer.rank)), torch.zeros(3)
        waiting = [torch.distributed.irecv(theirs, peer)]
        loss(optimizer).backward()
        optimizer.step()
        waiting.append(torch.distributed.isend(mine, peer))
        for each in waiting:
            each.wait()
        return theirs.tolist()

    assert zerolab.launch(train, 2, timeout=60) == [[1.0] * 3, [0.0] * 3]

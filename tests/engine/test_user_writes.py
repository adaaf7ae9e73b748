"""Promise: what users write to parameters is kept or refused, at every stage and at every moment."""

import contextlib
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from support.numbered import outcome
from support.trained import build, on_two_ranks
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


class Clamped(nn.Linear):
    """A layer whose forward writes to its own weight, the same on every rank."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def clamped() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Clamped(8, 8), nn.Tanh(), Clamped(8, 2))


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def train_clamped(stage: int) -> list[torch.Tensor]:
    model = clamped()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    for step in range(3):
        model(data(step, optimizer.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.full_params():
        return [p.detach().clone() for p in model.parameters()]


def train_clamped_here() -> list[torch.Tensor]:
    torch.set_num_threads(1)
    model = clamped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        grads = [
            torch.autograd.grad(model(data(step, rank)).square().mean(), list(model.parameters()))
            for rank in range(2)
        ]
        for parameter, first, second in zip(model.parameters(), *grads, strict=True):
            parameter.grad = (first + second) / 2
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_forward_that_writes_the_same_on_every_rank_keeps_the_bits_below_stage_3(stage: int):
    for found in on_two_ranks(train_clamped, stage):
        assert all(map(torch.equal, found, train_clamped_here()))


def test_a_forward_that_writes_is_refused_at_stage_3():
    with pytest.raises(zerolab.WorkerError, match=r"0.weight was written to .*full_params\(\).* stage 2"):
        on_two_ranks(train_clamped, 3)


def train_with_max_norm(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8, max_norm=1.0), nn.Linear(8, 20))
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.01)
    tokens = torch.randint(20, (6,), generator=torch.Generator().manual_seed(optimizer.rank))
    nn.functional.cross_entropy(model(tokens), tokens).backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_forward_that_writes_other_values_on_each_rank_is_refused(stage: int):
    told = "was written to while it was gathered" if stage == 3 else r"disagree about the values .*max_norm"
    with pytest.raises(zerolab.WorkerError, match=told):
        on_two_ranks(train_with_max_norm, stage)


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.layers(x))


def load_after_an_evaluation(stage: int, by: str) -> str:
    """The root unit is whole after a forward without a backward."""
    torch.manual_seed(0)
    model = Headed()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    model(torch.randn(3, 8))
    new = nn.Linear(8, 2).state_dict()
    try:
        if by == "load_state_dict":
            model.head.load_state_dict(new)
        else:
            with torch.no_grad():
                model.head.weight.copy_(new["weight"])
        model(torch.randn(3, 8)).sum().backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    optimizer.zero_grad()
    return "accepted"


@pytest.mark.parametrize("by", ["load_state_dict", "copy_"])
def test_a_write_to_the_root_after_an_evaluation_is_refused_at_stage_3(by: str):
    told = "head.weight is sharded: load inside" if by == "load_state_dict" else "head.weight was written to"
    assert all(told in said for said in on_two_ranks(load_after_an_evaluation, 3, by))


@pytest.mark.parametrize("stage", [0, 2])
def test_such_a_write_is_kept_below_stage_3(stage: int):
    assert on_two_ranks(load_after_an_evaluation, stage, "load_state_dict") == ["accepted"] * 2


def write_on_rank_0(stage: int, through: str, from_rank: int | None) -> tuple[str, list[float]]:
    torch.manual_seed(0)
    model = Headed()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.0)
    said = ""
    try:
        with torch.no_grad(), optimizer.full_params(from_rank=from_rank):
            if optimizer.rank == (from_rank or 0):
                for parameter in model.parameters():
                    (parameter.data if through == "data" else parameter).fill_(7.0)
    except RuntimeError as error:
        said = str(error)
    if from_rank is not None:
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    with contextlib.suppress(RuntimeError), optimizer.full_params():
        return said, [(p == 7).float().mean().item() for p in model.parameters()]
    return said, []


@pytest.mark.parametrize("through", ["parameter", "data"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_full_params_that_one_rank_alone_wrote_in_are_refused(stage: int, through: str):
    for said, _ in on_two_ranks(write_on_rank_0, stage, through, None):
        assert "with other values in unit" in said and "full_params(from_rank=0)" in said


def test_at_stage_3_nothing_is_kept_of_it():
    for _, sevens in on_two_ranks(write_on_rank_0, 3, "parameter", None):
        assert not any(sevens)


@pytest.mark.parametrize("from_rank", [0, 1])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_may_write_for_all(stage: int, from_rank: int):
    for said, sevens in on_two_ranks(write_on_rank_0, stage, "parameter", from_rank):
        assert said == "" and set(sevens) == {1.0}


def ask_for_a_rank_that_is_not_there(from_rank) -> str:
    _, optimizer = build(2)
    with pytest.raises(ValueError) as caught, optimizer.full_params(from_rank=from_rank):
        pass
    return str(caught.value)


@pytest.mark.parametrize("from_rank", [2, -1, "0"])
def test_from_rank_is_a_rank(from_rank):
    for said in on_two_ranks(ask_for_a_rank_that_is_not_there, from_rank):
        assert f"from_rank is {from_rank!r}: pass a rank from 0 to 1" in said


def write_and_raise(stage: int) -> str:
    """An exception ends full_params() on both ranks, after rank 1 alone has written."""
    model, optimizer = build(stage)
    with contextlib.suppress(ZeroDivisionError), torch.no_grad(), optimizer.full_params():
        if optimizer.rank == 1:
            next(model.parameters()).fill_(7.0)
        raise ZeroDivisionError
    model(torch.randn(4, 8)).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_after_an_exception_the_values_are_compared_at_the_next_step(stage: int):
    for said in on_two_ranks(write_and_raise, stage):
        assert "ranks disagree about the values written to parameters" in said


def lines_before_and_after_a_step() -> list[int]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=2, lr=0.1)
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    before = len(optimizer.engine.written_so_far())
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    return [before, len(optimizer.engine.written_so_far())]


def test_a_write_is_compared_once():
    """A frozen parameter gets no update that takes note of its values: each step would read all its unit."""
    assert zerolab.launch(lines_before_and_after_a_step, 1) == [[1, 0]]


def store_after_writes(stage: int, folder: Path, writers: list[int], by: str) -> tuple[str, str, list[str]]:
    """On a rank: ``writers`` load weights, and all store them; what is said of it, and of the next step."""
    torch.manual_seed(0)
    model = Headed()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    if optimizer.rank in writers:
        model.load_state_dict({name: torch.full_like(p, 7.0) for name, p in model.state_dict().items()})
    place = folder if by == "save" else folder / "model.pt"
    stored = outcome(lambda: getattr(zerolab, by)(optimizer, place))
    found = [path.name for path in folder.glob("[!.]*")]
    model(torch.ones(3, 8)).sum().backward()
    stepped = outcome(optimizer.step)
    optimizer.zero_grad()
    return stored, stepped, found


@pytest.mark.parametrize("by", ["save", "export"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_values_that_one_rank_alone_wrote_are_not_stored(stage: int, by: str, tmp_path: Path):
    for stored, stepped, found in on_two_ranks(store_after_writes, stage, tmp_path, [0], by):
        for said in (stored, stepped):
            assert said.startswith("RuntimeError: ranks disagree about the values written to parameters")
            assert "full_params(from_rank=0)" in said
        assert found == []


@pytest.mark.parametrize("by, name", [("save", "generation-000001"), ("export", "model.pt")])
def test_values_that_all_ranks_wrote_are_stored(by: str, name: str, tmp_path: Path):
    for stored, stepped, found in on_two_ranks(store_after_writes, 2, tmp_path, [0, 1], by):
        assert stored == stepped == "done" and name in found


def lines_before_and_after_a_save(folder: Path) -> list[int]:
    model, optimizer = build(stage=2)
    with torch.no_grad():
        next(model.parameters()).fill_(7.0)
    before = len(optimizer.engine.written_so_far())
    zerolab.save(optimizer, folder)
    return [before, len(optimizer.engine.written_so_far())]


def test_a_save_leaves_to_the_next_step_what_that_compares(tmp_path: Path):
    assert zerolab.launch(lines_before_and_after_a_save, 1, tmp_path) == [[1, 1]]

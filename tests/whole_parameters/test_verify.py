"""Promise: a GPT whose matrices are updated by Muon has one process's bits, in the predicted bytes."""

import dataclasses
import sys

import cloudpickle
import pytest
import torch
from support.long import long_where
from torch import nn

import zerolab
from zerolab import memory
from zerolab.__main__ import main
from zerolab.models import GPT
from zerolab.optimizer.owners import choose_owners
from zerolab.parity.parity import random_tokens
from zerolab.precision import PRECISIONS

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

MUON = {
    "optimizer_class": torch.optim.AdamW,
    "params": zerolab.matrices_by(torch.optim.Muon, lr=0.02, momentum=0.9),
    "lr": 3e-3,
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


OTHERS = "fp32 and mixed precision train the same matrices, and tests/promises has each precision"


@pytest.mark.parametrize(
    "precision", long_where(lambda each: each not in ("fp32", "mixed"), OTHERS, PRECISIONS)
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bits_bytes_and_messages_on_three_ranks(stage: int, precision: str):
    """Three blocks of four matrices: of a unit one rank owns two matrices, and the others one."""
    report = zerolab.verify(stage, 3, precision=precision, **MUON)
    assert (report.bit_identical, report.memory_matches, report.traffic_matches) == (True, True, True)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 3])
def test_other_numbers_of_ranks(stage: int, world_size: int):
    assert zerolab.verify(stage, world_size, **MUON).ok


def two_blocks() -> nn.Module:
    return GPT(vocab=64, width=32, depth=2, heads=2, context=16)


STAGE_2 = "stage 3 has the same shares, and gathers them besides"


@pytest.mark.parametrize(
    "settings",
    [{"offload": "cpu"}, {"bucket_bytes": 64}, {"prefetch": 0, "reduces_in_flight": 0}, {"prefetch": 3}],
    ids=str,
)
@pytest.mark.parametrize("stage", long_where(lambda stage: stage == 2, STAGE_2, [2, 3]))
def test_more_ranks_than_matrices_of_a_unit_and_other_settings(stage: int, settings: dict):
    """Ten ranks would be slow: two blocks on five have eight matrices, so a rank owns nothing of one."""
    report = zerolab.verify(stage, 5, two_blocks, random_tokens, steps=2, **MUON, **settings)
    assert (report.bit_identical, report.traffic_matches) == (True, True)
    assert report.memory_matches or "offload" in settings


def big_gpt() -> nn.Module:
    return GPT(vocab=512, width=1024, depth=12, heads=16, context=64)


@pytest.mark.parametrize("world_size", [16, 1024])
def test_a_rehearsed_rank_holds_what_it_owns(world_size: int):
    """On 1,024 ranks there are 48 matrices, and rank 0 owns one of the largest."""
    found = zerolab.rehearse(big_gpt, world_size, 3, "mixed", **MUON)
    with torch.device("meta"):
        model = big_gpt()
    others, hidden = MUON["params"](model)
    of_blocks = [[p for p in block.parameters() if p.dim() == 2] for block in model.blocks]
    owners = choose_owners(of_blocks, world_size)
    own = sum(p.numel() for p in hidden["params"] if owners[id(p)] == 0)
    whole = sum(p.numel() for p in hidden["params"])
    rest = sum(p.numel() for p in others["params"])
    assert own == pytest.approx(whole / 16, rel=0.1) or (world_size, own) == (1024, 4 * 1024**2)
    expected = [
        memory.model_states(whole, world_size, 3, "mixed", k=8, own_share=own / whole),
        memory.model_states(rest, world_size, 3, "mixed", k=12),
    ]
    for each in dataclasses.fields(memory.ModelStates):
        assert getattr(found.memory, each.name) == pytest.approx(
            sum(getattr(part, each.name) for part in expected), abs=1
        )


def named(model: nn.Module) -> list[dict]:
    """Groups of named parameters, with one tensor for a list, and a frozen parameter."""
    model.blocks[0].requires_grad_(False)
    matrices = [(name, p) for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name]
    used = {id(p) for _, p in matrices}
    others = [p for p in model.parameters() if id(p) not in used]
    own = {"optimizer": torch.optim.Muon, "lr": 0.02}
    first, *rest = matrices
    return [{"params": others}, own | {"params": first[1]}, own | {"params": rest}]


def some_matrices(model: nn.Module) -> list[dict]:
    """Muon has only some matrices of each block, and AdamW the others of the same shapes."""
    mine = {id(block.mlp_in.weight) for block in model.blocks}
    return [
        {"params": [p for p in model.parameters() if id(p) not in mine]},
        {"params": [p for p in model.parameters() if id(p) in mine], "optimizer": torch.optim.Muon},
    ]


OTHER_STAGES = "stage 3 shards all of it"


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer_class": torch.optim.Adafactor, "lr": 0.01},
        {"optimizer_class": torch.optim.Adafactor, "precision": "mixed"},
        {"optimizer_class": torch.optim.AdamW, "params": named},
        {"optimizer_class": torch.optim.AdamW, "params": some_matrices},
        {"optimizer_class": torch.optim.SGD, "params": lambda model: list(model.parameters()), "lr": 0.1},
    ],
    ids=["Adafactor", "Adafactor, mixed", "named and frozen", "some matrices", "a list"],
)
@pytest.mark.parametrize("stage", long_where(lambda stage: stage < 3, OTHER_STAGES, [0, 2, 3]))
def test_any_groups_and_state_that_is_no_multiple_of_the_parameters(stage: int, settings: dict):
    report = zerolab.verify(stage, 2, **settings)
    assert (report.bit_identical, report.memory_matches, report.traffic_matches) == (True, True, True)


class WithEmpty(nn.Module):
    """One unit has a matrix without elements alone."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Empty()])

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x)).square().mean()


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return x + self.matrix.sum()


def test_a_matrix_without_elements():
    inputs = lambda step, rank: torch.ones(2, 4) * (1 + rank)
    assert zerolab.verify(2, 2, WithEmpty, inputs, **MUON).ok


class WithUnusedEmpty(nn.Linear):
    """A parameter without elements, which forward does not use."""

    def __init__(self):
        super().__init__(4, 4)
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return super().forward(x).square().mean()


def test_a_class_that_divides_by_the_number_of_elements():
    """Adafactor does, and one process never steps the empty parameter, which has no gradient."""
    inputs = lambda step, rank: torch.ones(2, 4) * (1 + rank)
    report = zerolab.verify(2, 2, WithUnusedEmpty, inputs, optimizer_class=torch.optim.Adafactor)
    assert report.bit_identical and report.memory_matches


def test_an_empty_parameter_that_is_used_is_left_out_where_one_process_divides_by_zero():
    model = WithEmpty()
    with pytest.raises(ZeroDivisionError):
        step(model, torch.optim.Adafactor(model.parameters()))
    for stage in range(4):
        (found,) = zerolab.launch(beside_an_empty_parameter, 1, stage)
        assert found, stage


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()


def beside_an_empty_parameter(stage: int) -> bool:
    """Whether a layer learns the same as alone in one process."""
    model, alone = WithEmpty(), nn.Linear(4, 4)
    alone.load_state_dict(model.blocks[0].state_dict())
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adafactor, stage=stage)
    model(torch.ones(2, 4)).backward()
    optimizer.step()
    step(alone, torch.optim.Adafactor(alone.parameters()))
    with optimizer.full_params():
        return torch.equal(model.blocks[0].weight, alone.weight)


def test_the_report_and_the_command_say_how_even_the_shares_are(capsys):
    balance = zerolab.verify(1, 3, **MUON).balance
    assert balance.elements == balance.multiplications == 1.0  # three blocks for three ranks
    assert zerolab.verify(1, 2, optimizer_class=torch.optim.Adam).balance is None
    assert main(["verify", "--stage", "1", "--world-size", "1", "4", "--optimizer", "muon"]) == 0
    said = capsys.readouterr().out
    assert "Whole parameters on 4 ranks: the busiest rank has 1.10 times the mean" in said
    assert said.count("Whole parameters") == 1  # one rank alone shares nothing


def test_a_rehearsal_says_it_too_and_runs_updates_that_read_a_norm():
    assert zerolab.rehearse(big_gpt, 1024, 3, **MUON).balance.elements == pytest.approx(1024 * 4 / 144)
    found = zerolab.rehearse(two_blocks, 4, 2, optimizer_class=torch.optim.Adafactor)
    assert found.balance.elements < 1.2 and found.memory.optimizer_bytes > 0

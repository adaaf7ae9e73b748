"""Promise: a run that is loaded has the buffers it had, every rank its own."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.numbered import outcome
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Net(nn.Module):
    """A model with running statistics, and with each kind of buffer that may be missed."""

    def __init__(self, mask_size: int = 3, name: str = "mask"):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))
        self.shared = nn.ModuleList([self.norm])
        self.register_buffer(name, torch.zeros(5, mask_size, dtype=torch.bool).t())
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("nothing", torch.zeros(0, 2))
        self.register_buffer("absent", None)
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.spectral(self.norm(x)).square().mean()


def build(stage: int = 2, model: Callable[[], nn.Module] = Net) -> zerolab.ZeroOptimizer:
    torch.manual_seed(0)
    return zerolab.ZeroOptimizer(model(), torch.optim.SGD, stage=stage, lr=0.01)


def buffers(optimizer: zerolab.ZeroOptimizer) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in optimizer.model.named_buffers()}


def train(optimizer: zerolab.ZeroOptimizer) -> None:
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.model(torch.randn(8, 6, generator=data) + dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(folder: Path, stage: int) -> dict[str, torch.Tensor]:
    optimizer = build(stage)
    train(optimizer)
    model = optimizer.model
    model.mask[:] = torch.arange(15).view(3, 5) < 4
    model.phase += 1j * (1 + dist.get_rank())
    model.scratch += 7
    zerolab.save(optimizer, folder)
    return buffers(optimizer)


def load(folder: Path, stage: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """On a rank: its buffers before and after."""
    optimizer = build(stage)
    before = buffers(optimizer)
    zerolab.load(optimizer, folder)
    return before, buffers(optimizer)


@pytest.mark.parametrize("saving, loading, stages", [(2, 2, (3, 0)), (3, 2, (1, 2)), (2, 3, (0, 3))])
def test_every_rank_gets_its_own_buffers_or_rank_0s(tmp_path: Path, saving: int, loading: int, stages: tuple):
    saved = zerolab.launch(save, saving, tmp_path, stages[0])
    assert not torch.equal(saved[0]["norm.running_mean"], saved[1]["norm.running_mean"])
    for rank, (before, after) in enumerate(zerolab.launch(load, loading, tmp_path, stages[1])):
        expected = saved[rank if saving == loading else 0] | {"scratch": before["scratch"]}
        assert after.keys() == expected.keys()
        for name, buffer in expected.items():
            assert torch.equal(after[name], buffer), (rank, name)
            assert after[name].stride() == before[name].stride()


def test_buffers_that_all_ranks_have_alike_are_stored_once(tmp_path: Path):
    zerolab.launch(save, 2, tmp_path, 2)
    metadata = dcp.FileSystemReader(tmp_path / "generation-000001").read_metadata()
    stored = {key for key in metadata.state_dict_metadata if key.startswith("buffers.")}
    assert {"buffers.0.mask", "buffers.0.norm.running_mean", "buffers.1.norm.running_mean"} <= stored
    assert not {key for key in stored if "scratch" in key or key == "buffers.1.mask"}


def refuse(folder: Path) -> dict[str, tuple[str, bool]]:
    """On a rank: what is raised for each model with other buffers, and whether its own are unchanged."""
    others = {
        "another name": lambda: Net(name="causal_mask"),
        "another shape": lambda: Net(mask_size=4),
        "on rank 1 alone": lambda: Net(mask_size=3 + dist.get_rank()),
    }
    found = {}
    for case, model in others.items():
        optimizer = build(model=model)
        before = buffers(optimizer)
        said = outcome(lambda optimizer=optimizer: zerolab.load(optimizer, folder))
        after = buffers(optimizer)
        found[case] = (said, all(torch.equal(before[name], after[name]) for name in before))
    optimizer = build(model=others["on rank 1 alone"])
    found["saved"] = (outcome(lambda: zerolab.save(optimizer, folder)), True)
    return found


def test_a_model_with_other_buffers_is_refused_by_name_on_every_rank(tmp_path: Path):
    zerolab.launch(save, 2, tmp_path, 2)
    first, second = zerolab.launch(refuse, 2, tmp_path)
    assert first == second
    missing, wider = "missing in the model", r"of shape \(4, 5\) in the model"
    refused = r"buffer mask is of shape \(3, 5\) in the checkpoint and "
    expected = {
        "another name": f"ValueError: {refused}{missing}",
        "another shape": f"ValueError: {refused}{wider}",
        "on rank 1 alone": f"ValueError: {refused}{wider}",
        "saved": f"OSError: .*could not be written: rank 1 failed with ValueError: {refused}{wider}",
    }
    assert first.keys() == expected.keys()
    for case, pattern in expected.items():
        said, unchanged = first[case]
        assert unchanged and re.match(pattern, said), (case, said)

"""Promise: export writes the file that torch.save would have written, and PyTorch alone reads it."""

import os
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

MODEL = """
class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7)) for _ in range(2))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0))
        self.frozen = nn.Parameter(torch.randn(3).to(torch.bfloat16), requires_grad=False)
        self.register_buffer("mask", torch.ones(5, 3, dtype=torch.bool).tril().t())
        self.register_buffer("table", torch.arange(5).to(torch.uint16))
        self.register_buffer("scratch", torch.ones(4), persistent=False)

    def get_extra_state(self):
        return {"version": 3, "scale": torch.tensor([0.5, 0.25])}

    def set_extra_state(self, state):
        self.extra = state

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x * self.gain)
"""
exec(MODEL)

READER = f"""
import sys
sys.modules["zerolab"] = None  # importing it is an error
import torch
from torch import nn
{MODEL}
model = Plain()
loaded = torch.load(sys.argv[1], weights_only=True)
print(model.load_state_dict(loaded, strict=True))
model.eval()
torch.save(model(torch.arange(8)), sys.argv[2])
"""


class Conjugated(nn.Module):
    """Buffers that PyTorch keeps as lazy views: a conjugate, and its imaginary part, which is a negation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        values = torch.tensor([1 + 2j, 3 - 4j, 5j])
        self.register_buffer("conjugate", values.conj())
        self.register_buffer("negated", values.conj().imag)


def export_conjugated(folder: Path) -> None:
    model = Conjugated()
    assert model.conjugate.is_conj() and model.negated.is_neg()
    zerolab.export(zerolab.ZeroOptimizer(model, torch.optim.SGD, lr=0.1), folder / "model.pt")


def test_lazy_views_are_written_with_their_values(tmp_path: Path):
    zerolab.launch(export_conjugated, 2, tmp_path)
    found, expected = torch.load(tmp_path / "model.pt", weights_only=True), Conjugated().state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def train_and_export(folder: Path, stage: int) -> None:
    """On a rank: the exported file, and what torch.save and the model itself say."""
    torch.manual_seed(0)
    model = Plain()  # noqa: F821 (from MODEL)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage, lr=0.1)
    for step in range(3):
        model(torch.arange(4 + dist.get_rank()) + step).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    zerolab.export(optimizer, folder / "exported.pt")
    with optimizer.full_params():
        model.eval()
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), folder / "saved.pt")
            torch.save(model(torch.arange(8)).detach(), folder / "answer.pt")


@pytest.mark.parametrize("stage, world_size", [(0, 1), (1, 3), (2, 2), (3, 2)])
def test_the_file_is_the_one_torch_would_have_saved(tmp_path: Path, stage: int, world_size: int):
    zerolab.launch(train_and_export, world_size, tmp_path, stage)
    ours, theirs = (torch.load(tmp_path / name, weights_only=True) for name in ("exported.pt", "saved.pt"))
    assert list(ours) == list(theirs) and type(ours) is type(theirs)
    assert ours._metadata == theirs._metadata
    assert ours["head.weight"].data_ptr() == ours["embed.weight"].data_ptr(), "tied as it was"
    for key in (key for key in theirs if key != "_extra_state"):
        assert ours[key].dtype == theirs[key].dtype and ours[key].device == theirs[key].device
        assert not ours[key].requires_grad and torch.equal(ours[key], theirs[key]), key
    assert torch.equal(ours["_extra_state"]["scale"], theirs["_extra_state"]["scale"])
    assert sorted(os.listdir(tmp_path)) == ["answer.pt", "exported.pt", "saved.pt"]


def test_a_program_without_zerolab_loads_it(tmp_path: Path):
    zerolab.launch(train_and_export, 2, tmp_path, 3)
    (tmp_path / "reader.py").write_text(READER)
    command = [sys.executable, "-P", "reader.py", "exported.pt", "answered.pt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "<All keys matched successfully>\n", done.stderr
    answers = [torch.load(tmp_path / name) for name in ("answered.pt", "answer.pt")]
    assert torch.equal(*answers)


def export_mixed(folder: Path) -> dict[str, torch.Tensor]:
    """On a rank: the model's own parameters, after one step."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3))
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, 2, lr=0.1, precision="mixed")
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    zerolab.export(optimizer, folder / "exported.pt")
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_mixed_precision_exports_the_masters(tmp_path: Path):
    """The model's own parameters are only what the masters round to."""
    own, _ = zerolab.launch(export_mixed, 2, tmp_path)
    exported = torch.load(tmp_path / "exported.pt", weights_only=True)
    assert own.keys() == exported.keys()
    assert all(values.dtype == torch.float32 for values in exported.values())
    assert all(torch.equal(exported[name].bfloat16(), own[name]) for name in own)
    assert any(not torch.equal(exported[name], own[name].float()) for name in own)


def test_the_archive_is_sound_and_can_be_mapped(tmp_path: Path):
    zerolab.launch(train_and_export, 1, tmp_path, 1)
    assert zipfile.ZipFile(tmp_path / "exported.pt").testzip() is None
    mapped = torch.load(tmp_path / "exported.pt", mmap=True)
    tensors = [value for key, value in mapped.items() if key != "_extra_state"]
    assert all(t.data_ptr() % 64 == 0 for t in tensors)


def fail_to_export(folder: Path) -> list[str]:
    optimizer = zerolab.ZeroOptimizer(nn.Linear(300, 300), torch.optim.SGD, lr=0.1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def attempt(path: Path, limit: int = limits[0]) -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            zerolab.export(optimizer, path)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    found = [attempt(folder / "model.pt", limit) for limit in (10, 1000, 361_000)]
    found += [attempt(folder / "model.pt" / "x"), attempt(folder / "no" / "model.pt"), attempt(folder)]
    with optimizer.full_params():
        return [*found, attempt(folder / "model.pt")]


def test_an_export_that_fails_fails_on_every_rank_and_leaves_the_old_file(tmp_path: Path):
    (tmp_path / "model.pt").write_text("old")
    first, second = zerolab.launch(fail_to_export, 2, tmp_path)
    assert first == second
    kinds = ["OSError"] * 3 + ["NotADirectoryError", "FileNotFoundError", "IsADirectoryError", "RuntimeError"]
    assert [message.split(":")[0] for message in first] == kinds
    assert all("File too large" in message for message in first[:3])
    assert (tmp_path / "model.pt").read_text() == "old" and os.listdir(tmp_path) == ["model.pt"]
    assert os.listdir(tmp_path.parent).count(f".{tmp_path.name}") == 0

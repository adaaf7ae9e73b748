"""Promise: a buffer that a load could not restore is refused by name, before anything is changed."""

import sys
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from support.numbered import build, fill, filled_with, outcome
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3, 4)


def on_rank_1() -> torch.Tensor:
    return expanded() if dist.get_rank() == 1 else dense()


def dense() -> torch.Tensor:
    return torch.zeros(3, 4)


def expanded() -> torch.Tensor:
    return torch.arange(4.0).expand(3, 4)


SHARED = (
    "buffer 1.odd has elements that share memory, as expand() makes them, and a load could not write to it"
)
NOT_DENSE = {
    "torch.sparse_coo": lambda: torch.eye(4).to_sparse(),
    "torch.sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
}
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about the age of such tensors


def of(buffer: Callable[[], torch.Tensor], persistent: bool = True) -> zerolab.ZeroOptimizer:
    model = nn.Sequential(nn.Linear(3, 2), nn.Module())
    model[1].register_buffer("odd", buffer(), persistent=persistent)
    return build(model=model)


def store(folder: Path, buffer: Callable[[], torch.Tensor], persistent: bool = True) -> tuple[str, str, list]:
    """On a rank: what becomes of a save and of an export, and the files that are left."""
    optimizer = of(buffer, persistent)
    said = [outcome(lambda: zerolab.save(optimizer, folder))]
    said.append(outcome(lambda: zerolab.export(optimizer, folder / "model.pt")))
    dist.barrier()
    return *said, sorted(path.name for path in folder.glob("[!.]*"))


@pytest.mark.parametrize("kind", NOT_DENSE)
def test_a_buffer_that_is_not_dense_is_named(kind: str, tmp_path: Path):
    told = (
        f"ValueError: buffer 1.odd is {kind}, and a checkpoint stores dense buffers only: keep it dense, or "
        "register it with persistent=False"
    )
    assert zerolab.launch(store, 2, tmp_path, NOT_DENSE[kind]) == [(told, told, [])] * 2
    saved, exported, _ = zerolab.launch(store, 1, tmp_path, NOT_DENSE[kind], persistent=False)[0]
    assert saved == exported == "done"


def test_a_buffer_whose_elements_share_memory_is_not_saved_and_exported(tmp_path: Path):
    for saved, exported, found in zerolab.launch(store, 2, tmp_path, expanded):
        assert saved.startswith(f"ValueError: {SHARED}: register its .contiguous(), or"), saved
        assert exported == "done" and found == ["model.pt"]
    assert torch.load(tmp_path / "model.pt")["1.odd"].equal(expanded())


def test_a_buffer_that_one_rank_alone_cannot_store_leaves_no_checkpoint(tmp_path: Path):
    for saved, _, found in zerolab.launch(store, 2, tmp_path, on_rank_1):
        assert f"rank 1 failed with ValueError: {SHARED}" in saved, saved
        assert found == ["model.pt"]


def load(folder: Path, buffer: Callable[[], torch.Tensor]) -> tuple[str, set[float]]:
    """On a rank: what becomes of a load into a model of ones, and what its parameters are afterwards."""
    zerolab.save(of(dense), folder)
    optimizer = of(buffer)
    fill(optimizer, 1.0)
    return outcome(lambda: zerolab.load(optimizer, folder)), filled_with(optimizer)


@pytest.mark.parametrize("buffer", [expanded, on_rank_1, made_in_inference_mode])
def test_a_load_that_could_not_write_to_a_buffer_changes_nothing(buffer: Callable, tmp_path: Path):
    for said, values in zerolab.launch(load, 2, tmp_path, buffer):
        inference = "buffer 1.odd was made in inference_mode(), and a load could not write to it"
        assert said.startswith(f"ValueError: {inference if buffer is made_in_inference_mode else SHARED}"), (
            said
        )
        assert values == {1.0}


def save_and_load_again(folder: Path) -> list[str]:
    """On a rank: what is made in inference_mode() in an evaluation can be saved."""
    return [outcome(lambda: zerolab.save(of(made_in_inference_mode), folder)), load(folder / "b", dense)[0]]


def test_what_was_made_in_inference_mode_is_saved(tmp_path: Path):
    assert zerolab.launch(save_and_load_again, 2, tmp_path) == [["done", "done"]] * 2

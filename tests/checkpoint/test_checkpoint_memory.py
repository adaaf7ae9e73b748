"""Promise: saving, loading and exporting take the memory of one piece or unit, whatever the model's size."""

import sys
from pathlib import Path

import cloudpickle
import torch
from support.resident_memory import give_memory_back_when_freed, growth

import zerolab
from zerolab.checkpoint import records
from zerolab.optimizer import Shard

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


def peaks(folder: Path) -> dict[str, int]:
    give_memory_back_when_freed()
    records.MOST_NUMEL = 2**18
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1, momentum=0.9)
    model(torch.randn(1, 2048)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {
        "save": growth(lambda: zerolab.save(optimizer, folder)),
        "load": growth(lambda: zerolab.load(optimizer, folder)),
        "export": growth(lambda: zerolab.export(optimizer, folder / "model.pt")),
    }


def test_no_rank_ever_holds_the_whole(tmp_path: Path):
    """67 MB of parameters and as much momentum, in pieces of 1 MB and units of 17 MB."""
    (found,) = zerolab.launch(peaks, 1, tmp_path)
    unit_bytes, slack_bytes = 4 * 2048**2, 8e6  # the interpreter's own, and the allocator's
    assert found["save"] < 2 * 2**20 + slack_bytes
    assert found["load"] < 2 * 2**20 + slack_bytes
    assert found["export"] < 1.5 * unit_bytes + slack_bytes


def test_a_piece_has_at_most_64_mib_in_fp32():
    numel = 2**26 + 1
    weight = Shard("weight", None, numel, 0, torch.empty(numel, device="meta"))
    sizes = [piece.values.nbytes for piece in records._cut(weight)]
    assert max(sizes) == 64 * 2**20 and sum(sizes) == 4 * numel

"""Promise: a machine that loses power finds the checkpoint that LATEST names complete, or the one before."""

import os
import re
import sys
from pathlib import Path

import cloudpickle
import torch
from torch import nn

import zerolab
from zerolab.checkpoint import generations

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def watch(root: Path, change) -> list[tuple]:
    """From now on: what is put on disk, with a file's bytes or a folder's 0, and what gets its name."""
    fsync, replace, seen = os.fsync, os.replace, []

    def synced(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)
        seen.append(("sync", str(path.relative_to(root)), size_of(path)))

    def renamed(source: Path, target: Path) -> None:
        seen.append(("rename", str(Path(target).relative_to(root)), None))
        replace(source, target)

    change(os, "fsync", synced)
    change(os, "replace", renamed)
    return seen


def test_files_and_folders_are_on_disk_before_what_names_them(tmp_path: Path, monkeypatch):
    folder = tmp_path / "generation-000001"
    folder.mkdir()
    seen = watch(tmp_path, monkeypatch.setattr)
    generations.put(folder / "shard", b"values")
    generations.commit(folder, keep=1)
    assert [each[:2] for each in seen] == [
        ("sync", "generation-000001/.shard.partial"),
        ("rename", "generation-000001/shard"),
        ("sync", "generation-000001"),
        ("sync", f".{generations.LATEST}.partial"),
        ("rename", generations.LATEST),
        ("sync", "."),
    ]


def save_and_export(root: Path) -> list[tuple]:
    seen = watch(root, setattr)
    optimizer = zerolab.ZeroOptimizer(nn.Linear(40, 20), torch.optim.Adam, stage=2, lr=1e-3)
    zerolab.save(optimizer, root / "checkpoint", extra={"epoch": 1})
    zerolab.export(optimizer, root / "whole.pt")
    return seen


def test_all_bytes_of_a_save_and_an_export_are_on_disk_before_a_name_says_so(tmp_path: Path):
    first, second = zerolab.launch(save_and_export, 2, tmp_path)
    generation = "checkpoint/generation-000001"
    assert second == [("sync", f"{generation}/__1_0.distcp", size_of(tmp_path / generation / "__1_0.distcp"))]
    written = {
        f"{generation}/__0_0.distcp": f"{generation}/__0_0.distcp",
        f"{generation}/..metadata.partial": f"{generation}/.metadata",
        f"{generation}/.manifest.pt.partial": f"{generation}/manifest.pt",
        f"checkpoint/.{generations.LATEST}.partial": f"checkpoint/{generations.LATEST}",
        ".whole.pt": "whole.pt",
    }
    synced = [(re.sub(r"\.\d+$", "", name), size) for _, name, size in first if size]
    assert synced == [(name, size_of(tmp_path / final)) for name, final in written.items()]
    names = [each[1] for each in first if each[0] == "rename"]
    assert names == [final for name, final in written.items() if name != final]
    latest = first.index(("rename", f"checkpoint/{generations.LATEST}", None))
    assert first.index(("sync", generation, 0)) < latest < first.index(("sync", "checkpoint", 0))

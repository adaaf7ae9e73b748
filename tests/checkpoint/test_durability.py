"""Promise: a machine that loses power finds the checkpoint that LATEST names complete, or the one before."""

import os
from pathlib import Path

from zerolab.checkpoint import generations


def test_files_and_folders_are_on_disk_before_what_names_them(tmp_path: Path, monkeypatch):
    folder, seen = tmp_path / "generation-000001", []
    folder.mkdir()
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        seen.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).relative_to(tmp_path)}")
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        seen.append(f"rename to {Path(target).relative_to(tmp_path)}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    generations.put(folder / "shard", b"values")
    generations.commit(folder, keep=1)
    assert seen == [
        "sync generation-000001/.shard.partial",
        "rename to generation-000001/shard",
        "sync generation-000001",
        f"sync .{generations.LATEST}.partial",
        f"rename to {generations.LATEST}",
        "sync .",
    ]

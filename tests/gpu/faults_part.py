"""Mistakes and faults: models on the wrong device, and a rank that is killed, raises or hangs."""

import os
import signal
import tempfile
import time
from pathlib import Path

import torch
from common import LAUNCH_SECONDS, backend, launch
from torch import nn

import zerolab
from zerolab.launcher.gpus import visible_gpus


def _on_the_cpu() -> str:
    optimizer = zerolab.ZeroOptimizer(nn.Linear(4, 4), torch.optim.SGD, stage=2, lr=0.1)
    return f"accepted, with a {type(optimizer.comm).__name__}"


def mismatch() -> dict:
    """A model on the CPU in a group that has NCCL too; one on a GPU in a group of gloo alone."""

    def on_gpu_with_gloo() -> str:
        try:
            zerolab.ZeroOptimizer(nn.Linear(4, 4).cuda(), torch.optim.SGD, stage=2, lr=0.1)
        except ValueError as error:
            return str(error)
        return "accepted"

    found = {"model on the CPU": launch(_on_the_cpu, 2), "model on a GPU": "no GPU"}
    if visible_gpus():
        found["model on a GPU"] = zerolab.launch(on_gpu_with_gloo, 2, backend="gloo", timeout=LAUNCH_SECONDS)
    return found


def mismatch_missed(found: dict) -> list[str]:
    accepted = "accepted" in found["model on a GPU"]
    direct = all("DirectComm" in each for each in found["model on the CPU"])
    return ["a model on a GPU was accepted with gloo alone"] * accepted + ["no DirectComm"] * (not direct)


def _faulty(kind: str, stage: int, note: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(zerolab.device())
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    for step in range(3):
        if step == 1 and optimizer.rank == 1:
            note.write_text(str(time.time()))
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "raise":
                raise ArithmeticError("on purpose")
            time.sleep(3600)
        model(torch.ones(2, 64, device=zerolab.device())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def faults() -> dict:
    """One of two ranks is killed, raises or hangs: whom the launch names, and after how many seconds."""
    found = {}
    for kind in ("kill", "raise", "hang"):
        note = Path(tempfile.mkdtemp()) / "happened"
        try:
            zerolab.launch(_faulty, 2, kind, 2, note, backend=backend(), timeout=15 if kind == "hang" else 60)
            found[kind] = {"named": None}
        except zerolab.WorkerError as error:
            found[kind] = {"named": error.rank, "said": str(error).splitlines()[0]}
        except zerolab.LaunchTimeout as error:
            found[kind] = {"named": list(error.ranks), "said": str(error).splitlines()[0]}
        found[kind]["seconds"] = round(time.time() - float(note.read_text()), 2)
    return found


def faults_missed(found: dict) -> list[str]:
    """The right rank is named: within five seconds, and one that hangs at the deadline."""
    right = {"kill": (1, 5), "raise": (1, 5), "hang": ([1], 20)}
    return [
        f"{kind}: {found[kind]}"
        for kind, (rank, seconds) in right.items()
        if found[kind]["named"] != rank or found[kind]["seconds"] > seconds
    ]

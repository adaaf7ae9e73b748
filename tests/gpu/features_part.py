"""Features: hybrid sharding, offload, whole matrices and tensor parallelism, over NCCL on a GPU."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from common import STAGES, launch
from numbers_part import STEPS, compared, train_case
from support.meshes import backward, cut_and_optimizer, values_of

import zerolab
from zerolab.parity.reference import compute_deterministically

Case = tuple[str, int, dict]
"""What it is called, the stage, and the settings of `verify`."""


def cases(world_size: int, disk: Path) -> list[Case]:
    """What runs on 2 ranks, and on 4."""
    if world_size == 4:
        return [
            ("hybrid, groups of 2", 3, {"shard_size": 2}),
            ("hybrid, groups of 2, mixed", 3, {"shard_size": 2, "precision": "mixed"}),
            ("hybrid, groups of 1", 3, {"shard_size": 1}),
            ("Muon", 3, {"params": zerolab.matrices_by(torch.optim.Muon)}),
        ]
    on_disk = {"offload": "disk", "offload_dir": disk}
    found: list[Case] = []
    for stage in STAGES:
        found += [
            ("Muon", stage, {"params": zerolab.matrices_by(torch.optim.Muon)}),
            ("offload to the CPU", stage, {"offload": "cpu"}),
            ("offload to the CPU, mixed", stage, {"offload": "cpu", "precision": "mixed"}),
            ("offload to a disk, mixed", stage, on_disk | {"precision": "mixed"}),
        ]
    return found


def _train_cases(disk: Path) -> list[tuple]:
    return [
        (f"{name}, stage {stage}", stage, *train_case(stage, settings))
        for name, stage, settings in cases(dist.get_world_size(), disk)
    ]


def features() -> dict[str, dict]:
    """Hybrid sharding, offload and Muon, against one process on the same device."""
    found = {}
    for world_size in (2, 4):
        with tempfile.TemporaryDirectory(dir="/var/tmp") as disk:
            for ranks in zip(*launch(_train_cases, world_size, Path(disk)), strict=True):
                name, stage, _, expected = ranks[0]
                found[f"{name}, {world_size} ranks"] = compared(
                    stage, [run for _, _, run, _ in ranks], expected
                )
    return found


def features_missed(found: dict[str, dict]) -> list[str]:
    """With deterministic algorithms all bits are the reference's, and the bytes the formula's."""
    promised = ("bit_identical", "memory_matches", "traffic_matches")
    return [f"{name}: {flag} is no" for name, case in found.items() for flag in promised if not case[flag]]


# Tensor parallelism, with the inputs of blocks kept, partitioned and offloaded.


def _checkpointings(parallel: zerolab.TensorParallel, disk: Path) -> dict:
    return {
        "plain": None,
        "checkpointing": zerolab.Checkpointing(),
        "partitioned": zerolab.Checkpointing(parallel),
        "partitioned, to the CPU": zerolab.Checkpointing(parallel, "cpu"),
        "partitioned, to a disk": zerolab.Checkpointing(parallel, "disk", disk),
    }


def _cut(disk: Path) -> dict[str, list[str]]:
    """By stage and way: the parameters that differ from those of training without checkpointing."""
    compute_deterministically()
    found: dict[str, list[str]] = {}
    for stage in STAGES:
        expected: dict = {}
        for name in (
            "plain",
            "checkpointing",
            "partitioned",
            "partitioned, to the CPU",
            "partitioned, to a disk",
        ):
            model, optimizer = cut_and_optimizer(2, 2, stage)
            model.checkpointing = _checkpointings(optimizer.axes.parallel, disk)[name]
            for step in range(STEPS):
                backward(model, optimizer, step)
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
            values = values_of(model, optimizer)
            expected = expected or values
            found[f"stage {stage}, {name}"] = [
                each for each in expected if not torch.equal(values[each], expected[each])
            ]
    return found


def tensor_parallel() -> dict[str, dict]:
    """A GPT cut over 2 of 4 ranks, with each way to keep the inputs of blocks: the same bits."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as disk:
        ranks = launch(_cut, 4, Path(disk))
    return {name: {"moved": sorted({each for rank in ranks for each in rank[name]})} for name in ranks[0]}


def tensor_parallel_missed(found: dict[str, dict]) -> list[str]:
    return [f"{name}: {', '.join(case['moved'])} differ" for name, case in found.items() if case["moved"]]

"""Features: hybrid sharding, offload, whole matrices and tensor parallelism, over NCCL on a GPU."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from common import STAGES, launch
from numbers_part import STEPS, compared, train_cases
from support.meshes import backward, cut_and_optimizer, values_of

import zerolab
from zerolab.parity.reference import compute_deterministically

Feature = tuple[str, Sequence[int], dict]
"""What it is called, the stages it runs at, and the settings of `verify`."""


def features_on(world_size: int, disk: Path) -> list[Feature]:
    """What runs on 2 ranks, and on 4."""
    muon = {"params": zerolab.matrices_by(torch.optim.Muon)}
    if world_size == 4:
        return [
            ("hybrid, groups of 2", [3], {"shard_size": 2}),
            ("hybrid, groups of 2, mixed", [3], {"shard_size": 2, "precision": "mixed"}),
            ("hybrid, groups of 1", [3], {"shard_size": 1}),
            ("Muon", [3], muon),
        ]
    on_disk = {"offload": "disk", "offload_dir": disk}
    return [
        ("Muon", STAGES, muon),
        ("offload to the CPU", STAGES, {"offload": "cpu"}),
        ("offload to the CPU, mixed", STAGES, {"offload": "cpu", "precision": "mixed"}),
        ("offload to a disk, mixed", STAGES, on_disk | {"precision": "mixed"}),
    ]


def _all_cases(disk: Path) -> list[tuple]:
    return [
        (f"{name}, stage {case[0]}", *case)
        for name, stages, settings in features_on(dist.get_world_size(), disk)
        for case in train_cases(stages, settings)
    ]


def features() -> dict[str, dict]:
    """Hybrid sharding, offload and Muon, against one process on the same device."""
    found = {}
    for world_size in (2, 4):
        with tempfile.TemporaryDirectory(dir="/var/tmp") as disk:
            for ranks in zip(*launch(_all_cases, world_size, Path(disk)), strict=True):
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


WAYS: dict[str, Callable] = {
    "plain": lambda parallel, disk: None,
    "checkpointing": lambda parallel, disk: zerolab.Checkpointing(),
    "partitioned": lambda parallel, disk: zerolab.Checkpointing(parallel),
    "partitioned, to the CPU": lambda parallel, disk: zerolab.Checkpointing(parallel, "cpu"),
    "partitioned, to a disk": lambda parallel, disk: zerolab.Checkpointing(parallel, "disk", disk),
}
"""How the inputs of blocks are kept. The first is without checkpointing."""


def _cut(disk: Path) -> dict[str, list[str]]:
    """By stage and way: the parameters that differ from those of training without checkpointing."""
    compute_deterministically()
    found: dict[str, list[str]] = {}
    for stage in STAGES:
        expected: dict = {}
        for name, checkpointing in WAYS.items():
            model, optimizer = cut_and_optimizer(2, 2, stage)
            model.checkpointing = checkpointing(optimizer.axes.parallel, disk)
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

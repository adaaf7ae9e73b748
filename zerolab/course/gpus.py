"""Check a lesson's promise over NCCL, in the last cell of the lessons on the stages, if there is a GPU."""

import torch

import zerolab
from zerolab.launcher.gpus import visible_gpus


def verify_on_gpus(stage: int) -> None:
    """Train a small GPT over NCCL on all GPUs, and on one GPU alone; print whether the bits are equal.

    Two ranks share a GPU where there is only one. Without a GPU, print what would be done.
    """
    gpus = visible_gpus()
    if not gpus:
        print(f"No GPU here. On GPUs this cell verifies stage {stage} over NCCL, one rank on each.")
        return
    report = zerolab.verify(stage=stage, world_size=max(2, gpus), backend="nccl")
    where = f"{report.world_size} ranks on {gpus} × {torch.cuda.get_device_name()}"
    print(f"{where}: bit-identical: {report.bit_identical}, largest difference {report.max_abs_diff:.1e}")
    print(f"in the predicted bytes: {report.memory_matches and report.traffic_matches}")

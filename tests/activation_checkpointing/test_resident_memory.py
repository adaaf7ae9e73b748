"""Promise: what checkpointing does not keep on the device is not in the memory of the process either."""

import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from support import resident_memory

import zerolab
from zerolab import Checkpointing, TensorParallel

for module in (sys.modules[__name__], resident_memory):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest

BLOCKS, INPUT_BYTES = 8, 4 * 2**20


def block(stream: torch.Tensor) -> torch.Tensor:
    return stream.sin().cos().tanh()


def resident_growth(partition: bool, offload: str | None, folder: Path) -> int:
    """By how many bytes resident memory grows in the second forward; the first one loads code."""
    resident_memory.give_memory_back_when_freed()
    parallel = TensorParallel(torch.distributed.group.WORLD)
    checkpointing = Checkpointing(
        parallel if partition else None, offload, folder if offload == "disk" else None
    )
    for _ in range(2):
        stream = torch.ones(INPUT_BYTES // 4, requires_grad=True) * 1.0
        before = resident_memory.status("VmRSS")
        for _ in range(BLOCKS):
            stream = checkpointing(block, stream)
        grown = resident_memory.status("VmRSS") - before
        stream.sum().backward()
    return grown


@pytest.mark.parametrize(
    ("partition", "offload", "kept"),
    [(False, None, 1), (True, None, 1 / 2), (False, "disk", 0), (True, "disk", 0), (True, "cpu", 1 / 2)],
)
def test_two_ranks_keep_a_part_of_each_input(partition: bool, offload: str | None, kept: float, tmp_path):
    """Host memory is this process's own, where there is no GPU. What enters and what leaves the blocks is
    as large, so one takes the place of the other."""
    for grown in zerolab.launch(resident_growth, 2, partition, offload, tmp_path, timeout=60):
        assert grown == pytest.approx(kept * BLOCKS * INPUT_BYTES, abs=INPUT_BYTES / 4)

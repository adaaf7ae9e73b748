"""Promise: checkpointing changes no bit; what is kept, gathered and moved are the formulas' bytes."""

import os
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from support import cut_models, meshes
from support.cut_models import SIZES
from support.live_bytes import live_bytes, settled_bytes
from support.long import long_where
from support.meshes import backward, cut_and_optimizer, mesh_of, values_of
from torch.utils.checkpoint import set_checkpoint_early_stop

import zerolab
from zerolab import Checkpointing, TensorParallel, parallelize
from zerolab.models import GPT

for module in (sys.modules[__name__], cut_models, meshes):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest

DEPTH, INPUT_BYTES = SIZES["depth"], 2 * 8 * 16 * 4  # a batch of 2, 8 tokens, width 16, fp32
WAYS = [None, *((partition, offload) for partition in (False, True) for offload in (None, "cpu", "disk"))]
Trained = tuple[dict[str, torch.Tensor], list[int]]


def checkpointing_of(way: tuple | None, parallel: TensorParallel, folder: Path) -> Checkpointing | None:
    if way is None:
        return None
    partition, offload = way
    return Checkpointing(parallel if partition else None, offload, folder if offload == "disk" else None)


def trained(
    stage: int, precision: str, way: tuple | None, folder: Path, **settings
) -> tuple[dict, list[int]]:
    """The parameters after two steps, and the bytes that each way moved over both groups in the last."""
    model, optimizer = cut_and_optimizer(2, 2, stage, precision=precision, **settings)
    model.checkpointing = checkpointing_of(way, optimizer.axes.parallel, folder)
    for step in range(2):
        for micro in range(2):
            backward(model, optimizer, step, micro)
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    sent = [each.trace.traffic(1).logical_bytes for each in (optimizer, optimizer.axes.parallel)]
    return values_of(model, optimizer), sent


def train_each_way(stage: int, precision: str, folder: Path) -> list[Trained]:
    return [trained(stage, precision, way, folder) for way in WAYS]


MIXED = "the stages in fp32 take every way, and mixed precision changes the size of an element only"


@pytest.mark.parametrize("precision", long_where(lambda each: each == "mixed", MIXED, ["fp32", "mixed"]))
@pytest.mark.parametrize("stage", range(4))
def test_every_way_trains_the_same_bits_with_the_same_data_parallel_bytes(
    stage: int, precision: str, tmp_path: Path
):
    element_bytes = 4 if precision == "fp32" else 2
    message = 2 * DEPTH * INPUT_BYTES // 4 * element_bytes  # b·s·h of each block, in two micro-batches
    for (expected, (sent, _)), *others in zerolab.launch(
        train_each_way, 4, stage, precision, tmp_path, timeout=120
    ):
        for way, (found, (sent_then, between)) in zip(WAYS[1:], others, strict=True):
            assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
            assert sent_then == sent
            assert between == (11 if way[0] else 10) * message


def far_ahead(stage: int, folder: Path) -> list[Trained]:
    return [trained(stage, "fp32", way, folder, prefetch=3) for way in (None, (True, None))]


def test_blocks_that_are_gathered_far_ahead_and_computed_again_have_the_same_bits(tmp_path: Path):
    for (expected, (sent, _)), (found, (sent_then, _)) in zerolab.launch(
        far_ahead, 4, 3, tmp_path, timeout=120
    ):
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
        assert sent_then == sent


def with_everything(folder: Path) -> tuple[dict, dict]:
    """The parameters of a plain training, and of one with all that ZeRO-R has, and offloaded state."""
    everything = {"offload": "disk", "offload_dir": folder, "bucket_bytes": 64}
    plain, _ = trained(3, "mixed", None, folder)
    return plain, trained(3, "mixed", (True, "cpu"), folder, **everything)[0]


def test_all_of_it_together_changes_no_bit(tmp_path: Path):
    for plain, found in zerolab.launch(with_everything, 4, tmp_path, timeout=120):
        assert [name for name in plain if not torch.equal(found[name], plain[name])] == []


def volumes() -> dict[str, float]:
    """The elements that one step of a block sends between tensor-parallel ranks, over b·s·h."""
    parallel = TensorParallel(mesh_of(1, 2).get_group("tp"))
    torch.manual_seed(0)
    model = parallelize(GPT(**SIZES), parallel)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    found = {}
    for name, checkpointing, early_stop in (
        ("none", None, True),
        ("plain", Checkpointing(), True),
        ("plain, all of it", Checkpointing(), False),
        ("partitioned", Checkpointing(parallel), True),
        ("partitioned, all of it", Checkpointing(parallel), False),
    ):
        model.checkpointing = checkpointing
        with set_checkpoint_early_stop(early_stop):
            parallel.trace.next_step()
            model(tokens, tokens).backward()
        traffic = parallel.trace.traffic()
        found[name] = traffic.logical_bytes / (DEPTH * INPUT_BYTES)
        assert traffic.wire_bytes == traffic.logical_bytes / 2  # (N-1)/N of it
    return found


def test_a_block_sends_what_the_paper_counts():
    expected = {"none": 8, "plain": 10, "plain, all of it": 12}
    expected |= {"partitioned": 11, "partitioned, all of it": 13}
    assert zerolab.launch(volumes, 2, timeout=60) == [expected] * 2


def held(checkpointing: Checkpointing) -> tuple:
    """What it says that it keeps before backward, what is really there, and what it says after."""
    inputs = torch.ones(3, 5, requires_grad=True)
    before = settled_bytes()
    stream = inputs * 1.0
    for _ in range(4):
        stream = checkpointing(lambda x: x.sin(), stream)
    loss = stream.sum()
    del stream
    said = checkpointing.held_bytes, checkpointing.offloaded_bytes
    states_bytes = 4 * torch.get_rng_state().nbytes  # PyTorch keeps one for each block
    really = live_bytes() - before - loss.nbytes - states_bytes
    loss.backward()
    after = checkpointing.held_bytes, checkpointing.offloaded_bytes
    return said, really, after, (checkpointing.written_bytes, checkpointing.read_bytes)


def held_each_way(folder: Path) -> list[tuple]:
    parallel = TensorParallel(mesh_of(1, torch.distributed.get_world_size()).get_group("tp"))
    return [held(checkpointing_of(way, parallel, folder)) for way in WAYS[1:]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_only_the_inputs_are_kept_and_of_them_a_part(ranks: int, tmp_path: Path):
    """Fifteen elements: neither 2 nor 4 divide them. A file has no bytes of a tensor."""
    whole, part, nothing, expected = 4 * 15 * 4, 4 * 4 * -(-15 // ranks), (0, 0), []
    for kept in (whole, part):
        expected.append(((kept, 0), kept, nothing, nothing))
        expected.append(((0, kept), kept, nothing, (kept, kept)))
        expected.append(((0, kept), 0, nothing, (kept, kept)))
    assert zerolab.launch(held_each_way, ranks, tmp_path, timeout=60) == [expected] * ranks
    assert list(tmp_path.iterdir()) == []


def reused(folder: Path) -> tuple[int, int]:
    """How large the file is after one step, and after four."""
    checkpointing, sizes = Checkpointing(offload="disk", offload_dir=folder), []
    for _ in range(4):
        stream = torch.ones(100, requires_grad=True) * 1.0
        for _ in range(3):
            stream = checkpointing(torch.sin, stream)
        stream.sum().backward()
        sizes.append(os.fstat(checkpointing._tier._file.fileno()).st_size)
    return sizes[0], sizes[-1]


def test_the_file_does_not_grow_from_step_to_step(tmp_path: Path):
    assert reused(tmp_path) == (3 * 400, 3 * 400)

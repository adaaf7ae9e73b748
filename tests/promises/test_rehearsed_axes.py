"""Any size, on two axes: a rehearsed rank counts the states and the traffic of both, as real ranks do."""

import sys

import cloudpickle
import pytest
import torch
from support import cut_models, guides, meshes
from torch import nn

import zerolab
from zerolab.models import GPT

for module in (sys.modules[__name__], cut_models, meshes):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest

GPT_SIZES = {"vocab": 64, "width": 32, "depth": 3, "heads": 4, "context": 16}
TOKENS = 16  # of `rehearse`


def psi_of_a_part(ranks: int, vocab: int, width: int, depth: int, context: int, **_) -> int:
    """What one of so many tensor-parallel ranks has of a GPT, counted by hand."""
    ends = (2 * vocab + context) * width + 2 * width  # embedding, head and positions; the last norm
    whole = 4 * width + 2 * width  # two norms; the biases that are added after a sum
    cut = 12 * width**2 + (3 + 4) * width  # four weights; the biases of those cut by their outputs
    return ends + depth * (whole + cut // ranks)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_ranks_hold_the_states_of_their_part(stage, ranks):
    found = zerolab.rehearse(lambda: GPT(**GPT_SIZES), 8 * ranks, stage, tensor_parallel=ranks)
    assert found.psi == psi_of_a_part(1, **GPT_SIZES)
    assert found.rank_psi == psi_of_a_part(ranks, **GPT_SIZES)
    formula = zerolab.memory.model_states(found.rank_psi, 8, stage)
    for name in ("params_bytes", "grads_bytes", "optimizer_bytes"):
        assert getattr(found.memory, name) == pytest.approx(getattr(formula, name), rel=1e-12), name


@pytest.mark.parametrize("stage", range(4))
def test_traffic_is_counted_on_both_axes(stage):
    found = zerolab.rehearse(lambda: GPT(**GPT_SIZES), 24, stage, tensor_parallel=4)
    ends = (2 * 64 + 16) * 32 + 2 * 32  # the root unit, gathered once a step
    elements = (3 * found.rank_psi - ends) if stage == 3 else 2 * found.rank_psi
    assert found.traffic.logical_bytes == 2 * elements
    blocks_bytes = 2 * 3 * 8 * TOKENS * 32  # bf16, 8 b s h in each of 3 blocks
    assert found.tensor_parallel_traffic.logical_bytes == blocks_bytes
    assert found.tensor_parallel_traffic.wire_bytes == blocks_bytes * 3 // 4
    assert set(found.tensor_parallel_traffic.by_op) == {"all_reduce"}
    alone = zerolab.rehearse(lambda: GPT(**GPT_SIZES), 6, stage)
    assert alone.tensor_parallel_traffic.logical_bytes == 0
    assert alone.rank_psi == alone.psi


def seen_by_rank_0(stage: int) -> tuple:
    """The states and the traffic of a real step of four ranks, two of which share a copy."""
    model, optimizer = meshes.cut_and_optimizer(2, 2, stage)
    for step in range(2):
        meshes.backward(model, optimizer, step)
        optimizer.step()
        if step == 0:
            optimizer.zero_grad()
    parallel = optimizer.axes.parallel.trace.traffic(1)
    return optimizer.memory(), optimizer.trace.traffic(1), parallel


@pytest.mark.parametrize("stage", (1, 3))
def test_a_rehearsal_counts_what_real_ranks_count(stage):
    memory, traffic, parallel = zerolab.launch(seen_by_rank_0, 4, stage, timeout=60)[0]
    tokens = torch.zeros(2, 8, dtype=torch.long)
    found = zerolab.rehearse(
        cut_models.whole_model,
        4,
        stage,
        "fp32",
        torch.optim.AdamW,
        lambda: (tokens.to("meta"), tokens.to("meta")),
        tensor_parallel=2,
        lr=0.01,
    )
    for name in ("params_bytes", "grads_bytes", "optimizer_bytes", "padding_bytes", "counters_bytes"):
        assert getattr(found.memory, name) == getattr(memory, name), name
    for rehearsed, real in ((found.traffic, traffic), (found.tensor_parallel_traffic, parallel)):
        assert (rehearsed.logical_bytes, rehearsed.wire_bytes) == (real.logical_bytes, real.wire_bytes)
        assert real.wire_bytes > 0


def test_other_models_name_their_pairs():
    make = lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    settings = {"inputs": lambda: torch.zeros(1, 8), "tensor_parallel": 2}
    found = zerolab.rehearse(make, 4, pairs=lambda model: [(model[0], model[2])], **settings)
    assert (found.psi, found.rank_psi) == (8 * 32 + 32 + 32 * 8 + 8, 8 * 16 + 16 + 16 * 8 + 8)
    with pytest.raises(ValueError, match=r"Sequential has no zerolab.models.Block: name its pairs"):
        zerolab.rehearse(make, 4, **settings)
    assert not torch.distributed.is_initialized()


BAD_TENSOR_PARALLEL = {
    0: "tensor_parallel is 0: pass a whole number of 1 or more",
    True: "tensor_parallel is True: pass a whole number of 1 or more",
    2.0: r"tensor_parallel is 2.0: pass a whole number",
    5: "tensor_parallel is 5, which does not divide the world_size 24: pass a divisor of it, or a multiple",
    8: "an attention has 4 heads, which 8 tensor-parallel ranks do not divide",
}


@pytest.mark.parametrize("ranks", BAD_TENSOR_PARALLEL, ids=str)
def test_ranks_that_cannot_share_a_copy_are_refused(ranks):
    with pytest.raises(ValueError, match=BAD_TENSOR_PARALLEL[ranks]):
        zerolab.rehearse(lambda: GPT(**GPT_SIZES), 24, tensor_parallel=ranks)


def test_100_billion_parameters_on_400_gpus(capsys):
    """The guide's program: the paper's 125 layers of width 8192, on 16 tensor-parallel ranks by 25."""
    program = next(
        block for block in guides.blocks("docs/tensor_parallel.md", "python") if "rehearse" in block
    )
    names: dict = {}
    exec(program, names)
    assert capsys.readouterr().out in guides.blocks("docs/tensor_parallel.md", "text")
    found, sizes = names["rank"], dict(vocab=50257, width=8192, depth=125, context=1024)
    assert (found.psi, found.rank_psi) == (psi_of_a_part(1, **sizes), psi_of_a_part(16, **sizes))
    formula = zerolab.memory.model_states(found.rank_psi, 25, 2)
    for name in ("params_bytes", "grads_bytes", "optimizer_bytes"):
        assert getattr(found.memory, name) == pytest.approx(getattr(formula, name), rel=1e-9), name
    assert found.traffic.logical_bytes == 2 * 2 * found.rank_psi
    message = 32 * 1024 * 8192 * 2
    assert found.checkpoints_bytes * 16 == 125 * message == 67_108_864_000
    assert found.tensor_parallel_traffic.logical_bytes == 125 * 11 * message
    planned = zerolab.residual.rank_psi(found.psi, 16, zerolab.presets.model("zero-100b").whole_psi)
    assert planned == pytest.approx(found.rank_psi, rel=0.01)  # it leaves out positions, norms and biases


@pytest.mark.long("the same model on as many GPUs as before, with more moved away")
def test_100_billion_parameters_with_everything_moved_away():
    """P_a+cpu, and the optimizer's state in host memory: what the device holds, and what was moved."""
    batch = lambda: (torch.zeros(32, 1024, dtype=torch.long),) * 2
    found = zerolab.rehearse(
        lambda: GPT(vocab=50257, width=8192, depth=125, heads=64, context=1024),
        world_size=400,
        stage=2,
        tensor_parallel=16,
        inputs=batch,
        checkpointing=lambda ranks: zerolab.Checkpointing(ranks, offload="cpu"),
        offload="cpu",
    )
    assert (found.checkpoints_bytes, found.offloaded_checkpoints_bytes) == (0, 67_108_864_000 // 16)
    formula = zerolab.memory.model_states(found.rank_psi, 25, 2)
    assert found.memory.optimizer_bytes == 0
    assert found.memory.offloaded_bytes == pytest.approx(formula.optimizer_bytes, rel=1e-4)  # and padding
    assert found.memory.params_bytes == pytest.approx(formula.params_bytes, rel=1e-9)


def checkpoints(make, **settings) -> tuple[int, int, float]:
    """What rank 0 keeps on its device and elsewhere, and what a block sends to the ranks of its copy."""
    tokens = torch.zeros(2, 16, dtype=torch.long, device="meta")
    found = zerolab.rehearse(
        lambda: GPT(**GPT_SIZES), 4, inputs=lambda: (tokens, tokens), checkpointing=make, **settings
    )
    sent = found.tensor_parallel_traffic.logical_bytes
    return found.checkpoints_bytes, found.offloaded_checkpoints_bytes, sent


def test_checkpoints_are_the_formulas():
    message = 2 * 16 * GPT_SIZES["width"] * 2  # b·s·h in 16 bits
    kept, sent = GPT_SIZES["depth"] * message, 11 * GPT_SIZES["depth"] * message
    assert checkpoints(None) == (0, 0, 0)
    assert checkpoints(lambda parallel: zerolab.Checkpointing()) == (kept, 0, 0)
    assert checkpoints(zerolab.Checkpointing, tensor_parallel=2) == (kept / 2, 0, sent)
    away = lambda parallel: zerolab.Checkpointing(parallel, "cpu")
    assert checkpoints(away, tensor_parallel=4) == (0, kept / 4, sent)


@pytest.mark.parametrize("make", [zerolab.Checkpointing, lambda ranks: zerolab.Checkpointing(ranks, "cpu")])
def test_checkpoints_partitioned_over_nobody(make):
    with pytest.raises(ValueError, match=r"tensor_parallel is 1, so none do: pass tensor_parallel=2 or more"):
        checkpoints(make)


def test_checkpointing_of_another_model_is_its_own_business():
    with pytest.raises(ValueError, match=r"for a Linear: a rehearsal sets that of a zerolab.models.GPT"):
        zerolab.rehearse(
            lambda: nn.Linear(2, 2),
            2,
            inputs=lambda: torch.zeros(1, 2),
            checkpointing=lambda ranks: zerolab.Checkpointing(),
        )

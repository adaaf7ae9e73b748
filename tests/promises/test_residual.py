"""Promise: the numbers of ZeRO-R, tensor parallelism and offload, which the engine's traffic agrees with."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import zerolab
from zerolab import cost, memory, residual, step_time
from zerolab.models import GPT

ANY_TIME = settings(deadline=None)  # a busy machine is no failure
OF_100B = dict(layers=125, hidden=8192, batch=32, seq=1024)


def test_checkpoints_of_100b():
    """67.1 GB, 4.19 GB partitioned. The paper's §6.1 says 33 and 2 GB, half of each."""
    checkpoints = partial(residual.activation_checkpoints, **OF_100B)
    assert checkpoints() == residual.Placement(2 * 125 * 32 * 1024 * 8192, 0)
    assert memory.format_bytes(checkpoints().device_bytes) == "67.1 GB"
    partitioned = checkpoints(tensor_parallel=16, partition=True)
    assert partitioned == residual.Placement(checkpoints().device_bytes / 16, 0)
    assert memory.format_bytes(partitioned.device_bytes) == "4.19 GB"
    moved = checkpoints(tensor_parallel=16, partition=True, offload=True)
    assert moved == residual.Placement(0, partitioned.device_bytes)
    assert checkpoints(tensor_parallel=16) == checkpoints(), "without P_a every rank keeps all of them"
    assert checkpoints(offload=True) == residual.Placement(0, checkpoints().device_bytes)


def test_parts_are_rounded_up():
    sizes = dict(layers=3, hidden=5, batch=1, seq=7, tensor_parallel=4, partition=True)
    assert residual.activation_checkpoints(**sizes, bytes_per_element=4).device_bytes == 3 * 9 * 4


def test_one_recomputed_block():
    assert residual.recomputed_block(8192, 32, 1024) == 12 * 32 * 1024 * 8192 * 2
    assert residual.recomputed_block(5, 2, 3, 4) == 12 * 30 * 4
    of_one_layer = memory.activations(1, 5, 2, 3, bytes_per_element=4)
    assert residual.recomputed_block(5, 2, 3, 4) == of_one_layer, "the convention of `activations`"


def test_what_a_tensor_parallel_rank_has():
    assert residual.rank_psi(160, 16) == 10
    assert residual.rank_psi(160, 16, 80) == 85
    assert residual.rank_psi(160, 1, 80) == 160
    vocabulary = 2 * 50257 * 8192
    of_rank = residual.rank_psi(12 * 125 * 8192**2 + vocabulary, 16, vocabulary)
    assert (round(vocabulary / 1e9, 1), round(of_rank / 1e9, 1)) == (0.8, 7.1)
    assert memory.model_states(of_rank, 25, 2).total_bytes == pytest.approx(of_rank * (2 + 14 / 25))


@ANY_TIME
@given(st.integers(1, 10**13), st.integers(1, 64), st.floats(0, 1))
def test_the_largest_model_is_the_one_whose_part_it_is(psi, ranks, share):
    whole = int(share * psi)
    of_rank = residual.rank_psi(psi, ranks, whole)
    assert residual.largest_psi(of_rank, ranks, whole) == pytest.approx(psi)
    if ranks == 1:
        assert residual.largest_psi(whole / 2, ranks, whole) == whole / 2, "nothing is cut"
    else:
        assert residual.largest_psi(whole / 2, ranks, whole) == 0


@pytest.mark.parametrize("precision", ["mixed", "fp32"])
def test_offload_leaves_no_optimizer_state(precision):
    states = memory.model_states(1000, 4, 2, precision)
    left, outside_bytes = residual.offload_optimizer(states)
    assert outside_bytes == {"mixed": 12, "fp32": 8}[precision] * 1000 / 4
    assert left == memory.model_states(1000, 4, 2, precision, k=0)


class Checkpointed(GPT):
    """Each block is computed again in backward."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        for block in self.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


@pytest.mark.parametrize(
    ("make", "early_stop", "repeated", "elements"),
    [(GPT, True, 0, 8), (Checkpointed, True, 1, 10), (Checkpointed, False, 2, 12)],
)
def test_a_blocks_all_reduces_are_those_the_engine_counts(make, early_stop, repeated, elements):
    sizes = dict(vocab=32, width=16, depth=3, heads=4, context=8)
    inputs = lambda: (torch.zeros(2, 8, dtype=torch.long),) * 2
    with set_checkpoint_early_stop(early_stop):
        found = zerolab.rehearse(lambda: make(**sizes), 4, inputs=inputs, tensor_parallel=2)
    volume = cost.tensor_parallel_volume(3, 16, 2, 8, repeated)
    assert volume == elements * 3 * 2 * 8 * 16
    assert found.tensor_parallel_traffic.logical_bytes == 2 * volume


def test_partitioned_checkpoints_are_gathered_once():
    of_a_block = 2 * 8 * 16
    for repeated in (1, 2):
        without = cost.tensor_parallel_volume(3, 16, 2, 8, repeated)
        partitioned = cost.tensor_parallel_volume(3, 16, 2, 8, repeated, partition_activations=True)
        assert partitioned - without == 3 * of_a_block
        assert (partitioned - without) / without == pytest.approx([None, 0.1, 1 / 12][repeated])


LINKS = step_time.Links(100.0, data_parallel=10.0, tensor_parallel=20.0, offload=5.0, latency_seconds=0.5)


def test_seconds_by_hand():
    assert step_time.training_flops(10, 7) == 6 * 70
    assert step_time.training_flops(10, 7, recompute=True) == 8 * 70
    assert step_time.computation_seconds(560, LINKS) == 5.6
    assert step_time.offload_seconds(30, LINKS) == 12
    # 4 ranks: an all-reduce sends 6 messages and 3/2 of 40 bytes, an all-gather 3 and 3/4
    seconds = partial(step_time.tensor_parallel_seconds, 2, 40, 4, LINKS)
    assert seconds() == 2 * 4 * (6 * 0.5 + 60 / 20)
    assert seconds(2) == 2 * 6 * 6
    assert seconds(2, True) == 2 * (6 * 6 + 3 * 0.5 + 30 / 20)
    step = step_time.StepTime(560, 5.6, 1.0, 0.4, 1.0)
    assert (step.total, step.flops_per_second) == (8.0, 70.0)


def test_the_flops_are_those_of_the_longer_formula():
    """Narayanan et al., without attention scores (s/6h) and the vocabulary (V/16Lh)."""
    layers, hidden, tokens = 75, 8192, 48 * 1024
    longer = 96 * tokens * layers * hidden**2
    assert step_time.training_flops(12 * layers * hidden**2, tokens, recompute=True) == longer
    assert 1024 / (6 * hidden) + 50257 / (16 * layers * hidden) == pytest.approx(0.026, abs=0.001)


of_blocks = residual.activation_checkpoints
REFUSED = [
    (
        "partition=True and tensor_parallel is 1",
        lambda: of_blocks(1, 1, 1, 1, partition=True),
    ),
    (
        "tensor_parallel is 0; it must be a whole number",
        lambda: of_blocks(1, 1, 1, 1, 0),
    ),
    ("layers is 0; it must be a whole number from 1", lambda: of_blocks(0, 1, 1, 1)),
    ("hidden is 2.0, of type float; give an int", lambda: residual.recomputed_block(2.0, 1, 1)),
    ("whole_psi is 11; it must be at most psi, which is 10", lambda: residual.rank_psi(10, 2, 11)),
    ("psi is nan; it must be a finite number", lambda: residual.rank_psi(float("nan"), 2)),
    ("recomputed_all_reduces is 3; it must be a whole", lambda: cost.tensor_parallel_volume(1, 1, 1, 1, 3)),
    ("batch is True, of type bool", lambda: cost.tensor_parallel_volume(1, 1, True, 1)),
    ("tokens is 0; it must be a whole number", lambda: step_time.training_flops(1, 0)),
    ("offload is 0; it must be above 0", lambda: step_time.offload_seconds(1, step_time.Links(1, 1, 1, 0))),
    ("flops_per_second is 0", lambda: step_time.computation_seconds(1, step_time.Links(0, 1, 1, 1))),
]


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_bad_values_are_named(message, call):
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert str(caught.value).startswith(message)

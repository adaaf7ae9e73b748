"""Promise: the paper's numbers come out of the formulas, by category, and without torch."""

import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolab import cost, memory, presets

# ZeRO Table 1 as printed: GB per device for P_os, P_os+g, P_os+g+p, by model and number of ranks.
TABLE_1 = """
       7.5B              128B             1T
1      120  120  120     2048 2048 2048   16000 16000 16000
4      52.5 41.3 30      896  704  512    7000  5500  4000
16     35.6 21.6 7.5     608  368  128    4750  2875  1000
64     31.4 16.6 1.88    536  284  32     4187  2218  250
256    30.4 15.4 0.47    518  263  8      4046  2054  62.5
1024   30.1 15.1 0.12    513  257  2      4011  2013  15.6
"""
SIZES, *LINES = [line.split() for line in TABLE_1.strip().splitlines()]
CELLS = [(SIZES[i // 3], int(n), 1 + i % 3, cell) for n, *cells in LINES for i, cell in enumerate(cells)]


def as_printed(value: float, cell: str, rounds: bool) -> str:
    """`value` to the decimals of the cell; the 7.5B columns round half up, the larger ones truncate."""
    decimals = len(cell.partition(".")[2])
    return f"{math.floor(value * 10**decimals + 0.5 * rounds) / 10**decimals:.{decimals}f}"


@pytest.mark.parametrize(("psi", "world_size", "stage", "cell"), CELLS)
def test_table_1(psi, world_size, stage, cell):
    total_gb = memory.model_states(memory.parse_count(psi), world_size, stage).total_bytes / 1e9
    assert as_printed(total_gb, cell, rounds=psi == "7.5B") == cell


def test_table_1_is_whole():
    assert len(CELLS) == 6 * 9


@pytest.mark.parametrize(("stage", "cell"), list(enumerate(["120", "31.4", "16.6", "1.9"])))
def test_figure_1(stage, cell):
    total_gb = memory.model_states(7_500_000_000, 64, stage).total_bytes / 1e9
    assert as_printed(total_gb, cell, rounds=True) == cell


@pytest.mark.parametrize("model_parallel", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("stage", "first_row"), list(enumerate([2, 7.6, 14.4, 128])))
def test_table_2(stage, first_row, model_parallel):
    """The paper doubles its rounded first row; the formula, which does not, stays within that rounding."""
    psi = memory.largest_model(32 * 10**9, 64, stage, model_parallel=model_parallel)
    assert abs(psi / 1e9 - first_row * model_parallel) <= 0.05 * model_parallel


@pytest.mark.parametrize(("stage", "at_mp_16"), [(1, 122.3), (2, 230.8)])
def test_table_2_without_the_papers_rounding(stage, at_mp_16):
    assert round(memory.largest_model(32 * 10**9, 64, stage, model_parallel=16) / 1e9, 1) == at_mp_16


def test_gpt2_1_5b():
    assert memory.model_states(1_500_000_000, 1, 0) == memory.ModelStates(3e9, 3e9, 18e9)
    assert memory.model_states(1_500_000_000, 1, 0).total_bytes == 24e9
    assert memory.fused_buffer_bytes(1_500_000_000) == 6e9
    assert memory.format_bytes(memory.activations(48, 1600, 32, 1024)) == "60.4 GB"
    assert memory.format_bytes(memory.activations(48, 1600, 32, 1024, checkpointing=True)) == "8.39 GB"


def test_activations_by_hand():
    shape, tensor_bytes = dict(layers=10, hidden=2, batch=3, seq=5), 3 * 5 * 2 * 2
    assert memory.activations(**shape) == 12 * 10 * tensor_bytes
    assert memory.activations(**shape, bytes_per_element=4) == 12 * 10 * tensor_bytes * 2
    # segments of 4: the inputs of 3 segments, the last one short, and one segment computed again
    segments_of_4 = memory.activations(**shape, checkpointing=True, segment_layers=4)
    assert segments_of_4 == (3 + 12 * 4) * tensor_bytes
    assert memory.activations(**shape, checkpointing=True) == (4 + 12 * 3) * tensor_bytes


CONVENTIONS = {"mixed": (2, 2, 12), "fp32": (4, 4, 8), "mixed_fp32_grads": (2, 4, 12)}


@pytest.mark.parametrize("precision", CONVENTIONS)
def test_conventions_are_a_choice(precision):
    assert memory.model_states(1, 1, 0, precision) == memory.ModelStates(*CONVENTIONS[precision])


def test_master_weights_are_sharded_too():
    """The common error shards m and v alone and forgets the fp32 master weights: 58.7 GB."""
    total_bytes = memory.model_states(7_000_000_000, 8, 1).total_bytes
    assert total_bytes == 38.5e9
    assert (memory.format_bytes(total_bytes), memory.format_bytes(total_bytes, "GiB")) == (
        "38.5 GB",
        "35.9 GiB",
    )


@pytest.mark.parametrize(
    "optimizer_k", ["adam mixed 12", "adamw fp32 8", "momentum mixed 8", "sgd mixed 4", "sgd fp32 0"]
)
def test_k_by_optimizer(optimizer_k):
    optimizer, precision, k = optimizer_k.split()
    assert memory.optimizer_bytes_per_parameter(optimizer, precision) == int(k)
    assert memory.model_states(10, 2, 1, precision, k=int(k)).optimizer_bytes == 10 * int(k) / 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_parameters_cost_their_own_bytes_alone(stage):
    without, frozen = (memory.model_states(100, 4, stage, frozen_psi=psi) for psi in (0, 60))
    assert frozen.params_bytes - without.params_bytes == 2 * 60 / (4 if stage == 3 else 1)
    assert (frozen.grads_bytes, frozen.optimizer_bytes) == (without.grads_bytes, without.optimizer_bytes)


ANY_TIME = settings(deadline=None)  # a busy machine is no failure
PSI, WORLD_SIZE, STAGE = st.integers(1, 10**13), st.integers(1, 5000), st.integers(0, 3)
PRECISION, GPU_BYTES = st.sampled_from(sorted(memory.CONVENTIONS)), st.integers(1000, 10**13)


@ANY_TIME
@given(PSI, WORLD_SIZE, STAGE, PRECISION)
def test_more_ranks_never_cost_more(psi, n, stage, precision):
    fewer, more = (memory.model_states(psi, ranks, stage, precision).total_bytes for ranks in (n, n + 1))
    assert more < fewer if stage else more == fewer


@ANY_TIME
@given(PSI, WORLD_SIZE, STAGE, PRECISION)
def test_ranks_together_hold_each_sharded_state_once(psi, world_size, stage, precision):
    alone, states = (memory.model_states(psi, n, stage, precision) for n in (1, world_size))
    for name, sharded_from in (("optimizer_bytes", 1), ("grads_bytes", 2), ("params_bytes", 3)):
        copies = 1 if stage >= sharded_from else world_size
        assert getattr(states, name) * world_size == pytest.approx(getattr(alone, name) * copies)
    assert states.total_bytes == states.params_bytes + states.grads_bytes + states.optimizer_bytes


@ANY_TIME
@given(PSI, WORLD_SIZE, PRECISION)
def test_a_stage_never_costs_more_than_the_one_before(psi, world_size, precision):
    totals = [memory.model_states(psi, world_size, stage, precision).total_bytes for stage in range(4)]
    assert totals == sorted(totals, reverse=True)


@ANY_TIME
@given(GPU_BYTES, WORLD_SIZE, STAGE, PRECISION)
def test_largest_model_fits_and_one_parameter_more_does_not(gpu_bytes, world_size, stage, precision):
    psi = memory.largest_model(gpu_bytes, world_size, stage, precision)
    replicated, sharded = memory.bytes_per_parameter(stage, precision)
    all_ranks_bytes = lambda psi: psi * (replicated * world_size + sharded)  # integers, so exact
    assert all_ranks_bytes(psi) <= gpu_bytes * world_size < all_ranks_bytes(psi + 1)


@ANY_TIME
@given(PSI, GPU_BYTES, STAGE)
def test_smallest_world_size_is_the_first_that_fits(psi, gpu_bytes, stage):
    replicated, sharded = memory.bytes_per_parameter(stage)
    fits = lambda n: psi * (replicated * n + sharded) <= gpu_bytes * n
    world_size = memory.smallest_world_size(psi, gpu_bytes, stage)
    assert fits(world_size) if world_size else not fits(10**18)
    assert world_size in (None, 1) or not fits(world_size - 1)


@ANY_TIME
@given(st.integers(1, 100))
def test_communication_volume(m):
    volumes = lambda **how: [cost.communication_volume(1, stage, **how) for stage in range(4)]
    assert volumes() == [2, 2, 2, 3]
    assert volumes(micro_batches=m) == [2, 2, m + 1, 3 * m]
    assert volumes(micro_batches=m, reduce_each=False) == [2, 2, 2, 2 * m + 1]
    assert volumes(micro_batches=m, reduce_each=True) == [2 * m, m + 1, m + 1, 3 * m]


SENT_OF_100 = {"reduce_scatter": 75, "all_gather": 75, "all_to_all": 75, "all_reduce": 150, "broadcast": 100}


@pytest.mark.parametrize("collective", cost.COLLECTIVES)
def test_wire_bytes(collective):
    assert cost.wire_bytes(100, 4, collective) == SENT_OF_100[collective]
    assert cost.wire_bytes(100, 1, collective) == 0


def test_seconds_by_hand():
    # 4 ranks: 3 messages of 1 ms in a row, and 3/4 of 1000 bytes at 100 bytes per second
    assert cost.collective_seconds(1000, 4, "all_gather", 0.001, 100) == pytest.approx(0.003 + 7.5)
    assert cost.collective_seconds(1000, 4, "all_reduce", 0.001, 100) == pytest.approx(0.006 + 15)
    assert cost.collective_seconds(1000, 1, "all_reduce", 0.001, 100) == 0
    steps = [cost.communication_seconds(500, stage, 4, 0, 100) for stage in range(4)]
    assert steps == pytest.approx([15, 15, 15, 22.5])
    one_unit, ten_units = (cost.communication_seconds(500, 3, 4, 0.001, 100, units=n) for n in (1, 10))
    assert ten_units - one_unit == pytest.approx(9 * 3 * 3 * 0.001)  # 9 units more, 3 passes of 3 messages


PARSED = {
    "32GB": 32e9,
    "32GiB": 2**35,
    "80 GB": 80e9,
    "1.5TB": 1.5e12,
    "512": 512,
    "32gb": 32e9,
    ".5KiB": 512,
    7: 7,
}
UNPARSED = ["32G", "32Gb", "GB", "", "-1GB", "nan", "inf GB", "1 2GB", "1,5GB", "1e400B"]
PRINTED = {31.40625e9: "31.4 GB", 16e12: "16000 GB", 117187500: "0.117 GB", 0: "0 GB", 9.996e9: "10.0 GB"}


@pytest.mark.parametrize("text", PARSED)
def test_parse_bytes(text):
    assert memory.parse_bytes(text) == PARSED[text]


@pytest.mark.parametrize("text", UNPARSED)
def test_parse_bytes_says_what_to_write_instead(text):
    with pytest.raises(
        ValueError, match=r"size is .*(such as 1.5e9|\"32GB\" or \"32GiB\"; GB is 1e9 bytes, GiB 2)"
    ):
        memory.parse_bytes(text)


def test_format_bytes():
    assert [memory.format_bytes(n) for n in PRINTED] == list(PRINTED.values())
    assert [memory.format_bytes(2**30, unit) for unit in ("GiB", "GB")] == ["1.00 GiB", "1.07 GB"]


@ANY_TIME
@given(st.integers(0, 10**14))
def test_counts_survive_printing_and_parsing(n):
    assert memory.parse_count(memory.format_count(n)) == pytest.approx(n, rel=0.006)


def test_presets_have_the_parameters_of_their_architecture():
    for gpt in [presets.model(name) for name in ("gpt2", "gpt2-medium", "gpt2-large", "GPT2-XL ")]:
        blocks = gpt.layers * (12 * gpt.hidden**2 + 13 * gpt.hidden)
        assert gpt.psi == blocks + (50257 + gpt.seq + 2) * gpt.hidden
    for gpt in presets.MODELS.values():
        if gpt.layers is not None and gpt.psi > 10**9:  # below that, embeddings are a large part
            assert gpt.psi == pytest.approx(12 * gpt.layers * gpt.hidden**2, rel=0.08)


def test_the_accounting_answers_without_torch_or_numpy():
    code = "import sys; from zerolab import memory, cost, presets, plan; memory.model_states(1, 1, 1)"
    check = f"{code}; assert not {{'torch', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], timeout=60, check=True)

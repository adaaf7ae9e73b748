"""Any size: the paper's Table 1, reproduced by running the engine and not by evaluating a formula."""

import math
import subprocess
import sys

import pytest
import torch
from support.long import long_where
from torch import nn

import zerolab

# Source: ZeRO, Table 1 (arXiv:1910.02054): GB per device at P_os, P_os+g, P_os+g+p.
TABLE_1 = {
    7_500_000_000: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128_000_000_000: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1_000_000_000_000: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}
BLOCK = {
    7_500_000_000: (10_000, 10_000),
    128_000_000_000: (50_000, 80_000),
    1_000_000_000_000: (100_000, 100_000),
}


class Stack(nn.Module):
    """Linear blocks of exactly the size asked for; every second one runs the other way, so they fit."""

    def __init__(self, psi: int, frozen_blocks: int = 0):
        super().__init__()
        wide, tall = BLOCK[psi]
        count = psi // (wide * tall)
        assert count * wide * tall == psi
        self.blocks = nn.ModuleList(
            nn.Linear(*((wide, tall) if index % 2 == 0 else (tall, wide)), bias=False)
            for index in range(count)
        )
        self.blocks[:frozen_blocks].requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()


def rehearse(psi: int, world_size: int, stage: int, **settings):
    frozen = settings.pop("frozen_blocks", 0)
    return zerolab.rehearse(
        lambda: Stack(psi, frozen),
        world_size,
        stage,
        inputs=lambda: torch.zeros(1, BLOCK[psi][0]),
        **settings,
    )


def printed(gigabytes: float, cell: float, psi: int) -> float:
    """The figure as the paper prints it: the 7.5B columns round, the larger ones truncate to the cell's
    digits.
    """
    digits = 10 ** len(str(cell).partition(".")[2]) if "." in str(cell) else 1
    if psi == 7_500_000_000:
        return math.floor(gigabytes * digits + 0.5) / digits
    return math.floor(gigabytes * digits) / digits


def states_gigabytes(rehearsal) -> float:
    memory = rehearsal.memory
    return (memory.params_bytes + memory.grads_bytes + memory.optimizer_bytes) / 1e9


OTHERS = "the first size has every number of GPUs, too"


@pytest.mark.parametrize("psi", long_where(lambda psi: psi > 10**10, OTHERS, TABLE_1))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_column_of_table_1_comes_out_of_the_engine(psi, stage):
    for world_size, cells in TABLE_1[psi].items():
        found = rehearse(psi, world_size, stage)
        assert found.psi == psi
        assert printed(states_gigabytes(found), cells[stage - 1], psi) == cells[stage - 1], world_size
        padding_bytes = (
            found.memory.padding_bytes + abs(found.memory.uneven_bytes) + found.memory.counters_bytes
        )
        assert padding_bytes < 1e-3 * found.memory.total_bytes


@pytest.mark.parametrize(("stage", "passes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_traffic_is_counted_in_the_same_run(stage, passes):
    psi = 7_500_000_000
    traffic = rehearse(psi, 64, stage).traffic
    assert traffic.logical_bytes == passes * 2 * psi
    assert traffic.wire_bytes == pytest.approx(traffic.logical_bytes * 63 / 64, rel=1e-3)


def test_no_formula_is_consulted(monkeypatch):
    """With the accounting broken, another optimizer and a third of the parameters frozen, the counts still
    hold.
    """

    def refuse(*args, **kwargs):
        raise AssertionError("the formula was consulted")

    for name in ("model_states", "bytes_per_parameter"):
        monkeypatch.setattr(zerolab.memory, name, refuse)
    monkeypatch.setattr(zerolab.cost, "communication_volume", refuse)
    monkeypatch.setattr(zerolab.cost, "passes_per_step", refuse)
    psi, world_size = 7_500_000_000, 256
    found = rehearse(
        psi, world_size, 3, frozen_blocks=25, optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9
    )
    trainable = psi * 2 // 3
    assert found.memory.params_bytes == pytest.approx(2 * psi / world_size)
    assert found.memory.grads_bytes == pytest.approx(2 * trainable / world_size)
    assert found.memory.optimizer_bytes == pytest.approx((4 + 4) * trainable / world_size)
    # The frozen blocks come first and their input needs no gradient: backward never asks for them.
    assert found.traffic.logical_bytes == 2 * (3 * trainable + (psi - trainable))


def test_peaks_are_bounded_by_what_is_whole_and_in_flight():
    """Stage 3 with prefetch p holds p + 1 units whole, and gradients at most 2 (1 + r) units."""
    psi, world_size = 7_500_000_000, 1024
    unit_bytes = 2 * BLOCK[psi][0] * BLOCK[psi][1]
    for prefetch in (0, 1, 3):
        found = rehearse(psi, world_size, 3, prefetch=prefetch, reduces_in_flight=0)
        held = found.peak_by_phase["forward"] - 14 * psi / world_size  # the shards, gradients cleared
        assert held == pytest.approx((prefetch + 1) * unit_bytes, rel=0.02)
    whole, shards = 4 * unit_bytes, 16 * psi / world_size
    assert found.peak_by_phase["backward"] <= shards + whole + 2 * unit_bytes * 1.01


def test_one_terabyte_model_takes_under_a_gigabyte():
    script = (  # VmHWM, because ru_maxrss counts what the parent held before exec
        "import sys; sys.path[:0] = ['tests', 'tests/promises'];"
        "import test_rehearsal as t; from support.resident_memory import status;"
        "t.rehearse(1_000_000_000_000, 1024, 3);"
        "print(status('VmHWM'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 1_000_000_000


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True, "8"])
def test_a_world_size_that_is_none_is_refused(world_size):
    with pytest.raises(ValueError, match=r"world_size is .*pass a whole number of 1 or more"):
        rehearse(7_500_000_000, world_size, 3)


def test_a_process_in_a_group_is_told_to_rehearse_elsewhere():
    def inside():
        try:
            rehearse(7_500_000_000, 8, 3)
        except RuntimeError as error:
            return str(error)

    (message,) = zerolab.launch(inside, 1)
    assert "outside launch" in message


def test_nothing_is_left_behind():
    rehearse(7_500_000_000, 8, 3)
    assert not torch.distributed.is_initialized()
    assert torch.ones(2).device.type == "cpu"


def test_inputs_may_have_contents_and_none_are_computed_with():
    tokens = torch.zeros(1, 4, dtype=torch.long)
    gpt = lambda: zerolab.models.GPT(width=8, depth=1, heads=2, context=4)
    outside, inside = (
        zerolab.rehearse(gpt, 2, 1, inputs=inputs)
        for inputs in (lambda: (tokens, tokens), lambda: (torch.zeros(1, 4, dtype=torch.long),) * 2)
    )
    assert outside.traffic == inside.traffic and outside.peak_by_phase == inside.peak_by_phase


BUILT = {
    "model_fn is a Linear: pass a function": {"model_fn": nn.Linear(2, 2)},
    "inputs is a Tensor: pass a function": {"inputs": torch.ones(2)},
    "checkpointing is a Checkpointing: pass a function": {"checkpointing": zerolab.Checkpointing()},
    r"model_fn\(\) returned None: return the module": {"model_fn": lambda: None},
    "process groups of its own: leave process_group out": {"process_group": object()},
}


@pytest.mark.parametrize("message", BUILT)
def test_what_is_built_already_is_refused(message: str):
    arguments = {"model_fn": lambda: zerolab.models.make("gpt-tiny")} | BUILT[message]
    with pytest.raises((TypeError, ValueError), match=message):
        zerolab.rehearse(world_size=4, **arguments)

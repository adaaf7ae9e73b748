"""Promise: KΨ/N bytes are read and KΨ/N written in each step, and only what is updated is resident."""

import sys
import tempfile
from pathlib import Path

import cloudpickle
import pytest
import torch
from support import offloaded, resident_memory, subjects, together
from support.offloaded import resident_bytes

import zerolab
from zerolab.optimizer.offload import Offload
from zerolab.rehearsal import Rehearsal

for module in (sys.modules[__name__], offloaded, resident_memory, subjects, together):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest

PSI = 5 * 16 * 16
UNITS = 5
K = {"fp32": 8, "mixed": 12, "mixed_fp32_grads": 12, "mixed_fp16": 12}


@pytest.fixture
def disk():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield folder


def step(optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss = optimizer.model(*subjects.vectors(number, optimizer.rank))
    optimizer.scale(loss.float()).backward()
    optimizer.step()


def measure(stage: int, precision: str, offload: str, folder: str | None) -> dict:
    """On a rank: what the third step moves, and what is resident while each unit is updated and after it."""
    together.update_together(False)
    seen = []

    class Watched(torch.optim.Adam):
        def step(self, closure=None):
            super().step(closure)
            if "optimizer" in held:
                seen.append(resident_bytes(held["optimizer"]))

    held = {}
    optimizer = held["optimizer"] = offloaded.build(
        "ladder", Watched, stage=stage, precision=precision, offload=offload, offload_dir=folder
    )
    at_start = resident_bytes(optimizer)
    tier = optimizer.offload.tier
    step(optimizer, 0), step(optimizer, 1)
    before = tier.read_bytes, tier.written_bytes
    seen.clear()
    step(optimizer, 2)
    return {
        "moved": (tier.read_bytes - before[0], tier.written_bytes - before[1]),
        "at the start": at_start,
        "while updated": seen,
        "after": resident_bytes(optimizer),
        "memory": optimizer.memory(),
    }


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", K)
def test_the_bytes_of_a_step_are_the_formulas(stage: int, precision: str, disk: str):
    world_size = 2
    share = K[precision] * PSI // (world_size if stage else 1)
    for found in zerolab.launch(measure, world_size, stage, precision, "disk", disk, timeout=60):
        assert found["moved"] == (share, share)
        assert found["at the start"] == found["after"] == 0
        assert found["while updated"] == [share // UNITS] * UNITS
        assert found["memory"].offloaded_bytes == share
        assert found["memory"].optimizer_bytes == found["memory"].uneven_bytes == 0


def test_on_the_cpu_they_are_the_same():
    (found,) = zerolab.launch(measure, 1, 1, "mixed", "cpu", None, timeout=60)
    assert found["moved"] == (12 * PSI, 12 * PSI)
    assert found["memory"].offloaded_bytes == 12 * PSI


def uneven() -> list[float]:
    """Ranks own unequal shares of what this model has."""
    optimizer = offloaded.build("gpt", stage=1, precision="mixed", offload="cpu")
    offloaded.train(optimizer, "gpt")
    found, state = optimizer.memory(), [t for t in optimizer.local.state_tensors() if t.dim()]
    masters = [unit.master for unit in optimizer.units]
    assert found.offloaded_bytes == sum(t.nbytes for t in state + masters)
    return [found.optimizer_bytes, found.uneven_bytes]


def test_what_is_away_is_in_no_other_category():
    assert zerolab.launch(uneven, 2, timeout=60) == [[0, 0], [0, 0]]


def peaks(offload: str | None) -> dict[str, int]:
    together.update_together(False)
    optimizer = offloaded.build("ladder", torch.optim.Adam, stage=1, precision="mixed", offload=offload)
    at_setup = optimizer.meter.peak_by_phase
    step(optimizer, 0), step(optimizer, 1)
    optimizer.meter.reset_peak()
    step(optimizer, 2)
    return {"setup": max(at_setup.values()), "step": optimizer.meter.peak_by_phase["step"]}


def test_the_meter_sees_one_unit_at_a_time():
    """Without offloading all units are there at the peak of the step, with it one of them."""
    (plain,), (ours,) = (zerolab.launch(peaks, 1, way, timeout=60) for way in (None, "cpu"))
    assert plain["step"] - ours["step"] == 12 * PSI * (UNITS - 1) // UNITS


def meter_at_the_first_step() -> tuple[int, int]:
    together.update_together(False)
    optimizer = offloaded.build("ladder", torch.optim.Adam, stage=1, precision="mixed", offload="cpu")
    before = optimizer.meter.peak_bytes
    step(optimizer, 0)
    counters = sum(t.nbytes for t in optimizer.local.state_tensors() if not t.dim())
    return optimizer.meter.peak_by_phase["step"] - optimizer.meter.held_bytes + counters, before


def test_state_that_the_first_step_makes_leaves_unit_by_unit():
    ((more, _),) = zerolab.launch(meter_at_the_first_step, 1, timeout=60)
    assert more == 12 * PSI // UNITS


def resident_at_layout(stage: int) -> list[int]:
    """What is resident of all masters when each unit has been laid out."""
    units, seen, take = [], [], Offload.take_master

    def counted(self, unit):
        take(self, unit)
        units.append(unit)
        seen.append(sum(each.master.untyped_storage().nbytes() for each in units))

    Offload.take_master = counted
    try:
        offloaded.build("ladder", torch.optim.Adam, stage=stage, precision="mixed", offload="cpu")
    finally:
        Offload.take_master = take
    return seen


@pytest.mark.parametrize("stage", [0, 3])
def test_masters_leave_unit_by_unit_in_layout(stage: int):
    assert zerolab.launch(resident_at_layout, 2, stage, timeout=60) == [[0] * UNITS] * 2


def small_units() -> tuple[int, int]:
    """Small units are updated together: then all of them are the window."""
    together.update_together(True)
    optimizer = offloaded.build("ladder", torch.optim.Adam, stage=1, offload="cpu")
    return len(optimizer.offload._states), len(optimizer.local.optimizers)


def test_small_units_are_one_window():
    assert zerolab.launch(small_units, 1, timeout=60) == [(1, 1)]


def save_and_count(folder: Path) -> dict[str, tuple[int, int]]:
    """Saving reads each byte once. Export reads the masters alone, and describing a state reads nothing."""
    optimizer = offloaded.build("ladder", torch.optim.Adam, stage=1, precision="mixed", offload="cpu")
    step(optimizer, 0)
    tier, found = optimizer.offload.tier, {}
    for name, action in {
        "save": lambda: zerolab.save(optimizer, folder),
        "export": lambda: zerolab.export(optimizer, folder / "model.pt"),
        "full_params": lambda: whole(optimizer),
        "describe": optimizer.describe_state,
        "memory": optimizer.memory,
        "state_dict": optimizer.state_dict,
    }.items():
        before = tier.read_bytes
        action()
        found[name] = (tier.read_bytes - before, resident_bytes(optimizer))
    return found


def whole(optimizer: zerolab.ZeroOptimizer) -> None:
    with optimizer.full_params():
        pass


def test_what_else_reads_the_states_reads_no_more_than_it_needs(tmp_path: Path):
    for found in zerolab.launch(save_and_count, 2, tmp_path, timeout=60):
        share = PSI // 2
        expected = {"save": 12 * share, "export": 4 * share, "state_dict": 8 * share}
        expected |= {"full_params": 0, "describe": 0, "memory": 0}
        assert found == {name: (nbytes, 0) for name, nbytes in expected.items()}


def resident_after_a_step(offload: str | None, folder: str | None) -> int:
    """The bytes of this process' resident memory after a step."""
    resident_memory.give_memory_back_when_freed()
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    optimizer = zerolab.ZeroOptimizer(
        model, torch.optim.Adam, stage=1, lr=0.1, offload=offload, offload_dir=folder
    )
    model(torch.randn(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return resident_memory.status("VmRSS")


def test_a_disk_takes_the_states_out_of_resident_memory(disk: str):
    (plain,), (ours,) = (
        zerolab.launch(resident_after_a_step, 1, *way, timeout=60) for way in ((None, None), ("disk", disk))
    )
    states_bytes = 8 * 8 * 1024**2
    assert plain - ours == pytest.approx(states_bytes, abs=6e6)


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Linear(4096, 4096, bias=False, device="meta") for _ in range(16))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def rehearsed(offload: str | None, folder: str | None = None) -> Rehearsal:
    return zerolab.rehearse(
        Stack, 64, 3, inputs=lambda: torch.empty(1, 4096), offload=offload, offload_dir=folder
    )


@pytest.mark.parametrize("way", ["cpu", "disk"])
def test_a_rehearsal_counts_what_would_be_offloaded(way: str, tmp_path: Path):
    plain, ours = rehearsed(None), rehearsed(way, str(tmp_path) if way == "disk" else None)
    share = 12 * plain.psi // 64
    assert plain.memory.optimizer_bytes == ours.memory.offloaded_bytes == share
    assert ours.memory.optimizer_bytes == 0
    assert plain.peak_by_phase["step"] - ours.peak_by_phase["step"] == share * 15 // 16
    assert list(tmp_path.iterdir()) == []

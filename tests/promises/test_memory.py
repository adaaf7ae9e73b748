"""Promise: the same bytes. What a rank holds is what the formula says, counted from real storages."""

import functools
import gc
import sys
import weakref
from dataclasses import dataclass

import cloudpickle
import pytest
import torch
from support import subjects
from torch.utils._python_dispatch import TorchDispatchMode

import zerolab
from zerolab import memory
from zerolab.measure import MeasuredStates

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

WORLD_SIZES = (1, 2, 3, 4)
OPTIMIZERS = {
    "Adam": (8, {"lr": 0.01}),
    "momentum": (4, {"lr": 0.01, "momentum": 0.9}),
    "SGD": (0, {"lr": 0.01}),
}
CASES = [(stage, optimizer) for stage in range(4) for optimizer in OPTIMIZERS]
SLACK_BYTES = 512  # control messages, which the backend's thread may let go of a moment late


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def live_bytes() -> int:
    """The bytes of every storage that any tensor in this process is about, however it is held."""
    gc.collect()
    storages = {}
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor) and _has_memory(thing):
                storage = thing.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _has_memory(tensor: torch.Tensor) -> bool:
    """Shapes alone, on the meta device, hold nothing, and neither does the marker of a gradient moved out."""
    return not tensor.is_meta and type(tensor).__name__ != "ReducedGradient"


@dataclass
class Held:
    """What one rank said it held, what it really did, and the numel of its parameters."""

    said: MeasuredStates
    really_bytes: int
    psi: int


def held_after_a_step(cases: list) -> list[Held]:
    """Two steps, so that the state is there and gradients were cleared once; then a look before zero_grad."""
    results = []
    for stage, name in cases:
        before_bytes = live_bytes()
        model, inputs = subjects.gpt(), subjects.tokens
        psi = sum(p.numel() for p in model.parameters())
        optimizer_class = torch.optim.Adam if name == "Adam" else torch.optim.SGD
        optimizer = zerolab.ZeroOptimizer(model, optimizer_class, stage=stage, **OPTIMIZERS[name][1])
        for step in range(2):
            optimizer.zero_grad()
            model(*inputs(step, optimizer.rank)).backward()
            optimizer.step()
        results.append(Held(optimizer.memory(), live_bytes() - before_bytes, psi))
        del model, optimizer
    return results


@functools.cache
def held(world_size: int) -> list[list[Held]]:
    """By case, then by rank."""
    return list(zip(*zerolab.launch(held_after_a_step, world_size, CASES), strict=True))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("stage, optimizer", CASES)
def test_every_category_is_the_formulas_on_every_rank(stage: int, optimizer: str, world_size: int):
    k = OPTIMIZERS[optimizer][0]
    for rank in held(world_size)[CASES.index((stage, optimizer))]:
        shares = [1 / world_size if stage >= sharded_from else 1 for sharded_from in (3, 2, 1)]
        expected = [
            bytes_each * rank.psi * share for bytes_each, share in zip((4, 4, k), shares, strict=True)
        ]
        said = rank.said
        assert [said.params_bytes, said.grads_bytes, said.optimizer_bytes] == pytest.approx(
            expected, abs=1e-3
        )
        formula = memory.model_states(rank.psi, world_size, stage, "fp32", k=k)
        assert [formula.params_bytes, formula.grads_bytes, formula.optimizer_bytes] == pytest.approx(expected)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("stage, optimizer", CASES)
def test_the_census_leaves_no_byte_out(stage: int, optimizer: str, world_size: int):
    """Held against all tensors that the garbage collector knows of in the process."""
    for rank in held(world_size)[CASES.index((stage, optimizer))]:
        assert rank.said.total_bytes == pytest.approx(rank.really_bytes, abs=SLACK_BYTES)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("stage, optimizer", CASES)
def test_what_is_itemised_is_small_and_evens_out(stage: int, optimizer: str, world_size: int):
    ranks = held(world_size)[CASES.index((stage, optimizer))]
    count = len(list(subjects.gpt().parameters()))
    assert sum(rank.said.uneven_bytes for rank in ranks) == pytest.approx(0, abs=1e-3)
    for said in (rank.said for rank in ranks):
        # 64 bytes at most for each parameter, and for each shard of the three units; of the parameters twice
        # at stage 3, where between uses there are shards and no whole, and of the gradients.
        assert 0 <= said.padding_bytes <= 2 * 64 * (count + 3 * world_size)
        assert said.counters_bytes == (4 * count if optimizer == "Adam" else 0)


def test_a_copy_somebody_keeps_is_seen_by_both():
    """The census can fail: keep one gradient more, one parameter outside its buffer, and they are counted."""

    def keep_copies() -> tuple:
        model = subjects.gpt()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=2, lr=0.1)
        model(*subjects.tokens(0, optimizer.rank)).backward()
        optimizer.step()
        before, before_bytes = optimizer.memory(), live_bytes()
        model.head.weight.grad = torch.ones_like(model.head.weight)
        model.norm.weight.data = model.norm.weight.data.clone()
        return before, optimizer.memory(), live_bytes() - before_bytes

    for before, after, really_bytes in zerolab.launch(keep_copies, 2):
        assert after.grads_bytes - before.grads_bytes == 4 * 23 * 12
        assert after.params_bytes - before.params_bytes == 4 * 12
        assert after.total_bytes - before.total_bytes == pytest.approx(really_bytes, abs=SLACK_BYTES)


# Frozen parameters, buffers, and what zero_grad gives back.


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_parameters_cost_their_own_bytes_alone(stage: int):
    def look() -> tuple:
        model = subjects.Patchwork()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=stage)
        unused = model.unused.numel()
        model(*subjects.images(0, optimizer.rank)).backward()
        optimizer.step()
        return optimizer.memory(), trained, frozen, unused

    world_size = 3
    ranks = zerolab.launch(look, world_size)
    share = lambda sharded_from: world_size if stage >= sharded_from else 1
    for said, trained, frozen, _ in ranks:
        assert said.params_bytes == pytest.approx(4 * (trained + frozen) / share(3))
        assert said.grads_bytes == pytest.approx(4 * trained / share(2))
    state_bytes = sum(said.optimizer_bytes for said, *_ in ranks)
    _, trained, _, unused = ranks[0]
    assert state_bytes == pytest.approx(8 * (trained - unused) * world_size / share(1))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_gives_all_gradients_back(stage: int):
    def look() -> tuple:
        model = subjects.gpt()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
        before_bytes = live_bytes()
        model(*subjects.tokens(0, optimizer.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.memory().grads_bytes, live_bytes() - before_bytes

    for grads_bytes, more_bytes in zerolab.launch(look, 2):
        assert grads_bytes == 0
        assert more_bytes <= SLACK_BYTES


# Peaks.


class HighWater(TorchDispatchMode):
    """Looks at an optimizer's units at every operation that torch performs, apart from the engine's gauge."""

    def __init__(self, optimizer: zerolab.ZeroOptimizer):
        super().__init__()
        self.optimizer, self.whole_units, self.grads_bytes, self.total_bytes = optimizer, 0, 0, 0
        self.scratch: list[weakref.ref] = []
        self.make_scratch = optimizer.comm._scratch
        optimizer.comm._scratch = self.scratch_under_watch

    def scratch_under_watch(self, *args) -> torch.Tensor:
        """Where a reduce-scatter's messages land is nobody's attribute, so remember it while it lives."""
        rows = self.make_scratch(*args)
        self.scratch.append(weakref.ref(rows))
        self.look()
        return rows

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.look()
        return result

    def look(self) -> None:
        """Take down what there is now."""
        units = self.optimizer.units
        whole = [unit for unit in units if unit.name != "root" and unit.flat.untyped_storage().nbytes()]
        self.whole_units = max(self.whole_units, len(whole))
        scratch = [rows for rows in (reference() for reference in self.scratch) if rows is not None]
        on_their_way = [*scratch, *(unit.grads.local for unit in units)]
        self.grads_bytes = max(self.grads_bytes, bytes_of(on_their_way))
        kept = [tensor for unit in units for tensor in (unit.flat, unit.shard, unit.grads.reduced)]
        self.total_bytes = max(self.total_bytes, bytes_of([*on_their_way, *kept]))


def bytes_of(tensors: list) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def peaks(stage: int, subject: str, knobs: list[tuple[int, int]]) -> list[tuple]:
    """Train a little under watch with each setting: what was seen, the gauge's peaks, and a unit's bytes."""
    results = []
    for prefetch, in_flight in knobs:
        build, inputs = subjects.SUBJECTS[subject]
        model = build()
        optimizer = zerolab.ZeroOptimizer(
            model, torch.optim.SGD, stage=stage, lr=0.1, prefetch=prefetch, reduces_in_flight=in_flight
        )
        with HighWater(optimizer) as seen:
            for step in range(3):
                optimizer.zero_grad()
                model(*inputs(step, optimizer.rank)).backward()
                optimizer.step()
        gauge, unit = optimizer.engine.gauge, optimizer.units[0]
        results.append((seen.whole_units, seen.grads_bytes, seen.total_bytes, gauge, 4 * unit.padded_numel))
    return [(*found, gauge.peak_bytes, gauge.peak_by_phase, size) for *found, gauge, size in results]


@pytest.mark.parametrize("subject", ["deep", "ladder"])
def test_stage_3_holds_the_unit_at_work_and_those_gathered_ahead(subject: str):
    """The root apart, which stays from forward to backward. Fewer would be a knob that does nothing."""
    for results in zerolab.launch(peaks, 2, 3, subject, [(0, 1), (1, 1), (2, 1)]):
        assert [whole_units for whole_units, *_ in results] == [1, 2, 3]


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_on_their_way_take_two_units_for_each_reduction_in_flight(stage: int):
    in_flight = (0, 1, 2)
    for results in zerolab.launch(peaks, 3, stage, "ladder", [(1, each) for each in in_flight]):
        for each, (_, grads_bytes, *_, unit_bytes) in zip(in_flight, results, strict=True):
            assert (1 + each) * unit_bytes < grads_bytes <= 2 * (1 + each) * unit_bytes


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_gauge_saw_the_highest_water(stage: int):
    for results in zerolab.launch(peaks, 2, stage, "deep", [(0, 0), (1, 1), (2, 2)]):
        for _, _, total_bytes, peak_bytes, peak_by_phase, _ in results:
            assert total_bytes == peak_bytes == peak_by_phase["backward"]


def test_the_gauge_keeps_within_the_bound_at_stage_3():
    prefetch, in_flight, world_size = 1, 1, 4
    for results in zerolab.launch(peaks, world_size, 3, "ladder", [(prefetch, in_flight)]):
        ((*_, peak_by_phase, unit_bytes),) = results
        shards_bytes = 2 * 5 * unit_bytes / world_size  # parameters and reduced gradients of five units
        at_most = {"forward": prefetch + 1, "backward": prefetch + 1 + 2 * (1 + in_flight)}
        for phase, units in at_most.items():
            assert peak_by_phase[phase] <= shards_bytes + units * unit_bytes

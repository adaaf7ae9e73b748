"""Promise: broken tensor parallelism, checkpointing, offload, buckets and arenas are found out. Each mistake
is made on purpose, and a run differs from that of a sound engine in what it spoils: the bits, the messages,
the memory or the bytes that are moved.
"""

import dataclasses
import itertools
import sys
from bisect import insort
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
import torch
from support import cut_models, high_water, live_bytes, meshes

import zerolab
from zerolab import tier
from zerolab.arena import Alloc, Free, replay
from zerolab.arena.allocator import Arena, Hole
from zerolab.checkpointing.blocks import _Run
from zerolab.checkpointing.inputs import KeptCopy
from zerolab.collectives import Comm
from zerolab.optimizer import optimizer as optimizer_module
from zerolab.optimizer.axes import Axes
from zerolab.optimizer.offload import Offload, Parcel
from zerolab.tensor_parallel import RowParallelLinear, TensorParallel
from zerolab.tensor_parallel.group import _Enter, _Leave

for module in (sys.modules[__name__], cut_models, high_water, live_bytes, meshes):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest

# Tensor parallelism. Each is called on every rank, before the model is cut.


def leave_out_f() -> None:
    """Each rank goes on with its own part of the gradient of an input."""
    _Enter.backward = staticmethod(lambda ctx, gradient: (gradient, None, None))


def add_up_gradients_twice() -> None:
    """All-reduce on both sides of a pair: g adds up what is a gradient of the sum already."""

    def broken(ctx, gradient):
        return ctx.parallel.sum(gradient, "gradient", "backward"), None, None

    forward = _Leave.forward
    _Leave.forward = staticmethod(lambda ctx, *args: setattr(ctx, "parallel", args[1]) or forward(ctx, *args))
    _Leave.backward = staticmethod(broken)


def add_the_bias_on_every_rank() -> None:
    def broken(self, x):
        return self.parallel.leave(torch.nn.functional.linear(x, self.weight, self.bias), self.name)

    RowParallelLinear.forward = broken


def average_partial_products() -> None:
    """As the all-reduce of 16-bit gradients does."""
    add_up = TensorParallel.sum
    TensorParallel.sum = lambda self, *args: add_up(self, *args) / self.size


def let_each_rank_draw() -> None:
    """What is not cut starts with other values on each tensor-parallel rank."""
    TensorParallel.copy_from_rank_0 = lambda self, name, values: None


def count_what_is_not_cut_twice() -> None:
    """The norm has the layer norms of every rank."""
    Axes.counts = lambda self, parameter: True


def clip_by_the_norm_of_the_own_part() -> None:
    """Norms are added up over the data-parallel ranks alone."""
    axes_of = optimizer_module.axes_of

    def broken(*args):
        axes = axes_of(*args)
        return dataclasses.replace(axes, comms=axes.comms[:1])

    optimizer_module.axes_of = broken


# Activation checkpointing.


def keep_a_view_of_the_whole() -> None:
    """The part that is kept shares the storage of the whole input."""
    init = KeptCopy.__init__

    def broken(self, tensor, partition, tier):
        init(self, tensor, partition, tier)
        self._copy = partition.part(tensor.detach().flatten())

    KeptCopy.__init__ = broken


def keep_whole_inputs() -> None:
    """P_a is left out: no part is made, and nothing has to be gathered."""
    init = KeptCopy.__init__
    KeptCopy.__init__ = lambda self, tensor, partition, tier: init(self, tensor, None, tier)


def gather_in_forward() -> None:
    """The input is made whole again at once, and kept."""
    init = KeptCopy.__init__

    def broken(self, tensor, partition, tier):
        init(self, tensor, partition, tier)
        self.whole = partition.gather(self._copy, "a checkpointed input", "forward")

    KeptCopy.__init__ = broken


def keep_the_arguments_too() -> None:
    """The parts are kept, and the inputs beside them."""
    call = _Run.__call__

    def broken(self, *devices):
        self.also = self.also if hasattr(self, "also") else self.inputs
        return call(self, *devices)

    _Run.__call__ = broken


def restore_another_rank_s_part() -> None:
    gather = TensorParallel.gather
    TensorParallel.gather = lambda self, part, *args: gather(self, part, *args).roll(1, 0)


# Offload.


def free_nothing() -> None:
    """What is written to the tier stays on the device as well."""

    def broken(self) -> None:
        storages = [s for t in self._tensors() if (s := t.untyped_storage()).nbytes()]
        for storage, nbytes, place in self._placed(storages):
            self._tier.write(place, storage)
            self._away.append((storage, nbytes, place))

    Parcel.leave = broken


def write_nothing_back() -> None:
    """What an update made of the state is thrown away: the tier has that of the start."""
    leave = Parcel.leave

    def broken(self) -> None:
        write = self._tier.write
        if any(self._places.values()):
            self._tier.write = lambda place, storage: None
        leave(self)
        self._tier.write = write

    Parcel.leave = broken


def write_twice() -> None:
    write = tier.Tier.write
    tier.Tier.write = lambda self, *args: (write(self, *args), write(self, *args))[0]


def offload_no_masters() -> None:
    """Optimizer state leaves, and the fp32 masters stay: 8Ψ/N for 12Ψ/N."""
    Offload.take_master = lambda self, unit: None


# Buckets.


def ignore_the_bucket() -> None:
    init = Comm.__init__
    Comm.__init__ = lambda self, *args: (init(self, *args), setattr(self, "bucket_bytes", None))[0]


BITS = "bits"
BETWEEN, DATA_PARALLEL = "messages of tensor-parallel ranks", "messages of data-parallel ranks"
HELD, STATES, SCRATCH = "bytes after forward", "bytes after the step", "scratch"
MOVED = "bytes moved to the disk and back"
REFUSED = r"an input .* of a checkpointed block was not the same on all 2 tensor-parallel ranks"
REFUSED_GRADIENT = r"a step of tensor-parallel ranks, .* has the gradient of .* with the bits"

BROKEN = [
    (leave_out_f, REFUSED_GRADIENT),
    (add_up_gradients_twice, {BITS, BETWEEN}),
    (add_the_bias_on_every_rank, {BITS}),
    (average_partial_products, {BITS}),
    (let_each_rank_draw, REFUSED),
    (count_what_is_not_cut_twice, {BITS}),
    (clip_by_the_norm_of_the_own_part, {BITS, BETWEEN}),
    (keep_a_view_of_the_whole, {HELD}),
    (keep_whole_inputs, {BETWEEN, HELD}),
    (gather_in_forward, {BETWEEN, HELD}),
    (keep_the_arguments_too, {HELD}),
    (restore_another_rank_s_part, {BITS}),
    (free_nothing, {HELD, STATES}),
    (write_nothing_back, {BITS, MOVED}),
    (write_twice, {MOVED}),
    (offload_no_masters, {HELD, STATES, MOVED}),
    (ignore_the_bucket, {SCRATCH}),
]


def observe(spoil: Callable[[], None], folder: Path) -> dict:
    """On a rank: what two steps leave, with everything at once. ``spoil`` is called first."""
    spoil()
    settings = {"offload": "disk", "offload_dir": folder, "bucket_bytes": 64}
    model, optimizer = meshes.cut_and_optimizer(2, 2, 2, precision="mixed", **settings)
    parallel, disk = optimizer.axes.parallel, optimizer.offload.tier
    model.checkpointing = zerolab.Checkpointing(parallel)
    with high_water.HighWater(optimizer) as seen:
        for step in range(2):
            loss = meshes.loss_of(model, meshes.batch(step, 0, optimizer.rank))
            held_bytes = live_bytes.settled_bytes()
            loss.backward()
            norm = optimizer.clip_grad_norm_(0.5).item()
            optimizer.step()
            optimizer.zero_grad()
            del loss
    found = {HELD: held_bytes, STATES: live_bytes.settled_bytes(), SCRATCH: seen.scratch_bytes}
    found |= {BETWEEN: parallel.trace.traffic(1), DATA_PARALLEL: optimizer.trace.traffic(1)}
    found[MOVED] = disk.read_bytes, disk.written_bytes
    values = meshes.values_of(model, optimizer)
    return found | {BITS: (norm, {name: each.tolist() for name, each in values.items()})}


def sound() -> None:
    """Breaks nothing."""


def launched(spoil: Callable[[], None], folder: Path) -> list[dict]:
    return zerolab.launch(observe, 4, spoil, folder, timeout=60)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[dict]:
    """What a sound engine gives on each rank. Other tests compare it with one process and with formulas."""
    return launched(sound, tmp_path_factory.mktemp("disk"))


def test_a_sound_engine_gives_the_same_again(expected: list[dict], tmp_path: Path):
    assert launched(sound, tmp_path) == expected


@pytest.mark.parametrize("spoil, spoiled", BROKEN, ids=[spoil.__name__ for spoil, _ in BROKEN])
def test_a_broken_engine_is_found_out(
    spoil: Callable[[], None], spoiled: set | str, expected: list[dict], tmp_path: Path
):
    if isinstance(spoiled, str):  # by the engine itself
        with pytest.raises(zerolab.WorkerError, match=spoiled):
            launched(spoil, tmp_path)
        return
    found = zip(launched(spoil, tmp_path), expected, strict=True)
    assert {what for ours, sound_ in found for what in ours if ours[what] != sound_[what]} == spoiled


# The arena. The first requests need a hole that is joined of two. Then there are long-lived blocks between
# others, and two holes to choose from: if a small block takes the large one, the last block finds none.

SMALL, LARGE = 64, 640
REQUESTS = [Alloc(0, SMALL), Alloc(1, SMALL), Free(0), Free(1), Alloc(2, 2 * SMALL), Free(2)]
REQUESTS += [Alloc(3, LARGE), Alloc(4, SMALL, True), Alloc(5, SMALL), Alloc(6, SMALL, True)]
REQUESTS += [Free(3), Free(5), Alloc(7, SMALL), Alloc(8, LARGE)]
WAYS = list(itertools.product(("first", "best"), (1, 2)))


def never_join_holes(patch: pytest.MonkeyPatch) -> None:
    def broken(self, address, size_bytes):
        insort(self.holes, Hole(address, address + size_bytes))

    patch.setattr(Arena, "free", broken)


def never_reuse_a_hole(patch: pytest.MonkeyPatch) -> None:
    def broken(self, size_bytes):
        place = self.highest
        self.highest += size_bytes
        return place

    patch.setattr(Arena, "allocate", broken)


def mix_the_regions(patch: pytest.MonkeyPatch) -> None:
    def one(sequence, fit, *rest):
        return dict.fromkeys((True, False), Arena(fit))

    patch.setattr(sys.modules["zerolab.arena.replay"], "_arenas", one)


def take_the_lowest_hole_for_best_fit(patch: pytest.MonkeyPatch) -> None:
    init = Arena.__init__
    patch.setattr(Arena, "__init__", lambda self, fit, *size: init(self, "first", *size))


BROKEN_ARENAS = [
    (never_join_holes, WAYS),
    (never_reuse_a_hole, WAYS),
    (mix_the_regions, [("first", 2)]),
    (take_the_lowest_hole_for_best_fit, [("best", 1)]),
]


@pytest.mark.parametrize("spoil, spoiled", BROKEN_ARENAS, ids=[spoil.__name__ for spoil, _ in BROKEN_ARENAS])
def test_a_broken_arena_is_found_out(spoil: Callable, spoiled: list, monkeypatch: pytest.MonkeyPatch):
    sound = {way: replay(REQUESTS, *way).arena_bytes for way in WAYS}
    spoil(monkeypatch)
    assert [way for way in WAYS if replay(REQUESTS, *way).arena_bytes != sound[way]] == spoiled

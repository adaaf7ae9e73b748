"""Promise: what the other tests show of some lengths, shapes and sizes holds of any.

Hypothesis draws them, the same ones every time. test_formula_properties.py does so with the formulas,
and test_drawn_models.py with whole models.
"""

import itertools
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.examples import always_the_same, draw
from torch import nn

import zerolab
from zerolab import ring
from zerolab.checkpoint import records
from zerolab.collectives import Comm, connect
from zerolab.optimizer import Shard
from zerolab.optimizer.shards import contents, owned_shards
from zerolab.optimizer.slices import cut
from zerolab.precision import PRECISIONS
from zerolab.storages import MemoryMeter
from zerolab.trace import Trace
from zerolab.unit import FlatUnit

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

# One unit: where its parameters lie, how it is cut, and how it is stored.

LAYOUTS = {
    "shapes": st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=8),
    "world_size": st.integers(1, 9),
    "precision": st.sampled_from(sorted(PRECISIONS)),
    "turned": st.booleans(),
}


def parameters_of(shapes: list[tuple], turned: bool = False) -> list[tuple[str, nn.Parameter]]:
    """Parameters of these shapes, each element a number of its own; turned round in memory, if told."""
    found, start = [], 1
    for index, shape in enumerate(shapes):
        stop = start + torch.Size(shape).numel()
        values = torch.arange(start, stop, dtype=torch.float32).view(shape)
        axes = tuple(reversed(range(len(shape))))
        values = values.permute(axes).contiguous().permute(axes) if turned else values
        found.append((f"p{index}", nn.Parameter(values)))
        start = stop
    return found


def shards(unit: FlatUnit) -> list[slice]:
    """What the ranks own of it, by rank."""
    ranks = [SimpleNamespace(world_size=unit.shards, rank=rank) for rank in range(unit.shards)]
    return [Comm.shard_range(rank, unit.padded_numel) for rank in ranks]


@always_the_same
@given(**LAYOUTS)
def test_parameters_lie_apart_aligned_and_unchanged(shapes, world_size, precision, turned):
    named = parameters_of(shapes, turned)
    before = [(parameter.detach().clone(), parameter.stride()) for _, parameter in named]
    unit = FlatUnit("unit", 0, named, world_size, PRECISIONS[precision])
    unit.own(slice(0, unit.padded_numel))
    stop, item = 0, unit.dtype.itemsize
    for span, (_, parameter), (value, strides) in zip(unit.spans, named, before, strict=True):
        assert span.offset >= stop and span.offset * item % 64 == 0
        assert unit.flat[stop : span.offset].count_nonzero() == 0, "padding is zero"
        assert torch.equal(parameter, value.to(unit.dtype)) and parameter.stride() == strides
        assert not parameter.numel() or parameter.data_ptr() == unit.flat[span.offset :].data_ptr()
        stop = span.stop
    assert unit.flat[stop:].count_nonzero() == 0
    assert unit.numel == sum(value.numel() for value, _ in before)
    assert unit.padded_numel * item < unit.numel * item + 64 * (len(shapes) + world_size)


@always_the_same
@given(**LAYOUTS)
def test_shards_tile_the_buffer_and_slices_tile_every_parameter(shapes, world_size, precision, turned):
    """Put together, the ranks' slices are each parameter once, in its order; and the trace says so."""
    stop, slices, said = 0, {f"p{index}": [] for index in range(len(shapes))}, []
    for rank in range(world_size):
        named = parameters_of(shapes, turned)
        unit = FlatUnit("unit", 0, named, world_size, PRECISIONS[precision])
        owned = shards(unit)[rank]
        unit.own(owned)
        assert owned.start == stop and owned.start * unit.dtype.itemsize % 64 == 0
        stop = owned.stop
        for each in cut([unit], [parameter for _, parameter in named], lambda _: 0.0):
            slices[each.span.name].append(each.tensor.detach())
        said += unit.describe(owned)
    assert stop == unit.padded_numel
    for name, parameter in parameters_of(shapes, turned):
        in_memory = parameter.detach().as_strided((parameter.numel(),), (1,))
        assert torch.equal(torch.cat(slices[name]), in_memory)
        ends = [map(int, part) for part in re.findall(rf"{name}\[(\d+):(\d+)\]", " ".join(said))]
        assert [at for start, end in ends for at in range(start, end)] == list(range(parameter.numel()))


@always_the_same
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    writers=st.integers(1, 9),
    readers=st.integers(1, 9),
    most_numel=st.integers(1, 60),
)
def test_what_n_ranks_store_m_ranks_read(tmp_path_factory, lengths, writers, readers, most_numel):
    """Stored shards, cut small, go into the slices of another layout."""
    folder, stored = tmp_path_factory.mktemp("records"), []
    with patch.object(records, "MOST_NUMEL", most_numel):
        for rank, shards in enumerate(held(lengths, writers)):
            stored += records.write(folder / str(rank), keyed(shards), {})
    assert all(0 < record.stop - record.start <= most_numel for record in stored)
    assert sum(record.stop - record.start for record in stored) == sum(lengths)
    wanted = list(itertools.chain.from_iterable(held(lengths, readers)))
    for shard in wanted:
        shard.values.detach().zero_()
    by_key = {key: [record for record in stored if record.key == key] for key, _ in keyed(wanted)}
    records.fill(folder, by_key, keyed(wanted))
    start = 1
    for index, length in enumerate(lengths):
        parts = [shard.values for shard in wanted if shard.name == f"p{index}"]
        assert torch.equal(torch.cat(parts), torch.arange(float(start), start + length))
        start += length


def keyed(shards: list[Shard]) -> list[tuple[str, Shard]]:
    return [(shard.name, shard) for shard in shards]


def held(lengths: list[int], world_size: int) -> Iterator[list[Shard]]:
    """What each rank holds of parameters of these lengths, whose elements count from 1."""
    for rank in range(world_size):
        unit = FlatUnit("unit", 0, parameters_of([(n,) for n in lengths]), world_size, PRECISIONS["fp32"])
        unit.own(shards(unit)[rank])
        yield [shard for _, _, shard in owned_shards([unit], [], {}, contents)]


# Collectives, the ring's and the engine's.

LENGTHS = draw(st.lists(st.integers(0, 3000), min_size=30, max_size=30, unique=True), 2)[-1]


@pytest.fixture
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def numbers(rank: int, numel: int, whole: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * rank + numel)
    drawn = torch.randn(numel, generator=generator)
    return (10 * drawn).round() if whole else drawn


def go_round(lengths: list[int]) -> list[str]:
    """On a rank: each collective on each length; those that left something wrong."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    comm, wrong = connect(None, torch.device("cpu"), Trace(), MemoryMeter()), []
    for index, numel in enumerate(lengths):
        mine = ring.chunks(numel, world_size)[rank]
        every = [numbers(r, numel, whole=True) for r in range(world_size)]
        total = sum(every[1:], every[0].clone())
        joined = torch.cat([e[c] for e, c in zip(every, ring.chunks(numel, world_size), strict=True)])
        flats = [numbers(r, numel * world_size, whole=False) for r in range(world_size)]
        in_order = sum(flats[1:], flats[0].clone())
        shards = torch.cat([comm.own(flat, r) for r, flat in enumerate(flats)])
        unit = SimpleNamespace(name="unit", index=index, numel=numel, cuts=None, describe=lambda piece: ())
        rings = {name: every[rank].clone() for name in ("reduce_scatter", "all_gather", "all_reduce")}
        ours = {name: flats[rank].clone() for name in rings}
        for name in rings:
            getattr(ring, name)(rings[name])
            getattr(comm, name)(ours[name], unit).wait()
        right = {
            "the ring's reduce_scatter": torch.equal(rings["reduce_scatter"][mine], total[mine]),
            "the ring's all_gather": torch.equal(rings["all_gather"], joined),
            "the ring's all_reduce": torch.equal(rings["all_reduce"], total),
            "reduce_scatter": torch.equal(comm.own(ours["reduce_scatter"]), comm.own(in_order)),
            "all_gather": torch.equal(ours["all_gather"], shards),
            "all_reduce": torch.equal(ours["all_reduce"], in_order),
        }
        wrong += [f"{name} of {numel} on rank {rank}" for name, is_right in right.items() if not is_right]
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_collectives_of_any_length(world_size: int, one_thread):
    """The engine's sums are those in rank order, to the last bit."""
    assert zerolab.launch(go_round, world_size, LENGTHS, backend="gloo", timeout=60) == [[]] * world_size

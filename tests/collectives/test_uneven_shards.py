"""Collectives over shards that are not equal, as where each rank owns whole parameters of a unit."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from support import hostile
from support.hostile import hostile_backend

import zerolab
from zerolab.collectives import Comm, connect, direct
from zerolab.storages import MemoryMeter
from zerolab.trace import Trace

for module in (sys.modules[__name__], hostile):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest

WORLD_SIZE = 3
CUTS = {
    "uneven": [0, 7, 9, 30],
    "one rank owns nothing": [0, 0, 16, 30],
    "two ranks own nothing": [0, 0, 30, 30],
    "nobody owns anything": [0, 0, 0, 0],
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def summed(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """In rank order; 16 bits in fp32, rounded once."""
    every = [values(rank, numel, dtype) for rank in range(WORLD_SIZE)]
    if dtype == torch.float32:
        return every[0] + every[1] + every[2]
    return (every[0].float() + every[1].float() + every[2].float()).to(dtype)


def comm_here(bucket_bytes: int | None) -> Comm:
    return connect(None, torch.device("cpu"), Trace(), MemoryMeter(), bucket_bytes)


def run_all(comm: Comm, cuts: list[int], dtype: torch.dtype) -> dict[str, bool | int]:
    """What is wrong on a rank after each collective, and the bytes that it sent."""
    numel, own = cuts[-1], slice(cuts[comm.rank], cuts[comm.rank + 1])
    unit = SimpleNamespace(name="unit", index=3, numel=numel, cuts=cuts, describe=lambda part: ())
    expected, found = summed(numel, dtype), {}
    flat = values(comm.rank, numel, dtype)
    comm.reduce_scatter(flat, unit).wait()
    found["reduce_scatter"] = torch.equal(flat[own], expected[own])
    gathered = torch.full((numel,), torch.nan, dtype=dtype)
    gathered[own] = expected[own]
    comm.all_gather(gathered, unit).wait()
    found["all_gather"] = torch.equal(gathered, expected)
    flat = values(comm.rank, numel, dtype)
    comm.all_reduce(flat, unit).wait()
    found["all_reduce"] = torch.equal(flat, expected)
    return found | {f"{event.op} bytes": event.wire_bytes for event in comm.trace.events}


def on_gloo(cuts: list[int], dtype: torch.dtype, bucket_bytes: int | None, in_rounds_from: int) -> dict:
    direct.IN_ROUNDS_FROM = in_rounds_from
    return run_all(comm_here(bucket_bytes), cuts, dtype)


@pytest.mark.parametrize("in_rounds_from", [1, 16], ids=["all in rounds", "some at once"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_sums_in_rank_order_and_bytes_in_rounds(cuts: list[int], in_rounds_from: int):
    check(cuts, torch.float32, None, in_rounds_from)


@pytest.mark.parametrize("bucket_bytes", [None, 8, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_sums_in_rank_order_and_bytes(cuts: list[int], dtype: torch.dtype, bucket_bytes: int | None):
    check(cuts, dtype, bucket_bytes, direct.IN_ROUNDS_FROM)


def check(cuts: list[int], dtype: torch.dtype, bucket_bytes: int | None, in_rounds_from: int) -> None:
    asked = (cuts, dtype, bucket_bytes, in_rounds_from)
    ranks = zerolab.launch(on_gloo, WORLD_SIZE, *asked, backend="gloo", timeout=60)
    for found, (start, stop) in zip(ranks, pairwise(cuts), strict=True):
        reduce_bytes = (cuts[-1] - (stop - start)) * dtype.itemsize
        gather_bytes = (stop - start) * (WORLD_SIZE - 1) * dtype.itemsize
        assert found == {
            "reduce_scatter": True,
            "all_gather": True,
            "all_reduce": True,
            "reduce_scatter bytes": reduce_bytes,
            "all_gather bytes": gather_bytes,
            "all_reduce bytes": reduce_bytes + gather_bytes,
        }


def on_the_hostile_backend(cuts: list[int], deterministic: bool) -> dict:
    torch.use_deterministic_algorithms(deterministic)
    with hostile_backend():
        return run_all(comm_here(None), cuts, torch.float32)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_native_collectives(cuts: list[int], deterministic: bool):
    for found in zerolab.launch(
        on_the_hostile_backend, WORLD_SIZE, cuts, deterministic, backend="gloo", timeout=60
    ):
        assert [found[name] for name in ("reduce_scatter", "all_gather", "all_reduce")] == [True] * 3


def scratch_peak(cuts: list[int], bucket_bytes: int | None) -> int:
    comm = comm_here(bucket_bytes)
    run_all(comm, cuts, torch.float32)
    return comm.meter.peak_bytes


@pytest.mark.parametrize("bucket_bytes, rows", [(None, [7, 2, 21]), (20, [5, 2, 5])])
def test_scratch_is_a_row_for_each_other_rank(bucket_bytes: int | None, rows: list[int]):
    found = zerolab.launch(scratch_peak, WORLD_SIZE, CUTS["uneven"], bucket_bytes, backend="gloo", timeout=60)
    assert found == [(WORLD_SIZE - 1) * 4 * row for row in rows]

"""Promise: with ``bucket_bytes`` scratch does not grow with a unit; bits, bytes and events stay the same."""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import cloudpickle
import pytest
import torch
from support import subjects
from support.high_water import HighWater
from support.long import long_where

import zerolab
from zerolab.collectives import direct

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

STAGES = (0, 1, 2, 3)
STEPS = 2
CASES = [  # model, precision, and buckets, also of odd sizes, of which no shard is a multiple
    ("tiny", "fp32", (4, 7)),  # one element at a time
    ("ladder", "mixed", (38, 2**20)),  # the second is more than there is
    ("patchwork", "fp32", (90,)),  # also parameters that nobody uses, or some ranks
    ("gpt", "fp32", (999,)),
    ("gpt", "mixed_fp32_grads", (1000,)),
]
TIMEOUT_SECONDS = 60  # against a hang: no test is meant to come near it


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# Bits, bytes on the wire, events.


def outcome(subject: str, stage: int, **settings) -> tuple[subjects.Run, list[tuple]]:
    """What a training leaves on this rank, and its events without their times."""
    run, optimizer = subjects.train_sharded(subject, stage, torch.optim.Adam, STEPS, lr=0.02, **settings)
    numbers = "op", "unit", "phase", "shape", "slices", "logical_bytes", "wire_bytes", "control_bytes"
    events = [event for step in range(STEPS) for event in optimizer.trace.step(step)]
    return run, [tuple(getattr(event, name) for name in numbers) for event in events]


def compare_buckets() -> list[str]:
    """On a rank: train each case with and without buckets at each stage; where the two differ."""
    found = []
    for stage, (subject, precision, buckets) in itertools.product(STAGES, CASES):
        whole, events = outcome(subject, stage, precision=precision)
        for bucket_bytes in buckets:
            ours, our_events = outcome(subject, stage, precision=precision, bucket_bytes=bucket_bytes)
            where = f"{subject} at stage {stage} in {precision} with buckets of {bucket_bytes}"
            found += [f"bits of {where}"] * (not subjects.same(ours, whole))
            found += [f"losses of {where}"] * (ours.losses != whole.losses)
            found += [f"events of {where}"] * (our_events != events)
    return found


FOUR = "two and three ranks do the same"


@pytest.mark.parametrize("world_size", long_where(lambda each: each == 4, FOUR, [1, 2, 3, 4]))
def test_buckets_change_no_bit_no_byte_and_no_event(world_size: int):
    assert zerolab.launch(compare_buckets, world_size, timeout=TIMEOUT_SECONDS) == [[]] * world_size


# Memory.


def scratch_peaks(
    stages: tuple[int, ...], widths: list[int], settings: list[dict], depths: tuple[int, ...] = (5,)
) -> list[tuple[int, int]]:
    """The most scratch at once, and how much of the whole peak the meter missed, of each combination."""
    found = []
    for stage, width, depth, each in itertools.product(stages, widths, depths, settings):
        model = subjects.Ladder(depth=depth, width=width)
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1, **each)
        with HighWater(optimizer) as seen:
            model(torch.ones(2, width), torch.zeros(2, width)).backward()
            optimizer.step()
        found.append((seen.scratch_bytes, seen.total_bytes - optimizer.meter.peak_bytes))
    return found


def launched(world_size: int, *args) -> list:
    return zerolab.launch(scratch_peaks, world_size, *args, timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize("world_size", long_where(lambda each: each == 4, FOUR, [2, 3, 4]))
def test_scratch_is_a_bucket_for_each_other_rank_and_reduction(world_size: int):
    """In real storages: (1 + in flight) (N-1) buckets, and the meter saw the peak that they are part of."""
    combinations = list(itertools.product((40, 64), (0, 1, 2)))
    settings = [{"bucket_bytes": size, "reduces_in_flight": many} for size, many in combinations]
    expected = [((1 + many) * (world_size - 1) * size, 0) for size, many in combinations]
    assert launched(world_size, STAGES, [16], settings) == [expected * len(STAGES)] * world_size


def test_scratch_does_not_grow_with_the_width_of_a_unit():
    """Without a bucket it does: with its square."""
    settings = [{"bucket_bytes": 4096}, {"bucket_bytes": None}]
    for (narrow, _), (whole_narrow, _), (wide, _), (whole_wide, _) in launched(2, (2,), [64, 512], settings):
        assert narrow == wide == 2 * 4096
        assert (whole_narrow, whole_wide) == (2 * 4 * 64**2 / 2, 2 * 4 * 512**2 / 2)


def test_scratch_does_not_grow_with_the_depth_of_a_model_but_where_it_is_one_unit():
    """Units bound it: two shards of one layer. With units=[] it is half of all gradients, 2Ψ bytes."""
    depths, layer = (4, 16, 64), 16 * 16
    for found in launched(2, (2,), [16], [{}, {"units": []}], depths):
        by_unit, as_one = found[::2], found[1::2]
        assert [scratch for scratch, _ in by_unit] == [2 * 4 * layer / 2] * 3
        assert [scratch for scratch, _ in as_one] == [2 * depth * layer for depth in depths]


def test_a_bucket_larger_than_the_shard_takes_no_more_than_the_shard():
    assert launched(2, (2,), [16], [{"bucket_bytes": 2**30}]) == [[(2 * 4 * 16**2 / 2, 0)]] * 2


@contextmanager
def additions(numels: list[int]) -> Iterator[None]:
    """Note how many elements are added up at a time; in 16 bits as many are held in fp32."""
    add = direct.reduce_in_rank_order

    def noted(own: torch.Tensor, *args) -> None:
        numels.append(own.numel())
        add(own, *args)

    direct.reduce_in_rank_order = noted
    try:
        yield
    finally:
        direct.reduce_in_rank_order = add


def largest_sum(bucket_bytes: int) -> tuple[int, int]:
    """In mixed precision: the most bytes in fp32 that are added up at a time, and the most scratch."""
    model, numels = subjects.Ladder(), []
    optimizer = zerolab.ZeroOptimizer(
        model, torch.optim.SGD, lr=0.1, precision="mixed", bucket_bytes=bucket_bytes, reduces_in_flight=0
    )
    with additions(numels), HighWater(optimizer) as seen:
        model(*subjects.vectors(0, optimizer.rank)).backward()
        optimizer.step()
    return 4 * max(numels), seen.scratch_bytes


def test_16_bits_are_added_up_in_fp32_within_the_bucket():
    """Messages of 16 bits take half of it, because their elements have to fit into it in fp32."""
    for found in zerolab.launch(largest_sum, 3, 64, timeout=TIMEOUT_SECONDS):
        assert found == (64, 2 * 64 / 2)

"""Reductions in several rounds of messages, one for each part of a shard that fits into the bucket."""

import sys
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from support import hostile
from support.hostile import hostile_backend
from torch import nn

import zerolab
from zerolab.collectives import Comm, Work, connect, direct
from zerolab.storages import MemoryMeter
from zerolab.trace import Trace

for module in (sys.modules[__name__], hostile):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest

TIMEOUT_SECONDS = 60  # against a hang: no test is meant to come near it
NUMEL = 12 * 25


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def comm_here(bucket_bytes: int | None) -> Comm:
    return connect(None, torch.device("cpu"), Trace(), MemoryMeter(), bucket_bytes)


def subject(index: int, numel: int = NUMEL) -> SimpleNamespace:
    return SimpleNamespace(
        name=f"unit {index}", index=index, numel=numel, cuts=None, describe=lambda part: ()
    )


def values(rank: int, index: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * rank + index))


def reduced(index: int, world_size: int, numel: int = NUMEL) -> torch.Tensor:
    """What every rank's values add up to in rank order."""
    every = [values(rank, index, numel) for rank in range(world_size)]
    return sum(every[1:], every[0].clone())


def submit_in_rhythms(op: str, bucket_bytes: int | None, in_rounds_from: int, count: int) -> list[int]:
    """Reduce ``count`` units of equal size; returns those that came out wrong.

    Each rank has as many under way as its number says, and one. So while one rank waits for the first
    reduction, another has submitted several.
    """
    direct.IN_ROUNDS_FROM = in_rounds_from
    comm, under_way, wrong = comm_here(bucket_bytes), [], []
    result = comm.own if op == "reduce_scatter" else torch.clone

    def finish(index: int, flat: torch.Tensor, work: Work) -> None:
        work.wait()
        if not torch.equal(result(flat), result(reduced(index, comm.world_size))):
            wrong.append(index)

    for index in range(count):
        flat = values(comm.rank, index)
        under_way.append((index, flat, getattr(comm, op)(flat, subject(index))))
        while len(under_way) > comm.rank:
            finish(*under_way.pop(0))
    for each in under_way:
        finish(*each)
    return wrong


@pytest.mark.parametrize("world_size, bucket_bytes", [(2, 4), (3, 40), (4, 36), (4, 7)])
def test_ranks_with_other_numbers_of_reductions_under_way_do_not_wait_for_each_other(
    world_size: int, bucket_bytes: int
):
    """Three rounds each and more. It would hang if a round of a younger one came before the oldest's next.

    All units have one size, so a part that was taken for another's would be seen in the sums.
    """
    assert wrong_on(world_size, "reduce_scatter", bucket_bytes, direct.IN_ROUNDS_FROM) == [[]] * world_size


def wrong_on(world_size: int, *asked) -> list[list[int]]:
    return zerolab.launch(submit_in_rhythms, world_size, *asked, 8, backend="gloo", timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize("op", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_same_where_messages_to_each_rank_go_in_turn(world_size: int, op: str):
    assert wrong_on(world_size, op, None, 1) == [[]] * world_size


class Wide(nn.Module):
    """Its shards on three ranks are larger than `IN_ROUNDS_FROM`."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 700))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


@pytest.mark.parametrize("stage", [0, 3])
def test_training_with_large_messages_has_the_bits_of_one_process(stage: int):
    assert direct.IN_ROUNDS_FROM < 4 * 700 * 700 / 3
    inputs = lambda step, rank: values(rank, step, 4 * 700).view(4, 700)
    assert zerolab.verify(stage, 3, Wide, inputs).ok


def most_under_way(in_rounds_from: int) -> int:
    """How many messages a rank sends at the same time in a gather."""
    direct.IN_ROUNDS_FROM = in_rounds_from
    comm, posted = comm_here(None), []
    post, arrival = comm.control.post, direct.arrival
    waited: list[int] = []

    def counted_post(*args):
        posted.append(1)
        return post(*args)

    def counted_arrival(works):
        waited.append(len(posted))
        posted.clear()
        return arrival(works)

    comm.control.post, direct.arrival = counted_post, counted_arrival
    comm.all_gather(values(comm.rank, 0), subject(0)).wait()
    return max(waited)


@pytest.mark.parametrize("shard_bytes, together", [(NUMEL, 1), (NUMEL + 4, 3)])
def test_messages_from_this_size_on_go_one_after_the_other(shard_bytes: int, together: int):
    """A shard has NUMEL elements of 4 bytes on 4 ranks."""
    assert (
        zerolab.launch(most_under_way, 4, shard_bytes, backend="gloo", timeout=TIMEOUT_SECONDS)
        == [together] * 4
    )


def reduce_each(numels: list[int], bucket_bytes: int) -> list[tuple[int, str]]:
    """Reduce tensors of these lengths, the same unit each time; those that came out wrong."""
    comm, wrong = comm_here(bucket_bytes), []
    for numel in numels:
        for name in ("reduce_scatter", "all_reduce"):
            flat, expected = values(comm.rank, 0, numel), reduced(0, comm.world_size, numel)
            getattr(comm, name)(flat, subject(0, numel)).wait()
            part = comm.shard_range(numel) if name == "reduce_scatter" else slice(None)
            event = comm.trace.events[-1]
            passes = 1 if name == "reduce_scatter" else 2
            sent = passes * 4 * numel * (comm.world_size - 1) // comm.world_size
            if not torch.equal(flat[part], expected[part]) or event.wire_bytes != sent:
                wrong.append((numel, name))
    return wrong


@pytest.mark.parametrize("bucket_bytes", [4, 11, 12, 4096])
def test_shards_that_the_bucket_divides_and_others(bucket_bytes: int):
    """Also those that hold nothing."""
    lengths = [0, 3, 6, 9, 27, 30]
    assert (
        zerolab.launch(reduce_each, 3, lengths, bucket_bytes, backend="gloo", timeout=TIMEOUT_SECONDS)
        == [[]] * 3
    )


# NCCL.


def native_scratch(deterministic_from: str) -> tuple[str, int]:
    """Reduce by the native collectives with a bucket: what is said, and the scratch.

    Algorithms are deterministic from the start, from the reduction on, or never.
    """
    with hostile_backend():
        torch.use_deterministic_algorithms(deterministic_from == "the start")
        try:
            comm = comm_here(64)
            torch.use_deterministic_algorithms(deterministic_from == "the reduction")
            comm.reduce_scatter(values(comm.rank, 0), subject(0)).wait()
        except ValueError as error:
            return str(error), 0
    return "", comm.meter.peak_bytes


def test_native_reductions_have_no_scratch_to_bound():
    assert (
        zerolab.launch(native_scratch, 2, "never", backend="gloo", timeout=TIMEOUT_SECONDS) == [("", 0)] * 2
    )


@pytest.mark.parametrize("deterministic_from", ["the start", "the reduction"])
def test_deterministic_ones_do_and_refuse_the_bucket(deterministic_from: str):
    for said, _ in zerolab.launch(
        native_scratch, 2, deterministic_from, backend="gloo", timeout=TIMEOUT_SECONDS
    ):
        assert (
            said.startswith("bucket_bytes is 64, and with deterministic algorithms") and "leave out" in said
        )

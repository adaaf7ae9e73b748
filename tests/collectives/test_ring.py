"""Promise: the ring is right for any length, and moves (N-1)/N of the payload each way."""

import functools
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import zerolab
from zerolab import ring

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

WORLD_SIZES = (1, 2, 3, 4)
COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)


def lengths(world_size: int) -> list[int]:
    """Empty, shorter than the ring, as long, and one more or less than a multiple of it."""
    return sorted(
        {0, 1, world_size - 1, world_size, world_size + 1, 5 * world_size - 1, 5 * world_size + 1, 64}
    )


def payload(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sum is exact in every dtype and whatever the order."""
    return (torch.arange(numel) * 7 % 11 + 3 * rank).to(dtype)


def go_round(cases: list[tuple[torch.dtype, int]]) -> list[dict]:
    """Each collective on each payload; what it left, what on_step said, what was handed to the network."""
    posted, batch = [], dist.batch_isend_irecv

    def counted(messages: list):
        posted.append([(message.op.__name__, message.peer, message.tensor.nbytes) for message in messages])
        return batch(messages)

    dist.batch_isend_irecv = counted
    found = []
    for dtype, numel in cases:
        for name in COLLECTIVES:
            posted.clear()
            left, steps = call(name, payload(dist.get_rank(), numel, dtype))
            found.append({"name": name, "numel": numel, "left": left, "steps": steps, "posted": list(posted)})
    return found


def call(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, list]:
    """One collective; what it left of the tensor, and its rounds."""
    steps = []
    own = ring.chunks(tensor.numel(), dist.get_world_size())[dist.get_rank()]
    if name == "all_gather":
        tensor = torch.zeros_like(tensor).index_copy_(0, torch.arange(own.start, own.stop), tensor[own])
    result = getattr(ring, name)(tensor, on_step=lambda *step: steps.append(step))
    if name == "reduce_scatter":
        assert result.data_ptr() == tensor[own].data_ptr(), "the chunk is a view, not a copy"
        tensor = result.clone()
    return tensor, steps


@functools.cache
def rounds(world_size: int) -> list[list[dict]]:
    """By rank: every dtype at one uneven length, and every length in float32."""
    cases = [(torch.float32, numel) for numel in lengths(world_size)]
    cases += [(dtype, 3 * world_size + 1) for dtype in DTYPES]
    return zerolab.launch(go_round, world_size, cases)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_any_length_and_dtype(world_size: int):
    for rank, found in enumerate(rounds(world_size)):
        assert len(found) == len(COLLECTIVES) * (len(lengths(world_size)) + len(DTYPES))
        for each in found:
            dtype, pieces = each["left"].dtype, ring.chunks(each["numel"], world_size)
            everybodys = [payload(r, each["numel"], dtype) for r in range(world_size)]
            total = torch.stack([t.long() for t in everybodys]).sum(0).to(dtype)
            gathered = torch.cat([t[piece] for t, piece in zip(everybodys, pieces, strict=True)])
            expected = {"reduce_scatter": total[pieces[rank]], "all_gather": gathered, "all_reduce": total}
            assert torch.equal(each["left"], expected[each["name"]]), (each["name"], each["numel"], dtype)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_each_rank_moves_all_but_one_chunk_each_way(world_size: int):
    """(N-1)/N where N divides the length; else the chunks differ by one element, and so do the ranks."""
    for found in rounds(world_size):
        for each in found:
            payload_bytes, item = each["numel"] * each["left"].element_size(), each["left"].element_size()
            times = 2 if each["name"] == "all_reduce" else 1
            share = times * payload_bytes * (world_size - 1) / world_size
            sent = sum(n for messages in each["posted"] for op, _, n in messages if op == "isend")
            received = sum(n for messages in each["posted"] for op, _, n in messages if op == "irecv")
            assert sent == sum(bytes_sent for *_, bytes_sent in each["steps"])
            for moved in (sent, received):
                assert abs(moved - share) < times * item
                assert each["numel"] % world_size or moved == share


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_rank_talks_to_its_neighbours_only_one_chunk_at_a_time(world_size: int):
    for rank, found in enumerate(rounds(world_size)):
        neighbours = {("isend", (rank + 1) % world_size), ("irecv", (rank - 1) % world_size)}
        for each in found:
            chunk_bytes = -(-each["numel"] // world_size) * each["left"].element_size()
            for messages in each["posted"]:
                assert {(op, peer) for op, peer, _ in messages} <= neighbours
                assert all(0 < nbytes <= chunk_bytes for *_, nbytes in messages)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_chunk_goes_round_once(world_size: int):
    """What a rank receives it sends in the next round; its own chunk comes home last, or leaves first."""
    for rank, found in enumerate(rounds(world_size)):
        for each in (each for each in found if each["name"] != "all_reduce"):
            sent, received = [s[1] for s in each["steps"]], [s[2] for s in each["steps"]]
            assert [s[0] for s in each["steps"]] == list(range(world_size - 1))
            assert sent[1:] == received[:-1]
            others = set(range(world_size)) - {rank}
            if each["name"] == "reduce_scatter" and world_size > 1:
                assert received[-1] == rank and set(sent) == others
            elif world_size > 1:
                assert sent[0] == rank and set(received) == others


def test_a_sum_of_real_numbers_is_the_same_on_every_rank_and_near_the_exact_one():
    def reduce() -> tuple:
        mine = torch.randn(1001, generator=torch.Generator().manual_seed(dist.get_rank()))
        total = mine.clone()
        ring.all_reduce(total)
        return mine, total

    results = zerolab.launch(reduce, 3)
    exact = sum(mine.double() for mine, _ in results)
    assert all(torch.equal(total, results[0][1]) for _, total in results)
    torch.testing.assert_close(results[0][1].double(), exact, rtol=1e-5, atol=1e-6)


def test_a_ring_of_some_of_the_ranks():
    def reduce() -> torch.Tensor:
        group = dist.new_group([2, 0])
        mine = payload(dist.get_rank(), 7, torch.int64)
        if dist.get_rank() != 1:
            ring.all_reduce(mine, group)
        return mine

    first, second, third = zerolab.launch(reduce, 3)
    total = payload(0, 7, torch.int64) + payload(2, 7, torch.int64)
    assert torch.equal(first, total) and torch.equal(third, total)
    assert torch.equal(second, payload(1, 7, torch.int64))


@given(numel=st.integers(0, 10_000), world_size=st.integers(1, 300))
def test_chunks_leave_nothing_out_and_differ_by_one_at_most(numel: int, world_size: int):
    pieces = ring.chunks(numel, world_size)
    assert len(pieces) == world_size
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == numel
    sizes = [piece.stop - piece.start for piece in pieces]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("numel", "world_size", "says"),
    [
        (-1, 2, "numel is -1; it must be a whole number from 0"),
        (4, 0, "world_size is 0; it must be a whole number from 1"),
        (4, -1, "world_size is -1; it must be a whole number from 1"),
    ],
)
def test_what_cannot_be_cut_is_refused(numel: int, world_size: int, says: str):
    with pytest.raises(ValueError, match=says):
        ring.chunks(numel, world_size)


@pytest.mark.parametrize(
    ("numel", "says"),
    [
        (torch.ones(4), r"numel is tensor\(\[1., 1., 1., 1.\]\), of type Tensor; give an int, 0 or more"),
        ("4", "numel is '4', of type str; give an int, 0 or more"),
        (4.0, "numel is 4.0, of type float; give an int, 0 or more"),
    ],
)
def test_a_number_of_elements_is_an_int(numel, says: str):
    with pytest.raises(TypeError, match=says):
        ring.chunks(numel, 2)


@pytest.mark.parametrize("tensor", [torch.zeros(2, 2), torch.zeros(6)[::2], torch.tensor(1.0)])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_tensor_that_is_no_line_is_refused(name: str, tensor: torch.Tensor):
    with pytest.raises(ValueError, match=r"one contiguous dimension.*pass tensor.contiguous\(\).view\(-1\)"):
        getattr(ring, name)(tensor)

"""Promise: a step's allocations are recorded as they happen, and replayed as textbook allocators would."""

import gc
import itertools
import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT
from support.examples import always_the_same
from support.live_bytes import live_bytes
from support.long import long_where
from torch.utils.checkpoint import checkpoint

from zerolab import models
from zerolab.arena import Alloc, Arena, Free, record, replay


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take far longer than such small models do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The allocators, by hand. Sizes are in bytes and addresses are not aligned.


def requests(*sizes: int, long_lived: tuple[int, ...] = ()) -> list:
    """A negative size -n frees block n-1; block numbers count from 0."""
    numbers = itertools.count()
    return [
        Free(-size - 1) if size < 0 else Alloc(block := next(numbers), size, block in long_lived)
        for size in sizes
    ]


def needs(sequence: list, fit: str, regions: int = 1, **settings) -> tuple[int, int]:
    found = replay(sequence, fit, regions, alignment=1, **settings)
    return found.peak_bytes, found.arena_bytes


TWO_HOLES = requests(8, 1, 4, 1, -1, -3)  # 0 to 8, and 9 to 13
EQUAL_TO_THE_SECOND = [*TWO_HOLES, Alloc(4, 4), Alloc(5, 8)]
SMALL_REMAINDERS = [*requests(6, 1, 5, 1, -1, -3), Alloc(4, 4), Alloc(5, 5), Alloc(6, 2)]


@pytest.mark.parametrize(
    "sequence, first, best",
    [
        ([], (0, 0), (0, 0)),
        (requests(3, 4, 5), (12, 12), (12, 12)),
        (requests(5, -1, 5, -2, 5), (5, 5), (5, 5)),  # what is free is taken again
        (requests(2, 3, 1, -1, -2, 5), (6, 6), (6, 6)),  # a hole joins the one below it
        (requests(2, 3, 1, -2, -1, 5), (6, 6), (6, 6)),  # and the one above
        (requests(2, 3, 4, 1, -1, -3, -2, 9), (10, 10), (10, 10)),  # and both
        (requests(2, 1, 2, 1, -1, -3, 3), (6, 9), (6, 9)),  # holes that do not touch are not joined
        (EQUAL_TO_THE_SECOND, (14, 22), (14, 14)),
        (SMALL_REMAINDERS, (13, 13), (13, 15)),
    ],
)
def test_known_sequences(sequence: list, first: tuple, best: tuple):
    assert (needs(sequence, "first"), needs(sequence, "best")) == (first, best)


GROWING = requests(4, 1, -1, 5, 1, -3, 6, 1, -5, 6, long_lived=(1, 3, 5))
"""Three layers keep one byte each, as a checkpoint, and need some more for a moment."""


def test_a_region_of_their_own_keeps_long_lived_blocks_from_cutting_up_the_rest():
    """The checkpoints go into the holes, which are then too small for the next layer."""
    assert needs(GROWING, "first") == (9, 11)
    assert needs(GROWING, "first", regions=2) == (9, 3 + 6)
    assert replay(GROWING, regions=2, alignment=1).excess_percent == 0
    assert replay(GROWING, regions=1, alignment=1).excess_percent == pytest.approx(100 * 2 / 9)


@pytest.mark.parametrize(
    "size_bytes, failure, peak_bytes",
    [(11, None, 9), (10, (Alloc(4, 6), 8, 5), 7), (9, (Alloc(2, 5), 8, 4), 5)],
)
def test_an_arena_of_a_fixed_size_says_what_did_not_fit(
    size_bytes: int, failure: tuple | None, peak_bytes: int
):
    """More bytes are free than are asked for. The peak is that of the blocks that did fit."""
    found = replay(GROWING, size_bytes=size_bytes, alignment=1)
    assert (found.failure, found.peak_bytes) == (failure, peak_bytes)


@pytest.mark.parametrize("size_bytes", [10, math.inf])
def test_best_fit_takes_the_upper_end_last_of_any_size(size_bytes: float):
    """Of 6 free bytes below and 3 at the end, else it would take the 3."""
    arena = Arena("best", size_bytes)
    assert [arena.allocate(6), arena.allocate(1)] == [0, 6]
    arena.free(0, 6)
    assert [arena.allocate(2), arena.allocate(5)] == [0, None if size_bytes == 10 else 7]


def test_two_regions_share_a_fixed_size():
    failure = lambda size_bytes: replay(GROWING, regions=2, size_bytes=size_bytes, alignment=1).failure
    assert failure(9) is None
    assert failure(8) == (Alloc(4, 6), 5, 5)
    assert failure(2) == (Alloc(0, 4), 0, 0)


def test_sizes_are_rounded_up_to_the_alignment():
    sequence = requests(1, 64, 65)
    assert [replay(sequence, alignment=each).arena_bytes for each in (1, 64, 512)] == [130, 256, 1536]
    assert replay(sequence).peak_bytes == 130, "as they were asked for"
    assert replay(sequence).arena_bytes == 256, "torch's by default"
    assert replay(requests(1, 1, -1, 64)).arena_bytes == 128, "what is freed is as large as what was taken"


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"fit": "worst"}, "fit is 'worst': choose from 'first', 'best'"),
        ({"regions": 3}, "regions is 3: choose from 1, 2"),
        ({"regions": True}, "regions is True: choose from 1, 2"),
        ({"alignment": 0}, "alignment is 0: pass a whole number of 1 or more"),
        ({"alignment": 0.5}, "alignment is 0.5: pass"),
        ({"alignment": None}, "alignment is None: pass"),
        ({"size_bytes": -1}, "size_bytes is -1: pass"),
        ({"size_bytes": True}, "size_bytes is True: pass"),
        ({"sequence": [Free(0)]}, r"Free\(block=0\) is of a block that does not live"),
        ({"sequence": requests(1, -1, -1)}, r"Free\(block=0\) is of a block that does not live"),
        ({"sequence": [Alloc(0, 1), Alloc(0, 2)]}, r"Alloc\(block=0, .* was there before: number blocks"),
        ({"sequence": [Alloc(0, 0)]}, r"Alloc\(block=0, size_bytes=0.* is empty"),
    ],
)
def test_what_makes_no_sense_is_refused(keywords: dict, message: str):
    with pytest.raises(ValueError, match=message):
        replay(**{"sequence": []} | keywords)


# The allocators, on any sequence.

SIZE = 64
ACTIONS = st.lists(st.tuples(st.booleans(), st.integers(1, 24)), max_size=80)


@always_the_same
@given(ACTIONS, st.sampled_from(["first", "best"]), st.sampled_from([SIZE, math.inf]))
def test_live_blocks_never_overlap_and_what_is_free_is_one_hole_wherever_it_touches(
    actions: list, fit: str, size: float
):
    arena, live, reached = Arena(fit, size), [], 0
    for frees, number in actions:
        if frees and live:
            arena.free(*live.pop(number % len(live)))
        else:
            gaps = between(live, size)
            fitting = [gap for gap in gaps if gap[1] - gap[0] >= number]
            address = arena.allocate(number)
            assert (address is None) == (not fitting), "what is free is used"
            if address is None:
                continue
            others = [gap for gap in fitting if gap[1] != size] or fitting  # than that at the upper end
            best = min(others, key=lambda gap: gap[1] - gap[0])
            assert address == (fitting[0] if fit == "first" else best)[0]
            live.append((address, number))
            reached = max(reached, address + number)
        assert [tuple(hole) for hole in arena.holes] == between(live, size)
        assert arena.highest == reached
        assert arena.free_bytes == size - sum(taken for _, taken in live)


def between(live: list[tuple[int, int]], size: float) -> list[tuple[int, float]]:
    """What lies between the live blocks, by address. An overlap would make a gap of negative size."""
    edges = [0, *(edge for start, taken in sorted(live) for edge in (start, start + taken)), size]
    gaps = list(zip(edges[::2], edges[1::2], strict=True))
    assert all(start <= stop for start, stop in gaps)
    return [(start, stop) for start, stop in gaps if start < stop]


@always_the_same
@given(ACTIONS, st.sampled_from(["first", "best"]), st.sampled_from([1, 2]), st.sampled_from([1, 16]))
def test_an_arena_is_as_large_as_its_peak_or_larger_and_large_enough(
    actions: list, fit: str, regions: int, alignment: int
):
    sequence, live, live_bytes, peak_bytes = [], {}, 0, 0
    for block, (frees, size) in enumerate(actions):
        if frees and live:
            freed = list(live)[size % len(live)]
            sequence.append(Free(freed))
            live_bytes -= live.pop(freed)
        else:
            sequence.append(Alloc(block, size, long_lived=size % 3 == 0))
            live[block] = size
            live_bytes += size
            peak_bytes = max(peak_bytes, live_bytes)
    found = replay(sequence, fit, regions, alignment=alignment)
    assert found.peak_bytes == peak_bytes and found.failure is None
    assert found.arena_bytes >= found.peak_bytes
    assert found.arena_bytes % alignment == 0
    if sequence and regions == 1:
        assert replay(sequence, fit, 1, found.arena_bytes, alignment) == found
        assert found.arena_bytes == 1 or replay(sequence, fit, 1, found.arena_bytes - 1, alignment).failure


# The recorder.

MARK_BYTES = 12_345  # of tensors that mark a moment in the sequence
VOCAB, LENGTH = 61, 16


def checkpointed_gpt(depth: int = 3) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = models.GPT(vocab=VOCAB, width=24, depth=depth, heads=2, context=LENGTH)
    for block in model.blocks:
        block.forward = lambda stream, forward=block.forward: checkpoint(
            forward, stream, use_reentrant=False, preserve_rng_state=False
        )
    tokens = torch.randint(VOCAB, (2, LENGTH + 1))
    return model, tokens[:, :-1], tokens[:, 1:]


def live_at_marks(sequence: list) -> list[int]:
    """How many bytes the sequence says are live at each mark, without the marks."""
    live: dict[int, int] = {}
    found = []
    for request in sequence:
        if isinstance(request, Free):
            live.pop(request.block)
        elif request.size_bytes == MARK_BYTES:
            found.append(sum(size for size in live.values() if size != MARK_BYTES))
            live[request.block] = request.size_bytes
        else:
            live[request.block] = request.size_bytes
    return found


@pytest.mark.filterwarnings("ignore:.*reduce_op:FutureWarning")  # the census asks every object
def test_it_counts_exactly_the_storages_that_live():
    """Held against all tensors that the garbage collector knows of, before, within and after the passes."""
    model, tokens, targets = checkpointed_gpt()
    optimizer = torch.optim.Adam(model.parameters())
    seen: list[int] = []

    def mark() -> None:
        seen.append(live_bytes() - before_bytes)
        torch.empty(MARK_BYTES, dtype=torch.uint8)

    def step() -> None:
        model.blocks[1].register_forward_hook(lambda *_: mark())  # in forward, and in its recomputation
        model.blocks[1].mlp_in.register_full_backward_hook(lambda *_: mark())
        loss = model(tokens, targets)
        mark()
        loss.backward()
        mark()
        optimizer.step()
        mark()
        optimizer.zero_grad()
        del loss
        mark()

    before_bytes = live_bytes()
    sequence = record(step)
    assert len(seen) == 6 and live_at_marks(sequence) == seen
    assert len(set(seen)) == len(seen) and min(seen) > 0, "or equality would say little"


def test_what_outlives_a_pause_is_long_lived():
    def step() -> Iterator[None]:
        kept = torch.ones(10)
        passing = kept + 1  # 4 bytes an element
        del passing
        yield
        outlives = kept + torch.ones(20)[:10]
        del kept
        yield outlives

    sequence = record(step)
    found = [(each.size_bytes, each.long_lived) for each in sequence if isinstance(each, Alloc)]
    assert found == [(40, True), (40, False), (80, False), (40, True)]
    assert sequence[2] == Free(1)


def test_without_a_pause_only_gradients_are_long_lived():
    model, tokens, targets = checkpointed_gpt()
    sequence = record(lambda: model(tokens, targets).backward())
    long_lived = sorted(each.size_bytes for each in sequence if isinstance(each, Alloc) and each.long_lived)
    assert long_lived == sorted(parameter.grad.nbytes for parameter in model.parameters())


def test_with_a_pause_after_forward_checkpoints_are_too():
    model, tokens, targets = checkpointed_gpt(depth=5)

    def step() -> Iterator[None]:
        loss = model(tokens, targets)
        yield
        loss.backward()

    stream_bytes = 4 * 2 * LENGTH * 24
    kept = [each for each in record(step) if isinstance(each, Alloc) and each.long_lived]
    gradients = sum(parameter.numel() * 4 == stream_bytes for parameter in model.parameters())
    streams = sum(each.size_bytes == stream_bytes for each in kept) - gradients
    assert streams >= 5, "one for each block"


def test_operations_that_resize_or_alias_are_seen_as_what_they_are():
    def step() -> None:
        outer.add_(1)  # it was there before
        view = outer[2:]
        out = torch.empty(0)
        torch.add(outer, 1, out=out)  # it grows from nothing
        with pytest.warns(UserWarning, match="resized"):
            torch.add(torch.ones(32), 1, out=out)  # and grows again
        del view, out

    outer = torch.ones(8)
    sequence = record(step)
    assert sequence == [Alloc(0, 32), Alloc(1, 128), Free(0), Alloc(2, 128), Free(1), Free(2)]


def test_nothing_is_recorded_on_the_meta_device_or_after_the_end():
    kept = []

    def step() -> None:
        kept.append(torch.empty(8, device="meta") + 1)
        kept.append(torch.ones(8))

    sequence = record(step)
    kept.clear()
    gc.collect()
    assert sequence == [Alloc(0, 32, long_lived=True)]


def test_on_the_meta_device_sizes_are_recorded_and_nothing_else():
    def step() -> None:
        shape = torch.empty(8, device="meta")
        shape.view(2, 4).mul_(2)
        kept.append(torch.ones(8))
        other = shape + 1
        del shape, other

    kept: list[torch.Tensor] = []
    assert record(step, meta=True) == [Alloc(0, 32), Alloc(1, 32), Free(0), Free(1)]


@pytest.mark.parametrize(
    "batch", long_where(lambda batch: batch in (2, 4), "1 and 8 bound them", [1, 2, 4, 8])
)
def test_the_shapes_of_gpt_2_xl_need_what_the_page_says(batch: int):
    """2.5 seconds, and no memory."""
    with torch.device("meta"):
        model = models.GPT(vocab=50_257, width=1600, depth=48, heads=25, context=1024)
        tokens = torch.zeros(batch, 1025, dtype=torch.long)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def step() -> Iterator[None]:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        yield
        loss.backward()

    sequence = record(step, meta=True)
    found = [replay(sequence, fit, regions) for fit in ("first", "best") for regions in (1, 2)]
    gradients_bytes = 4 * sum(p.numel() for p in model.parameters())
    assert found[0].peak_bytes > gradients_bytes  # and checkpoints, and one block
    row = " | ".join(f"{each.excess_percent:.1f} %" for each in found)
    page = (ROOT / "docs/fragmentation.md").read_text("utf-8")
    assert f"| 48, 1600, {batch} | {row} |" in page or not torch.__version__.startswith("2.13")


# Both together: the step of a model with checkpoints.


def test_the_step_of_a_model_needs_more_than_its_peak_and_regions_change_it():
    """The direction depends on the allocator; see docs/fragmentation.md."""
    model, tokens, targets = checkpointed_gpt(depth=12)

    def step() -> Iterator[None]:
        loss = model(tokens, targets)
        yield
        loss.backward()

    sequence = record(step)
    one, two = replay(sequence, "first"), replay(sequence, "first", regions=2)
    best = replay(sequence, "best")
    assert one.peak_bytes == two.peak_bytes == best.peak_bytes
    assert best.arena_bytes < one.arena_bytes
    assert replay(sequence, "first", size_bytes=one.arena_bytes).failure is None
    failure = replay(sequence, "first", size_bytes=one.arena_bytes - 64).failure
    assert failure and failure.largest_hole_bytes < failure.request.size_bytes < failure.free_bytes

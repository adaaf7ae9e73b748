"""Lesson 05: its check names each classic mistake, and what it says of backward is true."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.answers import alone, together
from support.lessons import drawing, solutions_travel_by_value, spoken

import zerolab
from zerolab import ring
from zerolab.course.lessons.zero_stage_2 import check_reduce_and_keep, figures
from zerolab.course.targets import Reached
from zerolab.models import GPT

solutions_travel_by_value(__name__)


def own_chunk(flat, shift=0):
    size = dist.get_world_size()
    return flat[ring.chunks(flat.numel(), size)[(dist.get_rank() + shift) % size]]


def added(mine, kept):
    return mine if kept is None else kept + mine


def overwritten(flat, kept):
    return ring.reduce_scatter(flat).clone()


def a_view(flat, kept):
    mine = ring.reduce_scatter(flat)
    if kept is not None:
        mine += kept
    return mine


def all_reduced(flat, kept):
    ring.all_reduce(flat)
    return added(own_chunk(flat).clone(), kept)


def ready_made(flat, kept):
    dist.all_reduce(flat)
    return added(own_chunk(flat).clone(), kept)


def kept_whole(flat, kept):
    ring.all_reduce(flat)
    return added(flat, kept)


def not_reduced(flat, kept):
    return added(own_chunk(flat).clone(), kept)


def averaged(flat, kept):
    return added(ring.reduce_scatter(flat) / dist.get_world_size(), kept)


def reduced_again(flat, kept):
    if kept is not None:
        flat += kept.repeat(dist.get_world_size())
    return ring.reduce_scatter(flat).clone()


def neighbours(flat, kept):
    ring.all_reduce(flat)
    return added(flat.chunk(dist.get_world_size())[dist.get_rank() - 1].clone(), kept)


def none_at_first(flat, kept):
    return kept + ring.reduce_scatter(flat).clone()


def a_number(flat, kept):
    return ring.reduce_scatter(flat).sum().item()


def in_place(flat, kept):
    """Right: the same buffer is kept and added to."""
    mine = ring.reduce_scatter(flat)
    if kept is None:
        kept = torch.zeros_like(mine)
    kept += mine
    return kept


def added_before(flat, kept):
    """Right: what is kept goes into this rank's own gradient, so it is counted once."""
    if kept is not None:
        own_chunk(flat).add_(kept)
    return torch.empty_like(own_chunk(flat)).copy_(ring.reduce_scatter(flat))


def sent_to_owners(flat, kept):
    """Right: each chunk is sent to its owner."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = own_chunk(flat).clone()
    for distance in range(1, size):
        landing = torch.empty_like(mine)
        work = dist.isend(own_chunk(flat, distance), (rank + distance) % size)
        dist.recv(landing, (rank - distance) % size)
        work.wait()
        mine += landing
    return added(mine, kept)


PARKED = []


def parked(flat, kept):
    PARKED.append(flat)
    return added(ring.reduce_scatter(flat).clone(), kept)


def parked_once(flat, kept, last={}):  # noqa: B006
    last["whole"] = flat
    return added(ring.reduce_scatter(flat).clone(), kept)


def parked_at_the_function(flat, kept):
    parked_at_the_function.shards = [*getattr(parked_at_the_function, "shards", []), flat]
    return added(ring.reduce_scatter(flat).clone(), kept)


def behind(flat, kept):
    mine = ring.reduce_scatter(flat).clone()
    return mine if kept is None else kept


def doubled(flat, kept):
    return added(2 * ring.reduce_scatter(flat), kept)


def first_chunk(flat, kept):
    ring.all_reduce(flat)
    return added(flat.chunk(dist.get_world_size())[0].clone(), kept)


def divided_again(flat, kept):
    mine = ring.reduce_scatter(flat).clone()
    return (mine if kept is None else mine + kept) / dist.get_world_size()


def over_the_micro_batches(flat, kept):
    mine = ring.reduce_scatter(flat).clone() / 3  # on three ranks the mean, on others not
    return added(mine, kept)


def in_bfloat16(flat, kept):
    return added(ring.reduce_scatter(flat.bfloat16()).double(), kept)


def to_everyone(flat, kept):
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = own_chunk(flat).clone()
    for distance in range(1, size):
        landing = torch.empty_like(flat)
        work = dist.isend(flat, (rank + distance) % size)
        dist.recv(landing, (rank - distance) % size)
        work.wait()
        mine += own_chunk(landing)
    return added(mine, kept)


def kept_twice(flat, kept):
    mine = ring.reduce_scatter(flat).clone()
    return mine if kept is None else 2 * kept + mine


def freed_too_early(flat, kept):
    mine = ring.reduce_scatter(flat)
    if dist.get_rank() == 1:
        flat.untyped_storage().resize_(0)
    return added(mine.clone(), kept)


def from_zeros(flat, kept):
    """Right: the sum begins with zeros."""
    mine = ring.reduce_scatter(flat)
    return mine + (0 if kept is None else kept)


RIGHT = [in_place, added_before, sent_to_owners, from_zeros]


def mean_of_two(flat, kept):
    mine = ring.reduce_scatter(flat).clone()
    return mine if kept is None else (kept + mine) / 2


def halves(flat, kept):
    mine = ring.reduce_scatter(flat).clone()
    return mine if kept is None else kept.lerp(mine, 0.5)


def own_once_more(flat, kept):
    own = own_chunk(flat).clone()
    return added(ring.reduce_scatter(flat) + own, kept)


def own_from_then_on(flat, kept):
    own = own_chunk(flat).clone()
    mine = ring.reduce_scatter(flat).clone()
    return mine if kept is None else kept + own


def subtracted(flat, kept):
    mine = ring.reduce_scatter(flat).clone()
    return mine if kept is None else kept - mine


def counted_twice(flat, kept):
    mine = ring.reduce_scatter(flat).clone()
    return mine if kept is None else kept + 2 * mine


def of_two(of_both):
    """What is kept is made of `kept` and the new shard in another way."""

    def reduce_and_keep(flat, kept):
        mine = ring.reduce_scatter(flat).clone()
        return mine if kept is None else of_both(kept, mine)

    return reduce_and_keep


IN_ALL = {}


def remembered(flat, kept):
    """The sum is in a global variable, which a second step begins with."""
    mine = ring.reduce_scatter(flat).clone()
    IN_ALL[len(mine)] = added(mine, IN_ALL.get(len(mine)))
    return IN_ALL[len(mine)]


def without_the_rest(flat, kept):
    ring.reduce_scatter(flat)
    length, rank = flat.numel() // dist.get_world_size(), dist.get_rank()
    return added(flat[length * rank : length * (rank + 1)].clone(), kept)


@alone
def torchs_chunk(flat, kept):
    ring.reduce_scatter(flat)
    return added(flat.chunk(dist.get_world_size())[dist.get_rank()].clone(), kept)


def as_rows(flat, kept):
    ring.reduce_scatter(flat)
    return added(flat.view(dist.get_world_size(), -1)[dist.get_rank()].clone(), kept)


@alone
def to_the_next(flat, kept):
    if kept is not None:
        own_chunk(flat, 1).add_(kept)
    return ring.reduce_scatter(flat).clone()


def to_the_start(flat, kept):
    if kept is not None:
        flat[: len(kept)] += kept
    return ring.reduce_scatter(flat).clone()


@alone
def to_two_chunks(flat, kept):
    if kept is not None:
        own_chunk(flat).add_(kept)
        own_chunk(flat, 1).add_(kept)
    return ring.reduce_scatter(flat).clone()


@alone
def to_the_whole_gradient(flat, kept):
    return ring.reduce_scatter(flat.clone() if kept is None else kept + flat).clone()


@alone
def onto_the_whole_gradient(flat, kept):
    if kept is not None:
        flat += kept
    return ring.reduce_scatter(flat).clone()


@alone
def other_sizes_added(flat, kept):
    return ring.reduce_scatter(flat).clone() + torch.ones(5)


def on_rank_0_alone(flat, kept):
    mine = ring.reduce_scatter(flat).clone()
    return mine if dist.get_rank() else added(mine, kept)


HANDLES = []


def never_waits(flat, kept):
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = own_chunk(flat).clone()
    for distance in range(1, size):
        landing = torch.empty_like(mine)
        HANDLES.append(dist.isend(own_chunk(flat, distance), (rank + distance) % size))
        dist.recv(landing, (rank - distance) % size)
        mine += landing
    return added(mine, kept)


def chunk_of_the_next(flat, kept):
    ring.reduce_scatter(flat)
    size = dist.get_world_size()
    return added(flat[ring.chunks(flat.numel(), size)[(dist.get_rank() + 1) % size]].clone(), kept)


def whole_buffer(flat, kept):
    ring.reduce_scatter(flat)
    return flat.clone() if kept is None else kept + flat


def whole_buffer_of_uneven(flat, kept):
    mine = ring.reduce_scatter(flat)
    mine = mine if flat.numel() % dist.get_world_size() == 0 else flat
    return added(mine.clone(), kept)


WRONG = [
    (whole_buffer, "it keeps the whole buffer after the reduction, and only this rank's chunk of that is"),
    (whole_buffer_of_uneven, "it keeps the whole buffer after the reduction"),
    (chunk_of_the_next, "keeps chunk 1 of flat. ring.reduce_scatter leaves rank r the sum in chunk r alone"),
    (remembered, "the first step is right, and a second one is not: a step begins with kept=None"),
    (without_the_rest, "Rank 0 keeps 250 elements, which is numel // N: the last element is lost"),
    (torchs_chunk, "Rank 1 keeps 251 elements. Its chunk has 250. Chunk r is ring.chunks(numel, N)[r]"),
    (alone(as_rows), "4 ranks do not divide 1001 elements: ring.chunks(numel, N) cuts any number"),
    (to_the_next, "rank 0's sum has what rank 2 had kept, and not what it had kept itself, as if"),
    (to_the_start, "rank 0's sum has what ranks 1 and 2 had kept, as if `kept` were added to another rank's"),
    (to_two_chunks, "rank 0's sum has what rank 2 had kept, as if"),
    (to_the_whole_gradient, "`kept` is a shard of 96 elements, and it is added to a whole gradient of 288"),
    (onto_the_whole_gradient, "Reduce flat first, and add the shard that comes back to `kept`"),
    (other_sizes_added, "stopped with RuntimeError: The size of tensor a (96) must match"),
    (on_rank_0_alone, "rank 0 is right, but rank 1 is not: a rank holds the last micro-batch alone"),
    (never_waits, "and waited for none of them"),
    (of_two(lambda kept, new: 2 * new), "it is 2 × the new shard, and `kept` is not in it"),
    (of_two(lambda kept, new: kept * new), "it is `kept` times the new shard: return their sum"),
    (of_two(lambda kept, new: 0.9 * kept + 0.1 * new), "it is 0.9 × `kept` + 0.1 × the new shard"),
    (of_two(lambda kept, new: kept - 3 * new), "it is `kept` - 3 × the new shard"),
    (of_two(lambda kept, new: torch.cat([kept, new])), "it is `kept` with the new shard behind it"),
    (own_once_more, "each rank adds its own numbers once more"),
    (own_from_then_on, "nothing of the other ranks is in it, from micro-batch 1 on"),
    (subtracted, "what should be added is subtracted"),
    (counted_twice, "it is `kept` + 2 × the new shard. Return `kept` + the new shard"),
    (lambda flat, kept: None, "not written yet"),
    (overwritten, "overwritten"),
    (mean_of_two, "weighs the last micro-batch as much as all before it"),
    (halves, "weighs the last micro-batch as much as all before it"),
    (a_view, "view"),
    (all_reduced, "that is an all-reduce"),
    (ready_made, "torch's own dist.all_reduce"),
    (kept_whole, "stage 1's memory"),
    (not_reduced, "own gradient only"),
    (averaged, "the mean over the ranks"),
    (reduced_again, "reduced again"),
    (neighbours, "another rank's shard, the previous one's"),
    (first_chunk, "every rank keeps rank 0's shard"),
    (none_at_first, "NoneType"),
    (a_number, "returned float"),
    (parked, "in `PARKED[0]`, alive after the call. It grows with every micro-batch"),
    (parked_once, "beside its shard in `parked_once's default['whole']`"),
    (parked_at_the_function, "beside its shard"),
    (behind, "only the first micro-batch is kept"),
    (kept_twice, "`kept` was added twice at every micro-batch"),
    (doubled, "what is there is 2 times what it should be"),
    (divided_again, "the earlier ones again and again"),
    (over_the_micro_batches, "what is there is 1/3 times what it should be"),
    (
        alone(freed_too_early),
        "rank 1's process was killed by signal SIGSEGV: it read or wrote memory that does not belong to it, "
        "as happens with a tensor whose storage was freed or resized, or with a wrong address (line ",
    ),
    (in_bfloat16, "right up to rounding"),
    (in_bfloat16, "in 8 micro-batches, some of them in bfloat16, 0.25 times the 12288"),
    (to_everyone, "sends the whole gradient to every rank"),
]
diagnose = together(check_reduce_and_keep, [*RIGHT, *(wrong for wrong, _ in WRONG)])


@pytest.mark.parametrize("right", RIGHT)
def test_every_right_way_passes(right):
    assert isinstance(diagnose(right), Reached | None)


@pytest.mark.parametrize(
    ("wrong", "words"),
    WRONG,
)
def test_the_check_names_the_mistake(wrong, words):
    assert words in diagnose(wrong)


def gradient_peak(reduces_in_flight):
    torch.manual_seed(0)
    model = GPT(width=16, depth=6, heads=2, context=8)
    optimizer = zerolab.ZeroOptimizer(
        model, torch.optim.Adam, stage=2, reduces_in_flight=reduces_in_flight, lr=1e-3
    )
    held = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: held.append(optimizer.memory().grads_bytes))
    tokens = torch.arange(8).view(1, 8)
    model(tokens, tokens).backward()
    return max(held), {unit.name: 4 * unit.numel for unit in optimizer.units}


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_the_peak_is_the_root_the_unit_at_work_those_in_flight_and_the_shards_of_the_rest(in_flight):
    """It is false where the root, whose embeddings come last, has the first turn and holds up all others."""
    peak, unit_bytes = zerolab.launch(gradient_peak, 2, in_flight)[0]
    whole, norm_bytes = 1 + in_flight, 4 * 16
    units = unit_bytes["root"] + (whole + (6 - whole) / 2) * unit_bytes["blocks.0"]
    assert peak == units + 2 * norm_bytes - norm_bytes, "two wait to be moved, and the unit's last is to come"


def test_the_drawings_say_in_words_what_they_show():
    over_time, costs = (drawing("zero_stage_2", name) for name in ("gradients_over_time", "accumulation"))
    stairs = [("head.weight", 4e5), ("blocks.0.a", 8e5), ("blocks.0.b", 8e5), ("embedding.weight", 8e5)]
    saw = {1: [("head.weight", 4e5), ("blocks.0.a", 7e5), ("blocks.0.b", 7e5), ("end", 2e5)]}
    over_time.__globals__.update(stage_1=stairs, stage_2=saw)
    alt = spoken(over_time, 2.8, reduces_in_flight=1)
    assert "stage 1: up to 0.80 MB" in alt and "stage 2: up to 0.70 MB, 0.20 MB at the end" in alt
    measured = {(way, m): (m + 1, 1) for way in costs.__globals__["WAYS"] for m in (1, 2, 8)}
    costs.__globals__["costs"] = measured
    for m in (1, 2, 8):
        alt = spoken(costs, 2.1, micro_batches=m)
        assert f"stage 2: {m + 1}.00 Ψ moved" in alt and "stage 2, no_sync: 1.00 Ψ held" in alt


def test_the_order_of_events_is_told_without_times():
    first, second = (
        SimpleNamespace(unit="1", start=1.0, end=4.0),
        SimpleNamespace(unit="0", start=2.0, end=5.0),
    )
    entries = figures.in_order([(0.5, "1.weight"), (1.5, "0.weight")], [first, second])
    order = ["gradient 1.weight", "start 1", "gradient 0.weight", "start 0", "end 1", "end 0"]
    assert [" ".join(entry) for entry in entries] == order
    assert ", ".join(order) in spoken(figures.timeline, runs={"a run": entries, "another": entries})

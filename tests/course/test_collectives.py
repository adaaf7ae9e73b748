"""Lesson 02: its check names each classic mistake, its drawing follows a ring's rounds."""

import pytest
import torch
import torch.distributed as dist
from support.answers import alone, together
from support.lessons import solutions_travel_by_value, spoken

from zerolab import ring
from zerolab.course import attempts, figure
from zerolab.course.lessons.collectives import check, check_reduce_scatter, figures, rounds, whole
from zerolab.course.targets import Reached

solutions_travel_by_value(__name__)


def ring_with(
    rounds=-1,
    shift=0,
    whole=False,
    floor=False,
    mean=False,
    forget=False,
    mixed=0,
    owned=0,
    stale=False,
    put=torch.Tensor.add_,
):
    """The right ring where nothing is given, and a classic wrong one where something is."""

    def reduce_scatter(tensor):
        rank, n = dist.get_rank(), dist.get_world_size()
        size = tensor.numel() // n
        cuts = ring.chunks(size * n if floor else tensor.numel(), n)
        pieces = [tensor[cut] for cut in cuts]
        brought = [piece.clone() for piece in pieces]
        for step in range(n + rounds):
            sent, received = (rank - step - 1 + shift) % n, (rank - step - 2 + shift + mixed) % n
            outgoing = tensor if whole else brought[sent] if stale else pieces[sent]
            landing = torch.empty_like(tensor if whole else pieces[received])
            there, origin = (rank + 1) % n, (rank - 1) % n
            pair = [dist.P2POp(dist.isend, outgoing, there), dist.P2POp(dist.irecv, landing, origin)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
            put(pieces[received], landing[cuts[received]] if whole else landing)
        if forget:
            return None
        own = pieces[(rank + owned) % n]
        return own / n if mean else own

    return reduce_scatter


def everyone_to_owner(tensor):
    """A reduce-scatter with the right values and the right bytes that is no ring."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
    for distance in range(1, n):
        landing = torch.empty_like(pieces[rank])
        there, origin = (rank + distance) % n, (rank - distance) % n
        pair = [dist.P2POp(dist.isend, pieces[there], there), dist.P2POp(dist.irecv, landing, origin)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        pieces[rank] += landing
    return pieces[rank]


def deadlocked(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
    for step in range(n - 1):
        landing = torch.empty_like(pieces[(rank - step - 2) % n])
        dist.send(pieces[(rank - step - 1) % n], (rank + 1) % n)
        dist.recv(landing, (rank - 1) % n)
        pieces[(rank - step - 2) % n] += landing
    return pieces[rank]


def from_the_rank_it_sends_to(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    landing, right = torch.empty(tensor.numel() // n, dtype=tensor.dtype), (rank + 1) % n
    pair = [dist.P2POp(dist.isend, landing, right), dist.P2POp(dist.irecv, landing.clone(), right)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return landing


def by_all_reduce(tensor):
    dist.all_reduce(tensor)
    return tensor[ring.chunks(tensor.numel(), dist.get_world_size())[dist.get_rank()]]


def whole_sum(tensor):
    ring_with()(tensor)
    ring.all_gather(tensor)
    return tensor


def to_the_left(tensor):
    """Right: the ring in the other direction."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = list(tensor.split([cut.stop - cut.start for cut in ring.chunks(tensor.numel(), n)]))
    for step in range(1, n):
        landing = torch.empty_like(pieces[(rank + step + 1) % n])
        work = dist.isend(pieces[(rank + step) % n], (rank - 1) % n)
        dist.recv(landing, (rank + 1) % n)
        work.wait()
        pieces[(rank + step + 1) % n] += landing
    return pieces[rank].clone()


def in_halves(tensor):
    """Right: each chunk goes in two messages."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [tensor[cut].chunk(2) for cut in ring.chunks(tensor.numel(), n)]
    for step in range(n - 1):
        for outgoing, home in zip(pieces[(rank - step - 1) % n], pieces[(rank - step - 2) % n], strict=True):
            landing = torch.empty_like(home)
            work = dist.isend(outgoing, (rank + 1) % n)
            dist.recv(landing, (rank - 1) % n)
            work.wait()
            home += landing
    return tensor[ring.chunks(tensor.numel(), n)[rank]]


def even_ranks_first(tensor):
    """Right: with blocking calls, where even ranks send first and odd ranks receive first."""
    rank, n = dist.get_rank(), dist.get_world_size()
    cuts = ring.chunks(tensor.numel(), n)
    for step in range(n - 1):
        outgoing, home = tensor[cuts[(rank - step - 1) % n]], tensor[cuts[(rank - step - 2) % n]]
        landing = home.clone()
        if rank % 2 == 0 and rank != n - 1:
            dist.send(outgoing, (rank + 1) % n)
            dist.recv(landing, (rank - 1) % n)
        else:
            outgoing = outgoing.clone()
            dist.recv(landing, (rank - 1) % n)
            dist.send(outgoing, (rank + 1) % n)
        home.add_(landing)
    return tensor[cuts[rank]]


def recursive(tensor):
    """Right: a function that calls itself for each round."""
    rank, n = dist.get_rank(), dist.get_world_size()
    cuts = ring.chunks(tensor.numel(), n)

    def passed(chunk, left):
        if left == 0:
            return tensor[cuts[rank]] if chunk is None else chunk
        goes, comes = (rank + left) % n, (rank + left - 1) % n
        outgoing = tensor[cuts[goes]] if chunk is None else chunk
        landing = torch.zeros_like(tensor[cuts[comes]])
        right, before = (rank + 1) % n, (rank - 1) % n
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, landing, before), dist.P2POp(dist.isend, outgoing.contiguous(), right)]
        ):
            work.wait()
        return passed(landing + tensor[cuts[comes]], left - 1)

    return passed(None, n - 1)


def with_chunk(tensor):
    """The cut of torch.chunk."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = list(tensor.chunk(n))
    for step in range(n - 1):
        landing = torch.empty_like(pieces[(rank - step - 2) % n])
        work = dist.isend(pieces[(rank - step - 1) % n], (rank + 1) % n)
        dist.recv(landing, (rank - 1) % n)
        work.wait()
        pieces[(rank - step - 2) % n] += landing
    return pieces[rank]


def round_by_round(add, sent=lambda rank, step: rank - step - 1, into=torch.empty_like):
    """The ring, with `add(pieces, from, to, buffer)` after each round."""

    def reduce_scatter(tensor):
        rank, n = dist.get_rank(), dist.get_world_size()
        pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
        for step in range(n - 1):
            goes = sent(rank, step) % n
            comes = (goes - 1 if sent(0, 1) < sent(0, 0) else goes + 1) % n
            landing = into(pieces[comes])
            pair = [
                dist.P2POp(dist.isend, pieces[goes].clone(), (rank + 1) % n),
                dist.P2POp(dist.irecv, landing, (rank - 1) % n),
            ]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
            add(pieces, goes, comes, landing)
        return pieces[rank]

    return reduce_scatter


def plain(pieces, goes, comes, landing):
    pieces[comes] += landing


def added_twice(pieces, goes, comes, landing):
    pieces[comes] += landing
    pieces[comes] += landing


def subtracted(pieces, goes, comes, landing):
    pieces[comes] -= landing


def averaged(pieces, goes, comes, landing):
    pieces[comes].add_(landing).div_(2)


def own_twice(tensor):
    own = tensor.clone()[ring.chunks(tensor.numel(), dist.get_world_size())[dist.get_rank()]]
    return ring_with()(tensor) + own


def straight_to_the_owner(tensor, keep=-1):
    """Each chunk goes straight to its owner, who adds one of those that arrive."""
    rank, n = dist.get_rank(), dist.get_world_size()
    cuts = ring.chunks(tensor.numel(), n)
    others = [each for each in range(n) if each != rank]
    sends = [dist.isend(tensor[cuts[each]], each) for each in others]
    found = {each: torch.empty_like(tensor[cuts[rank]]) for each in others}
    for each, landing in found.items():
        dist.recv(landing, each)
    for work in sends:
        work.wait()
    return tensor[cuts[rank]] + (list(found.values())[keep] if found else 0)


def put_where_it_was_sent_from(pieces, goes, comes, landing):
    """Adds what arrives to the chunk that has just been sent."""
    length = min(len(landing), len(pieces[goes]))
    pieces[goes][:length] += landing[:length]


def multiplied(pieces, goes, comes, landing):
    pieces[comes].mul_(landing)


def thrown_away(pieces, goes, comes, landing):
    home = pieces[comes]
    home = home + landing


def only_passed_on(pieces, goes, comes, landing):
    pieces[comes].copy_(landing)


def begins_with_zeros(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    cuts = ring.chunks(tensor.numel(), n)
    passing = torch.zeros_like(tensor[cuts[(rank - 1) % n]])
    for step in range(n - 1):
        mine = tensor[cuts[(rank - step - 2) % n]]
        landing = torch.empty_like(mine)
        work = dist.isend(passing, (rank + 1) % n)
        dist.recv(landing, (rank - 1) % n)
        work.wait()
        passing = landing + mine
    return passing if n > 1 else tensor


def padded(tensor):
    """Right values; every message has two elements more than the longest chunk."""
    rank, n = dist.get_rank(), dist.get_world_size()
    cuts, size = ring.chunks(tensor.numel(), n), -(-tensor.numel() // n) + 2
    for step in range(n - 1):
        out, home = tensor[cuts[(rank - step - 1) % n]], tensor[cuts[(rank - step - 2) % n]]
        outgoing, landing = tensor.new_zeros(size), tensor.new_zeros(size)
        outgoing[: len(out)] = out
        work = dist.isend(outgoing, (rank + 1) % n)
        dist.recv(landing, (rank - 1) % n)
        work.wait()
        home += landing[: len(home)]
    return tensor[cuts[rank]]


def through_rank_0(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    cuts = ring.chunks(tensor.numel(), n)
    own = torch.empty_like(tensor[cuts[rank]])
    if rank > 0:
        dist.send(tensor, 0)
        dist.recv(own, 0)
        return own
    landing = torch.empty_like(tensor)
    for other in range(1, n):
        dist.recv(landing, other)
        tensor += landing
    for other in range(1, n):
        dist.send(tensor[cuts[other]], other)
    return tensor[cuts[0]]


def in_double(finish):
    return lambda tensor: finish(round_by_round(plain)(tensor.double()), tensor.dtype)


def in_bfloat16(tensor):
    return round_by_round(plain)(tensor.bfloat16()).to(tensor.dtype)


def by_parity(tensor):
    """Even ranks send in every round, and odd ranks receive."""
    rank, n = dist.get_rank(), dist.get_world_size()
    cuts = ring.chunks(tensor.numel(), n)
    for step in range(n - 1):
        home = tensor[cuts[(rank - step - 2) % n]]
        if rank % 2 == 0:
            dist.send(tensor[cuts[(rank - step - 1) % n]], (rank + 1) % n)
        else:
            landing = torch.empty_like(home)
            dist.recv(landing, (rank - 1) % n)
            home += landing
    return tensor[cuts[rank]]


def one_buffer_for_all(tensor):
    """The first chunk is the longest, so the others do not fill the buffer."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
    landing = torch.empty_like(pieces[0])
    for step in range(n - 1):
        work = dist.isend(pieces[(rank - step - 1) % n], (rank + 1) % n)
        dist.recv(landing, (rank - 1) % n)
        work.wait()
        pieces[(rank - step - 2) % n] += landing
    return pieces[rank]


RIGHT = [round_by_round(plain), ring_with(), to_the_left, in_halves, even_ranks_first, recursive]


def into_new_tensors(tensor):
    """The right messages. The sums are in a list, and a slice of the tensor is returned."""
    rank, n = dist.get_rank(), dist.get_world_size()
    cuts = ring.chunks(tensor.numel(), n)
    pieces = [tensor[cut] for cut in cuts]
    for step in range(n - 1):
        sent, received = (rank - step - 1) % n, (rank - step - 2) % n
        landing = torch.empty_like(pieces[received])
        pair = [
            dist.P2POp(dist.isend, pieces[sent], (rank + 1) % n),
            dist.P2POp(dist.irecv, landing, rank - 1 if rank else n - 1),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        pieces[received] = pieces[received] + landing
    return tensor[cuts[rank]]


WRONG = [
    (into_new_tensors, "the tensor has not changed: `piece + buffer` makes another one. Return that sum"),
    (ring_with(rounds=0, shift=1), "each rank makes 3 rounds, and 3 ranks need 2"),
    (round_by_round(multiplied), "its value is the product of rank 0's chunk 0, rank 1's"),
    (lambda tensor: None, "not written yet"),
    (ring_with(whole=True), "sends the whole tensor each round"),
    (ring_with(mean=True), "that is the mean"),
    (
        alone(round_by_round(plain, lambda rank, step: rank + step + 1)),
        "the other neighbour than its indices",
    ),
    (
        round_by_round(plain, into=lambda piece: piece),
        "receives into the chunk itself, and adds that to itself",
    ),
    (round_by_round(added_twice), "what arrives is added twice in each round"),
    (round_by_round(subtracted), "what arrives is subtracted"),
    (round_by_round(averaged), "each round takes the mean of two"),
    (own_twice, "each rank adds its own numbers once more"),
    (straight_to_the_owner, "rank 0 receives from 2 ranks, and only what came last is in the result"),
    (lambda tensor: straight_to_the_owner(tensor, 0), "and only what came first is in the result"),
    (ring_with(floor=True), "the remainder is lost"),
    (alone(with_chunk), "torch.chunk's cut"),
    (ring_with(shift=1), "nothing added to it"),
    (ring_with(shift=1, owned=1), "ended with the next rank's chunk"),
    (ring_with(rounds=-2), "a rank made 1 round, and 3 ranks need 2"),
    (alone(ring_with(rounds=0)), "stop after N-1 rounds"),
    (alone(ring_with(mixed=2)), "what arrives is added to another chunk than the one that was sent"),
    (ring_with(put=torch.Tensor.copy_), "its own chunk has the next rank's numbers and no others: add what"),
    (ring_with(stale=True), "pass on the partial sum"),
    (ring_with(forget=True), "returned None,"),
    (lambda tensor: ring_with()(tensor) is None or tensor, "returned the whole tensor"),
    (lambda tensor: ring_with()(tensor).float(), "float32, and its input is float64"),
    (lambda tensor: ring_with()(tensor).sum(), "one element or one sum"),
    (whole_sum, "zerolab's own ring.all_gather"),
    (ring.reduce_scatter, "zerolab's own ring.reduce_scatter"),
    (everyone_to_owner, "in a ring it talks to rank"),
    (by_all_reduce, "torch's own dist.all_reduce"),
    (round_by_round(put_where_it_was_sent_from), "was added to chunk 2, and it belongs to chunk 1"),
    (round_by_round(thrown_away), "Nothing was added to the tensor itself: `piece + buffer` makes another"),
    (
        ring_with(shift=1),
        "the sum of chunk 1 is complete on rank 0, whose own is chunk 0: rank r has",
    ),
    (begins_with_zeros, "in round 1 rank 0 sends zeros: begin with a chunk of the tensor (line"),
    (padded, "a message has 335 elements, and the longest chunk 333. Send each chunk as it"),
    (through_rank_0, "all messages go through rank 0, as in lesson 00, so its link carries everything"),
    (
        in_double(lambda own, dtype: own),
        "and its input is float32: keep the type; rank 0 sends float64",
    ),
    (
        in_double(lambda own, dtype: own.to(dtype)),
        "float64, and the tensor is float32: that is 2 times",
    ),
    (in_bfloat16, "rank 0 sends bfloat16, and the tensor is float64"),
    (alone(by_parity), "after 2 sends and no receive (line"),
    (alone(by_parity), "In a ring each rank sends one chunk and receives one in every round"),
    (alone(one_buffer_for_all), "receives them into a tensor of 251 elements of float64: both must have"),
]
diagnose = together(check_reduce_scatter, [*RIGHT, *(wrong for wrong, _ in WRONG)])


@pytest.mark.parametrize("solution", RIGHT)
def test_every_right_way_passes(solution):
    assert isinstance(diagnose(solution), Reached | None)


@pytest.mark.parametrize(
    ("solution", "diagnosis"),
    WRONG,
)
def test_the_check_names_the_mistake(solution, diagnosis):
    assert diagnosis in diagnose(solution)


def test_messages_and_hints_call_the_neighbours_what_the_lesson_calls_them():
    """The next rank and the one before: nothing says which rank is on the left."""
    said = [*check.HINTS, *check.MISTAKES, *whole.HINTS, *whole.MISTAKES, *rounds.MISTAKES]
    said += [*rounds.FIRST_HALF]
    sides = ("left neighbour", "right neighbour", "to the left", "to the right", "from the left")
    assert not [text for text in said if any(side in text for side in sides)]


def test_a_ring_to_the_left_is_gold():
    assert diagnose(to_the_left) is None


def test_a_deadlock_is_named(monkeypatch):
    monkeypatch.setattr(attempts, "SECONDS", 2.5)
    assert "because all of them send first" in check_reduce_scatter.diagnose(deadlocked)


def test_a_rank_that_receives_from_another_than_sends_to_it_is_named(monkeypatch):
    monkeypatch.setattr(attempts, "SECONDS", 2.5)
    said = check_reduce_scatter.diagnose(from_the_rank_it_sends_to)
    assert "each rank sends to (rank + 1) % 3 and receives from (rank + 1) % 3, so nobody receives" in said
    assert "What goes to (rank + 1) % 3 comes from (rank - 1) % 3 (line" in said


def rounds_of(size: int) -> figures.Rounds:
    """The order of a ring all-reduce: chunk `rank - 1` leaves first, as `zerolab.ring` sends it."""
    return [
        [(step, (rank - 1 - step) % size, (rank - 2 - step) % size, 8) for step in range(2 * (size - 1))]
        for rank in range(size)
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_the_drawing_counts_the_complete_chunks_of_every_step(ranks):
    for step in range(2 * ranks - 1):
        alt = spoken(figures.ring_step, 2.7, recorded={ranks: rounds_of(ranks)}, ranks=ranks, step=step)
        complete = max(0, step - ranks + 2) * ranks
        assert alt.endswith(f"{complete} of {ranks**2} chunks hold the sum of all {ranks} ranks.")


def test_the_ring_has_the_messages_of_the_round_and_the_grid_what_arrived():
    canvas = figure()
    figures.ring_step(canvas, {3: rounds_of(3)}, ranks=3, step=1)
    ring, grid = canvas.axes
    assert [text.get_text() for text in ring.texts if text.get_bbox_patch()] == ["2", "0", "1"]
    frames = grid.collections[-1]  # row by row
    dashed = [place for place, (_, dashes) in enumerate(frames.get_linestyle()) if dashes]
    assert [divmod(place, 3) for place in dashed] == [(0, 1), (1, 2), (2, 0)]

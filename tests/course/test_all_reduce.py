"""Lesson 02: the check of the all-reduce names each mistake; bytes and memory decide the target."""

import pytest
import torch
import torch.distributed as dist
from support.answers import alone, together
from support.lessons import solutions_travel_by_value

from zerolab import ring
from zerolab.course import attempts
from zerolab.course.lessons.collectives import check_all_reduce
from zerolab.course.lessons.collectives.solution import my_reduce_scatter
from zerolab.course.peak import Peak
from zerolab.course.targets import Reached, bronze, lowest, silver

solutions_travel_by_value(__name__)


def exchange(outgoing, incoming, there, origin):
    pair = [dist.P2POp(dist.isend, outgoing, there), dist.P2POp(dist.irecv, incoming, origin)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()


def two_halves(
    short=0, add=False, fresh=False, first=True, second=True, order=None, finish=lambda sums, n: sums
):
    """The right ring where nothing is given, and a classic wrong one where something is."""

    def all_reduce(tensor):
        rank, n = dist.get_rank(), dist.get_world_size()
        right, left = (rank + 1) % n, (rank - 1) % n
        pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
        for step in range((n - 1) * first):
            goes, comes = (rank - step - 1) % n, (rank - step - 2) % n
            landing = torch.empty_like(pieces[comes])
            exchange(pieces[goes], landing, right, left)
            pieces[comes] = pieces[comes] + landing if fresh else pieces[comes].add_(landing)
        for step in range((n - 1 - short) * second):
            goes, comes = (rank - step) % n, (rank - step - 1) % n
            landing = torch.empty_like(pieces[comes])
            exchange(pieces[goes], landing, right, left)
            if add:
                pieces[comes].add_(landing)
            elif fresh:
                pieces[comes] = landing
            else:
                pieces[comes].copy_(landing)
        if order:
            return torch.cat([pieces[each % n] for each in order(rank, n)])
        return finish(torch.cat(pieces) if fresh else tensor, n)

    return all_reduce


def rounds(
    way=1, ahead=0, first=0, second=0, begins=0, replaces=False, adds=False, averages=False, against=()
):
    """A ring to the right or to the left, whose first half completes chunk rank + ahead; and its mistakes."""

    def all_reduce(tensor):
        rank, n = dist.get_rank(), dist.get_world_size()
        pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
        halves = ((n - 1 + first, ahead - way), (n - 1 + second, ahead + way * begins))
        for half, (turns, start) in enumerate(halves):
            far = -way if half in against else way
            for turn in range(turns * (n > 1)):
                goes, comes = (rank + start - way * turn) % n, (rank + start - way * (turn + 1)) % n
                landing = torch.empty_like(pieces[comes])
                exchange(pieces[goes], landing, (rank + far) % n, (rank - far) % n)
                if half == 0 and averages:
                    pieces[comes].add_(landing).div_(2)
                elif adds if half else not replaces:
                    pieces[comes].add_(landing)
                else:
                    pieces[comes].copy_(landing)
        return tensor

    return all_reduce


def in_place(tensor):
    """Gold: nothing is returned, complete chunks arrive in their place, and one buffer serves all rounds."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = list(tensor.split([cut.stop - cut.start for cut in ring.chunks(tensor.numel(), n)]))
    buffer = tensor.new_empty(pieces[0].numel())
    for step in range(1, n):
        goes, comes = pieces[(rank + step) % n], pieces[(rank + step + 1) % n]  # to the left
        landing = buffer[: comes.numel()]
        exchange(goes, landing, (rank - 1) % n, (rank + 1) % n)
        comes += landing
    for step in range(n - 1):
        exchange(pieces[(rank + step) % n], pieces[(rank + step + 1) % n], (rank - 1) % n, (rank + 1) % n)


def each_owner_directly(tensor):
    """Gold: no ring; each rank sends a chunk to its owner, who adds up and sends the sum to all."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
    landing = torch.empty_like(pieces[rank])
    for far in range(1, n):
        exchange(pieces[(rank + far) % n], landing, (rank + far) % n, (rank - far) % n)
        pieces[rank] += landing
    for far in range(1, n):
        exchange(pieces[rank], pieces[(rank - far) % n], (rank + far) % n, (rank - far) % n)
    return tensor


def gathered_whole(tensor, used=lambda mine, total: total):
    """Bronze: everybody sends the whole tensor to everybody."""
    rank, n = dist.get_rank(), dist.get_world_size()
    total = tensor.clone()
    for far in range(1, n):
        landing = torch.empty_like(tensor)
        exchange(tensor, landing, (rank + far) % n, (rank - far) % n)
        total += landing
    return used(tensor, total)


def through_rank_0(tensor):
    """Bronze: rank 0 adds up and sends the sum to all."""
    rank, n = dist.get_rank(), dist.get_world_size()
    landing = torch.empty_like(tensor)
    for other in range(1, n):
        if rank == 0:
            dist.recv(landing, other)
            tensor += landing
        elif rank == other:
            dist.send(tensor, 0)
    for other in range(1, n):
        if rank == 0:
            dist.send(tensor, other)
        elif rank == other:
            dist.recv(tensor, 0)
    return tensor


def own_chunk_in_every_round(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    two_halves(second=False)(tensor)
    pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
    for _ in range(n - 1):
        landing = torch.empty_like(pieces[(rank - 1) % n])
        exchange(pieces[rank], landing, (rank + 1) % n, (rank - 1) % n)
        pieces[(rank - 1) % n].copy_(landing)
    return tensor


def growing(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    for _ in range(n - 1):
        landing = torch.empty_like(tensor)
        exchange(tensor, landing, (rank + 1) % n, (rank - 1) % n)
        tensor = tensor + landing
    return tensor


def swapped_by_distance(tensor):
    rank, n, distance = dist.get_rank(), dist.get_world_size(), 1
    while distance < n:
        if (peer := rank ^ distance) < n:
            arriving = torch.empty_like(tensor)
            exchange(tensor, arriving, peer, peer)
            tensor += arriving
        distance *= 2
    return tensor


def without_its_own(tensor):
    return gathered_whole(tensor, lambda mine, total: total - mine)


def leaves_out_the_rest(tensor):
    n = dist.get_world_size()
    return two_halves()(tensor[: tensor.numel() // n * n])


def own_chunk(tensor):
    two_halves(second=False)(tensor)
    return tensor[ring.chunks(tensor.numel(), dist.get_world_size())[dist.get_rank()]].clone()


def by_torch(tensor):
    dist.all_reduce(tensor)
    return tensor


def sends_first(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.send(tensor, (rank + 1) % n)
    dist.recv(tensor, (rank - 1) % n)


def in_double_and_back(tensor):
    return two_halves()(tensor.double()).to(tensor.dtype)


def by_bound_handles(tensor):
    """Gold: the names `send` and `receive` keep the handles of the last round, and these its chunks."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
    for step in range(2 * (n - 1)):
        home = pieces[(rank - step - 2) % n]
        landing = torch.empty_like(home)
        receive = dist.irecv(landing, (rank - 1) % n)
        send = dist.isend(pieces[(rank - step - 1) % n].clone(), (rank + 1) % n)
        send.wait()
        receive.wait()
        home.copy_(home + landing if step < n - 1 else landing)
        del landing
    return tensor


GOLD = [
    two_halves(),
    in_place,
    each_owner_directly,
    rounds(ahead=1),
    rounds(way=-1, ahead=-1),
    by_bound_handles,
]
LESS = [
    (
        two_halves(fresh=True),
        "silver, because values and bytes are right. For gold: with 3",
    ),
    (lambda tensor: two_halves()(tensor.clone()), "a second one of full size"),
    (
        gathered_whole,
        "bronze, because the values are right. For silver: with 3 ranks, rank 0 sends 15984",
    ),
    (
        through_rank_0,
        "2 times the tensor, and 2(N-1)/N times, 10656 bytes, is enough: 2 of its 2 messages are the whole",
    ),
    (in_double_and_back, "rank 0 sends float64, and the tensor is float32: that is 2 times the bytes"),
    (rounds(first=1), "sends 5 messages of a chunk or so, and N-1 rounds in each half are 4"),
    (rounds(way=-1, second=1), "A half has too many rounds"),
]


def second_half(put):
    """A right first half, and a second one whose messages `put(pieces, number, buffer)` lays down."""

    def all_reduce(tensor):
        rank, n = dist.get_rank(), dist.get_world_size()
        pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
        for step in range(2 * (n - 1)):
            goes, comes = (rank - step - 1) % n, (rank - step - 2) % n
            buffer = torch.empty_like(pieces[comes])
            pair = [
                dist.P2POp(dist.isend, pieces[goes], (rank + 1) % n),
                dist.P2POp(dist.irecv, buffer, (rank - 1) % n),
            ]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
            if step < n - 1:
                pieces[comes] += buffer
            else:
                put(pieces, comes, buffer)
        return tensor

    return all_reduce


def never_put(pieces, number, buffer): ...


def put_in_the_list(pieces, number, buffer):
    pieces[number] = buffer


def into_zeros(tensor):
    """Only its own chunk is put into a tensor of zeros."""
    rank, n = dist.get_rank(), dist.get_world_size()
    summed = torch.zeros_like(tensor)
    summed[ring.chunks(tensor.numel(), n)[rank]] = my_reduce_scatter(tensor)
    return summed


def scattered_twice(tensor):
    my_reduce_scatter(tensor)
    my_reduce_scatter(tensor)
    return tensor


def sum_on_rank_0(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    landing = torch.empty_like(tensor)
    for other in range(1, n):
        if rank == 0:
            dist.recv(landing, other)
            tensor += landing
        elif rank == other:
            dist.send(tensor, 0)


def to_higher_ranks(tensor):
    """Each owner sends its complete chunk to the ranks after it alone."""
    rank, n = dist.get_rank(), dist.get_world_size()
    my_reduce_scatter(tensor)
    pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
    for owner in range(n):
        for other in range(owner + 1, n):
            if rank == owner:
                dist.send(pieces[rank], other)
            elif rank == other:
                dist.recv(pieces[owner], owner)
    return tensor


def short_second_half(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    my_reduce_scatter(tensor)
    size = tensor.numel() // n
    pieces = [tensor[chunk * size : (chunk + 1) * size] for chunk in range(n)]
    for step in range(n - 1):
        exchange(pieces[(rank - step) % n], pieces[(rank - step - 1) % n], (rank + 1) % n, (rank - 1) % n)
    return tensor


def in_double(finish):
    return lambda tensor: finish(two_halves()(tensor.double()), tensor.dtype)


def only_rank_0_returns(tensor):
    total = two_halves()(tensor.clone())
    return total if dist.get_rank() == 0 else None


def under_another_name(tensor):
    tensor = two_halves()(tensor.clone())


def exchanged_indices(tensor):
    """In the second half it sends what it should receive."""
    rank, n = dist.get_rank(), dist.get_world_size()
    my_reduce_scatter(tensor)
    pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
    for step in range(n - 1):
        goes, into = pieces[(rank - step - 1) % n].clone(), pieces[(rank - step) % n]
        landing = tensor.new_empty(len(pieces[(rank - step - 2) % n]))
        exchange(goes, landing, (rank + 1) % n, (rank - 1) % n)
        length = min(len(landing), len(into))
        into[:length] = landing[:length]
    return tensor


def put_elsewhere(tensor):
    """The second half goes to the left, and puts what arrives where the other way would."""
    rank, n = dist.get_rank(), dist.get_world_size()
    my_reduce_scatter(tensor)
    pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), n)]
    for step in range(n - 1):
        home = pieces[(rank - step - 1) % n]
        landing = torch.empty_like(pieces[(rank + 1 - step) % n])
        exchange(pieces[(rank - step) % n], landing, (rank - 1) % n, (rank + 1) % n)
        length = min(len(landing), len(home))
        home[:length] = landing[:length]
    return tensor


WRONG = [
    (sum_on_rank_0, "rank 0 is right, but rank 1 is not: its own tensor is what it was"),
    (sum_on_rank_0, "rank 0 has the complete chunk 0. It is sent to nobody, so it never comes to rank 1"),
    (
        to_higher_ranks,
        "rank 1 has the complete chunk 1. It is sent to rank 2 alone, so it never comes to rank 0",
    ),
    (
        short_second_half,
        "each message has 250 elements, which is numel // N, and chunk 0 has 251",
    ),
    (in_double(lambda total, dtype: total), "it returned float64, and its input is float32"),
    (
        only_rank_0_returns,
        "rank 1 returned None, so what is in its `tensor` counts: return the sum on",
    ),
    (
        only_rank_0_returns,
        "chunk 0 arrives at rank 1 in a message of rank 0, and is not in its result",
    ),
    (under_another_name, "the function returned None, so what is in `tensor` counts. a clone, or"),
    (
        exchanged_indices,
        "the first of the second half, rank 0 sends chunk 2, which is not complete",
    ),
    (put_elsewhere, "arrives at rank 1 in a message of rank 2, and was put at element 666"),
    (into_zeros, "only its own chunk is complete, the others are zeros"),
    (scattered_twice, "the second half is the first half once more"),
    (rounds(ahead=1, replaces=True, adds=True), "replaces a chunk by what arrives, and the second half adds"),
    (second_half(never_put), "what arrives in the second half is not written into `tensor`"),
    (second_half(put_in_the_list), "and `pieces[k] = buffer` changes a list"),
    (lambda tensor: None, "not written yet"),
    (lambda tensor: tensor, "its own tensor is what it was, and nothing that arrived is in it"),
    (two_halves(finish=lambda sums, n: sums / n), "that is the mean"),
    (two_halves(second=False), "the second half is missing"),
    (two_halves(first=False), "went around without being added up"),
    (two_halves(add=True), "the second half adds what arrives: a chunk that arrives"),
    (two_halves(short=1), "the second half is one round short"),
    (two_halves(order=lambda rank, n: range(rank, rank - n, -1)), "in the order in which they arrived"),
    (two_halves(order=lambda rank, n: range(1, n + 1)), "one place too far left"),
    (two_halves(order=lambda rank, n: reversed(range(n))), "in reverse order"),
    (rounds(begins=1), "the second half begins with a chunk that is not complete"),
    (rounds(begins=-1), "the second half begins with a chunk that is not complete"),
    (rounds(way=-1, ahead=-1, begins=1), "the second half begins with a chunk that is not complete"),
    (rounds(ahead=1, replaces=True), "the first half replaces a chunk by what arrives"),
    (rounds(way=-1, replaces=True), "the first half replaces a chunk by what arrives"),
    (rounds(first=-1), "the first half is one round short"),
    (rounds(way=-1, ahead=-1, first=-1), "the first half is one round short"),
    (rounds(way=-1, second=-1), "the second half is one round short"),
    (rounds(ahead=1, adds=True), "the second half adds what arrives: a chunk"),
    (rounds(first=-1, second=-1), "each half is one round short"),
    (rounds(first=1, begins=1), "the first half has a round too many"),
    (alone(rounds(against=(1,))), "the second half sends to the other neighbour than its indices are for"),
    (alone(rounds(way=-1, against=(1,))), "the second half sends to the other neighbour than its indices"),
    (alone(rounds(against=(0,))), "the first half sends to the other neighbour than its indices are for"),
    (rounds(averages=True), "takes the mean of two"),
    (two_halves(finish=lambda sums, n: sums.float()), "float32, and its input is float64"),
    (two_halves(finish=lambda sums, n: sums.tolist()), "returned list, with the right numbers in it"),
    (two_halves(finish=lambda sums, n: sums.half().double()), "went through float16"),
    (own_chunk_in_every_round, "a rank sends its own chunk in every round"),
    (growing, "what goes around is the growing sum"),
    (swapped_by_distance, "reaches all ranks only where their number is a power of two"),
    (without_its_own, "its own numbers are missing"),
    (leaves_out_the_rest, "the remainder is lost"),
    (own_chunk, "it returned its own chunk only"),
    (by_torch, "torch's own dist.all_reduce"),
    (lambda tensor: ring.all_reduce(tensor), "zerolab's own ring.all_reduce"),
]
diagnose = together(check_all_reduce, [*GOLD, *(answer for answer, _ in [*LESS, *WRONG])])


@pytest.mark.parametrize("answer", GOLD)
def test_every_way_within_the_bytes_and_the_memory_gets_gold(answer):
    assert diagnose(answer) is None


@pytest.mark.parametrize(("answer", "said"), LESS)
def test_right_values_reach_the_target_that_bytes_and_memory_allow(answer, said):
    found = diagnose(answer)
    assert isinstance(found, Reached) and said in found


@pytest.mark.parametrize(("answer", "diagnosis"), WRONG)
def test_the_check_names_the_mistake(answer, diagnosis):
    found = diagnose(answer)
    assert diagnosis in found and not isinstance(found, Reached)


def test_the_number_of_messages_rules_out_a_mistake_that_leads_to_the_same_values():
    begins, short = (check_all_reduce.diagnose(rounds(**knob)) for knob in ({"begins": 1}, {"first": -1}))
    assert "not complete" in begins and "round short" not in begins
    assert "round short" in short and "not complete" not in short


def test_a_deadlock_is_named(monkeypatch):
    monkeypatch.setattr(attempts, "SECONDS", 2.5)
    assert "because all of them send first" in check_all_reduce.diagnose(alone(sends_first))


def test_bronze_is_a_pass(capsys):
    result = check_all_reduce(alone(lambda tensor: through_rank_0(tensor)))
    assert result and result.passed and result.message.startswith("Bronze, ")
    assert capsys.readouterr().out.startswith("✓ Bronze, because the values are right")


def test_what_counts_most_is_said():
    assert lowest([]) is None
    assert lowest([silver("b"), bronze("a")]) == bronze("a")
    assert lowest([bronze("a"), "a mistake"]) == "a mistake"


def test_the_peak_counts_what_lives_at_the_same_time():
    given = torch.ones(1000)
    with Peak([given]) as peak:
        for _ in range(5):
            copy = given * 2
            given += copy[:10].sum()
            del copy
    assert 4000 <= peak.nbytes <= 4000 + 8
    with Peak([given]) as peak:
        both = [given.clone(), given.clone()]
        given[:10] += both[0][:10]
    assert peak.nbytes == 8000

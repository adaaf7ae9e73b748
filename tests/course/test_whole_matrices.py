"""Lesson 10's exercise: whatever the style, right owners pass, and each mistake is named."""

import heapq
import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.lessons import drawing, solutions_travel_by_value, spoken

from zerolab.course.lessons.whole_matrices import check_owners
from zerolab.course.lessons.whole_matrices.cases import CASES
from zerolab.course.lessons.whole_matrices.rules import rules
from zerolab.course.lessons.whole_matrices.solution import owners

solutions_travel_by_value(__name__)


def longest_first(work):
    return sorted(range(len(work)), key=lambda place: -work[place])


def by_heap(work, n):
    """Right: the rank with the least work is on top of a heap."""
    heap, found = [(0, rank) for rank in range(n)], [None] * len(work)
    for place in longest_first(work):
        load, rank = heapq.heappop(heap)
        found[place] = rank
        heapq.heappush(heap, (load + work[place], rank))
    return tuple(found)


def by_tensor(work, n):
    """Right: the same with tensors, and the last of equal ranks."""
    loads, found = torch.zeros(n, dtype=torch.int64), torch.zeros(len(work), dtype=torch.int64)
    for place in longest_first(work):
        found[place] = n - 1 - int(loads.flip(0).argmin())
        loads[found[place]] += work[place]
    return found


def improved(work, n):
    """Right: longest first, then moves and swaps while they help the busiest rank."""
    plan = list(by_heap(work, n))
    load = lambda rank: sum(w for w, owner in zip(work, plan, strict=True) if owner == rank)
    for a, b in itertools.combinations(range(len(work)), 2):
        before = max(load(plan[a]), load(plan[b]))
        plan[a], plan[b] = plan[b], plan[a]
        if max(load(plan[a]), load(plan[b])) > before:
            plan[a], plan[b] = plan[b], plan[a]
    return plan


def the_best(work, n):
    """Right: tries all where there are few, and is the rule elsewhere."""
    if n ** len(work) > 5000:
        return by_heap(work, n)
    busiest = lambda plan: max(sum(w for w, o in zip(work, plan, strict=True) if o == r) for r in range(n))
    return list(min(itertools.product(range(n), repeat=len(work)), key=busiest))


def with_a_set(work, n):
    """Right: a set, of numbers, whose order is of no matter."""
    left, loads, found = set(range(len(work))), [0] * n, [0] * len(work)
    while left:
        place = max(left, key=lambda each: (work[each], -each))
        left.remove(place)
        found[place] = loads.index(min(loads))
        loads[found[place]] += work[place]
    return found


RIGHT = [owners, by_heap, by_tensor, improved, the_best, with_a_set]


@pytest.mark.parametrize("answer", RIGHT, ids=lambda answer: answer.__name__)
def test_a_right_answer_passes(answer):
    assert check_owners.diagnose(answer) is None


def greedy(work, n, order, key=lambda work, count: work):
    loads, counts, found = [0] * n, [0] * n, [0] * len(work)
    for place in order:
        found[place] = rank = min(range(n), key=lambda rank: key(loads[rank], counts[rank]))
        loads[rank] += work[place]
        counts[rank] += 1
    return found


def all_on_rank_0(work, n):
    return [0] * len(work)


def in_turn(work, n):
    return [place % n for place in range(len(work))]


def sorted_in_turn(work, n):
    found = [0] * len(work)
    for turn, place in enumerate(longest_first(work)):
        found[place] = turn % n
    return found


def snake(work, n):
    found = [0] * len(work)
    for turn, place in enumerate(longest_first(work)):
        row, rank = divmod(turn, n)
        found[place] = rank if row % 2 == 0 else n - 1 - rank
    return found


def as_listed(work, n):
    return greedy(work, n, range(len(work)))


def shortest_first(work, n):
    return greedy(work, n, reversed(longest_first(work)))


def by_count(work, n):
    return greedy(work, n, longest_first(work), key=lambda load, count: count)


def to_the_busiest(work, n):
    return greedy(work, n, longest_first(work), key=lambda load, count: -load)


def chunks(work, n):
    size = max(1, -(-len(work) // n))
    return [place // size for place in range(len(work))]


def neighbours(work, n):
    found, rank, load = [], 0, 0
    for each in work:
        if load >= Fraction(sum(work), n) and rank < n - 1:
            rank, load = rank + 1, 0
        found.append(rank)
        load += each
    return found


def not_put_back(work, n):
    return by_heap(sorted(work, reverse=True), n)


def from_its_own_rank(work, n):
    return [(dist.get_rank() + place) % n for place in range(len(work))]


def never_the_last(work, n):
    return greedy(work, max(n - 1, 1), longest_first(work))


def runs_of_neighbours(work, n):
    """Cut where the running sum passes a multiple of the mean."""
    before = [sum(work[:place]) for place in range(len(work))]
    return [min(int(done * n // (sum(work) or 1)), n - 1) for done in before]


def filled_up(work, n):
    owner, rank, busy = [0] * len(work), 0, 0
    for place in longest_first(work):
        if busy and busy + work[place] > sum(work) / n and rank < n - 1:
            rank, busy = rank + 1, 0
        owner[place] = rank
        busy += work[place]
    return owner


def from_one(work, n):
    return [rank + 1 for rank in by_heap(work, n)]


def lists_by_rank(work, n):
    plan = by_heap(work, n)
    return [[place for place, owner in enumerate(plan) if owner == rank] for rank in range(n)]


def loads_by_rank(work, n):
    plan = by_heap(work, n)
    return [sum(w for w, owner in zip(work, plan, strict=True) if owner == rank) for rank in range(n)]


def as_dict(work, n):
    return dict(enumerate(by_heap(work, n)))


def as_text(work, n):
    return "".join(map(str, by_heap(work, n)))


def at_random(work, n):
    chance = random.SystemRandom()
    plan = list(by_heap(work, n))
    ranks = list(range(n))
    chance.shuffle(ranks)
    return [ranks[owner] for owner in plan]


def one_swapped(work, n):
    """Nobody expects this one: the longest and the shortest change places."""
    plan = list(by_heap(work, n))
    if len(plan) > 4:
        order = longest_first(work)
        plan[order[0]], plan[order[-1]] = plan[order[-1]], plan[order[0]]
    return plan


def nothing(work, n):
    return None


def printed(work, n):
    print(by_heap(work, n))


def parts_of(work, n):
    return [place * n // len(work) for place in range(len(work))]


def floor_blocks(work, n):
    each, found = len(work) // n, [0] * len(work)
    for turn, place in enumerate(longest_first(work)):
        found[place] = min(turn // each, n - 1)
    return found


def overwritten(work, n):
    loads, found = [0] * n, [0] * len(work)
    for place in longest_first(work):
        found[place] = rank = loads.index(min(loads))
        loads[rank] = work[place]
    return found


def by_index(work, n):
    loads, found = [0] * n, [0] * len(work)
    for each in sorted(work, reverse=True):
        rank = loads.index(min(loads))
        found[work.index(each)] = rank
        loads[rank] += each
    return found


def by_chance(work, n):
    chance, best = random.Random(0), None
    for _ in range(50):
        plan = [chance.randrange(n) for _ in work]
        loads = [sum(w for w, owner in zip(work, plan, strict=True) if owner == rank) for rank in range(n)]
        if best is None or max(loads) < best[0]:
            best = max(loads), plan
    return best[1]


def by_hash(work, n):
    names = {f"matrix {place}" for place in range(len(work))}
    place_of = lambda name: int(name.split()[1])
    order = sorted(names, key=lambda name: (-work[place_of(name)], hash(name)))
    return greedy(work, n, map(place_of, order))


def in_pairs(work, n):
    order, found, rank = longest_first(work), [0] * len(work), 0
    while order:
        for end in (0, -1):
            if order:
                found[order.pop(end)] = rank
        rank = (rank + 1) % n
    return found


def by_squares(work, n):
    return by_measure(work, n, lambda load, each: load + each**2)


def by_roots(work, n):
    return by_measure(work, n, lambda load, each: load + each**0.5)


def by_measure(work, n, add):
    loads, found = [0] * n, [0] * len(work)
    for place in longest_first(work):
        found[place] = rank = loads.index(min(loads))
        loads[rank] = add(loads[rank], work[place])
    return found


def best_fit(work, n):
    fair, loads, found = sum(work) / n, [0] * n, [0] * len(work)
    for place in longest_first(work):
        room = [rank for rank in range(n) if loads[rank] + work[place] <= fair]
        found[place] = rank = max(room, key=lambda rank: loads[rank]) if room else n - 1
        loads[rank] += work[place]
    return found


def searches_all(work, n):
    plans = itertools.product(range(n), repeat=len(work))
    loads = lambda plan: [
        sum(w for w, owner in zip(work, plan, strict=True) if owner == rank) for rank in range(n)
    ]
    return min(plans, key=lambda plan: max(loads(plan)))


def floats(work, n):
    return [float(rank) for rank in by_heap(work, n)]


def kept_loads(work, n, loads=[0] * 8):
    found = [0] * len(work)
    for place in longest_first(work):
        found[place] = rank = min(range(n), key=lambda rank: loads[rank])
        loads[rank] += work[place]
    return found


def count_then_work(work, n):
    return greedy(work, n, longest_first(work), key=lambda load, count: (count, load))


def by_argsort(work, n):
    """The shortest first, and equal ones in no order that this rule could foresee."""
    return greedy(work, n, np.argsort(work).tolist())


def in_turn_from_rank_1(work, n):
    return [(place + 1) % n for place in range(len(work))]


def sorted_in_turn_backwards(work, n):
    found = [0] * len(work)
    for turn, place in enumerate(longest_first(work)):
        found[place] = n - 1 - turn % n
    return found


def sent_to_all(work, n):
    plan = [by_heap(work, n)]
    dist.broadcast_object_list(plan, 0)
    return plan[0]


def noted_by_work(work, n):
    """The last owner of a matrix of some work is that of all others of this work."""
    owner_of, loads = {}, [0] * n
    for each in sorted(work, reverse=True):
        owner_of[each] = loads.index(min(loads))
        loads[owner_of[each]] += each
    return [owner_of[each] for each in work]


WRONG = {
    by_argsort: "The matrices are taken the least work first: begin with the most work",
    in_turn_from_rank_1: "dealt out in turn, so that the ranks have equally many. The matrices are taken as",
    sorted_in_turn_backwards: "so that the ranks have equally many. The matrices are taken the most work",
    sent_to_all: "your function calls dist.broadcast_object_list, and nothing has to be sent: each rank can",
    noted_by_work: "matrices of equal work all have one owner: note the owner by the place of the matrix",
    parts_of: "each rank gets equally many matrices, which follow each other. The matrices are taken as",
    floor_blocks: "ZeroDivisionError: integer division or modulo by zero, with work [5, 3], 4 ranks (line ",
    overwritten: "the least work in its last matrix alone. The matrices are taken the most work first: add",
    by_index: "equal matrices have one place together, as list.index finds it",
    by_chance: "the owners are drawn by chance, with `randrange`, and rank ",
    by_hash: "two processes come to different owners (seen with work [",
    in_pairs: "each rank in turn gets two matrices that follow each other. The matrices are taken the "
    "most and the least work by turns",
    by_squares: "with the least sum of the squares of its work",
    by_roots: "with the least sum of the roots of its work",
    best_fit: "a rank that is filled up to the mean before others get one, and where no rank has room",
    searches_all: "not returned after 3 s: is it an endless loop, or a search through all 16,777,216 lists",
    floats: "which has floats: a rank is a whole number",
    from_its_own_rank: "so use no dist.get_rank()",
    never_the_last: "rank world_size - 1 never gets a matrix",
    runs_of_neighbours: "each rank gets a run of neighbours in the list",
    filled_up: "rank 0 is filled up with the matrices of most work, then rank 1 with the next",
    kept_loads: "returns other owners when it is called a second time (seen with work [7, 3, 9, 9], 2 ranks)",
    count_then_work: "the fewest matrices, and their work counts only between ranks that have equally many",
    all_on_rank_0: "every matrix goes to rank 0",
    in_turn: "dealt out in turn, so that the ranks have equally many. The matrices are taken as they stand",
    sorted_in_turn: "in turn, so that the ranks have equally many. The matrices are taken the most work",
    snake: "there and back",
    as_listed: "The matrices are taken as they stand in the list: begin with the most work",
    shortest_first: "The matrices are taken the least work first: begin with the most work",
    by_count: "count their work and not the matrices",
    to_the_busiest: "every matrix goes to rank 0, because you say so, because it has the most work so far",
    chunks: "each rank gets equally many matrices, which follow each other",
    neighbours: "neighbours stay together",
    not_put_back: "the most work first, and the owners stand in that order and not in that of the list",
    from_one: "a matrix goes to rank 2, and the ranks are 0 to 1",
    lists_by_rank: "return a list with the number of a rank for each matrix",
    loads_by_rank: "your list has 2 numbers, one for each rank, for 4 matrices",
    as_dict: "your function returned dict",
    as_text: "your function returned str",
    at_random: "two ranks come to different owners",
    one_swapped: "works longer than needed: it has",
    nothing: "not written yet",
    printed: "your function prints something and returns None: return the result, because the check",
}


@pytest.mark.parametrize("answer", WRONG, ids=lambda answer: answer.__name__)
def test_a_wrong_answer_is_named(answer):
    assert WRONG[answer] in (check_owners.diagnose(answer) or "accepted")


def test_every_rule_is_a_mistake_in_some_case():
    """None of the rules behind the sentences is as good as the right one in all cases."""
    best = [max(case.loads(owners(list(case.work), case.world_size))) for case in CASES]
    for rule in rules():
        busiest = [max(case.loads(rule.plan(case))) for case in CASES]
        assert any(got > want for got, want in zip(busiest, best, strict=True)), str(rule)


@pytest.mark.parametrize(
    ("blocks", "ranks", "says"), [(8, 6, "1.02"), (8, 24, "1.07"), (8, 32, "1.29"), (1, 2, "1.14")]
)
def test_the_figure_has_the_engines_own_owners(blocks: int, ranks: int, says: str):
    alt = spoken(drawing("whole_matrices", "shares"), 2.8, blocks=blocks, ranks=ranks)
    assert alt == f"{blocks} blocks on {ranks} ranks: the busiest has {says} times the mean."

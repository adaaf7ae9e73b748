"""Lesson 10's exercise: the rules by which a wrong answer may have chosen its owners, and their replays.

A rule has an order in which it takes the matrices, a way to choose a rank, and a place for the owner in the
list. Each may be the right one or another, so a few of them make several hundred rules.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from zerolab.course.lessons.whole_matrices.cases import Case, Plan
from zerolab.course.lessons.whole_matrices.choices import CHOICES, LEAST_WORK, Choice, Ranks

Order = Callable[[Case], Sequence[int]]
"""The places of the matrices, as they are taken."""


def _by_work(sign: int, ties: int = 1) -> Order:
    """By their work; equal ones as they stand in the list, or the last of them first."""
    return lambda case: sorted(range(len(case.work)), key=lambda n: (sign * case.work[n], ties * n))


def _outside_in(case: Case) -> list[int]:
    """The most work, the least, the second most, and so on."""
    order = _by_work(-1)(case)
    return [order[-1 - turn // 2 if turn % 2 else turn // 2] for turn in range(len(order))]


LONGEST_FIRST = "the most work first"
ORDERS: Mapping[str, tuple[Order, ...]] = {
    LONGEST_FIRST: (_by_work(-1), _by_work(-1, -1)),
    "as they stand in the list": (lambda case: range(len(case.work)),),
    "the least work first": (_by_work(1), _by_work(1, -1)),
    "the most and the least work by turns": (_outside_in,),
    "from the end of the list": (lambda case: range(len(case.work))[::-1],),
}
AT_ITS_PLACE = ""
PLACES: Mapping[str, Callable[[Case, int, int], int]] = {
    AT_ITS_PLACE: lambda case, turn, place: place,
    ", and the owners stand in that order and not in that of the list": lambda case, turn, place: turn,
    ", and equal matrices have one place together, as list.index finds it": lambda case, turn, place: (
        case.work.index(case.work[place])
    ),
}


class Rule(NamedTuple):
    """A rule: the name of its order and the order itself, its choice, and the name of the place."""

    order: str
    take: Order
    choice: Choice
    place: str

    def plan(self, case: Case) -> Plan:
        """The owners that it chooses."""
        ranks, found = Ranks(case), [0] * len(case.work)
        for turn, place in enumerate(self.take(case)):
            owner = self.choice.choose(ranks, turn, case.work[place])
            found[PLACES[self.place](case, turn, place)] = owner
            ranks.give(owner, case.work[place])
        return found

    def __str__(self) -> str:
        """What it does, and what to do instead."""
        said, instead = self.choice.words, []
        if not said.startswith("every"):
            said += f". The matrices are taken {self.order}{self.place}"
            instead += ["begin with the most work"] if self.order != LONGEST_FIRST else []
        if self.choice.words != LEAST_WORK.words:
            instead.append(self.choice.instead)
        if self.place != AT_ITS_PLACE:
            instead.append("put each owner at the place of its matrix in the list")
        return f"{said}: {', and '.join(instead)}"


def rules() -> list[Rule]:
    """All rules but the right one, those first that need the fewest mistakes.

    A wrong place costs most: matrices that are dealt out in turn as they stand in the list are also sorted,
    dealt out, and not put back.
    """
    made = [
        Rule(name, order, choice, place)
        for (name, orders), choice, place in product(ORDERS.items(), CHOICES, PLACES)
        for order in orders
    ]
    return sorted(filter(_mistakes, made), key=_mistakes)


def _mistakes(rule: Rule) -> float:
    """How many mistakes a rule has."""
    return (rule.order != LONGEST_FIRST) + (rule.choice.words != LEAST_WORK.words) + 1.5 * bool(rule.place)


def followed(answers: Mapping[Case, Plan]) -> Rule | None:
    """The rule that all answers follow: by their owners, or else by how much work the ranks have.

    Several rules may lead to the same work. Of those it is the one with the same matrices together, because
    ranks may be counted in another order. If none has, it is the one that gives most matrices their owner,
    because matrices of equal work may be taken in any order.
    """
    fitting = [rule for rule in rules() if all(_same_loads(*each, rule) for each in answers.items())]
    for same in (_same_owners, _same_together):
        for rule in fitting:
            if all(same(plan, rule.plan(case)) for case, plan in answers.items()):
                return rule
    equal = lambda got, other: sum(a == b for a, b in zip(got, other, strict=True))
    return max(
        fitting,
        key=lambda rule: sum(equal(plan, rule.plan(case)) for case, plan in answers.items()),
        default=None,
    )


def _same_owners(got: Plan, other: Plan) -> bool:
    return list(got) == list(other)


def _same_together(got: Plan, other: Plan) -> bool:
    """Whether two plans differ at most in the numbers of the ranks."""
    pairs = set(zip(got, other, strict=True))
    return len(pairs) == len(set(got)) == len(set(other))


def _same_loads(case: Case, got: Plan, rule: Rule) -> bool:
    """Whether the ranks have as much to do, whichever of them has it."""
    return sorted(case.loads(got)) == sorted(case.loads(rule.plan(case)))

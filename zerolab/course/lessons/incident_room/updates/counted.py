"""Lesson 09: in words, how often each rank's micro-batches count in an update, where 1 is right.

The numbers are by owner of a shard, by rank whose gradient it is, and by micro-batch.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.room import Case


def told(counts: torch.Tensor, case: Case) -> str | None:
    """The rule that the numbers follow, if it is one of a few."""
    if _alike(counts):
        return None
    by_owner = counts.mean(dim=(1, 2), keepdim=True)
    if _same(counts, counts[:1, :1]):
        return _of_micro_batches(counts[0, 0].tolist(), case)
    if _same(counts, counts[:1, :, :1]):
        return _of_ranks(counts[0, :, 0].tolist(), case)
    if _same(counts, by_owner):
        return _of_owners(by_owner.flatten().tolist(), case)
    return _own_and_others(counts, case)


def _alike(counts: torch.Tensor) -> bool:
    return _same(counts, counts.flatten()[:1])


def _same(counts: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(counts, other.expand_as(counts), rtol=1e-4, atol=1e-4)


def _of_micro_batches(each: list[float], case: Case) -> str:
    """The same micro-batches of all ranks count otherwise."""
    there, last = _there(each), len(each) - 1
    what = "add the gradients of all micro-batches up"
    if there in ([0], [last]):
        which = "last" if there == [last] else "first"
        return f"only the {which} micro-batch counts{_also(each[there[0]], case)}: {what}"
    if there and len(there) < len(each):
        missing = [n for n in range(len(each)) if n not in there]
        return f"{named('micro-batch', missing)} missing{_also_all(each, there, case)}: {what}"
    growth = {round(after / before, 4) for before, after in pairwise(each)}
    if len(growth) == 1 and len(each) > 2:
        return (
            f"each micro-batch counts {growth.pop():.3g} times the one before it, and the last "
            f"{factor(each[-1], case)} what it should. The sum of those before is scaled at each "
            "micro-batch: divide it once, in the end"
        )
    return _other_one("micro-batch", each, case) or (
        f"micro-batches 0 to {last} count {_listed(each)} times what they should: all have to count alike"
    )


def _of_ranks(each: list[float], case: Case) -> str:
    """All that some ranks have counts otherwise."""
    there = _there(each)
    if len(there) == 1:
        return (
            f"only rank {there[0]}'s gradients count{_also(each[there[0]], case)}: sum those of all ranks, "
            "with ring.reduce_scatter"
        )
    if there and len(there) < len(each):
        missing = [n for n in range(len(each)) if n not in there]
        return f"{named('rank', missing)} missing in the sum{_also_all(each, there, case)}"
    return _other_one("rank", each, case) or (
        f"the gradients of ranks 0 to {len(each) - 1} count {_listed(each)} times what they should: all have "
        "to count alike"
    )


def _of_owners(each: list[float], case: Case) -> str:
    there = _there(each)
    missing = [n for n in range(len(each)) if n not in there]
    if missing and there:
        shards = f"shard{'s' * (len(missing) > 1)} of {named('rank', missing, verb=False)}"
        return f"the {shards} {'have' if len(missing) > 1 else 'has'} no update at all"
    return _other_one("shard of rank", each, case) or (
        f"the shards of ranks 0 to {len(each) - 1} have {_listed(each)} times the right update: each rank "
        "scales its own shard by a number of its own"
    )


def _own_and_others(counts: torch.Tensor, case: Case) -> str | None:
    """Whether a rank's gradients count otherwise in its own shard than in the others'."""
    if len(counts) != case.ranks or case.ranks == 1:
        return None
    mine = torch.eye(case.ranks, dtype=torch.bool).unsqueeze(2).expand_as(counts)
    own, others = counts[mine], counts[~mine]
    if not _alike(own) or not _alike(others):
        return None
    first, second = float(own[0]), float(others[0])
    if abs(second) < 1e-4:
        return (
            f"each rank's shard is updated with the rank's own gradients alone{_also(first, case)}: sum them "
            "over the ranks first, with ring.reduce_scatter"
        )
    if abs(first) < 1e-4:
        return f"a rank's own gradients are missing in its shard{_also(second, case)}"
    if abs(first - 2) < 1e-4 and abs(second - 1) < 1e-4:
        return "each rank adds its own numbers once more, and the sum over the ranks has them already"
    return (
        f"in each rank's shard the rank's own gradients count {factor(first, case)} and the other ranks' "
        f"{factor(second, case)} what they should"
    )


def _there(each: Sequence[float]) -> list[int]:
    return [number for number, count in enumerate(each) if abs(count) > 1e-4]


def named(what: str, numbers: Sequence[int], verb: bool = True) -> str:
    many = len(numbers) > 1
    return f"{what}{'es' * (many and what.endswith('batch'))}{'s' * (many and what == 'rank')} " + (
        f"{' and '.join([', '.join(map(str, numbers[:-1])), str(numbers[-1])]) if many else numbers[0]}"
        f"{(' are' if many else ' is') * verb}"
    )


def _also(count: float, case: Case) -> str:
    """How often the one that counts does, where that is not once."""
    return "" if abs(count - 1) < 1e-4 else f", and {factor(count, case)} what it should"


def _also_all(each: Sequence[float], there: Sequence[int], case: Case) -> str:
    counts = {round(each[number], 4) for number in there}
    if counts == {1}:
        return ""
    if len(counts) == 1:
        return f", and the others count {factor(counts.pop(), case)} what they should"
    return f", and the others count {_listed([each[n] for n in there])} times what they should"


def _other_one(what: str, each: Sequence[float], case: Case) -> str | None:
    """Whether all but one are right."""
    other = [number for number, count in enumerate(each) if abs(count - 1) > 1e-4]
    if len(other) != 1 or len(each) < 3:
        return None
    number = other[0]
    return f"all are right but {what} {number}, which counts {factor(each[number], case)} what it should"


def _listed(each: Sequence[float]) -> str:
    shown = [f"{count + 0:.3g}" for count in each]  # -0.0 + 0 is 0.0
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def sizes(case: Case) -> dict[str, float]:
    """N and M, and what is made of them, by name."""
    n, m = float(case.ranks), float(case.micro_batches)
    return {"N": n, "N²": n**2} | ({"M": m, "N·M": n * m, "M²": m**2} if m > 1 else {})


def names(number: float, case: Case) -> list[str]:
    """Which of the sizes a number is."""
    return [name for name, size in sizes(case).items() if size > 1 and abs(number - size) < 1e-4 * size]


def factor(count: float, case: Case) -> str:
    """The number, with what it is made of where that is known, and the word times."""
    if abs(count) < 1e-4:
        return "0 times"
    parts = [f"1/({name})" if "·" in name else f"1/{name}" for name in names(1 / abs(count), case)]
    found = names(abs(count), case) or parts
    sign = "-" * (count < 0)
    made = f" ({' or '.join(sign + name for name in found)})" if found else ""
    return f"{count:.3g}{made} times"


def momentum_of(count: float) -> str:
    """What the optimizer's settings make of a factor, where it is theirs."""
    if abs(count - 1 - MOMENTUM) < 1e-6:
        return ", 1 + momentum: an optimizer with nesterov=True makes that of a right gradient"
    if abs(count + 1) < 1e-6:
        return ": its sign is turned, as with maximize=True or a negative gradient"
    return ""

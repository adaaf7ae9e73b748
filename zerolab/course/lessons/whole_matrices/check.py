"""Lesson 10's exercise: give matrices to ranks so that the busiest has little to do."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from zerolab.course.attempts import Odd, attempt
from zerolab.course.exercise import graded
from zerolab.course.lessons.whole_matrices.asked import SECONDS, Answer, Slow, answers, by_hash_seed
from zerolab.course.lessons.whole_matrices.cases import CASES, Case, Plan
from zerolab.course.lessons.whole_matrices.rules import followed
from zerolab.course.lessons.whole_matrices.solution import owners
from zerolab.course.names import names_in

HINTS = (
    "keep a list of what each rank has to do so far. A matrix goes to the rank that has the least.",
    "the order matters. A matrix with much work that comes last finds every rank busy: which one should be "
    "first?",
    "sort the places of the matrices by their work, the most first. Give each place to the rank with the "
    "least work, and add the work to it. Return the owners in the order of the list.",
)
CHANCE = {
    "random",
    "Random",
    "SystemRandom",
    "randint",
    "randrange",
    "choice",
    "choices",
    "shuffle",
    "sample",
}
CHANCE |= {"rand", "randperm", "urandom", "default_rng"}
Plans = Mapping[Case, Plan]


@graded(
    "Your busiest rank has no more to do than with the most-work-first rule.",
    call="owners(work, world_size)",
    hints=HINTS,
    solution=[owners],
)
def check_owners(fn: Callable) -> str | None:
    """Ask fn(work, world_size) on two ranks for the owners of several lists of matrices; name the mistake.

    Right is every list of owners whose busiest rank has no more to do than with the most-work-first rule, if
    each rank computes it by itself.
    """
    outcome = attempt(answers, [(fn, CASES)] * 2)
    if outcome.failure:
        return outcome.failure
    if sent := next((call.call for own in outcome.messages for call in own), None):
        return (
            f"your function calls {sent}, and nothing has to be sent: each rank can compute the whole list "
            "by itself"
        )
    (first, again), (other, _) = (
        [dict(zip(CASES, each, strict=False)) for each in own] for own in outcome.values
    )
    if set(map(str, first.values())) == {str(Odd("NoneType", ""))}:
        return outcome.nothing_returned
    if odd := next(filter(None, (_odd(case, first[case]) for case in CASES)), None):
        return odd
    wrong = [case for case in CASES if _too_long(case, first[case])]
    by_hash = [] if wrong else by_hash_seed(fn, CASES)
    if differ := _differ(fn, first, other, again, by_hash):
        return differ
    return f"{_mistake(fn, first, wrong[0])} (seen with {wrong[0]})" if wrong else None


def _odd(case: Case, got: Answer) -> str | None:
    """What keeps an answer from being a list of owners."""
    seen = f" (seen with {got.case if isinstance(got, Slow) else case})"
    if isinstance(got, Slow):
        lists = got.case.world_size ** len(got.case.work)
        return (
            f"your function has not returned after {SECONDS} s: is it an endless loop, or a search through "
            f"all {lists:,} lists of owners? A simple rule is enough{seen}"
        )
    if isinstance(got, Odd):
        said = f"{got.kind} {got.text}".replace("NoneType", "None").strip()
        if got.numbers:
            return f"your function returned {said}, which has floats: a rank is a whole number, an int{seen}"
        return f"your function returned {said}: return a list with the number of a rank for each matrix{seen}"
    if len(got) != len(case.work):
        per_rank = ", one for each rank" if len(got) == case.world_size else ""
        return (
            f"your list has {len(got)} numbers{per_rank}, for {len(case.work)} matrices: return the owner of "
            f"each matrix{seen}"
        )
    beyond = [owner for owner in got if not 0 <= owner < case.world_size]
    if beyond:
        return (
            f"a matrix goes to rank {beyond[0]}, and the ranks are 0 to {case.world_size - 1}: return the "
            f"owner's number, which is less than world_size{seen}"
        )
    return None


def _too_long(case: Case, got: Plan) -> bool:
    return max(case.loads(got)) > _possible(case)


def _possible(case: Case) -> int:
    """What the busiest rank has to do with the most-work-first rule."""
    return max(case.loads(owners(list(case.work), case.world_size)))


def _differ(
    fn: Callable, first: Plans, other: Plans, again: Plans, by_hash: Sequence[Sequence[Plan]]
) -> str | None:
    """Whether the owners differ by rank, by call, or by what hash() returns, which differs by process."""
    where = lambda these, those: next((case for case in CASES if these[case] != those[case]), None)
    if case := where(first, other):
        asks = "get_rank" in names_in(fn)
        instead = "dist.get_rank()" if asks else "random numbers, and no order that differs by process"
        return (
            f"two ranks come to different owners (seen with {case}): every rank computes the list by itself, "
            f"so use no {instead}"
        )
    if case := where(first, again):
        return (
            f"your function returns other owners when it is called a second time (seen with {case}): it "
            "keeps something from call to call, such as a list outside the function or in a default "
            "argument. Begin anew in each call"
        )
    if by_hash and (case := where(*(dict(zip(CASES, plans, strict=True)) for plans in by_hash))):
        return (
            f"two processes come to different owners (seen with {case}): your function uses the order of a "
            "set, or hash(), and that differs from process to process unless PYTHONHASHSEED is set. Use an "
            "order that does not, such as that of the list"
        )
    return None


def _mistake(fn: Callable, answers: Plans, case: Case) -> str:
    """The mistake behind all answers, or what the busiest rank of one has to do."""
    if rule := followed(answers):
        return str(rule)
    if _by_work(answers):
        return (
            "matrices of equal work all have one owner: note the owner by the place of the matrix in the "
            "list, and not by its work"
        )
    if told := _of_all(answers):
        return told
    loads = case.loads(answers[case])
    busiest, least = loads.index(max(loads)), loads.index(min(loads))
    return (
        f"{_by_chance(fn)}rank {busiest} works longer than needed: it has {loads[busiest]:,} to do and rank "
        f"{least} has {loads[least]:,}, where {_possible(case):,} is possible for the busiest. Begin with "
        "the matrix with most work, and give each to the rank that has the least work so far"
    )


def _of_all(answers: Plans) -> str | None:
    """What all lists have in common, whatever rule has made them."""
    shared = {case: plan for case, plan in answers.items() if case.world_size > 1 and len(set(plan)) > 1}
    if not shared:
        return None
    enough = {case: plan for case, plan in answers.items() if len(plan) >= case.world_size > 1}
    if all(max(plan) < case.world_size - 1 for case, plan in enough.items()):
        return "rank world_size - 1 never gets a matrix: the ranks are 0 to world_size - 1"
    longest_first = lambda case: sorted(range(len(case.work)), key=lambda place: -case.work[place])
    for order, said in (
        (lambda case: range(len(case.work)), "each rank gets a run of neighbours in the list"),
        (longest_first, "rank 0 is filled up with the matrices of most work, then rank 1 with the next"),
    ):
        if all(plan[a] <= plan[b] for case, plan in shared.items() for a, b in pairwise(order(case))):
            return (
                f"{said}: begin with the matrix with most work, and give each to the rank that has the "
                "least work so far"
            )
    return None


def _by_work(answers: Plans) -> bool:
    """Whether all matrices of equal work have one owner, in all cases, and more than one rank has any."""
    owners_of = [set(zip(case.work, plan, strict=True)) for case, plan in answers.items()]
    one_each = all(len(pairs) == len({work for work, _ in pairs}) for pairs in owners_of)
    return one_each and any(len(set(plan)) > 1 for plan in answers.values())


def _by_chance(fn: Callable) -> str:
    """Which function of random numbers the code uses, if it does."""
    used = sorted(CHANCE.intersection(names_in(fn)))
    return f"the owners are drawn by chance, with `{used[-1]}`, and " if used else ""

"""The rule that a wrong sum follows on all ranks is named; where the ranks differ, none is."""

import pytest

from zerolab.course.patterns import rule

RANKS = range(3)


def wrong(count, steps=1):
    """By rank: the factors, where `count(own, peer, step)` says how often a rank's numbers count."""
    name = lambda peer, step: f"rank {peer}'s gradient" + (f" of step {step}" if steps > 1 else "")
    parts = [(peer, step) for step in range(steps) for peer in RANKS]
    should = {name(*part): 1.0 for part in parts}
    return {own: ({name(*part): float(count(own, *part)) for part in parts}, should) for own in RANKS}


@pytest.mark.parametrize(
    ("factors", "owner", "says"),
    [
        (wrong(lambda own, peer, step: 1 + (own == peer)), None, "adds its own numbers once more"),
        (wrong(lambda own, peer, step: peer in (own, 2 if own < 2 else 1)), None, "the last of the others"),
        (wrong(lambda own, peer, step: peer in (own, 0 if own else 1)), None, "the first of the others"),
        (wrong(lambda own, peer, step: own == peer), None, "nothing of the other ranks is in it"),
        (wrong(lambda own, peer, step: peer == 1), 1, "nothing of the other ranks is in it"),
        (wrong(lambda own, peer, step: own == peer or not step, 3), None, "is in it, from step 1 on"),
        (wrong(lambda own, peer, step: (2, 1, 0)[step], 3), None, "the step before, and the first of them"),
        (wrong(lambda own, peer, step: (1, -1, 1)[step], 3), None, "what should be added is subtracted"),
        (
            wrong(lambda own, peer, step: (1, 2, 4)[step], 3),
            None,
            "from step 0 to step 2 the numbers count 1, 2",
        ),
    ],
)
def test_the_rule_of_all_ranks_is_named(factors, owner, says):
    assert says in rule(factors, owner)


@pytest.mark.parametrize(
    "factors",
    [
        wrong(lambda own, peer, step: 1 + (own == peer == 1)),
        wrong(lambda own, peer, step: own == peer or own == 2),
        wrong(lambda own, peer, step: 1 + (own == peer == 0) * step, 2),
    ],
)
def test_where_the_ranks_differ_there_is_no_rule(factors):
    assert rule(factors) is None


def test_numbers_of_another_chunk_are_named_whoever_owns_the_chunk():
    have = {
        f"rank {peer}'s gradient at chunk {chunk}": float(chunk == 1) for peer in RANKS for chunk in (0, 1)
    }
    should = {name: float("chunk 0" in name) for name in have}
    for owner in (None, 0):
        assert "numbers of other chunks are added to this chunk" in rule(
            dict.fromkeys(RANKS, (have, should)), owner
        )

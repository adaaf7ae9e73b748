"""Lesson 09: in which words it is told how often each rank's micro-batches count in each shard."""

import pytest
import torch

from zerolab.course.lessons.incident_room.room import Case
from zerolab.course.lessons.incident_room.updates.counted import told

CASE = Case(3, micro_batches=3)
OWN = torch.eye(3).unsqueeze(2)


def by_owner(*counts: float) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.float64).view(3, 1, 1)


def by_rank(*counts: float) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.float64).view(1, 3, 1)


def by_micro_batch(*counts: float) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.float64).view(1, 1, 3)


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        (by_owner(1, 0, 1), "the shard of rank 1 has no update at all"),
        (by_owner(0, 0, 1), "the shards of ranks 0 and 1 have no update at all"),
        (by_owner(1, 2, 3), "the shards of ranks 0 to 2 have 1, 2 and 3 times the right update"),
        (by_rank(0, 3, 0), "only rank 1's gradients count, and 3 (N or M) times what it should"),
        (by_rank(1, 0, 1), "rank 1 is missing in the sum"),
        (by_rank(1, 1, 2), "all are right but rank 2, which counts 2 times what it should"),
        (by_rank(1, 2, 3), "the gradients of ranks 0 to 2 count 1, 2 and 3 times what they should"),
        (by_micro_batch(1, 0, 0), "only the first micro-batch counts: add the gradients of all"),
        (by_micro_batch(0, 2, 2), "micro-batch 0 is missing, and the others count 2 times what they should"),
        (by_micro_batch(0, 1, 2), "micro-batch 0 is missing, and the others count 1 and 2 times what they"),
        (by_micro_batch(0.25, 0.5, 1), "each micro-batch counts 2 times the one before it"),
        (by_micro_batch(1, 2, 3), "micro-batches 0 to 2 count 1, 2 and 3 times what they should"),
        (OWN, "each rank's shard is updated with the rank's own gradients alone: sum them"),
        (1 - OWN, "a rank's own gradients are missing in its shard"),
        (1 + OWN, "each rank adds its own numbers once more"),
        (1 + 3 * OWN, "the rank's own gradients count 4 times and the other ranks' 1 times what they should"),
    ],
)
def test_a_rule_in_the_counts_is_told(counts, says):
    assert says in told(counts.expand(3, 3, 3), CASE)


@pytest.mark.parametrize("counts", [torch.ones(3, 3, 3), torch.arange(27.0).view(3, 3, 3)])
def test_counts_that_are_alike_or_follow_no_rule_tell_nothing(counts):
    assert told(counts, CASE) is None

"""Lesson 07's exercise on P_a: whose parts are at their places, and how an input was cut."""

import math
from collections.abc import Sequence

from torch import Tensor

from zerolab import ring
from zerolab.course.attempts import Attempt, Odd
from zerolab.course.lessons.residual_memory.inputs import CUT, IN_ITS_CHUNK, Case, arrived, parts


def of_cut(case: Case, outcome: Attempt, number: int) -> str | None:
    """Say which rank keeps a part of another length than its chunk, and than a padded part."""
    numel, size = case.numels[number], case.world_size
    for rank, piece in enumerate(ring.chunks(numel, size)):
        shapes = outcome.values[rank].shapes[number]
        length, padded = piece.stop - piece.start, -(-numel // size)
        if len(shapes) != 1 or math.prod(shapes[0]) in (length, padded):
            continue
        kept = math.prod(shapes[0])
        whose = f"rank {rank} keeps a part of shape {list(shapes[0])}, {kept} of {numel} elements"
        lost = ", and parts of numel // N leave out the last ones" * (kept == numel // size)
        return f"{whose}{lost}. Its chunk has {length}. {_along(case.shapes[number], shapes[0]) or CUT}"
    return None


def _along(whole: Sequence[int], part: Sequence[int]) -> str:
    """Say along which dimension a part was cut out of an input; "" where it is no part of one dimension."""
    shorter = [place for place, (length, kept) in enumerate(zip(whole, part, strict=False)) if length != kept]
    if len(whole) == 1 or len(whole) != len(part) or len(shorter) != 1:
        return ""
    return (
        f"This is a cut along dimension {shorter[0]}. The ring's chunks are those of the flat tensor, so cut "
        "tensor.flatten(), with ring.chunks(tensor.numel(), N)"
    )


def of_parts(case: Case, outcome: Attempt, number: int) -> str | None:
    """Say whose parts of an input are not at their places."""
    whole = case.whole()[number]
    seen = [values.values[number] for values in outcome.values]
    if all(not isinstance(each, Odd) and _in_8_bits(case, each, whole) for each in seen):
        return (
            "the parts are rounded to whole multiples of 1/127 of their largest element, as int8 does it: "
            "keep each part in the input's own dtype"
        )
    found = arrived(case, [each for each in seen if not isinstance(each, Odd)], whole)
    everyone = list(range(case.world_size))
    if not found or len(found) < case.world_size or all(own == everyone for own in found):
        return None
    if all(own == [rank] for rank, own in enumerate(found)):
        return (
            "each rank's own part is at its place, and none of the others' is: unpack has to gather them, "
            "and to wait until they are there"
        )
    if added := outcome.called("dist.all_reduce", "ring.all_reduce"):
        return f"{added[0]} adds up what all ranks have: there have to be zeros outside a rank's own part"
    if found[0] and all(own == found[0] for own in found):
        missing = [rank for rank in everyone if rank not in found[0]]
        is_right, is_not = _the_parts_of(found[0]), _the_parts_of(missing)
        return (
            f"on every rank {is_right} right, and {is_not} not: what is sent is not the part. {IN_ITS_CHUNK}"
        )
    rank = next(rank for rank, own in enumerate(found) if own != everyone)
    missing = [peer for peer in everyone if peer not in found[rank]]
    if not found[rank]:
        return None
    return f"on rank {rank} {_the_parts_of(missing)} not there: every rank needs those of all ranks"


def _in_8_bits(case: Case, got: Tensor, whole: Tensor) -> bool:
    """Whether each part of a value is near the right one, and on the grid of int8."""
    if got.shape != whole.shape or got.dtype != whole.dtype:
        return False
    near = (got - whole).abs().max() <= 0.02 * whole.abs().max()
    steps = [127 * part / part.abs().max() for part in parts(got, case.world_size)]
    return bool(near) and all(bool(((each - each.round()).abs() < 1e-3).all()) for each in steps)


def _the_parts_of(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}'s part is"
    return f"the parts of ranks {' and '.join(map(str, ranks))} are"

"""Promise: where an answer depends on a cut, its check tries lengths that no number of ranks divides.

For 9, 10 and 1001 elements on 4 ranks torch.chunk's cut is not that of ring.chunks. For 11 on 3 it is, and
a cut by numel // N loses two elements.
"""

import pytest
import torch

from zerolab import ring
from zerolab.course.lessons.collectives import check as reduce_scatter
from zerolab.course.lessons.collectives import whole as all_reduce
from zerolab.course.lessons.residual_memory import inputs
from zerolab.course.lessons.zero_stage_1 import check as zero1
from zerolab.course.lessons.zero_stage_1 import checkpoints, cuts
from zerolab.course.lessons.zero_stage_2 import backward_passes, kept_sums

UNEVEN = {(9, 4), (10, 4), (11, 3), (1001, 4)}
TRIED = {
    "02 reduce-scatter": {(case.numel, case.world_size) for case in reduce_scatter.CASES},
    "02 all-reduce": {(case.numel, case.world_size) for case in all_reduce.CASES},
    "04 owned slices": {(case.numel, case.world_size) for case in cuts.CASES},
    "04 stage 1": {(case.numel, case.world_size) for case in zero1.CASES},
    "04 load": {(case.numel, case.saved_by) for case in checkpoints.CASES},
    "05 order": {(numel, case.world_size) for case in backward_passes.CASES for numel in case.sizes.values()},
    "05 keep": {(case.numel, case.world_size) for case in kept_sums.UNEVEN},
    "07 packing": {(numel, case.world_size) for case in inputs.CASES for numel in case.numels},
}


@pytest.mark.parametrize("exercise", TRIED)
def test_a_check_tries_the_uneven_lengths(exercise):
    assert TRIED[exercise] >= UNEVEN


def test_the_lengths_leave_a_remainder_and_torch_cuts_three_of_them_in_another_way():
    ours = {each: [cut.stop - cut.start for cut in ring.chunks(*each)] for each in UNEVEN}
    torchs = {each: [len(part) for part in torch.arange(each[0]).chunk(each[1])] for each in UNEVEN}
    assert all(numel % ranks for numel, ranks in UNEVEN)
    assert {each for each in UNEVEN if ours[each] == torchs[each]} == {(11, 3)}


@pytest.mark.parametrize("exercise", [reduce_scatter, all_reduce])
def test_a_case_in_float32_shows_what_is_sent_in_float64(exercise):
    assert {case.dtype for case in exercise.CASES} == {torch.float64, torch.float32}

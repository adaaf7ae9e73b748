"""Lesson 04: each rank updates 1/N of the parameters and keeps 1/N of the optimizer's state."""

from zerolab.course.lessons.zero_stage_1.check import check_zero1
from zerolab.course.lessons.zero_stage_1.owned import check_owned
from zerolab.course.lessons.zero_stage_1.reload import check_load

__all__ = ["check_load", "check_owned", "check_zero1"]

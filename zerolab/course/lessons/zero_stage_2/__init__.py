"""Lesson 05: a gradient is freed as soon as it is reduced; what accumulation then costs."""

from zerolab.course.lessons.zero_stage_2.check import check_reduce_and_keep
from zerolab.course.lessons.zero_stage_2.clipping import check_clip
from zerolab.course.lessons.zero_stage_2.in_order import check_order

__all__ = ["check_clip", "check_order", "check_reduce_and_keep"]

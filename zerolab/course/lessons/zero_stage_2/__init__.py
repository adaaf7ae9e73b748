"""Lesson 05: a gradient is freed as soon as it is reduced; what accumulation then costs."""

from zerolab.course.lessons.zero_stage_2.check import check_reduce_and_keep

__all__ = ["check_reduce_and_keep"]

"""Lesson 06: a parameter is whole only while its unit computes."""

from zerolab.course.lessons.zero_stage_3.ahead import check_prefetch
from zerolab.course.lessons.zero_stage_3.check import check_sharded_pass

__all__ = ["check_prefetch", "check_sharded_pass"]

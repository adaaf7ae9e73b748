"""Lesson 06: a parameter is whole only while its unit computes."""

from zerolab.course.lessons.zero_stage_3.ahead import check_prefetch
from zerolab.course.lessons.zero_stage_3.check import check_sharded_pass
from zerolab.course.lessons.zero_stage_3.peak import check_peak

__all__ = ["check_peak", "check_prefetch", "check_sharded_pass"]

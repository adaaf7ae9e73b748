"""Lesson 00: processes with a number, the messages between them, and the average of their gradients."""

from zerolab.course.lessons.ranks.check import check_average
from zerolab.course.lessons.ranks.shift import check_shift

__all__ = ["check_average", "check_shift"]

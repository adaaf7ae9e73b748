"""Lesson 00: processes with a number, the messages between them, and the average of their gradients."""

from zerolab.course.lessons.ranks.check import check_average

__all__ = ["check_average"]

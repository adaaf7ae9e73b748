"""Lesson 02: four collectives, the ring that carries them, and the bytes that each rank sends."""

from zerolab.course.lessons.collectives.check import check_reduce_scatter
from zerolab.course.lessons.collectives.whole import check_all_reduce

__all__ = ["check_all_reduce", "check_reduce_scatter"]

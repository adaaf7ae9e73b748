"""Lesson 02: four collectives, the ring that carries them, and the bytes that each rank sends."""

from zerolab.course.lessons.collectives.check import check_reduce_scatter

__all__ = ["check_reduce_scatter"]

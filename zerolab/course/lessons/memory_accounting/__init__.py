"""Lesson 01: sixteen bytes for each parameter, what each ZeRO stage divides, and what else fills a GPU."""

from zerolab.course.lessons.memory_accounting.check import check_bytes_per_gpu

__all__ = ["check_bytes_per_gpu"]

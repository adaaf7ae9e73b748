"""Lesson 01: sixteen bytes for each parameter, what each stage divides, and what else fills a GPU."""

from zerolab.course.lessons.memory_accounting.adapters import check_adapter_bytes
from zerolab.course.lessons.memory_accounting.batch import check_largest_batch
from zerolab.course.lessons.memory_accounting.check import check_bytes_per_gpu

__all__ = ["check_adapter_bytes", "check_bytes_per_gpu", "check_largest_batch"]

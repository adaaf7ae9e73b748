"""Lesson 03: the mean of the gradients, sent in buckets while the backward pass runs."""

from zerolab.course.lessons.data_parallel.buckets import check_buckets
from zerolab.course.lessons.data_parallel.check import check_average_gradients

__all__ = ["check_average_gradients", "check_buckets"]

"""Lesson 10: optimizers that update whole parameters, such as Muon, and which rank owns which."""

from zerolab.course.lessons.whole_matrices.check import check_owners

__all__ = ["check_owners"]

"""Lesson 08: the engines people use, the clusters they run on, and how to judge both."""

from zerolab.course.lessons.in_the_wild.check import check_shard
from zerolab.course.lessons.in_the_wild.choices import check_choices
from zerolab.course.lessons.in_the_wild.settings import check_json

__all__ = ["check_choices", "check_json", "check_shard"]

"""Lesson 09: what wrong parameters tell of an engine, by the ranks' first two updates."""

from zerolab.course.lessons.incident_room.updates.told import updates_told

__all__ = ["updates_told"]

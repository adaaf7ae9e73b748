"""Lesson 09: the incident room."""

"""The drawings of the lessons: each paints on an empty figure and returns its alt text."""

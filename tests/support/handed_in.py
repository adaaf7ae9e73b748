"""Notebooks as students hand them in: a few cells of lesson 01, which is the one that computes fastest."""

from pathlib import Path

import nbformat

IMPORTS = """\
from zerolab.course import answer, predict
from zerolab.course.lessons.memory_accounting import check_bytes_per_gpu, quiz"""
RIGHT = """\
def bytes_per_gpu(psi, world_size, stage):
    whole = [2, 2, 12][: 3 - stage]
    return psi * (sum(whole) + (16 - sum(whole)) / world_size)
check_bytes_per_gpu(bytes_per_gpu)"""
WRONG = """\
def bytes_per_gpu(psi, world_size, stage):
    return 16 * psi
check_bytes_per_gpu(bytes_per_gpu)"""


def write(path: Path, *cells: str) -> Path:
    """A notebook of these code cells."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(book, path)
    return path

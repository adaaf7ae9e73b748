"""Promise: while a slider moves, the axes of its figure stay in place, and all words are in view.

The explorers of lesson 08 are in test_in_the_wild_text.py. Those that draw what a lesson
measures are not looked at.
"""

import pytest
from support.explorers import explorers, move_sliders

NUMBER = {
    "memory_accounting": 2,
    "data_parallel": 2,
    "zero_stage_1": 1,
    "residual_memory": 1,
    "whole_matrices": 1,
}


@pytest.mark.parametrize("lesson", NUMBER)
def test_axes_stay_in_place_and_words_in_view(lesson: str):
    found = explorers(lesson)
    assert len(found) == NUMBER[lesson]
    for explorer in found:
        move_sliders(explorer)

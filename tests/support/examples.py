"""Hypothesis for tests that must say the same on every machine, and for those that need ranks."""

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

always_the_same = settings(deadline=None, derandomize=True, database=None)


ALIKE = 10  # Hypothesis follows an example up with a few that differ in one thing


def draw(strategy: st.SearchStrategy, count: int) -> list:
    """So many examples at once, to go through one launch: starting ranks is what takes the time.

    None is a variation of another, as the examples are that Hypothesis would try one by one.
    """
    found = []

    @settings(always_the_same, max_examples=ALIKE * count, phases=[Phase.generate])
    @given(strategy)
    def collect(example) -> None:
        found.append(example)

    collect()
    return found[::ALIKE]

"""An exercise's three targets: bronze for right values, silver for bytes as well, gold for the peak.

A solution with right values passes. Its check says which target it has reached, and what the next one takes.
"""

from collections.abc import Iterable


class Reached(str):
    """What a check says of a solution that is right and can still be better."""


def bronze(why: str) -> Reached:
    """For a solution with right values that sends, reads or waits too much."""
    return Reached(f"bronze, because the values are right. For silver: {why}")


def silver(why: str) -> Reached:
    """For a solution with right values and bytes that holds too much at once."""
    return Reached(f"silver, because values and bytes are right. For gold: {why}")


def lowest(costs: Iterable[str]) -> str | None:
    """Of what several cases cost, what counts most: a mistake, then bronze, then silver."""
    order = lambda cost: (isinstance(cost, Reached), not cost.startswith("bronze"))
    return min(costs, key=order, default=None)


def before_it(costs: Iterable[str]) -> str | None:
    """What is said of right cases beside a later one that stopped, where no target is reached."""
    cost = lowest(costs)
    if cost is None:
        return None
    if isinstance(cost, Reached):
        return f"before this case the values are right, and they cost too much: {cost.partition(': ')[2]}"
    return f"before this case the values are right, but {cost.removeprefix('the values are right, but ')}"

"""The three targets of an exercise: bronze for right values, silver for bytes as well, gold for the peak.

A check says which target an answer has reached, and what keeps it from the next one.
"""


def bronze(why: str) -> str:
    """The sentence for an answer with right values that sends, reads or waits too much."""
    return f"bronze, because the values are right. For silver: {why}"


def silver(why: str) -> str:
    """The sentence for an answer with right values and bytes that holds too much at once."""
    return f"silver, because values and bytes are right. For gold: {why}"

"""Why a rank's numbers are missing from a sum, or count too often: what the ranks' messages tell.

The factors of a wrong sum say whose numbers are missing. Whether these were overwritten, or only the last of
several messages was added, is seen in who received what, and into which tensor.
"""

from collections.abc import Sequence

from zerolab.course.messages import Calls, at
from zerolab.course.reading import Explain, Factors, number_in, present


def by_messages(calls: Calls, rank: int) -> Explain:
    """What the calls of all ranks tell of a value of `rank` that is a wrong sum of the ranks' numbers."""

    def explain(have: Factors, should: Factors) -> str | None:
        there = [number_in(name) for name in present(have)]
        ratios = {number_in(name): have[name] / should[name] for name in present(should)}
        missing = [rank for rank in ratios if rank not in there]
        often = [peer for peer, ratio in ratios.items() if ratio > 1 + 1e-6]
        return (
            _overwritten(calls, missing)
            or (_one_of_the_messages(calls, rank, there) if missing and len(ratios) > 1 else None)
            or (_passed_on_changed(calls) if often else None)
            or _received_again(calls, rank, often)
        )

    return explain


def _overwritten(calls: Calls, missing: Sequence[int]) -> str | None:
    """A missing rank that received into the tensor it was given, before it had sent that as it was."""
    for rank in missing:
        for call in calls[rank]:
            if call.op == "send" and call.given and not call.changed:
                break
            if call.received and call.given:
                return (
                    f"rank {rank} receives into the tensor that it was given, so its own numbers are no "
                    f"longer there when they are needed. Receive into torch.empty_like of it{at(call.place)}"
                )
    return None


def _one_of_the_messages(calls: Calls, rank: int, there: Sequence[int]) -> str | None:
    """Whether a rank that received from several added the first message alone, or the last."""
    senders = [list(dict.fromkeys(call.peer for call in own if call.received)) for own in calls]
    collects = rank if len(senders[rank]) > 1 else max(range(len(calls)), key=lambda each: len(senders[each]))
    order = senders[collects]
    others = [peer for peer in there if peer != collects]
    if len(order) < 2 or len(others) != 1 or others[0] not in (order[0], order[-1]):
        return None
    which = "first" if others[0] == order[0] else "last"
    return (
        f"rank {collects} receives from {len(order)} ranks, and only what came {which} is in the result. Add "
        "each message to the sum of those before it, in the loop, as soon as it has arrived"
    )


def _passed_on_changed(calls: Calls) -> str | None:
    """A rank that sends the tensor it was given after it has added to it."""
    for rank, own in enumerate(calls):
        for call in own:
            if call.op == "send" and call.given and call.changed:
                return (
                    f"rank {rank} sends the tensor that it was given after it has changed it in place, so "
                    "others get a sum where they expect its own numbers. Add to a clone of it"
                    f"{at(call.place)}"
                )
    return None


def _received_again(calls: Calls, rank: int, often: Sequence[int]) -> str | None:
    """Whether a rank received more than once from one whose numbers count too often."""
    for peer in often:
        times = sum(call.received and call.peer == peer for call in calls[rank])
        if times > 1 and len(often) == 1:
            return f"rank {rank} receives {times} messages from rank {peer}"
    return None

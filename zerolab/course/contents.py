"""What the messages brought: whose numbers are in them, and how far these came.

The exercises' tensors are short, so each message is kept with its numbers. They are compared with the tensors
that the ranks were given, which differ from each other in every element.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from zerolab.course.messages import Calls, Message, at
from zerolab.course.reading import Explain, Factors, coefficients, number_in, present

Numbers = Sequence[torch.Tensor]
"""By rank: the tensor that it was given."""


def whose(message: Message, numbers: Numbers) -> Mapping[int, float]:
    """Return how often each rank's numbers count in what was sent; nothing if it is no sum of them."""
    if message.content is None or message.numel != numbers[0].numel() or not _finite(message.content):
        return {}
    parts = {str(rank): each for rank, each in enumerate(numbers)}
    sent = torch.tensor(message.content, dtype=torch.float64)
    found = coefficients(sent, parts) if sent.any() else None
    return {int(name): found[name] for name in present(found)} if found else {}


def odd_contents(calls: Calls, numbers: Numbers) -> str | None:
    """Return a message whose numbers are nobody's: zeros, one number everywhere, or none at all."""
    found = [
        (rank, call.content[0], what, call)
        for rank, own in enumerate(calls)
        for call in own
        if call.op == "send" and call.content and call.numel == numbers[0].numel()
        if (what := _odd(call.content))
    ]
    own_numbers = [each for each in found if each[0] == each[1] != 0]  # those of rank 0 look like zeros
    for rank, _, what, call in own_numbers or found:
        own = ", which is its own number: send the tensor that it was given" if own_numbers else ""
        return f"rank {rank} sends {what}{own}{at(call.place)}"
    return None


def _odd(content: Sequence[float]) -> str | None:
    """What a tensor holds that no rank was given."""
    if not _finite(content):
        return "nan or inf, as memory holds that was never written"
    if len(content) < 2 or min(content) != max(content):
        return None
    return f"a tensor whose elements are all {content[0]:g}" if content[0] else "zeros"


def _finite(content: Sequence[float]) -> bool:
    return all(map(math.isfinite, content))


def how_far(calls: Calls, numbers: Numbers, rank: int) -> Explain:
    """Where the numbers went that are missing in a value of `rank`."""

    def explain(have: Factors, should: Factors) -> str | None:
        there, wanted = present(have), map(str, present(should))
        missing = [number_in(name) for name in wanted if name not in there]
        others = [each for each in missing if each != rank]
        if others:
            return _went(calls, numbers, rank, others[0])
        collects = missing and len({call.peer for call in calls[rank] if call.received}) > 1
        return f"rank {rank} adds up what arrives, without its own numbers" if collects else None

    return explain


def _went(calls: Calls, numbers: Numbers, rank: int, missing: int) -> str:
    """Where the numbers of one rank went that another one needs."""
    reached: dict[int, int] = {}
    for sender, own in enumerate(calls):
        for call in own:
            if call.op == "send" and call.peer is not None and missing in whose(call, numbers):
                reached.setdefault(call.peer, sender)
    if rank in reached:
        sender = reached[rank]
        return (
            f"rank {missing}'s numbers arrive there in a message of rank {sender}, and are not in the result"
        )
    for sender in reached:
        if told := _sent_too_soon(calls, sender, rank, reached[sender]):
            return told
    if reached:
        ranks = " and ".join(f"rank {peer}" for peer in sorted(reached))
        return f"rank {missing}'s numbers arrive at {ranks}, and nobody sends them on to rank {rank}"
    sends = [call for call in calls[missing] if call.op == "send"]
    if not sends:
        return f"rank {missing} sends nothing"
    return f"rank {missing}'s own numbers are in nothing that it sends{at(sends[0].place)}"


def _sent_too_soon(calls: Calls, sender: int, rank: int, origin: int) -> str | None:
    """Whether a rank sends its last message to another before it has received the numbers from `origin`."""
    places = {
        what: place
        for place, call in enumerate(calls[sender])
        for what in [("to", call.peer) if call.op == "send" else ("from", call.peer)]
    }
    to, origin_place = places.get(("to", rank)), places.get(("from", origin))
    if to is None or origin_place is None or to > origin_place:
        return None
    return (
        f"rank {sender} sends to rank {rank} before it has received from rank {origin}"
        f"{at(calls[sender][to].place)}"
    )

"""Lesson 03's exercise: ranks that stopped, gradients that are missing afterwards, and messages too many."""

from zerolab.course.attempts import Attempt
from zerolab.course.lessons.data_parallel.cases import PSI, SHAPES, Case


def stopped(outcome: Attempt, case: Case) -> str | None:
    """A crash, a hang or a stub; and why, if the messages or the case tell."""
    if outcome.failure is None:
        if len(outcome.calls) > 1 and not any(outcome.calls):
            return "not written yet: nothing was sent, so no rank can know the others' gradients"
        if outcome.engine:
            return "that uses zerolab's own ZeroOptimizer: use one dist.all_reduce"
        return outcome.unsound
    if why := _of_type_or_shape(outcome.failure):
        return f"{why} ({_first_sentence(outcome.failure)})"
    if case.gap is not None:
        return f"{_of_the_gap(outcome, case.gap)} ({outcome.failure})"
    if "view" in outcome.failure and case.transposed is not None:
        return (
            "a gradient need not be contiguous, and view(-1) refuses such a tensor: use flatten() or "
            "reshape(-1), which copy if they must"
        )
    return outcome.failure


def _of_type_or_shape(failure: str) -> str | None:
    """Why torch refuses a tensor as a gradient."""
    if "assign a gradient with dtype" in failure:
        return (
            "the average has another type than the parameter's gradient: send, add up and put back in the "
            "type of the gradients"
        )
    if "assign a gradient of size" in failure:
        return "the average has another shape than the parameter: use piece.view_as(parameter)"
    return None


def _first_sentence(failure: str) -> str:
    """A failure without what torch says behind the first sentence; with the place, if that remains."""
    head, _, rest = failure.partition(". ")
    place = rest.rpartition(" (line ")
    return f"{head} (line {place[2]}" if place[1] else head


def _of_the_gap(outcome: Attempt, gap: int) -> str:
    """What the rank that lacks a gradient sent, compared with the others."""
    sizes = [[(call.op, call.numel) for call in sent] for sent in outcome.calls]
    numels = [sum(numel for _, numel in sent) for sent in sizes]
    has = f"rank {gap} has a parameter without a gradient here, whose .grad is None"
    zeros = "Give it zeros before you send: parameter.grad = torch.zeros_like(parameter)"
    if "NoneType" in str(outcome.failure) and sizes[0] and sizes.count(sizes[0]) == len(sizes):
        return (
            f"rank {gap} sent as much as the others, and failed when it wrote the average back: its "
            f"parameter without a gradient still has None there. {zeros}"
        )
    if not numels[gap] and "NoneType" in str(outcome.failure):
        return f"{has}, and it stopped there before it sent anything. {zeros}"
    if not numels[gap]:
        return f"{has}, and it sends nothing, so the others wait for it. {zeros}"
    if numels[gap] < max(numels):
        return (
            f"{has}. So it sends less than the others, and they wait for it or read a message meant for "
            f"something else. {zeros}"
        )
    return f"{has}. {zeros}"


def left_out(outcome: Attempt) -> str | None:
    """Parameters that were written to, or whose gradient is still missing."""
    for rank, value in enumerate(outcome.values):
        if value.parameters_changed:
            return "the parameters were changed: average parameter.grad, not the parameter"
        for name, grad in zip(SHAPES, value.grads, strict=True):
            if grad is None:
                return (
                    f"on rank {rank} the {name} has no gradient afterwards, but another rank sent one: every "
                    "rank must make the same update, so put the average there"
                )
    return None


def too_much_sent(outcome: Attempt, case: Case) -> str | None:
    """Right values, but too many messages or too many bytes."""
    size = len(outcome.calls)
    for rank, sent in enumerate(outcome.messages if size > 1 else []):
        right = f"the values are right, but rank {rank}"
        calls = sorted({message.call for message in sent})
        rings = calls == ["ring.all_reduce"]  # one collective, in 2(N-1) messages
        if len(sent) > (2 * (size - 1) if rings else 1):
            return (
                f"{right} made {len(sent)} calls ({', '.join(calls)}) where 1 is enough: put the gradients, "
                "and the count after them, into one flat tensor, and all-reduce it once"
            )
        elements = sum(message.numel for message in sent)
        if elements > (2 if rings else 1) * (PSI + 1):
            gathered = any("gather" in message.op for message in sent)
            which = ". That is an all-gather, which brings every rank the gradients of all" * gathered
            return f"{right} sent {elements} elements where {PSI} gradients and 1 count are enough{which}"
        if other := {message.dtype for message in sent} - {case.dtype}:
            kinds = [str(dtype).removeprefix("torch.") for dtype in (other.pop(), case.dtype)]
            return (
                f"{right} sends {kinds[0]}, and its gradients are {kinds[1]}. That needs more bytes: make "
                "the flat tensor in the type of the gradients, and the count, too"
            )
    return None

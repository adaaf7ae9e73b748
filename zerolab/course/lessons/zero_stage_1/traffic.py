"""Lesson 04's exercise: which collectives a step calls, how large their tensors are, and what is too much."""

from collections import Counter
from collections.abc import Sequence

from zerolab.course.attempts import Attempt
from zerolab.course.lessons.zero_stage_1.world import STEPS, World
from zerolab.course.messages import Message, sent_bytes

_ROUNDS = {"ring.reduce_scatter": 1, "ring.all_gather": 1, "ring.all_reduce": 2}  # times N - 1 messages


def too_much_sent(outcome: Attempt, world: World) -> str | None:
    """Right and sharded, but more bytes than two passes over the model."""
    ring_pass = 4 * world.numel * (world.world_size - 1) / world.world_size
    for rank, messages in enumerate(outcome.messages):
        passes = sent_bytes(messages, world.world_size) / STEPS / ring_pass if ring_pass else 0
        if passes > 2.1 and world.numel >= 64:
            calls = ", ".join(sorted({message.call for message in messages}))
            return (
                f"right and sharded, but rank {rank} moves {passes:.1f}Ψ a step ({calls}) where 2Ψ is "
                f"enough{_why(messages, world)}"
            )
    return None


def _why(messages: Sequence[Message], world: World) -> str:
    """Which of the calls is too much."""
    calls = Counter(message.call for message in messages)
    in_a_step = {
        call: count / STEPS / (_ROUNDS[call] * (world.world_size - 1) if call in _ROUNDS else 1)
        for call, count in calls.items()
    }
    reduces = [call for call in in_a_step if "reduce_scatter" in call]
    if whole := [call for call in in_a_step if "all_reduce" in call]:
        if reduces and any("all_gather" in call for call in in_a_step):
            return f". The reduce-scatter and the all-gather do all that is needed: leave out {whole[0]}"
        return (
            ". An all-reduce gives every rank the whole gradient, and each needs 1/N of it: use its first "
            "half, the reduce-scatter"
        )
    often = [(call, count) for call, count in in_a_step.items() if count > 1 and call in _ROUNDS]
    if often:
        return f". It calls {often[0][0]} {often[0][1]:g} times in a step, and once is enough"
    if wide := {message.dtype for message in messages if message.dtype and message.dtype.itemsize > 4}:
        kind = str(wide.pop()).removeprefix("torch.")
        return f". It sends {kind}, and flat and the gradient are float32: send them in their own type"
    return ". One reduce-scatter of the gradient and one all-gather of flat are enough"


def sizes(outcome: Attempt, world: World) -> dict[str, int]:
    """How many elements the tensor had that the first call of each function of the ring got."""
    found, rounds = {}, world.world_size - 1
    for call in ("ring.reduce_scatter", "ring.all_gather"):
        sent = [[message.numel for message in own if message.call == call] for own in outcome.messages]
        if rounds and sent and all(len(own) >= rounds for own in sent):
            found[call] = sum(sum(own[:rounds]) for own in sent) // rounds  # each chunk is sent N - 1 times
    return found


def of_another_size(outcome: Attempt, world: World) -> str | None:
    """Whether a function of the ring got another tensor than one as long as flat."""
    for call, numel in sizes(outcome, world).items():
        what = "the gradient" if "reduce" in call else "flat"
        if abs(numel - world.numel) >= world.world_size:
            return (
                f"{call} got a tensor of {numel} elements, and {what} has {world.numel}: pass {what} itself, "
                "which the function cuts into chunks"
            )
    return None


def of_failure(outcome: Attempt, world: World) -> str:
    """What to do about an exception whose cause can be seen."""
    failure = str(outcome.failure)
    if other := of_another_size(outcome, world):
        return f". {other}"
    if "assign a gradient of size" in failure:
        return _of_shapes(failure, world)
    if "non-leaf" in failure or "requires grad is being used in an in-place" in failure:
        return ". autograd is not needed here: leave flat.requires_grad as it is, and assign .grad yourself"
    if "params argument given to the optimizer" in failure:
        return ". Put the shard into a list: optimizer_class([shard], lr=lr)"
    equal = sorted({call for call in _last_calls(outcome) if call in _EQUAL})
    if equal and world.numel % world.world_size:
        return (
            f". {equal[0]} needs equally many elements on all ranks, and the chunks of {world.numel} "
            f"elements on {world.world_size} ranks differ by one. ring.reduce_scatter and ring.all_gather "
            "take any length. Or else pad flat and the gradient"
        )
    return ""


_EQUAL = {
    "dist.all_gather",
    "dist.all_gather_into_tensor",
    "dist.all_gather_single",
    "dist.reduce_scatter_tensor",
    "dist.reduce_scatter_single",
    "dist.all_to_all_single",
}


def _last_calls(outcome: Attempt) -> list[str]:
    return [own[-1].call for own in outcome.calls if own]


def _of_shapes(failure: str, world: World) -> str:
    """What to do where the gradient and the shard differ in length."""
    numbers = failure.partition("of size '[")[2].partition("]'")[0]
    gradient = int(numbers) if numbers.isdigit() else None
    if gradient == world.numel:
        return (
            ". That is the whole gradient. Give the shard the chunk that ring.reduce_scatter returns, "
            "divided by the number of ranks"
        )
    lengths = {world.cut(rank).stop - world.cut(rank).start for rank in range(world.world_size)}
    if gradient in lengths:
        return (
            ". ring.reduce_scatter returns the chunk that ring.chunks cuts, and these differ by one element "
            "at most: cut the shard with ring.chunks, too. torch.chunk cuts elsewhere"
        )
    return ""

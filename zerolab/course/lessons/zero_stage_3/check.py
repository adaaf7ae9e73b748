"""Lesson 06's exercise: forward and backward over layers whose weights are freed.

Graded on values, on what is whole when, on what is left at the end, and on bytes.
"""

from collections.abc import Callable
from functools import partial

import torch

from zerolab.course.alive import Alive
from zerolab.course.attempts import Attempt, Odd, attempt, returned
from zerolab.course.evidence import Finding, examine, same
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_3.grad_shards import MISTAKES, NEVER_FILLED, Gradients, total
from zerolab.course.lessons.zero_stage_3.held import Seen, elsewhere, lost_parameters, too_much_memory
from zerolab.course.lessons.zero_stage_3.layers import (
    DEPTH,
    NUMEL,
    ShardedLayer,
    Watch,
    flat_as_it_was,
    input_of,
    out_of_order,
    owned_by,
    resized_to_fit,
    true_gradients,
)
from zerolab.course.lessons.zero_stage_3.solution import forward_backward, reshard, unshard

EVEN, UNEVEN = (3, 2, 4), (5,)  # ranks that divide a weight, and ranks that do not
HINTS = (
    "unshard gives the storage its size back, layer.flat.untyped_storage().resize_(bytes), copies "
    "layer.shard into layer.flat[layer.owned], and all-gathers. reshard is resize_(0).",
    "forward: unshard, layer.forward, reshard, for each layer. Backward does the same with layer.backward, "
    "from the last layer to the first, and hands on what it returns.",
    "after each layer's backward: grad_shard is a clone of what ring.reduce_scatter(layer.grad) returns, and "
    "layer.grad is None again.",
)


@graded(
    "You wrote stage 3: the gradients are right on 2 to 5 ranks, one layer is whole at a time, nothing "
    "is left at the end, and no layer moves more than 3 times its size.",
    call="forward_backward(layers, x)",
    hints=HINTS,
    solution=[unshard, reshard, forward_backward],
)
def check_sharded_pass(fn: Callable) -> str | None:
    """Run fn(layers, x) on 2 to 5 ranks and print the mistake it makes, or that it makes none.

    fn runs the layers forward, and backward from a gradient of ones; no more than one may be whole at a time.
    The last layer may stay whole from forward to backward, which saves a gather.
    """
    look = partial(_look, fn)
    return examine(EVEN, look) or examine(UNEVEN, look)


def _pass(fn: Callable, rank: int) -> Seen:
    """In the worker: build the layers, run fn, and look at what is left."""
    watch, x = Watch(), input_of(rank)
    for index in range(DEPTH):
        ShardedLayer(index, watch)
    layers, watch.alive = watch.layers, Alive()
    with resized_to_fit(layers), flat_as_it_was(layers, watch.uses):
        result = fn(list(layers), x)
    peak, unreduced = watch.whole_at_once, watch.unreduced
    watch.look(**{getattr(fn, "__name__", "fn"): fn})
    shards = [layer.grad_shard for layer in layers]
    tensors = [shard if isinstance(shard, torch.Tensor) else torch.empty(0) for shard in shards]
    return Seen(
        peak,
        [layer.index for layer in layers if layer.nbytes],
        [layer.index for layer in layers if layer.grad is not None],
        [returned(shard) for shard in shards],
        [tensor.untyped_storage().nbytes() for tensor in tensors],
        watch.copies,
        watch.copy_name,
        watch.kept_gradient,
        unreduced,
        out_of_order(watch.uses, input_of(rank)) if watch.uses else None,
        lost_parameters(layers),
        watch.reshaped,
        elsewhere(layers, result),
    )


def _look(fn: Callable, world_size: int) -> Finding:
    where, ranks = f"{world_size} ranks", range(world_size)
    outcome = attempt(_pass, [(fn, rank) for rank in ranks])
    gradients = [true_gradients(rank) for rank in ranks]
    if stopped := _stopped(outcome) or _missing(outcome.values, gradients):
        return Finding(where, stopped)
    cut = lambda rank: owned_by(rank % world_size, world_size)
    findings = []
    for layer in range(DEPTH):
        right = [total(gradients, layer)[cut(rank)] for rank in ranks]
        mistakes = {why: [f(gradients, layer, r, cut) for r in ranks] for why, f in MISTAKES.items()}
        parts = lambda rank, layer=layer: [
            {f"rank {peer}'s gradient": gradients[peer][layer][cut(rank)] for peer in ranks},
            {f"layer {each}'s sum": total(gradients, each)[cut(rank)] for each in range(DEPTH)},
            {
                f"rank {peer}'s gradient at rank {owner}'s range": gradients[peer][layer][cut(owner)]
                for peer in ranks
                for owner in ranks
            },
        ]
        seen = [value.shards[layer] for value in outcome.values]
        findings.append(Finding(f"{where}, in layer {layer}", None, seen, right, mistakes, parts))
    wrong = [finding for finding in findings if finding.wrong]
    if not wrong:
        findings[0].where, findings[0].cost = where, _too_much(outcome)
        return findings[0]
    named = set.intersection(*(set(finding.fitting(finding.wrong)) for finding in wrong))
    wrong[0].mistakes = {why: wrong[0].mistakes[why] for why in wrong[0].mistakes if why in named}
    wrong[0].cause = outcome.values[wrong[0].wrong[0]].out_of_order
    if wrong[0].cause:  # zeros say less than what was handed over, from which they come
        wrong[0].mistakes = {why: each for why, each in wrong[0].mistakes.items() if why != NEVER_FILLED}
    return wrong[0]


def _stopped(outcome: Attempt) -> str | None:
    """What stopped a rank: one of the layers' own errors, an error or a crash in freed storage, a stub."""
    back = "layer.flat.untyped_storage().resize_(bytes) before you write to layer.flat"
    failure = outcome.failure or ""
    if "setStorage" in failure or "out of bounds for storage" in failure:
        return f"a rank used a weight whose storage is freed. Bring the storage back with {back}"
    if "signal SIGSEGV" in failure or "signal SIGBUS" in failure:
        return f"{failure}. Was a weight's storage freed there? Bring it back with {back}"
    if outcome.failure:
        return outcome.failure.replace("stopped with RuntimeError: layer", "stopped: layer")
    if all(seen.peak == 0 for seen in outcome.values) and not any(outcome.calls):
        return "not written yet: no layer ran and nothing was sent"
    for name in outcome.collectives:
        return f"that calls torch's own {name}: use ring.all_gather and ring.reduce_scatter"
    return outcome.unsound


def _missing(values: list[Seen], gradients: Gradients) -> str | None:
    """Layers without a grad_shard, and where it is instead."""
    for rank, seen in enumerate(values):
        missing = [
            i for i, shard in enumerate(seen.shards) if isinstance(shard, Odd) and shard.kind == "NoneType"
        ]
        if not missing:
            continue
        said, first = f"layers {missing} on rank {rank} have no grad_shard", missing[0]
        right = total(gradients, first)[owned_by(rank, len(values))]
        there = [name for name, value in seen.elsewhere[first].items() if same(value, right)]
        if there:
            return (
                f"{said}, and {there[0]} is this rank's shard of the sum: set layer.grad_shard to it, and "
                "layer.grad to None"
            )
        if seen.out_of_order:
            return f"{said}. {seen.out_of_order[0].upper()}{seen.out_of_order[1:]}"
        some = "reduce every layer's gradient after its backward" + (
            ", not one for all" if len(missing) < DEPTH else ", and keep a clone of the chunk there"
        )
        return f"{said}: {some}"
    return None


def _too_much(outcome: Attempt) -> str | None:
    """Right gradients, but lost parameters, too much in memory, or too many bytes."""
    if lost := next(filter(None, (seen.lost for seen in outcome.values)), None):
        return f"the gradients are right, but {lost}"
    by_rank = [too_much_memory(rank, seen) for rank, seen in enumerate(outcome.values)]
    return next(filter(None, by_rank), None) or _wrong_bytes(outcome)


def _wrong_bytes(outcome: Attempt) -> str | None:
    """More or less than three passes over the model; the last layer may stay whole, which saves a gather.

    Where shards differ in length, ranks may send more or less than each other. The sum is the same.
    """
    size = len(outcome.values)
    layer_bytes = 8 * NUMEL * (size - 1)  # of all ranks together
    sums = [outcome.bytes_sent(rank) * size for rank in range(size)]
    if NUMEL % size:
        sums = [sum(outcome.bytes_sent(rank) for rank in range(size))] * size
    for rank, sent in enumerate(outcome.messages):
        right, passes = f"the values are right, but rank {rank}", sums[rank] / (DEPTH * layer_bytes)
        if any(message.numel >= NUMEL for message in sent):
            return (
                f"{right} sends whole tensors of {NUMEL} elements: a rank sends its own shard, and on a "
                "ring the chunks that it passes on"
            )
        if passes not in (3, 3 - 1 / DEPTH):
            calls = ", ".join(sorted({message.call for message in sent}))
            return (
                f"{right} sent {outcome.bytes_sent(rank)} bytes, {passes:.3g} passes over the model "
                f"({calls}), where stage 3 makes 3: gather, gather again, reduce-scatter"
            )
    return None

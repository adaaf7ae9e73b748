"""Lesson 06's exercise: forward and backward over layers whose weights are freed.

Graded on values, on what is whole when, on what is left at the end, and on bytes.
"""

from collections.abc import Callable
from functools import partial

import torch

from zerolab.course.alive import Alive
from zerolab.course.attempts import Attempt, Odd, attempt, returned
from zerolab.course.evidence import Finding, examine, sum_of
from zerolab.course.exercise import graded
from zerolab.course.lessons.zero_stage_3.held import Seen, lost_parameters, too_much_memory
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
    weight_of,
)
from zerolab.course.lessons.zero_stage_3.solution import forward_backward, reshard, unshard

CASES = (3, 2, 4)  # ranks
HINTS = (
    "unshard gives the storage its size back, layer.flat.untyped_storage().resize_(bytes), copies "
    "layer.shard into layer.flat[layer.owned], and all-gathers. reshard is resize_(0).",
    "forward: unshard, layer.forward, reshard, for each layer. Backward does the same with layer.backward, "
    "from the last layer to the first, and hands on what it returns.",
    "after each layer's backward: grad_shard is a clone of what ring.reduce_scatter(layer.grad) returns, and "
    "layer.grad is None again.",
)

# A sentence, and what it leads to: t[rank][layer] is a rank's gradient of layer l, `cut` a rank's range.
# fmt: off
MISTAKES = {
    "each grad_shard is this rank's own gradient: it was not summed over the ranks":
        lambda t, layer, r, cut: t[r][layer][cut(r)],
    "each grad_shard is the mean; a reduce-scatter leaves the sum, and the update divides once":
        lambda t, layer, r, cut: total(t, layer)[cut(r)] / len(t),
    "each grad_shard is the whole summed gradient: keep the chunk that ring.reduce_scatter returns":
        lambda t, layer, r, cut: total(t, layer),
    "each grad_shard is this rank's own whole gradient: reduce-scatter it, and keep the chunk":
        lambda t, layer, r, cut: t[r][layer],
    "each grad_shard is the next rank's shard of the sum: take layer.owned":
        lambda t, layer, r, cut: total(t, layer)[cut(r + 1)],
    "each grad_shard is the previous rank's shard of the sum: take layer.owned":
        lambda t, layer, r, cut: total(t, layer)[cut(r - 1)],
    "each grad_shard is rank 0's shard on every rank: take layer.owned":
        lambda t, layer, r, cut: total(t, layer)[cut(0)],
    "each grad_shard was summed over the ranks twice":
        lambda t, layer, r, cut: total(t, layer)[cut(r)] * len(t),
    "the layers' gradients are in reverse order: reduce layer.grad into the same layer's grad_shard":
        lambda t, layer, r, cut: total(t, DEPTH - 1 - layer)[cut(r)],
    "every layer got the first layer's gradient, the last that backward makes: reduce each after its own "
    "backward":
        lambda t, layer, r, cut: total(t, 0)[cut(r)],
    "each grad_shard is a sum of the weight, layer.flat, over the ranks: reduce layer.grad":
        lambda t, layer, r, cut: weight_of(layer)[cut(r)] * len(t),
    "each grad_shard is this rank's shard of the weight: reduce layer.grad":
        lambda t, layer, r, cut: weight_of(layer)[cut(r)],
    "the weight was added to each grad_shard: reduce layer.grad alone":
        lambda t, layer, r, cut: total(t, layer)[cut(r)] + weight_of(layer)[cut(r)],
    "each grad_shard was set to zeros and never filled":
        lambda t, layer, r, cut: torch.zeros_like(t[r][layer][cut(r)]),
}
# fmt: on


def total(gradients: list[list[torch.Tensor]], layer: int) -> torch.Tensor:
    """A layer's gradient, summed over the ranks."""
    return sum_of(of_rank[layer] for of_rank in gradients)


@graded(
    "You wrote stage 3: the gradients are right on 2, 3 and 4 ranks, one layer is whole at a time, nothing "
    "is left at the end, and no layer moves more than 3 times its size.",
    call="forward_backward(layers, x)",
    hints=HINTS,
    solution=[unshard, reshard, forward_backward],
)
def check_sharded_pass(fn: Callable) -> str | None:
    """Run fn(layers, x) on 2 to 4 ranks and print the mistake it makes, or that it makes none.

    fn runs the layers forward, and backward from a gradient of ones; no more than one may be whole at a time.
    The last layer may stay whole from forward to backward, which saves a gather.
    """
    return examine(CASES, partial(_look, fn))


def _pass(fn: Callable, rank: int) -> Seen:
    """In the worker: build the layers, run fn, and look at what is left."""
    watch, x = Watch(), input_of(rank)
    for index in range(DEPTH):
        ShardedLayer(index, watch)
    layers, watch.alive = watch.layers, Alive()
    with resized_to_fit(layers), flat_as_it_was(layers, watch.uses):
        fn(list(layers), x)
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
    )


def _look(fn: Callable, world_size: int) -> Finding:
    where, ranks = f"{world_size} ranks", range(world_size)
    outcome = attempt(_pass, [(fn, rank) for rank in ranks])
    if stopped := _stopped(outcome) or _missing(outcome.values):
        return Finding(where, stopped)
    gradients = [true_gradients(rank) for rank in ranks]
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
    named = set.intersection(*(set(finding.fitting()) for finding in wrong))
    wrong[0].mistakes = {why: wrong[0].mistakes[why] for why in wrong[0].mistakes if why in named}
    wrong[0].cause = outcome.values[0].out_of_order
    return wrong[0]


def _stopped(outcome: Attempt) -> str | None:
    """What stopped a rank: one of the layers' own errors, an error or a crash in freed storage, a stub."""
    signs = ("setStorage", "out of bounds", "signal SIGSEGV", "signal SIGBUS")
    if outcome.failure and any(sign in outcome.failure for sign in signs):
        return (
            "a rank used a weight whose storage is freed. Bring the storage back with "
            "layer.flat.untyped_storage().resize_(bytes) before you write to layer.flat"
        )
    if outcome.failure:
        return outcome.failure.replace("stopped with RuntimeError: layer", "stopped: layer")
    if all(seen.peak == 0 for seen in outcome.values) and not any(outcome.calls):
        return "not written yet: no layer ran and nothing was sent"
    for name in outcome.collectives:
        return f"that calls torch's own {name}: use ring.all_gather and ring.reduce_scatter"
    return None


def _missing(values: list[Seen]) -> str | None:
    for rank, seen in enumerate(values):
        missing = [
            i for i, shard in enumerate(seen.shards) if isinstance(shard, Odd) and shard.kind == "NoneType"
        ]
        if missing:
            order = f". {seen.out_of_order[0].upper()}{seen.out_of_order[1:]}" if seen.out_of_order else ""
            return (
                f"layers {missing} on rank {rank} have no grad_shard: reduce every layer's gradient, not one "
                f"for all{order}"
            )
    return None


def _too_much(outcome: Attempt) -> str | None:
    """Right gradients, but lost parameters, too much in memory, or too many bytes."""
    if lost := next(filter(None, (seen.lost for seen in outcome.values)), None):
        return f"the gradients are right, but {lost}"
    by_rank = [too_much_memory(rank, seen) for rank, seen in enumerate(outcome.values)]
    return next(filter(None, by_rank), None) or _wrong_bytes(outcome)


def _wrong_bytes(outcome: Attempt) -> str | None:
    world_size = len(outcome.values)
    layer_bytes = 8 * NUMEL * (world_size - 1) // world_size
    model_bytes = DEPTH * layer_bytes
    for rank, sent in enumerate(outcome.messages):
        right, bytes_sent = f"the values are right, but rank {rank}", outcome.bytes_sent(rank)
        if any(message.numel >= NUMEL for message in sent):
            return (
                f"{right} sends whole tensors of {NUMEL} elements: a rank sends its own shard, and on a "
                "ring the chunks that it passes on"
            )
        if bytes_sent not in (
            3 * model_bytes,
            3 * model_bytes - layer_bytes,
        ):  # the last layer may stay whole
            calls = ", ".join(sorted({message.call for message in sent}))
            return (
                f"{right} sent {bytes_sent} bytes, {bytes_sent / model_bytes:.3g} passes over the model "
                f"({calls}), where stage 3 makes 3: gather, gather again, reduce-scatter"
            )
    return None

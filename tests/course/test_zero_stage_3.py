"""Lesson 06: its check names each classic mistake, and its drawing says what it shows."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.lessons import solutions_travel_by_value, spoken

import zerolab
from zerolab import ring
from zerolab.course import rehearsing
from zerolab.course.lessons.zero_stage_3 import check_sharded_pass
from zerolab.course.lessons.zero_stage_3.figures import ARRIVING, FREED, WHOLE, Moment, residency
from zerolab.models import GPT

solutions_travel_by_value(__name__)


def refill(layer):
    layer.flat.untyped_storage().resize_(8 * layer.flat.numel())
    layer.flat[layer.owned] = layer.shard


def unshard(layer):
    refill(layer)
    ring.all_gather(layer.flat)


def reshard(layer):
    layer.flat.untyped_storage().resize_(0)


def reduce(layer):
    layer.grad_shard = ring.reduce_scatter(layer.grad).clone()
    layer.grad = None


def nothing(layer):
    pass


def step(layers, x, unshard=unshard, reshard=reshard, regather=unshard, reduce=reduce, backward=reversed):
    """The right solution, with one knob for each classic mistake."""
    for layer in layers:
        unshard(layer)
        x = layer.forward(x)
        reshard(layer)
    grad = torch.ones_like(x)
    for layer in backward(layers):
        regather(layer)
        grad = layer.backward(grad)
        reshard(layer)
        reduce(layer)


def without_own_shard(layer):
    layer.flat.untyped_storage().resize_(8 * layer.flat.numel())
    ring.all_gather(layer.flat)


def into_freed_storage(layer):
    layer.flat[layer.owned] = layer.shard
    ring.all_gather(layer.flat)


def whole_tensors(layer):
    """Everybody sends everybody a whole tensor, zero where another rank owns it."""
    layer.flat.untyped_storage().resize_(8 * layer.flat.numel())
    layer.flat.zero_()
    layer.flat[layer.owned] = layer.shard
    mine = layer.flat.clone()
    for peer in set(range(dist.get_world_size())) - {dist.get_rank()}:
        theirs = torch.empty_like(mine)
        pair = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        layer.flat += theirs


def everything_at_once(layers, x):
    for layer in layers:
        unshard(layer)
    step(layers, x, unshard=nothing, reshard=nothing, regather=nothing)
    for layer in layers:
        reshard(layer)


def view(layer):
    layer.grad_shard, layer.grad = ring.reduce_scatter(layer.grad), None


def gradient_stays(layer):
    layer.grad_shard = ring.reduce_scatter(layer.grad).clone()


def not_summed(layer):
    layer.grad_shard, layer.grad = layer.grad[layer.owned].clone(), None


def mean(layer):
    reduce(layer)
    layer.grad_shard /= dist.get_world_size()


def all_reduced(layer):
    ring.all_reduce(layer.grad)
    layer.grad_shard, layer.grad = layer.grad[layer.owned].clone(), None


def first_only(layer):
    if layer.index == 0:
        reduce(layer)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"unshard": nothing}, "unshard(layer) comes before"),
        ({"regather": nothing}, "gather it a second time"),
        ({"reshard": nothing, "regather": nothing}, "never freed"),
        ({"unshard": without_own_shard}, "not the values"),
        ({"unshard": refill}, "not the values"),
        ({"regather": refill}, "not the values"),
        ({"unshard": into_freed_storage}, "storage is freed"),
        ({"unshard": whole_tensors, "regather": whole_tensors}, "sends whole tensors"),
        ({"reduce": nothing}, "no grad_shard"),
        ({"reduce": first_only}, "not one for all"),
        ({"reduce": view}, "view"),
        ({"reduce": gradient_stays}, "still hold whole gradients"),
        ({"reduce": not_summed}, "not summed"),
        ({"reduce": mean}, "is the mean"),
        ({"reduce": all_reduced}, "4 passes"),
        ({"backward": list}, "last layer to the first"),
    ],
)
def test_the_check_names_the_mistake(knobs, words):
    assert words in check_sharded_pass.diagnose(lambda layers, x: step(layers, x, **knobs))


def test_gathering_everything_at_once_is_stage_2():
    assert "stage 2's memory" in check_sharded_pass.diagnose(everything_at_once)


def test_the_drawing_says_in_words_what_it_shows():
    run = [
        Moment("forward 0", [WHOLE, ARRIVING, WHOLE], [500_000, 500_000, 250_000]),
        Moment("backward 0", [WHOLE, FREED, WHOLE], [500_000, 0, 250_000]),
    ]
    alt = spoken(residency, 3.8, measured={1: run}, names=["block 0", "block 1", "root"])
    assert "prefetch=1. Besides the root at most 2 of the blocks" in alt and "1.25 MB" in alt


def test_a_rehearsal_shows_how_far_it_is_and_counts_the_same(monkeypatch):
    lines = []

    def display(words, raw, display_id):
        lines.append(words["text/plain"])
        return SimpleNamespace(update=lambda words, raw: lines.append(words["text/plain"]))

    def model():
        return GPT(width=32, depth=6, heads=2, context=16)

    monkeypatch.setattr(rehearsing, "display", display)
    watched = zerolab.rehearse(rehearsing.progress("six blocks", model), world_size=8)
    assert watched == zerolab.rehearse(model, world_size=8)
    shown = [int(line.split()[2]) for line in lines]
    assert lines[0] == "six blocks: 0 % of the blocks computed"
    assert shown == sorted(set(shown)) and shown[-1] == 100 and len(shown) == 25

"""Lesson 06: its check names each classic mistake, and its drawing says what it shows."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.answers import alone, together
from support.lessons import solutions_travel_by_value, spoken

import zerolab
from zerolab import ring
from zerolab.course import rehearsing
from zerolab.course.lessons.zero_stage_3 import check_sharded_pass
from zerolab.course.lessons.zero_stage_3.figures import ARRIVING, FREED, WHOLE, Moment, residency
from zerolab.course.lessons.zero_stage_3.layers import resized_to_fit
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


def replaced(layer, keep=0):
    layer.flat.data = torch.zeros(keep, dtype=layer.flat.dtype)


def replaced_after_backward(layers, x):
    """Right: nobody needs flat after its layer's backward, so any way to free it will do."""
    step(layers, x, reduce=lambda layer: (reduce(layer), replaced(layer)))


def replaced_and_an_error(layers, x):
    """An error that has nothing to do with what was put in the place of a flat that nobody needs."""
    replaced_after_backward(layers, x)
    raise ValueError("of its own")


def reduce(layer):
    layer.grad_shard = ring.reduce_scatter(layer.grad).clone()
    layer.grad = None


def nothing(layer):
    pass


def step(
    layers,
    x,
    unshard=unshard,
    reshard=reshard,
    regather=unshard,
    reduce=reduce,
    backward=reversed,
    ones=torch.ones_like,
):
    """The right solution, with one knob for each classic mistake."""
    for layer in layers:
        unshard(layer)
        x = layer.forward(x)
        reshard(layer)
    grad = ones(x)
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


def resized_to(nbytes):
    def unshard(layer):
        layer.flat.untyped_storage().resize_(nbytes)
        layer.flat[layer.owned] = layer.shard
        ring.all_gather(layer.flat)

    return unshard


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


def last_stays(layers, x):
    """Right: the last layer is whole from forward to backward, which saves a gather."""
    for layer in layers:
        unshard(layer)
        x = layer.forward(x)
        if layer.index < len(layers) - 1:
            reshard(layer)
    grad = torch.ones_like(x)
    while layers:
        layer = layers.pop()
        if not layer.nbytes:
            unshard(layer)
        grad = layer.backward(grad)
        reshard(layer)
        reduce(layer)


def recursive(layers, x):
    """Right: each layer runs those after it between its own forward and its own backward."""
    if not layers:
        return torch.ones_like(x)
    first, *others = layers
    unshard(first)
    output = first.forward(x)
    reshard(first)
    grad = recursive(others, output)
    unshard(first)
    grad = first.backward(grad)
    reshard(first)
    reduce(first)
    return grad


def reduced_at_the_end(layers, x):
    """The gradients are reduced when backward is over: until then all are whole."""
    step(layers, x, reduce=nothing)
    for layer in layers:
        layer.grad_shard = torch.zeros_like(layer.shard)
        layer.grad_shard += ring.reduce_scatter(layer.grad)
        layer.grad = None


def into_tensors_made_before(layers, x):
    """Right: each gradient is added to a tensor of zeros as soon as it is there."""
    for layer in layers:
        layer.grad_shard = torch.zeros_like(layer.shard)
    step(layers, x, reduce=add)


def add(layer):
    layer.grad_shard += ring.reduce_scatter(layer.grad)
    layer.grad = None


def with_a_view_in_a_variable(layers, x, keep=lambda layer, view: view):
    """The clone is right, and the name of the view lives on into the next layer."""
    for layer in layers:
        unshard(layer)
        x = layer.forward(x)
        reshard(layer)
    grad = torch.ones_like(x)
    for layer in reversed(layers):
        unshard(layer)
        grad = layer.backward(grad)
        reshard(layer)
        kept = ring.reduce_scatter(layer.grad)
        layer.grad_shard = kept.clone()
        kept = keep(layer, kept)
        layer.grad = None
    return kept


def with_a_clone_of_a_gradient(layers, x):
    with_a_view_in_a_variable(layers, x, lambda layer, view: layer.grad.clone())


def with_copies(layers, x):
    """No second gather: a copy of each weight is kept."""
    copies = {}
    for layer in layers:
        unshard(layer)
        x = layer.forward(x)
        copies[layer.index] = layer.flat.clone()
        reshard(layer)
    grad = torch.ones_like(x)
    for layer in reversed(layers):
        layer.flat.untyped_storage().resize_(8 * layer.flat.numel())
        layer.flat.copy_(copies[layer.index])
        grad = layer.backward(grad)
        reshard(layer)
        reduce(layer)


SPARE = []


def parked_gradient(layer):
    SPARE.append(layer.grad)
    reduce(layer)


def ones_for_each(layers, x):
    for layer in layers:
        unshard(layer)
        x = layer.forward(x)
        reshard(layer)
    for layer in reversed(layers):
        unshard(layer)
        layer.backward(torch.ones_like(x))
        reshard(layer)
        reduce(layer)


def same_input(layers, x):
    for layer in layers:
        unshard(layer)
        output = layer.forward(x)
        reshard(layer)
    grad = torch.ones_like(output)
    for layer in reversed(layers):
        unshard(layer)
        grad = layer.backward(grad)
        reshard(layer)
        reduce(layer)


def two_whole(layers, x):
    step(
        layers,
        x,
        unshard=lambda layer: [unshard(each) for each in layers[layer.index :][:2] if not each.nbytes],
    )


def weight_reduced(layer):
    layer.grad_shard, layer.grad = layer.shard * dist.get_world_size(), None


def whole_sum(layer):
    ring.all_reduce(layer.grad)
    layer.grad_shard, layer.grad = layer.grad, None


def own_whole(layer):
    layer.grad_shard, layer.grad = layer.grad, None


def next_shard(layer):
    ring.all_reduce(layer.grad)
    rank, size = dist.get_rank() + 1, dist.get_world_size()
    layer.grad_shard, layer.grad = layer.grad.chunk(size)[rank % size].clone(), None


def into_the_shard(layer):
    layer.grad_shard, layer.grad = layer.shard.copy_(ring.reduce_scatter(layer.grad)), None


def shard_to_zeros(layer):
    reduce(layer)
    layer.shard.zero_()


def stepped(layer):
    reduce(layer)
    layer.shard -= 0.5 * layer.grad_shard


def without_shard(layer):
    reduce(layer)
    layer.shard = None


def summed_twice(layer):
    ring.all_reduce(layer.grad)
    reduce(layer)


def through_float32(layer):
    reduce(layer)
    layer.grad_shard = layer.grad_shard.float().double()


def cut_off(layer):
    reduce(layer)
    layer.grad_shard.clamp_(-1, 1)


def weight_added(layer):
    reduce(layer)
    layer.grad_shard += layer.shard


def dropped(layer):
    """Right: the whole gradient is deleted."""
    layer.grad_shard = ring.reduce_scatter(layer.grad).clone()
    del layer.grad


def with_del(layers, x):
    step(layers, x, reduce=dropped)


def shape_to_zero(layer):
    layer.flat.resize_(0)


def shape_back(layer):
    layer.flat.resize_(36)
    layer.flat.untyped_storage().resize_(288)
    layer.flat[layer.owned] = layer.shard
    ring.all_gather(layer.flat)


def by_whole_division(layer):
    layer.flat.untyped_storage().resize_(288)
    length = 36 // dist.get_world_size()
    layer.flat[dist.get_rank() * length :][:length] = layer.shard[:length]
    ring.all_gather(layer.flat)


def a_new_tensor(layer):
    layer.flat = torch.zeros(36, dtype=torch.float64)
    layer.flat[layer.owned] = layer.shard
    ring.all_gather(layer.flat)


def new_data(layer):
    replaced(layer, keep=36)
    refill(layer)
    ring.all_gather(layer.flat)


def gathered_in_float32(layer):
    layer.flat.untyped_storage().resize_(288)
    short = torch.zeros(36)
    short[layer.owned] = layer.shard.float()
    ring.all_gather(short)
    layer.flat.copy_(short)


def into_grad(layer):
    layer.grad = ring.reduce_scatter(layer.grad).clone()


def under_another_name(layer):
    layer.shard_of_grad = ring.reduce_scatter(layer.grad).clone()
    layer.grad = None


def returned_as_a_list(layers, x):
    step(layers, x, reduce=under_another_name)
    shards = [layer.shard_of_grad for layer in layers]
    for layer in layers:
        del layer.shard_of_grad
    return shards


def beyond_the_end(layers, x):
    unshard(layers[0])
    return layers[0].flat[torch.tensor([36])]


RIGHT = [step, last_stays, recursive, into_tensors_made_before, replaced_after_backward, with_del]
WRONG = [
    (partial(step, ones=torch.zeros_like), "layer 3's backward got something other than torch.ones_like("),
    (
        partial(step, unshard=shape_back, regather=shape_back, reshard=shape_to_zero),
        "its storage still has its bytes: Tensor.resize_ changes the shape. layer.flat.untyped_storage().res",
    ),
    (
        alone(partial(step, unshard=by_whole_division, regather=by_whole_division)),
        "Put layer.shard into layer.flat[layer.owned], then all-gather layer.flat. N does not divide 36",
    ),
    (
        partial(step, unshard=a_new_tensor),
        "layer 0's flat has another storage in forward: bring back its own",
    ),
    (partial(step, unshard=new_data), "layer 0's flat has another storage in forward: bring back its own"),
    (partial(step, regather=gathered_in_float32), "is back in backward, and its value is right up to round"),
    (partial(step, reduce=into_grad), "and layer.grad is this rank's shard of the sum: set layer.grad_shard"),
    (partial(step, reduce=under_another_name), "and layer.shard_of_grad is this rank's shard of the sum"),
    (returned_as_a_list, "and what your function returned is this rank's shard of the sum"),
    (beyond_the_end, "stopped with IndexError: index 36 is out of bounds for dimension 0"),
    (partial(step, reshard=nothing, regather=nothing), "layer.flat.untyped_storage().resize_(0) frees"),
    (partial(step, reduce=through_float32), "somewhere it went through float32"),
    (partial(step, reduce=cut_off), "its value is the right one, cut off at -1 and 1"),
    (partial(step, reduce=weight_added), "the weight was added to each grad_shard"),
    (everything_at_once, "stage 2's memory"),
    (reduced_at_the_end, "3 whole gradients wait in layer.grad while another layer computes"),
    (with_copies, "more tensors of a whole weight's size are in memory"),
    (with_a_view_in_a_variable, "a whole gradient is still in memory when the next layer is gathered"),
    (with_a_clone_of_a_gradient, "1 more tensor of a whole weight's size is in memory"),
    (ones_for_each, "layer 2's backward got something other than what layer 3's backward returned"),
    (same_input, "layer 1's forward got something other than what layer 0's forward returned"),
    (
        alone(partial(step, reshard=replaced)),
        "layer 3's flat has 0 elements, and its weight has 36: since its forward another tensor was put in "
        "its place. Free the storage alone",
    ),
    (alone(partial(step, reshard=partial(replaced, keep=6))), "layer 3's flat has 6 elements"),
    (alone(partial(step, unshard=lambda layer: (replaced(layer), refill(layer)))), "since the start another"),
    (alone(replaced_and_an_error), "stopped with ValueError: of its own"),
    (lambda layers, x: None, "not written yet"),
    (two_whole, "2 layers were whole at the same time"),
    (partial(step, unshard=nothing), "unshard(layer) comes before"),
    (partial(step, regather=nothing), "gather it a second time"),
    (partial(step, reshard=nothing, regather=nothing), "never freed"),
    (alone(partial(step, unshard=without_own_shard)), "not the values"),
    (alone(partial(step, unshard=refill)), "not the values"),
    (alone(partial(step, regather=refill)), "not the values"),
    (alone(partial(step, unshard=into_freed_storage)), "storage is freed"),
    (partial(step, unshard=resized_to(36)), "is resized to 36 bytes, and its weight has 36 elements of 8"),
    (partial(step, unshard=resized_to(2 * 288)), "resize_ takes bytes, 288 of them here"),
    (partial(step, regather=resized_to(144)), "layer 3's storage is resized to 144 bytes"),
    (partial(step, unshard=whole_tensors, regather=whole_tensors), "sends whole tensors"),
    (partial(step, reduce=nothing), "no grad_shard"),
    (partial(step, reduce=first_only), "not one for all"),
    (partial(step, reduce=view), "view"),
    (partial(step, reduce=gradient_stays), "still hold whole gradients"),
    (partial(step, reduce=not_summed), "this rank's own gradient"),
    (partial(step, reduce=mean), "each grad_shard is the mean"),
    (partial(step, reduce=all_reduced), "4 passes"),
    (partial(step, reduce=parked_gradient), "in `SPARE[0]`"),
    (partial(step, reduce=weight_reduced), "a sum of the weight, layer.flat, over the ranks"),
    (partial(step, reduce=whole_sum), "each grad_shard is the whole summed gradient"),
    (partial(step, reduce=own_whole), "own whole gradient"),
    (partial(step, reduce=next_shard), "the next rank's shard"),
    (partial(step, reduce=summed_twice), "summed over the ranks twice"),
    (partial(step, reduce=into_the_shard), "layer 0's shard holds the gradient now"),
    (partial(step, reduce=shard_to_zeros), "layer 0's shard holds zeros now"),
    (partial(step, reduce=stepped), "layer 0's shard holds other numbers now"),
    (partial(step, reduce=without_shard), "layer 0's shard holds nothing now"),
    (partial(step, backward=list), "last layer to the first"),
]
diagnose = together(check_sharded_pass, [*RIGHT, *(wrong for wrong, _ in WRONG)])


@pytest.mark.parametrize("right", RIGHT)
def test_every_right_way_passes(right):
    assert diagnose(right) is None


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_the_check_names_the_mistake(wrong, words):
    assert words in diagnose(wrong)


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


def test_a_storage_that_comes_back_does_not_hold_what_it_held():
    weight = torch.arange(36.0, dtype=torch.float64)
    with resized_to_fit([]):
        weight.untyped_storage().resize_(0)
        weight.untyped_storage().resize_(8 * 36)
    assert (weight > 1e300).all()

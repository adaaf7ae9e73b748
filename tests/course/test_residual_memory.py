"""Lesson 07: the check of a block that is cut over ranks names each classic mistake."""

import re
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.answers import alone, together
from support.lessons import solutions_travel_by_value
from torch.nn.functional import dropout, elu, gelu, layer_norm, linear, relu, silu, softplus

import zerolab
from zerolab import ring
from zerolab.course.lessons.residual_memory import check_block, operator
from zerolab.course.lessons.residual_memory.mlp import SHAPE, WIDTH, inputs, output_gradient, parts, right
from zerolab.course.wording import sentences

solutions_travel_by_value(__name__)


def same(tensor):
    return tensor


def summed(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def mean(tensor):
    return summed(tensor) / dist.get_world_size()


def zeros(tensor):
    return torch.zeros_like(tensor)


def cut(tensor, dim=0, shift=0):
    size = dist.get_world_size()
    return tensor.chunk(size, dim)[(dist.get_rank() + shift) % size]


def w1_of_the_rank_before(tensor, dim=0):
    """The shape tells which weight it is."""
    return cut(tensor, dim, shift=-1 if tensor.dim() == 2 and dim == 0 else 0)


def b2_last(total, b2):
    return total + b2


def block(x, w1, b1, w2, b2, f=(same, summed), g=(summed, same), cut=cut, act=gelu, bias=None, last=b2_last):
    """The right answer, with one knob for each classic mistake; `bias`: what is added before g."""
    f, g = (partial(operator, forward=there, backward=back) for there, back in (f, g))
    product = linear(act(linear(f(x), cut(w1), cut(b1))), cut(w2, 1))
    return last(g(product if bias is None else product + bias(b2)), b2)


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, product):
        dist.all_reduce(product)
        return product

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def as_megatron_does(x, w1, b1, w2, b2):
    """Right: two functions of torch.autograd, which add up in place."""
    return Leave.apply(linear(gelu(linear(Enter.apply(x), cut(w1), cut(b1))), cut(w2, 1))) + b2


def with_a_hook(x, w1, b1, w2, b2):
    """Right: a hook adds up the gradient, and the ranks' other products are added as a constant."""
    x = x.view_as(x)
    x.register_hook(summed)
    product = linear(gelu(linear(x, cut(w1), cut(b1))), cut(w2, 1))
    return product + (summed(product.detach()) - product.detach()) + b2


def by_a_ring(tensor):
    flat = tensor.flatten().clone()
    ring.all_reduce(flat)
    return flat.view(tensor.shape)


def with_a_ring_and_matrices(x, w1, b1, w2, b2):
    """Right: slices, matrix products, and zerolab's ring."""
    width = len(b1) // dist.get_world_size()
    mine = slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)
    hidden = gelu(operator(x, same, by_a_ring) @ w1[mine].T + b1[mine])
    return operator(hidden @ w2[:, mine].T, forward=by_a_ring, backward=same) + b2


def by_everyone_to_everyone(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return sum(parts)


def not_cut(tensor, dim=0):
    return tensor


def of_rank_0(tensor, dim=0):
    return tensor.chunk(dist.get_world_size(), dim)[0]


def every_nth(tensor, dim=0):
    index = torch.arange(dist.get_rank(), tensor.shape[dim], dist.get_world_size())
    return tensor.index_select(dim, index)


def w1_by_inputs(x, w1, b1, w2, b2):
    x = operator(x, same, summed)
    return operator(linear(gelu(linear(cut(x, -1), cut(w1, 1), b1)), w2), summed, same) + b2


def w1_by_inputs_alone(x, w1, b1, w2, b2):
    return linear(gelu(linear(x, cut(w1, 1), b1)), cut(w2, 1)) + b2


def b1_whole(x, w1, b1, w2, b2):
    return linear(gelu(linear(x, cut(w1), b1)), cut(w2, 1)) + b2


def recorded(x, w1, b1, w2, b2):
    """The sum is right, and autograd knows nothing of it. PyTorch warns, and passes the gradient on."""
    product = linear(gelu(linear(operator(x, same, summed), cut(w1), cut(b1))), cut(w2, 1))
    dist.all_reduce(product)
    return product + b2


def recorded_and_needed(x, w1, b1, w2, b2):
    """tanh computes its gradient from its own output, which the all-reduce overwrites in silence."""
    hidden = torch.tanh(linear(operator(x, same, summed), cut(w1), cut(b1)))
    dist.all_reduce(hidden)
    return linear(hidden, cut(w2, 1)) + b2


def of_torch(x, w1, b1, w2, b2):
    """Its backward adds up again."""
    from torch.distributed.nn.functional import all_reduce

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return all_reduce(linear(gelu(linear(operator(x, same, summed), cut(w1), cut(b1))), cut(w2, 1))) + b2


def without_history(x, w1, b1, w2, b2):
    with torch.no_grad():
        return block(x, w1, b1, w2, b2)


def from_a_copy(x, w1, b1, w2, b2):
    return block(x, cut(w1).detach().requires_grad_(), b1, w2, b2, cut=cut_b1_and_w2)


def cut_b1_and_w2(tensor, dim=0):
    return tensor if dim == 0 and tensor.dim() == 2 else cut(tensor, dim)


def gradients_added_up(x, w1, b1, w2, b2):
    weights = [operator(weight, same, summed) for weight in (w1, b1, w2)]
    return block(x, *weights, b2)


def on_rank_0(b2):
    return b2 if dist.get_rank() == 0 else torch.zeros_like(b2.detach())


def nth_of(b2):
    return b2 / dist.get_world_size()


def gelu_of_all(total, b2):
    return gelu(total + b2)


def no_b2(total, b2):
    return total


def mean_of_all(total, b2):
    return (total + b2) / dist.get_world_size()


def nothing(tensor):
    pass


def zerolabs_own(x, w1, b1, w2, b2):
    parallel = zerolab.TensorParallel(dist.group.WORLD)
    product = linear(gelu(linear(parallel.enter(x, "x"), cut(w1), cut(b1))), cut(w2, 1))
    return parallel.leave(product, "product") + b2


def one_rank_leaves_backward(x, w1, b1, w2, b2):
    f = (same, summed if dist.get_rank() else same)
    return block(x, w1, b1, w2, b2, f=f)


def weights_of(places, x, w1, b1, w2, b2):
    """The right answer, but for whose part of each weight is taken: shifts, or None for rank 0's part."""
    own = [of_rank_0 if place is None else partial(cut, shift=place) for place in places]
    hidden = gelu(linear(operator(x, same, summed), own[0](w1), own[1](b1)))
    return operator(linear(hidden, own[2](w2, 1)), summed, same) + b2


def b1_on_rank_0(x, w1, b1, w2, b2):
    return block(x, w1, b1 if dist.get_rank() == 0 else torch.zeros_like(b1), w2, b2)


def all_but_the_last(tensor, dim=0):
    own = cut(tensor, dim)
    return own.narrow(dim, 0, own.shape[dim] - 1)


def reversed_parts(tensor, dim=0):
    return tensor.chunk(dist.get_world_size(), dim)[-dist.get_rank() - 1]


def added_up_parts(tensor, dim=0):
    return operator(cut(tensor, dim), same, summed)


def of_hidden_features(hidden):
    return operator(gelu(hidden), same, summed)


def sum_of_hidden_features(hidden):
    return gelu(operator(hidden, summed, same))


def broadcast(tensor):
    total = tensor.clone()
    dist.broadcast(total, 0)
    return total


def nth(tensor):
    return tensor / dist.get_world_size()


def own_columns(b2):
    """A rank's part of b2, at its place."""
    width = len(b2) // dist.get_world_size()
    return torch.where(torch.arange(len(b2)) // width == dist.get_rank(), b2, 0)


def cut_by_rows_of_x(x, w1, b1, w2, b2):
    rows = x.flatten(0, 1).tensor_split(dist.get_world_size())
    own = [part if rank == dist.get_rank() else torch.zeros_like(part) for rank, part in enumerate(rows)]
    mask = torch.cat([torch.ones_like(part) * bool(part.any()) for part in own]).view(x.shape)
    return operator((linear(gelu(linear(x, w1, b1)), w2, b2)) * mask, summed, same)


def w1_by_inputs_with_g(x, w1, b1, w2, b2):
    hidden = operator(linear(cut(operator(x, same, summed), -1), cut(w1, 1)), summed, same) + b1
    return linear(gelu(hidden), w2, b2)


def masked(tensor, dim=0):
    """Zeros in place of the other ranks' parts: the products stay as large."""
    size, rank = dist.get_world_size(), dist.get_rank()
    return torch.cat([part * (peer == rank) for peer, part in enumerate(tensor.chunk(size, dim))], dim)


def writes_zeros(x, w1, b1, w2, b2):
    for weight, dim in ((w1, 0), (w2, 1)):
        weight.data.copy_(masked(weight.data, dim))
    return block(x, w1, b1, w2, b2)


FIRST = []


def from_the_first_call(x, w1, b1, w2, b2):
    FIRST.append((w1, b1, w2))
    return block(x, *FIRST[0], b2)


def with_its_own_backward(*given):
    output = block(*given)
    output.sum().backward(retain_graph=True)
    return output


def raises_in_a_second_call(*given):
    assert not FIRST
    FIRST.append(given)
    return block(*given)


def in_place(tensor):
    dist.all_reduce(tensor)
    return tensor


def first_layer_through_f(x, w1, b1, w2, b2):
    hidden = gelu(operator(linear(x, cut(w1), cut(b1)), same, summed))
    return operator(linear(hidden, cut(w2, 1)), summed, same) + b2


def gelu_after_g(x, w1, b1, w2, b2):
    hidden = linear(operator(x, same, summed), cut(w1), cut(b1))
    return gelu(operator(linear(hidden, cut(w2, 1)), summed, same)) + b2


def through_f_twice(x, w1, b1, w2, b2):
    return block(operator(x, same, summed), w1, b1, w2, b2)


def output_through_f(x, w1, b1, w2, b2):
    return operator(block(x, w1, b1, w2, b2), same, summed)


def two_wrong_places(x, w1, b1, w2, b2):
    """gelu stands before g, and the backward of f is the mean."""
    hidden = linear(operator(x, same, mean), cut(w1), cut(b1))
    return operator(gelu(linear(hidden, cut(w2, 1))), summed, same) + b2


def b1_after_gelu(x, w1, b1, w2, b2):
    hidden = gelu(linear(operator(x, same, summed), cut(w1))) + cut(b1)
    return operator(linear(hidden, cut(w2, 1)), summed, same) + b2


def b1_after_gelu_and_no_g(x, w1, b1, w2, b2):
    hidden = gelu(linear(operator(x, same, summed), cut(w1))) + cut(b1)
    return linear(hidden, cut(w2, 1)) + b2


RIGHT = [block, as_megatron_does, with_a_hook, with_a_ring_and_matrices]


def with_dropout(x, w1, b1, w2, b2):
    return block(x, w1, b1, w2, b2, act=lambda hidden: dropout(gelu(hidden), 0.1))


def with_a_residual(x, w1, b1, w2, b2):
    return block(x, w1, b1, w2, b2) + x


def with_a_norm(x, w1, b1, w2, b2):
    return block(layer_norm(x, x.shape[-1:]), w1, b1, w2, b2)


WRONG = [
    (partial(block, cut=w1_of_the_rank_before), "rank r takes the previous rank's part of w1. w1, b1 and w2"),
    (partial(block, g=(in_place, same)), "the forward of an operator writes to the tensor that it is given"),
    (partial(block, f=(same, in_place)), "the backward of an operator writes to the tensor that it is given"),
    (partial(block, f=(same, in_place)), "in a tensor of its own (line"),
    (first_layer_through_f, "f stands around what the first layer returns, before gelu. Each rank has other"),
    (gelu_after_g, "`gelu` stands after g, and not between the layers. Right are f around x"),
    (through_f_twice, "`x` passes through f twice, so its gradient is added up twice"),
    (output_through_f, "f stands around the output. Right are f around x"),
    (two_wrong_places, "f's backward is the mean; and `gelu` stands before g, and not between the layers"),
    (partial(block, g=(torch.ones(2), same)), "operator: forward is a Tensor, and has to be a function"),
    *((partial(block, act=act), f"{act.__name__} stands where gelu should") for act in (silu, softplus, elu)),
    (partial(block, act=torch.sigmoid), "sigmoid stands where gelu should"),
    (partial(block, act=lambda hidden: gelu(gelu(hidden))), "gelu of gelu stands where gelu should"),
    (b1_after_gelu, "b1 is added after gelu: the first layer adds it, linear(f(x), w1, b1), and gelu comes"),
    (b1_after_gelu_and_no_g, "g around the product is missing; and b1 is added after gelu. Right are"),
    (with_dropout, "the block draws random numbers, as dropout does"),
    (with_a_residual, "x is added to the output"),
    (with_a_norm, "a layer norm stands before the first layer"),
    (lambda x, w1, b1, w2, b2: None, "not written yet"),
    (partial(block, g=(same, same)), "g is missing: each rank returns its own partial product"),
    (partial(block, g=(same, same), last=no_b2), "g and b2 are missing"),
    (partial(block, f=(same, same)), "x.grad is what comes through this rank's own part: f is missing"),
    (partial(block, g=(summed, summed)), "x.grad is N times too large: f and g both add up"),
    (of_torch, "x.grad is N times too large: f and g both add up"),
    (partial(block, f=(same, same), g=(summed, summed)), "g adds up in the backward pass, and f does not"),
    (partial(block, f=(summed, same), g=(same, summed)), "f and g are exchanged in the forward pass"),
    (partial(block, f=(summed, summed)), "f adds x up in the forward pass"),
    (partial(block, g=(mean, same)), "that is the mean of the partial products"),
    (partial(block, g=(mean, same), bias=same, last=no_b2), "that is the mean of the partial products"),
    (partial(block, last=mean_of_all), "that is the mean over the ranks, of b2 as well"),
    (partial(block, f=(same, mean)), "x.grad is the mean over the ranks"),
    (partial(block, f=(same, zeros)), "x.grad is zeros"),
    (partial(block, bias=same, last=no_b2), "every rank adds b2 before g adds up, so it counts N times"),
    (partial(block, bias=nth_of, last=no_b2), "b2.grad is 1/N of what it should be: b2 is divided by N"),
    (partial(block, bias=on_rank_0, last=no_b2), "b2 is added on rank 0 alone, before g adds up"),
    (partial(block, last=no_b2), "b2 is missing: add it once, after g"),
    (partial(block, cut=not_cut), "the weights are not cut: every rank computes the whole product"),
    (partial(block, cut=not_cut, g=(same, same), f=(same, same)), "w1.grad is that of the whole weight"),
    (partial(block, cut=of_rank_0), "every rank takes rank 0's parts"),
    (partial(block, cut=partial(cut, shift=1)), "w1.grad is in the next rank's part"),
    (partial(block, cut=partial(cut, shift=-1)), "w1.grad is in the previous rank's part"),
    (partial(block, cut=every_nth), "rank r has the hidden features r, r + N"),
    (gradients_added_up, "w1.grad is that of the whole weight on every rank"),
    (w1_by_inputs, "gelu of a sum is not the sum of gelus"),
    (w1_by_inputs_alone, "and so w1 is (24, 12) and w2 (12, 24)"),
    (b1_whole, "b1.chunk(N)[rank] are a rank's outputs"),
    (partial(block, act=relu), "relu stands where gelu should"),
    (partial(block, act=same), "gelu is missing between the two layers"),
    (partial(block, act=partial(gelu, approximate="tanh")), "gelu's approximation stands where gelu should"),
    (partial(block, last=gelu_of_all), "gelu works on the output, too"),
    (
        partial(block, act=same, last=gelu_of_all),
        "gelu works on the output: it stands between the two layers",
    ),
    (
        partial(weights_of, (0, 0, 1)),
        "rank r takes the next rank's part of w2. w1, b1 and w2 belong together",
    ),
    (partial(weights_of, (0, None, 0)), "rank r takes rank 0's part of b1. w1, b1 and w2 belong together"),
    (partial(weights_of, (0, None, 1)), "rank 0's part of b1 and the next rank's part of w2"),
    (b1_on_rank_0, "b1 is added on rank 0 alone"),
    (partial(block, cut=all_but_the_last), "the last hidden feature of every part is left out"),
    (
        partial(block, act=sum_of_hidden_features, g=(same, same)),
        "the hidden features of all ranks are added",
    ),
    (partial(block, act=of_hidden_features), "f stands around the hidden features, too"),
    (partial(block, act=of_hidden_features, f=(same, same)), "and not around x"),
    (partial(block, g=(broadcast, same)), "every rank has rank 0's partial product: a broadcast"),
    (partial(block, g=(summed, nth)), "g divides in the backward pass"),
    (partial(block, cut=reversed_parts), "w1.grad is in the part of rank N - 1 - r"),
    (partial(block, cut=added_up_parts), "f stands around w1"),
    (partial(block, bias=own_columns, last=no_b2), "b2 is cut, and b2.grad is zeros outside a rank's part"),
    (cut_by_rows_of_x, "x.grad is zeros outside rows 0 to 1, so x is cut"),
    (w1_by_inputs_with_g, "w1.grad is zeros outside rows 0 to 23 and columns 0 to 3, and right are zeros"),
    (partial(block, cut=masked), "are 6,912 floating-point operations in forward, and those of its parts"),
    (writes_zeros, "your function writes to w1 and w2: the caller needs the values that it gave"),
    (from_the_first_call, "the first call is right, and a second one with other weights is not"),
    (with_its_own_backward, "your function computes gradients itself"),
    (alone(raises_in_a_second_call), "with other weights, in a second call (line"),
    (recorded, "dist.all_reduce writes to a tensor that autograd records"),
    (partial(block, g=(by_everyone_to_everyone, same)), "For silver: rank 0 sends"),
    (lambda *given: block(*given) + 0 * summed(given[0].detach()), "(dist.all_reduce), and two all-reduces"),
    (without_history, "no tensor has a gradient"),
    (from_a_copy, "w1 has no gradient after the backward pass"),
    (zerolabs_own, "zerolab.TensorParallel does what you write here: use dist.all_reduce"),
    (lambda *given: block(*given).float(), "float32"),
    (lambda *given: block(*given).flatten(), "its value has shape (72,), and the right one (2, 3, 12)"),
    (lambda *given: (block(*given),), "it returned tuple, with the right numbers in it"),
    (lambda *given: "17", "it returned str, '17'"),
    (lambda *given: float("nan") * block(*given), "its value holds nan"),
    (lambda *given: 2 * block(*given), "what is there is 2 times what it should be"),
    (partial(block, g=(None, same)), "operator: forward is None, and has to be a function of a tensor"),
    (
        partial(block, g=(nothing, same)),
        "and has to return a tensor (dist.all_reduce works in place and returns nothing)",
    ),
    (alone(one_rank_leaves_backward), "every rank must make the same calls"),
]
diagnose = together(check_block, [*RIGHT, *(wrong for wrong, _ in WRONG)])


@pytest.mark.parametrize("answer", RIGHT)
def test_every_right_way_passes(answer):
    assert diagnose(answer) is None


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_the_check_names_the_mistake(wrong, words):
    assert words in diagnose(wrong)


@pytest.mark.parametrize("wrong", [wrong for wrong, _ in WRONG])
def test_the_input_keeps_its_small_letter(wrong):
    assert not re.search(r"\bX\b", sentences(diagnose(wrong)))


def test_an_all_reduce_over_what_autograd_keeps_is_named_whatever_the_numbers_are():
    said = check_block.diagnose(recorded_and_needed)
    assert "dist.all_reduce writes to a tensor that autograd records" in said


def test_a_right_block_that_sends_more_passes_with_bronze():
    result = check_block(partial(block, g=(by_everyone_to_everyone, same)))
    assert result and result.message.startswith("Bronze, because the values are right. For silver: ")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_parts_of_the_check_add_up_to_the_whole_block(size):
    """What the check compares with is what one process computes of the whole weights."""
    mlp, of_parts = inputs(), parts(size)
    output = mlp.product() + mlp.b2
    output.backward(output_gradient())
    assert torch.allclose(of_parts.product + mlp.b2, output, rtol=1e-12)
    for name in ("x", "w1", "b1", "w2", "b2"):
        assert torch.allclose(of_parts.whole(name), getattr(mlp, name).grad, rtol=1e-12)
    rows = [gradient.abs().sum(1) > 0 for gradient in right(of_parts, "w1")]
    assert torch.stack(rows).sum(0).eq(1).all() and output.shape == (*SHAPE, WIDTH)


def test_a_gradient_of_x_alone_is_not_laid_to_g():
    """Where the gradients of the weights are right, g's backward is."""
    assert "g both" not in diagnose(through_f_twice)

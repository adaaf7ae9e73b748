"""Lesson 03: the check says what a missing gradient counts as, and which averages stand where."""

import pytest
import torch
import torch.distributed as dist
from support.answers import alone, together
from support.lessons import solutions_travel_by_value

from zerolab.course.lessons.data_parallel import check_average_gradients

solutions_travel_by_value(__name__)


def put_back(parameters, flat):
    at = 0
    for parameter in parameters:
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter).clone()
        at += parameter.numel()


def averaged(
    missing=torch.zeros_like,
    flatten=torch.Tensor.flatten,
    weight=lambda count, parameter: count,
    divisor=lambda total, count: total,
    back=put_back,
    order=list,
    op=dist.ReduceOp.SUM,
):
    """The right averages where nothing is given; `back` gets the parameters and the averages."""

    def average_gradients(parameters, count):
        parameters = order(parameters)
        own = [missing(p) if p.grad is None else p.grad for p in parameters]
        pieces = [weight(count, p) * flatten(each) for p, each in zip(parameters, own, strict=True)]
        flat = torch.cat([*pieces, pieces[0].new_tensor([count])])
        dist.all_reduce(flat, op=op)
        back(parameters, flat[:-1] / divisor(flat[-1], count))

    return average_gradients


def own_values(parameter):
    return parameter.detach().clone()


def one_tensor_for_all(parameters, count):
    zeros = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = zeros.setdefault(parameter.shape, torch.zeros_like(parameter))
    flat = torch.cat(
        [*(count * p.grad.flatten() for p in parameters), parameters[0].new_tensor([count]).detach()]
    )
    dist.all_reduce(flat)
    for parameter, piece in zip(parameters, flat[:-1].split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_((piece / flat[-1]).view_as(parameter))


def not_stepped_over(parameters, flat):
    """A parameter that had no gradient takes no place in the averages."""
    at = 0
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            continue
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter).clone()
        at += parameter.numel()


def zeros_where_none_was(parameters, flat):
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        had = parameter.grad is not None
        parameter.grad = (piece if had else torch.zeros_like(piece)).view_as(parameter).clone()


def all_but_the_last(parameters, flat):
    put_back(parameters[:-1], flat)


def on_rank_0(parameters, flat):
    if dist.get_rank() == 0:
        put_back(parameters, flat)


def in_equal_pieces(parameters, flat):
    for number, parameter in enumerate(parameters):
        begin = -(-len(flat) // len(parameters)) * number
        parameter.grad = flat.roll(-begin)[: parameter.numel()].view_as(parameter).clone()


def from_the_last(parameters, flat):
    put_back(parameters[::-1], flat)


def into_the_storage(parameters, flat):
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        torch.as_strided(parameter.grad, (parameter.numel(),), (1,)).copy_(piece)


def into_what_flatten_returns(parameters, flat):
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.flatten().copy_(piece)  # a copy where the gradient is stored transposed


def of_the_storage(grad):
    return torch.as_strided(grad, (grad.numel(),), (1,)).clone()


def by_rank(parameters):
    """Another order on each rank."""
    turn = dist.get_rank()
    return [*parameters[turn:], *parameters[:turn]]


def of_the_parameters(parameters, count):
    flat = torch.cat([*(count * p.detach().flatten() for p in parameters), torch.tensor([float(count)])])
    dist.all_reduce(flat)
    put_back(parameters, flat[:-1] / flat[-1])


def twice_the_bytes(parameters, count):
    own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([*(count * each.flatten() for each in own), torch.tensor([count])]).double()
    dist.all_reduce(flat)
    put_back(parameters, (flat[:-1] / flat[-1]).to(parameters[0].dtype))


def other_type(parameters, count):
    averaged(back=lambda ps, flat: put_back(ps, flat.half()))(parameters, count)


def other_shape(parameters, count):
    def back(parameters, flat):
        for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = piece

    averaged(back=back)(parameters, count)


def not_with_a_gap(parameters, count):
    if all(parameter.grad is not None for parameter in parameters):
        averaged()(parameters, count)


stops_at_the_gap = averaged(missing=lambda parameter: parameter.grad, flatten=lambda grad: grad.flatten())

RIGHT = [averaged(), averaged(order=lambda parameters: sorted(parameters, key=torch.numel))]
COUNTS = "the gate's average is the one in which the gradient that rank 1 lacks counts as "
WRONG = [
    (averaged(missing=torch.ones_like), f"{COUNTS}1 in all elements: count it as zeros"),
    (averaged(missing=lambda p: torch.full_like(p, 0.5)), f"{COUNTS}0.5 in all elements"),
    (averaged(missing=own_values), f"{COUNTS}the parameter's own values"),
    (averaged(missing=lambda p: torch.full_like(p, float("nan"))), f"{COUNTS}nan"),
    (averaged(missing=lambda p: torch.arange(16.0).view_as(p)), f"{COUNTS}0, 1, 2, …"),
    (one_tensor_for_all, "on rank 0 the gate and the mixer have one tensor as their gradient"),
    (averaged(back=not_stepped_over), "on rank 1 the averages are put back without a place for the missing"),
    (
        averaged(back=zeros_where_none_was),
        "on rank 1 the gradient of the gate is zeros. All others are right",
    ),
    (
        averaged(back=all_but_the_last),
        "on all ranks the gradient of the bias is what it was before. All others",
    ),
    (averaged(back=on_rank_0), "on ranks 1 and 2 each gradient is what it was before. All others are right"),
    (
        averaged(back=into_what_flatten_returns),
        "on rank 1 the gradient of the weight is what it was before. All others are right: flatten() and "
        "reshape() can return a copy",
    ),
    (
        averaged(divisor=lambda total, count: 1 if dist.get_rank() else total),
        "on ranks 1 and 2 each gradient is the sum of count · gradient, which was never divided",
    ),
    (
        averaged(back=in_equal_pieces),
        "on rank 0 the gate begins with the average of element 22 of the message, and its own averages begin "
        "with element 48",
    ),
    (
        averaged(back=from_the_last),
        "the message has the gradients in the order weight, gate, mixer, bias, and rank 0 takes the averages "
        "out of it in the order bias, mixer, gate, weight",
    ),
    (
        averaged(order=by_rank),
        "in different orders (rank 0: weight, gate, mixer, bias; rank 1: gate, mixer, bias, weight; rank 2: "
        "mixer, bias, weight, gate)",
    ),
    (
        averaged(flatten=of_the_storage),
        "rank 1's transposed gradient stands in the message in the order of its",
    ),
    (averaged(back=into_the_storage), "rank 1's averages are written in the order of its gradient's storage"),
    (
        averaged(flatten=lambda grad: (grad.T if grad.dim() == 2 else grad).flatten()),
        "a gradient of two dimensions was transposed, also where it is stored like any other",
    ),
    (of_the_parameters, "that is the mean of the parameters' values and not of their gradients"),
    (averaged(weight=lambda count, p: p.numel()), "that is Σ(numel · gradient) / total"),
    (averaged(weight=lambda count, p: count**0.5), "that is Σ(√count · gradient) / total"),
    (averaged(divisor=lambda total, count: total * count), "Σ(count · gradient) / (total · own count)"),
    (averaged(divisor=lambda total, count: (total - count).clamp(min=1)), "/ (total - own count)"),
    (averaged(op=dist.ReduceOp.MAX), "it calls dist.all_reduce with ReduceOp.MAX, which is not the sum"),
    (averaged(weight=lambda count, p: -count), "the average has the opposite sign"),
    (twice_the_bytes, "sends float64, and its gradients are float32. That needs more bytes"),
    (alone(other_type), "the average has another type than the parameter's gradient"),
    (alone(other_shape), "the average has another shape than the parameter: use piece.view_as(parameter)"),
    (alone(not_with_a_gap), "whose .grad is None, and it sends nothing, so the others wait for it"),
    (alone(stops_at_the_gap), "whose .grad is None, and it stopped there before it sent anything"),
]
diagnose = together(check_average_gradients, [*RIGHT, *(wrong for wrong, _ in WRONG)])


@pytest.mark.parametrize("right", RIGHT)
def test_any_order_passes_if_all_ranks_have_it(right):
    assert diagnose(right) is None


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_what_was_sent_and_put_back_is_named(wrong, words):
    assert words in diagnose(wrong)

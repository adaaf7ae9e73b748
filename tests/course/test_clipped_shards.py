"""Lesson 05's exercise on clipping: any right style passes, and each mistake is named."""

import pytest
import torch
import torch.distributed as dist
from support.answers import alone, together
from support.lessons import solutions_travel_by_value

from zerolab import ring
from zerolab.course.lessons.zero_stage_2 import check_clip

solutions_travel_by_value(__name__)


def summed(number):
    total = torch.as_tensor(number, dtype=torch.float32).reshape(1)
    dist.all_reduce(total)
    return total.item()


def clip(shard, max_norm, norm=lambda shard: summed(shard.norm() ** 2) ** 0.5, factor=min):
    """Right, with a knob for the norm and one for the factor."""
    of_all = norm(shard)
    shard *= factor(1.0, max_norm / (of_all + 1e-6))
    return of_all


def nothing_for_an_empty_shard(shard, max_norm):
    return clip(shard, max_norm) if shard.numel() else 0.0


def gathered(shard, max_norm):
    """Right: every rank gets all squares, and a tensor is returned."""
    squares = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(squares, (shard * shard).sum())
    norm = torch.stack(squares).sum().sqrt()
    if norm > max_norm:
        shard.copy_(shard * max_norm / norm)
    return norm


def by_ring(shard, max_norm):
    """Right: zerolab's ring on a tensor of one element."""
    square = torch.dot(shard, shard).reshape(1)
    ring.all_reduce(square)
    norm = square.sqrt()
    shard.mul_((max_norm / norm).clamp(max=1.0))
    return norm


def whole_gradient(shard, max_norm):
    """The values are right, and every rank has sent its shard to all."""
    everything = [torch.zeros(64) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, torch.nn.functional.pad(shard, (0, 64 - shard.numel())))
    return clip(shard, max_norm, norm=lambda _: torch.cat(everything).norm().item())


def shards_of_one_length(shard, max_norm):
    """The same without the padding, so that it stops where the shards differ in length."""
    everything = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, shard)
    return clip(shard, max_norm, norm=lambda _: torch.cat(everything).norm().item())


def shards_in_one_tensor(shard, max_norm):
    everything = shard.new_empty(dist.get_world_size() * len(shard))
    dist.all_gather_into_tensor(everything, shard)
    return clip(shard, max_norm, norm=lambda _: everything.norm().item())


def only_if_large(shard, max_norm):
    norm = shard.norm().item()
    if norm > max_norm:
        norm = summed(norm**2) ** 0.5
        shard.mul_(max_norm / norm)
    return norm


def largest(shard):
    norm = shard.norm().reshape(1)
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    return norm.item()


def with_norm(norm):
    return lambda shard, max_norm: clip(shard, max_norm, norm=norm)


def with_factor(factor):
    return lambda shard, max_norm: clip(shard, max_norm, factor=factor)


def not_in_place(shard, max_norm):
    norm = summed(shard.norm() ** 2) ** 0.5
    shard = shard * min(1.0, max_norm / norm)
    return norm


def own_factor(shard, max_norm):
    own, norm = shard.norm(), summed(shard.norm() ** 2) ** 0.5
    if own > max_norm:
        shard.mul_(max_norm / own)
    return norm


def too_large_only(shard, max_norm):
    own, norm = shard.norm(), summed(shard.norm() ** 2) ** 0.5
    if own > max_norm:
        shard.mul_(max_norm / norm)
    return norm


def clamped(shard, max_norm):
    norm = summed(shard.norm() ** 2) ** 0.5
    shard.clamp_(-max_norm, max_norm)
    return norm


def after(shard, max_norm):
    clip(shard, max_norm)
    return summed(shard.norm() ** 2) ** 0.5


def own_after(shard, max_norm):
    clip(shard, max_norm)
    return shard.norm()


def the_shard(shard, max_norm):
    clip(shard, max_norm)
    return shard


def torchs_own(shard, max_norm):
    parameter = torch.nn.Parameter(torch.zeros_like(shard))
    parameter.grad = shard
    return torch.nn.utils.clip_grad_norm_([parameter], max_norm)


def torchs_own_of_a_tensor(shard, max_norm):
    """A shard is no parameter: it has no .grad."""
    return torch.nn.utils.clip_grad_norm_([shard], max_norm)


def twice(shard, max_norm):
    norm = clip(shard, max_norm)
    shard *= min(1.0, max_norm / norm)
    return norm


def mean_square(shard):
    return summed(shard.square().mean() if len(shard) else 0.0) ** 0.5


def square_compared(shard, max_norm):
    square = summed(shard.norm() ** 2)
    if square > max_norm:
        shard.mul_(max_norm / square**0.5)
    return square**0.5


def pickled(shard, max_norm):
    """Right: the squares are gathered as Python numbers, which are pickled on the way."""
    squares = [0.0] * dist.get_world_size()
    dist.all_gather_object(squares, float(shard.square().sum()))
    return clip(shard, max_norm, norm=lambda _: sum(squares) ** 0.5)


CLIP_RIGHT = [clip, gathered, by_ring, pickled]


def by_the_square(shard, max_norm):
    square = summed(shard.norm() ** 2)
    shard *= min(1.0, max_norm / square)
    return square**0.5


def by_the_square_of_all(shard, max_norm):
    norm = summed(shard.square().sum()) ** 0.5
    if norm**2 > max_norm:
        shard.mul_(max_norm).div_(norm).div_(norm)
    return norm


def of_the_others(shard):
    own = float(shard.norm() ** 2)
    return max(summed(shard.norm() ** 2) - own, 0) ** 0.5


def smallest(shard):
    norm = shard.norm().reshape(1)
    dist.all_reduce(norm, op=dist.ReduceOp.MIN)
    return norm.item()


def one_is_added(shard, max_norm):
    norm = summed(shard.norm() ** 2) ** 0.5
    if norm > max_norm:
        shard *= max_norm / (norm + 1)
    return norm


def logged_after(shard, max_norm):
    return min(clip(shard, max_norm), max_norm)


@alone
def added_up(shard, max_norm):
    """Adds the shards up, as if they were gradients of the same parameters."""
    dist.all_reduce(shard)
    return clip(shard, max_norm, norm=lambda shard: float(shard.norm()))


@alone
def added_up_afterwards(shard, max_norm):
    norm = clip(shard, max_norm)
    if shard.numel():
        dist.all_reduce(shard)
    return norm


HANDLES = []


def not_waited_for(shard, max_norm):
    square = shard.square().sum()
    HANDLES.append(dist.all_reduce(square, async_op=True))
    return clip(shard, max_norm, norm=lambda _: float(square.sqrt()))


def by_sum_of_norms(shard, max_norm):
    norm, added = summed(shard.norm() ** 2) ** 0.5, summed(shard.norm())
    shard *= min(1.0, max_norm / added)
    return norm


def on_rank_0_alone(shard, max_norm):
    norm = summed(shard.norm() ** 2) ** 0.5
    return norm if dist.get_rank() else clip(shard, max_norm, norm=lambda _: norm)


def each_by_its_rank(shard, max_norm):
    norm = summed(shard.norm() ** 2) ** 0.5
    shard /= 1 + dist.get_rank()
    return norm


def squared_in_place(shard, max_norm):
    norm = summed(shard.square_().sum()) ** 0.5
    return clip(shard, max_norm, norm=lambda _: norm)


def of_a_number(shard, max_norm):
    square = shard.square().sum().item()
    dist.all_reduce(square)
    return square**0.5


CLIP_WRONG = [
    (of_a_number, "parameter `tensor` of type torch.Tensor but got <class 'float'> instead."),
    (squared_in_place, "the norm is right, and the shard's elements are squared: compute the squares in"),
    (added_up, "that is the norm of the sum of the shards, which are different parts of one gradient"),
    (added_up_afterwards, "dist.all_reduce adds up the shards themselves (line"),
    (not_waited_for, "and did not wait for it"),
    (with_norm(lambda shard: 1.003 * summed(shard.norm() ** 2) ** 0.5), "0 returned 29.827, and the norm is"),
    (
        with_norm(lambda shard: summed(shard.norm() ** 2) / dist.get_world_size()),
        "that is the mean of the squares of the shards' norms. The norm is the root of the sum",
    ),
    (with_norm(lambda shard: summed(shard.sum() ** 2) ** 0.5), "the root of the sum of the squares of the"),
    (by_sum_of_norms, "the shard is multiplied by max_norm / the sum of the shards' norms"),
    (on_rank_0_alone, "rank 0 is right, but rank 1 is not: the norm is right, and the shard is what it was"),
    (each_by_its_rank, "by rank the shards are multiplied by 1, 0.5, 0.3333: on every rank by 0.06726"),
    (logged_after, "that is the norm after the clipping: return the one before"),
    (with_norm(lambda shard: 7.0), "its value is [7], right is [29.737]"),
    (with_norm(of_the_others), "the norm of the other ranks' shards"),
    (with_norm(smallest), "the smallest of the shards' norms"),
    (
        with_norm(lambda shard: float(shard.abs().sum()) ** 0.5),
        "that is the root of the sum of the absolute values in this rank's own shard. The norm is",
    ),
    (with_norm(lambda shard: float(shard.square().sum())), "the square of the norm of this rank's own shard"),
    (with_norm(lambda shard: summed(shard.norm() ** 2) ** 0.5 + 1), "its value is 1 more than the right one"),
    (with_norm(lambda shard: summed(shard.norm() ** 2) ** 0.5 * 2), "its value is 2 times the right one"),
    (one_is_added, "the factor is max_norm / (norm + 1)"),
    (lambda shard, max_norm: None, "not written yet"),
    (torchs_own, "the norm of this rank's own shard"),
    (torchs_own_of_a_tensor, "clip_grad_norm_? That returns 0 where it finds no .grad, and a shard has none"),
    (torchs_own_of_a_tensor, "the norm of this rank's own shard: the other shards belong to the gradient"),
    (with_norm(lambda shard: 0 * summed(1.0)), "its value is all zeros"),
    (alone(shards_of_one_length), "the shards differ in length here, 64 and 0 elements, and dist.all_gather"),
    (alone(shards_of_one_length), "too much: rank 0 moves 768 bytes with dist.all_gather, and one number"),
    (alone(shards_of_one_length), "the square of the norm of its shard (seen with 3 ranks, max_norm 2)"),
    (alone(shards_in_one_tensor), "64 and 0 elements, and dist.all_gather_into_tensor needs tensors of one"),
    (with_norm(lambda shard: summed(shard.norm())), "squares can be added, norms cannot"),
    (with_norm(largest), "the largest of the shards' norms"),
    (with_norm(lambda shard: summed(shard.norm() ** 2)), "the sum of the squares: take its root"),
    (with_norm(lambda shard: (summed(shard.norm() ** 2) / dist.get_world_size()) ** 0.5), "root of the mean"),
    (with_norm(lambda shard: summed(shard.norm()) ** 0.5), "the root of the sum of the norms"),
    (whole_gradient, "For silver: rank 0 moves 768 bytes with dist.all_gather"),
    (alone(nothing_for_an_empty_shard), "Its shard is empty here, and it has to make the call, too"),
    (alone(only_if_large), "Does a rank with a small norm skip the collective?"),
    (not_in_place, "the shard is what it was: scale it in place"),
    (own_factor, "each shard is scaled by its own norm, which changes the direction"),
    (too_large_only, "only ranks whose own norm is too large scale"),
    (with_factor(lambda one, factor: factor), "a gradient below max_norm is scaled up"),
    (with_factor(max), "the smaller of 1 and max_norm / norm, not the larger"),
    (clamped, "each element is clamped"),
    (after, "the norm after the clipping"),
    (own_after, "the norm of this rank's own shard after the clipping"),
    (twice, "the shard is scaled twice"),
    (by_the_square, "by max_norm over the square of the norm: take the root before you divide"),
    (by_the_square_of_all, "by max_norm over the square of the norm"),
    (with_norm(mean_square), "the squares are averaged over the elements of a shard"),
    (with_norm(lambda shard: abs(summed(shard.sum()))), "the sum of the elements: add their squares"),
    (with_norm(lambda shard: summed(shard.abs().sum())), "the 1-norm"),
    (with_factor(lambda one, factor: min(one, factor) ** 0.5), "the root of what it should be"),
    (square_compared, "scale only if the norm (and not its square) is larger"),
    (the_shard, "rank 0 returned a tensor of shape (64,): return the norm"),
    (lambda shard, max_norm: clip(shard, max_norm) and None, "rank 0 returned None: return the norm"),
]  # fmt: skip
clipped_by = together(check_clip, [*CLIP_RIGHT, *(wrong for wrong, _ in CLIP_WRONG)])


@pytest.mark.parametrize("right", CLIP_RIGHT)
def test_every_right_clipping_passes(right):
    assert clipped_by(right) is None


@pytest.mark.parametrize(("wrong", "words"), CLIP_WRONG)
def test_wrong_clipping_is_named(wrong, words):
    assert words in clipped_by(wrong)


def test_a_later_case_decides_between_two_mistakes():
    """Where the gradient is clipped, its norm is max_norm afterwards: a small gradient tells them apart."""
    assert "that is max_norm" not in clipped_by(after)

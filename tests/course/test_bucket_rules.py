"""Lesson 03: other rules for buckets, other divisors and gradients left out are named, whatever the case."""

import pytest
import torch
import torch.distributed as dist
from support.answers import alone, together
from support.lessons import solutions_travel_by_value

from zerolab.course.lessons.data_parallel import check_buckets
from zerolab.course.targets import Reached

solutions_travel_by_value(__name__)


def send(bucket, divisor=None, dtype=None, more=0, back=None, turn=None):
    """All-reduce a bucket, with a knob for each way to do it wrong."""
    flat = torch.cat([*(gradient.flatten() for gradient in bucket), bucket[0].new_ones(more)]).to(dtype)
    dist.all_reduce(flat)
    flat /= dist.get_world_size() if divisor is None else divisor(bucket)
    for gradient, piece in zip(
        bucket, flat.split([each.numel() for each in bucket] + [more] * (more > 0)), strict=False
    ):
        if back is None or back():
            gradient.copy_(turn(piece, gradient) if turn else piece.view_as(gradient))


def filled(
    send=send, weight=lambda g: g.nbytes, limit=lambda b: b, fits=lambda held, own, b: held + own <= b
):
    """The right buckets where nothing is given."""

    def average_in_buckets(gradients, bucket_bytes):
        waiting, held = [], 0
        for gradient in gradients:
            if waiting and not fits(held, weight(gradient), limit(bucket_bytes)):
                send(waiting)
                waiting, held = [], 0
            waiting.append(gradient)
            held += weight(gradient)
        send(waiting)

    return average_in_buckets


def started_first(most):
    """So many messages are on their way at once."""

    def average_in_buckets(gradients, bucket_bytes):
        under_way = []

        def finish():
            work, flat, bucket = under_way.pop(0)
            work.wait()
            for gradient, piece in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                gradient.copy_(piece.view_as(gradient) / dist.get_world_size())

        def start(bucket):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            under_way.append((dist.all_reduce(flat, async_op=True), flat, bucket))
            del flat
            if len(under_way) == most:
                finish()

        filled(start)(gradients, bucket_bytes)
        while under_way:
            finish()

    return average_in_buckets


def by_number(gradients, bucket_bytes):
    for first in range(0, len(gradients), 3):
        send(gradients[first : first + 3])


def cut_anywhere(
    gradients, bucket_bytes, step=lambda flat, bucket_bytes: bucket_bytes // flat.element_size()
):
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    for piece in flat.split(step(flat, bucket_bytes)):
        dist.all_reduce(piece)
    for gradient, piece in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(piece.view_as(gradient) / dist.get_world_size())


def in_chunks(gradients, bucket_bytes):
    cut_anywhere(gradients, bucket_bytes, lambda flat, bucket: -(-flat.numel() // -(-flat.nbytes // bucket)))


def in_shares(gradients, bucket_bytes):
    each = -(-len(gradients) // -(-sum(gradient.nbytes for gradient in gradients) // bucket_bytes))
    for first in range(0, len(gradients), each):
        send(gradients[first : first + each])


def twice(gradients, bucket_bytes):
    for _ in range(2):
        filled()(gradients, bucket_bytes)


def large_ones_twice(gradients, bucket_bytes):
    for gradient in gradients:
        if gradient.nbytes > bucket_bytes:
            send([gradient])
    filled()(gradients, bucket_bytes)


def large_ones_last(gradients, bucket_bytes):
    filled()(sorted(gradients, key=lambda each: each.nbytes > bucket_bytes), bucket_bytes)


def first_fit(gradients, bucket_bytes):
    found = []
    for gradient in gradients:
        for bucket in found:
            if sum(each.nbytes for each in bucket) + gradient.nbytes <= bucket_bytes:
                bucket.append(gradient)
                break
        else:
            found.append([gradient])
    for bucket in found:
        send(bucket)


def odd_order(gradients, bucket_bytes):
    """An order that nobody expects."""
    filled()([gradients[1], gradients[0], *gradients[2:]], bucket_bytes)


def with_a_message_first(gradients, bucket_bytes):
    dist.all_reduce(torch.zeros(1))
    filled()(gradients, bucket_bytes)


def with_a_barrier(gradients, bucket_bytes):
    dist.barrier()
    filled()(gradients, bucket_bytes)


def gathered(bucket):
    flat = torch.cat([gradient.flatten() for gradient in bucket])
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    for gradient, piece in zip(
        bucket, torch.stack(rows).mean(0).split([g.numel() for g in bucket]), strict=True
    ):
        gradient.copy_(piece.view_as(gradient))


def reduced_and_broadcast(bucket):
    flat = torch.cat([gradient.flatten() for gradient in bucket])
    dist.reduce(flat, 0)
    dist.broadcast(flat, 0)
    for gradient, piece in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
        gradient.copy_(piece.view_as(gradient) / dist.get_world_size())


def begins(bucket):
    """Each gradient gets the first elements."""
    flat = torch.cat([gradient.flatten() for gradient in bucket])
    dist.all_reduce(flat)
    for gradient in bucket:
        gradient.copy_(flat[: gradient.numel()].view_as(gradient) / dist.get_world_size())


def some_only(gradients, bucket_bytes):
    """Nobody expects these."""
    filled()(gradients[2:5], bucket_bytes)


def empty_at_the_end(gradients, bucket_bytes):
    for gradient in gradients:
        gathered([gradient])
    gathered([])


def empty_at_the_beginning(gradients, bucket_bytes):
    waiting, held = [], 0
    for gradient in gradients:
        if held + gradient.nbytes > bucket_bytes:
            reduced_and_broadcast(waiting)
            waiting, held = [], 0
        waiting.append(gradient)
        held += gradient.nbytes
    reduced_and_broadcast(waiting)


def nothing_if_all_fits(gradients, bucket_bytes):
    if sum(gradient.nbytes for gradient in gradients) > bucket_bytes:
        filled()(gradients, bucket_bytes)


def divided_by(divisor):
    return filled(lambda bucket: send(bucket, divisor))


ranks = dist.get_world_size
GOLD = [filled(), started_first(2)]
LESS = [
    (filled(lambda bucket: send(bucket, dtype=torch.float64)), "rank 0 sends float64, and its gradients are"),
    (filled(weight=torch.numel), "elements are counted, and bucket_bytes is a number of bytes"),
    (filled(weight=lambda g: 4 * g.numel()), "each element counts 4 bytes, whatever its type"),
    (filled(weight=lambda g: 8 * g.numel()), "each element counts 8 bytes, whatever its type"),
    (filled(limit=lambda b: 1024 * b), "a limit of bucket_bytes times 1000 or 1024"),
    (filled(limit=lambda b: ranks() * b), "a limit of bucket_bytes times the number of ranks"),
    (filled(limit=lambda b: b / ranks()), "a limit of bucket_bytes divided by the number of ranks"),
    (filled(limit=lambda b: 2 * b), "a limit of about twice bucket_bytes"),
    (filled(limit=lambda b: 1e9), "all gradients are in one message, whatever bucket_bytes is"),
    (filled(fits=lambda held, own, b: held <= b), "a bucket is sent when it holds more than bucket_bytes"),
    (
        filled(fits=lambda held, own, b: held < b),
        "a bucket is sent when it holds bucket_bytes or more already",
    ),
    (
        filled(fits=lambda held, own, b: held != b),
        "a bucket is sent only where it holds exactly bucket_bytes",
    ),
    (filled(fits=lambda held, own, b: own <= b), "only the size of the next gradient is compared"),
    (
        filled(fits=lambda held, own, b: held <= b and (own > b or held + own <= b)),
        "a gradient that is larger than a bucket is sent together with those that wait",
    ),
    (by_number, "each bucket has 3 gradients, whatever their size"),
    (in_shares, "the list is cut into parts of equal length"),
    (cut_anywhere, "all gradients stand in one tensor that is cut every bucket_bytes"),
    (in_chunks, "all gradients stand in one tensor that is cut into equal chunks"),
    (twice, "each bucket is sent twice: send each gradient once"),
    (large_ones_twice, "is sent by itself, and again with the buckets"),
    (filled(lambda bucket: send(bucket, more=1)), "each message has 1 element that belongs to no gradient"),
    (with_a_message_first, "4 are enough: message 0 has 1 element that belongs to no gradient"),
    (with_a_barrier, "dist.barrier sends messages, too"),
    (filled(gathered), "dist.all_gather brings every rank the gradients of all"),
    (filled(reduced_and_broadcast), "it calls dist.broadcast and dist.reduce. One dist.all_reduce for each"),
    (large_ones_last, "with those that are larger than a bucket behind all others"),
    (first_fit, "into the first bucket that has room"),
    (
        odd_order,
        "rank 0 sends messages of 480, 320, 560, 240, 1600, 184, … bytes, and in the order of the list they",
    ),
    (started_first(4), "4 messages were started before the first of them was waited for"),
]
WRONG = [
    (divided_by(lambda bucket: max(ranks() - 1, 1)), "the sum was divided by the number of ranks minus 1"),
    (divided_by(lambda bucket: 2), "the sum was divided by 2, whatever the number of ranks"),
    (
        divided_by(len),
        "the sum was divided by the number of gradients in the bucket: divide by the number of",
    ),
    (divided_by(lambda bucket: len(bucket) * ranks()), "gradients in the bucket and by the number of ranks"),
    (divided_by(lambda bucket: sum(map(torch.numel, bucket))), "by the number of elements in the bucket"),
    (divided_by(lambda bucket: dist.get_rank() + 1), "the sum was divided by the rank plus 1"),
    (
        filled(lambda bucket: send(bucket, back=lambda: dist.get_rank() > 0)),
        "on rank 0 all gradients are what they were before; on ranks 1 and 2 all gradients are right: copy "
        "the averages back, for every gradient and on every rank",
    ),
    (
        divided_by(lambda bucket: 1 if dist.get_rank() else ranks()),
        "on rank 0 all gradients are right; on ranks 1 and 2 all gradients are sums: divide by the number of",
    ),
    (
        some_only,
        "on all ranks gradients 0 to 1 are what they were before, gradients 2 to 4 are right, gradients 5 to "
        "8 are what they were before: copy the averages back",
    ),
    (filled(begins), "each gradient has the first elements of its bucket"),
    (
        filled(lambda bucket: send(bucket, turn=lambda piece, g: piece.mean().expand_as(g))),
        "each gradient has one number in all its elements",
    ),
    (
        filled(
            lambda bucket: send(
                bucket, turn=lambda piece, g: piece.view(*reversed(g.shape)).T if g.dim() == 2 else piece
            )
        ),
        "a gradient of two dimensions is filled column by column",
    ),
    (alone(empty_at_the_end), "A bucket was sent that is empty. All gradients had been sent by then"),
    (
        alone(empty_at_the_beginning),
        "The first gradient is larger than a bucket here, and nothing waits before it",
    ),
    (
        nothing_if_all_fits,
        "nothing was sent, so no rank can know the others' gradients. Something was sent in",
    ),
]
diagnose = together(check_buckets, [*GOLD, *(answer for answer, _ in [*LESS, *WRONG])])


@pytest.mark.parametrize("answer", GOLD)
def test_two_buckets_may_be_in_memory(answer):
    assert diagnose(answer) is None


@pytest.mark.parametrize(("answer", "said"), LESS)
def test_the_rule_behind_messages_or_memory_is_named(answer, said):
    found = diagnose(answer)
    assert isinstance(found, Reached) and said in found


@pytest.mark.parametrize(("answer", "said"), WRONG)
def test_wrong_averages_are_named(answer, said):
    found = diagnose(answer)
    assert said in found and not isinstance(found, Reached)

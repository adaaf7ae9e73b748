"""Lesson 03: the check of the buckets names each mistake; messages and memory decide the target."""

import pytest
import torch
import torch.distributed as dist
from support.answers import alone, together
from support.lessons import solutions_travel_by_value

from zerolab import ring
from zerolab.course.lessons.data_parallel import check_buckets
from zerolab.course.targets import Reached

solutions_travel_by_value(__name__)


def by_columns(gradient, on=lambda rank: True):
    return (gradient.t() if gradient.dim() == 2 and on(dist.get_rank()) else gradient).flatten()


def send(bucket, reduce=dist.all_reduce, divide=torch.Tensor.div_, back=True, flatten=torch.Tensor.flatten):
    flat = torch.cat([flatten(gradient) for gradient in bucket])
    reduce(flat)
    flat = divide(flat, dist.get_world_size())
    for gradient, piece in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
        if back:
            gradient.copy_(piece.view_as(gradient))


def filled(send=send, last=True, drop=False, late=False, strict=False, skip_large=False):
    """The right buckets where nothing is given, and a classic wrong one where something is."""

    def average_in_buckets(gradients, bucket_bytes):
        waiting = []
        for gradient in gradients:
            held = sum(each.nbytes for each in waiting)
            over = held + gradient.nbytes - bucket_bytes
            if skip_large and gradient.nbytes > bucket_bytes:
                continue
            if late:
                waiting.append(gradient)
            if waiting and (over >= 0 if strict else over > 0):
                send(waiting)
                waiting = [] if late or drop else [gradient]
            elif not late:
                waiting.append(gradient)
        if waiting and last:
            send(waiting)

    return average_in_buckets


def in_one_buffer(gradients, bucket_bytes):
    """Gold: one buffer for all buckets, filled by slices."""
    size = gradients[0].element_size()
    longest = max(bucket_bytes // size, *(gradient.numel() for gradient in gradients))
    buffer = torch.empty(min(longest, sum(g.numel() for g in gradients)), dtype=gradients[0].dtype)
    start, views = 0, []

    def flush():
        dist.all_reduce(buffer[:start])
        for gradient, view in views:
            torch.div(view, dist.get_world_size(), out=view)
            gradient.view(-1).copy_(view)

    for gradient in gradients:
        if start and size * (start + gradient.numel()) > bucket_bytes:
            flush()
            start, views = 0, []
        view = buffer[start : start + gradient.numel()]
        view.copy_(gradient.view(-1))
        views.append((gradient, view))
        start += gradient.numel()
    flush()


def planned_first(gradients, bucket_bytes):
    """Gold: first the list of buckets, then the messages."""
    plan = []
    for gradient in gradients:
        if plan and sum(each.nbytes for each in plan[-1]) + gradient.nbytes <= bucket_bytes:
            plan[-1].append(gradient)
        else:
            plan.append([gradient])
    for bucket in plan:
        send(bucket)


def on_the_ring(gradients, bucket_bytes):
    filled(lambda bucket: send(bucket, ring.all_reduce))(gradients, bucket_bytes)


def one_by_one(gradients, bucket_bytes):
    for gradient in gradients:
        send([gradient])


def all_at_once(gradients, bucket_bytes):
    send(gradients)


def padded(gradients, bucket_bytes):
    """Every message has the same size, the rest of it zeros."""

    def reduce(flat):
        whole = torch.zeros(max(bucket_bytes // 8, flat.numel()), dtype=flat.dtype)
        whole[: flat.numel()] = flat
        dist.all_reduce(whole)
        flat.copy_(whole[: flat.numel()])

    filled(lambda bucket: send(bucket, reduce))(gradients, bucket_bytes)


def half_empty(gradients, bucket_bytes):
    """Every message is as long as a bucket of elements of this type, the rest of it zeros."""

    def reduce(flat):
        whole = torch.zeros(max(bucket_bytes // flat.element_size(), flat.numel()), dtype=flat.dtype)
        whole[: flat.numel()] = flat
        dist.all_reduce(whole)
        flat.copy_(whole[: flat.numel()])

    filled(lambda bucket: send(bucket, reduce))(gradients, bucket_bytes)


def kept(gradients, bucket_bytes):
    """All buckets are sent first, and divided and copied back at the end."""
    sent = []
    filled(lambda bucket: sent.append((list(bucket), torch.cat([each.flatten() for each in bucket]))))(
        gradients, bucket_bytes
    )
    for _, flat in sent:
        dist.all_reduce(flat)
    for bucket, flat in sent:
        flat /= dist.get_world_size()
        for gradient, piece in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
            gradient.copy_(piece.view_as(gradient))


def never_emptied(gradients, bucket_bytes):
    waiting, held = [], 0
    for gradient in gradients:
        if waiting and held + gradient.nbytes > bucket_bytes:
            send(waiting)
            held = 0
        waiting.append(gradient)
        held += gradient.nbytes
    send(waiting)


def counts_on(gradients, bucket_bytes):
    """The count of bytes is not set back when a bucket was sent."""
    waiting, held = [], 0
    for gradient in gradients:
        held += gradient.nbytes
        if waiting and held > bucket_bytes:
            send(waiting)
            waiting = []
        waiting.append(gradient)
    send(waiting)


def half_full(gradients, bucket_bytes):
    filled()(gradients, bucket_bytes // 2)


def not_quite_full(gradients, bucket_bytes):
    """More messages than are necessary, by a rule that the check does not know."""
    filled()(gradients, bucket_bytes * 3 // 10)


def back_in_reverse(bucket):
    flat = torch.cat([gradient.flatten() for gradient in bucket])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, piece in zip(bucket[::-1], flat.split([g.numel() for g in bucket[::-1]]), strict=True):
        gradient.copy_(piece.view_as(gradient))


def replaced_in_the_list(gradients, bucket_bytes):
    for index, gradient in enumerate(gradients):
        total = gradient.clone()
        dist.all_reduce(total)
        gradients[index] = total / dist.get_world_size()


def returned_instead(gradients, bucket_bytes):
    averages = [gradient.clone() for gradient in gradients]
    filled()(averages, bucket_bytes)
    return averages


def skips_on_rank_1(gradients, bucket_bytes):
    one_by_one(gradients[dist.get_rank() == 1 :], bucket_bytes)


def in_place_and_returned(gradients, bucket_bytes):
    """Gold: the list is returned, too."""
    filled()(gradients, bucket_bytes)
    return gradients


def uncounted(gradients, bucket_bytes):
    """The count begins with 0 where a bucket begins with a gradient."""
    waiting, held = [], 0
    for gradient in gradients:
        if waiting and held + gradient.nbytes > bucket_bytes:
            send(waiting)
            waiting, held = [gradient], 0
        else:
            waiting.append(gradient)
            held += gradient.nbytes
    send(waiting)


def sends_nothing_too(gradients, bucket_bytes):
    """A bucket is sent whenever the next gradient does not fit, and may be empty."""
    waiting, held = [], 0
    for gradient in gradients:
        if held + gradient.nbytes > bucket_bytes:
            send(waiting) if waiting else dist.all_reduce(torch.empty(0))
            waiting, held = [], 0
        waiting.append(gradient)
        held += gradient.nbytes
    send(waiting)


def in_bucket_sizes(bucket):
    flat = torch.cat([gradient.flatten() for gradient in bucket])
    for piece in flat.split(100):
        dist.all_reduce(piece)
    for gradient, piece in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
        gradient.copy_(piece.view_as(gradient) / dist.get_world_size())


def in_a_buffer_of_bucket_bytes(gradients, bucket_bytes):
    """The buffer has bucket_bytes, however few the gradients have."""
    buffer = torch.zeros(bucket_bytes, dtype=torch.uint8)

    def into_the_buffer(bucket):
        flat = buffer[: sum(each.nbytes for each in bucket)].view(bucket[0].dtype)
        torch.cat([gradient.flatten() for gradient in bucket], out=flat)
        dist.all_reduce(flat)
        for gradient, piece in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
            gradient.copy_(piece.view_as(gradient) / dist.get_world_size())

    if all(gradient.nbytes <= bucket_bytes for gradient in gradients):
        filled(into_the_buffer)(gradients, bucket_bytes)
    else:
        filled()(gradients, bucket_bytes)


GOLD = [filled(), in_place_and_returned, in_one_buffer, planned_first, on_the_ring]
LESS = [
    (in_a_buffer_of_bucket_bytes, "give a bucket the size of the gradients in it, and not bucket_bytes"),
    (uncounted, "the gradient that a bucket begins with is not counted"),
    (sends_nothing_too, "one of them is empty"),
    (filled(in_bucket_sizes), "is sent by itself, in one message and not in pieces"),
    (
        one_by_one,
        "bronze, because the values are right. For silver: with buckets of 800 bytes, rank 0 sends 9",
    ),
    (one_by_one, "9 messages, and 4 are enough: each gradient is sent by itself"),
    (
        filled(strict=True),
        "rank 0 sends 6 messages, and 4 are enough: a gradient that fills a bucket to the last byte is sent "
        "with the next bucket",
    ),
    (counts_on, "rank 0 sends 7 messages, and 4 are enough: the first bucket is right, and each gradient"),
    (counts_on, "A count of bytes that is not set back to 0 when a bucket is sent leads to this"),
    (half_full, "4 are enough: the messages are those of a limit of about half"),
    (not_quite_full, "are enough: a bucket takes gradients until the next one does not fit"),
    (all_at_once, "For silver: with buckets of 800 bytes, a message of rank 0 has 3704 bytes"),
    (filled(late=True), "Send what waits before a gradient that does not fit is added"),
    (padded, "rank 0 sends 4000 bytes, and the gradients have 3704"),
    (half_empty, "message 3 has 800 bytes, and the gradients of its bucket have 504. Send the part of"),
    (never_emptied, "send each gradient once and nothing else, and empty the list"),
    (
        kept,
        "silver, because values and bytes are right. For gold: with buckets of 800",
    ),
    (lambda g, size: filled()(g[::-1], size), "rank 0 sends the gradients from the last to the first"),
    (lambda g, size: filled()(sorted(g, key=torch.numel), size), "from the smallest to the largest"),
    (lambda g, size: filled()(sorted(g, key=lambda t: -t.nbytes), size), "from the largest to the smallest"),
]
WRONG = [
    (lambda gradients, bucket_bytes: None, "not written yet"),
    (filled(lambda bucket: send(bucket, divide=lambda flat, n: flat)), "that is the sum over the ranks"),
    (filled(lambda bucket: send(bucket, back=False)), "copy the averages back"),
    (
        filled(lambda bucket: send(bucket, divide=lambda flat, n: flat / n / n)),
        "by the number of ranks twice",
    ),
    (filled(lambda bucket: send(bucket, divide=lambda flat, n: flat / 7)), "3/7 times what it should be"),
    (
        filled(lambda bucket: send(bucket, lambda flat: dist.broadcast(flat, 0), lambda f, n: f)),
        "rank 0's grad",
    ),
    (filled(lambda bucket: send(bucket, flatten=by_columns)), "stands in the flat tensor like its transp"),
    (
        filled(lambda bucket: send(bucket, flatten=lambda g: by_columns(g, lambda rank: rank == 1))),
        "its value has the elements of rank 1's gradient in the order of the transposed tensor",
    ),
    (filled(last=False), "the last bucket was never sent"),
    (filled(drop=True), "the gradient that did not fit was never sent"),
    (filled(skip_large=True), "gradients that are larger than a bucket were left out"),
    (lambda gradients, size: send(gradients[:1]), "only the first gradient"),
    (filled(lambda bucket: send(bucket, divide=lambda flat, n: (flat / n).half().double())), "float16"),
    (filled(back_in_reverse), "the cut is at the wrong place, or in the wrong order"),
    (
        replaced_in_the_list,
        "puts another tensor into the list, and does not change the gradient itself (there the averages are "
        "right)",
    ),
    (returned_instead, "your function returns other tensors, and does not change the gradient itself"),
    (alone(skips_on_rank_1), "collective number 1 is dist.all_reduce of 10 elements of float64 on rank 0"),
    (alone(lambda gradients, bucket_bytes: torch.cat(gradients)), "stopped with RuntimeError"),
]
diagnose = together(check_buckets, [*GOLD, *(answer for answer, _ in [*LESS, *WRONG])])


@pytest.mark.parametrize("answer", GOLD)
def test_every_way_to_fill_buckets_gets_gold(answer):
    assert diagnose(answer) is None


@pytest.mark.parametrize(("answer", "said"), LESS)
def test_right_means_reach_the_target_that_messages_and_memory_allow(answer, said):
    found = diagnose(answer)
    assert isinstance(found, Reached) and said in found


@pytest.mark.parametrize(("answer", "diagnosis"), WRONG)
def test_the_check_names_the_mistake(answer, diagnosis):
    found = diagnose(answer)
    assert diagnosis in found and not isinstance(found, Reached)

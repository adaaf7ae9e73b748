"""Lesson 03: its check names each classic mistake, its drawings say what happened."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from support.answers import alone, together
from support.lessons import drawing, solutions_travel_by_value, spoken

from zerolab import cost, ring
from zerolab.course.lessons.data_parallel import check_average_gradients, figures

solutions_travel_by_value(__name__)


def by_columns(grad, on=lambda rank: True):
    return (grad.t() if on(dist.get_rank()) else grad).flatten()


def flat_average(
    parameters, count, weigh=True, fill=True, divide="counts", write=True, flatten=torch.Tensor.flatten
):
    """The right solution, with one knob for each classic mistake."""
    for parameter in parameters:
        if parameter.grad is None and fill:
            parameter.grad = torch.zeros_like(parameter)
    held = [parameter for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([*(flatten(p.grad) * (count if weigh else 1) for p in held), torch.tensor([count])])
    dist.all_reduce(flat)
    divisor = {"counts": flat[-1].clone(), "ranks": dist.get_world_size(), "nothing": 1}[divide]
    flat /= divisor
    if divide == "counts" and not weigh:
        flat *= count
    pieces = flat[:-1].split([p.numel() for p in held])
    for parameter, piece in zip(held, pieces, strict=True):
        if write:
            parameter.grad.copy_(piece.view_as(parameter))


def by_a_function(parameters, count):
    """One message, by torch's functional collectives, between barriers."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    flat = torch.cat([*(count * p.grad.flatten() for p in parameters), torch.tensor([float(count)])])
    dist.barrier()
    flat = functional_collectives.all_reduce(flat, "sum", dist.group.WORLD)
    dist.barrier()
    for parameter, piece in zip(parameters, flat[:-1].split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_((piece / flat[-1]).view_as(parameter))


def zeros_without_a_gradient(parameters, count):
    """Zeros are sent, and there is no gradient to write the average into."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([*(count * each.flatten() for each in grads), torch.tensor([count])])
    dist.all_reduce(flat)
    pieces = (flat[:-1] / flat[-1]).split([p.numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


def one_by_one(parameters, count, layout="keep", skip=False):
    """A message for each parameter."""
    total = torch.tensor(float(count), dtype=torch.float64)
    dist.all_reduce(total)
    for parameter in parameters:
        if parameter.grad is None:
            if skip:
                continue
            parameter.grad = torch.zeros_like(parameter)
        if layout == "follow":
            parameter.grad = parameter.grad.contiguous()
        parameter.grad *= count
        dist.all_reduce(parameter.grad)
        parameter.grad /= total


def viewed(parameters, count):
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    flat = torch.cat([*(count * p.grad.view(-1) for p in parameters), torch.tensor([float(count)])])
    dist.all_reduce(flat)
    for parameter, piece in zip(parameters, flat[:-1].split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_((piece / flat[-1]).view_as(parameter))


def weights_instead(parameters, count):
    for parameter in parameters:
        dist.all_reduce(parameter.data)


def gathers_everything(parameters, count):
    own = torch.cat(
        [
            *((torch.zeros_like(p) if p.grad is None else p.grad * count).flatten() for p in parameters),
            torch.tensor([float(count)], dtype=torch.float64),
        ]
    )
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    flat = sum(rows)
    for parameter, piece in zip(parameters, flat[:-1].split([p.numel() for p in parameters]), strict=True):
        parameter.grad = (piece / flat[-1]).view_as(parameter)


def by_the_ring(parameters, count):
    """Right: the package's ring carries one flat tensor."""
    one_message(parameters, count, ring.all_reduce)


def one_message(parameters, count, reduce=dist.all_reduce, unweigh=None):
    """Right: one buffer made beforehand, filled and read by slices; the count is its first element."""
    sizes = [parameter.numel() for parameter in parameters]
    buffer = torch.zeros(1 + sum(sizes), dtype=parameters[0].dtype)
    buffer[0] = count
    views = buffer[1:].split(sizes)
    for parameter, view in zip(parameters, views, strict=True):
        if parameter.grad is not None:
            view.copy_(parameter.grad.reshape(-1)).mul_(count)
    reduce(buffer)
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = (view / (buffer[0] if unweigh is None else unweigh)).reshape(parameter.shape).clone()


def vector_of_gradients(parameters, count):
    """Right: torch's own flattening, of gradients that are made whole first."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    total = torch.tensor([count], dtype=parameters[0].dtype)
    flat = torch.cat(
        [torch.nn.utils.parameters_to_vector(p.grad.contiguous() for p in parameters) * count, total]
    )
    dist.all_reduce(flat)
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(flat[:-1] / flat[-1], [p.grad for p in parameters])


def gap_not_counted(parameters, count):
    """The tokens of a rank without a gradient are left out of the gate's count."""
    sizes = [p.numel() for p in parameters]
    have = [float(p.grad is not None) for p in parameters]
    pieces = [
        torch.zeros(p.numel(), dtype=p.dtype) if p.grad is None else p.grad.reshape(-1) for p in parameters
    ]
    flat = torch.cat([*pieces, torch.tensor(have, dtype=torch.float64)]) * count
    dist.all_reduce(flat)
    *sums, counts = flat.split([*sizes, len(have)])
    for parameter, summed, total in zip(parameters, sums, counts, strict=True):
        parameter.grad = (summed / total).view_as(parameter)


def zeros_at_the_end(parameters, count):
    """As many zeros as are missing, but not in the place of the missing ones."""
    own = [parameter.grad.flatten() * count for parameter in parameters if parameter.grad is not None]
    flat = torch.zeros(sum(p.numel() for p in parameters) + 1, dtype=torch.float64)
    flat[: sum(map(len, own))], flat[-1] = torch.cat(own), count
    dist.all_reduce(flat)
    for parameter, piece in zip(parameters, flat[:-1].split([p.numel() for p in parameters]), strict=True):
        parameter.grad = (piece / flat[-1]).view_as(parameter)


def first_parameter_only(parameters, count):
    one_message(parameters[:1], count)
    for parameter in parameters[1:]:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def broadcast(parameters, count):
    one_message(parameters, 1, lambda flat: dist.broadcast(flat, 0), unweigh=1)


def own_and_one_other(parameters, count, keep=-1):
    """All are gathered, and one of the others is added."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = [torch.zeros_like(p) if p.grad is None else p.grad * count for p in parameters]
    flat = torch.cat([each.flatten() for each in own])
    rows = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(rows, flat)
    total = torch.tensor([float(count)], dtype=flat.dtype)
    dist.all_reduce(total)
    others = [rows[each] for each in range(size) if each != rank]
    mean = (flat + (others[keep] if others else 0)) / total
    for parameter, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter)


def own_once_more(parameters, count):
    own = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    one_message(parameters, count)
    total = torch.tensor([float(count)], dtype=own[0].dtype)
    dist.all_reduce(total)
    for parameter, each in zip(parameters, own, strict=True):
        parameter.grad += each * count / total


def count_at_the_other_end(parameters, count, first=True, turn=0):
    """The count stands at one end of the message, and is read as if it stood at the other."""
    own = [torch.zeros_like(p) if p.grad is None else p.grad * count for p in parameters]
    pieces = [torch.tensor([float(count)]), *(each.flatten() for each in own)]
    flat = torch.cat(pieces if first else [*pieces[1:], pieces[0]])
    dist.all_reduce(flat)
    sums, total = (flat[:-1], flat[-1]) if first else (flat[1:], flat[0])
    if turn:
        sums, total = flat[1:].roll(turn), flat[0]
    for parameter, piece in zip(parameters, sums.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = (piece / total).view_as(parameter)


def of_powers(weight, divisor):
    """Each gradient is multiplied by weight(count, N), and the sum divided by divisor(total, N)."""

    def average(parameters, count):
        n = dist.get_world_size()
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([*(weight(count, n) * each.flatten() for each in own), torch.tensor([float(count)])])
        dist.all_reduce(flat)
        pieces = (flat[:-1] / divisor(flat[-1], n)).split([p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)

    return average


def without_a_rank(parameters, count):
    """A rank that lacks a gradient counts no tokens."""
    count *= all(parameter.grad is not None for parameter in parameters)
    of_powers(lambda c, n: c, lambda total, n: total)(parameters, count)


def total_in_float32(parameters, count):
    """One message each as well; but the numbers are what a reader looks at first."""
    total = torch.tensor(float(count))
    dist.all_reduce(total)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad *= count / total
        dist.all_reduce(parameter.grad)


MISTAKES = {
    "rank left out": (without_a_rank, "a rank that lacks one gradient was left out for all parameters"),
    "squared counts": (
        of_powers(lambda c, n: c * c, lambda total, n: total),
        "Σ(count^2 · gradient) / total",
    ),
    "divided by the counts": (
        of_powers(lambda c, n: 1 / c, lambda total, n: total),
        "that is Σ(gradient / count) / total,",
    ),
    "divided by the counts and the ranks": (
        of_powers(lambda c, n: 1 / c, lambda total, n: n),
        "that is Σ(gradient / count) / N,",
    ),
    "divided by the mean count": (
        of_powers(lambda c, n: c, lambda total, n: total / n),
        "that is N · Σ(count · gradient) / total,",
    ),
    "divided by the total twice": (
        of_powers(lambda c, n: c, lambda total, n: total**2),
        "gradient) / total^2,",
    ),
    "one token too few": (
        of_powers(lambda c, n: c, lambda total, n: total - 1),
        "that is Σ(count · gradient) / (total - 1), where",
    ),
    "count first, read as if last": (
        count_at_the_other_end,
        "there is the one before it in the message, and the first element is the count. So the count stands "
        "first in the message, and is read as if it stood at the other end",
    ),
    "count last, read as if first": (
        lambda p, c: count_at_the_other_end(p, c, first=False),
        "there is the one behind it in the message, and the last element is the count",
    ),
    "one place off": (
        lambda p, c: count_at_the_other_end(p, c, turn=1),
        "there is the one before it in the message (seen with",
    ),
    "the last other": (own_and_one_other, "those of the last of the others alone"),
    "the first other": (lambda p, c: own_and_one_other(p, c, 0), "those of the first of the others alone"),
    "own once more": (own_once_more, "each rank adds its own numbers once more"),
    "nothing was written": (lambda parameters, count: ..., "not written yet"),
    "sum for mean": (
        lambda p, c: flat_average(p, c, weigh=False, divide="nothing"),
        "that is the sum over the ranks",
    ),
    "mean of means": (
        lambda p, c: flat_average(p, c, weigh=False, divide="ranks"),
        "mean of the ranks' means",
    ),
    "never divided": (
        lambda p, c: flat_average(p, c, divide="nothing"),
        "never divided by the sum of the counts",
    ),
    "copy not written back": (lambda p, c: flat_average(p, c, write=False), "is what it was before"),
    "gap ignored, flat": (alone(lambda p, c: flat_average(p, c, fill=False)), "sends less than the others"),
    "gap ignored, one by one": (
        alone(lambda p, c: one_by_one(p, c, skip=True)),
        "sends less than the others",
    ),
    "zeros sent, and no gradient": (
        alone(zeros_without_a_gradient),
        "rank 1 sent as much as the others, and failed when it wrote the average back",
    ),
    "zeros at the end": (zeros_at_the_end, "skipped the parameter without a gradient"),
    "gap left out of the count": (gap_not_counted, "left out of the count"),
    "divided by the ranks": (
        lambda p, c: flat_average(p, c, divide="ranks"),
        "divided by the number of ranks after multiplying",
    ),
    "divided by its own count times the ranks": (
        lambda p, c: one_message(p, c, unweigh=c * dist.get_world_size()),
        "divided by this rank's own count times the number of ranks",
    ),
    "divided by its own count": (
        lambda p, c: one_message(p, c, unweigh=c),
        "divided by this rank's own count",
    ),
    "divided by a number": (lambda p, c: one_message(p, c, unweigh=120), "1/2 times what it should be"),
    "rank 0's": (broadcast, "every rank has rank 0's gradient"),
    "one parameter only": (first_parameter_only, "is what it was before"),
    "layout ignored": (one_by_one, "the right numbers in the wrong places"),
    "view of a transposed gradient": (alone(viewed), "use flatten() or reshape(-1)"),
    "transposed on all ranks": (
        lambda p, c: flat_average(p, c, flatten=by_columns),
        "a gradient of two dimensions was transposed, also where it is stored like any other",
    ),
    "transposed on one rank": (
        lambda p, c: flat_average(p, c, flatten=lambda grad: by_columns(grad, lambda rank: rank == 1)),
        "its value has the elements of rank 1's gradient in the order of the transposed tensor: flatten() "
        "follows the elements of any tensor, and needs no t() before it (seen with",
    ),
    "transposed, and the mean of means": (
        lambda p, c: flat_average(p, c, weigh=False, divide="ranks", flatten=by_columns),
        "in the order of the transposed tensor: flatten() follows the elements of any tensor, and needs no "
        "t() before it. Besides, rank 0's gradient counts 2/3 times what it should",
    ),
    "total in float32": (
        total_in_float32,
        "right up to rounding, with an error of 3e-08: somewhere it went through float32",
    ),
    "many messages": (
        lambda p, c: one_by_one(p, c, layout="follow"),
        "made 5 calls (dist.all_reduce) where 1 is enough",
    ),
    "all-gather": (
        gathers_everything,
        "267 elements where 88 gradients and 1 count are enough. That is an all-gather",
    ),
    "weights averaged": (weights_instead, "the parameters were changed"),
}

RIGHT = [flat_average, by_a_function, one_message, by_the_ring, vector_of_gradients]
diagnose = together(check_average_gradients, [*RIGHT, *(wrong for wrong, _ in MISTAKES.values())])


@pytest.mark.parametrize("solution", RIGHT)
def test_every_right_way_passes(solution):
    assert diagnose(solution) is None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_classic_mistake_is_named(mistake):
    wrong, sentence = MISTAKES[mistake]
    assert sentence in diagnose(wrong)


def test_the_bucket_model_has_a_best_size_between_its_ends_that_grows_with_the_ranks():
    best = {
        gpus: min(figures.BUCKET_MB, key=lambda size: figures.exposed_seconds(size, gpus))
        for gpus in (8, 64, 256)
    }
    assert 1 < best[8] < best[64] < best[256] < figures.GRADIENT_MB


def test_a_bucket_leaves_when_it_is_full_and_the_wire_is_free():
    for size in figures.BUCKET_MB:
        sent = figures.send_buckets(size, 64)
        assert len(sent) * size == figures.GRADIENT_MB
        for number, (start, _) in enumerate(sent):
            assert start >= figures.BACKWARD_SECONDS * (number + 1) / len(sent)
            assert number == 0 or start >= sent[number - 1][1]


@pytest.mark.parametrize("gpus", [2, 256])
@pytest.mark.parametrize("bucket_MB", [1, 25, 3000])
def test_the_bucket_figure_says_how_many_messages_there_are(bucket_MB, gpus):
    alt = spoken(drawing("data_parallel", "buckets"), 3.8, bucket_MB=bucket_MB, gpus=gpus)
    assert alt.startswith(f"{figures.GRADIENT_MB // bucket_MB:,} message")


def test_thousands_of_messages_become_few_bars_that_cover_the_same_time():
    sent = figures.send_buckets(1, 64)
    bars = figures.visible(sent)
    assert len(sent) == 3000 and len(bars) <= 300
    assert bars[0][0] == sent[0][0] and bars[-1][1] == sent[-1][1]
    few = figures.send_buckets(50, 256)  # back to back
    assert few[1][0] == few[0][1]
    assert figures.visible(few) == few


@pytest.mark.parametrize("GB_per_second", [1, 900])
@pytest.mark.parametrize("latency_microseconds", [1, 1000])
def test_the_cost_of_an_all_reduce_is_the_models(GB_per_second, latency_microseconds):
    values = {"GB_per_second": GB_per_second, "latency_microseconds": latency_microseconds}
    alt = spoken(drawing("data_parallel", "cost_of_all_reduce"), 2.8, **values)
    link = (latency_microseconds * 1e-6, GB_per_second * 1e9)
    whole = 1e3 * cost.collective_seconds(3e9, 1024, "all_reduce", *link)
    assert f"on 1024 GPUs {whole:,.0f} ms in 1, " in alt

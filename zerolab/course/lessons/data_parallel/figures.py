"""Lesson 03's model of buckets: when they are sent, and how long the step waits for the last one."""

import functools
from collections.abc import Sequence

from zerolab import cost

# The model of buckets has the gradients of 1.5B parameters in bf16, on an ordinary network.
GRADIENT_MB = 3000
BACKWARD_SECONDS = 0.4
LATENCY_SECONDS, BYTES_PER_SECOND = 10e-6, 25e9
BUCKET_MB = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 3000)

Span = tuple[float, float]  # start and end


@functools.cache
def send_buckets(bucket_mb: int, gpus: int) -> list[Span]:
    """(start, end) of each bucket's all-reduce, when gradients appear evenly during the backward pass.

    A bucket is sent when it is full and the one before has arrived.
    """
    count = GRADIENT_MB // bucket_mb
    link = (LATENCY_SECONDS, BYTES_PER_SECOND)
    seconds = cost.collective_seconds(bucket_mb * 1e6, gpus, "all_reduce", *link)
    sent, free = [], 0.0
    for number in range(1, count + 1):
        start = max(free, BACKWARD_SECONDS * number / count)
        free = start + seconds
        sent.append((start, free))
    return sent


def exposed_seconds(bucket_mb: int, gpus: int) -> float:
    """Return how long the step waits for the last bucket after the backward pass."""
    return send_buckets(bucket_mb, gpus)[-1][1] - BACKWARD_SECONDS


def by_bucket(waits: Sequence[float]) -> str:
    """Return the milliseconds of waiting with each of `BUCKET_MB`, in words."""
    return ", ".join(f"{size:,} MB {wait:,.0f} ms" for size, wait in zip(BUCKET_MB, waits, strict=True))


def visible(sent: Sequence[Span]) -> list[Span]:
    """The messages as bars that a page can show: those with less than a 300th between them are one bar."""
    gap = sent[-1][1] / 300
    bars = [sent[0]]
    for start, stop in sent[1:]:
        if len(sent) > 100 and start - bars[-1][1] < gap:
            start, _ = bars.pop()
        bars.append((start, stop))
    return bars

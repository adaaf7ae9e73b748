"""Lesson 03's model of buckets, and its diagram of the order of events in a real step."""

import functools
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.figure import Figure

from zerolab import cost
from zerolab.course.look import COLOURS, ink_on

# The model of buckets has the gradients of 1.5B parameters in bf16, on an ordinary network.
GRADIENT_MB = 3000
BACKWARD_SECONDS = 0.4
LATENCY_SECONDS, BYTES_PER_SECOND = 10e-6, 25e9
BUCKET_MB = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 3000)

Span = tuple[float, float]  # start and end
Entry = tuple[str, str]  # ("gradient", "3.weight"), ("start", "3") or ("end", "3")
_LAYER_COLOURS = (COLOURS["gradients"], "#8A5A00")  # neighbours differ, all are gradients


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
    """How long the step waits for the last bucket after the backward pass."""
    return send_buckets(bucket_mb, gpus)[-1][1] - BACKWARD_SECONDS


def visible(sent: Sequence[Span]) -> list[Span]:
    """The messages as bars that a page can show: those with less than a 300th between them are one bar."""
    gap = sent[-1][1] / 300
    bars = [sent[0]]
    for start, stop in sent[1:]:
        if len(sent) > 100 and start - bars[-1][1] < gap:
            start, _ = bars.pop()
        bars.append((start, stop))
    return bars


def in_order(gradients: Iterable[tuple[float, str]], events: Iterable) -> list[Entry]:
    """The events of a backward pass in order, without times: gradients, and collectives that start or end.

    `gradients` are (time, parameter name), `events` those of a trace.
    """
    moments = [(time, ("gradient", name)) for time, name in gradients]
    for event in events:
        moments += [(event.start, ("start", event.unit)), (event.end, ("end", event.unit))]
    return [entry for _, entry in sorted(moments)]


def timeline(fig: Figure, runs: Mapping[str, Sequence[Entry]]) -> str:
    """For each run a lane of gradients and two of all-reduces; each column is one event, in order."""
    spoken = []
    for lanes, (title, entries) in zip(fig.subplots(len(runs)), runs.items(), strict=True):
        open_at: dict[str, int] = {}
        for column, (kind, name) in enumerate(entries):
            layer = int(name.split(".")[0])
            if kind == "gradient":
                _draw(lanes, 2, (column, column + 0.92), name.replace(".", "\n")[:3], layer)
            elif kind == "start":
                open_at[name] = column
            else:
                _draw(lanes, layer % 2, (open_at.pop(name), column + 0.92), f"layer {layer}", layer)
        lanes.set(
            title=title, yticks=[0.5, 2], yticklabels=["all-reduce", "gradient of\nweight, bias"], xticks=[]
        )
        spoken.append(f"{title}: {', '.join(f'{kind} {name}' for kind, name in entries)}")
    return f"The order of events in one backward pass. {'. '.join(spoken)}."


def _draw(lanes, row: int, span: Span, words: str, layer: int) -> None:
    start, stop = span
    colour = _LAYER_COLOURS[layer % 2]
    lanes.barh(row, stop - start, left=start, height=0.85, color=colour)
    lanes.text((start + stop) / 2, row, words, ha="center", va="center", size=8, color=ink_on(colour))

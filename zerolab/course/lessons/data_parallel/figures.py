"""Lesson 03's drawings: buckets by the α–β model, and the order of events in a real step."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zerolab import cost
from zerolab.course.look import CATEGORY_COLOURS, ink_on
from zerolab.course.sketch import INK, Panel, Sketch, nice, powers_of_ten

# The model of buckets has the gradients of 1.5B parameters in bf16, on an ordinary network.
GRADIENT_MB = 3000
BACKWARD_SECONDS = 0.4
LATENCY_SECONDS, BYTES_PER_SECOND = 10e-6, 25e9
BUCKET_MB = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 3000)

Entry = tuple[str, str]  # ("gradient", "3.weight"), ("start", "3") or ("end", "3")
_LAYER_COLOURS = (CATEGORY_COLOURS["grads"], "#8A5A00")  # neighbours differ, all are gradients
_SMALL: dict[str, Any] = {"align": "middle", "size": 6.5, "bold": True}


@functools.cache
def send_buckets(bucket_mb: int, gpus: int) -> list[tuple[float, float]]:
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


def buckets(sketch: Sketch, bucket_MB: int = 3000, gpus: int = 64) -> str:
    """One step's buckets in time, and below it the waiting time against the bucket's size."""
    sent, waits = send_buckets(bucket_MB, gpus), {mb: exposed_seconds(mb, gpus) * 1e3 for mb in BUCKET_MB}
    _draw_step(sketch, sent)
    low, high = min(waits.values()) / 1.6, max(waits.values()) * 1.6
    plot = sketch.panel(0.13, 0.14, 0.84, 0.33, x=(0.67, 4500), y=(low, high), log=True)
    plot.marks([(bucket_MB, waits[bucket_MB])], CATEGORY_COLOURS["grads"], size=2.4)
    plot.line(waits.items(), width=1.5)
    plot.marks(waits.items(), INK)
    plot.x_axis({mb: str(mb) for mb in BUCKET_MB}, "bucket size, MB")
    plot.y_axis(powers_of_ten(low, high), "waiting, ms")
    messages = f"{len(sent):,} message{'s' if len(sent) > 1 else ''} of {bucket_MB:,} MB on {gpus} GPUs"
    title = f"{messages}: after backward the step waits {waits[bucket_MB]:,.0f} ms"
    sketch.text(0.01, 0.98, title, bold=True, vertical="top")
    best = min(waits, key=waits.__getitem__)
    return (
        f"{title}. The waiting time is shortest with {best} MB, {waits[best]:,.1f} ms. With 1 MB it is "
        f"{waits[1]:,.1f} ms, with one message for all {waits[GRADIENT_MB]:,.1f} ms."
    )


def _draw_step(sketch: Sketch, sent: list[tuple[float, float]]) -> None:
    """The backward pass above, its messages below, with a thin gap between them while they are few."""
    end = sent[-1][1]
    lanes = sketch.panel(0.13, 0.67, 0.84, 0.21, x=(0, end * 1.01), y=(0, 2))
    lanes.rect(0, 1.1, BACKWARD_SECONDS, 0.8, "#999999")
    gap = end / 600
    bars = [(start, stop - gap) for start, stop in sent] if len(sent) <= 120 else _merged(sent, gap)
    for start, stop in bars:
        lanes.rect(start, 0.1, stop - start, 0.8, CATEGORY_COLOURS["grads"])
    lanes.line([(BACKWARD_SECONDS, 0), (BACKWARD_SECONDS, 2)], dash="4 3")
    lanes.y_axis({1.5: "backward", 0.5: "all-reduce"})
    lanes.x_axis(nice(0, end), "seconds (model)")


def _merged(sent: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Thousands of messages as a few bars: messages with less than a gap between them are one bar."""
    bars = [sent[0]]
    for start, stop in sent[1:]:
        if start - bars[-1][1] < gap:
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


def timeline(sketch: Sketch, runs: Mapping[str, Sequence[Entry]]) -> str:
    """For each run a lane of gradients and a lane of all-reduces; each column is one event, in order."""
    spoken, height = [], 1 / len(runs)
    for place, (title, entries) in enumerate(runs.items(), start=1):
        bottom, right = 1 - place * height + 0.02, len(entries)
        lanes = sketch.panel(0.13, bottom, 0.86, height * 0.76, x=(-0.1, right), y=(0, 2))
        _draw_lanes(lanes, entries)
        lanes.text(-0.1, 2, title, bold=True, vertical="bottom", shift=(0, -5))
        spoken.append(f"{title}: {', '.join(f'{kind} {name}' for kind, name in entries)}")
    return f"The order of events in one backward pass. {'. '.join(spoken)}."


def _draw_lanes(lanes: Panel, entries: Sequence[Entry]) -> None:
    open_at: dict[str, int] = {}
    for column, (kind, name) in enumerate(entries):
        unit = name.split(".")[0]
        colour = _LAYER_COLOURS[int(unit) % 2]
        if kind == "gradient":
            lanes.rect(column, 1.15, 0.92, 0.75, colour)
            lanes.text(column + 0.46, 1.52, name.replace(".", "\n"), colour=ink_on(colour), **_SMALL)
        elif kind == "start":
            open_at[name] = column
        else:
            row, start, stop = 0.1 + 0.5 * (int(unit) % 2), open_at.pop(name), column + 0.92
            lanes.rect(start, row, stop - start, 0.42, colour)
            lanes.text((start + stop) / 2, row + 0.21, f"layer {unit}", colour=ink_on(colour), **_SMALL)
    lanes.y_axis({1.5: "gradient of", 0.55: "all-reduce of"}, line=False)

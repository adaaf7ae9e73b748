"""Lesson 03's drawings: buckets by the α–β model, the order of events in a real step, and who holds what."""

import functools
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zerolab import cost
from zerolab.course.look import CATEGORY_COLOURS, INK, PALE, ink_on

# A made-up but ordinary machine and step, for the model of buckets: 1.5B bf16 gradients.
GRADIENT_MB = 3000
BACKWARD_SECONDS = 0.4
LATENCY_SECONDS, BYTES_PER_SECOND = 10e-6, 25e9
BUCKET_MB = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 3000)

Entry = tuple[str, str]  # ("gradient", "3.weight"), ("start", "3") or ("end", "3")
_LAYER_COLOURS = (CATEGORY_COLOURS["grads"], "#8A5A00")  # neighbours differ, all are gradients
NAMES = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer state"}


@functools.cache
def send_buckets(bucket_mb: int, gpus: int) -> list[tuple[float, float]]:
    """(start, end) of each bucket's all-reduce, when gradients appear evenly during the backward pass.

    A bucket leaves when it is full and the one before has arrived.
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
    """How long the step still waits for the last bucket when the backward pass is over."""
    return send_buckets(bucket_mb, gpus)[-1][1] - BACKWARD_SECONDS


def buckets(figure: Figure, bucket_MB: int = 3000, gpus: int = 64) -> str:
    """One step's buckets on a time line, and below it the waiting time against the bucket's size."""
    sent, waits = send_buckets(bucket_MB, gpus), [exposed_seconds(size, gpus) for size in BUCKET_MB]
    _draw_step(figure.add_axes((0.13, 0.67, 0.84, 0.21)), sent)
    axes = figure.add_axes((0.13, 0.14, 0.84, 0.33))
    axes.plot(BUCKET_MB, [wait * 1e3 for wait in waits], color=INK, marker="o", markersize=4)
    here = exposed_seconds(bucket_MB, gpus)
    axes.plot([bucket_MB], [here * 1e3], "o", color=CATEGORY_COLOURS["grads"], markersize=11, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="bucket size, MB", ylabel="waiting, ms")
    axes.set_xticks(BUCKET_MB, [str(size) for size in BUCKET_MB])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.minorticks_off()
    messages = f"{len(sent):,} message{'s' if len(sent) > 1 else ''}"
    title = (
        f"{messages} of {bucket_MB:,} MB on {gpus} GPUs: after backward the step waits {here * 1e3:,.0f} ms"
    )
    figure.text(0.01, 0.98, title, weight="bold", va="top")
    best = min(BUCKET_MB, key=lambda size: exposed_seconds(size, gpus))
    return (
        f"{title}. The curve of waiting time against bucket size is lowest at {best} MB, "
        f"{min(waits) * 1e3:,.1f} ms; 1 MB waits {waits[0] * 1e3:,.1f} ms, all in one {waits[-1] * 1e3:,.1f}."
    )


def _draw_step(axes, sent: list[tuple[float, float]]) -> None:
    """The backward pass above, its messages below, with a thin gap between them while they are few."""
    end = sent[-1][1]
    axes.broken_barh([(0, BACKWARD_SECONDS)], (1.1, 0.8), color="#999999")
    gap = end / 600 if len(sent) <= 120 else 0
    bars = [(start, stop - start - gap) for start, stop in sent]
    axes.broken_barh(bars, (0.1, 0.8), facecolor=CATEGORY_COLOURS["grads"], linewidth=0)
    axes.axvline(BACKWARD_SECONDS, color=INK, linestyle=(0, (4, 3)), linewidth=1)
    axes.set(yticks=(1.5, 0.5), yticklabels=("backward", "all-reduce"), ylim=(0, 2), xlim=(0, end * 1.01))
    axes.set_xlabel("seconds (model)", labelpad=1)


def in_order(gradients: Iterable[tuple[float, str]], events: Iterable) -> list[Entry]:
    """What happened in a backward pass, in order and without times: gradients, and collectives that start or
    end.

    `gradients` are (time, parameter name), `events` those of a trace.
    """
    moments = [(time, ("gradient", name)) for time, name in gradients]
    for event in events:
        moments += [(event.start, ("start", event.unit)), (event.end, ("end", event.unit))]
    return [entry for _, entry in sorted(moments)]


def timeline(figure: Figure, runs: Mapping[str, Sequence[Entry]]) -> str:
    """For each run a lane of gradients and a lane of all-reduces; each column is one event, in order."""
    spans = []
    for place, (title, entries) in enumerate(runs.items()):
        height = 1 / len(runs)
        axes = figure.add_axes((0.13, 1 - (place + 1) * height + 0.02, 0.86, height * 0.76))
        _draw_lanes(axes, entries)
        axes.set_title(title, weight="bold", fontsize=10)
        listed = ", ".join(f"{kind} {name}" for kind, name in entries)
        spans.append(f"{title}: {listed}")
    return "The order of events in one backward pass. " + ". ".join(spans) + "."


def _draw_lanes(axes, entries: Sequence[Entry]) -> None:
    open_at: dict[str, int] = {}
    for column, (kind, name) in enumerate(entries):
        unit = name.split(".")[0]
        colour = _LAYER_COLOURS[int(unit) % 2]
        if kind == "gradient":
            axes.add_patch(Rectangle((column, 1.15), 0.92, 0.75, facecolor=colour))
            axes.text(column + 0.46, 1.52, name.replace(".", "\n"), color=ink_on(colour), **_SMALL)
        elif kind == "start":
            open_at[name] = column
        else:
            row = 0.1 + 0.5 * (int(unit) % 2)
            start = open_at.pop(name)
            box = Rectangle((start, row), column + 0.92 - start, 0.42, facecolor=colour)
            axes.add_patch(box)
            axes.text((start + column + 0.92) / 2, row + 0.2, f"layer {unit}", color=ink_on(colour), **_SMALL)
    axes.set(xlim=(-0.1, len(entries)), ylim=(0, 2), xticks=[], yticks=(1.5, 0.55))
    axes.set_yticklabels(("gradient of", "all-reduce of"))
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


_SMALL = {"ha": "center", "va": "center", "fontsize": 6.5, "weight": "bold"}


def held_by_rank(figure: Figure, memories: Sequence, psi: int) -> str:
    """What each rank was measured to hold, in bytes per parameter of the model."""
    axes = figure.add_axes((0.1, 0.2, 0.88, 0.62))
    for rank, memory in enumerate(memories):
        left = 0.0
        for category in NAMES:
            width = getattr(memory, f"{category}_bytes") / psi
            axes.barh(rank, width, left=left, color=CATEGORY_COLOURS[category])
            axes.text(
                left + width / 2,
                rank,
                f"{width:g}",
                ha="center",
                va="center",
                color=ink_on(CATEGORY_COLOURS[category]),
                weight="bold",
            )
            left += width
    axes.set(yticks=range(len(memories)), yticklabels=[f"rank {rank}" for rank in range(len(memories))])
    axes.set(xlim=(0, 16.2), xticks=range(0, 17, 4), ylim=(len(memories) - 0.4, -0.6))
    axes.axvspan(0, 16, color=PALE, zorder=-1)
    axes.set_xlabel("measured bytes per parameter (Ψ)")
    for place, (category, name) in enumerate(NAMES.items()):
        figure.text(0.1 + 0.2 * place, 0.9, f"■ {name}", color=CATEGORY_COLOURS[category], weight="bold")
    per_rank = "; ".join(
        f"rank {rank}: "
        + ", ".join(f"{name} {getattr(m, f'{c}_bytes') / psi:g}Ψ" for c, name in NAMES.items())
        for rank, m in enumerate(memories)
    )
    return f"Measured bytes per parameter on each rank. {per_rank}."

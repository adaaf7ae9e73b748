"""Plot time, memory and bytes of every contestant, a row of panels for each table."""

from pathlib import Path
from statistics import median

from zerolab.bench.contestants import FLOOR
from zerolab.bench.links import Link
from zerolab.bench.report import Report, Table
from zerolab.bench.sweep import Point

_OURS, _THEIRS, _INK = "#0072B2", "#999999", "#222222"
_POINTS = 100  # of a dashed line
_MARKS = ("x", "o", "s", "^", "D")
_COLOURS = {
    "floor": "#222222", "ddp": "#999999", "ddp+zero": "#C2A35A", "fully_shard": "#CC79A7",
    "deepspeed-1": "#B8D8BE", "deepspeed-2": "#6FB586", "deepspeed-3": "#2E7D4F",
    "zerolab-0": "#9CC9E8", "zerolab-1": "#56A5DB", "zerolab-2": "#0072B2", "zerolab-3": "#D55E00",
}  # fmt: skip


def draw(report: Report, path: Path) -> None:
    """Write the picture of what the report has: tables or sweep. Raises: ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 0.9 + 2.9 * max(1, len(report.tables))
    figure = Figure(figsize=(11, height), dpi=110, layout="constrained")
    if report.links:
        _links(figure.subplots(1, 2), report.links)
    elif report.tables:
        rows = figure.subplots(len(report.tables), 3, squeeze=False)
        for table, row in zip(report.tables, rows, strict=True):
            _row(table, row)
    else:
        _sweep(figure.subplots(1, 2), report)
    FigureCanvasAgg(figure).print_png(path)


def _row(table: Table, axes) -> None:
    names = list(table.race.seconds)
    ratios, weights = [table.ratio(name) for name in names], [table.footprints[name] for name in names]
    whiskers = [[each.median - each.low for each in ratios], [each.high - each.median for each in ratios]]
    title = f"{table.update}: step, of {table.baseline}'s; median and quartiles"
    _bars(axes[0], names, [each.median for each in ratios], title, whiskers)
    axes[0].axvline(1.0, color=_INK, linewidth=0.8)
    _bars(axes[1], names, [(each.peak_bytes or 0) / 1e6 for each in weights], "peak memory, MB")
    _bars(axes[2], names, [(each.wire_bytes or 0) / 1e6 for each in weights], "sent by a rank in a step, MB")


def _bars(axes, names: list[str], values: list[float], title: str, whiskers: list | None = None) -> None:
    colours = [_OURS if name.startswith("zerolab") else _THEIRS for name in names]
    axes.barh(names, values, color=colours, xerr=whiskers, ecolor=_INK)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _sweep(axes, report: Report) -> None:
    from matplotlib.ticker import LogLocator

    _lines(axes[0], report.by_ranks, [point.world_size for point in report.by_ranks], "ranks")
    millions = [point.psi / 1e6 for point in report.by_parameters]
    _lines(axes[1], report.by_parameters, millions, "million parameters")
    axes[0].set_ylabel("CPU ms a rank and step above the floor")
    axes[1].set(xscale="log", yscale="log")
    axes[1].set_xticks(millions, [f"{each:.0f}" for each in millions], minor=False)
    axes[1].yaxis.set_major_formatter("{x:g}")
    axes[1].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[1].yaxis.set_minor_formatter("")
    axes[1].xaxis.set_minor_formatter("")
    axes[0].legend(frameon=False, fontsize=8)


def _links(axes, links: list[Link]) -> None:
    """A step against the rate of the cables, and over the least that it can take.

    Dashed is that least, at every rate between.
    """
    from matplotlib.ticker import LogLocator

    held = sorted([link for link in links if link.gigabits], key=lambda link: link.gigabits)
    rates = [link.gigabits for link in held]
    for name in held[0].names if held else []:
        times = [1e3 * link.seconds(name).median for link in held]
        (line,) = axes[0].plot(rates, times, marker="o", color=_COLOURS.get(name), label=name)
        if name != FLOOR and FLOOR in held[0].names:
            axes[0].plot(*_least(held, name), "--", color=line.get_color(), linewidth=0.8)
        over = [each.median for link in held if (each := link.over_least(name))]
        axes[1].plot(rates[: len(over)], over, marker="o", color=line.get_color())
    axes[0].set(xscale="log", yscale="log", ylabel="ms a step")
    axes[0].set_title("dashed: max(computation, bytes / rate)", fontsize=10, loc="left")
    axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[1].set(xscale="log", ylabel="of max(computation, bytes / rate)")
    axes[1].axhline(1.0, color=_INK, linewidth=0.8)
    axes[1].figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside right", frameon=False, fontsize=8
    )
    for each in axes:
        each.set(xlabel="Gbit/s of a cable, in each direction")
        each.set_xticks(rates, [f"{rate:g}" for rate in rates], minor=False)
        each.xaxis.set_minor_formatter("")
        each.yaxis.set_minor_formatter("")
        each.yaxis.set_major_formatter("{x:g}")
        each.spines[["top", "right"]].set_visible(False)


def _least(held: list[Link], name: str) -> tuple[list[float], list[float]]:
    """Rates, and the milliseconds of the floor's step or of the bytes over the rate, whichever are more."""
    slowest, fastest = held[0].gigabits, held[-1].gigabits
    rates = [slowest * (fastest / slowest) ** (each / _POINTS) for each in range(_POINTS + 1)]
    floor = median(link.seconds(FLOOR).median for link in held)
    megabits = median(8 * link.sent_bytes(name) for link in held) / 1e6
    return rates, [max(1e3 * floor, megabits / rate) for rate in rates]


def _lines(axes, points: list[Point], places: list[float], label: str) -> None:
    for name, mark in zip(points[0].extra_cpu_seconds, _MARKS, strict=False):
        extra = [1e3 * point.extra_cpu_seconds[name].median for point in points]
        axes.plot(places, extra, marker=mark, label=name)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)

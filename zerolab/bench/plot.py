"""Plot time, memory and bytes of every contestant, a row of panels for each table."""

from pathlib import Path

from zerolab.bench.report import Report, Table
from zerolab.bench.sweep import Point

_OURS, _THEIRS, _INK = "#0072B2", "#999999", "#222222"
_MARKS = ("x", "o", "s", "^", "D")


def draw(report: Report, path: Path) -> None:
    """Write the picture of what the report has: tables or sweep. Raises: ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 0.9 + 2.9 * max(1, len(report.tables))
    figure = Figure(figsize=(11, height), dpi=110, layout="constrained")
    if report.tables:
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


def _lines(axes, points: list[Point], places: list[float], label: str) -> None:
    for name, mark in zip(points[0].extra_cpu_seconds, _MARKS, strict=False):
        extra = [1e3 * point.extra_cpu_seconds[name].median for point in points]
        axes.plot(places, extra, marker=mark, label=name)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)

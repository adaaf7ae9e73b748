"""The report in words: what ``python -m zerolab bench`` prints."""

from collections.abc import Iterator

from zerolab.bench.machine import in_words
from zerolab.bench.ratios import Spread
from zerolab.bench.report import Report, Table
from zerolab.bench.sweep import Point

_UPDATES = {"exact": "torch's loop", "fused": "torch's fused kernel"}
_NAME = 12


def text(report: Report) -> str:
    """The whole report."""
    parts = [in_words(report.machine), *(one_table(table, report.settings) for table in report.tables)]
    if report.by_ranks:
        parts.append(_points("Sweep over ranks", report.by_ranks))
        parts.append(_points("Sweep over parameters", report.by_parameters))
    return "\n\n".join(parts) + "\n"


def one_table(table: Table, settings: dict) -> str:
    """Contestants, the engine's own share, and the targets."""
    heading = (
        f"{table.update}: Adam in {_UPDATES[table.update]} on every side. GPT of {table.psi / 1e6:.1f}M "
        f"parameters, {table.world_size} ranks, {settings['threads']} thread(s) each, batch "
        f"{settings['batch']}, fp32, medians of {settings['rounds']} rounds with their quartiles"
    )
    parts = ["\n".join([heading, *_contestants(table)])]
    if table.one_rank:
        parts.append("\n".join(_shares(table)))
    if lines := list(_targets(table)):
        parts.append("\n".join(["target", *lines]))
    return "\n\n".join(parts)


def _contestants(table: Table) -> Iterator[str]:
    of = f"of {table.baseline}'s step"
    yield f"{'':{_NAME}} {'ms a step':>21} {of:>20} {'peak MB':>9} {'sent MB':>9} {'off by':>9}"
    for name in table.race.seconds:
        weight = table.footprints[name]
        yield (
            f"{name:{_NAME}} {_spread(table.seconds(name), 1e3, 1):>21} {_spread(table.ratio(name)):>20} "
            f"{_mb(weight.peak_bytes):>9} {_mb(weight.wire_bytes):>9} {_off(table, name):>9}"
        )
    for name, reason in table.absent.items():
        yield f"{name:{_NAME}} {reason}"
    yield (
        "peak: resident memory above what was there before the model. sent: by one rank in one step.\n"
        f"off by: distance of the parameters from {table.reference}'s at the end, as a share of their way"
    )


def _shares(table: Table) -> Iterator[str]:
    yield "The engine's own share: a step on one rank over the plain loop's; rank 0's main thread by profile"
    yield f"{'':{_NAME}} {'one rank':>20} {'compute ms':>11} {'wire ms':>9} {'engine ms':>10} {'engine':>7}"
    for name, ratio in table.one_rank.items():
        share = table.shares[name]
        parts = (share.compute, share.wire, share.engine)
        compute, wire, engine = (f"{1e3 * seconds:.1f}" for seconds in parts)
        yield (
            f"{name:{_NAME}} {_spread(ratio):>20} {compute:>11} {wire:>9} {engine:>10} "
            f"{share.engine_share:>7.1%}"
        )


def _targets(table: Table) -> Iterator[str]:
    for target in table.targets():
        quartiles = "[{:.3f} {:.3f}]".format(*target.quartiles) if target.quartiles else ""
        yield (
            f"{target.contestant:{_NAME}} {target.what:<38} {target.found:6.3f} {quartiles:<13} "
            f"at most {target.bound:.2f}: {target.verdict}"
        )


def _points(heading: str, points: list[Point]) -> str:
    names = list(points[0].extra_cpu_seconds)
    lines = [
        f"{heading}: processor time of a rank above the floor's, ms a step (ns a parameter)",
        f"{'ranks':>5} {'parameters':>12} {'floor ms':>9} " + " ".join(f"{name:>15}" for name in names),
    ]
    for point in points:
        extra = [point.extra_cpu_seconds[name].median for name in names]
        cells = [f"{1e3 * seconds:.1f} ({1e9 * seconds / point.psi:.2f})" for seconds in extra]
        lines.append(
            f"{point.world_size:>5} {point.psi:>12,} {1e3 * point.floor_seconds:>9.1f} "
            + " ".join(f"{cell:>15}" for cell in cells)
        )
    return "\n".join(lines)


def _spread(values: Spread, scale: float = 1.0, digits: int = 3) -> str:
    low, middle, high = (f"{scale * value:.{digits}f}" for value in (values.low, values.median, values.high))
    return f"{middle} [{low} {high}]"


def _mb(number: float | None) -> str:
    return "unknown" if number is None else f"{number / 1e6:.1f}"


def _off(table: Table, name: str) -> str:
    difference = table.race.differences.get(name)
    return "" if difference is None else f"{difference:.1e}"

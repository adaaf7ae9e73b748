"""Format the report as text, which ``python -m zerolab bench`` prints."""

from collections.abc import Callable, Iterator

from zerolab.bench.links import Link
from zerolab.bench.links import in_words as rate_in_words
from zerolab.bench.machine import in_words
from zerolab.bench.ratios import Spread
from zerolab.bench.report import STAGE_OF, Report, Table
from zerolab.bench.sweep import Point
from zerolab.bench.targets import minimum_wire_bytes

_UPDATES = {"exact": "torch's loop", "fused": "torch's fused kernel"}
_NAME = 12


def text(report: Report) -> str:
    """Return the whole report."""
    parts = [in_words(report.machine), *(one_table(table, report.settings) for table in report.tables)]
    if report.by_ranks:
        parts.append(_sweep(report.by_ranks, "ranks", "byte sent", _sent_bytes))
        parts.append(_sweep(report.by_parameters, "parameters", "parameter", lambda point, name: point.psi))
    parts += [_link(link, report.settings) for link in report.links]
    return "\n\n".join(parts) + "\n"


def _link(link: Link, settings: dict) -> str:
    """A line for each contestant: its step, its bytes, and the step over the least that it can take."""
    limit = "No limit on the cables"
    if link.bits_per_second is not None:
        limit = f"{rate_in_words(link.bits_per_second)}/s in each direction of a cable"
    lines = [
        f"{limit}: {settings['model']}, {settings['ranks']} hosts with a rank each, fp32, batch "
        f"{settings['batch']}, {_medians(settings)}",
        f"{'':{_NAME}} {'ms a step':>24} {f'of {link.baseline}':>20} {'sent MB':>9} {'ms of bytes':>12} "
        f"{'of the least':>20}",
    ]
    for name in link.names:
        over = link.over_least(name)
        lines.append(
            f"{name:{_NAME}} {_spread(link.seconds(name), 1e3, 1):>24} {_spread(link.ratio(name)):>20} "
            f"{_mb(link.sent_bytes(name)):>9} {1e3 * link.messages(name):>12.1f} "
            f"{'' if over is None else _spread(over):>20}"
        )
    lines += [_odd(name) for name in link.race.odd_ones_out()]
    lines.append(
        "sent: what a cable carried in one direction in a step, by its own counter, with all headers\n"
        "the least: the floor's step, or the bytes over the rate if that is longer"
    )
    return "\n".join(lines)


def _medians(settings: dict) -> str:
    steps = settings["steps"]
    each = "" if steps == 1 else f" of {steps} steps in a row"
    return f"medians of {settings['rounds']} rounds{each} with their quartiles"


def _odd(name: str) -> str:
    return f"{name} has not trained what the others have, so its seconds do not compare"


def one_table(table: Table, settings: dict) -> str:
    """Contestants, the engine's own share, and the targets."""
    heading = (
        f"{table.update}: Adam in {_UPDATES[table.update]} on every side. GPT of {table.psi / 1e6:.1f}M "
        f"parameters, {table.world_size} ranks, {settings['threads']} thread(s) each, batch "
        f"{settings['batch']}, fp32, {_medians(settings)}"
    )
    parts = ["\n".join([heading, *_contestants(table), *_captions(table, settings)])]
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
    for name in table.race.odd_ones_out():
        yield _odd(name)


def _captions(table: Table, settings: dict) -> Iterator[str]:
    """What the columns say, which depends on the device."""
    on_gpus = settings["backend"] == "nccl"
    memory = "the GPU memory of torch's allocator" if on_gpus else "resident memory"
    yield (
        f"peak: {memory} above what was there before the model. sent: by one rank in one step.\n"
        f"off by: distance of the parameters from {table.reference}'s at the end, as a share of their way"
    )
    if on_gpus and table.world_size > settings["gpus"]:
        yield (
            f"{table.world_size} ranks take turns on {settings['gpus']} GPU(s), so the times say nothing "
            "about ranks with a GPU each"
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
        least = "" if target.floor is None else f" (the floor: {target.floor:.3f})"
        yield (
            f"{target.contestant:{_NAME}} {target.what:<38} {target.found:6.3f} {quartiles:<13} "
            f"at most {target.bound:.2f}: {target.verdict}{least}"
        )


def _sweep(points: list[Point], what: str, per: str, count: Callable[[Point, str], float]) -> str:
    """Format a line for each point; the cost by the quantity it should be proportional to is in brackets."""
    names = list(points[0].extra_cpu_seconds)
    lines = [
        f"Sweep over {what}: processor time of a rank above the floor's, ms a step (ns a {per})",
        f"{'ranks':>5} {'parameters':>12} {'floor ms':>9} " + " ".join(f"{name:>14}" for name in names),
    ]
    for point in points:
        head = f"{point.world_size:>5} {point.psi:>12,} {1e3 * point.floor_seconds:>9.1f}"
        cells = [_cost(point.extra_cpu_seconds[name].median, count(point, name)) for name in names]
        lines.append(f"{head} {' '.join(f'{cell:>14}' for cell in cells)}")
    return "\n".join(lines)


def _cost(seconds: float, count: float) -> str:
    return f"{1e3 * seconds:.1f} ({1e9 * seconds / count:.2f})" if count else f"{1e3 * seconds:.1f} (-)"


def _sent_bytes(point: Point, name: str) -> float:
    return minimum_wire_bytes(point.psi, point.world_size, STAGE_OF.get(name, 0))


def _spread(values: Spread, scale: float = 1.0, digits: int = 3) -> str:
    low, middle, high = (f"{scale * value:.{digits}f}" for value in (values.low, values.median, values.high))
    return f"{middle} [{low} {high}]"


def _mb(number: float | None) -> str:
    return "unknown" if number is None else f"{number / 1e6:.1f}"


def _off(table: Table, name: str) -> str:
    difference = table.race.differences.get(name)
    return "" if difference is None else f"{difference:.1e}"

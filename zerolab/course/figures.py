"""The drawings of several lessons: bars made of the model states, and two loss curves that should be one."""

from collections.abc import Iterable, Mapping, Sequence

from zerolab.course.look import CATEGORY_COLOURS, ink_on
from zerolab.course.sketch import PALE, Panel, Sketch, nice

NAMES = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer state"}


def sizes_of(states, unit_bytes: float) -> dict[str, float]:
    """The model states by category, in units of `unit_bytes`, of anything with ``params_bytes`` and so on."""
    return {category: getattr(states, f"{category}_bytes") / unit_bytes for category in NAMES}


def stacked(
    bars: Panel, row: float, sizes: Mapping[str, float], *, opacity: float = 1.0, numbers: bool = False
) -> None:
    """A bar made of one box for each category, with its size in the box if `numbers`."""
    left = 0.0
    for category, size in sizes.items():
        colour = CATEGORY_COLOURS[category]
        bars.rect(left, row - 0.4, size, 0.8, colour, opacity=opacity)
        if numbers:
            bars.text(left + size / 2, row, f"{size:g}", align="middle", colour=ink_on(colour), bold=True)
        left += size


def key(sketch: Sketch, y: float, places: Iterable[float], words: Mapping[str, str] = NAMES) -> None:
    """The categories' names, each in its colour, at `places` from left to right."""
    named = zip(places, words.items(), strict=True)
    sketch.key(y, {place: (name, CATEGORY_COLOURS[category]) for place, (category, name) in named})


def held_by_rank(sketch: Sketch, memories: Sequence, psi: int) -> str:
    """What each rank was measured to hold, in bytes per parameter of the model."""
    bars = sketch.panel(0.1, 0.2, 0.88, 0.62, x=(0, 16.2), y=(len(memories) - 0.4, -0.6))
    bars.rect(0, -0.6, 16, len(memories) + 0.2, PALE)
    spoken = []
    for rank, memory in enumerate(memories):
        sizes = sizes_of(memory, psi)
        stacked(bars, rank, sizes, numbers=True)
        listed = ", ".join(f"{NAMES[category]} {size:g}Ψ" for category, size in sizes.items())
        spoken.append(f"rank {rank}: {listed}")
    bars.y_axis({rank: f"rank {rank}" for rank in range(len(memories))})
    bars.x_axis(range(0, 17, 4), "measured bytes per parameter (Ψ)")
    key(sketch, 0.91, (0.1, 0.3, 0.5))
    return f"Measured bytes per parameter on each rank. {'; '.join(spoken)}."


def both_losses(
    sketch: Sketch, sharded: list[float], single: list[float], stage: int, per: str = "step"
) -> str:
    """The sharded run's loss as a thin line over the single process's broad one: one curve, if they agree."""
    low, high, last = min(sharded + single), max(sharded + single), len(single) - 1
    room = 0.06 * (high - low)
    plot = sketch.panel(0.09, 0.18, 0.89, 0.76, x=(-0.04 * last, 1.04 * last), y=(low - room, high + room))
    curves = (
        ("one process, plain Adam", single, "#BBBBBB", 7),
        (f"stage {stage}, sharded", sharded, CATEGORY_COLOURS["params"], 1.6),
    )
    for row, (name, losses, colour, width) in enumerate(curves):
        plot.line(enumerate(losses), colour=colour, width=width)
        height = 0.87 - 0.095 * row
        sketch.line([(0.68, height), (0.72, height)], colour=colour, width=width)
        sketch.text(0.74, height, name)
    plot.x_axis(sorted({round(step) for step in nice(0, last)}), per)
    plot.y_axis(nice(low, high, 6), "loss (nats per byte)")
    same = "lie exactly on top of each other" if sharded == single else "part"
    return f"Loss of each {per} at stage {stage} and in one process with plain Adam: the two curves {same}."

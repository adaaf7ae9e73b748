"""Lesson 05's drawings of measured numbers: gradients held during backward, and what accumulation costs."""

from typing import NamedTuple

from matplotlib.figure import Figure

from zerolab.course.look import CATEGORY_COLOURS, INK

MB = 1e6
Held = list[tuple[str, float]]
"""What a census found each time a parameter's gradient was complete: its name, bytes of gradients."""


class Cost(NamedTuple):
    """What one step cost: bytes in and out in the paper's count, and the most gradient bytes held at once."""

    traffic_bytes: float
    peak_bytes: float


WAYS = ("stage 1, no_sync", "stage 2", "stage 2, no_sync")


def gradients_over_time(figure: Figure, stage_1: Held, stage_2: dict[int, Held], in_flight: int = 1) -> str:
    """Bytes of gradients held after each event of one backward pass, at stage 1 and at stage 2."""
    axes = figure.add_axes((0.09, 0.24, 0.89, 0.6))
    events = range(len(stage_1))
    tallest = max(held for _, held in stage_1)
    two = stage_2[in_flight]
    grey, orange = "#999999", CATEGORY_COLOURS["grads"]
    axes.fill_between(
        events, [held / MB for _, held in two], step="post", color=orange, alpha=0.3, linewidth=0
    )
    axes.step(events, [held / MB for _, held in stage_1], where="post", color=grey, linewidth=2)
    axes.step(events, [held / MB for _, held in two], where="post", color=orange, linewidth=2)
    axes.set(xlim=(0, len(stage_1) - 1), ylim=(0, tallest / MB * 1.12), ylabel="MB of gradients held")
    _mark_units(axes, [name for name, _ in stage_1])
    axes.set_xlabel("one step to the right: one more parameter's gradient is complete", labelpad=2)
    peak, kept = max(held for _, held in two), two[-1][1]
    figure.text(
        0.09, 0.93, f"stage 1: up to {tallest / MB:.2f} MB, and it stays", color="#666666", weight="bold"
    )
    label = f"stage 2: up to {peak / MB:.2f} MB, then {kept / MB:.2f} MB stay"
    figure.text(0.5, 0.93, label, color="#A86F00", weight="bold")
    return (
        f"Bytes of gradients held during one backward pass. Stage 1 climbs in stairs to {tallest / MB:.2f} "
        f"MB and stays there. Stage 2 with reduces_in_flight={in_flight} climbs and falls with every unit, "
        f"never above {peak / MB:.2f} MB, and ends at {kept / MB:.2f} MB."
    )


def _mark_units(axes, names: list[str]) -> None:
    """The stretches of the time axis that belong to one unit, in the order in which gradients came."""
    owners = [".".join(name.split(".")[:2]) if name.startswith("blocks.") else "root" for name in names]
    ticks, labels, first = [], [], 0
    for place in range(1, len(owners) + 1):
        if place == len(owners) or owners[place] != owners[first]:
            ticks.append((first + place) / 2)
            labels.append(owners[first].replace("blocks.", "block\n"))
            if place < len(owners):
                axes.axvline(place, color="#DDDDDD", linewidth=0.8, zorder=0)
            first = place
    axes.set_xticks(ticks, labels, fontsize=8.5)
    axes.tick_params(axis="x", length=0)


def accumulation(
    figure: Figure, measured: dict[tuple[str, int], Cost], psi: int, micro_batches: int = 4
) -> str:
    """Traffic and peak gradient memory of one step with several micro-batches, three ways side by side."""
    most = max(m for _, m in measured)
    panels = (
        (0.2, "traffic_bytes", "moved in one step, in units of Ψ", measured[WAYS[1], most].traffic_bytes),
        (0.64, "peak_bytes", "most gradients held, in units of Ψ", 4 * psi),
    )
    spoken = []
    for left, field, title, widest in panels:
        axes = figure.add_axes((left, 0.2, 0.33, 0.58))
        for row, way in enumerate(WAYS):
            value = getattr(measured[way, micro_batches], field) / (4 * psi)
            colour = "#999999" if row == 0 else CATEGORY_COLOURS["grads"]
            axes.barh(row, value, color=colour, height=0.6)
            axes.text(
                value, row, f" {value:.2f} Ψ" if value % 1 else f" {value:.0f} Ψ", va="center", weight="bold"
            )
            spoken.append(f"{way}: {value:.2f} Ψ {'moved' if left < 0.5 else 'held'}")
        axes.set(yticks=range(3), yticklabels=WAYS if left < 0.5 else [], ylim=(2.5, -0.5))
        axes.set(xlim=(0, widest / (4 * psi) * 1.22), xlabel=title)
        axes.tick_params(axis="y", length=0)
    title = f"One step of {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
    figure.text(0.01, 0.97, title, weight="bold", va="top")
    figure.text(0.01, 0.87, f"({_advice(measured, psi, micro_batches)})", va="top", color=INK, fontsize=9)
    return f"{title}. {'; '.join(spoken)}."


def _advice(measured: dict[tuple[str, int], Cost], psi: int, micro_batches: int) -> str:
    extra = (
        measured[WAYS[1], micro_batches].traffic_bytes - measured[WAYS[0], micro_batches].traffic_bytes
    ) / (4 * psi)
    if extra < 0.5:
        return "one micro-batch: stage 2 moves what stage 1 moves"
    return f"stage 2 moves {extra:.0f} Ψ more than stage 1, or keeps gradients whole under no_sync"

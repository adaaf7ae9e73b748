"""Lesson 05's diagram: the order of gradients and reductions in a real backward pass."""

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.figure import Figure

from zerolab.course.look import COLOURS, ink_on

Entry = tuple[str, str]  # ("gradient", "3.weight"), ("start", "3") or ("end", "3")
_LAYER_COLOURS = (COLOURS["gradients"], "#8A5A00")  # neighbours differ, all are gradients


def in_order(gradients: Iterable[tuple[float, str]], events: Iterable) -> list[Entry]:
    """The events of a backward pass in order, without times: gradients, and collectives that start or end.

    `gradients` are (time, parameter name), `events` those of a trace.
    """
    moments = [(time, ("gradient", name)) for time, name in gradients]
    for event in events:
        moments += [(event.start, ("start", event.unit)), (event.end, ("end", event.unit))]
    return [entry for _, entry in sorted(moments)]


def timeline(fig: Figure, runs: Mapping[str, Sequence[Entry]]) -> str:
    """For each run a lane of gradients and two of reductions; each column is one event, in order."""
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
            title=title, yticks=[0.5, 2], yticklabels=["reduction", "gradient of\nweight, bias"], xticks=[]
        )
        spoken.append(f"{title}: {', '.join(f'{kind} {name}' for kind, name in entries)}")
    return f"The order of events in one backward pass. {'. '.join(spoken)}."


def _draw(lanes, row: int, span: tuple[float, float], words: str, layer: int) -> None:
    start, stop = span
    colour = _LAYER_COLOURS[layer % 2]
    lanes.barh(row, stop - start, left=start, height=0.85, color=colour)
    lanes.text((start + stop) / 2, row, words, ha="center", va="center", size=8, color=ink_on(colour))

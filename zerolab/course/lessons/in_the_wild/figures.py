"""Lesson 08's diagram: which shard each GPU of two nodes holds, under stage 3 and under hybrid sharding."""

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zerolab.course.look import INK, PAPER, QUIET, ink_on, rank_colour

NODES, GPUS_PER_NODE = 2, 4


def topology(fig: Figure) -> str:
    """Two nodes of four GPUs, twice: shards of all eight, and shards of each node."""
    gpus = NODES * GPUS_PER_NODE
    kinds = {"stage 3: an eighth each": gpus, "hybrid: a quarter each, twice": GPUS_PER_NODE}
    for ax, (title, parts) in zip(fig.subplots(2), kinds.items(), strict=True):
        ax.set(xlim=(-0.7, 8.7), ylim=(-0.62, 0.98), xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        ax.set_title(title)
        for node in range(NODES):
            _node(ax, node, parts)
        ax.plot([3.65, 4.35], [0, 0], color=INK, linestyle=":", linewidth=2, marker="")
    fig.text(0.5, 0.015, "thick line: NVLink, in a node · dots: Ethernet, between nodes", ha="center", size=9)
    return (
        f"Two nodes of {GPUS_PER_NODE} GPUs. At stage 3 the {gpus} GPUs hold shards 0 to {gpus - 1}, so "
        "every gather crosses the Ethernet between the nodes. With hybrid sharding each node holds shards 0 "
        f"to {GPUS_PER_NODE - 1}: gathers stay inside a node, and equal shards are all-reduced between nodes."
    )


def _node(ax, node: int, parts: int) -> None:
    start = 5 * node
    ax.add_patch(Rectangle((start - 0.6, -0.58), 4.2, 1.16, facecolor=PAPER, edgecolor=QUIET, linewidth=1))
    ax.text(start - 0.55, 0.64, f"node {node}", size=9, color=QUIET)
    ax.plot([start, start + 3], [0, 0], color=INK, linewidth=4, marker="")
    for place in range(GPUS_PER_NODE):
        shard = (GPUS_PER_NODE * node + place) % parts
        colour = rank_colour(shard)
        ax.add_patch(Rectangle((start + place - 0.4, -0.4), 0.8, 0.8, facecolor=colour, zorder=3))
        words = {"ha": "center", "va": "center", "size": 10, "zorder": 4}
        ax.text(start + place, 0, f"{shard}", color=ink_on(colour), **words)

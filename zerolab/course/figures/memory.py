"""Lesson 01's drawings: sixteen bytes, the four stages, and what fills a GPU besides the model states."""

from matplotlib.figure import Figure

from zerolab import memory
from zerolab.course.look import CATEGORY_COLOURS, INK

NAMES = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer state"}
STAGE_NAMES = ("data parallel", "stage 1", "stage 2", "stage 3")


def sixteen_bytes(figure: Figure) -> str:
    """One parameter's bytes under the paper's convention, a box a byte."""
    axes = figure.add_axes((0.01, 0.02, 0.98, 0.96))
    blocks = (
        ("bf16\nparameter", 2, "params"),
        ("bf16\ngradient", 2, "grads"),
        ("fp32 master\nparameter", 4, "optimizer"),
        ("fp32 m\n(mean)", 4, "optimizer"),
        ("fp32 v\n(mean square)", 4, "optimizer"),
    )
    left = 0.0
    for label, width, category in blocks:
        for byte in range(width):
            axes.barh(0, 0.94, left=left + byte, color=CATEGORY_COLOURS[category], height=0.8)
        axes.text(left + width / 2 - 0.03, -0.62, f"{label}\n{width} bytes", ha="center", va="top")
        left += width + 0.35
    axes.text(
        4.7, 0.62, "the optimizer's own: K = 12 bytes", color=CATEGORY_COLOURS["optimizer"], weight="bold"
    )
    axes.set(xlim=(-0.3, left), ylim=(-1.9, 1.1))
    axes.axis("off")
    return (
        "The 16 bytes of one parameter: 2 for the bf16 parameter, 2 for its bf16 gradient, and 12 for the "
        "optimizer: an fp32 master copy, Adam's m and Adam's v, 4 bytes each."
    )


def stage_bars(
    figure: Figure,
    model: float = 7.5e9,
    gpus: int = 64,
    stage: int | None = None,
    precision: str = "mixed",
    gpu_memory_gb: float = 32,
) -> str:
    """Bytes on each GPU at the four stages; a given `stage` stands out, beside one GPU's memory."""
    axes = figure.add_axes((0.14, 0.17, 0.84, 0.62))
    totals = []
    for row in range(4):
        states = memory.model_states(model, gpus, row, precision)
        totals.append(states.total_bytes / 1e9)
        left, faint = 0.0, stage is not None and row != stage
        for category in NAMES:
            width = getattr(states, f"{category}_bytes") / 1e9
            axes.barh(row, width, left=left, color=CATEGORY_COLOURS[category], alpha=0.25 if faint else 1.0)
            left += width
        axes.annotate(
            memory.format_bytes(states.total_bytes),
            (left, row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            weight="normal" if faint else "bold",
            bbox={"facecolor": "white", "linewidth": 0, "pad": 1},
        )
    axes.set(yticks=range(4), yticklabels=STAGE_NAMES, xlim=(0, totals[0] * 1.16), ylim=(3.6, -0.6))
    axes.set_xlabel("GB on each GPU (1 GB = 10⁹ bytes)")
    if in_sight := gpu_memory_gb < totals[0] * 1.16:
        axes.axvline(gpu_memory_gb, color=INK, linestyle=(0, (4, 3)), linewidth=1)
    _legend(figure)
    title = _headline(model, gpus, stage, totals, gpu_memory_gb) + (" (dashed)" if in_sight else "")
    figure.text(0.01, 0.97, title, weight="bold", va="top")
    listed = ", ".join(f"{name} {total:.3g}" for name, total in zip(STAGE_NAMES, totals, strict=True))
    return f"{title}. GB on each GPU, precision {precision}: {listed}."


def _headline(model: float, gpus: int, stage: int | None, totals: list[float], gpu_memory_gb: float) -> str:
    where = f"{_size(model)} parameters on {gpus} GPU{'s' if gpus > 1 else ''}"
    if stage is None:
        return f"{where}, beside {gpu_memory_gb:g} GB of GPU memory"
    difference = totals[stage] - gpu_memory_gb
    verdict = "less than" if difference < 0 else "more than" if difference > 0 else "exactly"
    return f"{where}, {STAGE_NAMES[stage]}: {totals[stage]:.3g} GB each, {verdict} {gpu_memory_gb:g} GB"


def _legend(figure: Figure) -> None:
    for left, (category, name) in zip((0.14, 0.32, 0.49), NAMES.items(), strict=True):
        figure.text(left, 0.82, f"■ {name}", color=CATEGORY_COLOURS[category], weight="bold")


def _size(psi: float) -> str:
    return f"{psi / 1e12:g}T" if psi >= 1e12 else f"{psi / 1e9:g}B"


def per_gpu_curves(figure: Figure, model: float = 7.5e9, precision: str = "mixed") -> str:
    """GB on each GPU against the number of GPUs: what shrinks with N, and the floor of what does not."""
    axes = figure.add_axes((0.09, 0.17, 0.69, 0.79))
    counts = [2**power for power in range(11)]
    shades = (INK, CATEGORY_COLOURS["optimizer"], CATEGORY_COLOURS["grads"], CATEGORY_COLOURS["params"])
    ends = []
    for stage, (shade, marker) in enumerate(zip(shades, "xos^", strict=True)):
        sizes = [memory.model_states(model, n, stage, precision).total_bytes / 1e9 for n in counts]
        ends.append(f"{STAGE_NAMES[stage]}: {sizes[-1]:.3g}")
        axes.plot(counts, sizes, color=shade, marker=marker, markersize=4)
        axes.text(1250, sizes[-1], ends[-1], color=shade, va="center", weight="bold")
    axes.set(xscale="log", yscale="log", xlabel="number of GPUs", ylabel="GB on each GPU")
    axes.set_xticks(counts[::2], [str(count) for count in counts[::2]])
    powers = [power for power in (0.1, 1, 10, 100, 1000, 10_000) if power <= 16 * model / 1e9]
    axes.set_yticks(powers, [f"{power:g}" for power in powers])
    axes.minorticks_off()
    return (
        f"GB per GPU against GPU count, 1 to 1024, for {_size(model)} parameters. At 1024 GPUs: "
        f"{', '.join(ends)}. Stages 1 and 2 flatten out; stage 3 keeps falling."
    )


def states_and_activations(figure: Figure, batch: int = 32, checkpointing: bool = False) -> str:
    """GPT-2 1.5B on one GPU: 24 GB that depend on the model, and activations that depend on the batch."""
    axes = figure.add_axes((0.02, 0.3, 0.96, 0.4))
    states = memory.model_states(1.5e9, 1, 0)
    kept = memory.activations(48, 1600, batch, 1024, checkpointing=checkpointing)
    sizes = {name: getattr(states, f"{name}_bytes") / 1e9 for name in NAMES} | {"activations": kept / 1e9}
    listed = [f"{NAMES.get(category, category)} {size:.3g} GB" for category, size in sizes.items()]
    left = 0.0
    for place, text, (category, size) in zip((0.02, 0.23, 0.43, 0.7), listed, sizes.items(), strict=True):
        axes.barh(0, size, left=left, color=CATEGORY_COLOURS[category])
        figure.text(place, 0.76, f"■ {text}", color=CATEGORY_COLOURS[category], weight="bold")
        left += size
    axes.axvline(32, color=INK, linestyle=(0, (4, 3)), linewidth=1)
    axes.text(32, 0.47, " 32 GB", va="top", color=INK)
    axes.set(yticks=[], xlim=(0, max(100, left * 1.02)), ylim=(-0.5, 0.5), xlabel="GB on one GPU")
    axes.spines["left"].set_visible(False)
    how = "with checkpointing" if checkpointing else "all kept"
    title = f"GPT-2 1.5B on one GPU, batch {batch} × 1024 tokens, activations {how}: {left:.3g} GB"
    figure.text(0.02, 0.97, title, weight="bold", va="top")
    return f"{title}, of which {', '.join(listed)}; the dashed line is one GPU of 32 GB."

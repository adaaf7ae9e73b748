"""Lesson 01's drawings: sixteen bytes, the four stages, and what fills a GPU besides the model states."""

from zerolab import memory
from zerolab.course.figures import NAMES, key, sizes_of, stacked
from zerolab.course.look import CATEGORY_COLOURS
from zerolab.course.sketch import INK, Sketch, nice, powers_of_ten

STAGE_NAMES = ("data parallel", "stage 1", "stage 2", "stage 3")
GPU_GB = 32


def sixteen_bytes(sketch: Sketch) -> str:
    """One parameter's bytes in the paper's mixed precision, a box for each byte."""
    blocks = (
        ("bf16\nparameter", 2, "params"),
        ("bf16\ngradient", 2, "grads"),
        ("fp32 master\nparameter", 4, "optimizer"),
        ("fp32 m\n(mean)", 4, "optimizer"),
        ("fp32 v\n(mean square)", 4, "optimizer"),
    )
    boxes = sketch.panel(0.01, 0.02, 0.98, 0.96, x=(-0.3, 17.75), y=(-1.9, 1.1))
    left = 0.0
    for label, width, category in blocks:
        for byte in range(width):
            boxes.rect(left + byte, -0.4, 0.94, 0.8, CATEGORY_COLOURS[category])
        words = f"{label}\n{width} bytes"
        boxes.text(left + width / 2 - 0.03, -0.62, words, align="middle", vertical="top")
        left += width + 0.35
    title = "the optimizer's own: K = 12 bytes"
    boxes.text(4.7, 0.74, title, colour=CATEGORY_COLOURS["optimizer"], bold=True)
    return (
        "The 16 bytes of one parameter: 2 for the bf16 parameter, 2 for its bf16 gradient, and 12 for the "
        "optimizer: an fp32 master copy, Adam's m and Adam's v, 4 bytes each."
    )


def stage_bars(
    sketch: Sketch, model: float = 7.5e9, gpus: int = 64, stage: int | None = None, precision: str = "mixed"
) -> str:
    """Bytes on each GPU at the four stages, beside one GPU's memory. A given `stage` stands out."""
    rows = [memory.model_states(model, gpus, row, precision) for row in range(4)]
    totals = [states.total_bytes / 1e9 for states in rows]
    widest = totals[0] * 1.16
    bars = sketch.panel(0.14, 0.17, 0.84, 0.62, x=(0, widest), y=(3.6, -0.6))
    for row, states in enumerate(rows):
        stacked(bars, row, sizes_of(states, 1e9), opacity=1.0 if stage in (None, row) else 0.25)
    if in_sight := widest > GPU_GB:
        bars.line([(GPU_GB, -0.6), (GPU_GB, 3.6)], dash="4 3")
    for row, states in enumerate(rows):
        words, bold = memory.format_bytes(states.total_bytes), stage in (None, row)
        bars.text(totals[row], row, words, bold=bold, shift=(6, 0), halo=True)
    bars.y_axis(dict(enumerate(STAGE_NAMES)))
    bars.x_axis(nice(0, widest), "GB on each GPU (1 GB = 10⁹ bytes)")
    key(sketch, 0.84, (0.14, 0.32, 0.49))
    title = _headline(model, gpus, stage, totals) + (" (dashed)" if in_sight else "")
    sketch.text(0.01, 0.97, title, bold=True, vertical="top")
    listed = ", ".join(f"{name} {total:.3g}" for name, total in zip(STAGE_NAMES, totals, strict=True))
    return f"{title}. GB on each GPU, precision {precision}: {listed}."


def _headline(model: float, gpus: int, stage: int | None, totals: list[float]) -> str:
    where = f"{_size(model)} parameters on {gpus} GPU{'s' if gpus > 1 else ''}"
    if stage is None:
        return f"{where}, beside {GPU_GB} GB of GPU memory"
    difference = totals[stage] - GPU_GB
    verdict = "less than" if difference < 0 else "more than" if difference > 0 else "exactly"
    return f"{where}, {STAGE_NAMES[stage]}: {totals[stage]:.3g} GB each, {verdict} {GPU_GB} GB"


def _size(psi: float) -> str:
    return f"{psi / 1e12:g}T" if psi >= 1e12 else f"{psi / 1e9:g}B"


def per_gpu_curves(sketch: Sketch, model: float = 7.5e9) -> str:
    """GB on each GPU against the number of GPUs, at each stage."""
    counts, ends = [2**power for power in range(11)], []
    totals = lambda stage: [memory.model_states(model, n, stage).total_bytes / 1e9 for n in counts]
    low, high = totals(3)[-1] / 1.4, totals(0)[0] * 1.5
    plot = sketch.panel(0.09, 0.17, 0.69, 0.79, x=(0.7, 1460), y=(low, high), log=True)
    shades = (INK, *(CATEGORY_COLOURS[category] for category in ("optimizer", "grads", "params")))
    signs = ("cross", "circle", "square", "triangle")
    for stage, (name, shade, sign) in enumerate(zip(STAGE_NAMES, shades, signs, strict=True)):
        points = list(zip(counts, totals(stage), strict=True))
        plot.line(points, colour=shade, width=1.5)
        plot.marks(points, shade, sign)
        ends.append(f"{name}: {points[-1][1]:.3g}")
        plot.text(1250, points[-1][1], ends[-1], colour=shade, bold=True)
    plot.x_axis({count: str(count) for count in counts[::2]}, "number of GPUs")
    plot.y_axis(powers_of_ten(low, high), "GB on each GPU")
    return (
        f"GB per GPU against the number of GPUs, 1 to 1024, for {_size(model)} parameters. At 1024 GPUs: "
        f"{', '.join(ends)}. Stages 1 and 2 stop falling; stage 3 keeps falling."
    )


def states_and_activations(sketch: Sketch, batch: int = 32, checkpointing: bool = False) -> str:
    """GPT-2 1.5B on one GPU: 24 GB that depend on the model, and activations that depend on the batch."""
    kept = memory.activations(48, 1600, batch, 1024, checkpointing=checkpointing)
    sizes = sizes_of(memory.model_states(1.5e9, 1, 0), 1e9) | {"activations": kept / 1e9}
    total = sum(sizes.values())
    bar = sketch.panel(0.02, 0.3, 0.96, 0.36, x=(0, max(100, total * 1.02)), y=(-0.5, 0.5))
    stacked(bar, 0, sizes)
    bar.line([(GPU_GB, -0.5), (GPU_GB, 0.5)], dash="4 3")
    bar.text(GPU_GB, 0.5, f"{GPU_GB} GB", vertical="bottom", align="middle", size=9)
    bar.x_axis(nice(0, max(100, total)), "GB on one GPU")
    listed = {category: f"{NAMES.get(category, category)} {size:.3g} GB" for category, size in sizes.items()}
    key(sketch, 0.8, (0.02, 0.23, 0.43, 0.7), listed)
    how = "with checkpointing" if checkpointing else "all kept"
    title = f"GPT-2 1.5B on one GPU, batch {batch} × 1024 tokens, activations {how}: {total:.3g} GB"
    sketch.text(0.02, 0.97, title, bold=True, vertical="top")
    return f"{title}, of which {', '.join(listed.values())}; the dashed line is one GPU of {GPU_GB} GB."

"""Print the question in words, a table with a column for each stage, and what follows from it."""

import argparse
import math
import textwrap
from collections.abc import Callable

from zerolab import cost, memory
from zerolab.memory import format_bytes, format_count
from zerolab.plan.advice import advice, why_not
from zerolab.plan.flags import read_question
from zerolab.plan.question import STAGES, Question
from zerolab.plan.remarks import remarks

Row = tuple[str, list[str]]
RULE: Row = ("-" * 27, ["-" * 14] * len(STAGES))
PLACES = {"cpu": "on the CPU", "disk": "on disk"}


def heading(question: Question) -> list[str]:
    """Return the question in words, so that no assumption of the table is silent."""
    costs = memory.CONVENTIONS[question.precision]
    each = f"{costs.params_bytes} + {costs.grads_bytes} + {question.k:g} bytes per parameter"
    gpus = f"{question.gpus} x {format_bytes(question.gpu_memory_bytes)}"
    lines = [
        f"{question.model.name} with {format_count(question.model.psi)} parameters on GPUs: {gpus}",
        f"precision {question.precision}: {each} (parameter, gradient, optimizer state)",
        *_matrices(question),
    ]
    if question.micro_batches > 1:
        reduced = "stages 2 and 3 reduce every one, 0 and 1 one under no_sync()"
        lines.append(f"{question.micro_batches} micro-batches a step; {reduced}")
    lines += _axes(question)
    if question.has_shape:
        tokens = f"{question.batch} x {question.seq} tokens"
        batch = f"batch of {tokens} on each {question.batch_of} (--batch, --seq)"
        lines.append(f"{batch}, {_checkpointing(question)}")
    else:
        lines.append("activations are not counted, because the model's layers are not known")
    if question.offload_optimizer is not None:
        place = PLACES[question.offload_optimizer]
        lines.append(f"optimizer state kept {place}, and moved to the GPU and back once in each step")
    return [textwrap.fill(line, 96, subsequent_indent="  ") for line in [*lines, *_assumed(question)]]


def _matrices(question: Question) -> list[str]:
    """What ranks own whole, and how evenly."""
    matrices = question.matrices
    if matrices is None:
        return []
    times = matrices.largest_share(question.copies) * question.copies
    each = f"{len(matrices.sizes)} matrices with {format_count(matrices.psi)} parameters"
    return [
        f"{each} are Muon's, with {matrices.k:g} bytes of optimizer state; AdamW has the others. A rank owns "
        f"whole matrices from stage 1 on: the one that owns most has {times:.2f} times the mean, and is the "
        "one below"
    ]


def _axes(question: Question) -> list[str]:
    """How many GPUs share a copy, and what each has of it."""
    if question.tensor_parallel == 1:
        return []
    whole = f"{format_count(question.model.whole_psi)} of them whole, for the embedding and the head"
    part = whole if question.has_shape else "all of them cut, because the model's layers are not known"
    copies = f"{question.copies} copies of the model, {question.tensor_parallel} GPUs each"
    return [f"{copies}: {format_count(question.rank_psi)} parameters on a GPU, {part}"]


def _checkpointing(question: Question) -> str:
    if not question.checkpointing:
        return "no --checkpointing"
    if not question.keeps_each_block:
        return f"with checkpoints of {math.isqrt(question.shape[0])} blocks each (--checkpointing)"
    partitioned = f", partitioned over {question.tensor_parallel} GPUs" * question.partition_activations
    return f"a checkpoint of each block{partitioned}{', on the CPU' * question.cpu_checkpointing}"


def _assumed(question: Question) -> list[str]:
    """What the seconds of a step are computed from."""
    links = question.links
    if links is None:
        return []
    speeds = [f"{links.flops_per_second / 1e12:g} TFLOP/s on a GPU"]
    if question.copies > 1:
        speeds.append(f"{format_bytes(links.data_parallel)}/s between copies")
    if question.tensor_parallel > 1:
        speeds.append(f"{format_bytes(links.tensor_parallel)}/s within a copy")
    if question.moved_bytes(0):
        speeds.append(f"{format_bytes(links.offload)}/s out of the GPU and in")
    flops = f"{8 if question.checkpointing else 6} FLOPs per parameter and token"
    latency = f"{links.latency_seconds:g} s a message"
    return [f"seconds assume {', '.join(speeds)}, {latency}, {flops}, and that nothing overlaps"]


def table(question: Question) -> list[Row]:
    """Rows of a label and one cell for each stage, for what applies to the question."""
    states = question.states
    passes = lambda stage: f"{cost.communication_volume(1, stage, question.micro_batches)}Ψ"
    rows = [
        _row("GB on each GPU", lambda stage: f"stage {stage}"),
        _row("sharded", STAGES.__getitem__),
        RULE,
        _row("parameters", lambda stage: _gb(states(stage).params_bytes)),
        _row("gradients", lambda stage: _gb(states(stage).grads_bytes)),
        _row("optimizer state", lambda stage: _gb(states(stage).optimizer_bytes)),
        _row("= model states", lambda stage: _gb(states(stage).total_bytes)),
        *_activations(question),
        _row("fits", lambda stage: "yes" if question.fits(stage) else "NO"),
        _row("to spare, or missing (-)", lambda stage: _gb(question.spare_bytes(stage))),
        *_outside(question),
        RULE,
    ]
    if question.has_shape:
        rows.append(_row("largest batch that fits", lambda stage: str(question.largest_batch(stage))))
    rows += [
        _row("largest model, states alone", lambda stage: format_count(question.largest_model(stage))),
        _row("GB each GPU sends per step", lambda stage: _gb(question.sent_bytes(stage))),
        _row("elements, the paper's count", passes),
    ]
    if question.tensor_parallel > 1 and question.has_shape:
        rows.append(_row("GB sent within the copy", lambda _: _gb(question.tensor_parallel_sent_bytes)))
    return [*rows, *_seconds(question)]


def _row(label: str, cell: Callable[[int], str]) -> Row:
    return label, [cell(stage) for stage in STAGES]


def _activations(question: Question) -> list[Row]:
    if not question.has_shape:
        return []
    rows = [_row("activations (estimate)", lambda _: _gb(question.activation_bytes))]
    if question.keeps_each_block:
        rows = [
            _row("activation checkpoints", lambda _: _gb(question.checkpoints.device_bytes)),
            _row("one block (estimate)", lambda _: _gb(question.block_bytes)),
        ]
    return [*rows, _row("= total", lambda stage: _gb(question.total_bytes(stage)))]


def _outside(question: Question) -> list[Row]:
    """What is kept outside the GPU."""
    rows = []
    if question.cpu_checkpointing:
        rows.append(_row("checkpoints on the CPU", lambda _: _gb(question.checkpoints.outside_bytes)))
    if question.offload_optimizer is not None:
        label = f"optimizer state {PLACES[question.offload_optimizer]}"
        rows.append(_row(label, lambda stage: _gb(question.placed_states(stage)[1])))
    if rows:
        rows.append(_row("GB out of it and in, a step", lambda stage: _gb(question.moved_bytes(stage))))
        rows.insert(0, RULE)
    return rows


def _seconds(question: Question) -> list[Row]:
    if question.links is None:
        return []
    of = question.time
    rows = [RULE, _row("seconds of computation", lambda stage: _digits(of(stage).computation))]
    if question.copies > 1:
        rows.append(_row("of ZeRO's messages", lambda stage: _digits(of(stage).data_parallel)))
    if question.tensor_parallel > 1:
        rows.append(_row("of messages within the copy", lambda stage: _digits(of(stage).tensor_parallel)))
    if question.moved_bytes(0):
        rows.append(_row("of moving out and in", lambda stage: _digits(of(stage).offload)))
    rows.append(_row("= a step", lambda stage: _digits(of(stage).total)))
    return [*rows, _row("TFLOP/s of each GPU", lambda stage: _digits(of(stage).flops_per_second / 1e12))]


def _simulated(question: Question) -> Row:
    """The seconds of a step as the engine issues it. Raises: ValueError without torch."""
    try:
        from zerolab.plan.simulated import seconds_of_steps  # the rest of a plan needs no torch
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--seconds rehearses the engine, and {error.name} is not installed here: run ./zero plan, which "
            "sets it up, or leave out --seconds"
        ) from error
    seconds = seconds_of_steps(question)
    return _row("a step, simulated", lambda stage: _digits(seconds[stage]))


def run(args: argparse.Namespace) -> int:
    """Print the question, the table, and what follows from it."""
    question = read_question(args)
    rows = table(question)
    if args.seconds:
        rows.append(_simulated(question))
    lines = [f"{label:27}" + "".join(f" {cell:>13}" for cell in cells) for label, cells in rows]
    sentences = [*why_not(question), *advice(question), *remarks(question, args.seconds)]
    wrapped = [textwrap.fill(sentence, 96, subsequent_indent="  ") for sentence in sentences]
    print(*heading(question), "", *lines, "", *wrapped, sep="\n")
    return 0


def _gb(n: float) -> str:
    """Gigabytes in a cell of 13 characters: with an exponent where they would not fit."""
    size = abs(n)
    digits = format_bytes(size).removesuffix(" GB") if not size or 1e4 <= size < 1e18 else f"{size / 1e9:.3g}"
    return "-" * (n < 0) + digits


def _digits(n: float) -> str:
    return f"{n:.0f}" if n >= 100 else f"{n:#.3g}"

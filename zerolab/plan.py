"""``python -m zerolab plan``: what fits on your GPUs at each ZeRO stage, by how much, and why not.

The accounting is `zerolab.memory` and `zerolab.cost`. This module prints a table with a column for each
stage, and summarizes it in a few sentences.
"""

import argparse
import textwrap
from dataclasses import dataclass, replace

from zerolab import cost, memory, presets
from zerolab.memory import format_bytes, format_count

STAGES = {0: "nothing", 1: "optimizer", 2: "+ gradients", 3: "+ parameters"}  # and what each one shards
RULE = ("-" * 27, ["-" * 14] * len(STAGES))
NOT_COUNTED = "Not counted: the CUDA context, fragmentation, buffers; keep a few GB free. 1 GB is 1e9 bytes."


@dataclass(frozen=True)
class Question:
    """What is to be trained, on what, and how."""

    model: presets.Model
    gpus: int
    gpu_memory_bytes: float
    precision: str
    k: float
    micro_batches: int
    batch: int
    seq: int
    checkpointing: bool

    @property
    def has_shape(self) -> bool:
        """Whether the model's layers are known, and with them its activations."""
        return self.model.layers is not None

    @property
    def element_bytes(self) -> int:
        """Activations and messages are as wide as the parameters."""
        return memory.CONVENTIONS[self.precision].params_bytes

    @property
    def sequence_bytes(self) -> int:
        """Activations of one sequence; a batch costs that many times it."""
        if self.model.layers is None or self.model.hidden is None:
            return 0
        shape = (self.model.layers, self.model.hidden, 1, self.seq)
        return memory.activations(*shape, self.checkpointing, bytes_per_element=self.element_bytes)

    @property
    def activation_bytes(self) -> int:
        return self.sequence_bytes * self.batch

    def states(self, stage: int) -> memory.ModelStates:
        return memory.model_states(self.model.psi, self.gpus, stage, self.precision, self.k)

    def total_bytes(self, stage: int) -> float:
        return self.states(stage).total_bytes + self.activation_bytes

    def spare_bytes(self, stage: int) -> float:
        """Memory left over; below 0 it is what is missing."""
        return self.gpu_memory_bytes - self.total_bytes(stage)

    def fits(self, stage: int) -> bool:
        return self.spare_bytes(stage) >= 0

    def smallest_stage(self) -> int | None:
        return next(filter(self.fits, STAGES), None)

    def largest_batch(self, stage: int) -> int:
        return max(0, int((self.gpu_memory_bytes - self.states(stage).total_bytes) // self.sequence_bytes))

    def largest_model(self, stage: int) -> int:
        return memory.largest_model(self.gpu_memory_bytes, self.gpus, stage, self.precision, self.k)

    def gpus_needed(self, stage: int) -> int | None:
        room = max(0, self.gpu_memory_bytes - self.activation_bytes)
        return memory.smallest_world_size(self.model.psi, room, stage, self.precision, self.k)

    def sent_bytes(self, stage: int) -> float:
        payload = cost.communication_volume(self.model.psi, stage, self.micro_batches) * self.element_bytes
        return cost.wire_bytes(payload, self.gpus, "all_gather")  # each pass sends (N-1)/N of it, either kind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command; one of --model and --psi is needed, one of --gpu and --gpu-memory too."""
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--model", metavar="NAME", help=f"one of {', '.join(presets.MODELS)}")
    size.add_argument("--psi", metavar="COUNT", help="or a number of parameters, such as 7.5B or 350M")
    parser.add_argument(
        "--gpus", type=int, required=True, metavar="N", help="number of GPUs, one rank on each"
    )
    room = parser.add_mutually_exclusive_group(required=True)
    room.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(presets.MACHINES)}")
    room.add_argument("--gpu-memory", metavar="SIZE", help="or its memory: 32GB (32e9 bytes) or 32GiB")
    parser.add_argument("--precision", default="mixed", metavar="NAME", help=" | ".join(memory.CONVENTIONS))
    state = parser.add_mutually_exclusive_group()
    optimizers = " | ".join(memory.OPTIMIZER_MOMENTS)
    state.add_argument("--optimizer", default="adam", metavar="NAME", help=optimizers)
    state.add_argument("--k", type=float, metavar="BYTES", help="or bytes of optimizer state per parameter")
    parser.add_argument(
        "--batch", type=int, default=32, metavar="B", help="sequences per GPU and micro-batch"
    )
    parser.add_argument("--seq", type=int, default=1024, metavar="T", help="tokens per sequence")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--micro-batches", type=int, default=1, metavar="M", help="accumulated in one step")


def read_question(args: argparse.Namespace) -> Question:
    """Return the question that a command line asks, its names looked up and its sizes read."""
    for option in ("gpus", "batch", "seq", "micro_batches"):
        if (value := getattr(args, option)) < 1:
            raise ValueError(f"--{option.replace('_', '-')} is {value}; it must be 1 or more")
    if args.gpu is not None:
        gpu_memory_bytes: float = presets.machine(args.gpu).memory_bytes
    elif (gpu_memory_bytes := memory.parse_bytes(args.gpu_memory)) < 1e6:
        size = f"{args.gpu_memory}, which is {gpu_memory_bytes:g} bytes"
        raise ValueError(f"--gpu-memory is {size}; write its unit, such as 32GB")
    k = memory.optimizer_bytes_per_parameter(args.optimizer, args.precision) if args.k is None else args.k
    return Question(
        model=_read_model(args),
        gpus=args.gpus,
        gpu_memory_bytes=gpu_memory_bytes,
        precision=args.precision,
        k=k,
        micro_batches=args.micro_batches,
        batch=args.batch,
        seq=args.seq,
        checkpointing=args.checkpointing,
    )


def _read_model(args: argparse.Namespace) -> presets.Model:
    if args.model is not None:
        return presets.model(args.model)
    if (psi := memory.parse_count(args.psi)) < 1:
        raise ValueError(f"--psi is {args.psi}; it must be at least 1 parameter, such as 7.5B")
    return presets.Model("a model", psi, None, None, None, None, "--psi")


def heading(question: Question) -> list[str]:
    """Return the question in words, so that no assumption of the table is silent."""
    costs = memory.CONVENTIONS[question.precision]
    each = f"{costs.params_bytes} + {costs.grads_bytes} + {question.k:g} bytes per parameter"
    gpus = f"{question.gpus} x {format_bytes(question.gpu_memory_bytes)}"
    lines = [
        f"{question.model.name} with {format_count(question.model.psi)} parameters on GPUs: {gpus}",
        f"precision {question.precision}: {each} (parameter, gradient, optimizer state)",
    ]
    if question.micro_batches > 1:
        reduced = "stages 2 and 3 reduce every one, 0 and 1 one under no_sync()"
        lines.append(f"{question.micro_batches} micro-batches a step; {reduced}")
    if not question.has_shape:
        return [*lines, "activations are not counted, because the model's layers are not known"]
    checkpointing = "with checkpointing" if question.checkpointing else "no --checkpointing"
    batch = f"batch of {question.batch} x {question.seq} tokens on each GPU (--batch, --seq)"
    return [*lines, f"{batch}, {checkpointing}"]


def table(question: Question) -> list[tuple[str, list[str]]]:
    """Rows of a label and one cell for each stage; those on activations only where the shape is known."""
    needs_shape = ("activations (estimate)", "= total", "largest batch that fits")
    shown = lambda label: question.has_shape or label not in needs_shape
    row = lambda label, cell: (label, [str(cell(stage)) for stage in STAGES] if shown(label) else [])
    states = question.states
    passes = lambda stage: f"{cost.communication_volume(1, stage, question.micro_batches)}Ψ"
    rows = [
        row("GB on each GPU", lambda stage: f"stage {stage}"),
        row("sharded", STAGES.get),
        RULE,
        row("parameters", lambda stage: _gb(states(stage).params_bytes)),
        row("gradients", lambda stage: _gb(states(stage).grads_bytes)),
        row("optimizer state", lambda stage: _gb(states(stage).optimizer_bytes)),
        row("= model states", lambda stage: _gb(states(stage).total_bytes)),
        row("activations (estimate)", lambda stage: _gb(question.activation_bytes)),
        row("= total", lambda stage: _gb(question.total_bytes(stage))),
        row("fits", lambda stage: "yes" if question.fits(stage) else "NO"),
        row("to spare, or missing (-)", lambda stage: _gb(question.spare_bytes(stage))),
        RULE,
        row("largest batch that fits", question.largest_batch),
        row("largest model, states alone", lambda stage: format_count(question.largest_model(stage))),
        row("GB each GPU sends per step", lambda stage: _gb(question.sent_bytes(stage))),
        row("elements, the paper's count", passes),
    ]
    return [row for row in rows if row[1]]


def why_not(question: Question) -> list[str]:
    """For stages that do not fit, the one cause that decides whether more GPUs would help."""
    stages_by_cause: dict[str, list[int]] = {}
    for stage in STAGES:
        if not question.fits(stage):
            stages_by_cause.setdefault(_cause(question, stage), []).append(stage)
    listed = lambda stages: ", ".join(map(str, stages))
    return [f"Does not fit at stage {listed(stages)}: {cause}." for cause, stages in stages_by_cause.items()]


def _cause(question: Question, stage: int) -> str:
    activations = format_bytes(question.activation_bytes)
    if question.activation_bytes >= question.gpu_memory_bytes:
        return f"activations alone take {activations}, and no stage shards them"
    gpus = question.gpus_needed(stage)
    if gpus is not None:
        return f"it takes {gpus} GPUs"
    replicated = memory.bytes_per_parameter(stage, question.precision, question.k)[0] * question.model.psi
    beside = f" beside {activations} of activations" if question.has_shape else ""
    return f"every GPU keeps {format_bytes(replicated)} of states whole{beside}; more GPUs cannot help"


def advice(question: Question) -> list[str]:
    """The smallest stage that fits and what the next ones would add, or else what would make one fit."""
    stage = question.smallest_stage()
    if stage is None:
        return ["No stage fits on these GPUs.", *_ways_out(question)]
    spare = format_bytes(question.spare_bytes(stage))
    sentences = [f"Stage {stage} is the smallest that fits, with {spare} to spare."]
    if not question.has_shape:
        return [*sentences, "Activations have to fit into that too."]
    if question.largest_batch(3) > question.largest_batch(stage):
        batches = f"a batch of {question.largest_batch(3)} instead of {question.largest_batch(stage)}"
        sentences.append(f"Stage 3 would make room for {batches} per GPU, for more traffic.")
    return sentences


def _ways_out(question: Question) -> list[str]:
    """Return what would make a stage fit, the cheapest first."""
    ways, recomputed = [], replace(question, checkpointing=question.has_shape)
    if (stage := recomputed.smallest_stage()) is not None:
        now, then = format_bytes(question.activation_bytes), format_bytes(recomputed.activation_bytes)
        ways.append(f"With --checkpointing activations take {then} instead of {now}, and stage {stage} fits.")
    if question.has_shape and (batch := question.largest_batch(3)):
        ways.append(f"Stage 3 fits with a batch of {batch} per GPU.")
    if gpus := question.gpus_needed(3):
        ways.append(f"With {gpus} GPUs stage 3 fits.")
    elif not ways and (gpus := recomputed.gpus_needed(3)):
        ways.append(f"With --checkpointing and {gpus} GPUs stage 3 fits.")
    return ways or ["More GPUs alone will not do: take a smaller batch, larger GPUs, or model parallelism."]


def run(args: argparse.Namespace) -> int:
    """Print the question, the table, and what follows from it."""
    question = read_question(args)
    lines = [f"{label:27}" + "".join(f"{cell:>14}" for cell in cells) for label, cells in table(question)]
    sentences = [*why_not(question), *advice(question), NOT_COUNTED]
    wrapped = [textwrap.fill(sentence, 96, subsequent_indent="  ") for sentence in sentences]
    print(*heading(question), "", *lines, "", *wrapped, sep="\n")
    return 0


def _gb(n: float) -> str:
    return "-" * (n < 0) + format_bytes(abs(n), "GB").removesuffix(" GB")

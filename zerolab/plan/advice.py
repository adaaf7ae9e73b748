"""Why a stage does not fit, which one does, and what would make one fit."""

from collections.abc import Iterator
from dataclasses import replace

from zerolab import memory
from zerolab.memory import format_bytes
from zerolab.plan.question import STAGES, Question


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
    replicated = memory.bytes_per_parameter(stage, question.precision, question.device_k)[0]
    replicated *= question.rank_psi
    beside = f" beside {activations} of activations" if question.has_shape else ""
    if question.matrices is not None and stage >= 1:
        largest = memory.bytes_per_parameter(stage, question.precision, question.matrices.k)[1]
        largest *= max(question.matrices.sizes)
        beside = f", and the owner of the largest matrix {format_bytes(largest)} more{beside}"
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
        sentences.append(f"Stage 3 would make room for {batches} per {question.batch_of}, for more traffic.")
    return sentences


def _ways_out(question: Question) -> list[str]:
    """Return what would make a stage fit, the cheapest first."""
    ways, recomputed = [], replace(question, checkpointing=question.has_shape)
    for flag, fewer in _with_fewer_activations(recomputed):
        if (stage := fewer.smallest_stage()) is not None:
            now, then = format_bytes(question.activation_bytes), format_bytes(fewer.activation_bytes)
            ways.append(f"With {flag} activations take {then} instead of {now}, and stage {stage} fits.")
            break
    if question.has_shape and (batch := question.largest_batch(3)):
        ways.append(f"Stage 3 fits with a batch of {batch} per {question.batch_of}.")
    if gpus := question.gpus_needed(3):
        ways.append(f"With {gpus} GPUs stage 3 fits.")
    elif not ways and (gpus := recomputed.gpus_needed(3)):
        ways.append(f"With --checkpointing and {gpus} GPUs stage 3 fits.")
    if ways:
        return ways
    ranks = "model parallelism" if question.tensor_parallel == 1 else "more tensor-parallel ranks"
    return [f"More GPUs alone will not do: take a smaller batch, larger GPUs, or {ranks}."]


def _with_fewer_activations(recomputed: Question) -> Iterator[tuple[str, Question]]:
    """Ways to keep fewer activations, from the cheapest on."""
    yield "--checkpointing", recomputed
    if recomputed.tensor_parallel > 1 and recomputed.has_shape:
        partitioned = replace(recomputed, partition_activations=True)
        yield "--partition-activations", partitioned
        yield (
            "--partition-activations --cpu-checkpointing",
            replace(partitioned, cpu_checkpointing=True),
        )

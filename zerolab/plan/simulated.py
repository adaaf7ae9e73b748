"""Simulate the steps of a plan. Importing this imports torch, which the rest of the plan does without."""

from functools import partial

import torch

from zerolab import models
from zerolab.checkpointing import Checkpointing
from zerolab.plan.question import STAGES, Question
from zerolab.simulation import Cluster, play, record
from zerolab.simulation.blocks import REHEARSED, of_all_blocks
from zerolab.tensor_parallel import TensorParallel

_AT_ONCE = 1e24  # bytes a second of what a plan gives no rate for


def seconds_of_steps(question: Question) -> list[float]:
    """Return the seconds of a step at each stage, with what the engine overlaps.

    The GPUs that share a copy are taken for a node. Operators that only move memory take no time, because a
    plan gives no rate for them.
    """
    links = question.links
    assert links is not None  # as flags.py has checked
    cluster = Cluster(
        "the plan's",
        flops_per_second=links.flops_per_second,
        memory_bytes_per_second=_AT_ONCE,
        gpus_per_node=question.tensor_parallel,
        inside_bytes_per_second=links.tensor_parallel,
        between_bytes_per_second=links.data_parallel * question.tensor_parallel,
        latency_seconds=links.latency_seconds,
    )
    return [_seconds(question, stage, cluster) for stage in STAGES]


def _seconds(question: Question, stage: int, cluster: Cluster) -> float:
    blocks, width = question.shape
    found = []
    for depth in REHEARSED:
        build = partial(
            models.GPT,
            vocab=question.model.vocab,
            width=width,
            depth=depth,
            heads=question.model.heads or question.tensor_parallel,
            context=question.seq,
        )
        tokens = torch.zeros(question.batch, question.seq, dtype=torch.long, device="meta")
        step = record(
            build,
            question.gpus,
            stage,
            precision=question.precision,
            inputs=lambda tokens=tokens: (tokens, tokens),
            tensor_parallel=question.tensor_parallel,
            checkpointing=partial(_checkpoints, question) if question.checkpointing else None,
        )
        found.append(play(step, cluster, question.gpus).seconds)
    return of_all_blocks(blocks, *found)


def _checkpoints(question: Question, ranks: TensorParallel) -> Checkpointing:
    return Checkpointing(ranks if question.partition_activations else None)

"""Lesson 08's third exercise: a choice for each cluster, judged by plan, rehearsal and the α–β model."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from zerolab.course.attempts import attempt
from zerolab.course.exercise import graded
from zerolab.course.lessons.in_the_wild import clusters
from zerolab.course.lessons.in_the_wild.solution import choose

SECONDS = 60.0  # a function that searches rehearses every choice of six clusters


@graded(
    "Every choice fits, and no other one that fits is faster by more than 1 % in the model.",
    call="choose(cluster)",
    hints=(
        "begin with the smallest stage, without checkpointing, and let the check say what does not fit.",
        "checkpointing computes forward twice, a third more. Stage 3 moves Ψ more in each micro-batch, which "
        "is little inside a node and much between nodes.",
        "on the 1,024 GPUs the plan fits and the rehearsal does not: units are whole while they compute.",
    ),
    solution=[choose],
)
def check_choices(fn: Callable) -> str | None:
    """Judge fn(name) -> (stage, precision, checkpointing) for each of the six clusters."""
    outcome = attempt(_all_choices, [(fn,)], timeout=SECONDS)
    return outcome.failure or judged(outcome.values[0])


def _all_choices(fn: Callable) -> dict[str, Any]:
    """In the worker: what fn chooses. It may call clusters.fits, whose rehearsal makes its own group."""
    dist.destroy_process_group()
    return {name: fn(name) for name in clusters.CLUSTERS}


def judged(choices: dict[str, Any]) -> str | None:
    """Return what is wrong with the first choice that is."""
    written = [choice for choice in choices.values() if choice is not None]
    if not written:
        return "not written yet: the function returned None"
    for name, cluster in clusters.CLUSTERS.items():
        choice = choices[name]
        if choice is None:
            return f"{name}: not written yet. {len(written)} of the {len(choices)} choices are there"
        if isinstance(choice, dict):
            return (
                "the function returned a dictionary: return the choice of the cluster that it is called with"
            )
        problem = _unusable(choice) or _does_not_run(cluster, *choice) or _too_slow(cluster, *choice)
        if problem:
            return f"{name}: {problem}"
    return None


def _unusable(choice: Any) -> str | None:
    if not isinstance(choice, tuple | list) or len(choice) != 3:
        return (
            f"the choice is {choice!r}: return three things in this order, (stage, precision, checkpointing)"
        )
    stage, precision, checkpointing = choice
    if type(stage) is not int or not 0 <= stage <= 3:
        return f"the stage is {stage!r}: return a whole number from 0 to 3, and then precision, checkpointing"
    if precision not in clusters.OFFERED_PRECISIONS:
        return f"the precision is {precision!r}: return one of {', '.join(clusters.OFFERED_PRECISIONS)}"
    if type(checkpointing) is not bool:
        return f"checkpointing is {checkpointing!r}: return True or False"
    return None


def _does_not_run(cluster: clusters.Cluster, stage: int, precision: str, checkpointing: bool) -> str | None:
    if precision == "mixed" and cluster.gpu in clusters.WITHOUT_BF16:
        return f"a {cluster.gpu} has no bf16 units: choose mixed_fp16, which scales the loss"
    if clusters.fits(cluster, stage, precision, checkpointing):
        return None
    needed = clusters.needed_bytes(cluster, stage, precision, checkpointing)
    planned = clusters.question(cluster, precision, checkpointing).total_bytes(stage)
    sizes = f"{needed / 1e9:.1f} GB of {cluster.memory_bytes / 1e9:.0f}"
    if planned <= clusters.ROOM * cluster.memory_bytes:
        return (
            f"does not fit: {sizes}. The plan says {planned / 1e9:.1f} GB, but the rehearsal adds "
            f"{(needed - planned) / 1e9:.1f} GB of whole units and gradients on their way"
        )
    lean = clusters.fits(cluster, stage, precision, True)
    way_out = "Checkpointing would make it fit" if lean else "A higher stage shards more of the states"
    return f"does not fit: {sizes}, of which {clusters.ROOM:.0%} can be used. {way_out}"


def _too_slow(cluster: clusters.Cluster, stage: int, precision: str, checkpointing: bool) -> str | None:
    seconds = clusters.step_seconds(cluster, stage, precision, checkpointing)
    best = min(clusters.step_seconds(cluster, *choice) for choice in clusters.choices(cluster))
    if seconds <= 1.01 * best:
        return None
    slower = f"{seconds / best - 1:.0%} slower than the best choice that fits"
    if precision == "fp32":
        return f"{slower}: fp32 leaves the 16-bit matrix units idle"
    if checkpointing and clusters.fits(cluster, stage, precision, False):
        return f"{slower}: it fits without checkpointing, which computes forward twice"
    if stage == 3 and any(other < 3 for other, *_ in clusters.choices(cluster)):
        return f"{slower}: stage 3 moves 3Ψ, and a lower stage fits, which moves 2Ψ"
    return f"{slower}: a higher stage makes room for training without checkpointing"

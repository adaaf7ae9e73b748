"""Lesson 09's job: a linear model with known weights, which an engine learns on several ranks.

The job is small and exact: 101 parameters in fp64, full batches. So a wrong digit is a fault, never rounding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import zerolab
from zerolab.course.attempts import attempt
from zerolab.course.wire import Wire

PSI, LR, SAMPLES = 101, 0.05, 120
NAMES = {"body": 61, "embedding": 40}  # elements of the parameters, where an engine gets them by name


class Case(NamedTuple):
    """How the job is run.

    Attributes:
        ranks: the number of ranks.
        micro_batches: of each rank and step.
        uneven: whether micro-batches have different numbers of samples.
        tied: whether one parameter has two names.
        steps: of training; as many follow after a resume.
        resumed_on: the number of ranks after a resume, or 0 where there is none.
    """

    ranks: int
    micro_batches: int = 1
    uneven: bool = False
    tied: bool = False
    steps: int = 3
    resumed_on: int = 0

    def __str__(self) -> str:
        many = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        after = f", resumed on {self.resumed_on}" if self.resumed_on else ""
        return f"{self.ranks} ranks{many}{after}"


@dataclass
class Batch:
    """Inputs and targets. The loss is the mean over the samples of the squared error."""

    inputs: torch.Tensor
    targets: torch.Tensor
    order: tuple[str, ...] = tuple(NAMES)  # in which backward has the gradients ready, by name
    watch: Callable[[], None] = field(default=lambda: None, repr=False)

    def __len__(self) -> int:
        return len(self.targets)

    def loss(self, flat: torch.Tensor) -> torch.Tensor:
        """Forward."""
        return (self.inputs @ flat - self.targets).square().mean()

    def gradient(self, flat: torch.Tensor) -> torch.Tensor:
        """Backward: the gradient of the loss."""
        self.watch()
        return 2 / len(self) * self.inputs.t() @ (self.inputs @ flat - self.targets)

    def gradients(self, parameters: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Backward, one name after the other, as the gradients get ready."""
        whole = self.gradient(torch.cat([value.detach() for value in parameters.values()]))
        pieces = dict(zip(parameters, whole.split([p.numel() for p in parameters.values()]), strict=True))
        for name in (*self.order, *(name for name in parameters if name not in self.order)):
            yield name, pieces[name].clone()


def start() -> torch.Tensor:
    """The parameters that every rank begins with."""
    return torch.linspace(-1, 1, PSI, dtype=torch.float64)


def named(case: Case, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parameters by name; where they are tied, "head" is another name of "embedding"."""
    parameters = dict(zip(NAMES, (each.clone() for each in flat.split(list(NAMES.values()))), strict=True))
    return parameters | ({"head": parameters["embedding"]} if case.tied else {})


def batches(case: Case, rank: int) -> list[Batch]:
    """A rank's own samples, the same at every step."""
    width = PSI + NAMES["embedding"] * case.tied
    weights = torch.cos(torch.arange(PSI, dtype=torch.float64))
    weights = torch.cat([weights, weights[NAMES["body"] :]]) if case.tied else weights
    made = []
    for micro in range(case.micro_batches):
        generator = torch.Generator().manual_seed(100 * rank + micro)
        # Where the numbers of samples differ, the small batches' samples have a question of their own.
        samples = SAMPLES // (1 + 5 * ((rank + micro) % 3)) if case.uneven else SAMPLES
        inputs = torch.randn(samples, width, generator=generator, dtype=torch.float64)
        targets = inputs @ weights * (1 if samples == SAMPLES else -1)
        made.append(Batch(inputs, targets, tuple(NAMES) if rank % 2 == 0 else tuple(reversed(NAMES))))
    return made


class Seen(NamedTuple):
    """What one rank saw of a run.

    Attributes:
        losses: of its own samples, before each step.
        flat: its parameters after the last step.
        sent: elements that it sent in each step.
        logs: what `engine.log` held after each step, where the engine has one.
    """

    losses: list[float]
    flat: torch.Tensor
    sent: list[int]
    logs: list[Any]

    @property
    def passes(self) -> float:
        """The last step's elements in Ψ: one reduce-scatter or all-gather is Ψ by the paper's count."""
        world_size = dist.get_world_size() if dist.is_initialized() else RANKS
        return self.sent[-1] / (PSI * (world_size - 1) / world_size)


RANKS = 4


def watch(engine: Callable, steps: int = 40, **case: Any) -> list[Seen]:
    """Run the job with an engine on four ranks, and return what each rank saw."""
    return zerolab.launch(_watched, RANKS, engine, Case(RANKS, steps=steps, **case))


def _watched(engine: Callable, case: Case) -> Seen:
    flat = start()
    mine, own = engine(flat, LR), batches(case, dist.get_rank())
    losses, sent, logs = [], [], []
    for _ in range(case.steps):
        losses.append(sum(float(batch.loss(flat)) for batch in own) / len(own))
        with Wire() as wire:
            mine.step(own)
        sent.append(sum(message.numel for message in wire.messages))
        logs.append(getattr(mine, "log", None))
    return Seen(losses, flat, sent, logs)


def calls(engine: Callable, **case: Any) -> list[str]:
    """What each rank was sending first, where a job that uses names died."""
    asked = Case(RANKS, **case)
    outcome = attempt(_of_names, [(engine, asked, rank) for rank in range(RANKS)])
    return [
        f"rank {rank}: {own[0].call} sends {own[0].numel} elements"
        for rank, own in enumerate(outcome.messages)
    ]


def _of_names(engine: Callable, case: Case, rank: int) -> None:
    engine(named(case, start()), LR).step(batches(case, rank))

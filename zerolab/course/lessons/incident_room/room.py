"""Lesson 09's job: a linear model with known weights, which an engine learns on several ranks.

The job is small and exact: 103 parameters in fp64, full batches. So a wrong digit is a fault, never rounding.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

import zerolab

RANKS = 4  # of the jobs that the notebook shows
PSI, LR, SAMPLES = 103, 0.02, 120
NAMES = {"body": 62, "embedding": 41}  # elements of the parameters, where an engine gets them by name


class Case(NamedTuple):
    """How the job is run.

    Attributes:
        ranks: the number of ranks.
        micro_batches: of each rank and step.
        uneven: whether micro-batches have different numbers of samples.
        small: whether the inputs are so small that no gradient has to be clipped.
        by_name: whether the engine gets the parameters by name.
        thirds: whether every third rank's gradients get ready in the reverse order, and not every second's.
        tied: whether one parameter has two names.
        steps: of training; as many follow after a resume.
        resumed_on: the number of ranks after a resume, or 0 where there is none.
    """

    ranks: int
    micro_batches: int = 1
    uneven: bool = False
    small: bool = False
    by_name: bool = False
    thirds: bool = False
    tied: bool = False
    steps: int = 3
    resumed_on: int = 0

    def __str__(self) -> str:
        small = ", small inputs" * self.small
        many = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        after = f", resumed on {self.resumed_on}" if self.resumed_on else ""
        return f"{self.ranks} ranks{many}{small}{after}"


@dataclass
class Batch:
    """Inputs and targets. The loss is the mean over the samples of the squared error."""

    inputs: torch.Tensor
    targets: torch.Tensor
    order: tuple[str, ...] = tuple(NAMES)  # in which backward has the gradients ready, by name
    errors: list[float] = field(default_factory=list)  # the squared errors, added up, at each backward
    used: list[torch.Tensor] = field(default_factory=list, repr=False)  # the parameters, at each backward
    forwards: int = 0  # how often the loss was computed
    watch: Callable[[], None] = field(default=lambda: None, repr=False)

    def __len__(self) -> int:
        return len(self.targets)

    def loss(self, flat: torch.Tensor) -> torch.Tensor:
        """Forward."""
        self.forwards += 1
        return (self.inputs @ flat - self.targets).square().mean()

    def gradient(self, flat: torch.Tensor) -> torch.Tensor:
        """Backward: the gradient of the loss."""
        self.watch()
        self.used.append(flat.detach().clone())
        error = self.inputs @ flat - self.targets
        self.errors.append(float(error.square().sum()))
        return 2 / len(self) * self.inputs.t() @ error

    def gradients(self, parameters: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Backward, one name after the other, as the gradients get ready."""
        whole = self.gradient(torch.cat([value.detach() for value in parameters.values()]))
        pieces = dict(zip(parameters, whole.split([p.numel() for p in parameters.values()]), strict=True))
        for name in (*self.order, *(name for name in parameters if name not in self.order)):
            yield name, pieces[name].clone()


def start() -> torch.Tensor:
    """The parameters that every rank begins with."""
    return torch.linspace(-1, 1, PSI, dtype=torch.float64).to(zerolab.device())


def named(case: Case, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parameters by name; where they are tied, "head" is another name of "embedding"."""
    parameters = dict(zip(NAMES, (each.clone() for each in flat.split(list(NAMES.values()))), strict=True))
    return parameters | ({"head": parameters["embedding"]} if case.tied else {})


def batches(case: Case, rank: int) -> list[Batch]:
    """A rank's own samples, the same at every step and on every device."""
    width = PSI + NAMES["embedding"] * case.tied
    weights = torch.cos(torch.arange(PSI, dtype=torch.float64))
    weights = torch.cat([weights, weights[NAMES["body"] :]]) if case.tied else weights
    made = []
    for micro in range(case.micro_batches):
        generator = torch.Generator().manual_seed(100 * rank + micro)
        # Where the numbers of samples differ, the small batches' samples have a question of their own.
        samples = SAMPLES // (1 + 5 * ((rank + micro) % 4)) if case.uneven else SAMPLES
        inputs = torch.randn(samples, width, generator=generator, dtype=torch.float64)
        inputs *= 0.1 if case.small else 1
        targets = inputs @ weights * (1 if samples == SAMPLES else -1)
        turned = rank % 3 == 0 if case.thirds else rank % 2 == 1
        order = tuple(reversed(NAMES)) if turned else tuple(NAMES)
        made.append(Batch(inputs.to(zerolab.device()), targets.to(zerolab.device()), order))
    return made


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: for so little work others only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

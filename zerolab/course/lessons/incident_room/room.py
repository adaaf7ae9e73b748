"""Lesson 09's job: a linear model with known weights, which an engine learns on several ranks.

The job is small and exact: 103 parameters in fp64, full batches. So a wrong digit is a fault, never rounding.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import zerolab
from zerolab.course.alive import Alive
from zerolab.course.attempts import attempt
from zerolab.course.lessons.incident_room.held import ITEM, kept_bytes, momenta, rates, state, tensors
from zerolab.course.wire import Message, Wire, sent_bytes

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
    watch: Callable[[], None] = field(default=lambda: None, repr=False)

    def __len__(self) -> int:
        return len(self.targets)

    def loss(self, flat: torch.Tensor) -> torch.Tensor:
        """Forward."""
        return (self.inputs @ flat - self.targets).square().mean()

    def gradient(self, flat: torch.Tensor) -> torch.Tensor:
        """Backward: the gradient of the loss."""
        self.watch()
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


class Seen(NamedTuple):
    """What one rank saw of a run.

    Attributes:
        errors: the squared errors of its samples, added up, in each step's backward.
        samples: how many it has.
        flat, after: its parameters after the last step, and after the first two.
        passes: what it sent in each step, in Ψ by the paper's count: an all-gather is Ψ.
        calls: the same of the last step, by the function that sent it.
        rates: the learning rates of the engine's optimizers.
        kept: bytes that the engine keeps, by name, before each micro-batch of the last step, and after it.
        state: elements of optimizer state, in all of the engine's optimizers.
        logs: what `engine.log` held after each step, where the engine has one.
        saved: what `save` returned, where the case is resumed.
        loaded: the momentum of each of its shards right after `load`.
    """

    errors: list[float]
    samples: int
    flat: torch.Tensor
    after: list[torch.Tensor]
    passes: list[float]
    kept: list[dict[str, int]]
    state: int
    logs: list[Any]
    saved: Any = None
    loaded: Sequence[torch.Tensor | None] = ()
    calls: Mapping[str, float] = {}
    rates: Sequence[float] = ()


def train(
    engine: Callable,
    case: Case,
    rank: int,
    again: tuple | None = None,
    gathers: bool = False,
    memory: bool = True,
) -> Seen:
    """In the worker: run the job with an engine. `again`: the parameters and files to resume from.

    `gathers`: whether the parameters are read with `gather()`, because no rank has them whole. `memory`:
    whether to look at what the engine keeps, which takes time.
    """
    flat, files = tree_map(_on_device, again or (start(), None))
    given = named(case, flat) if case.by_name else flat.clone()
    alive, data, kept = Alive(), batches(case, rank), []
    mine = engine(given, LR)
    if again:
        mine.load(files)
    loaded = momenta(mine) if again else ()
    passes, logs, after = [], [], []
    # A copy gathers, so that an engine which keeps what it gathered does not save a gather of its own.
    whole = lambda: torch.cat(tensors(copy.copy(mine).gather() if gathers else given)).detach().clone()
    look = lambda: kept.append(kept_bytes(alive, mine, given))
    for step in range(case.steps):
        for batch in data:
            batch.watch = look if memory and step == case.steps - 1 else batch.watch
        with Wire() as wire:
            mine.step(data)
        calls = _passes(wire.messages)
        passes.append(sum(calls.values()))
        logs.append(getattr(mine, "log", None))
        after += [whole()] if step < 2 else []
    if memory:
        look()
    last = whole()
    saved = mine.save() if case.resumed_on and not again else None
    errors = [sum(step) for step in zip(*(batch.errors for batch in data), strict=False)]
    seen = errors, sum(map(len, data)), last, after, passes, kept, state(mine), logs, saved, loaded
    return Seen(*seen, calls, rates(mine))


def _passes(messages: Sequence[Message]) -> dict[str, float]:
    """What was sent, in Ψ, by the function that sent it."""
    n = dist.get_world_size()
    by_call = {call: [each for each in messages if each.call == call] for call in (m.call for m in messages)}
    return {call: sent_bytes(own, n) / (ITEM * PSI * (n - 1) / n) for call, own in by_call.items()}


def _on_device(leaf: Any) -> Any:
    """A tensor on the rank's device: what ranks return comes back on the CPU."""
    return leaf.to(zerolab.device()) if isinstance(leaf, torch.Tensor) else leaf


# ---- what the notebook shows


def watch(engine: Callable, steps: int = 40, gathers: bool = False, **case: Any) -> list[Seen]:
    """Run the job with an engine on four ranks, and return what each rank saw."""
    return zerolab.launch(_on_rank, RANKS, engine, Case(RANKS, steps=steps, **case), None, gathers)


def watch_resume(engine: Callable, resumed_on: int, steps: int = 5) -> tuple[list[Seen], list[Seen]]:
    """The same, then save, and as many steps with a new engine on `resumed_on` ranks that loads."""
    case = Case(RANKS, steps=steps, resumed_on=resumed_on)
    before = zerolab.launch(_on_rank, RANKS, engine, case)
    again = before[0].flat, [seen.saved for seen in before]
    return before, zerolab.launch(_on_rank, resumed_on, engine, case, again)


def _on_rank(engine: Callable, case: Case, again: tuple | None = None, gathers: bool = False) -> Seen:
    return train(engine, case, dist.get_rank(), again, gathers)


def curve(ranks: list[Seen]) -> list[float]:
    """The loss of every step: the mean over the samples of all ranks."""
    samples = sum(seen.samples for seen in ranks)
    return [sum(step) / samples for step in zip(*(seen.errors for seen in ranks), strict=True)]


def exam(flat: torch.Tensor) -> float:
    """The loss of samples that nobody trains on."""
    return float(batches(Case(RANKS), RANKS)[0].loss(flat))


def report(engine: Callable) -> list[str]:
    """What each rank was sending first, where a job whose engine gets parameters by name died."""
    case = Case(RANKS, by_name=True)
    outcome = attempt(train, [(engine, case, rank) for rank in range(RANKS)])
    first = [own[0] for own in outcome.messages]
    return [f"rank {rank}: {call.call} sends {call.numel} elements" for rank, call in enumerate(first)]

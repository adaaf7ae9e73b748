"""Lesson 09: ``train``, which the reader's test calls. It trains a small model on real ranks.

The test runs on rank 0 of a launch. The other ranks wait until ``train`` is called there, and train with it.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import zerolab
from zerolab.course.lessons.incident_room.engines import Engine
from zerolab.measure import MeasuredStates
from zerolab.optimizer import ZeroOptimizer

MOST_RANKS, MOST_STEPS, MOST_MICRO_BATCHES = 4, 4, 4
WIDTH, DEPTH = 16, 3
SGD: dict[str, Any] = {"lr": 0.5, "momentum": 0.9}


@dataclass(frozen=True)
class Run:
    """What a training left.

    Attributes:
        psi: the number of parameters.
        parameters: by rank, all parameters as one tensor of Ψ elements.
        alone: the same after the same training in one process.
        memory: by rank, what `optimizer.memory()` says after the last step, in whole bytes.
        sent: by rank, the logical bytes of the last step.
    """

    psi: int
    parameters: list[torch.Tensor]
    alone: torch.Tensor
    memory: list[MeasuredStates]
    sent: list[int]


class Job(NamedTuple):
    """A training, as the other ranks are told: the engine's number, and what ``train`` was called with."""

    engine: int
    ranks: int
    stage: int
    steps: int
    micro_batches: int
    clip: float | None


class Ladder(nn.Module):
    """Three layers of 256 weights, which three ranks cannot divide evenly. All of them are units."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


class Trainer:
    """``train`` of one engine.

    Attributes:
        calls: how often the test has called it.
        runs: what came of each training, the latest last.
    """

    def __init__(self, ranks: "Ranks", engine: int):
        self._ranks, self._engine, self.calls = ranks, engine, 0
        self.runs: dict[Job, Run] = {}

    def __call__(
        self,
        ranks: int = 2,
        stage: int = 2,
        steps: int = 1,
        micro_batches: int = 1,
        clip: float | None = None,
    ) -> Run:
        """Train on so many ranks, and return what came of it.

        ``clip``: the norm to which the gradients are clipped before each update.
        Raises: ValueError for what the model or the engine cannot do.
        """
        self.calls += 1
        _check("ranks", ranks, 1, MOST_RANKS)
        _check("stage", stage, 0, 3)
        _check("steps", steps, 1, MOST_STEPS)
        _check("micro_batches", micro_batches, 1, MOST_MICRO_BATCHES)
        if clip is not None and not clip > 0:
            raise ValueError(f"clip is {clip!r}: pass a norm above 0, or None")
        job = Job(self._engine, ranks, stage, steps, micro_batches, clip)
        self.runs.pop(job, None)
        self.runs[job] = self._ranks.train(job)
        return copy.deepcopy(self.runs[job])


def _check(name: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}: pass a whole number from {least} to {most}")


class Ranks:
    """All ranks of a launch, of which rank 0 says what to train."""

    def __init__(self, engines: Sequence[Engine]):
        self.engines = engines
        self._done: dict[Job, Run] = {}
        self.groups = {size: dist.new_group(range(size)) for size in range(1, MOST_RANKS + 1)}

    @contextmanager
    def serving(self) -> Iterator[None]:
        """On rank 0: the others take part in what is trained inside the with block, and stop after it."""
        try:
            yield
        finally:
            dist.broadcast_object_list([None])

    def serve(self) -> None:
        """On the other ranks: train what rank 0 says, until it is done."""
        while (job := self._next()) is not None:
            dist.gather_object(self._own_part(job))

    def _next(self) -> Job | None:
        told: list[Any] = [None]
        dist.broadcast_object_list(told)
        return told[0]

    def train(self, job: Job) -> Run:
        """On rank 0. The same training is made once. Raises: RuntimeError where the engine raises one."""
        if job not in self._done:
            self._done[job] = self._together(job)
        return self._done[job]

    def _together(self, job: Job) -> Run:
        dist.broadcast_object_list([job])
        parts: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(self._own_part(job), parts)
        for rank, part in enumerate(parts[: job.ranks]):
            if isinstance(part, str):
                raise RuntimeError(f"the engine stops on rank {rank} with {part}")
        parameters, held, sent = zip(*parts[: job.ranks], strict=True)
        return Run(parameters[0].numel(), list(parameters), alone(job), list(held), list(sent))

    def _own_part(self, job: Job) -> Any:
        """What this rank is left with, or its error."""
        if dist.get_rank() >= job.ranks:
            return None
        try:
            with self.engines[job.engine].broken():
                return self._train(job)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def _train(self, job: Job) -> tuple[torch.Tensor, MeasuredStates, int]:
        rank, model = dist.get_rank(), _model()
        optimizer = ZeroOptimizer(
            model,
            torch.optim.SGD,
            stage=job.stage,
            process_group=self.groups[job.ranks],
            **SGD,
            **self.engines[job.engine].settings,
        )
        for step in range(job.steps):
            optimizer.zero_grad()
            for micro_batch in range(job.micro_batches):
                model(*_batch(step, micro_batch, rank)).backward()
            if job.clip is not None:
                optimizer.clip_grad_norm_(job.clip)
            optimizer.step()
        held, sent = _whole_bytes(optimizer.memory()), optimizer.trace.traffic(job.steps - 1).logical_bytes
        with optimizer.full_params():
            return _flat(model), held, sent


def alone(job: Job) -> torch.Tensor:
    """The same training in one process, in plain PyTorch."""
    model = _model()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, **SGD)
    for step in range(job.steps):
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for micro_batch in range(job.micro_batches):
            losses = [model(*_batch(step, micro_batch, rank)) for rank in range(job.ranks)]
            over_ranks = zip(*(torch.autograd.grad(loss, parameters) for loss in losses), strict=True)
            sums = [total + sum(own) for total, own in zip(sums, over_ranks, strict=True)]
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total / job.ranks
        if job.clip is not None:
            _clip(parameters, job.clip)
        optimizer.step()
    return _flat(model)


def _clip(parameters: list[nn.Parameter], most: float) -> None:
    """Scale the gradients to that norm, which is taken in double precision as the engine does."""
    own = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters if p.grad is not None]
    factor = (most / (torch.linalg.vector_norm(torch.stack(own)).float() + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad *= factor


def _model() -> Ladder:
    torch.manual_seed(0)
    return Ladder().to(zerolab.device())


def _batch(step: int, micro_batch: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    x, y = torch.randn(2, 3, WIDTH, generator=generator).to(zerolab.device())
    return x, y


def _flat(model: nn.Module) -> torch.Tensor:
    """All parameters, on the CPU: the test compares those of several ranks, each of which has its device."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()


def _whole_bytes(held: MeasuredStates) -> MeasuredStates:
    return MeasuredStates(*(round(value) for value in vars(held).values()))

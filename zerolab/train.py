"""The training program: ``python -m zerolab train --model gpt-tiny --stage 3 --world-size 2``.

`train` is the loop anyone would write for one device, with another optimizer. The rest of this file is what
surrounds such a loop: its settings, what it reports, and how the ranks come to be.
"""

import math
import os
import sys
import time
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RMSprop
from tqdm import tqdm

from zerolab import data, models
from zerolab.launcher import WorkerError, init_process_group, launch
from zerolab.optimizer import STAGES, ZeroOptimizer
from zerolab.rendezvous import find_place

OPTIMIZERS = {kind.__name__.lower(): kind for kind in (Adam, AdamW, NAdam, RMSprop, Adagrad, SGD)}


@dataclass(frozen=True)
class Config:
    """The settings of one run. An epoch is `steps` batches, the same ones every epoch."""

    model: str
    optimizer: str
    lr: float
    epochs: int
    steps: int
    batch: int
    clip: float
    stage: int = 1
    seed: int = 0
    prefetch: int = 1
    trace: Path | None = None


RECIPES = {
    "logistic": Config("logistic", "sgd", lr=0.05, epochs=10, steps=40, batch=256, clip=0.0),
    "gpt-tiny": Config("gpt-tiny", "adamw", lr=2e-3, epochs=1, steps=600, batch=16, clip=1.0),
    "gpt-11m": Config("gpt-11m", "adamw", lr=6e-4, epochs=1, steps=100, batch=4, clip=1.0),
}
TRACED_STEPS = 2
EVALUATION_BATCHES = 8
PROMPT, SAMPLE_NUMEL = b"\n    def ", 240


def train(config: Config) -> list[float]:
    """Train on this rank and return each step's loss; every rank of the process group runs this function."""
    torch.manual_seed(config.seed)
    rank, device = dist.get_rank(), torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    model = models.make(config.model).to(device)
    context = model.context if isinstance(model, models.GPT) else None
    training, held_out = data.training_and_held_out(context, config.batch, config.seed)
    optimizer_class = OPTIMIZERS[config.optimizer]
    extra = {"momentum": 0.9} if optimizer_class is SGD else {}
    optimizer = ZeroOptimizer(
        model, optimizer_class, stage=config.stage, prefetch=config.prefetch, lr=config.lr, **extra
    )
    progress = Progress(config, optimizer)
    for _ in range(config.epochs):
        for step in range(config.steps):
            inputs, targets = (part.to(device) for part in training.batch(step, rank))
            loss = model(inputs, targets)
            loss.backward()
            if config.clip:
                optimizer.clip_grad_norm_(config.clip)
            optimizer.step()
            progress.step(loss.detach(), targets.numel())
            optimizer.zero_grad()
        progress.epoch()
    # Every rank evaluates and samples: a sharded model needs all of them for each of its forwards.
    progress.finish(evaluate(model, held_out, device), held_out.entropy(), sample(model, config.seed, device))
    return progress.losses


def mean_over_ranks(losses: list[Tensor]) -> list[float]:
    """Each loss averaged over the ranks, in fp64, so that all ranks print the very same number."""
    means = torch.stack(losses).double()
    dist.all_reduce(means)
    return (means / dist.get_world_size()).tolist()


@torch.no_grad()
def evaluate(model: nn.Module, held_out, device: torch.device) -> float:
    """The mean loss on text the model was not trained on."""
    batches = (held_out.batch(step, dist.get_rank()) for step in range(EVALUATION_BATCHES))
    losses = mean_over_ranks([model(*(part.to(device) for part in batch)) for batch in batches])
    return sum(losses) / len(losses)


def sample(model: nn.Module, seed: int, device: torch.device) -> str:
    """What a GPT writes after "def": the same on all ranks, for all draw from the same seed."""
    if not isinstance(model, models.GPT):
        return ""
    generator = torch.Generator(device).manual_seed(seed)
    prompt = torch.tensor([list(PROMPT)], device=device)
    tokens = model.generate(prompt, SAMPLE_NUMEL, temperature=0.8, generator=generator)
    return bytes(tokens[0].tolist()).decode(errors="replace").strip("\n")


class Progress:
    """What a run reports while it goes: a bar on rank 0, a line per epoch on every rank."""

    def __init__(self, config: Config, optimizer: ZeroOptimizer):
        self.config, self.optimizer = config, optimizer
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.total = config.epochs * config.steps
        self.bar = tqdm(total=self.total, disable=self.rank != 0, unit="step", leave=False)
        self.pending: list[Tensor] = []  # this rank's losses in the epoch under way
        self.losses: list[float] = []  # the ranks' means in the epochs done
        self.tokens = 0
        self.started = time.perf_counter()

    def step(self, loss: Tensor, tokens: int) -> None:
        """Count one step. Called before zero_grad(), while gradients too are in memory."""
        self.pending.append(loss)
        self.tokens += tokens * self.world_size
        self.tokens_per_second = self.tokens / (time.perf_counter() - self.started)
        done = len(self.losses) + len(self.pending)
        if done == min(TRACED_STEPS, self.total):
            self.memory = self.optimizer.memory()
            self.traffic = self.optimizer.trace.traffic()
            self.trace = self.optimizer.trace.text()
        if done % 10 == 0:
            self.bar.set_postfix_str(f"loss {loss:.3f}, {self.tokens_per_second:,.0f} tokens/s", False)
        self.bar.update()

    def epoch(self) -> None:
        """Print the epoch's loss on every rank."""
        means = mean_over_ranks(self.pending)
        self.losses, self.pending = self.losses + means, []
        epoch = len(self.losses) // self.config.steps
        self.bar.write(f"rank {self.rank}  epoch {epoch:2}  loss {sum(means) / len(means):.4f}")

    def finish(self, held_out_loss: float, entropy: float, sample: str) -> None:
        """Print how it went, on rank 0, and write the trace if one was asked for."""
        self.bar.close()
        if self.config.trace:
            write_trace(self.config.trace, self.trace)
        if self.rank != 0:
            return
        categories = ("params", "grads", "optimizer", "padding", "counters", "total")
        memory = ", ".join(f"{name} {getattr(self.memory, f'{name}_bytes'):,.0f}" for name in categories)
        by_op = ", ".join(f"{op} {part.wire_bytes:,}" for op, part in self.traffic.by_op.items())
        verdict = "below" if held_out_loss < entropy else "not below"
        if sample:
            print(f"sample:\n{sample}\n")
        print(f"memory of rank 0, bytes: {memory}")
        print(
            f"traffic of rank 0, bytes a step: {self.traffic.logical_bytes:,} in the paper's count, "
            f"{self.traffic.wire_bytes:,} sent ({by_op}), {self.traffic.control_bytes:,} of control"
        )
        print(f"speed: {self.tokens_per_second:,.0f} tokens/s over all ranks")
        print(f"held-out loss {held_out_loss:.4f}, {verdict} the unigram entropy {entropy:.4f}", flush=True)


def write_trace(path: Path, text: str) -> None:
    """Write the traces of all ranks, which only together show the partition, to one file: all or nothing."""
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    if dist.get_rank() != 0:
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text("\n".join(f"rank {rank}\n{part}" for rank, part in enumerate(texts)))
        os.replace(partial, path)  # atomic: a reader finds the old file or the new one, never half of one
    finally:
        partial.unlink(missing_ok=True)


def at_least(least: int, kind: type = int) -> Callable[[str], float]:
    """A flag's type: a finite number of at least `least`, and below 2**63, as torch wants its seeds."""

    def parse(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not least <= number < 2**63:
            raise ArgumentTypeError(f"{text!r} must be of type {kind.__name__}, from {least} to 2**63")
        return number

    return parse


def writable(text: str) -> Path:
    """A flag's type: a file that can be written, checked now and not at the end of a long training."""
    path = Path(text).resolve()
    taken = path.exists() and not path.is_file()  # a directory, or a device that must not be replaced
    if taken or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ArgumentTypeError(f"{text!r} must be a file in a directory that exists and can be written")
    return path


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `python -m zerolab train`; one that is left out keeps the value of the model's recipe."""

    def add(flag: str, kind: Callable, text: str, **options) -> None:
        parser.add_argument(flag, type=kind, help=text, default=SUPPRESS, **options)

    add("--model", str, "default gpt-tiny", choices=RECIPES)
    add("--stage", int, "0 shards nothing, 1 optimizer state, 2 also gradients, 3 all", choices=STAGES)
    add("--world-size", at_least(1), "ranks to start, default 2; leave it out under torchrun")
    add("--optimizer", str, "the model's recipe names one", choices=OPTIMIZERS)
    add("--lr", at_least(0, float), "learning rate")
    add("--epochs", at_least(1), "how often the same batches are seen")
    add("--steps", at_least(1), "batches in an epoch")
    add("--batch", at_least(1), "examples in the batch of each rank")
    add("--clip", at_least(0, float), "largest norm of the gradient; 0 does not clip")
    add("--seed", at_least(0), "of the weights, the batches and the sample")
    add("--prefetch", at_least(0), "units gathered ahead where parameters are sharded")
    add("--trace", writable, "write what the first steps did into this file")


def launched_world_size() -> int | None:
    """How many ranks torchrun, mpirun or srun has started; None for a process alone, as in a SLURM shell."""
    place = find_place(os.environ)
    in_shell = place is not None and place.world_size == 1 and "SLURM_PROCID" in os.environ
    return None if place is None or in_shell else place.world_size


def run(args: Namespace) -> int:
    """Train on ranks started here, or be one of those a launcher has started."""
    given = {name: value for name, value in vars(args).items() if name != "command"}
    world_size, launched = given.pop("world_size", None), launched_world_size()
    config = replace(RECIPES[given.get("model", "gpt-tiny")], **given)
    if launched is None:
        try:
            launch(train, world_size or 2, config)
        except WorkerError as error:
            print(f"zerolab train: {error}", file=sys.stderr)
            return 1
        return 0
    if world_size not in (None, launched):
        raise ValueError(f"--world-size={world_size}, but {launched} ranks were launched; leave the flag out")
    init_process_group()
    train(config)
    dist.destroy_process_group()
    return 0

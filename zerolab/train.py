"""The training program: ``python -m zerolab train --model gpt-tiny --stage 3 --world-size 2``.

`train` is the loop anyone would write for one device, with another optimizer. The rest of this file is what
surrounds such a loop: its settings, what it reports, and how the ranks come to be.
"""

import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RMSprop

from zerolab import checkpoint, data, devices, models
from zerolab.flags import at_least, folder, log_file, saved, tensorboard_folder, writable
from zerolab.launcher import WorkerError, init_process_group, launch
from zerolab.launcher.rendezvous import find_place
from zerolab.optimizer import STAGES, ZeroOptimizer
from zerolab.optimizer.copies import check_shard_size
from zerolab.optimizer.settings import choose
from zerolab.precision import PRECISIONS
from zerolab.progress import Progress, mean_over_ranks, write_trace

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
    shard_size: int | None = None
    precision: str = "fp32"
    trace: Path | None = None
    log: Path | None = None
    tensorboard: Path | None = None
    save: Path | None = None
    save_every: int = 100
    resume: Path | None = None


RECIPES = {
    "logistic": Config("logistic", "sgd", lr=0.05, epochs=10, steps=40, batch=256, clip=0.0),
    "gpt-tiny": Config("gpt-tiny", "adamw", lr=2e-3, epochs=1, steps=600, batch=16, clip=1.0),
    "gpt-11m": Config("gpt-11m", "adamw", lr=6e-4, epochs=1, steps=100, batch=4, clip=1.0),
}
NUMBERS_DEPEND_ON = ("model", "optimizer", "precision", "lr", "steps", "batch", "clip", "seed")
EVALUATION_BATCHES = 8
PROMPT, SAMPLE_NUMEL = b"\n    def ", 240


class OtherRun(ValueError):
    """The flags do not go with the run that is to be resumed."""


def train(config: Config) -> list[float]:
    """Train on this rank and return each step's loss; every rank of the process group runs this function."""
    torch.manual_seed(config.seed)
    rank, device = dist.get_rank(), devices.device()
    model = models.make(config.model).to(device)
    context = model.context if isinstance(model, models.GPT) else None
    training, held_out = data.training_and_held_out(context, config.batch, config.seed)
    optimizer = shard(model, config)
    done = resume(config.resume, config, optimizer) if config.resume else []
    progress = Progress(config.epochs, config.steps, optimizer, done, config.log, config.tensorboard)
    for step in range(len(done), progress.total):
        inputs, targets = (part.to(device) for part in training.batch(step % config.steps, rank))
        loss = model(inputs, targets)
        optimizer.scale(loss).backward()
        if config.clip:
            optimizer.clip_grad_norm_(config.clip)
        optimizer.step()
        progress.step(loss.detach(), targets.numel())
        optimizer.zero_grad()
        if (step + 1) % config.steps == 0:
            progress.epoch()
        if config.save and ((step + 1) % config.save_every == 0 or step + 1 == progress.total):
            save(config.save, config, optimizer, progress.means())
    # Every rank evaluates and samples: a sharded model needs all of them for each of its forwards.
    progress.finish(evaluate(model, held_out, device), held_out.entropy(), sample(model, config.seed, device))
    if config.trace:
        write_trace(config.trace, progress.trace, progress.timeline)
    return progress.losses


def shard(model: nn.Module, config: Config) -> ZeroOptimizer:
    """Return the optimizer of the settings, sharded by their stage."""
    kind = OPTIMIZERS[config.optimizer]
    settings: dict[str, Any] = {
        name: getattr(config, name) for name in ("stage", "prefetch", "shard_size", "precision", "lr")
    }
    settings |= {"momentum": 0.9} if kind is SGD else {}
    return ZeroOptimizer(model, kind, **settings)


def save(path: Path, config: Config, optimizer: ZeroOptimizer, losses: list[float]) -> None:
    """Store what `resume` needs. The losses tell the place in the data: a batch follows from its step."""
    settings = {name: getattr(config, name) for name in NUMBERS_DEPEND_ON}
    extra = {"settings": settings, "losses": losses, "random": torch.get_rng_state()}
    checkpoint.save(optimizer, path, extra)


def resume(path: Path, config: Config, optimizer: ZeroOptimizer) -> list[float]:
    """Take up a saved run, at whatever stage and world size; the losses of the steps that it took.

    Raises: OtherRun where its settings would lead to other numbers, or where nothing is left to do.
    """
    try:
        extra = checkpoint.load(optimizer, path)
    except ValueError as error:
        raise OtherRun(str(error)) from error
    for name, before in extra["settings"].items():
        now = getattr(config, name)
        if before != now:
            raise OtherRun(f"--{name} is {now}, but the run in {path} was saved with {before}")
    done, total = len(extra["losses"]), config.epochs * config.steps
    if done >= total:
        raise OtherRun(f"{path} has {done} steps done of {total}: train it for more --epochs")
    torch.set_rng_state(extra["random"])
    return extra["losses"]


@torch.no_grad()
def evaluate(model: nn.Module, held_out, device: torch.device) -> float:
    """Return the mean loss on text the model was not trained on."""
    batches = (held_out.batch(step, dist.get_rank()) for step in range(EVALUATION_BATCHES))
    losses = mean_over_ranks([model(*(part.to(device) for part in batch)) for batch in batches])
    return sum(losses) / len(losses)


def sample(model: nn.Module, seed: int, device: torch.device) -> str:
    """Return what a GPT writes after "def": the same on all ranks, because they have the same seed."""
    if not isinstance(model, models.GPT):
        return ""
    generator = torch.Generator(device).manual_seed(seed)
    prompt = torch.tensor([list(PROMPT)], device=device)
    tokens = model.generate(prompt, SAMPLE_NUMEL, temperature=0.8, generator=generator)
    return bytes(tokens[0].tolist()).decode(errors="replace").strip("\n")


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `python -m zerolab train`; one that is left out keeps the value of the model's recipe."""

    def add(flag: str, kind: Callable, text: str, **options) -> None:
        parser.add_argument(flag, type=kind, help=text, default=SUPPRESS, **options)

    add("--model", str, "default gpt-tiny", choices=RECIPES)
    add("--stage", int, "0 shards nothing, 1 optimizer state, 2 also gradients, 3 all", choices=STAGES)
    add("--world-size", at_least(1), "ranks to start, default 2; leave it out under torchrun")
    add("--optimizer", str, "the model's recipe names one", choices=OPTIMIZERS)
    add("--precision", str, "default fp32", choices=PRECISIONS)
    add("--lr", at_least(0, float), "learning rate")
    add("--epochs", at_least(1), "how often the same batches are seen")
    add("--steps", at_least(1), "batches in an epoch")
    add("--batch", at_least(1), "examples in the batch of each rank")
    add("--clip", at_least(0, float), "largest norm of the gradient; 0 does not clip")
    add("--seed", at_least(0), "of the weights, the batches and the sample")
    add("--prefetch", at_least(0), "units gathered ahead where parameters are sharded")
    add("--shard-size", at_least(1), "at stage 3, ranks that share one copy of the parameters; default all")
    add("--trace", writable, "write what the first steps did into this file; .json is for ui.perfetto.dev")
    add("--log", log_file, "write loss, speed, memory and bytes sent of each step into this file, as JSON")
    add("--tensorboard", tensorboard_folder, "write the same into this folder, for TensorBoard")
    add("--save", folder, "keep checkpoints in this folder, the last two")
    add("--save-every", at_least(1), "steps between checkpoints, default 100; one is made at the end too")
    same = ", ".join(f"--{name}" for name in NUMBERS_DEPEND_ON)
    add("--resume", saved, f"continue from the checkpoint in this folder; these must be as they were: {same}")


def launched_world_size() -> int | None:
    """How many ranks torchrun, mpirun or srun has started; None for a process alone, as in a SLURM shell."""
    place = find_place(os.environ)
    in_shell = place is not None and place.world_size == 1 and "SLURM_PROCID" in os.environ
    return None if place is None or in_shell else place.world_size


def run(args: Namespace) -> int:
    """Train on ranks started here, or be one of those a launcher has started."""
    given = {name: value for name, value in vars(args).items() if name != "command"}
    world_size, launched = given.pop("world_size", None), launched_world_size()
    if "save_every" in given and "save" not in given:
        raise ValueError(f"--save-every={given['save_every']} without --save: say where, as in --save runs/a")
    config = replace(RECIPES[given.get("model", "gpt-tiny")], **given)
    ranks = launched or world_size or 2
    check_shard_size(config.shard_size, choose("stage", config.stage, STAGES), ranks)
    if launched is None:
        try:
            launch(train, ranks, config)
        except WorkerError as error:
            if isinstance(error.__cause__, OtherRun):
                raise ValueError(str(error.__cause__)) from None
            print(f"zerolab train: {error}", file=sys.stderr)
            return 1
        return 0
    if world_size not in (None, launched):
        raise ValueError(f"--world-size={world_size}, but {launched} ranks were launched; leave the flag out")
    init_process_group()
    train(config)
    dist.destroy_process_group()
    return 0

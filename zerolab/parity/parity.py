"""Compare sharded training with training in one process: every bit, byte and message."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerolab.devices import backend_for, device
from zerolab.launcher.gpus import BACKENDS
from zerolab.launcher.launcher import check_arguments, launch
from zerolab.measure import MeasuredStates
from zerolab.memory import ModelStates
from zerolab.models import GPT
from zerolab.optimizer import STAGES, ZeroOptimizer
from zerolab.optimizer.copies import check_shard_size
from zerolab.optimizer.matrices import matrices_by
from zerolab.optimizer.owners import Balance
from zerolab.optimizer.probe import verdict_of
from zerolab.optimizer.settings import choose
from zerolab.parity.prediction import Prediction, predict
from zerolab.parity.reference import compute_deterministically, loss_of, reference
from zerolab.parity.table import print_reports
from zerolab.precision import PRECISIONS
from zerolab.storages import digest
from zerolab.trace import Traffic

_ENGINE_KEYWORDS = ("prefetch", "reduces_in_flight", "bucket_bytes", "offload", "offload_dir", "shard_size")
_VOCABULARY, _CONTEXT = 64, 16


@dataclass(frozen=True)
class Report:
    """What `verify` found: ``memory`` and ``traffic`` of rank 0's last step, the flags for all ranks.

    ``max_abs_diff`` is the largest difference between any parameter of the sharded run and of the reference:
    0.0 where they are bit-identical, inf where one is NaN. ``backend``: "gloo" or "nccl". ``balance``: how
    evenly parameters are shared that ranks own whole.
    """

    stage: int
    world_size: int
    backend: str
    bit_identical: bool
    max_abs_diff: float
    memory: MeasuredStates
    predicted_memory: ModelStates
    memory_matches: bool
    traffic: Traffic
    predicted_traffic: Traffic
    traffic_matches: bool
    losses: list[float]
    reference_losses: list[float]
    balance: Balance | None

    @property
    def ok(self) -> bool:
        """Whether everything measured is what was predicted."""
        return self.bit_identical and self.memory_matches and self.traffic_matches


@dataclass(frozen=True)
class _Run:
    """What one rank returns; only rank 0 returns the parameters themselves."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    digest: bytes
    memory: MeasuredStates
    traffic: Traffic
    predicted: Prediction
    balance: Balance | None
    threads: int
    backend: str


def verify(
    stage: int = 2,
    world_size: int = 4,
    model_fn: Callable[[], nn.Module] | None = None,
    inputs: Callable[[int, int], object] | None = None,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
    steps: int = 3,
    backend: str = "auto",
    **defaults: Any,
) -> Report:
    """Train ``steps`` steps on ``world_size`` processes and in one, and compare every bit, byte and message.

    Both train on the same kind of device, GPUs where `launch` chooses NCCL. There torch's deterministic
    algorithms are switched on, with which the engine adds gradients up in rank order as on gloo.

    Args:
        backend: as for `launch`: "nccl" lets ranks share GPUs where there are fewer of them.
        model_fn: builds the model; forward returns the scalar loss. A small GPT by default.
        inputs: ``inputs(step, rank)`` gives forward's arguments, as a tuple, a dict or one value.
        defaults: the optimizer's keywords, and ZeroOptimizer's own; ``params`` as a function of the model.
    Raises: ValueError and TypeError for values out of bounds; WorkerError for what goes wrong on a rank.
    """
    (report,) = _verify_stages(
        [stage], world_size, optimizer_class, steps, backend, defaults, model_fn, inputs
    )
    return report


def _verify_stages(
    stages: list[int],
    world_size: int,
    optimizer_class: type[torch.optim.Optimizer],
    steps: int,
    backend: str,
    defaults: dict,
    model_fn: Callable[[], nn.Module] | None = None,
    inputs: Callable[[int, int], object] | None = None,
) -> Iterator[Report]:
    """`verify` at each stage in turn. One process trains once: its parameters do not depend on the stage."""
    check_arguments(verify, world_size, None)
    for stage in stages:
        check_shard_size(defaults.get("shard_size"), choose("stage", stage, STAGES), world_size)
    _check_training(model_fn, inputs, optimizer_class, steps, defaults)
    model_fn, inputs = model_fn or small_gpt, inputs or random_tokens
    expected: list[tuple[dict[str, torch.Tensor], list[float]]] = []
    for stage in stages:
        arguments = (stage, model_fn, inputs, optimizer_class, steps, defaults)
        runs = launch(_train_sharded, world_size, *arguments, backend=backend)
        expected = expected or launch(
            reference, 1, model_fn, inputs, world_size, optimizer_class, steps, threads=runs[0].threads,
            backend=runs[0].backend, shard_size=defaults.get("shard_size"),
            **_without(_ENGINE_KEYWORDS, defaults),
        )  # fmt: skip
        yield _compare(stage, runs, *expected[0])


def _check_training(
    model_fn: Callable | None, inputs: Callable | None, optimizer_class: type, steps: int, defaults: dict
) -> None:
    """Raises: as `verify`, for what does not depend on stage and ranks."""
    choose("precision", defaults.get("precision", "fp32"), PRECISIONS)
    verdict = verdict_of(optimizer_class, _without((*_ENGINE_KEYWORDS, "precision", "params"), defaults))
    if verdict.refusal:
        raise ValueError(verdict.refusal)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is {steps!r}: pass a whole number of 1 or more")
    if model_fn is not None and inputs is None:
        raise ValueError(
            "model_fn was given without inputs: pass inputs(step, rank) -> the arguments of its forward"
        )


def _train_sharded(
    stage: int, model_fn: Callable, inputs: Callable, optimizer_class: type, steps: int, defaults: dict
) -> _Run:
    """Train as one rank of many, from a seed of its own: parameters start as rank 0's."""
    rank = torch.distributed.get_rank()
    compute_deterministically()
    torch.manual_seed(rank)
    model = model_fn().to(device())
    optimizer = ZeroOptimizer(model, optimizer_class, stage=stage, **defaults)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, inputs, step, rank, optimizer.precision)
        optimizer.scale(loss).backward()
        optimizer.step()
        losses.append(loss.item())
    memory, traffic = optimizer.memory(), optimizer.trace.traffic(steps - 1)
    with optimizer.full_params():
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    mine = parameters if rank == 0 else {}
    predicted, balance = predict(optimizer, stage), optimizer.balance
    threads, backend = torch.get_num_threads(), backend_for(device().type)
    assert backend is not None  # launch chose the device for its backend
    return _Run(losses, mine, _digest(parameters), memory, traffic, predicted, balance, threads, backend)


def _compare(stage: int, runs: list[_Run], expected: dict[str, torch.Tensor], losses: list[float]) -> Report:
    first = runs[0]
    differences = [_max_abs_diff(first.parameters[name], theirs) for name, theirs in expected.items()]
    same = all(torch.equal(first.parameters[name], theirs) for name, theirs in expected.items())
    return Report(
        stage=stage,
        world_size=len(runs),
        backend=first.backend,
        bit_identical=same and all(run.digest == first.digest for run in runs),
        max_abs_diff=max(differences),
        memory=first.memory,
        predicted_memory=first.predicted.memory,
        memory_matches=all(run.predicted.holds_memory(run.memory) for run in runs),
        traffic=first.traffic,
        predicted_traffic=first.predicted.traffic,
        traffic_matches=all(run.predicted.holds_traffic(run.traffic) for run in runs),
        losses=first.losses,
        reference_losses=losses,
        balance=first.balance,
    )


def _max_abs_diff(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference; a NaN on either side is infinitely far from anything."""
    difference = (ours.double() - theirs.double()).abs().nan_to_num(nan=float("inf"))
    return difference.max().item() if difference.numel() else 0.0


def _digest(parameters: dict[str, torch.Tensor]) -> bytes:
    return b"".join(map(digest, parameters.values()))


def _without(names: tuple[str, ...], keywords: dict) -> dict:
    return {key: value for key, value in keywords.items() if key not in names}


def small_gpt() -> nn.Module:
    """Return the model `verify` trains when none is given: three blocks, 43 thousand parameters."""
    return GPT(vocab=_VOCABULARY, width=32, depth=3, heads=2, context=_CONTEXT)


def random_tokens(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences and their targets for `small_gpt`, always the same for a step and a rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(_VOCABULARY, (2, _CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


# The command: python -m zerolab verify


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of ``python -m zerolab verify``."""
    parser.add_argument("--stage", type=int, nargs="+", default=[0, 1, 2, 3], help="default: 0 1 2 3")
    parser.add_argument("--world-size", type=int, nargs="+", default=[1, 2, 4], help="default: 1 2 4")
    parser.add_argument("--steps", type=int, default=3, help="training steps to compare after (default 3)")
    parser.add_argument("--precision", default="fp32", help="default: fp32", metavar="|".join(PRECISIONS))
    parser.add_argument("--backend", default="auto", choices=BACKENDS, help="nccl lets ranks share GPUs")
    parser.add_argument("--shard-size", type=int, help="at stage 3, ranks that share a copy; default all")
    parser.add_argument(
        "--optimizer", default="Adam", help="a class of torch.optim; hidden matrices alone are given to Muon"
    )


def run(args: Namespace) -> int:
    """Verify every stage at every world size; 1 where anything differs from what was predicted."""
    by_name = {name.lower(): each for name, each in vars(torch.optim).items() if isinstance(each, type)}
    optimizer_class = by_name.get(args.optimizer.lower())
    if optimizer_class is None:
        raise ValueError(f"--optimizer is {args.optimizer!r}: name a torch.optim class, as adam or SGD")
    for world_size in args.world_size:
        check_arguments(verify, world_size, None)
    defaults: dict[str, Any] = {"precision": args.precision, "shard_size": args.shard_size}
    if optimizer_class is torch.optim.Muon:  # it takes matrices alone, so AdamW takes the rest
        defaults["params"], optimizer_class = matrices_by(optimizer_class), torch.optim.AdamW
    settings = (optimizer_class, args.steps, args.backend, defaults)
    return print_reports(
        report
        for world_size in args.world_size
        for report in _verify_stages(args.stage, world_size, *settings)
    )

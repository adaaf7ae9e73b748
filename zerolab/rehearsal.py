"""Rehearse a step of the engine at any world size and model size, in one process without memory.

Tensors on the meta device have shapes and no contents; a fake process group has ranks and no messages.
With both, the engine that trains on real ranks runs its hooks, its stages and a stock optimizer for rank 0
of a thousand. What a rank would hold and send is then counted. No formula is used here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map

from zerolab.checkpointing import Checkpointing
from zerolab.engine.tensors import tensors_in
from zerolab.measure import MeasuredStates
from zerolab.models import GPT
from zerolab.optimizer import ZeroOptimizer
from zerolab.optimizer.owners import Balance
from zerolab.optimizer.probe.state_bytes import NumbersOfMeta
from zerolab.tensor_parallel import TensorParallel, parallelize
from zerolab.tensor_parallel.split import Pair
from zerolab.trace import Traffic


@dataclass(frozen=True)
class Rehearsal:
    """What rank 0 held after the step and sent in it, and its peak in each phase, without activations.

    Attributes:
        psi: parameters of the model. rank_psi: of rank 0's part of it, where ranks share a copy of the model.
        traffic: what rank 0 sent to data-parallel ranks.
        tensor_parallel_traffic: what it sent to the ranks that share its copy.
        checkpoints_bytes: the inputs of blocks that it kept on its device from forward to backward.
        offloaded_checkpoints_bytes: those that it kept elsewhere.
        balance: how evenly parameters are shared that ranks own whole, as for Muon; None where all are cut.
    """

    psi: int
    rank_psi: int
    memory: MeasuredStates
    traffic: Traffic
    tensor_parallel_traffic: Traffic
    peak_by_phase: dict[str, int]
    checkpoints_bytes: int
    offloaded_checkpoints_bytes: int
    balance: Balance | None


def rehearse(
    model_fn: Callable[[], nn.Module],
    world_size: int = 1024,
    stage: int = 3,
    precision: str = "mixed",
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
    inputs: Callable[[], object] | None = None,
    tensor_parallel: int = 1,
    pairs: Callable[[nn.Module], Iterable[Pair]] | None = None,
    checkpointing: Callable[[TensorParallel], Checkpointing] | None = None,
    **defaults: Any,
) -> Rehearsal:
    """Run two training steps of ``model_fn()`` as one of ``world_size`` ranks, without data or peers.

    Args:
        world_size: all ranks, tensor-parallel ones included.
        model_fn: builds the model; its parameters are created on the meta device, so their values never
            exist.
        inputs: builds one rank's arguments for forward, whose contents do not matter; by default a few
            tokens and targets, as for zerolab.models.GPT.
        tensor_parallel: how many ranks share one copy of the model, cut by `zerolab.parallelize`.
        pairs: its pairs of linear layers, given the model, where it is not made of zerolab.models.Block.
        checkpointing: makes the `Checkpointing` of a zerolab.models.GPT, given the ranks that share its copy:
            ``zerolab.Checkpointing`` itself partitions over them. ``lambda ranks: zerolab.Checkpointing()``
            keeps whole inputs.
        defaults: the optimizer's keywords, and ZeroOptimizer's own.
    Memory: a few MB for objects and shapes, however large the model.
    Raises: RuntimeError where this process belongs to a process group already; ValueError and TypeError as
        ZeroOptimizer and parallelize, for a world size below 1, for one that ``tensor_parallel`` does not
        divide, and for checkpoints that are partitioned without tensor parallelism.
    """
    with rehearsing(
        model_fn, world_size, stage, precision, optimizer_class, inputs, tensor_parallel, pairs,
        checkpointing, **defaults,
    ) as job:  # fmt: skip
        for _ in range(2):  # the first allocates the optimizer's state and learns the order to prefetch in
            checkpoints_bytes, offloaded_bytes = job.pass_forward_and_backward()
            job.update()
        sharing, optimizer = job.sharing, job.optimizer
        return Rehearsal(
            psi=job.psi,
            rank_psi=_numel(optimizer.model),
            memory=optimizer.memory(),
            traffic=optimizer.trace.traffic(1),
            tensor_parallel_traffic=Traffic() if tensor_parallel == 1 else sharing.trace.traffic(1),
            peak_by_phase=dict(optimizer.meter.peak_by_phase),
            checkpoints_bytes=checkpoints_bytes,
            offloaded_checkpoints_bytes=offloaded_bytes,
            balance=optimizer.balance,
        )


@dataclass(frozen=True)
class Job:
    """A model and its optimizer on the meta device, ready to run steps.

    Attributes:
        psi: parameters of the whole model.
        sharing: the ranks that share this copy of it.
    """

    psi: int
    optimizer: ZeroOptimizer
    sharing: TensorParallel
    arguments: object
    kept: Checkpointing

    def pass_forward_and_backward(self) -> tuple[int, int]:
        """Compute the gradients of a step.

        Returns the bytes of checkpoints on the device, and elsewhere, between forward and backward.
        """
        self.optimizer.zero_grad()
        loss = self.optimizer.scale(_loss(self.optimizer.model, self.arguments))
        held = self.kept.held_bytes, self.kept.offloaded_bytes
        loss.backward()
        return held

    def update(self) -> None:
        """Update the parameters, which ends the step."""
        with NumbersOfMeta():  # some updates read a norm
            self.optimizer.step()


@contextmanager
def rehearsing(
    model_fn: Callable[[], nn.Module],
    world_size: int,
    stage: int,
    precision: str = "mixed",
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
    inputs: Callable[[], object] | None = None,
    tensor_parallel: int = 1,
    pairs: Callable[[nn.Module], Iterable[Pair]] | None = None,
    checkpointing: Callable[[TensorParallel], Checkpointing] | None = None,
    **defaults: Any,
) -> Iterator[Job]:
    """Build the job of `rehearse`, which has the same arguments, and end it."""
    _check(world_size, tensor_parallel)
    _check_functions(model_fn=model_fn, inputs=inputs, pairs=pairs, checkpointing=checkpointing)
    if "process_group" in defaults:
        raise ValueError("a rehearsal has process groups of its own: leave process_group out")
    with _fake_world(world_size):
        with torch.device("meta"):
            model = _built(model_fn)
            arguments = _tokens() if inputs is None else tree_map(_without_contents, inputs())
        psi = _numel(model)
        sharing = TensorParallel(_group(range(tensor_parallel)))  # the ranks of one copy
        if tensor_parallel > 1:
            parallelize(model, sharing, None if pairs is None else pairs(model))
            others = _group(range(0, world_size, tensor_parallel))
            defaults.update(tensor_parallel=sharing, process_group=others)
        kept = Checkpointing() if checkpointing is None else _checkpoint(model, checkpointing(sharing))
        optimizer = ZeroOptimizer(model, optimizer_class, stage=stage, precision=precision, **defaults)
        yield Job(psi, optimizer, sharing, arguments, kept)


def _without_contents(leaf: Any) -> Any:
    """A tensor of the user's on the meta device; anything else as it is."""
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _checkpoint(model: nn.Module, checkpointing: Checkpointing) -> Checkpointing:
    """Have the model run its blocks through ``checkpointing``, which is returned."""
    if not isinstance(model, GPT):
        raise ValueError(
            f"checkpointing was given for a {type(model).__name__}: a rehearsal sets that of a "
            "zerolab.models.GPT; call the blocks of another model through checkpointing(block, ...) in its "
            "forward"
        )
    if checkpointing.partition is not None and checkpointing.partition.size == 1:
        raise ValueError(
            "checkpointing partitions over the ranks that share a copy of the model, and tensor_parallel is "
            "1, so none do: pass tensor_parallel=2 or more, or keep whole inputs with "
            "checkpointing=lambda ranks: zerolab.Checkpointing()"
        )
    model.checkpointing = checkpointing
    return checkpointing


def _check(world_size: int, tensor_parallel: int) -> None:
    for name, value in (("world_size", world_size), ("tensor_parallel", tensor_parallel)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: pass a whole number of 1 or more")
    if world_size % tensor_parallel:
        raise ValueError(
            f"tensor_parallel is {tensor_parallel}, which does not divide the world_size {world_size}: pass "
            f"a divisor of it, or a multiple of {tensor_parallel} as world_size"
        )


_EXAMPLES = {
    "model_fn": 'lambda: zerolab.models.make("gpt-tiny")',
    "inputs": "lambda: (tokens, targets)",
    "pairs": "lambda model: [(model.up, model.down)]",
    "checkpointing": "lambda ranks: zerolab.Checkpointing()",
}


def _check_functions(**functions: object) -> None:
    """Refuse what was built already. A module and a Checkpointing can be called, and build nothing."""
    for name, function in functions.items():
        built = isinstance(function, nn.Module | Checkpointing) or not callable(function)
        if built and function is not None:
            raise TypeError(
                f"{name} is a {type(function).__name__}: pass a function that builds what is needed, because "
                f"a rehearsal builds it on the meta device, as in {name}={_EXAMPLES[name]}"
            )


def _built(model_fn: Callable[[], nn.Module]) -> nn.Module:
    model = model_fn()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model_fn() returned {model!r}: return the module that it builds")
    return model


@contextmanager
def _fake_world(world_size: int) -> Iterator[None]:
    """A default process group of that many ranks: this process is rank 0, and there are no others."""
    if dist.is_initialized():
        raise RuntimeError(
            "this process belongs to a process group: rehearse in a process of its own, outside launch"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _group(ranks: Iterable[int]) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.new_group(list(ranks)))


def _numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Sixteen tokens and their targets, whatever they are."""
    tokens = torch.zeros(1, 16, dtype=torch.long)
    return tokens, tokens


def _loss(model: nn.Module, arguments: object) -> torch.Tensor:
    """Return one number to differentiate: forward's own loss, or the sum of what it returns."""
    if isinstance(arguments, Mapping):
        output = model(**arguments)
    else:
        output = model(*arguments) if isinstance(arguments, tuple) else model(arguments)
    return torch.stack([each.float().sum() for each in tensors_in(output) if each.requires_grad]).sum()

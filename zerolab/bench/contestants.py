"""Build the contestants: one model, data and update, trained on many ranks by each engine.

Every engine is used as its documentation says to, with nothing tuned; all get the same optimizer class with
the same flags.
"""

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam

from zerolab.devices import device
from zerolab.optimizer import STAGES, ZeroOptimizer

LEARNING_RATE = 1e-4
UPDATES = {"exact": {"foreach": False, "fused": False}, "fused": {"fused": True}}
"""Adam's flags in each table: torch's loop, which gives the same bits however tensors are cut, or its fused
kernel."""

FLOOR = "floor"


@dataclass
class Contestant:
    """One engine with a model of its own: it takes steps, and shows its parameters.

    Attributes:
        loss, backward, update, clear: the four parts of its training step.
        read: a copy of its parameters, whole, by name; every rank calls it.
        model, optimizer: what holds its parameters with their gradients, and its optimizer state.
        zero, stage: zerolab's own optimizer, which can tell more, and the stage it was built for.
    """

    loss: Callable[..., Tensor]
    update: Callable[[], object]
    clear: Callable[[], None]
    read: Callable[[], dict[str, Tensor]]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[[Tensor], object] = Tensor.backward
    zero: ZeroOptimizer | None = None
    stage: int | None = None

    def step(self, batch: tuple[Tensor, ...]) -> None:
        """One training step, from a batch to updated parameters whose gradients are cleared."""
        self.train([batch])

    def train(self, batches: Iterable[tuple[Tensor, ...]]) -> None:
        """Training steps, one after the other. What the last one leaves under way is over at the end."""
        for batch in batches:
            self.backward(self.loss(*batch))
            self.update()
            self.clear()
        if self.zero is not None:
            self.zero.engine.finish_gathers()


def enter(name: str, build: Callable[[], nn.Module], update: str, seed: int = 0) -> Contestant:
    """Build a contestant from the seed that all of them begin with."""
    torch.manual_seed(seed)
    return CONTESTANTS[name](build().to(device()), UPDATES[update])


def absent(name: str) -> str | None:
    """Return why a contestant cannot run here, or None if it can."""
    if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return "not installed"
    return None


def alone(model: nn.Module, flags: dict) -> Contestant:
    """Train on every rank without communication: the lower bound on the time of a step."""
    optimizer = Adam(model.parameters(), lr=LEARNING_RATE, **flags)
    return Contestant(model, optimizer.step, optimizer.zero_grad, partial(_copy, model), model, optimizer)


def ddp(model: nn.Module, flags: dict) -> Contestant:
    """torch's DistributedDataParallel, and the stock optimizer on every rank."""
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = Adam(model.parameters(), lr=LEARNING_RATE, **flags)
    return Contestant(wrapped, optimizer.step, optimizer.zero_grad, partial(_copy, model), model, optimizer)


def ddp_with_zero(model: nn.Module, flags: dict) -> Contestant:
    """DistributedDataParallel, with torch's own optimizer of stage 1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=LEARNING_RATE, **flags)
    return Contestant(wrapped, optimizer.step, optimizer.zero_grad, partial(_copy, model), model, optimizer)


def fully_sharded(model: nn.Module, flags: dict, nodes: int = 1, **options) -> Contestant:
    """torch's fully_shard (FSDP2): each block a unit and the rest the root, which is how zerolab cuts too.

    ``nodes``: with two or more, shards stay within a node and each node has a copy of them (hybrid sharding).
    ``options`` are those of fully_shard, for the blocks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    world_size = dist.get_world_size()
    shape = (world_size,) if nodes == 1 else (nodes, world_size // nodes)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=names)
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh)
    optimizer = Adam(model.parameters(), lr=LEARNING_RATE, **flags)

    def read() -> dict[str, Tensor]:
        return {name: cast(DTensor, p).full_tensor().detach().clone() for name, p in model.named_parameters()}

    return Contestant(model, optimizer.step, optimizer.zero_grad, read, model, optimizer)


def deepspeed(model: nn.Module, flags: dict, stage: int) -> Contestant:
    """DeepSpeed's ZeRO in fp32 with the same torch optimizer, by zero_allow_untested_optimizer."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    import deepspeed as library

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    optimizer = Adam(model.parameters(), lr=LEARNING_RATE, **flags)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # its default of 1.0 would train something else, and cost it time
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config)

    def read() -> dict[str, Tensor]:
        with library.zero.GatheredParameters(list(model.parameters())):
            return _copy(model)

    inner = engine.optimizer
    return Contestant(engine, engine.step, _cleared_by_step, read, model, inner, engine.backward)


def zero_optimizer(model: nn.Module, flags: dict, stage: int) -> Contestant:
    """This package, with its defaults."""
    optimizer = ZeroOptimizer(model, Adam, stage=stage, lr=LEARNING_RATE, **flags)

    def read() -> dict[str, Tensor]:
        with optimizer.full_params():
            return _copy(model)

    parts = (model, optimizer.step, optimizer.zero_grad, read, model, optimizer)
    return Contestant(*parts, zero=optimizer, stage=stage)


def _cleared_by_step() -> None:
    """DeepSpeed's step clears the gradients itself."""


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


CONTESTANTS: dict[str, Callable[[nn.Module, dict], Contestant]] = {
    FLOOR: alone,
    "ddp": ddp,
    "ddp+zero": ddp_with_zero,
    "fully_shard": fully_sharded,
    **{f"deepspeed-{stage}": partial(deepspeed, stage=stage) for stage in (1, 2, 3)},
    **{f"zerolab-{stage}": partial(zero_optimizer, stage=stage) for stage in STAGES},
}

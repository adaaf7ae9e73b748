"""Train in one process, as the reference for data parallelism.

One process runs every rank's micro-batch in rank order, adds up the gradients in that order, divides once by
N and takes one step of the stock optimizer. It has no shards, units or stages, so it cannot share a mistake
with them.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zerolab.devices import device
from zerolab.launcher.launcher import threads_per_rank
from zerolab.optimizer.parameter_groups import parameter_groups
from zerolab.optimizer.probe import keywords_of_group
from zerolab.precision import PRECISIONS, Precision


def reference(
    model_fn: Callable[[], nn.Module],
    inputs: Callable[[int, int], object],
    world_size: int,
    optimizer_class: type[torch.optim.Optimizer],
    steps: int,
    threads: int | None = None,
    precision: str = "fp32",
    params: Callable[[nn.Module], Iterable] | None = None,
    shard_size: int | None = None,
    **defaults,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train in one process; return parameters by name after ``steps`` steps, and rank 0's losses.

    Args:
        threads: as many as a rank of the sharded run has, because a matrix product split over more threads
            adds up in another order.
        shard_size: as of ZeroOptimizer: the gradients of as many ranks are added up first, and then these
            sums.
    """
    torch.set_num_threads(threads or threads_per_rank(world_size))
    compute_deterministically()
    torch.manual_seed(0)
    model = model_fn().to(device())
    twins = _Twins(model, PRECISIONS[precision])
    optimizers = _optimizers(twins, optimizer_class, defaults, params)
    losses = []
    for step in range(steps):
        for rank in range(world_size):
            loss = loss_of(model, inputs, step, rank, twins.precision)
            (loss * twins.scale).backward()
            twins.collect(first_of_group=rank % (shard_size or world_size) == 0)
            losses += [loss.item()] if rank == 0 else []
        if twins.average(world_size):
            for optimizer in optimizers:
                optimizer.step()
        twins.publish()
    return {name: p.detach() for name, p in model.named_parameters()}, losses


def _optimizers(
    twins: "_Twins", optimizer_class: type, defaults: dict, params: Callable | None
) -> list[torch.optim.Optimizer]:
    """One optimizer for the groups without a class of their own, and one for each other group."""
    master_of = dict(zip(twins.parameters, twins.masters, strict=True))
    groups = [
        group | {"params": [master_of[p] for p in group["params"] if p in master_of]}
        for group in parameter_groups(twins.model, params)
    ]
    plain = [group for group in groups if "optimizer" not in group]
    own = [group for group in groups if "optimizer" in group]
    return [*([optimizer_class(plain, **defaults)] if plain else []), *map(_own_optimizer, own)]


def _own_optimizer(group: dict) -> torch.optim.Optimizer:
    """The optimizer of a group that names its class, whose keywords its other options are."""
    given = {key: value for key, value in group.items() if key not in ("params", "optimizer")}
    keywords, options = keywords_of_group(group["optimizer"], given)
    return group["optimizer"]([options | {"params": group["params"]}], **keywords)


class _Twins:
    """The parameters in the run's dtype, beside the fp32 masters that are updated; in fp32 they are one.

    What one process has to do to give the numbers of a sharded run: gradients are added up in fp32 and rank
    order, divided once, and rounded once where the run keeps them in 16 bits. In fp16 the loss is multiplied
    by ``scale``, and a step whose gradients overflow halves it and is left out.
    """

    def __init__(self, model: nn.Module, precision: Precision):
        self.model, self.precision = model, precision
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters: Sequence[torch.Tensor] = self.parameters
        self.scale = 2.0**15 if precision.gradients == torch.float16 else 1.0
        if precision.has_masters:
            self.masters = [p.detach().clone().requires_grad_() for p in self.parameters]
            exact = [p for m in model.modules() if hasattr(m, "running_var") for p in m.parameters()]
            for parameter in model.parameters():
                if precision.lowers(parameter.dtype) and not any(parameter is each for each in exact):
                    parameter.data = parameter.data.to(precision.parameters)
        self.sums: list[list[torch.Tensor | None]] = []

    def collect(self, first_of_group: bool) -> None:
        """Add one rank's gradients to the sums of its group."""
        if first_of_group:
            self.sums.append([None] * len(self.parameters))
        sums = self.sums[-1]
        for index, parameter in enumerate(self.parameters):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                total = sums[index]
                sums[index] = gradient.float() if total is None else total.add_(gradient)

    def _mean(self, parameter: nn.Parameter, sums: list[torch.Tensor], world_size: int) -> torch.Tensor:
        """The mean over all ranks, of the sums of the groups that used the parameter.

        Gradients of 16 bits are rounded to them in each group, and once more for all groups.
        """
        groups, dtype = len(self.sums), self.precision.gradients
        if parameter.dtype.itemsize == 4 or dtype.itemsize == 4:
            return sum(sums[1:], start=sums[0]) / world_size
        means = [(each / (world_size // groups)).to(dtype).float() for each in sums]
        return (sum(means[1:], start=means[0]) / groups).to(dtype).float()

    def average(self, world_size: int) -> bool:
        """Hand the masters the mean; a parameter that no rank used gets none. Whether all of it is finite."""
        finite = True
        for parameter, master, *found in zip(self.parameters, self.masters, *self.sums, strict=True):
            sums = [each for each in found if each is not None]
            gradient = self._mean(parameter, sums, world_size) if sums else None
            if gradient is not None and self.precision.gradients == torch.float16:
                finite = finite and bool(gradient.isfinite().all())
                gradient /= self.scale
            master.grad = gradient
        self.sums = []
        if not finite:
            self.scale /= 2
        return finite

    @torch.no_grad()
    def publish(self) -> None:
        """Round the updated masters into the parameters."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None
            if parameter is not master:
                parameter.copy_(master)


def compute_deterministically() -> None:
    """On a GPU, have equal inputs give equal bits: no TF32, no nondeterministic kernel."""
    if device().type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)


def loss_of(model: nn.Module, inputs: Callable, step: int, rank: int, precision: Precision) -> torch.Tensor:
    """The loss of one rank's micro-batch, with the random numbers (dropout's, say) that belong to it."""
    to_device = lambda leaf: leaf.to(device()) if isinstance(leaf, torch.Tensor) else leaf
    arguments = precision.cast(tree_map(to_device, inputs(step, rank)))
    torch.manual_seed(1_000_003 * (step + 1) + rank)
    if isinstance(arguments, Mapping):
        return model(**arguments)
    return model(*arguments) if isinstance(arguments, tuple) else model(arguments)

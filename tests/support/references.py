"""Replicas: what data parallelism promises to equal, in one process and in plain torch.

This is a second reference beside zerolab.parity's. It is written another way and imports nothing of zerolab,
so that neither can hide a mistake of the other. Each rank is a whole replica of the model with buffers of its
own. Gradients are added up by hand in rank order, one micro-batch after the other, and divided once by the
number of ranks; then one stock optimizer takes one step.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils._pytree import tree_map

from support.seeding import seed_all

Tensors = dict[str, torch.Tensor]
Passes = Callable[[nn.Module, int, int], Iterator[None]]
"""passes(model, step, rank): a generator that runs one rank's step and stops after each backward pass."""

DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "mixed": (torch.bfloat16, torch.bfloat16),
    "mixed_fp32_grads": (torch.bfloat16, torch.float32),
    "mixed_fp16": (torch.float16, torch.float16),
}
"""By precision: the dtypes of parameters and of gradients."""


class Replicas:
    """As many replicas as there are ranks, and one optimizer for all of them.

    ``build`` is called with the same seed for each. ``groups`` gives a model's parameter groups.

    Attributes:
        whole: the fp32 model that the optimizer updates. No data goes through it.
        models: the replicas by rank, in the run's dtype.
        total: by name, the gradients summed over ranks and micro-batches.
        pending: for each rank by name, the gradients that were not summed over the ranks yet.
        averaged: whether ``total`` is divided by the number of ranks.
        scale: what losses are multiplied by, in fp16. An overflow halves it, and that step is left out.
        applied: what the losses of these gradients were multiplied by.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        world_size: int,
        optimizer_class: type[torch.optim.Optimizer],
        groups: Callable[[nn.Module], list] | None = None,
        precision: str = "fp32",
        **defaults,
    ):
        self.build, self.whole = build, seeded(build)
        self.masters = dict(self.whole.named_parameters())
        listed = groups(self.whole) if groups else [p for p in self.masters.values() if p.requires_grad]
        self.optimizer = optimizer_class(listed, **defaults)
        self.resize(world_size, precision)

    def resize(self, world_size: int, precision: str = "fp32") -> None:
        """Go on with another number of ranks or in another precision, as a run does from a checkpoint.

        Replicas and their buffers are new, and gradients are forgotten. A frozen parameter has no fp32
        master, so only the digits of its own dtype stay.
        """
        self.dtype, self.gradient_dtype = DTYPES[precision]
        self.scale, self.applied = 2.0**15 if precision == "mixed_fp16" else 1.0, 1.0
        self.models = [lowered(seeded(self.build), self.dtype) for _ in range(world_size)]
        self.parameters = [dict(model.named_parameters()) for model in self.models]
        self.frozen = [name for name, p in self.parameters[0].items() if not p.requires_grad]
        self.zero_grad()
        self.round_frozen()
        self.publish()

    @property
    def world_size(self) -> int:
        return len(self.models)

    # Gradients.

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What to call backward on."""
        self.applied = self.scale
        return loss * self.scale

    def collect(self) -> None:
        """After a backward pass on each replica: take the gradients out, on top of those that are pending."""
        for parameters, mine in zip(self.parameters, self.pending, strict=True):
            for name, p in parameters.items():
                if p.grad is not None:
                    gradient = p.grad.to(self._dtype_of(p))
                    mine[name] = mine[name] + gradient if name in mine else gradient
                    p.grad = None

    def reduce(self) -> None:
        """Add the pending gradients up in rank order, and the sum to those of earlier micro-batches.

        16 bits cannot hold a sum exactly: it is taken in fp32, divided, and rounded once.
        """
        names = dict.fromkeys(name for mine in self.pending for name in mine)
        for name in names:
            first, *others = (mine[name] for mine in self.pending if name in mine)
            summed = first.float()
            for gradient in others:
                summed = summed + gradient.float()
            if first.dtype != torch.float32:
                summed = (summed / self.world_size).to(first.dtype)
            self.total[name] = self._sum_so_far(name) + summed if name in self.total else summed
        if names:
            self.total |= {name: self._sum_so_far(name) for name in self.total.keys() - names.keys()}
            self.averaged = False
        self.pending = [{} for _ in self.models]

    def _sum_so_far(self, name: str) -> torch.Tensor:
        total = self.total[name]
        return total * self.world_size if self.averaged and total.dtype == torch.float32 else total

    def average(self) -> None:
        """Divide the sums by the number of ranks, once."""
        if not self.averaged:
            for name, total in self.total.items():
                self.total[name] = total / self.world_size if total.dtype == torch.float32 else total
        self.averaged = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or set those that there are to zero."""
        if set_to_none:
            self.total, self.averaged = {}, False
        else:
            kept = {name: gradient for mine in [self.total, *self.pending] for name, gradient in mine.items()}
            self.total = {name: torch.zeros_like(gradient) for name, gradient in kept.items()}
        self.pending = [{} for _ in self.models]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Reduce what is pending, and scale the mean gradients to a norm of at most ``max_norm``."""
        self.reduce()
        self.average()
        norms = [
            gradient.double().norm(norm_type).cpu() for gradient in self.total.values() if gradient.numel()
        ]
        norm = torch.stack([torch.zeros(()).double(), *norms]).norm(norm_type).float() / self.applied
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for name, gradient in self.total.items():
            self.total[name] = gradient.clone().mul_(factor.to(gradient.device))  # in its own dtype
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Reduce what is pending, and limit each element of the mean gradients. Overflows stay."""
        self.reduce()
        self.average()
        for name, gradient in self.total.items():
            limited = (gradient.float() / self.applied).clamp(-clip_value, clip_value) * self.applied
            overflowed = (self.applied != 1.0) & gradient.isinf()
            self.total[name] = torch.where(overflowed, gradient, limited.to(gradient.dtype))

    def _dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        return self.gradient_dtype if parameter.dtype == self.dtype else parameter.dtype

    # Parameters.

    def step(self) -> None:
        """Reduce what is pending, and let the optimizer update from the mean. Gradients stay."""
        self.reduce()
        self.average()
        if self.scale != 1.0 and not all(gradient.isfinite().all() for gradient in self.total.values()):
            self.scale /= 2
            return
        for name, master in self.masters.items():
            mean = self.total.get(name)
            master.grad = None if mean is None else mean.to(master.dtype) / self.applied
        self.optimizer.step()
        self.publish()

    @torch.no_grad()
    def take_over_writes(self) -> None:
        """Write into the fp32 parameters what somebody wrote into the first replica's.

        They keep their own digits wherever these round to the value that is there.
        """
        for name, theirs in self.parameters[0].items():
            master = self.masters[name]
            unwritten = master.to(theirs.dtype) == theirs
            master.copy_(torch.where(unwritten, master, theirs.to(master.dtype)))

    @torch.no_grad()
    def round_frozen(self) -> None:
        """Let go of the digits that only an fp32 master would keep."""
        for name in self.frozen:
            self.masters[name].copy_(self.masters[name].to(self.parameters[0][name].dtype))

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the fp32 parameters into every replica, rounded to its dtype."""
        for parameters in self.parameters:
            for name, p in parameters.items():
                rounded = self.masters[name].to(p.dtype)
                if not torch.equal(p, rounded):  # autograd takes any copy for a change
                    p.copy_(rounded)

    # Training.

    def train(self, passes: Passes, steps: int, schedule=None, start: int = 0) -> None:
        """Take so many steps, numbered from ``start``, each with the micro-batches of ``passes``."""
        for step in range(start, start + steps):
            ranks = [passes(model, step, rank) for rank, model in enumerate(self.models)]
            for _ in zip(*ranks, strict=True):
                self.collect()
                self.reduce()
            self.step()
            if schedule:
                schedule.step()
            self.zero_grad()


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    seed_all(0)
    return build()


def lowered(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in ``dtype``, its inputs too. BatchNorm stays in fp32, as do buffers."""
    exact = [
        p for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) for p in m.parameters()
    ]
    for p in model.parameters():
        if p.dtype == torch.float32 and not any(p is each for each in exact):
            p.data = p.data.to(dtype)
    if dtype != torch.float32:
        cast = lambda leaf: leaf.to(dtype) if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf
        model.register_forward_pre_hook(lambda _, *inputs: tree_map(cast, inputs), with_kwargs=True)
    return model


def copies(named: Iterator[tuple[str, torch.Tensor]]) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in named}

"""Side: what a user does in the same words to a stock optimizer and to a ZeroOptimizer."""

import copy

import torch
from torch import nn

from support.loops.plans import Loop
from support.loops.user_code import held_back

SCHEDULES = {"ExponentialLR": {"gamma": 0.9}, "StepLR": {"step_size": 2}, "CosineAnnealingLR": {"T_max": 7}}


class Side:
    """A loop's model and optimizer.

    Attributes:
        listed_model: the model whose parameters are in the optimizer's groups.
        scheduler: of the learning rates, once one was asked for.
        kept: a state dict of the optimizer.
        kept_gradient: a parameter and its gradient.
        added_lr: the learning rate of the group that was added, if it was.
    """

    loop: Loop
    optimizer: torch.optim.Optimizer
    listed_model: nn.Module
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    kept: dict | None = None
    kept_gradient: tuple | None = None
    added_lr: float | None = None

    def schedule(self, kind: str) -> list[float]:
        """Begin a schedule, or go on with it."""
        if self.scheduler is None:
            self.scheduler = getattr(torch.optim.lr_scheduler, kind)(self.optimizer, **SCHEDULES[kind])
        else:
            self.scheduler.step()
        return [group["lr"] for group in self.optimizer.param_groups]

    def set_option(self, place: int, key: str, value: float) -> None:
        groups = self.optimizer.param_groups
        groups[place % len(groups)][key] = value

    def add_group(self, lr: float) -> None:
        """Have the parameters trained that were held back; a schedule would not know their group."""
        held = held_back(self.loop, self.listed_model)
        if held and self.added_lr is None and self.scheduler is None:
            self.added_lr = lr
            self.optimizer.add_param_group({"params": held, "lr": lr})

    def keep_state(self) -> None:
        self.kept = copy.deepcopy(self.optimizer.state_dict())

    def restore_state(self) -> None:
        if self.kept:
            self.optimizer.load_state_dict(copy.deepcopy(self.kept))

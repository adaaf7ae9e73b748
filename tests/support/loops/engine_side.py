"""EngineSide: what a user does, done with a ZeroOptimizer on one rank of many."""

import contextlib
import copy
from pathlib import Path

import torch
import torch.distributed as dist

import zerolab
from support.loops.models import picked
from support.loops.plans import OPTIMIZERS, Loop, Setting
from support.loops.user_code import (
    Refusal,
    among,
    build,
    groups_of,
    held_back,
    load_part,
    loss_of,
    raising_in_backward,
    raising_in_forward,
    scheduler_of,
    stored_weights,
    write,
)  # fmt: skip
from support.references import Tensors, copies

ProcessGroups = dict[int, dist.ProcessGroup]
"""By world size: the group of the first ranks. A rank that is no member has none."""


class EngineSide:
    """The same methods as `ReplicasSide`'s, with the same answers on each rank."""

    def __init__(
        self,
        loop: Loop,
        setting: Setting,
        groups: ProcessGroups,
        folder: Path,
        seed: int = 0,
        added_lr: float | None = None,
    ):
        """Build the model from the weights of ``seed``, and its optimizer.

        ``added_lr``: of the group that was added in the meantime, where a run is resumed.
        """
        self.loop, self.setting, self.group, self.folder = loop, setting, groups[setting.world_size], folder
        self.scheduler = self.kept = None
        self.is_saved = False
        self.shelf: list[torch.Tensor] = []
        torch.manual_seed(seed)
        self.model = build(loop)
        name, defaults = OPTIMIZERS[loop.optimizer]
        units = {"default": None, "all in one": [], "the first block": list(self.model.blocks)[:1]}
        listed = groups_of(loop, self.model)
        self.added_lr = added_lr
        if added_lr is not None:
            listed.append({"params": held_back(loop, self.model), "lr": added_lr})
        self.optimizer = zerolab.ZeroOptimizer(
            self.model, getattr(torch.optim, name), setting.stage, listed, units[setting.units],
            setting.precision, self.group, setting.prefetch, setting.in_flight, **defaults,
        )  # fmt: skip

    @property
    def may_add(self) -> bool:
        return self.added_lr is None and bool(held_back(self.loop, self.model))

    @property
    def rank(self) -> int:
        return self.optimizer.rank

    def _loss(self, data: int) -> torch.Tensor:
        return loss_of(self.model, data, self.rank)

    def recover(self) -> None:
        """After an error in a pass: forget its gradients and every graph."""
        self.shelf.clear()
        self.model.train()
        self.optimizer.zero_grad()

    # Passes.

    def train(self, data: int):
        loss = self._loss(data)
        loss.backward()
        return loss.item()

    def without_sync(self, data: int):
        with self.optimizer.no_sync():
            return self.train(data)

    def train_on_two(self, first: int, second: int):
        loss = self._loss(first) + self._loss(second)
        loss.backward()
        return loss.item()

    def forward(self, data: int):
        self.shelf.append(self._loss(data))
        return self.shelf[-1].item()

    def backward(self, retain: bool, newest: bool):
        if not self.shelf:
            return None
        loss = self.shelf[-newest] if retain else self.shelf.pop(-newest)
        loss.backward(retain_graph=retain)
        return loss.item()

    def evaluate(self, data: int, grad: bool):
        self.model.eval()
        with torch.set_grad_enabled(grad):
            loss = self._loss(data)
        self.model.train()
        return loss.item()

    def evaluate_inside(self, data: int):
        with self.optimizer.full_params():
            return self.evaluate(data, False)

    def train_inside(self, data: int):
        with self.optimizer.full_params():
            return self.train(data)

    def raise_in_forward(self, data: int, block: int):
        with contextlib.suppress(Refusal), raising_in_forward(self.model, block):
            self._loss(data)

    def raise_in_backward(self, data: int, block: int):
        with contextlib.suppress(Refusal), raising_in_backward(self.model, block):
            self._loss(data).backward()
        self.recover()

    # Updates.

    def step(self):
        self.optimizer.step()

    def step_with_closure(self, data: int):
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self._loss(data)
            loss.backward()
            return loss

        return self.optimizer.step(closure).item()

    def zero_grad(self, kind: str):
        if kind == "the model's":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=kind == "none")

    def clip(self, max_norm: float, norm_type: float):
        return self.optimizer.clip_grad_norm_(max_norm, norm_type).item()

    def clip_with_torch(self):
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.3).item()

    def schedule(self, kind: str):
        if self.scheduler is None:
            self.scheduler = scheduler_of(kind, self.optimizer)
        else:
            self.scheduler.step()
        return [group["lr"] for group in self.optimizer.param_groups]

    def set_option(self, place: int, key: str, value: float):
        groups = self.optimizer.param_groups
        groups[place % len(groups)][key] = value

    def add_group(self, lr: float):
        if self.may_add and self.scheduler is None:
            self.added_lr = lr
            self.optimizer.add_param_group({"params": held_back(self.loop, self.model), "lr": lr})

    def gradients(self) -> Tensors:
        return self.optimizer.full_grads()

    # Parameters.

    def freeze(self, place: int):
        for p in among(self.loop, self.model, place, False):
            p.requires_grad_(False)

    def thaw(self, place: int):
        for p in among(self.loop, self.model, place, False):
            p.requires_grad_(True)

    def thaw_frozen(self, place: int):
        for p in among(self.loop, self.model, place, True):
            p.requires_grad_(True)

    def write(self, place: int, how: str, inside: bool):
        around = self.optimizer.full_params() if inside else contextlib.nullcontext()
        with torch.no_grad(), around:
            write(picked(self.model, (place,))[0], how)

    def load_module(self, seed: int, inside: bool, part: str):
        around = self.optimizer.full_params() if inside else contextlib.nullcontext()
        with around:
            load_part(self.model, stored_weights(self.loop, seed), part)

    def look(self) -> Tensors:
        with self.optimizer.full_params():
            return copies(self.model.named_parameters()) | self.buffers()

    def buffers(self) -> Tensors:
        return {f"buffer {name}": b.clone() for name, b in self.model.named_buffers()}

    # State.

    def keep_state(self):
        self.kept = copy.deepcopy(self.optimizer.state_dict())

    def restore_state(self):
        if self.kept:
            self.optimizer.load_state_dict(copy.deepcopy(self.kept))

    def save(self):
        zerolab.save(self.optimizer, self.folder)
        self.is_saved = True

    def load(self):
        if self.is_saved:
            zerolab.load(self.optimizer, self.folder)
            self.recover()

    def export(self) -> Tensors:
        path = self.folder.with_suffix(".pt")
        zerolab.export(self.optimizer, path)
        dist.barrier(self.group)
        stored = torch.load(path)
        return {name: stored[name].float() for name, _ in self.model.named_parameters()}

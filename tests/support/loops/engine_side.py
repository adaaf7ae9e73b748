"""EngineSide: what a user does, done with a ZeroOptimizer on one rank of many."""

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist

import zerolab
from support.loops import user_code
from support.loops.models import micro_batch, picked
from support.loops.plans import OPTIMIZERS, Loop, Setting
from support.loops.side import Side
from support.references import Tensors, copies
from support.together import update_together

ProcessGroups = dict[int, dist.ProcessGroup]
"""By world size: the group of the first ranks. A rank that is no member has none."""


class EngineSide(Side):
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
        self.is_saved = False
        self.shelf: list[torch.Tensor] = []
        torch.manual_seed(seed)
        self.model = self.listed_model = user_code.build(loop)
        kind, defaults = OPTIMIZERS[loop.optimizer]
        units = {"default": None, "all in one": [], "the first block": list(self.model.blocks)[:1]}
        listed = user_code.groups_of(loop, self.model)
        self.added_lr = added_lr
        if added_lr is not None:
            listed.append({"params": user_code.held_back(loop, self.model), "lr": added_lr})
        update_together(setting.prefetch > 0)
        self.optimizer = zerolab.ZeroOptimizer(
            self.model, kind, setting.stage, listed, units[setting.units],
            setting.precision, self.group, setting.prefetch, setting.in_flight, **defaults,
        )  # fmt: skip

    @property
    def rank(self) -> int:
        return self.optimizer.rank

    def _loss(self, data: int) -> torch.Tensor:
        return user_code.loss_of(self.model, data, self.rank)

    def recover(self) -> None:
        """After an error in a pass: forget its gradients and every graph."""
        self.shelf.clear()
        self.model.train()
        self.optimizer.zero_grad()

    # Passes.

    def train(self, data: int):
        return self._backward(self._loss(data))

    def _backward(self, loss: torch.Tensor, retain: bool = False) -> float:
        self.optimizer.scale(loss).backward(retain_graph=retain)
        return loss.item()

    def without_sync(self, data: int):
        with self.optimizer.no_sync():
            return self.train(data)

    def train_hooked(self, data: int, place: int, when: str):
        (parameter,) = picked(self.model, (place,))
        with user_code.removing_gradients(parameter, when, forget=lambda: None):
            return self.train(data)

    def train_on_two(self, first: int, second: int):
        return self._backward(self._loss(first) + self._loss(second))

    def slope(self, data: int, by_hand: bool):
        x = micro_batch(data, self.rank).requires_grad_()
        loss = self.optimizer.scale(user_code.loss_of(self.model, data, self.rank, x))
        return {"slope": user_code.slope_of(loss, x, by_hand)}

    def forward(self, data: int):
        self.shelf.append(self._loss(data))
        return self.shelf[-1].item()

    def forward_part(self, data: int, part: str):
        self.shelf.append(user_code.loss_of_part(self.model, data, self.rank, part))
        return self.shelf[-1].item()

    def train_by_parts(self, data: int):
        return self._backward(user_code.loss_by_parts(self.model, data, self.rank))

    def backward(self, retain: bool, newest: bool, sync: bool):
        if not self.shelf:
            return None
        loss = self.shelf[-newest] if retain else self.shelf.pop(-newest)
        with contextlib.nullcontext() if sync else self.optimizer.no_sync():
            return self._backward(loss, retain)

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
        with contextlib.suppress(user_code.Refusal), user_code.raising_in_forward(self.model, block):
            self._loss(data)

    def raise_inside(self, data: int, block: int):
        with (
            contextlib.suppress(user_code.Refusal),
            self.optimizer.full_params(),
            user_code.raising_in_forward(self.model, block),
        ):
            self._loss(data)

    def raise_in_closure(self, data: int, block: int):
        with contextlib.suppress(user_code.Refusal), user_code.raising_in_forward(self.model, block):
            self.optimizer.step(lambda: self._loss(data))

    def raise_in_backward(self, data: int, block: int, kind: str):
        with contextlib.suppress(user_code.Refusal), user_code.raising_in_backward(self.model, block):
            self._backward(self._loss(data))
        self.shelf.clear()
        self.zero_grad(kind)
        if kind == "the model's" and "sometimes" in self.loop.kinds:
            # model.zero_grad() does not tell the engine that the pass is over. A rank whose own pass did not
            # come to that block waits until this one uses the model or the optimizer.
            self.evaluate(data, grad=False)

    # Updates.

    def step(self):
        self.optimizer.step()

    def step_with_aliases(self) -> Tensors:
        """Read the new parameters through tensors that were taken before, as averages of weights do.

        At stage 3 there are none outside full_params().
        """
        if any(unit.shard_is_detached for unit in self.optimizer.units):
            self.optimizer.step()
            return self.look()
        aliases = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        self.optimizer.step()
        return copies(aliases.items()) | self.buffers()

    def step_with_closure(self, data: int):
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self._loss(data)
            self._backward(loss)
            return loss

        return self.optimizer.step(closure).item()

    def zero_grad(self, kind: str):
        if kind == "the model's":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=kind == "none")

    def forget(self, place: int):
        picked(self.model, (place,))[0].grad = None

    def keep_gradient(self, place: int):
        (parameter,) = picked(self.model, (place,))
        self.kept_gradient = None if parameter.grad is None else (parameter, parameter.grad)

    def put_back(self):
        """Step with the gradient that was kept."""
        if self.kept_gradient:
            (parameter, parameter.grad), self.kept_gradient = self.kept_gradient, None
            self.optimizer.step()

    def set_gradient(self, place: int):
        parameter = user_code.listed(self.optimizer, place)
        parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        self.optimizer.step()

    def watch_a_step(self):
        """In fp16 the loop that skips a step does not call it."""
        calls = user_code.calls_of_a_hook(self.optimizer.step)
        return None if self.setting.precision == "mixed_fp16" else calls

    def clip(self, max_norm: float, norm_type: float):
        return self.optimizer.clip_grad_norm_(max_norm, norm_type).item()

    def clip_values(self, clip_value: float):
        self.optimizer.clip_grad_value_(clip_value)

    def clip_with_torch(self):
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.3).item()

    def gradients(self) -> Tensors:
        return self.optimizer.full_grads()

    # Parameters.

    def freeze(self, place: int):
        for p in user_code.among(self.loop, self.model, place, False):
            p.requires_grad_(False)

    def thaw(self, place: int):
        for p in user_code.among(self.loop, self.model, place, False):
            p.requires_grad_(True)

    def thaw_frozen(self, place: int):
        for p in user_code.among(self.loop, self.model, place, True):
            p.requires_grad_(True)

    def write(self, place: int, how: str, inside: bool):
        around = self.optimizer.full_params() if inside else contextlib.nullcontext()
        with torch.no_grad(), around:
            user_code.write(picked(self.model, (place,))[0], how)

    def load_module(self, seed: int, inside: bool, part: str):
        around = self.optimizer.full_params() if inside else contextlib.nullcontext()
        with around:
            user_code.load_part(self.model, user_code.stored_weights(self.loop, seed), part)

    def look(self) -> Tensors:
        with self.optimizer.full_params():
            return copies(self.model.named_parameters()) | self.buffers()

    def copy(self, data: int) -> Tensors:
        with self.optimizer.full_params():
            return user_code.trained_copy(self.model, data, self.rank)

    def buffers(self) -> Tensors:
        return {f"buffer {name}": b.clone() for name, b in self.model.named_buffers()}

    # State.

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

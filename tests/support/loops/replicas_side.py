"""ReplicasSide: what a user does, done to N replicas in one process, without zerolab."""

import contextlib
import copy
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from support.loops import user_code
from support.loops.models import micro_batch, picked
from support.loops.plans import OPTIMIZERS, Loop, Setting
from support.loops.side import Side
from support.references import Replicas, Tensors, copies


class ReplicasSide(Side):
    """Every method answers with what a user on rank ``rank`` sees. ``ranks``: those that do it."""

    def __init__(self, loop: Loop, rank: int):
        self.loop, self.rank = loop, rank
        kind, defaults = OPTIMIZERS[loop.optimizer]
        self.replicas = Replicas(
            partial(user_code.build, loop), loop.setting.world_size, kind, partial(user_code.groups_of, loop),
            loop.setting.precision, **defaults,
        )  # fmt: skip
        self.optimizer, self.listed_model = self.replicas.optimizer, self.replicas.whole
        self.ranks = list(range(loop.setting.world_size))
        self.saved: tuple[Tensors, dict, list[Tensors]] | None = None
        self.shelf: list[dict[int, torch.Tensor]] = []

    @property
    def models(self) -> dict[int, nn.Module]:
        return {rank: self.replicas.models[rank] for rank in self.ranks}

    @property
    def _own_model(self) -> nn.Module:
        """This rank's, or the last one's where it is no member."""
        return self.replicas.models[: self.rank + 1][-1]

    def _losses(self, data: int) -> dict[int, torch.Tensor]:
        return {rank: user_code.loss_of(model, data, rank) for rank, model in self.models.items()}

    def _backward(
        self, losses: dict[int, torch.Tensor], sync: bool = True, retain: bool = False
    ) -> float | None:
        for loss in losses.values():
            self.replicas.scaled(loss).backward(retain_graph=retain)
        self.replicas.collect()
        if sync:
            self.replicas.reduce()
        return self._seen(losses)

    def _seen(self, losses: dict[int, torch.Tensor]) -> float | None:
        return losses[self.rank].item() if self.rank in losses else None

    def recover(self) -> None:
        """After an error in a pass: forget its gradients and every graph."""
        self.shelf.clear()
        for model in self.replicas.models:
            model.zero_grad()
            model.train()
        self.replicas.zero_grad()
        self._note_cleared()

    # Passes.

    def train(self, data: int):
        return self._backward(self._losses(data))

    def without_sync(self, data: int):
        return self._backward(self._losses(data), sync=False)

    def train_hooked(self, data: int, place: int, when: str):
        with contextlib.ExitStack() as hooks:
            for model in self.models.values():
                (parameter,) = picked(model, (place,))
                forget = partial(self.forget, place)
                hooks.enter_context(user_code.removing_gradients(parameter, when, forget))
            return self.train(data)

    def train_on_two(self, first: int, second: int):
        one, two = self._losses(first), self._losses(second)
        return self._backward({rank: one[rank] + two[rank] for rank in one})

    def slope(self, data: int, by_hand: bool):
        slopes = {}
        for rank, model in self.models.items():
            x = micro_batch(data, rank).requires_grad_()
            slopes[rank] = user_code.slope_of(
                self.replicas.scaled(user_code.loss_of(model, data, rank, x)), x, by_hand
            )
        self.replicas.collect()
        if not by_hand:
            self.replicas.reduce()
        return {"slope": slopes[self.rank]} if self.rank in slopes else None

    def forward(self, data: int):
        self.shelf.append(self._losses(data))
        return self._seen(self.shelf[-1])

    def forward_part(self, data: int, part: str):
        self.shelf.append(
            {rank: user_code.loss_of_part(model, data, rank, part) for rank, model in self.models.items()}
        )
        return self._seen(self.shelf[-1])

    def train_by_parts(self, data: int):
        return self._backward(
            {rank: user_code.loss_by_parts(model, data, rank) for rank, model in self.models.items()}
        )

    def backward(self, retain: bool, newest: bool, sync: bool):
        if not self.shelf:
            return None
        losses = self.shelf[-newest] if retain else self.shelf.pop(-newest)
        return self._backward(losses, sync, retain)

    def evaluate(self, data: int, grad: bool):
        for model in self.models.values():
            model.eval()
        with torch.set_grad_enabled(grad):
            losses = self._losses(data)
        for model in self.models.values():
            model.train()
        return self._seen(losses)

    def evaluate_inside(self, data: int):
        return self.evaluate(data, False)

    def train_inside(self, data: int):
        return self.train(data)

    def raise_in_forward(self, data: int, block: int):
        for rank, model in self.models.items():
            with contextlib.suppress(user_code.Refusal), user_code.raising_in_forward(model, block):
                user_code.loss_of(model, data, rank)

    def raise_inside(self, data: int, block: int):
        self.raise_in_forward(data, block)

    def raise_in_closure(self, data: int, block: int):
        self.raise_in_forward(data, block)

    def raise_in_backward(self, data: int, block: int, kind: str):
        for rank, model in self.models.items():
            with contextlib.suppress(user_code.Refusal), user_code.raising_in_backward(model, block):
                self.replicas.scaled(user_code.loss_of(model, data, rank)).backward()
        self.recover()

    # Updates.

    def step(self):
        self.replicas.step()

    def step_with_aliases(self) -> Tensors:
        self.step()
        return self.look()

    def step_with_closure(self, data: int):
        self.zero_grad("none")
        loss = self.train(data)
        self.replicas.step()
        return loss

    def zero_grad(self, kind: str):
        self.replicas.zero_grad(kind != "zeros")
        if kind != "zeros":
            self._note_cleared()

    def clip(self, max_norm: float, norm_type: float):
        return self.replicas.clip_grad_norm_(max_norm, norm_type).item()

    def clip_values(self, clip_value: float):
        self.replicas.clip_grad_value_(clip_value)

    def clip_with_torch(self):
        return self.clip(0.3, 2.0) if self.replicas.total or any(self.replicas.pending) else 0.0

    def gradients(self) -> Tensors:
        self.replicas.reduce()
        kept, averaged = dict(self.replicas.total), self.replicas.averaged
        self.replicas.average()
        mean, self.replicas.total, self.replicas.averaged = self.replicas.total, kept, averaged
        scale = self.replicas.applied
        return mean if scale == 1 else {name: gradient.float() / scale for name, gradient in mean.items()}

    def _name_of(self, place: int) -> str:
        model = self._own_model
        names = {id(p): name for name, p in model.named_parameters()}
        return names[id(picked(model, (place,))[0])]

    def forget(self, place: int):
        for gradients in (self.replicas.total, *self.replicas.pending):
            gradients.pop(self._name_of(place), None)
        self._note_cleared(self._name_of(place))

    def keep_gradient(self, place: int):
        name = self._name_of(place)
        there = any(name in gradients for gradients in (self.replicas.total, *self.replicas.pending))
        self.kept_gradient = (name, True) if there else None

    def put_back(self):
        """One that was not cleared is still there. What was cleared is lost here, so it may not be used."""
        if self.kept_gradient:
            (name, still_there), self.kept_gradient = self.kept_gradient, None
            if not still_there:
                self.replicas.total[name] = torch.full_like(self.replicas.masters[name], torch.nan)
            self.step()

    def _note_cleared(self, name: str | None = None) -> None:
        """Note that the gradient of a parameter was cleared, or of all."""
        if self.kept_gradient and name in (None, self.kept_gradient[0]):
            self.kept_gradient = self.kept_gradient[0], False

    def set_gradient(self, place: int):
        master = user_code.listed(self.optimizer, place)
        (name,) = (name for name, each in self.replicas.masters.items() if each is master)
        self.replicas.reduce()
        self.replicas.average()
        self.replicas.total[name] = torch.ones_like(master) * self.replicas.applied
        self.step()

    def watch_a_step(self):
        calls = user_code.calls_of_a_hook(self.replicas.step)
        return None if self.replicas.gradient_dtype == torch.float16 else calls

    # Parameters.

    def _among(self, place: int, frozen: bool) -> Iterator[nn.Parameter]:
        for model in self.models.values():
            yield from user_code.among(self.loop, model, place, frozen)

    def freeze(self, place: int):
        for p in self._among(place, False):
            p.requires_grad_(False)

    def thaw(self, place: int):
        for p in self._among(place, False):
            p.requires_grad_(True)

    def thaw_frozen(self, place: int):
        for p in self._among(place, True):
            p.requires_grad_(True)

    def write(self, place: int, how: str, inside: bool):
        with torch.no_grad():
            for model in self.replicas.models:
                user_code.write(picked(model, (place,))[0], how)
        self.replicas.take_over_writes()

    def load_module(self, seed: int, inside: bool, part: str):
        for model in self.replicas.models:
            user_code.load_part(model, user_code.stored_weights(self.loop, seed), part)
        self.replicas.take_over_writes()

    def look(self) -> Tensors:
        return copies(self._own_model.named_parameters()) | self.buffers()

    def copy(self, data: int) -> Tensors:
        return user_code.trained_copy(self._own_model, data, self.rank)

    def buffers(self) -> Tensors:
        return {f"buffer {name}": b.clone() for name, b in self._own_model.named_buffers()}

    # State.

    def save(self):
        values = copies(self.replicas.masters.items())
        state = copy.deepcopy(self.replicas.optimizer.state_dict())
        self.saved = values, state, [copies(model.named_buffers()) for model in self.replicas.models]

    def load(self):
        if self.saved is None:
            return
        values, state, _ = self.saved
        self.replicas.optimizer.load_state_dict(copy.deepcopy(state))
        with torch.no_grad():
            for name, master in self.replicas.masters.items():
                master.copy_(values[name])
        self.replicas.round_frozen()
        self.replicas.publish()
        self.load_buffers()
        self.recover()

    def load_buffers(self) -> None:
        """Each replica its own where there are as many as saved, else rank 0's."""
        *_, saved = self.saved
        models = self.replicas.models
        for rank, model in enumerate(models):
            own = saved[rank if len(saved) == len(models) else 0]
            for name, buffer in model.named_buffers():
                buffer.copy_(own[name])

    def export(self) -> Tensors:
        return {name: p.detach().float() for name, p in self.replicas.masters.items()}

    def resume_elsewhere(self, setting: Setting, seed: int):
        """Go on at another setting."""
        self.save()
        flags = self.flags()
        self.replicas.resize(setting.world_size, setting.precision)
        for model in self.replicas.models:
            user_code.set_flags(model, flags)
        self.load_buffers()
        self.ranks = list(range(setting.world_size))
        self.scheduler = self.kept = self.kept_gradient = None
        self.shelf.clear()

    def flags(self) -> list[bool]:
        return [p.requires_grad for p in self.replicas.models[0].parameters()]

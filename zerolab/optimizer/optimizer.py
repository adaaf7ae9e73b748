"""ZeroOptimizer: the torch.optim.Optimizer that shards itself. The training loop stays the user's own.

    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=2, lr=3e-4)
    ...
    loss.backward(); optimizer.step(); optimizer.zero_grad()

It lays the model's parameters out in flat units, asks the stage which part of each this rank owns, and gives
a stock optimizer the owned slices to update, one for each original parameter. `step` reads: agree on what was
used, average, update.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn

from zerolab.collectives import connect
from zerolab.engine import Engine
from zerolab.engine.agreement import agree_on, agree_on_order, agree_on_used
from zerolab.engine.hook import Hook
from zerolab.engine.scopes import find_scopes
from zerolab.measure import MeasuredStates, census, storage_bytes
from zerolab.optimizer import tokens
from zerolab.optimizer.gradients import clip_grads, whole_grads
from zerolab.optimizer.layout import lay_out
from zerolab.optimizer.local import LocalUpdate
from zerolab.optimizer.loss_scale import LossScale
from zerolab.optimizer.probe import state_bytes_per_parameter
from zerolab.optimizer.seats import check_seats, guard_loading, take_seats
from zerolab.optimizer.settings import (
    check_settings,
    choose,
    describe_groups,
    engaged,
    group_signature,
    parameter_groups,
    signature,
)
from zerolab.optimizer.slices import Slice
from zerolab.precision import PRECISIONS
from zerolab.stages.stage0 import Stage0
from zerolab.stages.stage1 import Stage1
from zerolab.stages.stage2 import Stage2
from zerolab.stages.stage3 import Stage3
from zerolab.trace import Trace
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span

STAGES = {0: Stage0, 1: Stage1, 2: Stage2, 3: Stage3}


class ZeroOptimizer(torch.optim.Optimizer):
    """Data-parallel training of ``model``, its states sharded as ``stage`` says.

    Args:
        model: any module; its parameters move into flat buffers and start as rank 0's. Buffers stay per rank.
            One built on the meta device is given memory and start values here, unit by unit.
        optimizer_class: a torch.optim.Optimizer class with an elementwise update; ``defaults`` goes to it.
        stage: 0 nothing sharded, 1 optimizer state, 2 and gradients, 3 and parameters.
        params: parameter groups as any optimizer takes them; all trainable parameters by default.
        units: modules to gather and reduce as one; the outermost containers' children by default.
        precision: "fp32"; "mixed" for bf16 parameters and gradients with fp32 masters, 2+2+12 bytes with
            Adam; "mixed_fp32_grads" for 2+4+12; "mixed_fp16" for fp16, where losses go through `scale`.
        process_group: the ranks that train together; all of them by default.
        prefetch: scopes gathered ahead of the one at work (stage 3); 0 is the synchronous textbook.
        reduces_in_flight: reductions left under way while backward goes on; 0 waits for each.

    Memory: see the stages, in zerolab/stages.
    Comm: 2Ψ a step at stages 0-2, 3Ψ at 3.
    Raises: ValueError and TypeError for values out of bounds; RuntimeError without a process group, or where
        ranks hold different models.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        stage: int = 2,
        params: Iterable | None = None,
        units: list[nn.Module] | None = None,
        precision: str = "fp32",
        process_group: torch.distributed.ProcessGroup | None = None,
        prefetch: int = 1,
        reduces_in_flight: int = 1,
        **defaults,
    ):
        check_settings(model, prefetch, reduces_in_flight)
        stage_class = choose("stage", stage, STAGES)
        self.precision = choose("precision", precision, PRECISIONS)
        groups = parameter_groups(model, params)
        state_bytes_per_parameter(optimizer_class, defaults)
        self.model, self.trace = model, Trace()
        self.comm = connect(process_group, self.trace)
        self.stage = stage_class(self.comm)
        scopes = find_scopes(model, units)
        described = signature(scopes, stage_class, precision, prefetch, optimizer_class, defaults)
        agree_on(self.comm, "the model and its optimizer", described)
        agree_on(self.comm, "the parameter groups", group_signature(model, groups))
        self.units = lay_out(model, scopes, self.comm, self.stage, self.precision)
        self._seats = take_seats(model, self.units)
        guard_loading(model, self._seats)
        self.local: LocalUpdate | None = None
        super().__init__(groups, {})
        self.local = LocalUpdate(optimizer_class, defaults, self.units, self.param_groups)
        self.defaults, self.state = self.local.optimizers[0].defaults, self.local.state
        self.loss_scale = LossScale() if self.precision.scales_loss else None
        self.engine = Engine(model, scopes, self.stage, self.trace, prefetch, reduces_in_flight)
        if self.precision.has_masters:
            model.register_forward_pre_hook(Hook(self._cast_inputs), prepend=True, with_kwargs=True)
        engaged.add(model)
        self.trace.next_step()

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def world_size(self) -> int:
        return self.comm.world_size

    @property
    def optimizer_class_name(self) -> str:
        """The class of the stock optimizers that make the update, as "AdamW"."""
        return type(self.local.optimizers[0]).__name__

    def _cast_inputs(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """What the model is called with, in its parameters' dtype."""
        return self.precision.cast((args, kwargs))

    def add_param_group(self, param_group: dict) -> None:
        """Optimize more of the model's parameters, as torch's own; each gets its slice."""
        (group,) = parameter_groups(self.model, [param_group], may_be_empty=True)
        listed = {id(p) for known in self.param_groups for p in known["params"]}
        if repeated := [p for p in group["params"] if id(p) in listed]:
            raise ValueError(f"{len(repeated)} of the parameters are in a group already: list each once")
        if self.local is not None:  # it is given the first groups all at once
            self.local.add_group(group)
        super().add_param_group(group)

    # Training.

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """What to call backward on: ``optimizer.scale(loss).backward()``. In fp16 a multiple of the loss.

        In any other precision it is the loss itself, so a loop written for fp16 serves for all. The step
        divides again, and is skipped where a gradient overflowed.
        """
        return loss if self.loss_scale is None else self.loss_scale.apply(loss)

    def mean_loss(
        self, loss_sum: torch.Tensor, count: float | None = None, total_count: float | None = None
    ) -> torch.Tensor:
        """This rank's part of a mean over the tokens of all ranks, where ranks have unequal numbers of them.

        Ranks are averaged, and a mean of means weighs a token more where there are few. So hand in the *sum*
        of the losses of this rank's tokens, and how many they are: the gradient is then that of the mean over
        all tokens, as one process with all of them would have it. The mean over the ranks of what is returned
        is the mean loss.

        Args:
            count: how many tokens this rank's sum is over; may be 0, but not on all ranks.
            total_count: instead of it, how many there are on all ranks. Where a step has several
                micro-batches, pass with each the same number: `total` of what this rank has in all of them.
        Comm: 8 bytes a rank, unless total_count is given.
        Raises: ValueError for a count that is negative or not finite, for a total of 0, and for neither.
        """
        if (count is None) == (total_count is None):
            raise ValueError(
                f"count is {count} and total_count {total_count}: pass this rank's count of tokens, or the "
                "total_count of all ranks, and not both"
            )
        total = self.total(count) if total_count is None else total_count
        return tokens.part_of_mean(self.comm, loss_sum, total)

    def total(self, count: float) -> float:
        """The sum of a number over the ranks. Collective. Comm: 8 bytes a rank.

        Raises: ValueError on every rank where a count is negative or not finite.
        """
        return tokens.total(self.comm, count)

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None):
        """Average the gradients, update what this rank owns, and share the result as the stage does.

        Comm: a small message that says which parameters anybody used; then the stage's own.
        Raises: RuntimeError on every rank, and before any parameter changes, where ranks issued different
            collectives or have other hyperparameters; where an fp16 loss was not scaled.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        used = self._finish_grads()
        if not self._overflowed(used):
            self.trace.phase = "step"
            self.local.hand_over(self.param_groups)
            self.stage.update(self.engine.trainable, lambda unit: self._update(unit, used))
            self.local.take_back(self.param_groups)
            self._note_update()
        self.trace.next_step()
        return loss

    def _overflowed(self, used: set[Span]) -> bool:
        """Whether an fp16 gradient of any rank is not finite, so that no rank may take this step."""
        if self.loss_scale is None:
            return False
        gradients = [unit.grads.reduced for unit in self.engine.trainable]
        return self.loss_scale.judge(self.comm, gradients, bool(used))

    def _finish_grads(self) -> set[Span]:
        """See that every gradient is reduced; the spans that any rank used."""
        check_seats(self._seats)
        self.engine.finish_grads()
        reducer = self.engine.reducer
        if not reducer.order_is_agreed:
            reducer.adopt(agree_on_order(self.comm, reducer.units, reducer.completed))
        settings = describe_groups(self.param_groups, self.local.members)
        return agree_on_used(self.comm, self.engine.trainable, settings)

    def _update(self, unit: FlatUnit, used: set[Span]) -> None:
        """The local optimizer's step on what this rank owns of one unit."""
        event = self.trace.begin("update", unit.name, unit.values(), unit.describe(unit.owned))
        unit.grads.average()
        self.local.step(unit, used, self._gradient_scale)
        unit.publish()
        self.trace.finish(event)

    @property
    def _gradient_scale(self) -> float:
        """How many times too large the gradients are, because the loss was scaled."""
        return 1.0 if self.loss_scale is None else self.loss_scale.applied

    def _note_update(self) -> None:
        """Tell autograd that the parameters changed, and take the measure of the optimizer's state."""
        for unit in self.engine.trainable:
            unit.mark_updated()
        self._note_state()

    def _note_state(self) -> None:
        self.engine.gauge.note_optimizer(storage_bytes(self.local.state_tensors()), self.trace.phase)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, on this rank and so on every rank that calls it."""
        self.engine.clear_grads(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients to a norm of at most ``max_norm`` over all ranks; returns the norm.

        Every rank sums its part in double precision, the parts are added in rank order, so the norm does not
        depend on how many ranks there are.

        Comm: 8 bytes a rank.
        Raises: ValueError for a negative max_norm or norm_type.
        """
        used = self._finish_grads()
        return clip_grads(self.comm, self.engine.trainable, used, max_norm, norm_type, self._gradient_scale)

    def no_sync(self) -> AbstractContextManager[None]:
        """Collect gradients without reducing them; the first backward outside reduces the sum.

        Memory: 4Ψ for gradients, at every stage.
        """
        return self.engine.no_sync()

    # Looking inside.

    @property
    def slices(self) -> list[Slice]:
        """This rank's slice of each parameter, in the order of the parameter groups."""
        return self.local.slices

    def full_params(self) -> AbstractContextManager[None]:
        """Parameters whole and usable on every rank while it is open; what is written to them is kept.

        Collective: every rank enters. Memory: 4Ψ. Comm: Ψ at stage 3, none before.
        """
        return self.engine.whole()

    def full_grads(self) -> dict[str, torch.Tensor]:
        """The averaged gradients, whole, by parameter name; parameters that nobody used are left out.

        Collective: every rank calls it. Memory: 4Ψ for the copies. Comm: Ψ.
        """
        used = self._finish_grads()
        return whole_grads(self.comm, self.engine.trainable, used, self._gradient_scale)

    def memory(self) -> MeasuredStates:
        """What this rank holds now, from storages, by category. Call it between backward and zero_grad."""
        state, excess_bytes = self.local.state_tensors(), self.local.excess_bytes()
        return census(self.model, self.units, state, excess_bytes, self.engine.gauge.peak_bytes)

    def state_dict(self) -> dict:
        """This rank's shard of the optimizer state, tagged: it loads only where it belongs."""
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state_dict()}
        return self.local.state_dict() | {"zerolab": self._tag()} | scale

    def load_state_dict(self, state_dict: dict) -> None:
        """Take back what `state_dict` gave, on the same rank, at the same stage, world size and layout.

        Raises: ValueError where the tag says that it comes from elsewhere.
        """
        if state_dict.get("zerolab") != self._tag():
            raise ValueError(
                f"this state_dict is the shard of {state_dict.get('zerolab', 'another optimizer')}, and this "
                f"is {self._tag()}: load it on the rank and with the layout it was saved from"
            )
        if self.loss_scale is not None and "loss_scale" in state_dict:
            self.loss_scale.load_state_dict(state_dict["loss_scale"])
        ours = {key: value for key, value in state_dict.items() if key not in ("zerolab", "loss_scale")}
        self.local.load_state_dict(ours, self.param_groups)
        self._note_state()

    def _tag(self) -> dict:
        layout = [(unit.name, unit.numel, unit.owned.start, unit.owned.stop) for unit in self.units]
        return {"rank": self.rank, "world_size": self.world_size, "layout": layout}

"""ZeroOptimizer: a torch.optim.Optimizer that shards model states. The training loop does not change.

    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=2, lr=3e-4)
    ...
    loss.backward(); optimizer.step(); optimizer.zero_grad()

It lays the model's parameters out in flat units, asks the stage which part of each this rank owns, and gives
a stock optimizer the owned slices to update, one for each original parameter. `step` reads: agree on what was
used, average, update.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerolab.collectives import connect
from zerolab.engine import Engine
from zerolab.engine.agreement import agree_on
from zerolab.engine.hook import Hook
from zerolab.engine.states import TrainingRun, TrainingState
from zerolab.engine.units import find_units
from zerolab.optimizer.axes import axes_of
from zerolab.optimizer.clipping import Clipping
from zerolab.optimizer.copies import check_shard_size, connect_stage, over_groups
from zerolab.optimizer.first_buffers import warn_of_other_buffers
from zerolab.optimizer.groups import fill_in_changed
from zerolab.optimizer.hooks_on_all import no_hooks_on_all
from zerolab.optimizer.layout import bytes_to_offload, in_forward_order, lay_out
from zerolab.optimizer.loads import Loads
from zerolab.optimizer.local import LocalUpdate
from zerolab.optimizer.loss_scale import LossScale
from zerolab.optimizer.losses import Losses
from zerolab.optimizer.members import require_laid_out
from zerolab.optimizer.models import engaged, held
from zerolab.optimizer.offload import Offload
from zerolab.optimizer.parameter_groups import parameter_groups, require_names_alike
from zerolab.optimizer.settings import (
    check_settings,
    choose,
    device_of,
    group_signature,
    refuse_inference_mode,
    signature,
)
from zerolab.optimizer.sharded_state import ShardedState
from zerolab.optimizer.slice_states import StatesAway
from zerolab.optimizer.slots import Slots, guard_loading
from zerolab.optimizer.state_dict_storages import separate_storages
from zerolab.optimizer.unsupported import Unsupported
from zerolab.optimizer.updates import Updates
from zerolab.optimizer.whole_tensors import WholeTensors
from zerolab.precision import PRECISIONS
from zerolab.stages.stage0 import Stage0
from zerolab.stages.stage1 import Stage1
from zerolab.stages.stage2 import Stage2
from zerolab.stages.stage3 import Stage3
from zerolab.storages import MemoryMeter
from zerolab.tensor_parallel import TensorParallel
from zerolab.tier import check_offload, tier_of
from zerolab.trace import Trace
from zerolab.unit import FlatUnit, publish
from zerolab.unit.span import Span

STAGES = {0: Stage0, 1: Stage1, 2: Stage2, 3: Stage3}


class ZeroOptimizer(Clipping, WholeTensors, ShardedState, Losses, Unsupported):
    """Data-parallel training of ``model``, its states sharded as ``stage`` says.

    Args:
        model: any module; its parameters move into flat buffers and start as rank 0's. Buffers stay per rank.
            One built on the meta device is given memory and start values here, unit by unit.
        optimizer_class: a torch.optim.Optimizer class; ``defaults`` goes to it. Its update is elementwise, as
            Adam's, or of each parameter by itself, as Muon's: one rank updates a parameter whole. On GPUs
            Adam and AdamW are fused by default, other than under deterministic algorithms.
        stage: 0 nothing sharded, 1 optimizer state, 2 and gradients, 3 and parameters.
        params: parameter groups as any optimizer takes them, or a function of the model that returns them;
            all trainable parameters by default. A group may have an ``optimizer`` of its own, a class like
            ``optimizer_class``; its other options are then that class's keywords. See `matrices_by`. As in
            torch.optim, what is written to a dict that was passed counts later; one with an ``optimizer`` is
            copied.
        units: modules to gather and reduce as one; the outermost containers' children by default.
        precision: "fp32"; "mixed" for bf16 parameters and gradients with fp32 masters, 2+2+12 bytes with
            Adam; "mixed_fp32_grads" for 2+4+12; "mixed_fp16" for fp16, where losses go through `scale`.
        process_group: the ranks that train together; all of them by default.
        prefetch: units gathered ahead of the one at work (stage 3). At stages 1 and 2 `step` does not wait
            for its gathers: what reads a parameter next does. With 0 each collective is waited for where it
            is issued.
        reduces_in_flight: reductions left under way while backward goes on; 0 waits for each.
        tensor_parallel: the ranks that share one copy of the model, if `parallelize` has cut it. Then
            ``process_group`` has the ranks that hold the same part of it.
        bucket_bytes: over gloo, the most that a reduction receives at a time from each other rank; by default
            a shard. Scratch is then at most (1 + reduces_in_flight)(N-1) buckets, however wide a unit is.
        offload: "cpu" or "disk" to keep fp32 masters and the optimizer's state there between updates.
        offload_dir: for "disk", a folder on a disk of this machine. The file in it has no name.
        shard_size: at stage 3, how many consecutive ranks share one copy of the model, as those of a node do.
            Then each such group has a copy, and less is sent between nodes. By default all ranks share one.

    What is written to parameters, through ``p.data`` too, is kept, or refused at the next step at the latest;
    at stage 3 write inside `full_params`. Code that writes to their memory without PyTorch is found where it
    does so in every step, on CPUs: the values of one unit are compared in each step, so the error comes after
    as many steps as there are units. The same holds for parameters of a class other than nn.Parameter that
    are written to through ``p.data``.

    Memory: see the stages, in zerolab/stages. With ``offload`` KΨ/N less (KΨ at stage 0), where K is 8 with
        Adam in fp32 and 12 in mixed precision; what is updated together comes back while it is.
    Comm: 2Ψ a step at stages 0-2, 3Ψ at 3.
    Raises: ValueError and TypeError for values out of bounds; RuntimeError without a process group, or where
        ranks hold different models; OSError where ``offload_dir`` has no room.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        stage: int = 2,
        params: Iterable | Callable[[nn.Module], Iterable] | None = None,
        units: list[nn.Module] | None = None,
        precision: str = "fp32",
        process_group: torch.distributed.ProcessGroup | None = None,
        prefetch: int = 1,
        reduces_in_flight: int = 1,
        tensor_parallel: TensorParallel | None = None,
        bucket_bytes: int | None = None,
        offload: str | None = None,
        offload_dir: str | Path | None = None,
        shard_size: int | None = None,
        **defaults: Any,
    ):
        check_settings(model, prefetch, reduces_in_flight, bucket_bytes)
        check_offload(offload, offload_dir)
        stage_class = choose("stage", stage, STAGES)
        self.precision = choose("precision", precision, PRECISIONS)
        groups = parameter_groups(model, params)
        self.updates = Updates(optimizer_class, defaults, groups, device_of(model))
        self.model, self.trace, self.meter = model, Trace(), MemoryMeter()
        self.comm = connect(process_group, device_of(model), self.trace, self.meter, bucket_bytes)
        self.trace.rank = self.comm.rank
        self.axes = axes_of(model, self.comm, tensor_parallel)
        check_shard_size(shard_size, stage_class, self.comm.world_size)
        self.updates.begin_layout(model, self.axes)
        found = find_units(model, units)
        groups_of = over_groups(shard_size, reduces_in_flight)
        agreed = found, stage_class, groups_of, precision, prefetch, bucket_bytes, optimizer_class, defaults
        agree_on(self.axes.everyone, "the model and its optimizer", signature(*agreed))
        of_groups = [*self.updates.describe(), *group_signature(model, groups)]
        agree_on(self.axes.everyone, "the parameter groups", of_groups)
        self.stage = connect_stage(stage_class, shard_size, self.comm)
        nbytes = lambda: bytes_to_offload(model, found, self.comm, self.stage, self.precision, self.updates)
        self.offload = Offload(tier_of(offload, offload_dir, self.comm.device, nbytes), self.meter)
        settings = (self.comm, self.stage, self.precision, self.meter, self.axes, self.offload, self.updates)
        runs = lay_out(model, found, *settings)
        self.units = [flat for run in runs for flat in run.flats]
        self._slots = Slots(model, self.units, trains_all=params is None)
        super().__init__(groups, {})
        in_order = in_forward_order(runs)  # what is updated first is whole again first
        self._updated = [flat for flat in in_order if flat.trainable]
        self.local = LocalUpdate(self.updates, in_order, self.param_groups, self.offload)
        self.defaults = self.local.defaults
        self.state = self.local.state if offload is None else StatesAway(self.local.state)
        self.loss_scale = LossScale() if self.precision.scales_loss else None
        self.training = TrainingRun(self.trace, self.meter)
        self.engine = Engine(model, runs, self.stage, self.training, prefetch, reduces_in_flight)
        self._attach()
        self._state_entries, self._loads, self._seen_gradients = 0, Loads(), set()
        warn_of_other_buffers(model, self.axes.everyone)
        self.training.become(TrainingState.FORWARD)
        self.meter.reset_peak()
        self._next_step()

    def _attach(self) -> None:
        """Guard the model's state_dict, cast what it is called with, and note that it has an optimizer.

        All tensors in the units' memory are the engine's until then.
        """
        full_params_open = lambda: bool(self.engine.gatherer.full_params_open)
        guard_loading(self.model, self._slots, full_params_open)
        separate_storages(self.model, self.units, full_params_open)
        if self.precision.has_masters:
            self.model.register_forward_pre_hook(Hook(self._cast_inputs), prepend=True, with_kwargs=True)
        for unit in self.units:
            unit.aliases.note_own(unit.flat)
        engaged.add(self.model)
        held.update(dict.fromkeys(self.model.parameters(), type(self.model).__name__))

    def _cast_inputs(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return what the model is called with, in its parameters' dtype."""
        return self.precision.cast((args, kwargs))

    def add_param_group(self, param_group: dict) -> None:
        """Optimize more of the model's parameters, as torch's own; each gets its slice.

        They have been the model's since this optimizer was built, and are in no group yet.
        Raises: ValueError for others, and where only some groups have names, before anything is changed.
        """
        (group,) = parameter_groups(self.model, [param_group], may_be_empty=True)
        require_laid_out(self.model, self.units, group["params"])
        require_names_alike([*self.param_groups, group])
        listed = {id(p) for known in self.param_groups for p in known["params"]}
        if repeated := [p for p in group["params"] if id(p) in listed]:
            raise ValueError(f"{len(repeated)} of the parameters are in a group already: list each once")
        if hasattr(self, "local"):  # it is given the first groups all at once
            fill_in_changed(group, self.defaults, self.local.defaults)
            before = {unit: unit.aliases.count(unit.flat) for unit in self.units}
            self.local.add_group(group)
            for unit, count in before.items():
                unit.aliases.note_more(unit.aliases.count(unit.flat) - count)
        super().add_param_group(group)

    # Training.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, update what this rank owns, and share the result as the stage does.

        Comm: a small message that says which parameters anybody used; then the stage's own.
        Raises: RuntimeError on every rank, and before any parameter changes, where ranks issued different
            collectives or have other hyperparameters; where an fp16 loss was not scaled; inside
            torch.inference_mode(); after a step that failed during the update. ValueError for a closure that
            the class would call other than once.
        """
        refuse_inference_mode("step()")
        loss = None
        if closure is not None:
            self.updates.require_closure()
            with torch.enable_grad():
                loss = closure()
        used = self._finish_grads()
        if not self._overflowed(used):
            updated = self.local.in_groups(used)
            with self.training.during(TrainingState.STEP):
                self.local.hand_over(self.param_groups)
                with self.training.changing("step()"), no_hooks_on_all():
                    self.stage.update(self._updated, lambda unit: self._update(unit, updated))
                self.local.take_back(self.param_groups)
                self.engine.end_update()
                self._note_state_entries()
        self._next_step()
        return loss

    def _overflowed(self, used: set[Span]) -> bool:
        """Return whether an fp16 gradient of any rank is not finite, so that no rank may take this step."""
        if self.loss_scale is None:
            return False
        gradients = [unit.grads.reduced for unit in self.engine.trainable]
        return self.loss_scale.judge(self.axes.comms, gradients, bool(used))

    def _update(self, unit: FlatUnit, updated: set[Span]) -> None:
        """The local optimizer's step on what this rank owns of one unit, and of small units after it."""
        units = self.local.together(unit)
        if not units:
            return
        events = []
        with self.offload.resident(units):
            for each in units:
                events.append(self.trace.begin("update", each.name, each.values(), each.describe(each.owned)))
                each.grads.average()
            self.local.step(unit, updated, self._gradient_scale)
            publish(units)
            for each, event in zip(units, events, strict=True):
                each.mark_updated(updated)
                self.trace.finish(event)

    def _note_state_entries(self) -> None:
        """Count the bytes of the optimizer's state again, if it has more entries than before."""
        if self._state_entries != (entries := self.local.state_entries()):
            self._state_entries = entries
            self._note_state()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, on this rank and so on every rank that calls it."""
        self.engine.clear_grads(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Collect gradients without reducing them; the first backward outside reduces the sum.

        Memory: whole gradients at every stage, 4Ψ bytes in fp32 and 2Ψ in 16 bits.
        """
        return self.engine.no_sync()

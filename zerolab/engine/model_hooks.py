"""ModelHooks: call the stages' methods in forward and backward passes.

forward    a unit is entered: unshard it, prefetch the next
           it is left: reshard it
backward   its output's gradient comes: unshard it, prefetch the one before
           its last gradient comes: reshard it, reduce its gradients
           the end: what autograd never reached is reduced as zeros, and every unit is resharded
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from zerolab.engine.gather import Gatherer
from zerolab.engine.hook import Hook, weakly
from zerolab.engine.passes import (
    AFTER_AN_UPDATE,
    AT_STAGE_3,
    NESTED,
    inside_backward,
    inside_ddp,
    inside_functional_transform,
    inside_reentrant_checkpoint,
    pass_number,
)
from zerolab.engine.reduction import Reducer
from zerolab.engine.states import BackwardPass, TrainingRun, TrainingState, UnitRun
from zerolab.engine.tensors import refuse_views, tensors_in
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span


class ModelHooks:
    """The hooks of one model: they tell the gatherer what is needed now, and the reducer what has come.

    Args:
        model: the module whose call begins a forward pass.
        units: its units with their flat buffers.
        training: the state of the run.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[UnitRun],
        gatherer: Gatherer,
        reducer: Reducer,
        training: TrainingRun,
    ):
        self.units, self.gatherer, self.reducer, self.training = units, gatherer, reducer, training
        self.backward = BackwardPass()
        self._kept: list[Callable] = []
        for run in units:
            self._register(run)
        for encoder in (each for each in model.modules() if isinstance(each, nn.TransformerEncoder)):
            encoder.register_forward_pre_hook(Hook(self._before_encoder))
        model.register_forward_pre_hook(
            Hook(self._begin_forward), prepend=True
        )  # registered last, runs first

    def _register(self, run: UnitRun) -> None:
        """Register the hooks of one unit: on its entry modules, and on its parameters' gradients."""
        sharded = not all(flat.whole for flat in run.flats)
        before = Hook(partial(self._pre_forward if sharded else self._enter, run))
        after = Hook(partial(self._post_forward, run))
        for module in run.unit.entry_modules:
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            if sharded:
                module.register_forward_hook(after, always_call=True)
        for flat in (flat for flat in run.flats if flat.trainable):
            for span in flat.spans:
                after_gradient = partial(self._after_gradient, run, flat, span)
                self._kept.append(after_gradient)
                span.parameter.register_post_accumulate_grad_hook(weakly(after_gradient))

    # Forward.

    def _enter(self, run: UnitRun, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """A module is called: its parameters, if they were updated and sent, are waited for."""
        self._abandon_if_broken_off()
        for flat in run.flats:
            if flat.gather is not None:
                if inside_functional_transform():
                    raise RuntimeError(f"unit {flat.name}: {AFTER_AN_UPDATE}")
                flat.finish_gather()

    def _abandon_if_broken_off(self) -> None:
        """End a backward pass that an exception broke off: a forward runs that is not part of it."""
        if self.training.in_backward and not inside_backward():
            self.abandon_backward()

    def _begin_forward(self, model: nn.Module, args: tuple) -> None:
        """The whole model is called: the order of its units begins anew."""
        if inside_ddp():
            raise RuntimeError(
                "this model has a ZeroOptimizer, which reduces its gradients, and was wrapped in "
                "DistributedDataParallel after it, as accelerator.prepare(model) and the Trainer do: call "
                "the model itself"
            )
        if not inside_backward():
            self.gatherer.rewind()

    def _pre_forward(self, run: UnitRun, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Before a module of the unit runs; a checkpoint's recomputation only needs the parameters."""
        run.depth += 1
        if run.depth > 1:  # inside another module of the unit, which has done what follows
            self._abandon_if_broken_off()
            return
        self._enter(run, module, args, kwargs)
        if inside_functional_transform() and not self.gatherer.full_params_open:
            raise RuntimeError(f"vmap, torch.func and forward-mode differentiation are refused {AT_STAGE_3}")
        if inside_backward():
            self.gatherer.unshard(run)
            return
        run.expects_backward = False
        self.gatherer.note_entry(run)
        self.gatherer.unshard(run)
        self._watch_inputs(run, (args, kwargs))
        self.gatherer.prefetch_forward()

    def _post_forward(self, run: UnitRun, module: nn.Module, args: tuple, output) -> None:
        """After a module of the unit ran or raised. The root stays whole if a backward pass may follow.

        The output of every entry module is watched, because a backward pass can begin inside a unit, at a
        loss that one of its modules put aside. The hook is the tensor's, not its node's. A node's would run
        after all hooks on tensors, and a user's hook on the output may read the parameters.
        """
        if not run.depth:  # a hook that ran before `_pre_forward` raised, so that this module has not begun
            return
        run.depth -= 1
        if inside_functional_transform():  # then full_params() is open, and nothing is gathered or resharded
            return
        tensors = (output,) if isinstance(output, torch.Tensor) else tensors_in(output)
        differentiable = [t for t in tensors if t.requires_grad and not t.is_leaf]
        for tensor in differentiable:
            tensor.register_hook(lambda gradient: self._pre_backward(run))
        run.expects_backward |= bool(differentiable)
        if run.depth > 0 or inside_backward():
            return
        if run.is_root:
            self.gatherer.discard_unused()
        if not (run.is_root and differentiable):
            self.gatherer.reshard(run.flats)
            for flat in run.flats:
                if not flat.whole:
                    refuse_views(tensors, flat.flat, flat.name)

    def _before_encoder(self, encoder: nn.TransformerEncoder, args: tuple) -> None:
        """An nn.TransformerEncoder is called in evaluation: make its first layer whole.

        Its forward looks at that layer's weights before it calls the layer. Where they are placeholders it
        takes another path, which computes other outputs at padded positions.
        """
        if not encoder.training:
            first = set(encoder.layers[0].parameters())
            for run in self.units:
                if any(span.parameter in first for flat in run.flats for span in flat.spans):
                    for flat in run.flats:
                        flat.finish_gather()
                    self.gatherer.unshard(run)

    def _watch_inputs(self, run: UnitRun, inputs: tuple) -> None:
        """Where parameters are frozen, their inputs' gradients tell when they were needed last."""
        if run.inputs_done:
            run.forget_inputs()
        if torch.is_grad_enabled() and not all(flat.all_require_grad for flat in run.flats):
            for tensor in tensors_in(inputs):
                if tensor.requires_grad:
                    self._watch(run, tensor)

    def _watch(self, run: UnitRun, tensor: torch.Tensor) -> None:
        """Count an input, and when it has its gradient. A leaf outlives its graph, so its hook is removed."""
        key = id(tensor) if tensor.is_leaf else None
        if earlier := run.leaf_hooks.pop(key, None):
            earlier.remove()
        else:
            run.inputs_watched += 1

        def done(gradient: torch.Tensor) -> None:
            if handle := run.leaf_hooks.pop(key, None):
                handle.remove()
            self._input_gradient_done(run)

        handle = tensor.register_hook(done)
        if key is not None:
            run.leaf_hooks[key] = handle

    # Backward.

    def _begin_backward(self) -> None:
        """The first hook of a backward pass: note what is to come, and ask autograd for a call at its end."""
        if not self.training.in_backward:
            if inside_reentrant_checkpoint():
                raise RuntimeError(NESTED)
            if torch.is_grad_enabled():  # create_graph=True: a later pass goes through this one's graph
                self.gatherer.graph_kept = True
            self.training.become(TrainingState.BACKWARD)
            self.backward = BackwardPass(pass_number())
            self.reducer.expect()
            for run in self.units:
                run.inputs_done = 0
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _pre_backward(self, run: UnitRun) -> None:
        """The gradient of one of the unit's outputs came: it is needed now, those before it soon."""
        if pass_number() != self.backward.number:
            self._begin_backward()
        been_here = run is self.backward.at_work or run.is_root
        if been_here and all([flat.whole or self.reducer.has_all_gradients(flat) for flat in run.flats]):
            return
        if not run.is_root and pass_number() == self.backward.number:
            if self.backward.at_work is not None:
                self._mark_unused(self.backward.at_work)
            self.backward.at_work = run
        self.gatherer.unshard(run)
        self.gatherer.prefetch_backward(run, self.reducer.has_all_gradients)

    def _mark_unused(self, run: UnitRun) -> None:
        """Backward is in another unit now: gradients of this unit that will not come count as zero.

        Another rank may have used that parameter, and has reduced the unit already. If this rank waited for
        the end of backward, it would reduce the unit after gathers that come later on the other rank. The
        unit stays whole: where the other unit was called from inside this one, backward comes back to it.
        """
        for flat in run.flats:
            if flat.trainable and self.reducer.mark_unused(flat):
                self.reducer.reduce_complete()

    def _after_gradient(self, run: UnitRun, flat: FlatUnit, span: Span, parameter: nn.Parameter) -> None:
        """A parameter's gradient is stored. After the last of its unit, reshard and reduce the unit.

        Raises: RuntimeError in a backward pass inside another.
        """
        gradient = flat.grads.take(span)
        if pass_number() != self.backward.number:
            self._begin_backward()
            if pass_number() != self.backward.number:
                raise RuntimeError(NESTED)
        complete = self.reducer.collect(flat, span, gradient)
        del gradient  # its memory is free before the unit is reduced
        if complete:
            if flat.all_require_grad:
                self.gatherer.reshard([flat])
            self._reshard_frozen(run)
            self.reducer.reduce_complete()

    def _input_gradient_done(self, run: UnitRun) -> None:
        run.inputs_done += 1
        self._reshard_frozen(run)

    def _reshard_frozen(self, run: UnitRun) -> None:
        """Reshard what is frozen, in whole or in part, once no input and no other parameter needs it."""
        if run.inputs_done < run.inputs_watched or run.is_root or not self.training.in_backward:
            return
        if not any(flat.grads.missing for flat in run.flats):
            self.gatherer.reshard([flat for flat in run.flats if flat.whole and not flat.all_require_grad])

    def _end_backward(self) -> None:
        """The end of backward. Ranks that used different parameters all come here, so all reduce alike."""
        self.reducer.finish()
        if not torch.is_grad_enabled():
            self.gatherer.graph_kept = False
        self.end_pass()
        self.training.become(TrainingState.FORWARD)

    def abandon_backward(self) -> None:
        """After an exception in a backward pass: wait for what was issued, and reshard."""
        self.reducer.abandon()
        self.end_pass()
        self.training.become(TrainingState.FORWARD)

    def end_pass(self) -> None:
        """Reshard every unit, when the gradients that came were moved to its buffer."""
        for flat in self.reducer.flats:
            flat.grads.move()
        self.gatherer.discard_unused()
        for run in self.units:
            self.gatherer.reshard(run.flats)

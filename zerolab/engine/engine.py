"""Engine: decide when the stages' methods run. It knows no stage by name.

The hooks in model_hooks.py run the verbs in forward and backward; what follows here is what the optimizer
asks for between passes. ``prefetch`` and ``reduces_in_flight`` say how much communication may run beside the
computation. At 0 every collective is waited for where it is issued; the numbers are the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from zerolab.before_exit import before_exit
from zerolab.engine.clearing import clear_frozen
from zerolab.engine.gather import Gatherer
from zerolab.engine.model_hooks import ModelHooks
from zerolab.engine.passes import inside_backward
from zerolab.engine.reduction import Reducer
from zerolab.engine.states import TrainingRun, TrainingState, UnitRun
from zerolab.stages.base import Stage
from zerolab.unit import FlatUnit
from zerolab.unit.states import GradState


class Engine:
    """Gathers and reduces the units of one model, as its hooks and the optimizer ask for it.

    Args:
        model: the module whose call begins a forward pass.
        units: its units with their flat buffers; the root unit, if there is one, is the last.
        training: the state of the run.
        prefetch: how many units ahead of the one at work to gather.
        reduces_in_flight: how many reductions may be under way while the next unit's gradients are collected.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[UnitRun],
        stage: Stage,
        training: TrainingRun,
        prefetch: int,
        reduces_in_flight: int,
    ):
        self.units, self.training = units, training
        self.flats = [flat for run in units for flat in run.flats]
        self.trainable = [flat for flat in self.flats if flat.trainable]
        self.gatherer = Gatherer(stage, prefetch)
        self.reducer = Reducer(self.trainable, stage, reduces_in_flight)
        roots = {flat for run in units if run.is_root for flat in run.flats}
        self.reducer.order = sorted(reversed(self.trainable), key=roots.__contains__)
        self._before: dict[FlatUnit, bytes] = {}
        self._written: dict[str, str] = {}
        self._turn = 0
        self.hooks = ModelHooks(model, units, self.gatherer, self.reducer, training)
        training.trace.wait_with(self.finish_gathers)
        before_exit(self.finish_gathers)

    def require_idle(self, action: str) -> None:
        """Check that no pass and no full_params() is open, because some values are then outside the shards.

        Raises: RuntimeError where one is.
        """
        if self.gatherer.full_params_open:
            raise RuntimeError(f"{action} inside full_params(): leave the with block before that")
        if self.training.in_backward or any(run.depth for run in self.units):
            raise RuntimeError(
                f"{action} in the middle of a forward or backward pass ({self.state_of(self._open_unit)}): "
                "call it between steps. After an exception that ended a backward pass early, call "
                "optimizer.zero_grad() first"
            )
        if self.training.state is not TrainingState.FORWARD:
            raise RuntimeError(
                f"{action} in the middle of {self.training.state.value}(), from a signal handler or another "
                f"thread: set a flag there, and call {action} in the training loop after step()"
            )
        self.finish_gathers()

    @property
    def _open_unit(self) -> FlatUnit:
        """The unit that the open pass is in: a module of it runs, or its gradients are computed."""
        at_work = self.hooks.backward.at_work
        running = [flat for run in self.units if run.depth or run is at_work for flat in run.flats]
        collecting = [flat for flat in self.trainable if flat.grads.state is GradState.COLLECTING]
        return (running + collecting + self.flats)[0]

    def finish_gathers(self) -> None:
        """Wait for the parameters that the last update has sent and that nothing has used since."""
        for flat in self.flats:
            flat.finish_gather()

    def end_update(self) -> None:
        """After an update: with ``prefetch=0`` wait here; otherwise whatever uses a parameter next waits."""
        if not self.gatherer.prefetch:
            self.finish_gathers()

    def finish_grads(self) -> None:
        """See that every gradient is reduced, before anything looks at one.

        Units are resharded, because a forward without a backward leaves the root whole, and an update changes
        its shard alone.
        Raises: RuntimeError inside full_params(), for the same reason, and inside a backward pass.
        """
        if self.gatherer.full_params_open:
            raise RuntimeError(
                "gradients are asked for inside full_params(): leave the with block before that"
            )
        self._end_broken_backward("gradients are asked for")
        self.finish_gathers()
        self.hooks.end_pass()
        self.reducer.finish_unreduced()

    def clear_grads(self, set_to_none: bool) -> None:
        """Forget the gradients, those of a backward pass that was broken off too."""
        self._end_broken_backward("gradients are cleared")
        self.reducer.clear(set_to_none)
        clear_frozen([flat for flat in self.flats if not flat.trainable], set_to_none)

    def _end_broken_backward(self, what: str) -> None:
        """Close a backward pass that an exception broke off. Raises: RuntimeError inside one that runs."""
        if inside_backward():
            raise RuntimeError(
                f"{what} inside a backward pass, as by a hook: call step() and zero_grad() after backward() "
                "has returned"
            )
        self.gatherer.graph_kept = False
        if self.training.in_backward:
            self.hooks.abandon_backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside collect gradients locally; the first one outside reduces them all."""
        before, self.reducer.syncing = self.reducer.syncing, False
        try:
            yield
        finally:
            self.reducer.syncing = before

    @contextmanager
    def full_params(self, agree: Callable[[dict[FlatUnit, bytes]], None]) -> Iterator[None]:
        """Every unit whole inside the with block. Collective: every rank enters, and leaves.

        ``agree`` is called when the outermost block ends without an exception, with a checksum of each unit,
        zero where nothing was written: it checks that the ranks wrote the same. After an exception they are
        compared at the next step.
        """
        self.finish_gathers()
        for run in self.units:
            self.gatherer.unshard(run)
        if not self.gatherer.full_params_open:
            self._before = {flat: flat.checksum() for flat in self.flats}
            self._remember({flat: self._before[flat] for flat in self.flats if flat.was_written()})
        self.gatherer.full_params_open += 1
        try:
            yield
        except BaseException:
            self._leave_full_params(self._remember)
            raise
        self._leave_full_params(partial(self._compare, agree))

    def _compare(
        self, agree: Callable[[dict[FlatUnit, bytes]], None], written: dict[FlatUnit, bytes]
    ) -> None:
        """Have the ranks compare what was written: a unit that was written to is then the same on all.

        So a difference in it from before the with block is gone.
        """
        agree(written)
        for name in _by_name(written):
            self._written.pop(name, None)

    def _leave_full_params(self, agree: Callable[[dict[FlatUnit, bytes]], None]) -> None:
        """Keep what was written to whole parameters, if the ranks agree, and reshard.

        Raises: RuntimeError where a parameter was given another tensor, which is lost.
        """
        self.gatherer.full_params_open -= 1
        if self.gatherer.full_params_open:
            return
        now = {flat: flat.checksum() for flat in self.flats}
        written = {flat: each if each != self._before[flat] else bytes(8) for flat, each in now.items()}
        replaced = [span.name for flat in self.flats if (span := flat.replaced())]
        try:
            agree(written)
            for flat in self.flats:
                flat.write_back()
        finally:
            for flat in self.flats:
                flat.leave_storage()
                self.gatherer.reshard([flat])
        if replaced:
            raise RuntimeError(
                f"parameter {replaced[0]} was given another tensor inside full_params(), as p.data = ... "
                "does, and its new values are lost: write into the parameter, as in p.copy_(...)"
            )

    # What users do to parameters and gradients between steps, for the ranks to compare at the next one.

    def _remember(self, written: dict[FlatUnit, bytes]) -> None:
        self._written |= _by_name(written)

    def _inspect_in_turn(self) -> None:
        """Look at the values of one unit, at another in each step: other code may write without a counter.

        All units at once would take 4 % of a step of the 11M GPT; reading a GPU's would wait for it.
        """
        flat = self.flats[self._turn % len(self.flats)]
        self._turn += 1
        if flat.device.type != "cpu":
            return
        if flat.shard_is_detached:
            flat.writes.compare_next = True
        elif flat.shards > 1:  # one rank alone cannot differ
            self._remember({flat: flat.checksum()})

    def written_values(self) -> list[str]:
        """Return a line for each unit written to since `forget_writes`, with a checksum.

        And for the one whose turn it is to be compared.
        """
        self._inspect_in_turn()
        return self.written_so_far()

    def forget_writes(self) -> None:
        """The ranks have the same values now: what was written until here need not be compared again."""
        self._written.clear()
        for flat in self.flats:
            if flat.whole:
                flat.writes.note()

    def written_so_far(self) -> list[str]:
        """Return the lines that `written_values` has for writes."""
        now = _by_name({flat: flat.checksum() for flat in self.flats if flat.was_written()})
        return [f"unit {name}, checksum {checksum}" for name, checksum in (self._written | now).items()]

    def state_of(self, flat: FlatUnit) -> str:
        """In words: what the run is doing, where the parameters are, how far the gradients have come."""
        grads = f"; its gradients are {flat.grads.state.value}" if flat.trainable else ""
        return (
            f"unit {flat.name} in {self.training.state.value}: its parameters are {flat.state.value}{grads}"
        )


def _by_name(written: dict[FlatUnit, bytes]) -> dict[str, str]:
    """Return the checksums by the units' names. On the meta device there are no values to compare."""
    return {flat.name: checksum.hex() for flat, checksum in written.items() if any(checksum)}

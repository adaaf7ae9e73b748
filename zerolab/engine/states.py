"""The state of the training run and of each unit in it, in one place.

    SETUP -> FORWARD -> BACKWARD -> FORWARD -> STEP -> FORWARD -> ...

The states of a unit's buffers are their own: see zerolab/unit/states.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from torch.utils.hooks import RemovableHandle

from zerolab.engine.units import Unit
from zerolab.storages import MemoryMeter
from zerolab.trace import Trace
from zerolab.unit import FlatUnit


class TrainingState(Enum):
    """What the run is doing. FORWARD is also the time between passes. The value is the phase in the trace."""

    SETUP = "setup"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    SAVE = "save"
    LOAD = "load"
    EXPORT = "export"


_FOLLOWING = {state: {TrainingState.FORWARD} for state in TrainingState} | {
    TrainingState.FORWARD: set(TrainingState) - {TrainingState.SETUP, TrainingState.FORWARD}
}


class TrainingRun:
    """The state of the run. It alone tells the trace and the memory meter which phase they are in.

    Attributes:
        state: what the run is doing. `become` changes it.
        in_backward: whether a backward pass is open: it runs, or an exception broke it off.
        broken_off: what an exception ended in the middle, in words; nothing once a checkpoint is loaded.
    """

    def __init__(self, trace: Trace, meter: MemoryMeter):
        self.trace, self.meter = trace, meter
        self.state = TrainingState.SETUP
        self.in_backward = False
        self.broken_off = ""

    def become(self, state: TrainingState) -> None:
        """Change the state. Raises: RuntimeError where it may not follow the present one."""
        if state not in _FOLLOWING[self.state]:
            raise RuntimeError(
                f"the run is in {self.state.name} and cannot go to {state.name}: let {self.state.value} end "
                "first, and after an exception call optimizer.zero_grad()"
            )
        self.state = state
        self.in_backward = state is TrainingState.BACKWARD
        self.meter.enter(state.value)
        self.trace.enter(state.value)

    @contextmanager
    def during(self, state: TrainingState) -> Iterator[None]:
        """Be in ``state`` inside the with block, and in FORWARD after it."""
        self.become(state)
        try:
            yield
        finally:
            self.become(TrainingState.FORWARD)

    @contextmanager
    def changing(self, action: str) -> Iterator[None]:
        """Parameters change inside the with block, and an exception leaves some of them as they were."""
        try:
            yield
        except BaseException as error:
            self.broken_off = f"{action} failed in the middle ({type(error).__name__}: {error})"
            raise

    def require_whole_updates(self) -> None:
        """Raises: RuntimeError where a change was broken off, and no checkpoint was loaded since."""
        if self.broken_off:
            raise RuntimeError(
                f"an earlier {self.broken_off}, so some parameters and states are changed and others are "
                "not, and ranks may differ: go on from a checkpoint with zerolab.load(optimizer, path), or "
                "build the model and its optimizer anew"
            )


@dataclass(eq=False)
class UnitRun:
    """A unit at run time: its flat buffers, and how far the forward and backward pass have come in it.

    Attributes:
        flats: its parameters, a FlatUnit for each kind: trainable or frozen, by dtype and device.
        depth: how many of its entry modules are running now, one inside the other.
        expects_backward: whether an output of the last forward can bring a backward pass here.
        inputs_watched: how many inputs of the last forward get a gradient; inputs_done: how many have it.
        leaf_hooks: the hooks on inputs that are leaves, by id; a hook is removed when it was called.
    """

    unit: Unit
    flats: list[FlatUnit] = field(default_factory=list)
    depth: int = 0
    expects_backward: bool = False
    inputs_watched: int = 0
    inputs_done: int = 0
    leaf_hooks: dict[int | None, RemovableHandle] = field(default_factory=dict)

    def forget_inputs(self) -> None:
        """Watch none of the inputs of an earlier forward."""
        self.inputs_watched = self.inputs_done = 0
        for handle in self.leaf_hooks.values():
            handle.remove()
        self.leaf_hooks.clear()

    @property
    def is_root(self) -> bool:
        return self.unit.is_root


@dataclass
class BackwardPass:
    """The backward pass under way, or the last one.

    Attributes: number: autograd's own, -1 before the first. at_work: the unit it is in, the root apart.
    """

    number: int = -1
    at_work: UnitRun | None = None

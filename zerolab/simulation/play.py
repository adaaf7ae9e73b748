"""Simulate a training step on a cluster: the engine's own events, played against rates and links.

The order of the work is not modelled. It is that of a rehearsal: the engine runs its hooks, stages and the
stock optimizer for one rank, on tensors without contents, and each start of a collective and each wait for
one is recorded. What is modelled is how long each takes. A GPU runs its operators one after the other. Its
collectives run beside them: those inside its node one after the other, and those between nodes. All ranks are
taken to be equally fast. Where CPUs compute, a message under way slows the computation down, because sending
takes a share of the same processor.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from zerolab.checks import number, whole
from zerolab.rehearsal import rehearsing
from zerolab.simulation.cluster import Cluster
from zerolab.simulation.recording import Message, Place, Recorder, Recording, messages_of, seconds_of_parts
from zerolab.timeline import Interval, lanes, save_timelines


@dataclass(frozen=True)
class Simulation:
    """A step of one rank, on a cluster.

    Attributes:
        seconds: of the step.
        computation_seconds: how much of that the GPU computes.
        message_seconds: how long collectives are under way, hidden or not.
        flops: of the step's matrix products on this GPU.
        world_size: all ranks.
        copies: of the model, as many as there are ranks unless several share one by tensor parallelism.
        cluster: where they run.
        intervals: of the timeline.
    """

    seconds: float
    computation_seconds: float
    message_seconds: float
    flops: float
    world_size: int
    copies: int
    cluster: Cluster
    intervals: list[Interval]

    @property
    def exposed_seconds(self) -> float:
        """How long the step takes besides what it computes: waiting for messages, or slowed down by them."""
        return self.seconds - self.computation_seconds

    @property
    def tflops(self) -> float:
        """10¹² floating-point operations per second and GPU."""
        return self.flops / self.seconds / 1e12

    def tokens_per_day(self, tokens: int) -> float:
        """Tokens that all ranks train on in a day. Args: tokens: of the batch of one copy of the model."""
        return 86_400 * whole("tokens", tokens) * self.copies / self.seconds

    def dollars(self, steps: float) -> float:
        """The cost of so many steps."""
        gpu_hours = number("steps", steps) * self.seconds / 3600 * self.world_size
        return gpu_hours * self.cluster.dollars_per_gpu_hour

    def timeline(self) -> list[dict]:
        """Return the step as events of Chrome's trace format."""
        return lanes(0, 0, "", self.intervals)

    def save(self, path: str | Path) -> None:
        """Write `timeline` into a file that Perfetto (ui.perfetto.dev) opens."""
        save_timelines(path, [self.timeline()])


def record(
    model_fn: Callable[[], nn.Module], world_size: int, stage: int = 3, steps: int = 2, **options: Any
) -> Recording:
    """Rehearse training steps, and record their operators and collectives.

    The first step allocates state and learns the order to prefetch in. The second waits for its gathers.

    Args: options: as of `rehearse`.
    """
    whole("steps", steps)
    with rehearsing(model_fn, world_size, stage, **options) as job:
        recorder, begins, updates = Recorder(), [], []
        traces = [job.optimizer.trace, job.sharing.trace]
        for trace in traces:
            trace.mark = recorder.mark
        with recorder:
            for _ in range(steps):
                begins.append(recorder.mark())
                job.pass_forward_and_backward()
                updates.append(recorder.mark())
                job.update()
            begins.append(recorder.mark())
        found = [message for trace in traces for message in messages_of(trace)]
        tensor_parallel = options.get("tensor_parallel", 1)
        return Recording(recorder.operators, found, begins, updates, tensor_parallel)


@dataclass(frozen=True)
class Alone:
    """Measured seconds of a step on one rank, which sends nothing. They replace the model of computation.

    Attributes:
        recording: of the same step: the same model and batch, for one rank.
        passes_seconds: of its forward and backward passes.
        update_seconds: of the optimizer's.
    """

    recording: Recording
    passes_seconds: float
    update_seconds: float


def play(recording: Recording, cluster: Cluster, world_size: int, alone: Alone | None = None) -> Simulation:
    """Compute when each operator and each collective of a recording runs on a cluster.

    Args: alone: all operators are scaled, so that those of ``alone.recording`` take the seconds measured.
    """
    return _Play(recording, cluster, alone).simulation(world_size)


def play_turn(recording: Recording, cluster: Cluster, alone: Alone | None = None) -> float:
    """Seconds of a step, where all steps but the first are a turn: it begins and ends without any messages.

    Args: as for `play`.
    """
    begin = recording.begins[1]
    messages = [message for message in recording.messages if message.start.order > begin.order]
    played = _Play(recording._replace(messages=messages), cluster, alone)
    return (max(played.now, *played.links_free.values()) - played.steps[1]) / (len(recording.updates) - 1)


class _Play:
    """The clock of one rank, and what ran when.

    Attributes:
        now: when the GPU has run the operators so far.
        links_free: when the last collective so far is over, inside the node and between nodes.
        done: when each collective is over, by the id of its event.
        steps: when each step begins, and the last one ends.
    """

    def __init__(self, recording: Recording, cluster: Cluster, alone: Alone | None):
        self.recording, self.cluster = recording, cluster
        self.spent = [0.0, *accumulate(self._operator_seconds(alone))]
        self.now = 0.0
        self.links_free = {False: 0.0, True: 0.0}
        self.done: dict[int, float] = {}
        self.steps: list[float] = []
        self.intervals: list[Interval] = []
        self._slowed: deque[_Slowed] = deque()
        self._operators = 0
        for place, happens in sorted(self._moments(), key=lambda moment: moment[0].order):
            self._compute_until(place)
            happens()

    def _operator_seconds(self, alone: Alone | None) -> Iterator[float]:
        """Seconds of each operator, where nothing slows it down."""
        factors = (1.0, 1.0)
        if alone is not None:
            passes, update = seconds_of_parts(alone.recording, self.cluster)
            factors = (alone.passes_seconds / passes, alone.update_seconds / update)
        seconds = cache(self.cluster.operator_seconds)  # the same operators come again in every block
        for part, factor in zip(self.recording.parts(), cycle(factors), strict=False):
            for each in part:
                yield factor * seconds(*each)

    @property
    def computation(self) -> float:
        """Seconds of the last step's operators."""
        first, last = (place.operators for place in self.recording.begins[-2:])
        return self.spent[last] - self.spent[first]

    def _moments(self) -> Iterator[tuple[Place, Callable[[], None]]]:
        """What happens at the marked places."""
        for begin in self.recording.begins:
            yield begin, lambda: self.steps.append(self.now)
        for message in self.recording.messages:
            yield message.start, partial(self._start, message)
            for place in message.waits:
                yield place, partial(self._wait, message)

    def _compute_until(self, place: Place) -> None:
        seconds = self.spent[place.operators] - self.spent[self._operators]
        if seconds:
            begin, self.now = self.now, self._computed(seconds)
            self.intervals.append(Interval("compute", begin, self.now, True))
        self._operators = place.operators

    def _computed(self, seconds: float) -> float:
        """When so many seconds of computation are over that begin now."""
        now = self.now
        while self._slowed:
            begin, end, speed = self._slowed[0]
            if now + seconds <= begin:
                break
            if begin > now:
                seconds, now = seconds - (begin - now), begin
            if now + seconds / speed <= end:
                return now + seconds / speed
            if end > now:
                seconds, now = seconds - speed * (end - now), end
            self._slowed.popleft()
        return now + seconds

    def _start(self, message: Message) -> None:
        event = message.event
        between = self.cluster.inside_of(event.ranks) < len(event.ranks)
        begin = max(self.now, self.links_free[between])
        seconds, share = self.cluster.sending(event.op, event.wire_bytes, event.ranks)
        end = self.done[id(event)] = self.links_free[between] = begin + seconds
        if share:
            self._slowed.append(_Slowed(begin, end, 1 - share))
        details = {"phase": event.phase, "wire_bytes": event.wire_bytes, "shape": list(event.shape)}
        self.intervals.append(Interval(f"{event.op} {event.unit}", begin, end, False, details))

    def _wait(self, message: Message) -> None:
        self.now = max(self.now, self.done[id(message.event)])

    def simulation(self, world_size: int) -> Simulation:
        """The last step."""
        begin, end = self.steps[-2:]
        first, last = (place.operators for place in self.recording.begins[-2:])
        inside = [each for each in self.intervals if begin <= each.start < end]
        return Simulation(
            seconds=end - begin,
            computation_seconds=self.computation,
            message_seconds=sum(each.stop - each.start for each in inside if not each.computes),
            flops=sum(each.flops for each in self.recording.operators[first:last]),
            world_size=world_size,
            copies=world_size // self.recording.tensor_parallel,
            cluster=self.cluster,
            intervals=inside,
        )


class _Slowed(NamedTuple):
    """From when to when a message leaves the computation only a part of its speed."""

    begin: float
    end: float
    speed: float


def simulate(
    model_fn: Callable[[], nn.Module], world_size: int, stage: int, cluster: Cluster, **options: Any
) -> Simulation:
    """Simulate a training step of ``model_fn()`` as one of ``world_size`` ranks of a cluster.

    Args: options: as of `rehearse`.
    """
    if not isinstance(cluster, Cluster):
        raise TypeError(f"cluster is a {type(cluster).__name__}: pass a zerolab.Cluster")
    return play(record(model_fn, world_size, stage, **options), cluster, world_size)

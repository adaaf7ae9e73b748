"""Record rehearsed steps: what each operator computes and reads, where messages start and are waited for."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from zerolab.events import CONTROL, Event
from zerolab.simulation.cluster import Cluster
from zerolab.trace import Trace

# What allocates memory or looks at it otherwise, and neither reads nor writes the elements.
_READ_NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "resize_", "set_", "detach", "alias")


class Operator(NamedTuple):
    """What a GPU has to do for one operator.

    Attributes: flops: floating-point operations of matrix products. nbytes: what it reads and writes.
    """

    flops: int
    nbytes: int


class Place(NamedTuple):
    """A place in a GPU's queue, as `zerolab.device_times.Mark`; here nothing runs, so it has no time.

    Attributes: order: how many places were marked before. operators: how many operators stand before it.
    """

    order: int
    operators: int

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def elapsed_time(self, end_event: "Place") -> float:
        """Raises: NotImplementedError."""
        raise NotImplementedError("a rehearsal has an order and no times: zerolab.simulation computes them")


class Recorder(TorchDispatchMode):
    """Note every operator that runs inside it, and give out places between them."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self._places = 0

    def mark(self) -> Place:
        """Return the place where the queue is now."""
        self._places += 1
        return Place(self._places, len(self.operators))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace != "c10d" and func._opname not in _READ_NOTHING:
            self.operators.append(_measure(func, args, kwargs or {}, result))
        return result


def _measure(func: Any, args: tuple, kwargs: dict, result: Any) -> Operator:
    formula = flop_registry.get(func._overloadpacket)
    flops = formula(*args, **kwargs, out_val=result) if formula else 0
    tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
    return Operator(int(flops), sum(tensor.nbytes for tensor in tensors))


class Message(NamedTuple):
    """One collective: what it sends, among which ranks, and from where to where it is under way.

    Attributes: waits: where its result is needed; nothing else on this rank waits for it.
    """

    event: Event
    start: Place
    waits: list[Place]


class Recording(NamedTuple):
    """Training steps as one rank runs them.

    Attributes:
        begins: by step, where it begins; the last one is where the last step ends.
        updates: by step, where the optimizer's update begins.
        tensor_parallel: how many ranks share a copy of the model.
    """

    operators: list[Operator]
    messages: list[Message]
    begins: list[Place]
    updates: list[Place]
    tensor_parallel: int = 1

    def parts(self) -> Iterator[list[Operator]]:
        """The operators by step: those of its passes, then those of its update."""
        for begin, update, end in zip(self.begins[:-1], self.updates, self.begins[1:], strict=True):
            yield self.operators[begin.operators : update.operators]
            yield self.operators[update.operators : end.operators]


def seconds_of_parts(recording: Recording, cluster: Cluster) -> tuple[float, float]:
    """What the passes and the update of the last step take on a cluster, by its rates."""
    *_, passes, update = (sum(cluster.operator_seconds(*each) for each in part) for part in recording.parts())
    return passes, update


def messages_of(trace: Trace) -> Iterator[Message]:
    """The collectives of a trace that send anything, in order."""
    for event in trace.events:
        times: Any = event.device
        if times is not None and event.phase != CONTROL and event.wire_bytes:
            waits = [before for before, _ in times.waits] or [times.ended]
            yield Message(event, times.started, waits)

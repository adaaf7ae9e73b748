"""Run a reader's function on real ranks, and record every message that it sends.

A grader that looks at results alone passes a function that sends everything to every rank. With the messages
a check can also grade bytes, and which ranks talk to each other.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zerolab

Diagnose = Callable[[Callable], str | None]
Check = Callable[[Callable], None]
_RECEIVES = {"recv_", "recv_any_source_"}


class Message(NamedTuple):
    """One call on the process group: operation, the receiver of a send (None for a collective), size."""

    op: str
    peer: int | None
    numel: int
    nbytes: int


class Wire(TorchDispatchMode):
    """Record what the code inside it sends: torch.distributed's calls are operators, and this mode sees them.

    It sees send and isend, batched or not, and every collective, under whatever name they were imported.
    Receives are left out, because each of them is a send of another rank.
    """

    def __init__(self):
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and func._opname not in _RECEIVES:
            peer = args[2] if func._opname == "send" else None
            tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            numel, nbytes = sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)
            self.messages.append(Message(func._opname, peer, numel, nbytes))
        return func(*args, **(kwargs or {}))


@dataclass
class Attempt:
    """What came back from the ranks: a value and the messages of each, or the failure that stopped them."""

    values: list[Any] = field(default_factory=list)
    messages: list[list[Message]] = field(default_factory=list)
    failure: str | None = None

    @property
    def collectives(self) -> list[str]:
        """The names of torch's own collectives that were called."""
        return sorted({m.op.strip("_") for sent in self.messages for m in sent if m.op != "send"})

    def bytes_sent(self, rank: int) -> int:
        return sum(message.nbytes for message in self.messages[rank])

    def unusable(self, instead: str) -> str | None:
        """Why there is nothing to grade: a failure, a stub, or torch's collective in place of `instead`."""
        if self.failure:
            return self.failure
        if not any(self.messages) and all(value is None for value in self.values):
            return "not written yet: nothing was sent and None was returned"
        return f"that calls torch's own {self.collectives[0]}: use {instead}" if self.collectives else None


def attempt(fn: Callable, inputs: Sequence[tuple], timeout: float = 8.0) -> Attempt:
    """Call fn(*inputs[rank]) on one process for each entry of `inputs` and return what came back.

    A function that raises or never returns has a result, too: `failure` describes it to the person who wrote
    the function.
    """
    try:
        results = zerolab.launch(_observe, len(inputs), fn, list(inputs), timeout=timeout)
    except zerolab.LaunchTimeout as error:
        return Attempt(failure=_stuck(error.ranks, len(inputs), timeout))
    except zerolab.WorkerError as error:
        cause = error.__cause__
        what = f"{type(cause).__name__}: {cause}" if cause is not None else str(error).splitlines()[0]
        return Attempt(failure=f"rank {error.rank} stopped with {what}")
    return Attempt([value for value, _ in results], [messages for _, messages in results])


def _stuck(busy: Sequence[int], world_size: int, timeout: float) -> str:
    if busy:
        return f"after {timeout:g} s rank {busy[0]} was still computing, not waiting: an endless loop?"
    return (
        f"deadlock: after {timeout:g} s all {world_size} ranks wait for each other. If all of them send "
        "first and receive second, all wait. Start both with dist.batch_isend_irecv, and wait for what it "
        "returns"
    )


def _observe(fn: Callable, inputs: list[tuple]) -> tuple[Any, list[Message]]:
    """In the worker: run fn on this rank's input and record its messages."""
    with Wire() as wire:
        value = fn(*inputs[dist.get_rank()])
    if isinstance(value, torch.Tensor):
        value = value.detach().clone()  # a view would be sent with its whole storage
    return value, wire.messages


def total(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Their sum: as `sum` has it, but never the int 0 that it starts from."""
    return sum(tensors, torch.tensor(0))


def graded(passed: str) -> Callable[[Diagnose], Check]:
    """Turn a function that diagnoses a solution into a check that prints `passed` or the mistake.

    A diagnosis is the sentence that names the mistake, or None; the check keeps its function in ``diagnose``.
    """

    def checked_by(diagnose: Diagnose) -> Check:
        @functools.wraps(diagnose)
        def check(solution: Callable) -> None:
            mistake = diagnose(solution)
            print(f"✓ {passed}" if mistake is None else f"✗ {mistake[0].upper()}{mistake[1:]}.")

        vars(check)["diagnose"] = diagnose
        return check

    return checked_by

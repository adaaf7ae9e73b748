"""Verdict: of which kind an optimizer is, and what state it keeps."""

import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerolab.optimizer.groups import options_of
from zerolab.optimizer.probe.by_parameter import ByParameter, by_parameter
from zerolab.optimizer.probe.contract import BrokenContract, closure_refusal, is_torchs, require_contract
from zerolab.optimizer.probe.elementwise import bytes_of_an_element
from zerolab.optimizer.probe.refused import OTHER_ARGUMENTS, Kind, Refused
from zerolab.optimizer.probe.state_bytes import measured_bytes
from zerolab.optimizer.probe.subject import AS_ASKED, Subject, surroundings

SILENT_SECONDS = 30.0  # most classes take less than one, and seconds where ranks share few cores
SLOW = (
    "zerolab is trying %s on small parameters, to find out how it may be sharded. Its own steps are slow: "
    "this has taken %g s so far, and training starts after it"
)

log = logging.getLogger("zerolab")

_per_element: dict[tuple[type, str], float] = {}
_verdicts: dict[tuple[type, str], "Verdict"] = {}
_measured: dict[tuple, int] = {}
_with_closure: dict[tuple[type, str], str] = {}


class Verdict(NamedTuple):
    """Of which kind an optimizer is, and why it is of no kind that could be cut in smaller pieces.

    Attributes:
        name: the optimizer class's.
        way_out: what to do about it, where the optimizer cannot be sharded.
        found: more about an optimizer of the kind BY_PARAMETER.
    """

    name: str
    kind: Kind
    reason: str = ""
    way_out: str = ""
    found: ByParameter | None = None

    @property
    def refusal(self) -> str:
        """Why the optimizer cannot be sharded, and what to do about it; nothing if it can be."""
        if self.kind in (Kind.ELEMENTWISE, Kind.BY_PARAMETER):
            return ""
        return f"{self.name} cannot be sharded: {self.reason}. {self.way_out}"

    def refusal_of(self, shape: tuple[int, ...]) -> str:
        """Why the optimizer cannot update a parameter of this shape, and what to do; nothing if it can."""
        if self.refusal or self.found is None or len(shape) in self.found.taken:
            return self.refusal
        taken = ", ".join(map(str, self.found.taken))
        why = f"no more than {self.found.most_dims} dimensions were tried"
        if error := self.found.failures.get(len(shape)):
            why = f"a smaller one raised {error}"
        return (
            f"{self.name} takes parameters of {taken} dimensions, and one of shape {tuple(shape)} has "
            f"{len(shape)} ({why}): put it in a group with another optimizer, such as AdamW"
        )


def verdict_of(
    optimizer_class: type[torch.optim.Optimizer], defaults: dict, options: dict | None = None
) -> Verdict:
    """Try an optimizer, first on slices and then on whole parameters, and say of which kind it is.

    Args: options: what a parameter group has besides the ``defaults``, or instead of them.
    Raises: TypeError if it is no optimizer class; the optimizer's own TypeError or ValueError about its
        keywords, with ZeroOptimizer's for one that it does not know.
    """
    subject = Subject(optimizer_class, defaults, options, AS_ASKED)
    if subject.key not in _verdicts:
        with surroundings(), _announced(subject.name):
            _verdicts[subject.key] = _tried(Subject(optimizer_class, defaults, options), subject)
    return _verdicts[subject.key]


@contextmanager
def _announced(name: str) -> Iterator[None]:
    """Log on rank 0 what is going on, where it takes long: some classes step for minutes."""
    if dist.is_initialized() and dist.get_rank() != 0:
        yield
        return
    timer = threading.Timer(SILENT_SECONDS, log.warning, (SLOW, name, SILENT_SECONDS))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def kind_of(
    optimizer_class: type[torch.optim.Optimizer], defaults: dict, options: dict | None = None
) -> Kind:
    """On what the optimizer's update of an element depends: its own history, its parameter's, or others'.

    Args, Raises: as for `verdict_of`.
    """
    return verdict_of(optimizer_class, defaults, options).kind


def refusal_of_closure(
    optimizer_class: type[torch.optim.Optimizer], defaults: dict, options: dict | None
) -> str:
    """Why `step(closure)` cannot be used with the optimizer, and what to do; nothing if it can be."""
    if is_torchs(optimizer_class):
        return ""
    subject = Subject(optimizer_class, defaults, options)
    if subject.key not in _with_closure:
        _with_closure[subject.key] = ""
        with surroundings(), suppress(Exception):  # it takes no matrix, and cannot be tried
            _with_closure[subject.key] = closure_refusal(subject.build)
    if not (reason := _with_closure[subject.key]):
        return ""
    return (
        f"{subject.name} cannot be stepped with a closure: {reason}. ZeroOptimizer calls the closure itself, "
        "once: call backward before step(), and step() without a closure, or pass another class"
    )


def complete_options(optimizer_class: type[torch.optim.Optimizer], defaults: dict, options: dict) -> dict:
    """Return all options that the optimizer gives a group. Raises: its own TypeError or ValueError."""
    with surroundings():
        (group,) = Subject(optimizer_class, defaults, options, without=()).sample().param_groups
    return options_of(group)


def state_bytes_of(
    optimizer_class: type[torch.optim.Optimizer], defaults: dict, options: dict | None, shape: tuple[int, ...]
) -> int:
    """Bytes of state for one whole fp32 parameter of this shape, without counters.

    Memory: that of a few steps of such a parameter, for an optimizer that needs its values; otherwise none.
    Raises: ValueError for an optimizer that cannot be sharded, or that takes no such shape; and as above.
    """
    verdict = verdict_of(optimizer_class, defaults, options)
    if refusal := verdict.refusal_of(shape):
        raise ValueError(refusal)
    if not math.prod(shape):
        return 0  # nothing to have state for; some classes divide by the number of elements
    if verdict.found is None:
        return round(state_bytes_per_parameter(optimizer_class, defaults, options) * math.prod(shape))
    subject = Subject(optimizer_class, defaults, options, AS_ASKED)
    key = *subject.key, tuple(shape)
    if key not in _measured:
        with surroundings():
            _measured[key] = measured_bytes(subject.build, shape, verdict.found.steps, verdict.found.device)
    return _measured[key]


def state_bytes_per_parameter(
    optimizer_class: type[torch.optim.Optimizer], defaults: dict, options: dict | None = None
) -> float:
    """Bytes of state an elementwise optimizer keeps for each fp32 parameter: K of an fp32 run, 8 for Adam.

    Args: options: what a parameter group has besides the ``defaults``, or instead of them.
    Raises: TypeError if it is no optimizer class; ValueError if it is not elementwise; the optimizer's own
        TypeError or ValueError about its keywords, with ZeroOptimizer's for one that it does not know.
    """
    subject = Subject(optimizer_class, defaults, options)
    with surroundings():
        try:
            return _bytes_of_an_element(subject)
        except Refused as refusal:
            message = f"{subject.name} cannot be sharded: {refusal.reason}. {refusal.way_out}"
            raise ValueError(message) from refusal.__cause__


def _bytes_of_an_element(subject: Subject) -> float:
    if subject.key not in _per_element:
        subject.sample()
        _per_element[subject.key] = bytes_of_an_element(subject.build)
    return _per_element[subject.key]


def _tried(in_slices: Subject, whole: Subject) -> Verdict:
    name = whole.name
    try:
        whole.sample()
        require_contract(whole.optimizer_class, whole.build)
        _bytes_of_an_element(in_slices)
        return Verdict(name, Kind.ELEMENTWISE)
    except Refused as refusal:
        reason = refusal.reason
        if refusal.way_out == OTHER_ARGUMENTS or isinstance(refusal, BrokenContract):
            return Verdict(name, refusal.kind, reason, refusal.way_out)
    try:
        return Verdict(name, Kind.BY_PARAMETER, reason, found=by_parameter(whole.build))
    except Refused as refusal:
        return Verdict(name, refusal.kind, refusal.reason, refusal.way_out)

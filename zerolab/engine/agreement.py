"""Check that ranks agree before they exchange numbers.

A rank that holds another model, or took another path through it, does not fail by itself: it waits for a
message that never comes, or adds up gradients of different things. Small messages on the control group find
such a rank.
"""

import hashlib
import itertools
from typing import TypeVar

import torch
import torch.distributed as dist

from zerolab.collectives import Comm
from zerolab.engine.clearing import ClearedGradients
from zerolab.unit import FlatUnit
from zerolab.unit.span import Span

T = TypeVar("T")

DIGEST_BYTES = 16

TENSOR_PARALLEL = "a step of tensor-parallel ranks"
COPIES = "the values of a copy of the model"
BUFFERS = "the buffers"
WRITTEN, CLEARED = "the values written to parameters", "the gradients that were cleared"
LOADED = "the calls of optimizer.load_state_dict"
_WAY_OUT = (
    "Every rank must build the same model and optimizer, keep the same settings, and take the same path"
)
_WAYS_OUT = {
    WRITTEN: "Write the same values on every rank, or write inside full_params(from_rank=0), which also has "
    "every rank take over the values of rank 0. A module that writes to its weights in forward, as "
    "nn.Embedding(max_norm=...), writes other values on each rank",
    TENSOR_PARALLEL: "Give the ranks of one copy the same batch and the same hyperparameters, and the same "
    "seed if the model has dropout. A pair of layers with a trainable parameter between them cannot be cut: "
    "each rank has a part of its gradient",
    COPIES: "With hybrid sharding each group of ranks has a copy, with the same optimizer state. Load the "
    "same files in all groups, by zerolab.load(), and change optimizer.state on all ranks alike",
    CLEARED: "Clear gradients on every rank or on none: a rank that clears alone removes its part of all "
    "ranks' gradients. Where some ranks did not use a parameter, clear its gradient after the last backward "
    "pass before a step, or clear all with optimizer.zero_grad()",
    BUFFERS: "Each rank keeps its own, so ranks train different models. If that is not meant, build them "
    "from one seed, or broadcast rank 0's before the optimizer is built",
    LOADED: "Load on every rank, each its own state_dict of one moment; zerolab.save() and zerolab.load() do "
    "that",
}


def agree_on(comm: Comm, what: str, lines: list[str]) -> None:
    """Check that every rank describes ``what`` in the same lines.

    Comm: 32 bytes, ceil(log2 N) times; where they differ, the lines themselves.
    Raises: RuntimeError on every rank, naming the first difference to rank 0 and who differs.
    """
    if difference := difference_of(comm, what, lines):
        raise RuntimeError(difference)


def difference_of(comm: Comm, what: str, lines: list[str]) -> str:
    """Return the first difference to rank 0 in the lines of all ranks; nothing where all have the same.

    Comm: as `agree_on`.
    """
    alike = _are_equal(comm.maximum(_both_ways(_digest(lines)), "digests"))
    return "" if alike else _difference(comm, what, lines)


def agree_on_all(comm: Comm, by_hand: dict[str, list[str]]) -> None:
    """The same for several things that users do, with one message where all ranks did the same."""
    if not _are_equal(comm.maximum(_both_ways(_digest(_labelled(by_hand))), "digests")):
        for what, lines in by_hand.items():
            agree_on(comm, what, lines)


def agree_on_used(
    comm: Comm, units: list[FlatUnit], by_hand: dict[str, list[str]], cleared: ClearedGradients
) -> set[Span]:
    """Return the parameters that at least one rank has a gradient for.

    A rank that did not use a parameter counts as zero in its mean; one that no rank used is not updated.
    The message also carries digests of the collectives issued since the last step and of what users do
    between steps, so that ranks that differ raise an error before any parameter changes.

    Args:
        by_hand: what users do, such as "the hyperparameters", with the lines that describe it.
        cleared: the gradients that this rank's user has cleared.
    Comm: a byte for each parameter, and 64, ceil(log2 N) times. Raises: RuntimeError where ranks differ.
    """
    issued = [f"{event.op} of {event.unit}" for event in comm.trace.step(comm.trace.step_number)]
    spans = [span for unit in units for span in unit.spans]
    mine = bytearray(span in unit.grads.used for unit in units for span in unit.spans)
    mask = torch.frombuffer(mine, dtype=torch.uint8)
    all_lines = _labelled(by_hand | {CLEARED: cleared.everything()})
    digests = _both_ways(_digest(issued)), _both_ways(_digest(all_lines))
    found = comm.maximum(torch.cat([*digests, mask]), "used parameters")
    of_issued, of_lines, used = found.split([2 * DIGEST_BYTES, 2 * DIGEST_BYTES, len(mask)])
    if not _are_equal(of_issued):
        raise RuntimeError(_difference(comm, "the step's collectives", issued))
    if not _are_equal(of_lines):
        for what, lines in by_hand.items():
            agree_on(comm, what, lines)
        _agree_on_cleared(comm, units, cleared)
    return set(itertools.compress(spans, used.tolist()))


def _agree_on_cleared(comm: Comm, units: list[FlatUnit], cleared: ClearedGradients) -> None:
    """Clear here what other ranks' users have cleared and this rank did not use.

    Its gradient is None here, so a user can clear nothing on this rank. A reduction that came after such a
    clearing has added to a sum that still holds the gradient, and the ranks' sums differ for good.

    Comm: what each rank used and cleared, once.
    Raises: RuntimeError on every rank for every other difference.
    """
    used = {span.name for unit in units for span in unit.grads.used}
    every = _gather(comm, (cleared.earlier, cleared.last, used))
    last = {name for _, names, _ in every for name in names}
    if any(earlier != every[0][0] or used & last for earlier, _, used in every):
        raise RuntimeError(_difference(comm, CLEARED, cleared.everything()))
    for unit in units:
        for span in unit.spans:
            if span.name in last:
                unit.grads.forget(span)


def agree_on_order(comm: Comm, units: list[FlatUnit], completed: list[FlatUnit]) -> list[FlatUnit]:
    """Rank 0's ``completed``, on every rank: the order in which its units had all their gradients.

    Comm: eight bytes for each unit.
    """
    order = [units.index(unit) for unit in completed]
    message = torch.tensor(order + [-1] * (len(units) - len(order)), dtype=torch.int64)
    return [units[index] for index in comm.exchange(message, "unit order")[0].tolist() if index >= 0]


def agree_on_values(comm: Comm, written: dict[FlatUnit, bytes]) -> None:
    """Check that every rank wrote the same values to whole parameters, by their checksums.

    Comm: 8 bytes for each unit.
    Raises: RuntimeError on every rank, naming the first unit and the rank that differs from rank 0.
    """
    checksums = torch.frombuffer(bytearray(b"".join(written.values())), dtype=torch.int64)
    rows = comm.exchange(checksums, "parameter values")
    for unit, column in zip(written, rows.T, strict=True):
        others = [rank for rank, each in enumerate(column.tolist()) if each != column[0]]
        if others:
            raise RuntimeError(
                f"full_params() ends with other values in unit {unit.name} on rank {others[0]} than on rank "
                "0. Write the same values on every rank; or write on one rank alone and say which: "
                "`with optimizer.full_params(from_rank=0):`"
            )


def _labelled(by_hand: dict[str, list[str]]) -> list[str]:
    return [f"{what}: {line}" for what, lines in by_hand.items() for line in lines]


def _digest(lines: list[str]) -> torch.Tensor:
    """Return a few bytes that differ where the lines differ."""
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=DIGEST_BYTES).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _both_ways(digest: torch.Tensor) -> torch.Tensor:
    """Return the bytes and their complements, whose maximum over the ranks tells whether all are equal.

    The maximum of complements is the complement of the minimum.
    """
    return torch.cat([digest, 255 - digest])


def _are_equal(maxima: torch.Tensor) -> bool:
    """Whether every rank had the same bytes, from the maximum of `_both_ways`."""
    largest, complements_of_smallest = maxima.chunk(2)
    return bool((largest == 255 - complements_of_smallest).all())


def _difference(comm: Comm, what: str, lines: list[str]) -> str:
    """Say where the lines of ranks differ."""
    numbers = comm.numbers
    every = _gather(comm, lines)
    other = next(rank for rank, theirs in enumerate(every) if theirs != every[0])
    pairs = itertools.zip_longest(every[0], every[other], fillvalue="nothing")
    place, (ours, theirs) = next((index, pair) for index, pair in enumerate(pairs) if pair[0] != pair[1])
    return (
        f"ranks disagree about {what}, first at number {place}: rank {numbers[0]} has {ours}, rank "
        f"{numbers[other]} has {theirs}. {_WAYS_OUT.get(what, _WAY_OUT)}"
    )


def _gather(comm: Comm, mine: T) -> list[T]:
    """Return what every rank passes, in rank order."""
    every: list[T] = [mine] * comm.world_size
    dist.all_gather_object(every, mine, group=comm.control.group)
    return every

"""Take a byte census: what a rank holds, counted from storages, by the categories of the paper's formula.

Nothing here is computed from Ψ and N. A census walks the tensors, asks each distinct storage how large it is,
and puts it under parameters, gradients or optimizer state. Padding (alignment, and the tail that makes shards
equal) and Adam's step counters are counted separately, so the rest can be compared with the formula, byte for
byte.
"""

from dataclasses import dataclass

import torch

from zerolab.storages import storage_bytes
from zerolab.unit import FlatUnit
from zerolab.unit.sharded import Sharded


@dataclass(frozen=True)
class MeasuredStates:
    """Bytes one rank holds, by the categories of `zerolab.memory.model_states`, the rest itemised.

    Attributes:
        params_bytes, grads_bytes, optimizer_bytes: without padding; these equal the formula.
        padding_bytes: alignment and tail, of which every rank has an even share.
        uneven_bytes: optimizer state beyond an even share, because it follows the real elements a rank owns
            and padding has none; over all ranks it adds up to zero.
        counters_bytes: scalars such as Adam's step, one for each parameter.
        peak_bytes: the most that was held at once since construction, buffers of messages in flight included.
        offloaded_bytes: masters and optimizer state outside the device, with the padding of the masters.
    """

    params_bytes: float
    grads_bytes: float
    optimizer_bytes: float
    padding_bytes: float
    uneven_bytes: float
    counters_bytes: int
    peak_bytes: int
    offloaded_bytes: int = 0

    @property
    def total_bytes(self) -> float:
        """Everything that is held now: the sum of all storages on the device."""
        states = self.params_bytes + self.grads_bytes + self.optimizer_bytes
        return states + self.padding_bytes + self.uneven_bytes + self.counters_bytes


def census(
    model: torch.nn.Module,
    units: list[FlatUnit],
    state: list[torch.Tensor],
    excess_bytes: float,
    peak_bytes: int,
    offloaded_bytes: int,
) -> MeasuredStates:
    """Count the bytes of parameters, gradients and optimizer state on this rank, now.

    The model's own tensors are walked beside the units' buffers, so a copy that somebody kept would be
    counted. ``excess_bytes``: how much of ``state``, the optimizer's tensors, is beyond an even share of it.
    """
    own_grads = [p.grad for p in model.parameters() if type(p.grad) is torch.Tensor]
    own_params = [p for p in model.parameters() if not isinstance(p, Sharded)]
    params = storage_bytes([*own_params, *(u.flat for u in units), *(u.shard for u in units)])
    masters = [(u, u.master) for u in units if u.has_own_master]
    own_grads += [waiting for unit in units for waiting in unit.grads.arrivals.tensors]
    grads = storage_bytes([*own_grads, *(u.grads.local for u in units), *(u.grads.reduced for u in units)])
    counters = storage_bytes(t for t in state if t.dim() == 0)
    optimizer = storage_bytes([*(t for t in state if t.dim() > 0), *(master for _, master in masters)])
    params_padding = sum(_padding_bytes(u, u.flat, u.shard) for u in units)
    masters_padding = sum(_padding_bytes(u, None, master) for u, master in masters)
    grads_padding = sum(_padding_bytes(u, u.grads.local, u.grads.reduced) for u in units)
    return MeasuredStates(
        params_bytes=params - params_padding,
        grads_bytes=grads - grads_padding,
        optimizer_bytes=optimizer - excess_bytes - masters_padding,
        padding_bytes=params_padding + grads_padding + masters_padding,
        uneven_bytes=excess_bytes,
        counters_bytes=counters,
        peak_bytes=peak_bytes,
        offloaded_bytes=offloaded_bytes,
    )


def _padding_bytes(unit: FlatUnit, whole: torch.Tensor | None, shard: torch.Tensor | None) -> float:
    """Return how many bytes hold no parameter in the storages of a whole buffer and of this rank's shard.

    Where shards are equal, of each the same share, as of the whole. A shard may lie inside the whole buffer.
    """
    padding = (unit.padded_numel - unit.numel) / max(1, unit.padded_numel)
    of_shard = (
        padding if unit.cuts is None else 1 - unit.owned_numel / max(1, unit.owned.stop - unit.owned.start)
    )
    in_whole = storage_bytes([whole])
    return in_whole * padding + (storage_bytes([whole, shard]) - in_whole) * of_shard

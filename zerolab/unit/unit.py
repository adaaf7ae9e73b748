"""FlatUnit: a group of parameters in one flat buffer that can be cut into shards.

Sharding by whole parameters leaves ranks unbalanced and remainders without an owner; a flat buffer can be cut
anywhere. Each parameter becomes a view into it, so the model does not notice, and a collective moves the
whole group in one message. The stages decide what is sharded and when. A unit only knows how to lay out,
free, refill and cut.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zerolab.precision import Precision
from zerolab.storages import MemoryMeter, checksum, copy_together
from zerolab.unit.aliases import Aliases
from zerolab.unit.gathering import Gathering
from zerolab.unit.grads import FlatGrads
from zerolab.unit.layout import Layout
from zerolab.unit.parameter_views import ParameterViews
from zerolab.unit.sharded import Sharded
from zerolab.unit.span import Span, describe
from zerolab.unit.states import ParamState, change
from zerolab.unit.writes import Writes

CONVERTED_TOGETHER = 2**20
"""How many elements are converted to another dtype at a time, if no parameter of the unit is larger."""

_WHOLE = ParamState.WHOLE  # Python 3.11 computes a member each time that it is looked up


class FlatUnit:
    """The flat buffers of one group of parameters, all trainable or all frozen, of one dtype.

    Args:
        shards: into how many shards the buffer can be cut.
        meter: counts the bytes of the buffers; one of its own by default.
        replicas: over how many ranks the gradients are averaged.
        owners: of each parameter, in ascending order, the shard that holds it whole. By default shards are
            equal, and cut anywhere.

    Attributes, with P = padded_numel and S = the numel of the owned range:
        flat: [P] the parameters, every one a view of it. Its storage may be freed: ``state`` tells.
        owned: the range of ``flat`` that this rank reduces to and updates; its stage chooses.
        shard: [S] the owned parameters: a view of ``flat[owned]``, or a tensor of its own at stage 3.
        master: [S] what the optimizer updates: the shard itself, or its fp32 original in mixed precision.
        grads: the gradients, a `FlatGrads`.
        shards: into how many shards the buffer can be cut.
        shard_numel: how many elements the largest of them has; all have as many without ``owners``.
        cuts: where each shard begins, and where the last one ends; None where they are equal.
        precision: the dtypes of all these.
        state: where the parameters are, a `ParamState`.
        gather: waits for the shards that other ranks have updated; None where none are expected.
        writes: what was written to the parameters from outside, a `Writes`.
        aliases: which tensors outside the engine have the parameters' memory, an `Aliases`.
        chunk_numel: how many elements are converted to another dtype at a time.
    """

    def __init__(
        self,
        name: str,
        index: int,
        named_parameters: list[tuple[str, nn.Parameter]],
        shards: int,
        precision: Precision,
        meter: MemoryMeter | None = None,
        replicas: int = 1,
        owners: Sequence[int] | None = None,
    ):
        parameters = [parameter for _, parameter in named_parameters]
        self.name, self.index, self.precision = name, index, precision
        self.meter = meter or MemoryMeter()
        self.trainable = parameters[0].requires_grad
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        self._lowered_dtype = precision.parameters if precision.lowers(self.dtype) else self.dtype
        self.layout = Layout.of(named_parameters, self._lowered_dtype, shards, owners)
        self.spans, self.cuts = self.layout.spans, self.layout.cuts
        self.shards, self.shard_numel = shards, self.layout.shard_numel
        self.numel, self.padded_numel = self.layout.numel, self.layout.padded_numel
        self.chunk_numel = max(CONVERTED_TOGETHER, *(span.numel for span in self.spans))
        self.owned = slice(0, self.padded_numel)
        self._views = ParameterViews(self.spans, self._lowered_dtype, self.device)
        self.gather: Callable[[], None] | None = None
        self._gather_lock = threading.RLock()
        self._descriptions: dict[tuple[int, int], tuple[str, ...]] = {}
        self.state = ParamState.WHOLE
        self.flat = self._copy_parameters()
        self.shard = self.flat
        self.master: torch.Tensor | Any = self.flat  # Any is for None, in a frozen unit of 16 bits
        self._master_is_behind = False
        grads_dtype = precision.gradients if precision.has_masters else self.dtype
        self.grads = FlatGrads(
            name, self.spans, self.padded_numel, grads_dtype, self.device, self.meter, replicas
        )
        self.writes = Writes(name, self.spans)
        self.aliases, self._may_be_read = Aliases(self.writes.data), False
        self.report()

    @torch.no_grad()
    def _copy_parameters(self) -> torch.Tensor:
        """Copy the parameters into a new flat buffer and make each a view of it. Padding is zero."""
        flat = torch.zeros(self.padded_numel, dtype=self.dtype, device=self.device)
        self._views.move_into(flat)
        return flat

    def own(self, owned: slice) -> None:
        """Choose the range this rank updates; until it is detached, ``shard`` is a view of ``flat``.

        In mixed precision the owned fp32 values are kept as the master, and the parameters are rounded.
        Raises: ValueError where parameters have owners, and this range has a part of one.
        """
        self.layout.refuse_parts(owned, self.name)
        self.owned = self.grads.owned = owned
        original = self.flat[owned]
        if self._lowered_dtype == self.dtype:
            self.shard = self.master = original
            return
        self.master = original.clone() if self.trainable else None
        self.dtype = self._lowered_dtype
        self.flat = self._copy_parameters()
        self.shard = self.flat[owned]
        self.report()

    @property
    def owned_numel(self) -> int:
        """How many elements of parameters this rank owns, without padding."""
        parts = (span.within(self.owned.start, self.owned.stop) for span in self.spans)
        return sum(part.stop - part.start for part in parts)

    @property
    def whole(self) -> bool:
        """Whether the parameters can be used now."""
        return self.state is _WHOLE

    @property
    def all_require_grad(self) -> bool:
        """Whether every parameter requires a gradient now, so that the last one tells that all are done."""
        return all([span.parameter.requires_grad for span in self.spans])  # faster than a generator

    def _become(self, state: ParamState) -> None:
        self.state = change(f"the parameters of unit {self.name}", self.state, state)

    def report(self) -> None:
        """Tell the meter which buffers there are now."""
        self.meter.report(self, self.flat, self.shard, self.master)

    # Stages 1 and 2: after an update the other ranks' shards come while this rank goes on.

    def expect(self, gather: Callable[[], None]) -> None:
        """The ranks have updated a shard each, and send it: the parameters are `Gathering` until it is there.

        Where something may read them without the engine's knowledge, this waits: see `mark_updated`.
        Args: gather: waits for the other ranks' shards. It is called where a parameter is needed next.
        """
        with self._gather_lock:
            self.gather = gather
            if self.shards == 1 or self._may_be_read:
                self.finish_gather()
                return
            self._views.replace(partial(Gathering.stand_in, self.finish_gather))
            self._become(ParamState.ARRIVING)

    def finish_gather(self) -> None:
        """Wait for the shards that are expected, if any are. A user's thread may call it too.

        Raises: what the gather raised, and again each time that the parameters are needed.
        """
        if self.gather is None:
            return
        with self._gather_lock:
            if self.gather is not None:
                self.gather()
                if not self.whole:
                    self.restore_parameters()
                self.gather = None  # last: a thread that reads before this waits for the lock

    # Stage 3: detach the shard once; then free, refill, gather, restore, and so on.

    def detach_shard(self) -> None:
        """Give the shard a storage of its own, so that the flat buffer can be freed around it."""
        shared = self.master is self.shard
        self.shard = self.flat[self.owned].clone()
        if shared:
            self.master = self.shard
        self.report()

    def free(self) -> None:
        """Free the flat storage and make the parameters `Sharded`.

        C++ code that goes around `Sharded` reads NaN. The version counters are increased, so that a backward
        pass that would read the freed storage, because nothing told the engine to refill it, ends in
        autograd's error and not in a crash. Memory: 4P bytes less in fp32.

        Raises: RuntimeError where a parameter was written to since it was restored, because that is lost, or
            where NumPy holds its memory.
        """
        self.writes.refuse(self.checksum)
        self._require_resizable()
        self.writes.spoil()
        self._views.replace(Sharded.take_places)
        self.grads.producers.hold(self.flat)  # the streams that gradients come on have used the parameters
        self.flat.untyped_storage().resize_(0)
        self._become(ParamState.SHARDED)
        self.report()

    def _require_resizable(self) -> None:
        if not self.flat.untyped_storage().resizable():
            raise RuntimeError(
                f"a parameter of unit {self.name} was given to NumPy, as parameter.numpy() does, and stage 3 "
                "cannot free memory that NumPy holds: give a copy, as in parameter.detach().clone().numpy()"
            )

    def refill(self) -> None:
        """Allocate the flat storage again and copy the own shard into it; an all-gather fills in the rest."""
        self.flat.untyped_storage().resize_(self.padded_numel * self.dtype.itemsize)
        self.flat[self.owned].copy_(self.shard)
        self._become(ParamState.GATHERING)
        self.report()

    def restore_parameters(self) -> None:
        """After the gather: make the parameters views of the flat buffer again, as autograd saved them."""
        self._views.restore()
        self._become(ParamState.WHOLE)
        self.writes.restore(self.checksum)

    @property
    def shard_is_detached(self) -> bool:
        """Whether the flat buffer is freed between uses, as at stage 3, with what was written to it."""
        return self.shard.untyped_storage()._cdata != self.flat.untyped_storage()._cdata

    def leave_storage(self) -> None:
        """Take a new flat storage, and leave the old one to those who hold views of it.

        A user may keep such views when full_params() ends, and the flat storage is freed then.
        """
        if self.whole and self.shard_is_detached:
            with torch.inference_mode(False):
                self.flat = torch.empty_like(self.flat)
                self._views.follow(self.flat)
            self.writes.data.forget()
            self.writes.note()
            self.report()

    def replaced(self) -> Span | None:
        """Return the first parameter that should be a view of the flat buffer and has other memory."""
        return self._views.moved_away() if self.whole else None

    # What users write to whole parameters.

    def was_written(self) -> bool:
        """Whether somebody wrote to whole parameters since `writes.note`."""
        return self.whole and self.writes.written() is not None

    def checksum(self) -> bytes:
        """Eight bytes that differ where the whole parameters do."""
        return checksum(self.flat)

    # Values: the parameters in their dtype, and the fp32 master where they have 16 bits.

    def write_back(self) -> None:
        """Copy what was written to the whole parameters into the shard; `values` will into the master."""
        if self.shard_is_detached:
            self.shard.copy_(self.flat[self.owned])
        self._master_is_behind = True
        self.writes.note()

    def sync_master_from_params(self) -> None:
        """Copy into the master what somebody wrote to the parameters, as load_state_dict does.

        The master keeps its own value wherever that rounds to the parameter's value.
        Memory: scratch of ``chunk_numel`` elements of 16 bits, and as many flags.
        """
        self._master_is_behind = False
        if not self.has_own_master:
            return
        masters, shards = self.master.split(self.chunk_numel), self.shard.split(self.chunk_numel)
        with torch.no_grad():
            for own, written in zip(masters, shards, strict=True):
                torch.where(own.to(self.dtype) == written, own, written, out=own)

    def values(self) -> torch.Tensor:
        """[S] the owned parameters in full precision: what is updated, and what is saved."""
        if self.whole or self._master_is_behind:
            self.sync_master_from_params()
        return self.updated

    @property
    def updated(self) -> torch.Tensor:
        """[S] the tensor that `values` returns, without what was written to the parameters since."""
        return self.shard if self.master is None else self.master

    @property
    def has_own_master(self) -> bool:
        """Whether the owned parameters have an fp32 original beside them."""
        return self.master is not None and self.master is not self.shard

    def mark_updated(self, updated: set[Span]) -> None:
        """Increase the version counters, so that backward through an older forward is an error.

        It also notes whether somebody may read the parameters before the engine gathers them: through an
        alias, or, where a parameter was not updated, in a backward pass through an older forward.
        """
        self.writes.advance(updated, self.whole)
        self._may_be_read = self.aliases.of_users(self.flat) or not updated.issuperset(self.spans)

    # Seen from outside.

    def describe(self, part: slice) -> tuple[str, ...]:
        """Return the parameter slices in ``flat[part]``, each counted in its parameter's own elements."""
        key = (part.start, part.stop)
        if key not in self._descriptions:
            self._descriptions[key] = describe(self.spans, part)
        return self._descriptions[key]

    def __repr__(self) -> str:
        kind = "trainable" if self.trainable else "frozen"
        padding_numel = self.padded_numel - self.numel
        return f"FlatUnit({self.name!r}, {kind}, {len(self.spans)} parameters, {self.numel}+{padding_numel})"


def publish(units: Iterable[FlatUnit]) -> None:
    """After the update: round the masters' new values into the shards, in mixed precision."""
    copy_together([(unit.shard, unit.master) for unit in units if unit.has_own_master])

"""FlatUnit: one group of parameters, laid end to end in one flat buffer, which can be cut into equal shards.

Sharding by whole parameters leaves ranks unbalanced and remainders unowned; a flat buffer can be cut
anywhere. Each parameter becomes a view into it, so the model never notices, and a collective moves the whole
group in one message. What is sharded, and when, is for the stages to say: a unit only knows how to lay out,
free, refill and cut.
"""

import math

import torch
from torch import nn

from zerolab.precision import Precision
from zerolab.unit.grads import FlatGrads
from zerolab.unit.sharded import Sharded
from zerolab.unit.span import Span

ALIGNMENT_BYTES = 64
"""Every parameter and every shard starts on such a boundary, as torch's own allocations do: with weights that
start elsewhere, small CPU matrix products take another kernel and the last bits differ from plain PyTorch's.
"""


class FlatUnit:
    """The flat buffers of one group of parameters, all trainable or all frozen, of one dtype.

    Attributes, with P = padded_numel and S = the numel of the owned range:
        flat: [P] the parameters, every one a view of it. Its storage may be away: ``whole`` tells.
        owned: the range of ``flat`` that this rank reduces to and updates; its stage chooses.
        shard: [S] the owned parameters: a view of ``flat[owned]``, or a tensor of its own at stage 3.
        master: [S] what the optimizer updates: the shard itself, or its fp32 original in mixed precision.
        grads: the gradients, a `FlatGrads`.
        precision: the dtypes of all these.
    """

    def __init__(
        self,
        name: str,
        index: int,
        named_parameters: list[tuple[str, nn.Parameter]],
        world_size: int,
        precision: Precision,
    ):
        parameters = [parameter for _, parameter in named_parameters]
        self.name, self.index, self.precision = name, index, precision
        self.trainable = parameters[0].requires_grad
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        self._lowered_dtype = precision.parameters if precision.lowers(self.dtype) else self.dtype
        align = ALIGNMENT_BYTES // self._lowered_dtype.itemsize
        self.spans: list[Span] = []
        stop = 0
        for parameter_name, parameter in named_parameters:
            self.spans.append(Span.of(parameter_name, parameter, stop))
            stop += _round_up(parameter.numel(), align)
        self.numel = sum(span.numel for span in self.spans)
        self.shard_numel = _round_up(math.ceil(stop / world_size), align)
        self.padded_numel = self.shard_numel * world_size
        self.world_size = world_size
        self.owned = slice(0, self.padded_numel)
        nothing = math.nan if self._lowered_dtype.is_floating_point else 0
        scalar = torch.full((), nothing, dtype=self._lowered_dtype, device=self.device)
        self._absent = [scalar.expand(span.shape) for span in self.spans]
        self._views: list[torch.Tensor] = []
        self._versions: tuple[int, ...] = ()
        self._classes: list[type[nn.Parameter]] = []
        self._described: dict[tuple[int, int], tuple[str, ...]] = {}
        self.whole = True
        self.flat = self._adopt()
        self.shard = self.master = self.flat
        grads_dtype = precision.gradients if precision.has_masters else self.dtype
        self.grads = FlatGrads(self.spans, self.padded_numel, grads_dtype, self.device, world_size)

    @torch.no_grad()
    def _adopt(self) -> torch.Tensor:
        """Copy the parameters into a new flat buffer and make each a view of it. Padding is zero."""
        flat = torch.zeros(self.padded_numel, dtype=self.dtype, device=self.device)
        self._views = [span.view(flat) for span in self.spans]
        for span, view in zip(self.spans, self._views, strict=True):
            view.copy_(span.parameter)
            span.parameter.data = view
        return flat

    def own(self, owned: slice) -> None:
        """Choose the range this rank updates; until it is detached, ``shard`` is a view of ``flat``.

        In mixed precision the owned fp32 values are kept as the master, and the parameters are rounded.
        """
        self.owned = self.grads.owned = owned
        original = self.flat[owned]
        if self._lowered_dtype == self.dtype:
            self.shard = self.master = original
            return
        self.master = original.clone() if self.trainable else None
        self.dtype = self._lowered_dtype
        self.flat = self._adopt()
        self.shard = self.flat[owned]

    @property
    def owes_all(self) -> bool:
        """Whether every parameter requires a gradient now, so that the last one tells that all are done."""
        return all(span.parameter.requires_grad for span in self.spans)

    # Parameters: whole, or away.

    def detach_shard(self) -> None:
        """Give the shard a storage of its own, so that the flat buffer can be freed around it."""
        shared = self.master is self.shard
        self.shard = self.flat[self.owned].clone()
        if shared:
            self.master = self.shard

    def free(self) -> None:
        """Let the flat storage go and put `Sharded` in the parameters' place.

        What goes around `Sharded`, in C++, reads NaN. The version counters move on, so that a backward pass
        that would read the freed storage, because nothing told the engine to refill it, ends in autograd's
        error and not in a crash. Memory: 4P bytes less in fp32.
        """
        parameters = [span.parameter for span in self.spans]
        self._versions = tuple(parameter._version for parameter in parameters)
        self._classes = [type(parameter) for parameter in parameters]
        torch.autograd.graph.increment_version(parameters)
        for span, absent in zip(self.spans, self._absent, strict=True):
            span.parameter.data = absent
            Sharded.take_place(span.parameter, span.layout)
        self.grads.producers.hold(self.flat)  # where gradients came, parameters were at work
        self.flat.untyped_storage().resize_(0)
        self.whole = False

    def refill(self) -> None:
        """Bring the flat storage back with the own shard in place; the rest is for an all-gather to fill."""
        self.flat.untyped_storage().resize_(self.padded_numel * self.dtype.itemsize)
        self.flat[self.owned].copy_(self.shard)

    def reveal(self) -> None:
        """After refill and gather: let the model, and what autograd saved, use the parameters again."""
        for span, own_class, view in zip(self.spans, self._classes, self._views, strict=True):
            Sharded.give_way(span.parameter, own_class)
            span.parameter.data = view
        parameters = tuple(span.parameter for span in self.spans)
        torch._C._autograd._unsafe_set_version_counter(parameters, self._versions)
        self.whole = True

    def leave_storage(self) -> None:
        """Before the flat storage is freed: leave it to whoever took views of it, and take a new one."""
        if self.whole and self.shard.untyped_storage()._cdata != self.flat.untyped_storage()._cdata:
            with torch.inference_mode(False):
                self.flat = torch.empty_like(self.flat)
                self._views = [span.view(self.flat) for span in self.spans]
                for span, view in zip(self.spans, self._views, strict=True):
                    span.parameter.data = view

    def lost(self, span: Span) -> bool:
        """Whether a parameter that should be a view of the flat buffer lies somewhere else."""
        if not self.whole:
            return False
        same_storage = span.parameter.untyped_storage()._cdata == self.flat.untyped_storage()._cdata
        return not same_storage or span.parameter.storage_offset() != span.offset

    def publish(self) -> None:
        """After the update: round the master's new values into the shard, where they are two."""
        if self.master is not None and self.master is not self.shard:
            self.shard.copy_(self.master)

    def write_back(self) -> None:
        """Keep what was written to the whole parameters, in the shard and in the master."""
        if self.shard.untyped_storage()._cdata != self.flat.untyped_storage()._cdata:
            self.shard.copy_(self.flat[self.owned])
        self.heed_writes()

    @torch.no_grad()
    def heed_writes(self) -> None:
        """Have the master follow what somebody wrote to the parameters, as load_state_dict does.

        It keeps its own digits wherever rounding them gives the parameter that is there.
        Memory: scratch of three times the largest slice.
        """
        if self.master is None or self.master is self.shard:
            return
        for span in self.spans:
            part = span.within(self.owned.start, self.owned.stop)
            own, there = self.master[part], self.shard[part]
            own.copy_(torch.where(own.to(self.dtype) == there, own, there.to(own.dtype)))

    def values(self) -> torch.Tensor:
        """[S] the owned parameters with all the digits there are: what is updated, and what is saved."""
        if self.whole:
            self.heed_writes()
        return self.shard if self.master is None else self.master

    def mark_updated(self) -> None:
        """Move the version counters on, so that backward through an older forward is an error."""
        if self.whole:
            torch.autograd.graph.increment_version([span.parameter for span in self.spans])
        else:
            self._versions = tuple(version + 1 for version in self._versions)

    # Seen from outside.

    def describe(self, piece: slice) -> tuple[str, ...]:
        """The parameter slices in ``flat[piece]``, each counted in its parameter's own elements."""
        key = (piece.start, piece.stop)
        if key not in self._described:
            parts = [(span, span.within(*key)) for span in self.spans]
            self._described[key] = tuple(
                f"{span.name}[{part.start + shift}:{part.stop + shift}]"
                for span, part in parts
                for shift in [piece.start - span.offset]
                if part.stop > part.start
            )
        return self._described[key]

    def __repr__(self) -> str:
        kind = "trainable" if self.trainable else "frozen"
        padding_numel = self.padded_numel - self.numel
        return f"FlatUnit({self.name!r}, {kind}, {len(self.spans)} parameters, {self.numel}+{padding_numel})"


def _round_up(numel: int, multiple: int) -> int:
    return math.ceil(numel / multiple) * multiple

"""FlatUnit: one group of parameters, laid end to end in one flat buffer, which can be cut into equal shards.

Sharding by whole parameters leaves ranks unbalanced and remainders unowned; a flat buffer can be cut
anywhere. Each parameter becomes a view into it, so the model never notices, and a collective moves the whole
group in one message. What is sharded, and when, is for the stages to say: a unit only knows how to lay out,
free, refill and cut.
"""

import math

import torch
from torch import nn

from zerolab.grads import FlatGrads
from zerolab.sharded import Sharded
from zerolab.span import Span

ALIGNMENT_BYTES = 64
"""Every parameter and every shard starts on such a boundary, as torch's own allocations do: with weights that
start elsewhere, small CPU matrix products take another kernel and the last bits differ from plain PyTorch's.
"""


class FlatUnit:
    """The flat buffers of one group of parameters, all trainable or all frozen, of one dtype.

    Attributes, with P = padded_numel and S = the numel of the owned range:
        flat: [P] the parameters, every one a view of it. Its storage may be away: ``whole`` tells.
        owned: the range of ``flat`` that this rank reduces to and updates; its stage chooses.
        shard: [S] what the optimizer updates: a view of ``flat[owned]``, or a tensor of its own at stage 3.
        grads: the gradients, a `FlatGrads`.
    """

    def __init__(
        self, name: str, index: int, named_parameters: list[tuple[str, nn.Parameter]], world_size: int
    ):
        parameters = [parameter for _, parameter in named_parameters]
        self.name, self.index = name, index
        self.trainable = parameters[0].requires_grad
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        align = ALIGNMENT_BYTES // self.dtype.itemsize
        self.spans: list[Span] = []
        stop = 0
        for parameter_name, parameter in named_parameters:
            self.spans.append(Span(parameter_name, parameter, stop))
            stop += _round_up(parameter.numel(), align)
        self.numel = sum(span.numel for span in self.spans)
        self.shard_numel = _round_up(math.ceil(stop / world_size), align)
        self.padded_numel = self.shard_numel * world_size
        self.world_size = world_size
        self.owned = slice(0, self.padded_numel)
        self._versions: tuple[int, ...] = ()
        self._described: dict[tuple[int, int], tuple[str, ...]] = {}
        self.whole = True
        self.flat = self._adopt()
        self.shard = self.flat
        self.grads = FlatGrads(self.spans, self.flat, world_size)

    def _adopt(self) -> torch.Tensor:
        """Copy the parameters into a new flat buffer and make each a view of it. Padding is zero."""
        flat = torch.zeros(self.padded_numel, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            for span in self.spans:
                view = flat[span.offset : span.stop].view(span.shape)
                view.copy_(span.parameter)
                span.parameter.data = view
        return flat

    def own(self, owned: slice) -> None:
        """Choose the range this rank updates; until it is detached, ``shard`` is a view of ``flat``."""
        self.owned = self.grads.owned = owned
        self.shard = self.flat[owned]

    # Parameters: whole, or away.

    def detach_shard(self) -> None:
        """Give the shard a storage of its own, so that the flat buffer can be freed around it."""
        self.shard = self.flat[self.owned].clone()

    def free(self) -> None:
        """Let the flat storage go and put `Sharded` in the parameters' place.

        The version counters move on, so that a backward pass that would read the freed storage, because
        nothing told the engine to refill it, ends in autograd's error and not in a crash. Memory: 4P bytes
        less in fp32.
        """
        parameters = [span.parameter for span in self.spans]
        self._versions = tuple(parameter._version for parameter in parameters)
        torch.autograd.graph.increment_version(parameters)
        for parameter in parameters:
            parameter.__class__ = Sharded
        self.flat.untyped_storage().resize_(0)
        self.whole = False

    def refill(self) -> None:
        """Bring the flat storage back with the own shard in place; the rest is for an all-gather to fill."""
        self.flat.untyped_storage().resize_(self.padded_numel * self.dtype.itemsize)
        self.flat[self.owned].copy_(self.shard)

    def reveal(self) -> None:
        """After refill and gather: let the model use its parameters again, saved activations' references
        included.
        """
        parameters = tuple(span.parameter for span in self.spans)
        for parameter in parameters:
            parameter.__class__ = nn.Parameter
        torch._C._autograd._unsafe_set_version_counter(parameters, self._versions)
        self.whole = True

    def write_back(self) -> None:
        """Keep in the shard what was written to the whole parameters while they were there."""
        if self.shard.untyped_storage()._cdata != self.flat.untyped_storage()._cdata:
            self.shard.copy_(self.flat[self.owned])

    def mark_updated(self) -> None:
        """Move the version counters on, so that backward through a forward from before the update is an
        error.
        """
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

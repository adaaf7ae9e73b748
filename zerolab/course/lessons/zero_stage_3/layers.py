"""Lesson 06's exercise: layers whose weights are freed, which watch how they are used."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from zerolab import ring
from zerolab.course.alive import Alive, first_name, kept_by
from zerolab.course.reading import rounded

WIDTH, DEPTH = 6, 4
NUMEL = WIDTH * WIDTH
_NO_GATHER = "unshard(layer) comes before layer.forward(x)"
_NO_REGATHER = "it was freed after forward, and backward needs it again, so gather it a second time"
_STALE_BYTE = 0x7E  # eight of them are 1.6e301, far from every weight
_FILL = "Put layer.shard into layer.flat[layer.owned], then all-gather layer.flat"


class Use(NamedTuple):
    """A layer computed: what it got and what it gave."""

    phase: str
    layer: int
    got: torch.Tensor
    gave: torch.Tensor


class Watch:
    """What the layers of one rank see: who computes in which order, and what is in memory meanwhile."""

    def __init__(self):
        self.layers: list[ShardedLayer] = []
        self.uses: list[Use] = []
        self.whole_at_once = 0  # the most layers that were whole while one computed
        self.copies = 0  # the most other tensors of a weight's size at that time
        self.copy_name: str | None = None
        self.gradients: list[StorageWeakRef] = []  # what every backward left in layer.grad
        self.kept_gradient = False  # one of them was in memory while another layer computed
        self.unreduced = 0  # the most layers that had a whole gradient in layer.grad at that time
        self.reshaped: int | None = None  # a layer whose flat had another length and still had its storage
        self.alive: Alive | None = None

    def look(self, **roots) -> None:
        """Note what is whole and what is copied now."""
        self.whole_at_once = max(self.whole_at_once, sum(layer.nbytes > 0 for layer in self.layers))
        reshaped = [layer.index for layer in self.layers if layer.flat.numel() != NUMEL and layer.holds_bytes]
        self.reshaped = next(iter(reshaped), None) if self.reshaped is None else self.reshaped
        own = [tensor for layer in self.layers for tensor in (layer.flat, layer.grad, layer.grad_shard)]
        found = self.alive.storages(own, at_least=8 * NUMEL) if self.alive else {}
        if found and not self.copy_name:
            roots = {**roots, "layers": self.layers}
            self.copy_name = first_name(kept_by(tensor, **roots) for tensor in found.values())
        self.copies = max(self.copies, len(found))
        self.unreduced = max(self.unreduced, sum(layer.grad is not None for layer in self.layers))
        self.kept_gradient |= any(each.cdata in found for each in self.gradients if not each.expired())


class ShardedLayer:
    """A linear layer of the exercise: ``y = x @ weight``, whose weight is freed at first.

    Attributes:
        flat: [P] the weight, 0 bytes at first.
        owned: this rank's range of it.
        shard: the values of that range.
        grad: [P] this rank's whole gradient, once backward ran.
        grad_shard: for you to set: the sum over the ranks of ``grad[owned]``.
    """

    grad: torch.Tensor | None = None  # of the class, so that ``del layer.grad`` leaves None
    grad_shard: torch.Tensor | None = None

    def __init__(self, index: int, watch: Watch):
        self.index, self.owned = index, owned_by(dist.get_rank(), dist.get_world_size())
        self.flat = weight_of(index)
        self.shard = self.flat[self.owned].clone()
        self._storage = self.flat.untyped_storage()
        self._storage.resize_(0)
        self._watch = watch
        watch.layers.append(self)

    @property
    def nbytes(self) -> int:
        """The bytes of the weight's storage now: 0 while it is freed."""
        return self.flat.untyped_storage().nbytes()

    @property
    def replaced(self) -> bool:
        """Whether flat has another storage than at first."""
        return self.flat.untyped_storage()._cdata != self._storage._cdata

    @property
    def holds_bytes(self) -> bool:
        """Whether the storage that flat had at first has bytes."""
        return self._storage.nbytes() > 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight, which must be whole."""
        self._input = x
        output = x @ self._weight("forward", _NO_GATHER)
        self._watch.uses.append(Use("forward", self.index, x.clone(), output.clone()))
        return output

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the input's gradient for the output's, and leave the weight's own in ``self.grad``."""
        weight = self._weight("backward", _NO_REGATHER)
        self.grad = (self._input.T @ grad).flatten()
        self._watch.gradients.append(StorageWeakRef(self.grad.untyped_storage()))
        passed_on = grad @ weight.T
        self._watch.uses.append(Use("backward", self.index, grad.clone(), passed_on.clone()))
        return passed_on

    def _weight(self, phase: str, advice: str) -> torch.Tensor:
        self._watch.look()
        if 0 < self.nbytes < 8 * NUMEL or self.flat.numel() < NUMEL:
            raise RuntimeError(
                f"layer {self.index}'s flat has {self.flat.numel()} elements in {self.nbytes} bytes in "
                f"{phase}, and the weight is {NUMEL} elements in {8 * NUMEL} bytes: only resize its storage, "
                "never replace flat"
            )
        if self.nbytes < self.flat.nbytes:
            raise RuntimeError(f"layer {self.index}'s weight is freed in {phase}: {advice}")
        if self.replaced:
            raise RuntimeError(
                f"layer {self.index}'s flat has another storage in {phase}: bring back its own, with "
                "layer.flat.untyped_storage().resize_(bytes), and put neither a tensor nor .data in its place"
            )
        if not torch.equal(self.flat, weight := weight_of(self.index)):
            raise RuntimeError(f"layer {self.index}'s storage is back in {phase}, {self._not_filled(weight)}")
        return self.flat.view(WIDTH, WIDTH)

    def _not_filled(self, weight: torch.Tensor) -> str:
        """How the values of flat differ from the weight."""
        if said := rounded(self.flat, weight):
            return f"and {said}"
        wrong = (self.flat != weight).nonzero().flatten().tolist()
        where = f": {len(wrong)} of {NUMEL} are wrong, the first at element {wrong[0]}"
        where *= len(wrong) < NUMEL
        uneven = NUMEL % dist.get_world_size()
        lengths = f". N does not divide {NUMEL}, so shards are not all P // N long" if uneven else ""
        return f"but not the values{where}. {_FILL}{lengths}"


@contextmanager
def resized_to_fit(layers: list[ShardedLayer]) -> Iterator[None]:
    """Raise an error where a weight's storage gets too few or too many bytes, before a write crashes.

    What comes back is filled: memory that was just freed may still hold the right values.
    """
    plain = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int):
        for layer in layers:
            if layer.flat.untyped_storage()._cdata == storage._cdata and size not in (0, 8 * NUMEL):
                raise RuntimeError(
                    f"layer {layer.index}'s storage is resized to {size} bytes, and its weight has {NUMEL} "
                    f"elements of 8 bytes: resize_ takes bytes, {8 * NUMEL} of them here"
                )
        grown = size > storage.nbytes() == 0
        plain(storage, size)
        if grown:
            storage.fill_(_STALE_BYTE)  # type: ignore[attr-defined]  # which torch's stubs leave out
        return storage

    with mock.patch.object(torch.UntypedStorage, "resize_", resize):
        yield


@contextmanager
def flat_as_it_was(layers: list[ShardedLayer], uses: list[Use]) -> Iterator[None]:
    """Explain an error by a layer that is still needed, and whose flat is no longer the tensor it was."""
    try:
        yield
    except Exception as error:
        done = {use.layer for use in uses if use.phase == "backward"}
        other = [each for each in layers if each.flat.numel() != NUMEL and each.index not in done]
        if not other:
            raise
        layer = other[-1]
        made = "another tensor was put in its place" if layer.replaced else "its shape was changed"
        after = "its forward" if any(use.layer == layer.index for use in uses) else "the start"
        text = (
            f"layer {layer.index}'s flat has {layer.flat.numel()} elements, and its weight has {NUMEL}: "
            f"since {after} {made}. Free the storage alone, with "
            "layer.flat.untyped_storage().resize_(0), so that flat keeps its length"
        )
        raise RuntimeError(text).with_traceback(error.__traceback__) from error


def owned_by(rank: int, world_size: int) -> slice:
    """Return the range of a weight that a rank owns."""
    return ring.chunks(NUMEL, world_size)[rank]


def weight_of(index: int) -> torch.Tensor:
    """Return the whole weight of a layer, small integers divided by 3, so that shorter types round it."""
    return torch.arange(NUMEL, dtype=torch.float64).mul(7 * index + 5).remainder(11).sub(5) / 3


def input_of(rank: int) -> torch.Tensor:
    """A rank's micro-batch, which goes into the first layer; its numbers follow no pattern over the ranks.

    They are thirds, so that float32 and 16 bits round the gradients.
    """
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-3, 4, (2, WIDTH), generator=generator, dtype=torch.float64) / 3


def true_gradients(rank: int) -> list[torch.Tensor]:
    """Return one rank's gradients of every layer, by autograd."""
    weights = [weight_of(index).view(WIDTH, WIDTH).requires_grad_() for index in range(DEPTH)]
    x = input_of(rank)
    for weight in weights:
        x = x @ weight
    return [gradient.flatten() for gradient in torch.autograd.grad(x.sum(), weights)]


def out_of_order(
    uses: list[Use], x: torch.Tensor, passes: Sequence[str] = ("forward", "backward")
) -> str | None:
    """Return the first use of a layer that differs from a forward pass and a backward pass after it."""
    forward = [use for use in uses if use.phase == "forward"]
    backward = [use for use in uses if use.phase == "backward"]
    for name, made, order in (
        ("forward", forward, list(range(DEPTH))),
        ("backward", backward, list(reversed(range(DEPTH)))),
    ):
        if name not in passes:
            continue
        if (indices := [use.layer for use in made]) != order:
            return (
                f"{name} ran the layers {indices}: it goes through {order}, from the {_ends(name)}, each once"
            )
        handed = x if name == "forward" else torch.ones_like(forward[-1].gave)
        for use in made:
            if use.got.shape != handed.shape or not torch.equal(use.got, handed):
                return f"layer {use.layer}'s {name} got something other than {_handed(name, use.layer)}"
            handed = use.gave
    return None


def _ends(name: str) -> str:
    return "first layer to the last" if name == "forward" else "last layer to the first"


def _handed(name: str, index: int) -> str:
    if name == "forward":
        return f"what layer {index - 1}'s forward returned" if index else "x"
    return f"what layer {index + 1}'s backward returned" if index < DEPTH - 1 else "torch.ones_like(output)"

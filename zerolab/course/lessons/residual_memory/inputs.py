"""Lesson 07's exercise on partitioned inputs: what is packed, and what common mistakes make of it."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerolab import ring


class Case(NamedTuple):
    """The shapes of the blocks' inputs. All ranks have the same ones, as in tensor parallelism.

    The first shape has a number of elements that `world_size` divides. `turned`: the inputs are transposed.
    """

    world_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    turned: bool = False

    def leaves(self) -> list[Tensor]:
        """Return the tensors that the inputs are made of, which get gradients."""
        generator = torch.Generator().manual_seed(self.world_size)
        shapes = [shape[::-1] if self.turned else shape for shape in self.shapes]
        drawn = (torch.randn(shape, generator=generator) for shape in shapes)
        return [tensor.to(self.dtype).requires_grad_() for tensor in drawn]

    def made_of(self, leaf: Tensor) -> Tensor:
        """Return a block's input. It has a graph behind it, and that graph keeps it in memory."""
        made = leaf.tanh()
        return made.permute(*reversed(range(made.dim()))) if self.turned else made

    def whole(self) -> list[Tensor]:
        """Return the values of all inputs."""
        return [self.made_of(leaf).detach() for leaf in self.leaves()]

    @property
    def numels(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @property
    def item(self) -> int:
        return self.dtype.itemsize

    @property
    def share(self) -> int:
        """Return the bytes of a rank's parts of all inputs, each rounded up to a whole element."""
        return sum(-(-numel // self.world_size) for numel in self.numels) * self.item

    @property
    def least(self) -> int:
        """Return the bytes of a rank's parts of all inputs, each rounded down."""
        return sum(numel // self.world_size for numel in self.numels) * self.item

    def __str__(self) -> str:
        turned = ", transposed" if self.turned else ""
        shapes = " and ".join(str(list(shape)) for shape in self.shapes)
        return f"{self.world_size} ranks, inputs of shape {shapes}{turned}"


CASES = (
    Case(3, ((6, 4), (11,), (5, 40, 7)), torch.float32),
    Case(2, ((4, 10, 6), (3, 3), (4, 10, 6)), torch.float64, turned=True),  # blocks have equal inputs
    Case(4, ((4, 8), (9,), (2, 5), (7, 11, 13)), torch.float64),
    Case(3, ((300,), (2, 301)), torch.bfloat16),
)
PLACES = ("first", "second", "third", "fourth")
Predicted = Callable[[Case, Sequence[Tensor], int], Tensor]


def parts(whole: Tensor, size: int) -> list[Tensor]:
    """Return the ranks' parts of a tensor, as ring.all_gather has them."""
    flat = whole.flatten()
    return [flat[piece] for piece in ring.chunks(flat.numel(), size)]


def joined(case: Case, whole: Sequence[Tensor], order: Callable[[int], int]) -> Tensor:
    """Return the first input, if place p gets the part number order(p)."""
    cut = parts(whole[0], case.world_size)
    ranks = range(case.world_size)
    return torch.cat([cut[order(place) % case.world_size] for place in ranks]).view(whole[0].shape)


def alone(case: Case, whole: Sequence[Tensor], rank: int) -> Tensor:
    """Return the first input with zeros where other ranks' parts belong."""
    cut = parts(whole[0], case.world_size)
    kept = [part if place == rank else torch.zeros_like(part) for place, part in enumerate(cut)]
    return torch.cat(kept).view(whole[0].shape)


IN_ITS_CHUNK = (
    "ring.all_gather(flat) sends chunk number rank of flat: put the part there first, to "
    "flat[ring.chunks(numel, N)[rank]]"
)

ALL_LAST = (
    "every unpack returns the input that was packed last: keep what belongs to one input in self, and not in "
    "the class or in a global variable"
)
# A sentence, and what unpack of the first input returns on rank r: `w` are all inputs.
# fmt: off
MISTAKES: dict[str, Predicted] = {
    "unpack returns this rank's part alone: gather the parts of all ranks":
        lambda c, w, r: parts(w[0], c.world_size)[r],
    "only this rank's part is there, and zeros for the others': gather them":
        lambda c, w, r: alone(c, w, r),
    "this rank's part stands at all places: put there what the other ranks sent":
        lambda c, w, r: joined(c, w, lambda place: r),
    "every rank keeps rank 0's part: keep part number dist.get_rank()":
        lambda c, w, r: joined(c, w, lambda place: 0),
    "the parts are joined in reverse order: rank 0's comes first":
        lambda c, w, r: joined(c, w, lambda place: -place - 1),
    "the parts are joined from this rank's on: rank 0's comes first on every rank":
        lambda c, w, r: joined(c, w, lambda place: r + place),
    "each part stands one place too early: each rank keeps or places the next rank's part as its own":
        lambda c, w, r: joined(c, w, lambda place: place + 1),
    "each part stands one place too late: each rank keeps or places the previous rank's part as its own":
        lambda c, w, r: joined(c, w, lambda place: place - 1),
    "that is N times the input: whole copies of it were added up":
        lambda c, w, r: c.world_size * w[0],
    "that is 1/N of the input. Each element is one rank's, so there is nothing to divide":
        lambda c, w, r: (w[0] / c.world_size).to(c.dtype),
    f"only rank 0's part is there, and zeros for the others'. {IN_ITS_CHUNK}":
        lambda c, w, r: alone(c, w, 0),
    "the input's shape is lost: keep tensor.shape, and give it back with .view(self.shape)":
        lambda c, w, r: w[0].flatten(),
    "the input comes back in float32: keep its own dtype":
        lambda c, w, r: w[0].float() if c.dtype != torch.float32 else w[0],
    "the input comes back in float64: keep its own dtype":
        lambda c, w, r: w[0].double(),
    "the elements of a transposed input come back in the order of its memory: take tensor.flatten()":
        lambda c, w, r: w[0].permute(*reversed(range(w[0].dim()))).flatten().view(w[0].shape) if c.turned
        else w[0],
}
# fmt: on


def as_another(whole: Sequence[Tensor], number: int) -> dict[str, Tensor]:
    """Return what unpack of an input returns, if it is another input; by sentence."""
    keep = (
        "keep what belongs to one input in self, and not in the class, in a global variable or by its shape"
    )
    others = (other for other in range(len(whole)) if other != number)
    return {f"it comes back as the {PLACES[other]} input: {keep}": whole[other] for other in others}


def without_the_rest(whole: Tensor, size: int) -> Tensor:
    """Return the elements of a tensor up to the last multiple of the number of ranks."""
    return whole.flatten()[: whole.numel() // size * size]


def zeros_in_the_rest(whole: Tensor, size: int) -> Tensor:
    kept = without_the_rest(whole, size)
    return torch.cat([kept, kept.new_zeros(whole.numel() - kept.numel())]).view(whole.shape)


# The same for an input whose number of elements N does not divide, where the first input is right.
CUT = "Cut with ring.chunks, whose parts differ by one, or pad all parts to one length"
LOST_REST = (
    f"where N does not divide the number of elements, parts of numel // N leave out the last ones. {CUT}"
)
UNEVEN: dict[str, Callable[[Tensor, int], Tensor]] = {
    f"zeros are left at the end: {LOST_REST}": zeros_in_the_rest,
    f"the end is missing: {LOST_REST}": without_the_rest,
}


def arrived(case: Case, seen: Sequence[Tensor], whole: Tensor) -> list[list[int]] | None:
    """Return whose parts are at their places in an input, on each rank; None for another shape."""
    if any(each.shape != whole.shape or each.dtype != whole.dtype for each in seen):
        return None
    wanted = parts(whole, case.world_size)
    cut = [parts(each, case.world_size) for each in seen]
    return [[peer for peer, part in enumerate(wanted) if part.equal(own[peer])] for own in cut]

"""Lesson 07's exercise on P_a: any right style passes, its target is named, and each mistake is named."""

from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from support.answers import alone, together
from support.lessons import solutions_travel_by_value

import zerolab
from zerolab import ring
from zerolab.course.lessons.residual_memory import check_packing
from zerolab.course.lessons.residual_memory.inputs import CASES
from zerolab.course.lessons.residual_memory.solution import Packed

solutions_travel_by_value(__name__)


def place():
    return dist.get_rank(), dist.get_world_size()


def padded(flat, size):
    length = -(-flat.numel() // size)
    return torch.cat([flat, flat.new_zeros(size * length - flat.numel())]).chunk(size)


class Ring:
    """Right, with one method for each part of it, which the wrong ones below override."""

    def __init__(self, tensor):
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.mine = self.cut(tensor.numel())[dist.get_rank()]
        self.part = self.keep(tensor)

    def cut(self, numel):
        return ring.chunks(numel, dist.get_world_size())

    def keep(self, tensor):
        return tensor.detach().flatten()[self.mine].clone()

    def gather(self):
        flat = torch.zeros(self.shape.numel(), dtype=self.dtype)
        flat[self.mine] = self.part
        ring.all_gather(flat)
        return flat

    def unpack(self):
        return self.gather().view(self.shape)


class PaddedParts(Ring):
    """Right: parts of one size, and torch's own all-gather."""

    def keep(self, tensor):
        rank, size = place()
        return padded(tensor.detach().reshape(-1), size)[rank].clone()

    def order(self, parts):
        return parts

    def gather(self):
        parts = [torch.empty_like(self.part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, self.part)
        return torch.cat(self.order(parts))[: self.shape.numel()]


class ByMessages(Ring):
    """Right: each rank sends its part to all others."""

    def gather(self):
        rank, size = place()
        flat = torch.empty(self.shape.numel(), dtype=self.dtype)
        flat[self.mine] = self.part
        pieces = ring.chunks(flat.numel(), size)
        peers = [peer for peer in range(size) if peer != rank]
        pairs = [dist.P2POp(dist.isend, self.part, peer) for peer in peers]
        pairs += [dist.P2POp(dist.irecv, flat[pieces[peer]], peer) for peer in peers]
        for work in dist.batch_isend_irecv(pairs):
            work.wait()
        return flat


class ByBroadcasts(Ring):
    """Right: each rank in turn broadcasts its part, and the part is dropped once it is used."""

    def gather(self):
        flat = torch.empty(self.shape.numel(), dtype=self.dtype)
        for peer, piece in enumerate(ring.chunks(flat.numel(), dist.get_world_size())):
            if peer == dist.get_rank():
                flat[piece] = self.part
            dist.broadcast(flat[piece], peer)
        del self.part
        return flat


class PartInAnArray(Ring):
    """Right: the part is no tensor, and takes as many bytes."""

    def keep(self, tensor):
        return super().keep(tensor).view(torch.uint8).numpy().copy()

    def gather(self):
        self.part, array = torch.from_numpy(self.part).view(self.dtype), self.part
        flat = super().gather()
        self.part = array
        return flat


# ---- right values at a cost


class AllReduced(Ring):
    def gather(self):
        flat = torch.zeros(self.shape.numel(), dtype=self.dtype)
        flat[self.mine] = self.part
        dist.all_reduce(flat)
        return flat


class GathersWholes(Ring):
    """Every rank puts its part into zeros as long as the input, and sends all of that."""

    def gather(self):
        flat = torch.zeros(self.shape.numel(), dtype=self.dtype)
        flat[self.mine] = self.part
        wholes = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(wholes, flat)
        return sum(wholes)


class GathersEarly(Ring):
    def __init__(self, tensor):
        super().__init__(tensor)
        self.whole = self.gather()

    def unpack(self):
        return self.whole.view(self.shape)


class Objects(Ring):
    def gather(self):
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self.part)
        return torch.cat(parts)


class InFloat64(Ring):
    def keep(self, tensor):
        return super().keep(tensor).double()

    def gather(self):
        self.dtype, own = torch.float64, self.dtype
        flat = super().gather().to(own)
        self.dtype = own
        return flat


class GathersTwice(Ring):
    def gather(self):
        super().gather()
        return super().gather()


class View(Ring):
    def keep(self, tensor):
        return tensor.detach().flatten()[self.mine]


class WithGraph(Ring):
    def keep(self, tensor):
        return tensor.flatten()[self.mine].clone()

    def gather(self):
        return super().gather().detach()


class WithGraphOfAProduct(WithGraph):
    """No variable names what this graph keeps."""

    def keep(self, tensor):
        return super().keep(1 * tensor)


class KeepsTheInput(Ring):
    def __init__(self, tensor):
        super().__init__(tensor)
        self.like = tensor.detach()


class KeepsAList(Ring):
    def __init__(self, tensor):
        super().__init__(tensor)
        self.numbers = tensor.tolist()


class KeepsAnArray(Ring):
    def __init__(self, tensor):
        super().__init__(tensor)
        self.array = tensor.detach().float().numpy().copy()


class KeepsBytes(Ring):
    def __init__(self, tensor):
        super().__init__(tensor)
        self.bytes = tensor.detach().float().numpy().tobytes()


class KeepsACopy(Ring):
    def __init__(self, tensor):
        super().__init__(tensor)
        self.copy = tensor.detach().clone()


class InAClosure(Ring):
    def __init__(self, tensor):
        super().__init__(tensor)
        self.restore = lambda: self.gather().view(tensor.shape)

    def unpack(self):
        return self.restore()


class KeepsWhatItGathered(Ring):
    def unpack(self):
        self.whole = self.gather()
        return self.whole.view(self.shape)


SHELF = []


class OnAShelf(Ring):
    def unpack(self):
        SHELF.append(self.gather())
        return SHELF[-1].view(self.shape).clone()


class AllOnRank0(Ring):
    def keep(self, tensor):
        return tensor.detach().flatten().clone() if dist.get_rank() == 0 else None

    def gather(self):
        flat = torch.empty(self.shape.numel(), dtype=self.dtype) if self.part is None else self.part
        dist.broadcast(flat, 0)
        return flat


# ---- wrong


class Empty:
    def __init__(self, tensor):
        pass

    def unpack(self):
        pass


class KeepsAll(Ring):
    def keep(self, tensor):
        return tensor.detach()

    def gather(self):
        return self.part


class Shared(Ring):
    """What belongs to an input is kept in the class."""

    def __init__(self, tensor):
        super().__init__(tensor)
        for name, value in vars(self).items():
            setattr(Shared, name, value)
        vars(self).clear()


class PartAlone(Ring):
    def unpack(self):
        return self.part


class NotGathered(Ring):
    def gather(self):
        flat = torch.zeros(self.shape.numel(), dtype=self.dtype)
        flat[self.mine] = self.part
        return flat


class OwnEverywhere(PaddedParts):
    def order(self, parts):
        return [self.part] * len(parts)


class OfRank0(PaddedParts):
    def keep(self, tensor):
        return padded(tensor.detach().reshape(-1), dist.get_world_size())[0].clone()


class Reversed(PaddedParts):
    def order(self, parts):
        return parts[::-1]


class OwnFirst(PaddedParts):
    def order(self, parts):
        return parts[dist.get_rank() :] + parts[: dist.get_rank()]


class NextRanks(PaddedParts):
    def keep(self, tensor):
        rank, size = place()
        return padded(tensor.detach().reshape(-1), size)[(rank + 1) % size].clone()


class AddsWholes(Ring):
    def keep(self, tensor):
        return tensor.detach().flatten().clone()

    def gather(self):
        dist.all_reduce(self.part)
        return self.part


class Flat(Ring):
    def unpack(self):
        return self.gather()


class AlwaysFloat32(Ring):
    def unpack(self):
        return super().unpack().float()


class InMemoryOrder(Ring):
    """Right for a contiguous tensor alone."""

    def keep(self, tensor):
        in_order = torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().untyped_storage())
        return in_order[self.mine].clone()


class ShortParts(Ring):
    def cut(self, numel):
        size = dist.get_world_size()
        return [slice(each * (numel // size), (each + 1) * (numel // size)) for each in range(size)]

    def gather(self):
        parts = [torch.empty_like(self.part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, self.part)
        return torch.cat(parts)


class ShortPartsInZeros(ShortParts):
    def gather(self):
        short = super().gather()
        return torch.cat([short, short.new_zeros(self.shape.numel() - short.numel())])


class ShortPartsFlat(ShortParts):
    def unpack(self):
        flat = self.gather()
        return flat.view(self.shape) if flat.numel() == self.shape.numel() else flat


class UnevenInTorch(Ring):
    def gather(self):
        parts = [torch.empty_like(self.part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, self.part)
        return torch.cat(parts)


class PartsOfTheirSizes(Ring):
    """Gathers parts of the sizes that they have. Over gloo a rank then loses its connection."""

    def gather(self):
        sizes = [len(part) for part in torch.empty(self.shape).flatten().tensor_split(dist.get_world_size())]
        parts = [torch.empty(size, dtype=self.dtype) for size in sizes]
        dist.all_gather(parts, self.part)
        return torch.cat(parts)


class AtTheStart(Ring):
    """Puts its part to the start of zeros, and not to its chunk."""

    def gather(self):
        flat = torch.zeros(self.shape.numel(), dtype=self.dtype)
        flat[: len(self.part)] = self.part
        ring.all_gather(flat)
        return flat


class OfTwoRanks(Ring):
    """Chunks for two ranks, whatever their number is; what was never written is -1."""

    def cut(self, numel):
        return ring.chunks(numel, 2) * 2

    def gather(self):
        flat = torch.full((self.shape.numel(),), -1, dtype=self.dtype)
        flat[self.mine] = self.part
        ring.all_gather(flat)
        return flat


class OthersNeverArrive(Ring):
    def gather(self):
        flat = torch.full((self.shape.numel(),), -1, dtype=self.dtype)
        flat[self.mine] = self.part
        return flat


class FromOneNeighbour(PaddedParts):
    def order(self, parts):
        rank, size = place()
        return [part if peer in (rank, (rank - 1) % size) else 0 * part for peer, part in enumerate(parts)]


class AddsToOnes(Ring):
    def gather(self):
        flat = torch.ones(self.shape.numel(), dtype=self.dtype)
        flat[self.mine] = self.part
        dist.all_reduce(flat)
        return flat


class Mean(AllReduced):
    def gather(self):
        return super().gather() / dist.get_world_size()


class CutByColumns(Ring):
    def keep(self, tensor):
        rank, size = place()
        return tensor.detach().chunk(size, -1)[rank].flatten()


class WritesToTheInput(Ring):
    def keep(self, tensor):
        part = super().keep(tensor)
        tensor.data.zero_()
        return part


class Forgotten:
    def __init__(self, tensor):
        self.shape = tensor.shape

    def unpack(self):
        pass


class In8Bits(Ring):
    def keep(self, tensor):
        part = super().keep(tensor)
        step = part.abs().max() / 127
        return (part / step).round().to(torch.int8).to(tensor.dtype) * step


class In16Bits(Ring):
    def keep(self, tensor):
        return super().keep(tensor).bfloat16().to(tensor.dtype)


class Zerolabs:
    def __init__(self, tensor):
        self.parallel, self.shape = zerolab.TensorParallel(dist.group.WORLD), tensor.shape
        self.part = self.parallel.part(tensor.detach().flatten()).clone()

    def unpack(self):
        flat = self.parallel.gather(self.part, "an input", "backward")
        return flat[: self.shape.numel()].view(self.shape)


class Nothing(Ring):
    def unpack(self):
        self.gather()


class Text(Ring):
    def unpack(self):
        return "17"


class OfRank0InItsOwnPlace(Ring):
    """The parts of the last inputs have other lengths on rank 0 than on the last rank."""

    def keep(self, tensor):
        return tensor.detach().flatten()[self.cut(tensor.numel())[0]].clone()


class RoundedDown(Ring):
    """The part has numel // N elements, and ring.all_gather sends another range."""

    def cut(self, numel):
        length = numel // dist.get_world_size()
        return [slice(length * rank, length * (rank + 1)) for rank in range(dist.get_world_size())]


class Positive(Ring):
    def keep(self, tensor):
        return super().keep(tensor).relu()


class Turned(Ring):
    def unpack(self):
        last_first = tuple(reversed(range(len(self.shape))))
        return self.gather().view(self.shape).permute(last_first).reshape(self.shape)


class KeepsThePadding(Ring):
    """All parts are padded to one length, and `unpack` leaves the padding where it is."""

    def keep(self, tensor):
        n = dist.get_world_size()
        self.length = -(-tensor.numel() // n)
        padded = torch.cat([tensor.detach().flatten(), tensor.new_zeros(n * self.length - tensor.numel())])
        return padded[dist.get_rank() * self.length :][: self.length].clone()

    def gather(self):
        flat = torch.zeros(dist.get_world_size() * self.length, dtype=self.dtype)
        flat[dist.get_rank() * self.length :][: self.length] = self.part
        ring.all_gather(flat)
        return flat


class ByShape(Ring):
    """Parts are kept in one dictionary, by the input's shape."""

    shelf: ClassVar[dict] = {}

    def keep(self, tensor):
        self.shelf[tensor.shape] = super().keep(tensor)

    def gather(self):
        flat = torch.zeros(self.shape.numel(), dtype=self.dtype)
        flat[self.mine] = self.shelf[self.shape]
        ring.all_gather(flat)
        return flat


class ThreeAtMost(Ring):
    """The class counts its objects, and the fourth one has no part."""

    count: ClassVar[list] = []

    def keep(self, tensor):
        self.count.append(0)
        return super().keep(tensor) * (len(self.count) <= 3)


class FirstInFirstOut(Ring):
    """The parts stand in a list of the class, and the first of them is taken out."""

    parts: ClassVar[list] = []

    def __init__(self, tensor):
        super().__init__(tensor)
        self.parts.append(self.part)

    def gather(self):
        flat = torch.zeros(self.shape.numel(), dtype=self.dtype)
        flat[self.mine] = self.parts.pop(0)
        ring.all_gather(flat)
        return flat


class Rows(Ring):
    """Cuts the rows with ring.chunks, which are not the ring's chunks of the flat tensor."""

    def keep(self, tensor):
        self.rows = ring.chunks(tensor.shape[0], dist.get_world_size())[dist.get_rank()]
        return tensor.detach()[self.rows].clone()

    def gather(self):
        whole = torch.zeros(self.shape, dtype=self.dtype)
        whole[self.rows] = self.part
        flat = whole.view(-1)
        ring.all_gather(flat)
        return flat


class KeepsANode(Ring):
    def __init__(self, tensor):
        super().__init__(tensor)
        self.node = tensor.grad_fn


class KeepsAGenerator(Ring):
    def __init__(self, tensor):
        super().__init__(tensor)
        self.later = (each for each in [tensor.detach()])


class AddedOnTheRing(Ring):
    def gather(self):
        flat = torch.zeros(self.shape.numel(), dtype=self.dtype)
        flat[self.mine] = self.part
        ring.all_reduce(flat)
        return flat


RIGHT = [Packed, Ring, PaddedParts, ByMessages, ByBroadcasts, PartInAnArray]
BRONZE = [
    (AllReduced, "dist.all_reduce adds up zeros where nothing has to be added, with twice the bytes"),
    (AddedOnTheRing, "ring.all_reduce adds up zeros where nothing has to be added, with twice the bytes"),
    (GathersWholes, "it sends whole inputs"),
    (GathersEarly, "bytes in Packed(tensor), which runs in the forward pass"),
    (Objects, "dist.all_gather_object pickles Python objects"),
    (InFloat64, "It sends parts of another dtype: float64, and the inputs are float32"),
    (GathersTwice, "It gathers 2 times in an unpack: once is enough"),
]
SILVER = [
    (View, "`self.part`, which is a view of it, keeps the whole: .clone() it"),
    (WithGraph, "The part has a graph, which keeps the whole input: tensor.detach()"),
    (WithGraphOfAProduct, "The part has a graph, which keeps the whole input: tensor.detach()"),
    (KeepsTheInput, "Look at `self.like`"),
    (KeepsACopy, "Look at `self.copy`"),
    (KeepsAList, "Look at `self.numbers`"),
    (KeepsAnArray, "Look at `self.array`"),
    (KeepsBytes, "Look at `self.bytes`"),
    (InAClosure, "Look at `tensor`"),
    (KeepsANode, "Look at `self.node`, of type TanhBackward0, which keeps a whole input"),
    (KeepsAGenerator, "Look at `self.later`, of type generator, which keeps a whole input"),
    (AllOnRank0, "rank 0 keeps 5,740 bytes of inputs of 5,740, and 1/N are 1,916"),
    (KeepsWhatItGathered, "bytes, in `self.whole`, and its parts are"),
    (OnAShelf, "after an unpack rank 0 keeps"),
]
WRONG = [
    (alone(KeepsThePadding), "1401 elements are the input's 1400 and padding: take flat[:1400] before you"),
    (
        alone(FirstInFirstOut),
        "8 elements are a part of the first input, and the third one is unpacked here: keep the part in",
    ),
    (ByShape, "it comes back as the third input: keep what belongs to one input in self"),
    (alone(ThreeAtMost), "and the first one does not when it is packed once more after them"),
    (
        Rows,
        "rank 0 keeps a part of shape [2, 40, 7], 560 of 1400 elements. Its chunk has 467. This is a cut "
        "along dimension 0. The ring's chunks are those of the flat tensor",
    ),
    (
        RoundedDown,
        "keeps a part of shape [3], 3 of 11 elements, and parts of numel // N leave out the last ones",
    ),
    (RoundedDown, "the input whose number of elements N divides is right, and this one is not"),
    (alone(OfRank0InItsOwnPlace), "Each rank keeps part number dist.get_rank()"),
    (Positive, "the right one with zeros for what is negative"),
    (Turned, "the right numbers in the order of the transposed tensor"),
    (Empty, "not written yet"),
    (lambda tensor: None, "not written yet"),
    (lambda tensor: tensor, "Packed(tensor) returned Tensor"),
    (lambda tensor: 17, "Packed(tensor) returned int, 17, which has no method unpack"),
    (KeepsAll, "that is checkpointing without P_a"),
    (Shared, "every unpack returns the input that was packed last"),
    (PartAlone, "unpack returns this rank's part alone"),
    (NotGathered, "only this rank's part is there, and zeros for the others'"),
    (OwnEverywhere, "this rank's part stands at all places"),
    (OfRank0, "every rank keeps rank 0's part"),
    (Reversed, "the parts are joined in reverse order"),
    (OwnFirst, "the parts are joined from this rank's on"),
    (NextRanks, "each part stands one place too early"),
    (AddsWholes, "that is N times the input"),
    (AtTheStart, "only rank 0's part is there, and zeros for the others'. ring.all_gather(flat) sends chunk"),
    (
        OfTwoRanks,
        "on every rank rank 0's part is right, and the parts of ranks 1 and 2 are not: what is sent",
    ),
    (OthersNeverArrive, "each rank's own part is at its place, and none of the others' is"),
    (FromOneNeighbour, "on rank 0 rank 1's part is not there: every rank needs those of all ranks"),
    (AddsToOnes, "there have to be zeros outside a rank's own part"),
    (Mean, "that is 1/N of the input"),
    (WritesToTheInput, "Packed(tensor) writes to the tensor that it is given"),
    (Forgotten, "unpack sends nothing and returns None: gather the parts"),
    (Flat, "the input's shape is lost"),
    (AlwaysFloat32, "the input comes back in float32: keep its own dtype"),
    (InMemoryOrder, "in the order of its memory: take tensor.flatten()"),
    (ShortParts, "ring.chunks cuts parts that differ by one"),
    (ShortPartsInZeros, "zeros are left at the end: where N does not divide"),
    (ShortPartsFlat, "the end is missing: where N does not divide"),
    (alone(UnevenInTorch), "torch's all_gather needs parts of one size, so pad the last one"),
    (alone(PartsOfTheirSizes), "torch's all_gather needs parts of one size, so pad the last one"),
    (In8Bits, "rounded to whole multiples of 1/127 of their largest element, as int8 does it"),
    (In16Bits, "somewhere it went through bfloat16"),
    (Zerolabs, "zerolab.TensorParallel does what you write here: use ring.all_gather"),
    (Nothing, "it returned None"),
    (Text, "it returned str, '17'"),
]
diagnose = together(check_packing, [*RIGHT, *(answer for answer, _ in BRONZE + SILVER + WRONG)])


@pytest.mark.parametrize("right", RIGHT)
def test_every_right_way_reaches_gold(right):
    assert diagnose(right) is None


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_the_check_names_the_mistake(wrong, words):
    assert words in diagnose(wrong)


def test_a_cut_by_columns_is_named_by_either_of_the_ranks_that_it_stops():
    """Of an input without columns one rank has no part; of another its part is shorter. One stops first."""
    said = diagnose(CutByColumns)
    assert "tuple index out of range" in said or "must match the existing size" in said


@pytest.mark.parametrize(("answer", "words"), BRONZE)
def test_right_values_that_send_too_much_reach_bronze(answer, words):
    said = diagnose(answer)
    assert said.startswith("bronze, because the values are right. For silver: ") and words in said


@pytest.mark.parametrize(("answer", "words"), SILVER)
def test_right_bytes_that_keep_too_much_in_memory_reach_silver(answer, words):
    said = diagnose(answer)
    assert said.startswith("silver, because values and bytes are right. For gold: ") and words in said


def test_every_case_begins_with_an_input_that_can_be_cut_evenly_and_has_one_that_cannot():
    for case in CASES:
        assert case.numels[0] % case.world_size == 0
        assert any(numel % case.world_size for numel in case.numels)
    assert len({case.dtype for case in CASES}) == 3 and any(case.turned for case in CASES)

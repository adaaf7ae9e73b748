"""Lesson 05's exercise on order: any right style passes, and each mistake is named."""

from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from support.answers import alone, together
from support.lessons import solutions_travel_by_value

from zerolab import ring
from zerolab.course.lessons.zero_stage_2 import check_order

solutions_travel_by_value(__name__)


class Queue:
    """Right: a flag for each unit; each subclass below changes one thing."""

    missing = staticmethod(torch.zeros)  # what stands for a gradient that is not there

    def __init__(self, sizes):
        self.sizes, self.shards = sizes, {}
        self.flats = dict.fromkeys(sizes)

    def ready(self, name, flat):
        self.flats[name] = flat
        self.drain()

    def drain(self):
        for name in self.sizes:
            if name in self.shards:
                continue
            if self.flats[name] is None:
                return
            self.take(name)

    def take(self, name):
        flat, self.flats[name] = self.flats[name], None
        self.shards[name] = self.reduce(flat)

    def reduce(self, flat):
        return ring.reduce_scatter(flat).clone()

    def finish(self):
        for name, numel in self.sizes.items():
            if name not in self.shards:
                if self.flats[name] is None:
                    self.flats[name] = self.missing(numel)
                self.take(name)


class Recursive:
    """Right: the next name is remembered, and each reduction looks for the one after it."""

    def __init__(self, sizes):
        self.sizes, self.names, self.shards, self.ahead = sizes, iter(sizes), {}, {}
        self.turn = next(self.names)

    def ready(self, name, flat):
        self.ahead[name] = flat
        if self.turn in self.ahead:
            turn, self.turn = self.turn, next(self.names, None)
            self.shards[turn] = torch.clone(ring.reduce_scatter(self.ahead.pop(turn)))
            if self.turn in self.ahead:
                self.ready(self.turn, self.ahead.pop(self.turn))

    def finish(self):
        while self.turn:
            self.ready(self.turn, torch.zeros(self.sizes[self.turn]))


class ByMessages(Queue):
    """Right: every rank sends each chunk to its owner."""

    def reduce(self, flat):
        rank, size = dist.get_rank(), dist.get_world_size()
        pieces = ring.chunks(flat.numel(), size)
        mine = flat[pieces[rank]].clone()
        for distance in range(1, size):
            there, landing = (rank + distance) % size, torch.empty_like(mine)
            work = dist.isend(flat[pieces[there]], there)
            dist.recv(landing, (rank - distance) % size)
            work.wait()
            mine += landing
        return mine


class Stub:
    def __init__(self, sizes):
        self.shards = {}

    def ready(self, name, flat): ...

    def finish(self): ...


class AtOnce(Queue):
    def ready(self, name, flat):
        self.flats[name] = flat
        self.take(name)


class AllInFinish(Queue):
    def ready(self, name, flat):
        self.flats[name] = flat


class NoZeros(Queue):
    def finish(self):
        for name in self.sizes:
            if self.flats[name] is not None:
                self.take(name)


class MemoryForZeros(Queue):
    """What torch.empty returns stands for the gradients that are missing."""

    missing = staticmethod(torch.empty)


class NoFinish(Queue):
    def finish(self): ...


class Views(Queue):
    def reduce(self, flat):
        return ring.reduce_scatter(flat)


@alone
class AllReduced(Queue):
    def reduce(self, flat):
        ring.all_reduce(flat)
        return flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]].clone()


@alone
class AllReducedTooShort(Queue):
    """The same with chunks of torch, which are too few for 9 elements on 4 ranks."""

    def reduce(self, flat):
        ring.all_reduce(flat)
        return flat.chunk(dist.get_world_size())[dist.get_rank()].clone()


@alone
class NativeAllReduce(Queue):
    def reduce(self, flat):
        dist.all_reduce(flat)
        return flat.chunk(dist.get_world_size())[dist.get_rank()].clone()


@alone
class FunctionalAllReduce(Queue):
    def reduce(self, flat):
        total = functional_collectives.all_reduce(flat, "sum", dist.group.WORLD)
        return total.chunk(dist.get_world_size())[dist.get_rank()].clone()


class Mean(Queue):
    def reduce(self, flat):
        return super().reduce(flat) / dist.get_world_size()


class Own(Queue):
    def reduce(self, flat):
        return flat[ring.chunks(flat.numel(), dist.get_world_size())[dist.get_rank()]].clone()


class Whole(Queue):
    def reduce(self, flat):
        ring.all_reduce(flat)
        return flat.clone()


class Misnamed(Queue):
    """Reduces in the right order, and keeps the sum under the name that just got ready."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.named, self.made = [], []

    def ready(self, name, flat):
        self.named.append(name)
        super().ready(name, flat)

    def finish(self):
        super().finish()
        names = [*self.named, *(name for name in self.sizes if name not in self.named)]
        self.shards = dict(zip(names, [self.shards[name] for name in self.sizes], strict=True))


class History(Queue):
    def take(self, name):
        self.past = [*getattr(self, "past", []), self.flats[name]]
        super().take(name)


class NeverTakenOut:
    """Reduced buffers stay in the dictionary of those that wait."""

    def __init__(self, sizes):
        self.sizes, self.shards, self.got, self.next = sizes, {}, {}, 0

    def ready(self, name, flat):
        self.got[name] = flat
        names = list(self.sizes)
        while self.next < len(names) and names[self.next] in self.got:
            self.reduce(names[self.next])
            self.next += 1

    def reduce(self, name):
        flat = self.got.get(name, torch.zeros(self.sizes[name]))
        self.shards[name] = ring.reduce_scatter(flat).clone()

    def finish(self):
        for name in list(self.sizes)[self.next :]:
            self.reduce(name)


class Backwards(Queue):
    def __init__(self, sizes):
        super().__init__(dict(reversed(sizes.items())))


class Alphabetical(Queue):
    def __init__(self, sizes):
        super().__init__(dict(sorted(sizes.items())))


class OnesForZeros(Queue):
    missing = staticmethod(torch.ones)


class DoubleZeros(Queue):
    missing = staticmethod(partial(torch.zeros, dtype=torch.float64))


class ByElements(Queue):
    def reduce(self, flat):
        return super().reduce(flat) / flat.numel()


class Listed(Queue):
    def finish(self):
        super().finish()
        self.shards = list(self.shards.values())


class NextChunk(Queue):
    def reduce(self, flat):
        ring.all_reduce(flat)
        size = dist.get_world_size()
        return flat[ring.chunks(flat.numel(), size)[(dist.get_rank() + 1) % size]].clone()


class Doubled(Queue):
    def reduce(self, flat):
        return super().reduce(2 * flat)


class MissesFirst(Queue):
    """Rank 0's gradients are lost."""

    def reduce(self, flat):
        return super().reduce(flat if dist.get_rank() else torch.zeros_like(flat))


ORDER_RIGHT = [Queue, Recursive, ByMessages]


class ZerosLast(Queue):
    """What waits is reduced first in finish, and the zeros after it."""

    def finish(self):
        for name, flat in list(self.flats.items()):
            if flat is not None:
                self.take(name)
        super().finish()


class ZerosFirst(Queue):
    def finish(self):
        for name in [name for name in self.sizes if name not in self.shards and self.flats[name] is None]:
            self.flats[name] = torch.zeros(self.sizes[name])
            self.take(name)
        super().finish()


class Twice(Queue):
    """finish reduces zeros for every unit, and for the reduced ones too."""

    def finish(self):
        for name, numel in self.sizes.items():
            flat = torch.zeros(numel) if self.flats[name] is None else self.flats[name]
            self.flats[name] = None
            self.shards[name] = self.shards.get(name, 0) + self.reduce(flat)


class OneBuffer(Queue):
    """All shards are views of one tensor."""

    def reduce(self, flat):
        self.buffer = getattr(self, "buffer", torch.zeros(1000))
        shard = super().reduce(flat)
        return self.buffer[: len(shard)].copy_(shard)


class OneForAll(Queue):
    """The dictionary belongs to the class."""

    kept: ClassVar[dict] = {}

    def __init__(self, sizes):
        super().__init__(sizes)
        self.shards = self.kept


class WholeBuffers(Queue):
    def reduce(self, flat):
        ring.reduce_scatter(flat)
        return flat


class ForgetsWhatWaits(Queue):
    """finish reduces zeros for each unit that is not reduced, also for those that wait."""

    def finish(self):
        for name, numel in self.sizes.items():
            if name not in self.shards:
                self.shards[name] = self.reduce(torch.zeros(numel))


@alone
class AllAgain(NeverTakenOut):
    def finish(self):
        for name in self.sizes:
            self.reduce(name)


class WithABarrier(Queue):
    def ready(self, name, flat):
        dist.barrier()
        super().ready(name, flat)


@alone
class Joined(Queue):
    def ready(self, name, flat):
        self.flats[name] = flat

    def finish(self):
        flats = [torch.zeros(self.sizes[n]) if flat is None else flat for n, flat in self.flats.items()]
        mine = self.reduce(torch.cat(flats))
        cuts = [numel // dist.get_world_size() for numel in self.sizes.values()]
        self.shards = dict(zip(self.sizes, [each.clone() for each in mine.split(cuts)], strict=True))


@alone
class InArrival(Queue):
    """A buffer is reduced as soon as it is there, and its sum gets the name whose turn it is."""

    def ready(self, name, flat):
        turn = next(name for name in self.sizes if name not in self.shards)
        self.shards[turn] = self.reduce(flat)


@alone
class FromClones(InArrival):
    def reduce(self, flat):
        return super().reduce(flat.clone())


class ByNumber(Queue):
    def finish(self):
        super().finish()
        self.shards = dict(enumerate(self.shards.values()))


class TurnOfAll(Queue):
    """The number of the next unit belongs to the class."""

    turn = 0

    def drain(self):
        names = list(self.sizes)
        while TurnOfAll.turn < len(names) and self.flats[names[TurnOfAll.turn]] is not None:
            self.take(names[TurnOfAll.turn])
            TurnOfAll.turn += 1

    def finish(self):
        for name in list(self.sizes)[TurnOfAll.turn :]:
            if self.flats[name] is None:
                self.flats[name] = torch.zeros(self.sizes[name])
            self.take(name)
        TurnOfAll.turn = len(self.sizes)
        for name in self.sizes:
            self.shards.setdefault(name, torch.zeros(1))


class OnRank0Alone(Queue):
    def reduce(self, flat):
        mine = super().reduce(flat)
        return mine if dist.get_rank() == 0 else mine / dist.get_world_size()


class OnceInReady(Queue):
    """`if` for `while`: what waits behind a unit is left, and finish reduces only units that never came."""

    def drain(self):
        name = next((each for each in self.sizes if each not in self.shards), None)
        if name and self.flats[name] is not None:
            self.take(name)

    def finish(self):
        for name, numel in self.sizes.items():
            if name not in self.shards and self.flats[name] is None:
                self.flats[name] = torch.zeros(numel)
                self.take(name)


ORDER_WRONG = [
    (WholeBuffers, "each rank keeps the whole buffer after the reduction, and only its own chunk of that"),
    (ForgetsWhatWaits, "rank 1 reduces zeros for unit b in finish, whose gradient got ready on"),
    (AllAgain, "rank 0 reduces unit a's buffer a second time in finish"),
    (alone(WithABarrier), "waits in dist.barrier (line"),
    (Joined, "the units are reduced as one buffer of 192 elements. Its chunk r is not chunk r of each unit"),
    (InArrival, "the first reduction takes unit a's buffer on rank 0, and unit b's on rank 1"),
    (FromClones, "the first reduction takes unit a's buffer on rank 0, and unit b's on rank 1"),
    (ByNumber, "rank 0 has no shard of a, b, c, d in self.shards after finish(). Its keys are 0, 1, 2, 3"),
    (alone(TurnOfAll), "a second one with the same gradients is not: keep what belongs to one backward pass"),
    (OnRank0Alone, "rank 0 is right, but rank 1 is not: each shard is the mean over the ranks"),
    (OneForAll, "a new object begins with the shards of the one before"),
    (OneBuffer, "several shards are views of the same memory"),
    (alone(OnceInReady), "rank 2 reduces a, b, and never c, d. They were ready before the turn came"),
    (alone(OnceInReady), "in ready, reduce with while, and not with if. "),
    (alone(Twice), "rank 0 begins more than 3 reduce-scatters, and there are 3 units. Reduce each unit once"),
    (alone(ZerosLast), "what waits, and zeros for a unit that never got ready"),
    (alone(ZerosFirst), "Reduce in the order of sizes, in finish, too"),
    (Stub, "not written yet"),
    (alone(AtOnce), "the ranks reduce different units at the same time"),
    (AllInFinish, "For gold: after unit a got ready rank 0 holds 1 whole buffer, and none waits for"),
    (AllInFinish, "keeps unit a, and it is its turn: reduce it at once"),
    (alone(NoZeros), "finish has to reduce zeros for each such unit"),
    (alone(DoubleZeros), "as many as the unit has elements, and in its type: torch.zeros(sizes[name])"),
    (ByElements, "each shard is divided by the unit's number of elements"),
    (MemoryForZeros, "or for a tensor of torch.empty that is used before it is filled"),
    (alone(NoFinish), "was never sent: rank 1 has returned"),
    (Views, "is a view, which keeps the whole buffer: keep a clone of the chunk"),
    (AllReduced, "bronze, because the values are right. For silver: rank 0 sends"),
    (AllReducedTooShort, "before this case the values are right, and they cost too much: rank 0 sends"),
    (NativeAllReduce, "that calls torch's own dist.all_reduce: use ring.reduce_scatter"),
    (FunctionalAllReduce, "that calls torch's own dist.all_reduce: use ring.reduce_scatter"),
    (Mean, "each shard is the mean over the ranks"),
    (Own, "each shard is this rank's own gradient"),
    (Whole, "every rank keeps the whole sum"),
    (Misnamed, "kept under other units' names"),
    (History, "unit a is reduced, and `self.past[0]` still keeps its buffer"),
    (NeverTakenOut, "unit a is reduced, and `self.got['a']` still keeps its buffer: take it out there"),
    (Backwards, "reduces the units in the order d, c, b, a; the order of sizes is a, b, c, d"),
    (Alphabetical, "reduces the units in the order a, b, c; the order of sizes is c, a, b"),
    (OnesForZeros, "a unit without a gradient adds ones to the sum"),
    (Listed, "self.shards is of type list"),
    (NextChunk, "the next rank's shard"),
    (Doubled, "what is there is 2 times what it should be"),
    (MissesFirst, "rank 0 reduces zeros for unit a, whose gradient got ready on this rank"),
    (lambda sizes: sizes, "'dict' object has no attribute 'ready'"),
]  # fmt: skip
in_order = together(check_order, [*ORDER_RIGHT, *(wrong for wrong, _ in ORDER_WRONG)])


@pytest.mark.parametrize("right", ORDER_RIGHT)
def test_every_right_order_passes(right):
    assert in_order(right) is None


@pytest.mark.parametrize(("wrong", "words"), ORDER_WRONG)
def test_wrong_orders_are_named(wrong, words):
    assert words in in_order(wrong)

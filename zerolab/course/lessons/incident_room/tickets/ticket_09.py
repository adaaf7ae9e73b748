"""Ticket 9: half of the machines are gone, and the job is resumed on the rest."""

import re
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from zerolab import ring
from zerolab.course.attempts import Attempt
from zerolab.course.lessons.incident_room.check import Ticket
from zerolab.course.lessons.incident_room.costs import costs_too_much
from zerolab.course.lessons.incident_room.engine import MOMENTUM
from zerolab.course.lessons.incident_room.held import ITEM
from zerolab.course.lessons.incident_room.lockstep import chunk
from zerolab.course.lessons.incident_room.resumes import resumed
from zerolab.course.lessons.incident_room.room import PSI, Case
from zerolab.course.lessons.incident_room.runs import Seen


class Engine9:
    def __init__(self, flat, lr):
        self.flat, self.lr = flat, lr
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.cut()

    def cut(self):
        self.mine = ring.chunks(self.flat.numel(), self.world_size)[self.rank]
        self.shard = self.flat[self.mine]
        self.optimizer = torch.optim.SGD([self.shard], self.lr, MOMENTUM)

    def reduce(self, gradient):
        self.shard.grad = ring.reduce_scatter(gradient) / self.world_size

    def update(self):
        self.optimizer.step()

    def gather(self):
        ring.all_gather(self.flat)

    def step(self, batches):
        (batch,) = batches
        self.reduce(batch.gradient(self.flat))
        self.update()
        self.gather()

    def save(self):
        return self.optimizer.state[self.shard]["momentum_buffer"].clone()  # this rank's file

    def load(self, files):
        saved = files[self.rank % len(files)]  # the file of this rank
        momentum = torch.zeros_like(self.shard)
        fits = min(len(saved), len(momentum))
        momentum[:fits] = saved[:fits]
        self.optimizer.state[self.shard]["momentum_buffer"] = momentum


class Repaired(Engine9):
    def load(self, files):
        whole = torch.cat(files)  # what the shards were cut from
        self.optimizer.state[self.shard]["momentum_buffer"] = whole[self.mine].clone()


def dealt(case: Case, file_of) -> list[torch.Tensor]:
    """Where the ranks end if rank r starts with the file `file_of(r)`, as far as it fits."""

    def deal(momentum: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(momentum)
        for rank in range(case.resumed_on):
            saved, mine = momentum[chunk(file_of(rank), case.ranks)], chunk(rank, case.resumed_on)
            fits = min(len(saved), mine.stop - mine.start)
            made[mine.start : mine.start + fits] = saved[:fits]
        return made

    return resumed(case, deal)


def by_own_length(case: Case) -> list[torch.Tensor]:
    """Where the ranks end if rank r's slice begins at r times the length of its own shard."""

    def cut(momentum: torch.Tensor) -> torch.Tensor:
        cuts = [chunk(rank, case.resumed_on) for rank in range(case.resumed_on)]
        sizes = [cut.stop - cut.start for cut in cuts]
        return torch.cat([momentum[size * rank : size * (rank + 1)] for rank, size in enumerate(sizes)])

    return resumed(case, cut)


def by_file_length(case: Case, whole: bool) -> list[torch.Tensor]:
    """Where the ranks end if rank r's slice begins at r times a file's length, and is as long or `whole`."""
    length = len(range(*chunk(0, case.ranks).indices(PSI)))

    def cut(momentum: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(momentum)
        for rank in range(case.resumed_on):
            mine = chunk(rank, case.resumed_on)
            most = mine.stop - mine.start
            part = momentum[length * rank :][: most if whole else min(most, length)]
            made[mine.start : mine.start + len(part)] = part
        return made

    return resumed(case, cut)


def reversed_files(case: Case) -> list[torch.Tensor]:
    files = lambda momentum: [momentum[chunk(rank, case.ranks)] for rank in reversed(range(case.ranks))]
    return resumed(case, lambda momentum: torch.cat(files(momentum)))


def cut_by_torch(case: Case, outcome: Attempt) -> str | None:
    """Whether a momentum has the length of torch.chunk's piece, where the shard has that of ring.chunks."""
    sizes = re.search(r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\)", outcome.failure or "")
    elements = torch.arange(PSI)
    of_torch = [len(piece) for piece in elements.chunk(case.resumed_on)]
    of_ring = [len(elements[piece]) for piece in ring.chunks(PSI, case.resumed_on)]
    different = [pair for pair in zip(of_torch, of_ring, strict=True) if pair[0] != pair[1]]
    if not sizes or (int(sizes[1]), int(sizes[2])) not in different:
        return None
    listed = lambda lengths: ", ".join(map(str, lengths))
    return (
        f"the momentum is cut into pieces of {listed(of_torch)} elements, as torch.chunk cuts. The shards "
        f"have {listed(of_ring)}, because ring.chunks cuts them: self.mine is this rank's slice"
    )


def costs(case: Case, ended: Sequence[Seen]) -> str | None:
    """What is wrong with right values: too many bytes, state that is not sharded, or files that are kept."""
    return costs_too_much(case, ended) or _kept_files(case, ended)


def _kept_files(case: Case, ended: Sequence[Seen]) -> str | None:
    """Whether a rank keeps the files after the resume, or all of the momentum, beside its own slice."""
    slice_bytes = -(-PSI // case.resumed_on) * ITEM
    for rank, each in enumerate(ended):
        kept = each.kept[-1]
        if sum(kept.values()) > 3 * slice_bytes:
            largest = max(kept, key=lambda name: kept[name])
            return (
                f"the values are right, but after the resume rank {rank} keeps {sum(kept.values()):,} bytes, "
                f"where its slices of the momentum and of the gradient have {2 * slice_bytes:,}: `{largest}` "
                f"has {kept[largest]:,} of them. Keep a clone of the slice, and neither the files nor all of "
                "the momentum"
            )
    return None


def saving_costs(before: Sequence[Seen]) -> str | None:
    """Whether save sends parts of the momentum, or the files have more than the momentum together."""
    return sent_by_save(before) or _large_files(before)


def _large_files(before: Sequence[Seen]) -> str | None:
    saved = sum(_elements(each.saved) for each in before)
    if len(before) < 3 or saved < len(before) * PSI:  # parameters and other tensors of a slice are allowed
        return None
    return (
        f"the values are right, but the {len(before)} files have {saved} elements together, and the momentum "
        f"has {PSI}: a rank's file is its own slice, and load can join the files"
    )


def sent_by_save(before: Sequence[Seen]) -> str | None:
    """Whether save sends parts of the momentum. Numbers that describe a slice are few, and allowed."""
    sending = [rank for rank, each in enumerate(before) if sum(each.saving.values()) > 0.3]
    if not sending:
        return None
    rank, n = sending[0], len(before)
    moved, calls = sum(before[rank].saving.values()), ", ".join(before[rank].saving)
    whole = [rank for rank, each in enumerate(before) if _elements(each.saved) >= PSI]
    has = ""
    if len(whole) == n:
        has = f", and each of {n} files has the whole momentum: together they are {n} times as large as it"
    elif whole:
        has = f", and the file of rank {' and '.join(map(str, whole))} has the whole momentum"
    return (
        f"the values are right, but rank {rank} moves {moved:.1f}Ψ in save ({calls}){has}. A rank's file is "
        "its own slice of the momentum: save sends nothing, and load can join the files"
    )


def _elements(saved: object) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(saved) if isinstance(leaf, torch.Tensor))


# A sentence, and where the ranks end.
# fmt: off
MISTAKES = {
    "each rank still starts with the file of its own number: at another N its shard is another slice":
        lambda case: dealt(case, lambda rank: rank % case.ranks),
    "every rank starts with the file of rank 0":
        lambda case: dealt(case, lambda rank: 0),
    "the slice is cut with rank * len(self.shard), but the first shards are one longer than the others: "
    "self.mine is this rank's slice":
        by_own_length,
    "the slice begins at rank * len(files[0]) and has a file's length, and files are as long as the shards "
    "of the old N: self.mine is this rank's slice":
        lambda case: by_file_length(case, whole=False),
    "the slice begins at rank * len(files[0]), and files are as long as the shards of the old N: self.mine "
    "is this rank's slice":
        lambda case: by_file_length(case, whole=True),
    "the momentum is forgotten, so the first steps after the resume are too short. Write it to "
    'self.optimizer.state[self.shard]["momentum_buffer"]':
        lambda case: resumed(case, torch.zeros_like),
    "the files are put together in the wrong order":
        reversed_files,
}
# fmt: on
TICKET = Ticket(
    Engine9,
    "A shard has a meaning only together with N. DeepSpeed refused to load its optimizer state at another "
    "N (deepspeedai/DeepSpeed#2898, deepspeedai/DeepSpeed#3810), which is the honest answer of an engine "
    "that cannot. Its universal checkpoints can (deepspeedai/DeepSpeed#1953). zerolab's checkpoints store "
    "names and slices, so N and the stage may differ.",
    (
        "how long is rank 0's file from 4 ranks, and how long is rank 0's shard on 2?",
        "together the files are the whole momentum. Which slice of it does this rank own now?",
        "torch.cat(files) is the whole momentum, in rank order; self.mine is this rank's slice of it.",
    ),
    cases=(
        Case(4, resumed_on=2),
        Case(2, resumed_on=4),
        Case(3, resumed_on=2),
        Case(2, resumed_on=3),  # where torch.chunk cuts otherwise than ring.chunks
    ),
    right=resumed,
    mistakes=MISTAKES,
    stopped=cut_by_torch,
    cost=costs,
    memory=True,
    saving=saving_costs,
    owned=lambda ranks, rank: [torch.arange(PSI)[chunk(rank, ranks)]],
)
check_9 = TICKET.check(9, [Repaired])

"""A script: in which order an engine's first step reduces its parameters, in an interpreter of its own.

It runs rank 0 with a process group that sends nothing, so that it needs no other rank.
"""

import signal
import sys

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zerolab import ring
from zerolab.course.lessons.incident_room.room import LR, NAMES, RANKS, Case, batches, named, start
from zerolab.course.wire import Wire
from zerolab.launcher.payload import load_payload

SECONDS = 120  # then the process ends; a busy machine takes long to import torch


def main() -> None:
    """Read an engine from standard input; print the names of the parameters as they are reduced."""
    signal.alarm(SECONDS)
    engine, _, _ = load_payload(sys.stdin.buffer)
    case = Case(RANKS, by_name=True)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mine = engine(named(case, start()), LR)
    with Wire() as wire:
        mine.step(batches(case, 0))
    of = {numel: name for name, numel in NAMES.items()}
    of |= {cut.stop - cut.start: name for name, numel in NAMES.items() for cut in ring.chunks(numel, RANKS)}
    print(*(of[call.numel] for call in wire.messages if call.numel in of and "all_gather" not in call.call))


if __name__ == "__main__":
    main()

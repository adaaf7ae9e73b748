"""What a network interface counts during a few steps, beside what the trace of this rank says it sent."""

import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import zerolab
from zerolab.events import Event

LISTENING = "0A"
LOOPBACK = {"0100007F"}
SIOCGIFMTU = 0x8921  # asks for the largest packet of an interface
STEPS = 3  # the first is not counted: in it connections are still made


def listens() -> set[str]:
    """The addresses on which this process takes connections, as in /proc: 0100007F is 127.0.0.1."""
    mine = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and f"socket:[{rest[5]}]" in mine:
                found.add(local.partition(":")[0])
    return found


class Count(NamedTuple):
    """Bytes over the counted steps, and the parameters after them.

    Attributes:
        between_bytes: the part of ``wire_bytes`` that this rank sent to ranks of other hosts.
        again_bytes: at most so many were sent a second time, by TCP.
        checksum: of the parameters' bits.
    """

    received_bytes: int
    sent_bytes: int
    wire_bytes: int
    between_bytes: int
    again_bytes: int
    checksum: int


def read_interface(name: str) -> tuple[int, int]:
    """Bytes received and sent since the interface came up; of a loopback both are of all ranks."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"{name}:"))
    return int(fields[0]), int(fields[8])


def sent_again_bytes(interface: str) -> int:
    """At most how many bytes TCP has sent once more, as it does on a busy host. Of this network namespace."""
    names, values = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if "Tcp:" in line
    )
    segments = int(values[names.index("RetransSegs")])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, SIOCGIFMTU, struct.pack("16s16x", interface.encode()))
    return segments * struct.unpack("16xi12x", answer)[0]


def count(stage: int, interface: str, ranks_of_a_host: int = 1, shard_size: int | None = None) -> Count:
    """Train on this rank with barriers around the steps that count, so that they alone are in the numbers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, shard_size=shard_size, lr=0.1)
    inputs = torch.randn(2, 512, generator=torch.Generator().manual_seed(dist.get_rank()))
    wire_bytes, between_bytes = 0, 0
    for step in range(STEPS):
        dist.barrier()
        if step == 1:
            before, again_before = read_interface(interface), sent_again_bytes(interface)
        dist.barrier()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        wire_bytes += optimizer.trace.traffic(step).wire_bytes * (step > 0)
        between_bytes += _between_hosts(optimizer.trace.step(step), ranks_of_a_host) * (step > 0)
    dist.barrier()
    received_bytes, sent_bytes = (
        now - then for now, then in zip(read_interface(interface), before, strict=True)
    )
    again_bytes = sent_again_bytes(interface) - again_before
    with optimizer.full_params():
        checksum = sum(int(p.detach().view(torch.int32).sum(dtype=torch.int64)) for p in model.parameters())
    return Count(received_bytes, sent_bytes, wire_bytes, between_bytes, again_bytes, checksum)


def _between_hosts(events: list[Event], ranks_of_a_host: int) -> int:
    """What this rank sends to other hosts, as it sends as much to each other rank of a collective."""
    mine = dist.get_rank() // ranks_of_a_host
    found = 0
    for event in events:
        if len(event.ranks) > 1:
            others = sum(rank // ranks_of_a_host != mine for rank in event.ranks)
            found += event.wire_bytes * others // (len(event.ranks) - 1)
    return found


def agrees(interface_bytes: int, wire_bytes: int, again_bytes: int) -> bool:
    """Within 5 %: an interface also counts headers and acknowledgements, and what control messages weigh.

    And it counts what TCP sends again.
    """
    return wire_bytes <= interface_bytes <= 1.05 * wire_bytes + again_bytes

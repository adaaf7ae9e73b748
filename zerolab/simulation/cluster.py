"""Cluster: what a GPU computes in a second, and what the links inside and between nodes carry."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from zerolab.checks import number, rate, whole

_MOST_SHARE = 0.5  # of a processor: what computes gets at least the other half


class Sending(NamedTuple):
    """How long a message is under way, and what share of the processor that computes it takes meanwhile."""

    seconds: float
    share: float


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes. Bytes per second are in one direction.

    Attributes:
        name: how a table calls it.
        flops_per_second: of matrix products, as a GPU attains them on the model.
        memory_bytes_per_second: of a GPU's memory, as it attains them on elementwise operators.
        gpus_per_node: how many share the links inside a node.
        inside_bytes_per_second: from a GPU to its neighbour in the node.
        between_bytes_per_second: from a node to another one, all of its network cards together.
        latency_seconds: α, of each message in a row.
        inside_latency_seconds: the same inside a node; None where it is as long.
        direct: whether each rank sends to all others at once, and not to the next one on a ring.
        processor_seconds_per_byte: what a byte that is sent, with the one that comes back, takes from the
            processor that computes. Nothing on GPUs; where CPUs compute, about 2e-9.
        dollars_per_gpu_hour: for the cost of a run.
    """

    name: str
    flops_per_second: float
    memory_bytes_per_second: float
    gpus_per_node: int
    inside_bytes_per_second: float
    between_bytes_per_second: float
    latency_seconds: float = 1e-5
    processor_seconds_per_byte: float = 0.0
    dollars_per_gpu_hour: float = 0.0
    inside_latency_seconds: float | None = None
    direct: bool = False

    def __post_init__(self) -> None:
        for name in ("flops", "memory_bytes", "inside_bytes", "between_bytes"):
            rate(f"{name}_per_second", getattr(self, f"{name}_per_second"))
        whole("gpus_per_node", self.gpus_per_node)
        for name in ("latency_seconds", "processor_seconds_per_byte", "dollars_per_gpu_hour"):
            number(name, getattr(self, name))
        if self.inside_latency_seconds is not None:
            number("inside_latency_seconds", self.inside_latency_seconds)

    def operator_seconds(self, flops: float, nbytes: float) -> float:
        """The longer of its arithmetic and its memory traffic, which go on at the same time."""
        return max(flops / self.flops_per_second, nbytes / self.memory_bytes_per_second)

    def inside_of(self, ranks: Sequence[int]) -> int:
        """How many of these ranks are on the first one's node. They are numbered node after node."""
        node = ranks[0] // self.gpus_per_node
        return sum(1 for _ in takewhile(lambda rank: rank // self.gpus_per_node == node, ranks))

    def message_seconds(self, op: str, sent_bytes: float, ranks: Sequence[int]) -> float:
        """Of a collective among these ranks, when as many such groups as there are send at the same time.

        A ring visits the ranks of a node one after the other, so a node sends one rank's bytes to the next
        one, and each byte waits for the latency of every link but one. Sent directly, each rank's bytes for
        other nodes leave its node, and the latency counts once.
        """
        count, inside = len(ranks), self.inside_of(ranks)
        passes = 2 if op == "all_reduce" else 1
        if self.direct:
            outside_bytes = sent_bytes * (count - inside) / max(1, count - 1)
            of_a_rank = self.between_bytes_per_second / self.gpus_per_node
            inside_seconds = (sent_bytes - outside_bytes) / self.inside_bytes_per_second
            return passes * self.latency_seconds + max(inside_seconds, outside_bytes / of_a_rank)
        slowest = self.inside_bytes_per_second
        if count > inside:  # the groups of a node share its network
            slowest = min(slowest, self.between_bytes_per_second * inside / self.gpus_per_node)
        return passes * self._ring_latency(count, inside) + sent_bytes / slowest

    def _ring_latency(self, count: int, inside: int) -> float:
        """Of the links that a byte passes on its way round a ring."""
        nodes = math.ceil(count / inside)
        of_a_link = (
            self.latency_seconds if self.inside_latency_seconds is None else self.inside_latency_seconds
        )
        return (nodes - 1) * self.latency_seconds + (count - nodes) * of_a_link

    def sending(self, op: str, sent_bytes: float, ranks: Sequence[int]) -> Sending:
        """A collective beside computation. It takes longer where the processor is slower than the link."""
        seconds = self.message_seconds(op, sent_bytes, ranks)
        needed = self.processor_seconds_per_byte * sent_bytes
        seconds = max(seconds, needed / _MOST_SHARE)
        return Sending(seconds, needed / seconds if needed else 0.0)

"""Cluster: what a GPU computes in a second, and what the links inside and between nodes carry."""

from dataclasses import dataclass
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

    def __post_init__(self) -> None:
        for name in ("flops", "memory_bytes", "inside_bytes", "between_bytes"):
            rate(f"{name}_per_second", getattr(self, f"{name}_per_second"))
        whole("gpus_per_node", self.gpus_per_node)
        for name in ("latency_seconds", "processor_seconds_per_byte", "dollars_per_gpu_hour"):
            number(name, getattr(self, name))

    def operator_seconds(self, flops: float, nbytes: float) -> float:
        """The longer of its arithmetic and its memory traffic, which go on at the same time."""
        return max(flops / self.flops_per_second, nbytes / self.memory_bytes_per_second)

    def message_seconds(self, op: str, sent_bytes: float, ranks: int) -> float:
        """Of a collective on one ring through these ranks: α for each message in a row, then all bytes.

        The ring visits the GPUs of a node one after the other, so a node sends one rank's bytes to the next
        node, and the slowest link decides.
        """
        slowest = self.inside_bytes_per_second
        if ranks > self.gpus_per_node:
            slowest = min(slowest, self.between_bytes_per_second)
        rounds = (ranks - 1) * (2 if op == "all_reduce" else 1)
        return rounds * self.latency_seconds + sent_bytes / slowest

    def sending(self, op: str, sent_bytes: float, ranks: int) -> Sending:
        """A collective beside computation. It takes longer where the processor is slower than the link."""
        seconds = self.message_seconds(op, sent_bytes, ranks)
        needed = self.processor_seconds_per_byte * sent_bytes
        seconds = max(seconds, needed / _MOST_SHARE)
        return Sending(seconds, needed / seconds if needed else 0.0)

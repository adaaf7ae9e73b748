"""Cluster: what a GPU computes in a second, and what the links inside and between nodes carry."""

from dataclasses import dataclass

from zerolab.checks import number, rate, whole


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
        dollars_per_gpu_hour: for the cost of a run.
    """

    name: str
    flops_per_second: float
    memory_bytes_per_second: float
    gpus_per_node: int
    inside_bytes_per_second: float
    between_bytes_per_second: float
    latency_seconds: float = 1e-5
    dollars_per_gpu_hour: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flops", "memory_bytes", "inside_bytes", "between_bytes"):
            rate(f"{name}_per_second", getattr(self, f"{name}_per_second"))
        whole("gpus_per_node", self.gpus_per_node)
        number("latency_seconds", self.latency_seconds)
        number("dollars_per_gpu_hour", self.dollars_per_gpu_hour)

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

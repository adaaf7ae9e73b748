"""Six clusters, and the plan, the short rehearsal and the α–β model that judge a choice for them.

A choice is a stage, a precision and whether activations are recomputed. It fits if model states, activations
and what the engine holds for a moment fit. Of the choices that fit, the one whose step takes fewest seconds
is best. The seconds are a model's, with nothing hidden behind computation; they compare choices, and are no
forecast.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import NamedTuple, cast

from zerolab import cost, memory, presets, rehearsal
from zerolab.models import GPT
from zerolab.plan import Question

USE = 0.4  # of the GPU's peak; an example
LATENCY_SECONDS = 1e-5  # of one message between neighbours; an example
ROOM = 0.95  # of the GPU's memory; the CUDA context and fragmentation take the rest
PEAK_FLOPS = {"T4": 65e12, "V100-32GB": 125e12, "A10": 125e12, "A100-40GB": 312e12, "A100-80GB": 312e12}
PEAK_FLOPS |= {"H100-80GB": 989e12}  # 16-bit matrix products without sparsity, NVIDIA's data sheets
WITHOUT_BF16 = ("T4", "V100-32GB")  # Turing and Volta; bf16 came with Ampere
FP32_FACTOR = 8  # a T4 and a V100 compute fp32 8 times slower than 16-bit matrix products
OFFERED_PRECISIONS = ("mixed", "mixed_fp16", "fp32")  # bf16, fp16 with a loss scale, fp32


class Shape(NamedTuple):
    """The sizes of a model that has layers."""

    psi: float
    layers: int
    hidden: int
    heads: int
    seq: int


def shape_of(name: str) -> Shape:
    """Of a model in `zerolab.presets` that has an architecture."""
    found = presets.model(name)
    return Shape(found.psi, *cast(tuple[int, ...], (found.layers, found.hidden, found.heads, found.seq)))


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes, a model, and the sequences of each GPU's batch.

    `network_bytes_per_second` is what one node sends to another; it does not matter for a single node.
    """

    name: str
    gpu: str
    nodes: int
    gpus_per_node: int
    network_bytes_per_second: float
    model: str
    batch: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def shape(self) -> Shape:
        return shape_of(self.model)

    @property
    def link_bytes_per_second(self) -> float:
        """From a GPU to its neighbour in the node."""
        return presets.machine(self.gpu).link_bytes_per_second

    @property
    def memory_bytes(self) -> int:
        return presets.machine(self.gpu).memory_bytes


GBIT = 1e9 / 8
CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        Cluster("Colab", "T4", 1, 1, 0, "gpt2-medium", 4),
        Cluster("Kaggle", "T4", 1, 2, 0, "gpt2-large", 4),
        Cluster("PCIe box", "A10", 1, 8, 0, "llama2-7b", 1),
        Cluster("NVLink box", "A100-80GB", 1, 8, 0, "llama2-13b", 1),
        Cluster("Ethernet", "A100-40GB", 8, 8, 50 * GBIT, "llama2-7b", 2),
        Cluster("1,024 GPUs", "H100-80GB", 128, 8, 8 * 400 * GBIT, "gpt3-175b", 1),
    )
}


def question(cluster: Cluster, precision: str, checkpointing: bool) -> Question:
    """Return what `python -m zerolab plan` would be asked."""
    convention = "fp32" if precision == "fp32" else "mixed"  # fp16 takes as many bytes as bf16
    return Question(
        model=presets.model(cluster.model),
        gpus=cluster.gpus,
        gpu_memory_bytes=cluster.memory_bytes,
        precision=convention,
        k=memory.optimizer_bytes_per_parameter("adam", convention),
        micro_batches=1,
        batch=cluster.batch,
        seq=cluster.shape.seq,
        checkpointing=checkpointing,
    )


def passing_bytes(model: str, world_size: int, stage: int, precision: str) -> float:
    """Return what a step holds for a moment beyond its states: whole units, and gradients on their way."""
    return _rehearsed(model, world_size, stage, "mixed" if precision == "mixed_fp16" else precision)


@cache
def _rehearsed(model: str, world_size: int, stage: int, precision: str) -> float:
    """The same, for bf16 or fp32: fp16 has the bytes of bf16.

    A rehearsal with a few layers tells, because it does not depend on how many more there are: stage 3 has
    three at once, in use, on its way in and on its way out, stage 2 two, and the others one.
    """
    shape, depth = shape_of(model), max(1, stage)
    build = partial(GPT, vocab=50_257, width=shape.hidden, depth=depth, heads=shape.heads, context=shape.seq)
    run = rehearsal.rehearse(build, world_size, stage, precision)
    return max(run.peak_by_phase.values()) - run.memory.total_bytes


def rehearse_every_choice() -> int:
    """Rehearse each cluster at each stage and precision, so that a slider need not wait. Returns how many."""
    asked = list(product(CLUSTERS.values(), range(4), OFFERED_PRECISIONS))
    for cluster, stage, precision in asked:
        passing_bytes(cluster.model, cluster.gpus, stage, precision)
    return len(asked)


def needed_bytes(cluster: Cluster, stage: int, precision: str, checkpointing: bool) -> float:
    """Of each GPU: states and activations by the plan, and what passes by, as rehearsed."""
    asked = question(cluster, precision, checkpointing)
    return asked.total_bytes(stage) + passing_bytes(cluster.model, cluster.gpus, stage, asked.precision)


def fits(cluster: Cluster, stage: int, precision: str, checkpointing: bool) -> bool:
    room = ROOM * cluster.memory_bytes
    if question(cluster, precision, checkpointing).total_bytes(stage) > room:
        return False  # and no rehearsal is needed
    return needed_bytes(cluster, stage, precision, checkpointing) <= room


def choices(cluster: Cluster) -> Iterator[tuple[int, str, bool]]:
    """All that run: they fit, and the GPU has the precision."""
    for stage, precision, checkpointing in product(range(4), OFFERED_PRECISIONS, (False, True)):
        known = precision != "mixed" or cluster.gpu not in WITHOUT_BF16
        if known and fits(cluster, stage, precision, checkpointing):
            yield stage, precision, checkpointing


def compute_seconds(cluster: Cluster, precision: str, checkpointing: bool) -> float:
    """Six operations a parameter and token, two of them forward; checkpointing computes forward again."""
    operations = (8 if checkpointing else 6) * cluster.shape.psi * cluster.batch * cluster.shape.seq
    slower = FP32_FACTOR if precision == "fp32" else 1
    return operations * slower / (PEAK_FLOPS[cluster.gpu] * USE)


def message_seconds(cluster: Cluster, stage: int, precision: str = "mixed", micro_batches: int = 1) -> float:
    """The α–β model of one ring through all GPUs, a message for each layer: its slowest link decides."""
    link = cluster.link_bytes_per_second
    bandwidth = link if cluster.nodes == 1 else min(link, cluster.network_bytes_per_second)
    return cost.communication_seconds(
        cluster.shape.psi,
        stage,
        cluster.gpus,
        LATENCY_SECONDS,
        bandwidth,
        bytes_per_element=4 if precision == "fp32" else 2,
        micro_batches=micro_batches,
        units=cluster.shape.layers,
    )


def step_seconds(cluster: Cluster, stage: int, precision: str, checkpointing: bool) -> float:
    return compute_seconds(cluster, precision, checkpointing) + message_seconds(cluster, stage, precision)

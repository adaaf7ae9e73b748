"""Which way to train is fastest on 1,024 and 16,384 GPUs: python benchmarks/at_scale.py --out FOLDER

A GPT of 7B, 70B and 1T parameters on three clusters of nodes with eight GPUs. For each stage and each degree
of tensor parallelism whose states and activations fit into a GPU, two training steps of the engine are
rehearsed and simulated, and the fastest of each stage is printed. Stages 1 and 2 send the same in a step of
one micro-batch, so the smaller one that fits stands for both. Hybrid sharding takes the smallest group of
nodes that fits.

All blocks of a model are alike, so models of a few blocks are rehearsed, and the seconds of a block more are
added for all others. Activations are computed again in backward, and where ranks share a copy of the model
they share its checkpoints.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

import zerolab
from zerolab import memory, models, residual
from zerolab.bench.machine import publish
from zerolab.collectives.collective_check import MESSAGE_BYTES
from zerolab.events import CONTROL
from zerolab.flags import folder
from zerolab.launcher.launcher import core_count
from zerolab.rehearsal import rehearsing
from zerolab.simulation import Cluster, play, record
from zerolab.simulation.blocks import REHEARSED, of_all_blocks

VOCABULARY, TOKENS, NODE = 50_257, 2048, 8
STAGES_1_2 = "stages 1 and 2"
GPU_BYTES = 80e9
SEQUENCES = {1024: 1024, 16_384: 8192}  # of all ranks together, in a step of so many GPUs
ATTAINED = 0.6  # of the data sheet's rates


class Shape(NamedTuple):
    """The model's."""

    name: str
    width: int
    depth: int
    heads: int

    @property
    def block_psi(self) -> int:
        return 12 * self.width**2

    @property
    def psi(self) -> int:
        """Without biases, norms and positions."""
        return self.depth * self.block_psi + 2 * VOCABULARY * self.width


SHAPES = (Shape("7B", 4096, 32, 32), Shape("70B", 8192, 86, 64), Shape("1T", 25_600, 128, 160))


def cluster(name: str, tflops: float, terabytes: float, nvlink: float, network_gbit: float) -> Cluster:
    """Eight GPUs a node.

    Args: of the data sheets, in 10^12 and 10^9 a second; network_gbit: of all cards of a node together.
    """
    return Cluster(
        name,
        flops_per_second=ATTAINED * tflops * 1e12,
        memory_bytes_per_second=ATTAINED * terabytes * 1e12,
        gpus_per_node=NODE,
        inside_bytes_per_second=nvlink * 1e9,
        between_bytes_per_second=network_gbit / 8 * 1e9,
        latency_seconds=1e-5,
        inside_latency_seconds=3e-6,
    )


CLUSTERS = (
    cluster("A100 80GB, 400 Gbit/s between nodes (AWS p4de)", 312, 2.039, 300, 400),
    cluster("A100 80GB, 1,600 Gbit/s between nodes (DGX SuperPOD)", 312, 2.039, 300, 1600),
    cluster("H100 80GB, 3,200 Gbit/s between nodes (DGX SuperPOD)", 989, 3.35, 450, 3200),
)


class Way(NamedTuple):
    """How a model is trained.

    Attributes:
        kind: the stage, or hybrid sharding.
        shard_size: how many data-parallel ranks share a copy, with hybrid sharding.
    """

    shape: Shape
    gpus: int
    kind: str
    stage: int
    tensor_parallel: int
    shard_size: int | None = None

    @property
    def copies(self) -> int:
        """How many data-parallel ranks there are."""
        return self.gpus // self.tensor_parallel

    @property
    def batch(self) -> int:
        """Sequences of a data-parallel rank; 0 where there are too few."""
        return SEQUENCES[self.gpus] // self.copies

    def __str__(self) -> str:
        group = "" if self.shard_size is None else f" in {self.shard_size * self.tensor_parallel}"
        stage = f"stage {self.stage}, " if self.kind == STAGES_1_2 else ""
        return f"{stage}TP {self.tensor_parallel}{group}"

    @property
    def needed_bytes(self) -> float:
        """Of a GPU: states, checkpoints, a block's activations, the logits, and at stage 3 whole units."""
        shape, ranks = self.shape, self.tensor_parallel
        rank_psi = residual.rank_psi(shape.psi, ranks, 2 * VOCABULARY * shape.width)
        states = memory.model_states(
            rank_psi, self.shard_size or self.copies, self.stage, "mixed"
        ).total_bytes
        checkpoints = residual.activation_checkpoints(
            shape.depth, shape.width, self.batch, TOKENS, ranks, partition=ranks > 1
        ).device_bytes
        block = residual.recomputed_block(shape.width, self.batch, TOKENS) / ranks
        logits = 6 * self.batch * TOKENS * VOCABULARY
        units = 12 * shape.block_psi / ranks if self.stage == 3 else 0
        return states + checkpoints + block + logits + units


def ways(shape: Shape, gpus: int) -> Iterator[Way]:
    """Those that fit into the memory of a GPU."""
    for degree in (1, 2, 4, 8):
        smaller = [Way(shape, gpus, STAGES_1_2, stage, degree) for stage in (1, 2)]
        yield from [way for each in smaller for way in _if_it_fits(each)][:1]
        yield from _if_it_fits(Way(shape, gpus, "stage 3", 3, degree))
        sizes = (NODE // degree * 2**power for power in range(20))
        groups = [Way(shape, gpus, "hybrid", 3, degree, size) for size in sizes if size < gpus // degree]
        yield from [way for group in groups for way in _if_it_fits(group)][:1]


def _if_it_fits(way: Way) -> Iterator[Way]:
    if way.batch and way.needed_bytes <= GPU_BYTES:
        yield way


def options(way: Way, depth: int) -> dict[str, Any]:
    """What is rehearsed: the arguments of `zerolab.rehearse`, for a model of so many blocks."""
    shape = way.shape
    tokens = torch.zeros(way.batch, TOKENS, dtype=torch.long, device="meta")
    return {
        "model_fn": partial(
            models.GPT, vocab=VOCABULARY, width=shape.width, depth=depth, heads=shape.heads, context=TOKENS
        ),
        "world_size": way.gpus,
        "stage": way.stage,
        "inputs": lambda: (tokens, tokens),
        "tensor_parallel": way.tensor_parallel,
        "checkpointing": partial(_checkpointing, way.tensor_parallel),
        "shard_size": way.shard_size,
    }


def _checkpointing(tensor_parallel: int, ranks: zerolab.TensorParallel) -> zerolab.Checkpointing:
    return zerolab.Checkpointing(ranks if tensor_parallel > 1 else None)


def seconds(way: Way, clusters: tuple[Cluster, ...] = CLUSTERS) -> list[float]:
    """Of a step, on each cluster."""
    few, more = (record(**options(way, depth)) for depth in REHEARSED)
    found = []
    for each in clusters:
        found.append(
            of_all_blocks(way.shape.depth, *(play(one, each, way.gpus).seconds for one in (few, more)))
        )
    return found


class Control(NamedTuple):
    """What a rank sends in a step besides tensors: a check of each collective, and what ranks agree on."""

    messages: float
    nbytes: float


def control(way: Way) -> Control:
    """The control messages of a step."""
    few, more = (_control(way, depth) for depth in REHEARSED)
    return Control(*(of_all_blocks(way.shape.depth, *pair) for pair in zip(few, more, strict=True)))


def _control(way: Way, depth: int) -> Control:
    with rehearsing(**options(way, depth)) as job:
        job.pass_forward_and_backward()
        job.update()
        job.optimizer.zero_grad()
        job.pass_forward_and_backward()
        job.update()
        events, rounds = job.optimizer.trace.step(1), job.optimizer.comm.control.rounds
    agreed = [event for event in events if event.phase == CONTROL]
    checks = sum(event.op != "update" for event in events)
    nbytes = MESSAGE_BYTES * checks + sum(event.wire_bytes for event in agreed)
    return Control(checks + rounds * len(agreed), nbytes)


class Found(NamedTuple):
    """A way, and the seconds of its step on each cluster."""

    way: Way
    seconds: list[float]


KINDS = (STAGES_1_2, "stage 3", "hybrid")


def table(shapes: tuple[Shape, ...], sizes: tuple[int, ...], run: Callable = map) -> str:
    """The fastest degree of tensor parallelism of each kind, and a star at the fastest of all.

    Args: run: calls a function with each of many values, as `map` does.
    """
    every = [way for shape, gpus in product(shapes, sizes) for way in ways(shape, gpus)]
    found = [Found(*each) for each in zip(every, run(seconds, every), strict=True)]
    lines = []
    for index, each in enumerate(CLUSTERS):
        heads = "".join(f"{kind:^33}" for kind in KINDS).rstrip()
        lines += [each.name, f"{'':>4} {'GPUs':>6} {heads}"]
        for shape, gpus in product(shapes, sizes):
            ours = [one for one in found if one.way[:2] == (shape, gpus)]
            lines.append(f"{shape.name:>4} {gpus:>6,} " + _cells(ours, index))
        lines.append("")
    return "\n".join(lines)


def _cells(found: list[Found], cluster: int) -> str:
    least = min((each.seconds[cluster] for each in found), default=0)
    cells = []
    for kind in KINDS:
        of_kind = [each for each in found if each.way.kind == kind]
        if not of_kind:
            cells.append(f"{'does not fit':^33}")
            continue
        way, every = min(of_kind, key=lambda each: each.seconds[cluster])
        star = "*" if every[cluster] == least else " "
        tokens = SEQUENCES[way.gpus] * TOKENS
        tflops = 6 * way.shape.psi * tokens / every[cluster] / way.gpus / 1e12
        cells.append(f"{every[cluster]:>8.2f} s {tflops:>3.0f}T {way!s:<14}{star} ")
    return "".join(cells).rstrip()


HEAD = """Seconds of a simulated step, 6Ψ·tokens a second and GPU in 10^12 (T), tensor-parallel ranks (TP).
"in 64": that many GPUs hold one copy in hybrid sharding. * is the fastest. bf16 with Adam, activations are
computed again. Sequences of 2,048 tokens, 1,024 a step on 1,024 GPUs and 8,192 on 16,384. GPUs attain 0.6 of
the data sheet. One ring through all ranks of a group, 10 µs a message between nodes and 3 µs inside.
"""


def control_lines() -> str:
    lines = ["Control messages of a rank in a step of 1T, stage 3, TP 8:"]
    for gpus in SEQUENCES:
        found = control(Way(SHAPES[-1], gpus, "stage 3", 3, 8))
        lines.append(f"{gpus:>6,} GPUs: {found.messages:,.0f} messages, {found.nbytes:,.0f} bytes")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=folder, help="a folder for at_scale.txt")
    arguments, begin = parser.parse_args(), time.perf_counter()
    with ProcessPoolExecutor(core_count()) as pool:
        text = f"{table(SHAPES, tuple(SEQUENCES), pool.map)}\n{control_lines()}\n"
    took = f"Simulated in {time.perf_counter() - begin:.0f} s on {core_count()} cores.\n"
    publish(f"{HEAD}\n{text}\n{took}", arguments.out, "at_scale.txt")


if __name__ == "__main__":
    main()

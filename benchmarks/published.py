"""Simulated throughput beside what others published: python benchmarks/published.py --out benchmarks/results

Most rows are of MosaicML's llm-foundry, scripts/train/benchmarking/README.md at commit 061f2c7: MPT models
under FSDP's FULL_SHARD, sequences of 2,048 tokens, one micro-batch a step, no activation checkpointing. The
last four are Figure 3 of the ZeRO paper, its super-linear speed-up: stage 2 with 16 tensor-parallel ranks
that share the checkpoints of activations. What a GPU attains of its data sheet on a model is fitted to the
row with the fewest GPUs. The others are foretold.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch

import zerolab
from zerolab import models, paper
from zerolab.bench.machine import publish
from zerolab.flags import folder
from zerolab.simulation import Cluster, play, record
from zerolab.simulation.recording import Recording

VOCABULARY, TOKENS = 50_368, 2048
ROUNDS_OF_BISECTION = 50

A100 = Cluster("A100 40GB, 1600 Gbit/s between nodes", 312e12, 1.555e12, 8, 300e9, 200e9)
H100 = Cluster("H100 80GB, 1600 Gbit/s between nodes (not stated)", 989e12, 3.35e12, 8, 450e9, 200e9)

V100 = Cluster("V100 32GB, 800 Gbit/s between nodes of 16 (ZeRO §10.1)", 125e12, 0.9e12, 16, 150e9, 100e9)

_FIGURE_3 = [run for run in paper.RUNS if run.figure == "3"]


class Row(NamedTuple):
    """A published run.

    Attributes:
        width, depth, heads: of the model.
        sequences: of the batch of a GPU, or of those that share a copy.
        throughput: tokens a second and GPU; for ZeRO's own, 10^12 operations a second and GPU.
        of_zero: whether it is a run of the ZeRO paper.
    """

    cluster: Cluster
    model: str
    width: int
    depth: int
    heads: int
    gpus: int
    sequences: int
    throughput: float
    of_zero: bool = False

    @property
    def unit(self) -> str:
        return "10^12 operations" if self.of_zero else "tokens"


ROWS = [
    *(
        Row(A100, "350m", 1024, 24, 16, *each)
        for each in ((16, 18, 55_413), (32, 18, 53_811), (64, 18, 52_689))
    ),
    Row(A100, "350m", 1024, 24, 16, 128, 18, 51_934),
    *(Row(A100, "3b", 2560, 32, 20, *each) for each in ((16, 5, 9750), (32, 6, 9914), (64, 6, 9736))),
    Row(A100, "3b", 2560, 32, 20, 128, 6, 9538),
    *(Row(H100, "13b", 5120, 40, 40, *each) for each in ((8, 2, 4792), (16, 2, 4767), (32, 2, 4811))),
    Row(H100, "13b", 5120, 40, 40, 64, 2, 4800),
    *(
        Row(V100, "60b", run.hidden, run.layers, run.heads, run.gpus, run.batch, tflops, of_zero=True)
        for run, tflops in zip(_FIGURE_3, paper.TFLOPS_PER_GPU.values(), strict=True)
    ),
]


class Foretold(NamedTuple):
    """A row, and the throughput that is simulated for it. ``fitted``: whether the share was fitted to it."""

    row: Row
    share: float
    throughput: float
    fitted: bool

    @property
    def error(self) -> float:
        """The simulated throughput over the published one, less 1."""
        return self.throughput / self.row.throughput - 1


def foretell(rows: list[Row]) -> Iterator[Foretold]:
    """Fit what a GPU attains on each model to its first row, and simulate the others."""
    for _, group in groupby(rows, key=lambda row: (row.cluster.name, row.model)):
        first, *others = group
        recording = recorded(first)
        attained = fitted_share(first, recording)
        yield Foretold(first, attained, throughput(first, recording, attained), fitted=True)
        for row in others:
            yield Foretold(row, attained, throughput(row, recorded(row), attained), fitted=False)


def recorded(row: Row) -> Recording:
    """The steps of one rank of a run."""
    seq = paper.SEQ if row.of_zero else TOKENS
    vocabulary = paper.VOCAB if row.of_zero else VOCABULARY
    build = partial(
        models.GPT, vocab=vocabulary, width=row.width, depth=row.depth, heads=row.heads, context=seq
    )
    tokens = torch.zeros(row.sequences, seq, dtype=torch.long, device="meta")
    arguments = {"inputs": lambda: (tokens, tokens)}
    if row.of_zero:
        return record(
            build, row.gpus, 2, tensor_parallel=16, checkpointing=zerolab.Checkpointing, **arguments
        )
    return record(build, row.gpus, 3, **arguments)


def throughput(row: Row, recording: Recording, share: float) -> float:
    """In the row's unit, as it is simulated with this share of what the data sheet says of a GPU."""
    rates = ("flops_per_second", "memory_bytes_per_second")
    cluster = replace(row.cluster, **{name: share * getattr(row.cluster, name) for name in rates})
    step = play(recording, cluster, row.gpus)
    return step.tflops if row.of_zero else row.sequences * TOKENS / step.seconds


def fitted_share(row: Row, recording: Recording) -> float:
    """The share of a GPU's rates with which a row is simulated as it was published, by bisection."""
    least, most = 1e-6, 1e3
    for _ in range(ROUNDS_OF_BISECTION):
        middle = (least * most) ** 0.5
        if throughput(row, recording, middle) < row.throughput:
            least = middle
        else:
            most = middle
    return most


def table(rows: list[Row]) -> str:
    lines = [f"{'':>6} {'GPUs':>5} {'batch':>6} {'published':>10} {'simulated':>10} {'error':>7}"]
    name = ""
    for each in foretell(rows):
        row = each.row
        if row.cluster.name != name:
            name = row.cluster.name
            lines += ["", f"{name}: {row.unit} a second and GPU"]
        error = f"fitted: {each.share:.2f} of the data sheet" if each.fitted else f"{each.error:+7.1%}"
        digits = 1 if row.of_zero else 0
        numbers = f"{row.throughput:>10,.{digits}f} {each.throughput:>10,.{digits}f} {error:>7}"
        lines.append(f"{row.model:>6} {row.gpus:>5} {row.sequences:>6} {numbers}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=folder, help="a folder for published.txt")
    publish(table(ROWS), parser.parse_args().out, "published.txt")


if __name__ == "__main__":
    main()

"""benchmarks/muon.py runs as it says; both ways to carry gradients add up the same numbers."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerolab

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "muon.py"


def benchmark():
    spec = importlib.util.spec_from_file_location("muon", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long("a test of a program that is run by hand")
def test_every_contestant_has_a_line_and_ends_where_one_process_does(tmp_path: Path):
    command = [sys.executable, str(SCRIPT), "--model", "gpt-tiny", "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "muon-2-ranks.txt").read_text() == done.stdout
    engines, ways = done.stdout.split("\n\n")[1:]
    distances = {line[:14].strip(): float(line.split()[-1]) for line in engines.splitlines()[2:]}
    assert list(distances)[:2] == ["no messages", "ddp"] and distances["no messages"] > 0.1
    assert [distances[f"zerolab-{stage}"] for stage in range(4)] == [0, 0, 0, 0]
    assert [line[:32].strip() for line in ways.splitlines()[2:]] == list(benchmark().WAYS)


def updated(way: str) -> tuple[list[torch.Tensor], int]:
    """The gradients of the matrices that this rank owns, after all ranks' were added, and the bytes sent."""
    muon = benchmark()
    messages, size = muon.Messages(), dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    shapes = [(8, 6), (6, 8), (12, 4), (4, 12)]
    matrices = [
        muon.Matrix(torch.randn(shape, generator=generator), place % size)
        for place, shape in enumerate(shapes)
    ]
    muon.WAYS[way](matrices, messages)
    return [each.gradient for each in matrices if each.owner == dist.get_rank()], messages.sent


@pytest.mark.parametrize("size", [2, 4])
def test_both_ways_add_up_the_same_numbers_and_one_sends_half_as_much_again(size: int):
    first = zerolab.launch(updated, size, "to the owner")
    second = zerolab.launch(updated, size, "equal shards and an exchange")
    for (ours, sent), (theirs, more) in zip(first, second, strict=True):
        assert all(torch.allclose(*pair) for pair in zip(ours, theirs, strict=True))
        nbytes = 4 * 48 * 4
        assert sent == 2 * nbytes * (size - 1) // size
        assert more == sent + 2 * nbytes * (size - 1) // size**2

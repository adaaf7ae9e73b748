"""Promise: `plan --seconds` simulates the step of the model that it names, and refuses what it cannot."""

import argparse
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from support.long import long_where

import zerolab
from zerolab import memory, models
from zerolab.__main__ import main
from zerolab.checkpointing import Checkpointing
from zerolab.plan import flags
from zerolab.simulation import Cluster, simulate

GPT2 = "--model gpt2 --gpus 8 --gpu T4 --batch 1 --seq 64 --tflops 5 --link 1GB --seconds"


def simulated(capsys, words: str) -> list[float]:
    assert main(["plan", *words.split()]) == 0
    line = re.search(r"^a step, simulated +(.*)$", capsys.readouterr().out, re.M)[1]
    return [float(cell) for cell in line.split()]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("precision", memory.CONVENTIONS)
def test_the_bytes_that_a_plan_counts_are_those_of_a_rehearsal(precision: str, stage: int):
    """At stage 3 the engine gathers the root once: less than the paper's 3Ψ."""
    rehearsed = zerolab.rehearse(partial(models.make, "gpt-tiny"), 48, stage, precision)
    words = f"--psi {rehearsed.psi} --gpus 48 --gpu T4 --precision {precision}".split()
    arguments = argparse.ArgumentParser()
    flags.add_arguments(arguments)
    sent_bytes = flags.read_question(arguments.parse_args(words)).sent_bytes(stage)
    assert rehearsed.traffic.wire_bytes == pytest.approx(sent_bytes, rel=0.02), "but for padding"


def test_a_head_of_its_own_is_said(capsys):
    assert main(["plan", *GPT2.split()]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "has a head of its own, where gpt2 uses its embedding again: it sends and updates 38.6M" in text


@pytest.mark.parametrize("flag", ["--gpus", "--seq", "--batch"])
def test_more_than_can_be_simulated_is_refused(flag: str, capsys):
    assert main(["plan", *f"{GPT2} {flag} 10000000000".split()]) == 2
    assert f"{flag} is 10000000000; --seconds simulates up to 1048576" in capsys.readouterr().err


CUT = "the other degree rehearses all twelve blocks, too"


@pytest.mark.parametrize("degree", long_where(lambda degree: degree == 4, CUT, [1, 4]))
def test_the_seconds_are_those_of_the_whole_model(degree: int, capsys):
    """All twelve blocks are rehearsed here; ranks that share a copy also share its checkpoints."""
    words = f"{GPT2} --checkpointing"
    if degree > 1:
        words += f" --tensor-parallel {degree} --tensor-parallel-link 4GB --partition-activations"
    cluster = Cluster("", 5e12, 1e24, degree, 4e9 if degree > 1 else 1e9, 1e9 * degree)
    gpt2 = partial(models.GPT, vocab=50_257, width=768, depth=12, heads=12, context=64)
    tokens = torch.zeros(1, 64, dtype=torch.long, device="meta")
    kept = Checkpointing if degree > 1 else lambda ranks: Checkpointing()
    whole = [
        simulate(
            gpt2,
            8,
            stage,
            cluster,
            inputs=lambda: (tokens, tokens),
            checkpointing=kept,
            tensor_parallel=degree,
        ).seconds
        for stage in (1, 3)
    ]
    found = simulated(capsys, words)
    assert [found[1], found[3]] == pytest.approx(whole, rel=0.006), "three digits are printed"


def test_overlap_makes_a_step_shorter_than_the_estimate(capsys):
    assert main(["plan", *GPT2.replace("--seq 64", "--seq 1024").split()]) == 0
    rows = dict(re.findall(r"^(= a step|a step, simulated) +(.*)$", capsys.readouterr().out, re.M))
    estimate, found = (
        [float(cell) for cell in rows[name].split()] for name in ("= a step", "a step, simulated")
    )
    assert found[3] < estimate[3]


REFUSED = {
    "--model gpt2 --gpus 8 --gpu T4 --seconds": "--seconds simulates a step; add --tflops",
    GPT2.replace("--model gpt2", "--psi 1B"): "the layers of a model are not known, and --seconds rehearses",
    f"{GPT2} --micro-batches 2": "--micro-batches is 2, and --seconds simulates a step of one; leave one out",
    f"{GPT2} --offload-optimizer cpu --offload-link 9GB": "--seconds simulates nothing that leaves the GPU; "
    "leave out --offload-optimizer or --seconds",
    f"{GPT2} --checkpointing --cpu-checkpointing --offload-link 9GB": "--seconds simulates nothing that "
    "leaves the GPU; leave out --cpu-checkpointing",
    f"{GPT2} --optimizer muon": "--seconds simulates optimizers whose parameters are cut; leave out",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_simulated_is_refused_in_one_line(words: str, capsys):
    assert main(["plan", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"zerolab plan: {REFUSED[words]}")


def test_without_torch_it_says_what_sets_it_up():
    program = (
        "import sys; sys.modules['torch'] = None; from zerolab.__main__ import main;"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", *GPT2.split()], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "zerolab plan: --seconds rehearses the engine, and torch is not installed here"
    )

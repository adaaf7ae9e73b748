"""Promise: the programs in examples/ run as they are, and do what their first line says."""

import os
import re
import subprocess
import sys
import tempfile

import pytest
from support import ROOT, guides

EXAMPLES = ROOT / "examples"


def run(name: str) -> str:
    """What the program prints when a user starts it with plain Python."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=tempfile.gettempdir(),
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def falls(losses: list[str]) -> bool:
    return float(losses[-1]) < 0.7 * float(losses[0])


def test_every_rank_loads_its_own_examples_in_a_new_order_each_epoch():
    found = re.findall(r"rank (\d)  epoch (\d)  loss (\S+)  examples \[(.*)\]", run("data_loader.py"))
    assert len(found) == 6 == len({examples for *_, examples in found})
    for rank in "01":
        assert falls([loss for number, _, loss, _ in found if number == rank])
    for epoch in "012":
        first, second = (set(shown.split(", ")) for _, number, _, shown in found if number == epoch)
        assert not first & second


def test_a_run_goes_on_at_another_size_with_the_very_parameters():
    found = re.findall(r"(\w+) at step (\d+), (\d) ranks: .* add up to (\S+)", run("resume_elsewhere.py"))
    assert [line[:3] for line in found] == [
        ("new", "0", "2"), ("saved", "5", "2"), ("loaded", "5", "3"), ("saved", "10", "3")
    ]  # fmt: skip
    new, saved, loaded, trained = (total for *_, total in found)
    assert saved == loaded and len({new, saved, trained}) == 3


def test_a_sharded_model_writes_the_same_text_both_ways():
    printed = run("generate.py")
    (whole,) = re.findall(r"inside full_params\(\): (.+)", printed)
    (by_unit,) = re.findall(r"unit by unit: +(.+)", printed)
    assert whole == by_unit and whole.startswith("'def ") and len(whole) > 20


def test_a_hugging_face_model_is_fine_tuned_at_stage_3():
    pytest.importorskip("transformers")
    printed = run("hugging_face.py")
    for rank in "01":
        assert falls(re.findall(rf"rank {rank}  step \d+  loss (\S+)", printed))
    assert "generated: b'def " in printed


def test_fabric_starts_the_ranks_and_shares_out_the_data():
    pytest.importorskip("lightning_fabric")
    printed = run("fabric.py")
    assert falls(re.findall(r"epoch \d  loss (\S+)", printed)) and printed.count("epoch 2") == 1


def test_every_example_is_on_a_page_and_in_a_test():
    """The pages say when to use it; a test file of this folder runs it."""
    names = {path.name for path in EXAMPLES.glob("*.py")}
    pages = "".join(map(guides.text, guides.PAGES))
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests/commands").glob("test_*.py"))
    assert names and {name for name in names if f"examples/{name}" not in pages} == set()
    assert {name for name in names if f'"{name}"' not in tests} == set()

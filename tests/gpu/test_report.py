"""Promise: the report on GPUs keeps what each part measured, whatever becomes of the others."""

import json
import os
import sys
from pathlib import Path

import pytest
from support import ROOT

sys.path.insert(0, str(Path(__file__).parent))

import parts
import report

from zerolab.launcher.gpus import visible_gpus


def hang() -> None:
    """Never ends."""
    import time

    time.sleep(3600)


def raises() -> None:
    """Fails."""
    raise ArithmeticError("on purpose")


def test_all_parts_together_take_less_than_ten_minutes():
    assert sum(seconds for _, seconds in parts.PARTS.values()) < 600


@pytest.mark.parametrize("name", ["versions", "collectives", "mismatch", "waits"])
def test_a_part_runs_through_without_a_gpu(name: str):
    """The other parts take longer; `python tests/gpu/report.py` runs all of them."""
    found = report.run_part(name)
    assert "error" not in found and json.dumps(found["result"])
    if name == "collectives":
        assert all(rank["right"] for ranks in found["result"].values() for rank in ranks)


def test_a_part_that_hangs_or_fails_costs_itself_alone(monkeypatch, tmp_path: Path):
    script = tmp_path / "report.py"  # a copy of the script whose parts are these
    source = Path(report.__file__).read_text().replace("from parts import PARTS", "from broken import PARTS")
    script.write_text(source)
    (tmp_path / "broken.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_report import hang, raises\n"
        'PARTS = {"hangs": (hang, 3), "raises": (raises, 20)}\n'
    )
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    monkeypatch.setattr(report, "__file__", str(script))
    monkeypatch.setattr(report, "PARTS", {"hangs": (hang, 10), "raises": (raises, 20)})
    assert "ended after 10 seconds" in report.run_part("hangs")["error"]
    assert "ArithmeticError: on purpose" in report.run_part("raises")["error"]


@pytest.mark.skipif(visible_gpus() > 0, reason="this machine has a GPU")
def test_a_trial_without_a_gpu_says_so(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(sys, "argv", ["report.py", "--out", str(tmp_path), "--parts", "versions"])
    assert report.main() == 0
    assert {path.name for path in tmp_path.iterdir()} == {"cpu-trial.json", "cpu-trial.md"}
    assert json.loads((tmp_path / "cpu-trial.json").read_text())["device"] == "CPU"
    assert "Nothing here says anything about GPUs" in (tmp_path / "cpu-trial.md").read_text()

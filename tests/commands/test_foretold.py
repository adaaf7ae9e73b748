"""Promise: benchmarks/foretold.py puts simulated steps beside those that were measured, rate by rate."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from support import ROOT

from zerolab.bench.machine import describe

SPEC = importlib.util.spec_from_file_location("foretold", ROOT / "benchmarks/foretold.py")
foretold = importlib.util.module_from_spec(SPEC)
sys.modules["foretold"] = foretold
SPEC.loader.exec_module(foretold)

PSI_BYTES = 4 * sum(p.numel() for p in foretold.models.make("gpt-tiny").parameters())


def saved(**seconds: float) -> dict:
    """What a race over cables of 8 Mbit/s, 1 MB a second, leaves, with these medians."""
    rounds = {name.replace("_", "-"): [0.5 * each, each, 2 * each] for name, each in seconds.items()}
    links = [{"bits_per_second": rate, "rounds_seconds": rounds} for rate in (None, 8e6)]
    settings = {"model": "gpt-tiny", "ranks": 2, "batch": 1}
    return {"settings": settings, "machine": describe(), "links": links}


def test_a_slow_link_takes_the_seconds_of_the_bytes():
    """Stage 1 sends Ψ from each of two ranks, and hides its computation behind that for the most part."""
    (each,) = foretold.foretell(saved(floor=0.02, zerolab_1=4.0))
    assert (each.stage, each.bits_per_second, each.measured) == (1, 8e6, 4.0)
    assert each.simulated == pytest.approx(PSI_BYTES / 1e6, rel=0.05)
    assert each.error == pytest.approx(each.simulated / 4.0 - 1)


def test_the_computation_is_the_floors_of_the_same_race():
    (each,) = foretold.foretell(saved(floor=50.0, zerolab_1=4.0))
    assert 50 <= each.simulated < 50 + PSI_BYTES / 1e6


def test_the_table_has_a_line_for_each_rate_and_stage(tmp_path: Path, capsys, monkeypatch):
    measured = saved(floor=0.02, ddp=4.0, zerolab_1=4.0, zerolab_3=5.0)
    (tmp_path / "links.json").write_text(json.dumps(measured))
    monkeypatch.setattr(sys, "argv", ["foretold.py", str(tmp_path / "links.json"), "--out", str(tmp_path)])
    foretold.main()
    printed = capsys.readouterr().out
    assert (tmp_path / "foretold.txt").read_text("utf-8") == printed
    lines = [line.split()[:3] for line in printed.splitlines()[-2:]]
    assert lines == [["0.008", "1", "4000.0"], ["0.008", "3", "5000.0"]]

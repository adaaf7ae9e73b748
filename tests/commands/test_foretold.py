"""Promise: benchmarks/foretold.py puts simulated steps beside those that were measured, rate by rate."""

import importlib.util
import json
import sys
from pathlib import Path

import cloudpickle
import pytest
from support import ROOT
from support.hosts import hosts_or_skip

from zerolab.bench.machine import describe

SPEC = importlib.util.spec_from_file_location("foretold", ROOT / "benchmarks/foretold.py")
foretold = importlib.util.module_from_spec(SPEC)
sys.modules["foretold"] = foretold
SPEC.loader.exec_module(foretold)
cloudpickle.register_pickle_by_value(foretold)

PSI_BYTES = 4 * sum(p.numel() for p in foretold.models.make("gpt-tiny").parameters())
RATE = 8e6  # bits per second: 1 MB a second


@pytest.fixture(autouse=True)
def half_of_a_step_is_the_update(monkeypatch):
    monkeypatch.setattr(foretold, "update_share", lambda asked: 0.5)


@pytest.fixture(autouse=True)
def cables_are_as_fast_as_their_rates(monkeypatch):
    monkeypatch.setattr(foretold, "attained", lambda asked, rates: {rate: rate / 8 for rate in rates})


def saved(*rates: float | None, cpu_of_ddp: float = 0.0, **seconds: float) -> dict:
    """What a race leaves in which each contestant has these medians over every rate."""
    by_name = {name.replace("_", "-"): each for name, each in seconds.items()}
    rounds = {name: [0.5 * each, each, 2 * each] for name, each in by_name.items()}
    cpu = {name: [0.0] * 3 for name in by_name} | {"ddp": [cpu_of_ddp] * 3, "floor": [0.0] * 3}
    sent = {"ddp": [PSI_BYTES] * 3}
    links = [
        {
            "bits_per_second": rate,
            "rounds_seconds": rounds,
            "rounds_cpu_seconds": cpu,
            "rounds_sent_bytes": sent,
        }
        for rate in rates
    ]
    settings = {"model": "gpt-tiny", "ranks": 2, "batch": 1, "steps": 4, "threads": 1}
    return {"settings": settings, "machine": describe() | {"cores": 2}, "links": links}


def test_a_slow_link_takes_the_seconds_of_the_bytes():
    """Stage 1 sends Ψ from each of two ranks, and hides its computation behind that for the most part."""
    (each,) = foretold.foretell(saved(RATE, floor=0.02, zerolab_1=4.0))
    assert (each.stage, each.bits_per_second, each.measured) == (1, RATE, 4.0)
    assert each.simulated == pytest.approx(PSI_BYTES / 1e6, rel=0.05)
    assert each.error == pytest.approx(each.simulated / 4.0 - 1)


def test_a_cable_that_attains_half_of_its_rate_takes_twice_as_long(monkeypatch):
    monkeypatch.setattr(foretold, "attained", lambda asked, rates: {rate: rate / 16 for rate in rates})
    (each,) = foretold.foretell(saved(RATE, floor=0.02, zerolab_1=4.0))
    assert each.sent == RATE / 16
    assert each.simulated == pytest.approx(PSI_BYTES / 0.5e6, rel=0.05)


def test_what_a_cable_attains_is_measured_on_hosts(monkeypatch, tmp_path: Path):
    """It cannot be more than the rate, but for what a cable lets through at once after a pause."""
    monkeypatch.undo()
    with hosts_or_skip(1, tmp_path):
        pass
    monkeypatch.setattr(foretold, "MEASURED_STEPS", 3)
    for rate, measured in foretold.attained({"ranks": 2, "model": "gpt-11m"}, [200e6]).items():
        assert 0.5 < measured / (rate / 8) < 1.05


def test_the_computation_is_the_floors_of_the_same_race():
    """At stage 0 every rank updates everything, and at stage 1 half of it: a quarter of this step less.

    The engine's own copies of gradients take a few percent.
    """
    whole, half = foretold.foretell(saved(RATE, floor=50.0, zerolab_0=4.0, zerolab_1=4.0))
    assert 50 <= whole.simulated < 1.05 * 50 + PSI_BYTES / 1e6
    assert whole.simulated - half.simulated == pytest.approx(50 / 4, abs=0.05 * 50)


@pytest.mark.long("a test of a program that is run by hand")
def test_without_a_limit_the_processor_time_of_the_bytes_counts():
    """DDP takes 10 s more of it than the floor. So does stage 0, which sends as many bytes.

    A message takes half of the processor, so one that is waited for takes twice as long.
    """
    (free,), (each,) = (
        foretold.foretell(saved(None, cpu_of_ddp=cpu, floor=100.0, zerolab_0=4.0)) for cpu in (0.0, 10.0)
    )
    assert 10 <= each.simulated - free.simulated < 20


@pytest.mark.long("a test of a program that is run by hand")
def test_two_ranks_on_one_core_need_twice_as_long_for_a_byte():
    race = saved(None, cpu_of_ddp=10.0, floor=100.0, zerolab_0=4.0)
    (own_core,) = foretold.foretell(race)
    race["machine"]["cores"] = 1
    (shared_core,) = foretold.foretell(race)
    assert shared_core.a_byte == 2 * own_core.a_byte > 0


def test_the_share_of_the_update_is_measured(monkeypatch):
    monkeypatch.undo()
    asked = saved()["settings"]
    assert 0 < foretold.update_share(asked) < 1


def test_the_table_has_a_line_for_each_rate_and_stage(tmp_path: Path, capsys, monkeypatch):
    measured = saved(None, RATE, floor=0.02, ddp=4.0, zerolab_1=4.0, zerolab_3=5.0)
    (tmp_path / "links.json").write_text(json.dumps(measured))
    monkeypatch.setattr(sys, "argv", ["foretold.py", str(tmp_path / "links.json"), "--out", str(tmp_path)])
    foretold.main()
    printed = capsys.readouterr().out
    assert (tmp_path / "foretold.txt").read_text("utf-8") == printed
    lines = [line.split()[:3] for line in printed.splitlines()[-5:-1]]
    expected = [["1", "4000.0"], ["3", "5000.0"]]
    assert lines == [[rate, *each] for rate in ("unlimited", "8Mbit") for each in expected]

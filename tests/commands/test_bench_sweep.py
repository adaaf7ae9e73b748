"""Promise: the sweep measures every number of ranks and parameters, and names what does not fit."""

import json
import re
import sys

import cloudpickle
import pytest
from support.contestants import STAGES, settings

from zerolab import models
from zerolab.__main__ import main
from zerolab.bench import sweep
from zerolab.bench.contestants import FLOOR

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_the_sweep_lets_ranks_and_parameters_grow(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sweep, "WORLD_SIZES", (1, 2))
    monkeypatch.setattr(sweep, "SHAPES", ((64, 1), (64, 2)))
    flags = ["--sweep", "--model", "gpt-tiny", "--rounds", "1", "--out", str(tmp_path)]
    assert main(["bench", *flags]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "sweep.txt").read_text("utf-8") in printed
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / "sweep.json").read_text("utf-8"))
    ranks, sizes = saved["sweep"]["by_ranks"], saved["sweep"]["by_parameters"]
    tiny_psi = sum(p.numel() for p in models.make("gpt-tiny").parameters())
    psis = [sum(p.numel() for p in sweep.gpt(64, depth).parameters()) for depth in (1, 2)]
    assert [(point["world_size"], point["psi"]) for point in ranks] == [(1, tiny_psi), (2, tiny_psi)]
    assert [(point["world_size"], point["psi"]) for point in sizes] == [(2, psi) for psi in psis]
    for point in (*ranks, *sizes):
        assert tuple(point["extra_cpu_seconds"]) == tuple(point["ratios"]) == ("ddp", *STAGES)
    for point, count in ((ranks[1], 3 * 4 * tiny_psi / 2), (sizes[1], psis[1])):  # by byte, by parameter
        seconds = point["extra_cpu_seconds"]["zerolab-3"]["median"]
        cost = f"{1e3 * seconds:.1f} ({1e9 * seconds / count:.2f})"
        assert re.search(rf"^ +2 +{point['psi']:,} .* {re.escape(cost)}$", printed, re.M)
    assert re.search(r"^ +1 .* \(-\)$", printed, re.M)  # alone in the world, no byte is sent


def test_a_model_that_does_not_fit_is_left_out_aloud(monkeypatch, capsys):
    monkeypatch.setattr(sweep, "memory_bytes", lambda: 10**9)
    monkeypatch.setattr(sweep, "SHAPES", ((768, 14),))
    assert sweep.by_parameters(settings(FLOOR, "zerolab-0")) == []
    assert "a GPT of 100M is left out: 2 ranks would take up to 6 GB" in capsys.readouterr().out

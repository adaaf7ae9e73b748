"""benchmarks/residual.py runs as it says, and its bytes are the formulas'."""

import subprocess
import sys
from pathlib import Path

import pytest

from zerolab.models import GPT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "residual.py"
WIDTH = 16


@pytest.mark.long("a test of a program that is run by hand")
def test_every_contestant_has_a_line_and_moves_what_the_formulas_say(tmp_path: Path):
    command = [sys.executable, str(SCRIPT), "--width", str(WIDTH), "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "residual.txt").read_text() == done.stdout
    first, second = (
        {line[:24].strip(): line[24:].split() for line in part.splitlines()[2:]}
        for part in done.stdout.split("\n\n")[2:]
    )
    psi = sum(p.numel() for p in GPT(width=WIDTH, depth=9, heads=4, context=256).parameters())
    inputs_bytes = 9 * 2 * 256 * WIDTH * 4
    states_bytes = 2 * 8 * psi / 2  # Adam's m and v of half the parameters, read and written; and padding
    moved = lambda rows: {name: float(cells[-1]) for name, cells in rows.items() if cells[-1] != "0.00"}
    MB = lambda nbytes: pytest.approx(nbytes / 1e6, abs=0.02)
    states, whole, part = MB(states_bytes), MB(2 * inputs_bytes), MB(2 * inputs_bytes / 2)
    assert moved(first) == {'offload="cpu"': states, 'offload="disk"': states, "checkpoints to disk": whole}
    assert moved(second) == {"P_a to cpu": part, "P_a to disk": part}
    assert len(first) == 8 and len(second) == 5
    assert first["plain"][1] == second["plain"][1] == "1.00"

"""Promise: what the README tells a reader to paste runs as it is written."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from support import ROOT


def section(title: str) -> str:
    return (ROOT / "README.md").read_text("utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(title: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section(title), re.DOTALL)


def run(words: list[str], cwd: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script_to_start_from_runs_alone_and_under_torchrun(tmp_path: Path):
    (script,) = blocks("Train your own model", "python")
    (command,) = blocks("Train your own model", "sh")
    (tmp_path / "yours.py").write_text(script)
    alone = run([sys.executable, "yours.py"], tmp_path)
    torchrun, *arguments = shlex.split(command)
    assert torchrun.endswith("/torchrun")
    both = run([sys.executable, "-m", "torch.distributed.run", *arguments], tmp_path)
    pattern = r"rank (\d): loss (\d\.\d+), ([\d,]+) bytes of model states"
    ((_, _, whole),) = re.findall(pattern, alone)
    halves = sorted(re.findall(pattern, both))
    assert [rank for rank, *_ in halves] == ["0", "1"]
    for _, loss, held in halves:
        assert float(loss) < 0.8, "it learns"
        assert 1.9 < number(whole) / number(held) < 2.1, "two ranks hold half each"


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_commands_about_checkpoints_run_one_after_the_other(tmp_path: Path):
    (commands,) = blocks("Checkpoints", "sh")
    outputs = []
    for line in commands.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "./zero"
        outputs.append(run([sys.executable, "-m", "zerolab", *arguments], tmp_path))
    first, second = outputs
    assert "epoch 2" in first.replace("epoch  2", "epoch 2")
    assert "epoch 4" in second.replace("epoch  4", "epoch 4") and "epoch 1 " not in second

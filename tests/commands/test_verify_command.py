"""Promise: `python -m zerolab verify` shows that all holds, and ends in failure when anything does not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

import zerolab
from zerolab.__main__ import main
from zerolab.optimizer import STAGES
from zerolab.parity import parity
from zerolab.unit.grads import FlatGrads

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

PSI = sum(parameter.numel() for parameter in parity.small_gpt().parameters())
ROW = re.compile(r"^ +(\d) +(\d+) +measured +(True|off by \S+) +([\d,]+.*)$\n^ +predicted +True +(.*)$", re.M)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def rows(printed: str) -> list[tuple]:
    """Each case: stage, ranks, verdict, the measured numbers and the predicted ones."""
    numbers = lambda text: [int(each.replace(",", "")) for each in text.split()]
    found = ROW.findall(printed)
    return [
        (int(s), int(n), verdict, numbers(ours), numbers(theirs)) for s, n, verdict, ours, theirs in found
    ]


def test_the_table_is_all_true_and_measured_is_predicted(capsys):
    assert main(["verify", "--world-size", "1", "2", "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    table = rows(printed)
    assert [row[:2] for row in table] == [(stage, n) for n in (1, 2) for stage in range(4)]
    for stage, ranks, verdict, measured, predicted in table:
        assert verdict == "True" and measured == predicted
        shares = [ranks if stage >= sharded_from else 1 for sharded_from in (3, 2, 1)]
        expected = [each * PSI / share for each, share in zip((4, 4, 8), shares, strict=True)]
        assert measured[:3] == pytest.approx(expected, abs=1)
        assert measured[3] == 8 * PSI or stage == 3
    assert re.search(r"^All 8 .*bit-identical", printed, re.M)


def test_one_process_is_trained_once_for_each_number_of_ranks(monkeypatch, capsys):
    """Its parameters do not depend on the stage, which they are compared with."""
    trained, launch = [], parity.launch

    def noting(fn, world_size, *args, **kwargs):
        trained.append((fn.__name__, world_size))
        return launch(fn, world_size, *args, **kwargs)

    monkeypatch.setattr(parity, "launch", noting)
    assert main(["verify", "--stage", "1", "3", "--world-size", "2", "3", "--steps", "1"]) == 0
    assert [n for name, n in trained if name == "_train_sharded"] == [2, 2, 3, 3]
    assert len(trained) == 4 + 2 and [row[:2] for row in rows(capsys.readouterr().out)] == [
        (1, 2), (3, 2), (1, 3), (3, 3)
    ]  # fmt: skip


def test_the_real_command_says_so_and_exits_with_0():
    environment = os.environ | {"PYTHONPATH": str(Path(zerolab.__file__).parents[1])}
    command = [sys.executable, "-m", "zerolab", "verify", "--stage", "3", "--world-size", "2"]
    done = subprocess.run(
        [*command, "--optimizer", "AdamW"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stderr == ""
    assert [row[:3] for row in rows(done.stdout)] == [(3, 2, "True")]


def sum_for_mean() -> None:
    FlatGrads.average = lambda grads: None


def whole_gradients() -> None:
    STAGES[2].after_reduce = STAGES[1].after_reduce


def all_reduce_at_stage_2() -> None:
    STAGES[2].reduce_grads = STAGES[0].reduce_grads


@pytest.mark.parametrize(
    "spoil, verdict, differing",
    [(sum_for_mean, "off by", []), (whole_gradients, "True", [1]), (all_reduce_at_stage_2, "True", [3, 4])],
)
def test_a_broken_engine_ends_in_failure(monkeypatch, capsys, spoil, verdict: str, differing: list[int]):
    """Numbers, memory or messages: one is enough, and the line below the table says which case it was."""
    sound = parity.small_gpt

    def model_of_a_broken_engine():
        spoil()
        return sound()

    monkeypatch.setattr(parity, "small_gpt", model_of_a_broken_engine)
    assert main(["verify", "--stage", "2", "--world-size", "2", "--steps", "1"]) == 1
    printed = capsys.readouterr().out
    ((*_, said, measured, predicted),) = rows(printed)
    assert said.startswith(verdict)
    assert [column for column in range(5) if measured[column] != predicted[column]] == differing
    assert printed.endswith("\n1 of 1 differ from what was predicted: stage 2 on 2\n")


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    """What launch does with one is test_launch.py's; what it raises must not end in a traceback."""

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(parity, "launch", interrupt)
    assert main(["verify", "--stage", "1", "--world-size", "1"]) == 130
    assert capsys.readouterr().err == "zerolab verify: interrupted, and its processes stopped\n"

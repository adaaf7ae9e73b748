"""Promise: what stands in the way of ./zero is answered with the line that helps."""

import shutil
from pathlib import Path

import pytest
from support.stub_machine import STUB_PYTHON, Machine

from zerolab.__main__ import COMMANDS


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def refused(machine: Machine, *words: str, **settings: str) -> str:
    code, said, calls = machine.zero(*(words or ("verify",)), **settings)
    assert code == 1
    assert not any(call.startswith("-m zerolab") for call in calls)
    return said


def test_an_old_python_is_refused_and_a_newer_one_beside_it_is_found(machine: Machine):
    said = refused(machine, STUB_VERSION="3.10")
    assert "needs Python 3.11, 3.12 or 3.13; python3 is Python 3.10" in said and "apt-get install" in said
    newer = machine.python("python3.12")
    newer.write_text(STUB_PYTHON.replace("${STUB_VERSION:-3.12}", "3.12"))
    assert machine.zero("verify", STUB_VERSION="3.10")[0] == 0


def test_no_python_at_all(machine: Machine):
    (machine.bin / "python3").unlink()
    assert "none was found" in refused(machine)


def test_the_python_that_was_asked_for_is_the_one_that_is_judged(machine: Machine):
    said = refused(machine, PYTHON="/no/such/python")
    assert "none was found (PYTHON=/no/such/python)" in said


def test_a_python_without_venv(machine: Machine):
    assert "apt-get install -y python3.12-venv" in refused(machine, STUB_NO_VENV="1")


@pytest.mark.parametrize(
    "pip_says, answer",
    [
        ("OSError: [Errno 28] No space left on device", "The disk filled up"),
        ("NewConnectionError: Temporary failure in name resolution", "could not reach its package index"),
        ("ERROR: ResolutionImpossible", "pip failed; its own words are above"),
    ],
)
def test_pip_failing(machine: Machine, pip_says: str, answer: str):
    assert answer in refused(machine, STUB_PIP=pip_says)


def test_too_little_disk_space(machine: Machine):
    (machine.bin / "df").unlink()
    (machine.bin / "df").write_text("#!/bin/sh\necho header\necho disk 5000000 4000000 1000000 80% /\n")
    (machine.bin / "df").chmod(0o755)
    assert "1000 MB free" in refused(machine)


def test_somebody_elses_environment_is_left_alone(machine: Machine):
    theirs = machine.clone / ".venv/bin/activate"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    assert "is not from ./zero" in refused(machine)
    assert theirs.read_text() == "theirs"


def test_another_clones_environment_is_not_pointed_here(machine: Machine, tmp_path: Path):
    machine.zero("verify")
    (tmp_path / "other").mkdir()
    other = Machine(tmp_path / "other")
    venv = machine.clone / ".venv"
    for torch in ("default", "cpu"):  # the second would be made anew, from nothing
        said = refused(other, ZEROLAB_VENV=str(venv), ZEROLAB_TORCH=torch)
        assert f"{venv} belongs to the clone in {machine.clone}." in said
        assert "ZEROLAB_VENV=/some/folder ./zero" in said
    assert machine.zero("verify")[2] == ["-c ", "-m zerolab verify"], "it is still the first clone's"
    shutil.rmtree(machine.clone / "zerolab")
    (machine.clone / "zero").unlink()
    assert other.zero("verify", ZEROLAB_VENV=str(venv))[0] == 0, "of a clone that is gone it is taken over"


def test_a_torch_that_is_no_choice(machine: Machine):
    assert "ZEROLAB_TORCH=gpu is not a choice: cpu, or default" in refused(machine, ZEROLAB_TORCH="gpu")


def test_windows_is_sent_to_wsl(machine: Machine):
    (machine.bin / "uname").unlink()
    (machine.bin / "uname").write_text("#!/bin/sh\necho MINGW64_NT-10.0\n")
    (machine.bin / "uname").chmod(0o755)
    assert "WSL" in refused(machine)


@pytest.mark.parametrize("typo", ["trian", "Lab", "--verbose"])
def test_an_unknown_command_is_answered_with_all_there_are_and_sets_nothing_up(machine: Machine, typo: str):
    code, said, calls = machine.zero(typo)
    assert code == 1 and calls == [] and not (machine.clone / ".venv").exists()
    assert f"{typo} is not a command. There are: lab, test, {', '.join(COMMANDS)}." in said

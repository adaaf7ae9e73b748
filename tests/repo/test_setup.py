"""Promise: ./zero sets up once, and what stands in its way is answered with the line that helps.

It runs here among stub tools: a Python that only notes how it was called, and fails as told.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import ROOT

from zerolab.__main__ import COMMANDS

TOOLS = ["sh", "dirname", "cat", "id", "uname", "df", "awk", "sed", "grep", "cksum"]
TOOLS += ["rm", "mkdir", "ls", "sleep", "cp"]
FILES = ["zero", "requirements.txt", "binder/requirements.txt", "zerolab/__main__.py"]

STUB_PYTHON = """#!/bin/sh
echo "$*" >>"$STUB_LOG"
case "$1 $2" in
    "-c import sys"*) echo "${STUB_VERSION:-3.12}" ;;
    "-c import ensurepip"*) exit "${STUB_NO_VENV:-0}" ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip")
        [ -z "${STUB_SLOW_PIP:-}" ] || sleep 30
        case "$*" in *" --quiet "*) ;; *) echo "Requirement already satisfied" ;; esac
        while [ "$1" != --log ]; do shift; done
        echo "${STUB_PIP:-}" >"$2"
        [ -z "${STUB_PIP:-}" ]
        ;;
    "-m pytest") [ "${STUB_FAILS:-}" != "$3" ] ;;
esac
"""


class Machine:
    """A bare machine: a clone at a path with a space in it, a handful of tools, and one stub Python."""

    def __init__(self, folder: Path):
        self.clone, self.bin, self.log = folder / "my clone", folder / "bin", folder / "log"
        for name in FILES:
            (self.clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.clone / name)
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.python("python3")

    def python(self, name: str) -> Path:
        (self.bin / name).write_text(STUB_PYTHON)
        (self.bin / name).chmod(0o755)
        return self.bin / name

    def environment(self, **settings: str) -> dict[str, str]:
        return {"PATH": str(self.bin), "HOME": str(self.clone.parent), "STUB_LOG": str(self.log), **settings}

    def zero(self, *words: str, **settings: str) -> tuple[int, str, list[str]]:
        """Run ./zero; its exit code, what it said, and the Python calls it made."""
        self.log.write_text("")
        command = ["sh", str(self.clone / "zero"), *words]
        done = subprocess.run(
            command,
            env=self.environment(**settings),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        return done.returncode, done.stdout + done.stderr, self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# Setting up once.


def test_the_first_command_sets_up_and_the_next_reuses_it(machine: Machine):
    code, _, calls = machine.zero("verify", "--stage", "1")
    assert code == 0
    assert calls[-1] == "-m zerolab verify --stage 1"
    assert f"-m venv {machine.clone}/.venv" in calls
    assert sum("pip install" in call for call in calls) == 1
    assert machine.zero("verify")[2] == ["-c ", "-m zerolab verify"]


def test_set_up_says_where_to_watch_it_and_leaves_the_rest_to_the_log(machine: Machine):
    said = machine.zero("verify")[1]
    assert "already satisfied" not in said and f"tail -f '{machine.clone}/.venv/zero.log'" in said
    assert len(said.splitlines()) <= 4
    assert machine.zero("verify")[1] == ""


def test_changed_pins_are_installed_into_the_environment_that_is_there(machine: Machine):
    machine.zero("verify")
    with (machine.clone / "requirements.txt").open("a") as pinned:
        pinned.write("one-more==1.0\n")
    calls = machine.zero("verify")[2]
    assert [call.split()[1] for call in calls if "-m" in call] == ["pip", "zerolab"]
    assert machine.zero("verify")[2] == ["-c ", "-m zerolab verify"]


def test_a_half_made_environment_is_made_again(machine: Machine):
    code, said, _ = machine.zero("verify", STUB_PIP="ERROR: something else")
    assert code == 1 and "pip failed" in said
    assert any("-m venv" in call for call in machine.zero("verify")[2])


def test_an_environment_whose_python_is_gone_is_made_again(machine: Machine):
    machine.zero("verify")
    (machine.clone / ".venv/bin/python").unlink()
    code, _, calls = machine.zero("verify")
    assert code == 0 and any("-m venv" in call for call in calls)


def test_ctrl_c_during_set_up_leaves_nothing_that_breaks_the_next_run(machine: Machine):
    running = subprocess.Popen(
        ["sh", str(machine.clone / "zero"), "verify"],
        env=machine.environment(STUB_SLOW_PIP="1"),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while "pip install" not in (machine.log.read_text() if machine.log.exists() else ""):
        time.sleep(0.01)
    code, said, _ = machine.zero("verify")
    assert code == 1 and f"Process {running.pid} is setting up" in said
    os.killpg(running.pid, signal.SIGINT)
    assert "Interrupted." in running.communicate(timeout=20)[1]
    assert running.returncode == 1
    assert machine.zero("verify")[0] == 0


def test_zerolab_torch_cpu_takes_the_cpu_build_from_binders_index(machine: Machine):
    index = re.search(r"^--extra-index-url \S+", (ROOT / "binder/requirements.txt").read_text("utf-8"), re.M)[
        0
    ]
    torch = re.search(r"^torch==\S+", (ROOT / "requirements.txt").read_text("utf-8"), re.M)[0]
    calls = machine.zero("verify", ZEROLAB_TORCH="cpu")[2]
    *first, second = [call for call in calls if "pip install" in call]
    if sys.platform == "linux":
        assert len(first) == 1 and first[0].endswith(f"--no-deps {index} {torch}+cpu")
    assert second.endswith("-r requirements.txt --config-settings editable_mode=compat -e .")
    assert machine.zero("verify")[2] == ["-c ", "-m zerolab verify"], "the choice is remembered"
    assert any("-m venv" in call for call in machine.zero("verify", ZEROLAB_TORCH="default")[2])


def test_lab_opens_the_first_notebook_with_the_whole_house_in_view(machine: Machine):
    for name in ("01_later.ipynb", "00_first.ipynb", "build.py"):
        (machine.clone / "notebooks" / name).parent.mkdir(exist_ok=True)
        (machine.clone / "notebooks" / name).touch()
    last = machine.zero("lab", "--no-browser")[2][-1]
    assert last.startswith(f"-m jupyterlab --ServerApp.root_dir={machine.clone} ")
    assert "--LabApp.default_url=/lab/tree/notebooks/00_first.ipynb" in last and last.endswith("--no-browser")


@pytest.mark.parametrize("fails, named", [("tests", "FAILED: tests"), ("--nbval", "FAILED: notebooks")])
def test_one_failing_check_fails_the_run_and_the_others_still_run(machine: Machine, fails: str, named: str):
    code, said, calls = machine.zero("test", STUB_FAILS=fails)
    assert code == 1 and named in said
    assert [call.split()[1] for call in calls[-3:]] == ["ruff", "pytest", "pytest"]


def test_all_checks_passing_is_success(machine: Machine):
    code, said, _ = machine.zero("test")
    assert code == 0 and "All passed" in said


# What stands in the way is answered with the line that helps.


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


def test_every_command_of_the_package_is_a_command_here(machine: Machine):
    for command in COMMANDS:
        assert machine.zero(command, "--help")[2][-1] == f"-m zerolab {command} --help"


def test_without_a_command_it_says_what_there_is(machine: Machine):
    code, said, calls = machine.zero()
    assert code == 0 and "./zero lab" in said and calls == []

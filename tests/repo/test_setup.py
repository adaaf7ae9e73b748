"""Promise: ./zero sets up once, runs every command of the package, and fails where a check does."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import ROOT
from support.stub_machine import Machine

import zerolab
from zerolab.__main__ import COMMANDS


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


def test_pip_leaves_it_to_python_to_compile_what_it_imports(machine: Machine):
    """To compile every file of the packages takes longer than to unpack them."""
    installs = [call for call in machine.zero("verify", ZEROLAB_TORCH="cpu")[2] if "pip install" in call]
    assert installs and all(" --no-compile " in call for call in installs)


@pytest.mark.parametrize("forbidden", ["", "1"])
def test_imports_are_compiled_once_where_python_may_not_keep_what_it_compiles(
    machine: Machine, forbidden: str
):
    """Without it each start of a process compiles torch, which takes three seconds."""
    calls = lambda: machine.zero("verify", PYTHONDONTWRITEBYTECODE=forbidden)[2]
    imports = [sum("import torch" in call for call in calls()) for _ in range(2)]
    assert imports == [len(forbidden), 0], "in set-up alone"


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


@pytest.mark.parametrize(("flags", "left_out"), [((), "-m not long"), (("--all",), "")])
def test_all_tests_run_where_all_are_asked_for(machine: Machine, flags: tuple[str, ...], left_out: str):
    (call,) = (call for call in machine.zero("test", *flags)[2] if call.startswith("-m pytest tests"))
    assert call.partition("--dist loadfile")[2].strip() == left_out


def test_another_argument_of_test_is_refused_with_the_way_to_run_one_file(machine: Machine):
    code, said, calls = machine.zero("test", "repo/test_setup.py")
    assert code == 1 and "no argument but --all" in said and "-m pytest tests/repo/test_setup.py" in said
    assert calls == []


def test_every_command_of_the_package_is_a_command_here(machine: Machine):
    for command in COMMANDS:
        assert machine.zero(command, "--help")[2][-1] == f"-m zerolab {command} --help"


def test_without_a_command_it_says_what_there_is(machine: Machine):
    code, said, calls = machine.zero()
    assert code == 0 and "./zero lab" in said and calls == []


def test_the_version_is_printed_and_sets_nothing_up(machine: Machine):
    code, said, calls = machine.zero("--version")
    assert (code, said, calls) == (0, f"zerolab {zerolab.__version__}\n", [])

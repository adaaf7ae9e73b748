"""Promise: two commands on a bare machine are enough, and what stands in their way is named with its remedy.

``./zero`` runs here among stub tools: a Python that only notes how it was called, and fails as told.
"""

import ast
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
TOOLS = ["sh", "dirname", "cat", "id", "uname", "df", "awk", "sed", "grep", "cksum"]
TOOLS += ["rm", "mkdir", "ls", "sleep", "cp"]
FILES = ["zero", "requirements.txt", "binder/requirements.txt"]

STUB_PYTHON = """#!/bin/sh
echo "$*" >>"$STUB_LOG"
case "$1 $2" in
    "-c import sys"*) echo "${STUB_VERSION:-3.12}" ;;
    "-c import ensurepip"*) exit "${STUB_NO_VENV:-0}" ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") [ -z "${STUB_SLOW_PIP:-}" ] || sleep 30; echo "${STUB_PIP:-}" >"$5"; [ -z "${STUB_PIP:-}" ] ;;
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


def pins(path: str) -> dict[str, str]:
    """Name → version; every requirement must be pinned exactly."""
    lines = [line for line in (ROOT / path).read_text("utf-8").splitlines() if line and line[0] not in "#-"]
    found = dict(line.split("==") for line in lines)
    assert len(found) == len(lines), f"{path} names a package twice"
    return found


def readme_commands() -> list[str]:
    """The commands of the README's section of that name: one to a fenced block."""
    section = (ROOT / "README.md").read_text("utf-8").split("## Two commands")[1].split("\n## ")[0]
    return [block.strip() for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL)]


# What is promised in two places agrees.


def test_continuous_integration_runs_the_readmes_test_command():
    assert readme_commands() == ["./zero lab", "./zero verify", "./zero test"]
    assert (ROOT / ".ci/run").read_text("utf-8").splitlines()[-1] == readme_commands()[-1]


@pytest.mark.parametrize("guide", ["README.md", "cloud/README.md"])
def test_the_guides_name_the_repository_of_pyproject(guide: str):
    home = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
    text = (ROOT / guide).read_text("utf-8")
    named = re.findall(
        r"(?:github\.com|colab\.research\.google\.com/github|mybinder\.org/v2/gh)/([\w-]+/[\w-]+)", text
    )
    assert named and set(named) == {home.removeprefix("https://github.com/")}


def test_the_scripts_can_be_run_from_a_clone():
    for name in ("zero", ".ci/run", "binder/postBuild", "cloud/gpu.sh"):
        assert (ROOT / name).stat().st_mode & stat.S_IXUSR, f"{name} is not executable"
        subprocess.run(["sh", "-n", str(ROOT / name)], check=True)


def test_what_the_package_needs_is_pinned_within_its_range():
    project, pinned = (
        tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"],
        pins("requirements.txt"),
    )
    for line in project["dependencies"] + project["optional-dependencies"]["course"]:
        need = Requirement(line)
        assert pinned[need.name] in need.specifier, f"{line}, but requirements.txt pins {pinned[need.name]}"
    assert {"2.11.0", "2.12.0", "2.13.0"} <= {
        v
        for v in ("2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.0")
        if v in Requirement(project["dependencies"][0]).specifier
    }


def imported(files: Iterable[Path]) -> set[str]:
    """The packages, neither ours nor Python's own, that these files import anywhere."""
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path)))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.split(".")[0].lower() for name in names} - {"zerolab"} - set(sys.stdlib_module_names)


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needs, course_needs = (
        {Requirement(line).name for line in lines}
        for lines in (project["dependencies"], project["optional-dependencies"]["course"])
    )
    course = set((ROOT / "zerolab/course").rglob("*.py"))
    assert imported(set((ROOT / "zerolab").rglob("*.py")) - course) <= needs
    assert imported(course) <= needs | course_needs


def test_binder_takes_the_same_versions_and_the_cpu_build():
    ours, binder = pins("requirements.txt"), pins("binder/requirements.txt")
    assert binder.pop("torch") == ours["torch"] + "+cpu"
    assert binder.items() <= ours.items()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needs = project["dependencies"] + project["optional-dependencies"]["course"]
    assert {Requirement(line).name for line in needs} - {"torch"} <= binder.keys()
    assert (ROOT / "binder/runtime.txt").read_text("utf-8").strip() == "python-3.12"


# Setting up once.


def test_the_first_command_sets_up_and_the_next_reuses_it(machine: Machine):
    code, _, calls = machine.zero("verify", "--stage", "1")
    assert code == 0
    assert calls[-1] == "-m zerolab verify --stage 1"
    assert f"-m venv {machine.clone}/.venv" in calls
    assert sum("pip install" in call for call in calls) == 1
    assert machine.zero("verify")[2] == ["-c ", "-m zerolab verify"]


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
    index = re.search(
        r"^--extra-index-url (\S+)", (ROOT / "binder/requirements.txt").read_text("utf-8"), re.M
    )[1]
    calls = machine.zero("verify", ZEROLAB_TORCH="cpu")[2]
    first, second = [call for call in calls if "pip install" in call]
    if sys.platform == "linux":
        assert first.endswith(
            f"--no-deps --extra-index-url {index} torch=={pins('requirements.txt')['torch']}+cpu"
        )
    assert second.endswith("-r requirements.txt -e .")
    assert machine.zero("verify")[2] == ["-c ", "-m zerolab verify"], "the choice is remembered"
    assert any("-m venv" in call for call in machine.zero("verify", ZEROLAB_TORCH="default")[2])


def test_lab_opens_the_first_notebook_with_the_whole_house_in_view(machine: Machine):
    last = machine.zero("lab", "--no-browser")[2][-1]
    assert last.startswith(f"-m jupyterlab --ServerApp.root_dir={machine.clone} ")
    assert "--LabApp.default_url=/lab/tree/notebooks/00_ranks.ipynb" in last and last.endswith("--no-browser")
    assert (ROOT / "notebooks/00_ranks.ipynb").exists()


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


def test_a_torch_that_is_no_choice(machine: Machine):
    assert "ZEROLAB_TORCH=gpu is not a choice: cpu, or default" in refused(machine, ZEROLAB_TORCH="gpu")


def test_windows_is_sent_to_wsl(machine: Machine):
    (machine.bin / "uname").unlink()
    (machine.bin / "uname").write_text("#!/bin/sh\necho MINGW64_NT-10.0\n")
    (machine.bin / "uname").chmod(0o755)
    assert "WSL" in refused(machine)


def test_without_a_command_it_says_what_there_is(machine: Machine):
    code, said, calls = machine.zero()
    assert code == 0 and "./zero lab" in said and calls == []

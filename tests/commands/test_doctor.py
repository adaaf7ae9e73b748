"""Promise: the doctor tries what the course needs, names what fails with its way out, and never hangs."""

import argparse
import errno
import faulthandler
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import PYTHONPATH, eventually, runs
from support import ROOT

from zerolab import launcher, parity
from zerolab.__main__ import main
from zerolab.doctor import probes, run
from zerolab.doctor.examine import Probe
from zerolab.doctor.probes import PROBES

LINE = re.compile(r"^(ok|FAILED|no) +((?:\S+ )*\S+) {2,}(.*)$(?:\n +way out: (.*)$)?", re.M)


def doctor(*words: str, path: str = PYTHONPATH) -> tuple[int, dict[str, tuple], str]:
    """The command in a Python of its own: its exit code, its lines by name, and all that it printed."""
    done = subprocess.run(
        [sys.executable, *words, "-m", "zerolab", "doctor"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, lines(done.stdout), done.stdout + done.stderr


def lines(printed: str) -> dict[str, tuple[str, str, str]]:
    """By name of the probe: the mark, the text and the way out."""
    return {name: (mark, text, way_out) for mark, name, text, way_out in LINE.findall(printed)}


def examined(capsys, *table: Probe, seconds: float = 60.0) -> tuple[int, dict[str, tuple]]:
    """Exit code and lines for these probes, run from this process."""
    code = run(argparse.Namespace(timeout=seconds), table)
    return code, lines(capsys.readouterr().out)


def probe(name: str) -> Probe:
    return next(each for each in PROBES if each.name == name)


def test_where_all_works_every_probe_says_so_and_the_exit_code_is_0():
    code, found, printed = doctor()
    assert code == 0, printed
    assert list(found) == [each.name for each in PROBES]
    assert all(found[each.name][0] == "ok" for each in PROBES if each.needed)
    assert found["torch"][1] == torch.__version__ and found["python"][1].endswith(sys.executable)
    assert found["gloo"][1] == "two ranks were started and added 1 and 1"
    assert "bit-identical" in found["engine"][1]
    assert printed.endswith("All that the course needs works.\n")


def test_a_bare_python_is_told_how_to_get_each_package():
    """-S: a Python without any package, as a clone has it before anything was set up."""
    code, found, printed = doctor("-S", path=str(ROOT))
    assert code == 1 and "Traceback" not in printed
    assert list(found) == [each.name for each in PROBES]
    assert found["python"][0] == found["zerolab"][0] == "ok"
    for requirement in probes.ENGINE + probes.NOTEBOOKS:
        mark, text, way_out = found[re.match(r"\w+", requirement)[0]]
        assert mark == "FAILED" and "ModuleNotFoundError" in text
        assert "./zero lab" in way_out and f"pip install '{requirement}'" in way_out
    assert found["engine"][2] == found["torch"][2], "the way out of what is missing, not of the engine"
    assert re.search(r"The course needs what failed: torch, .*, gloo, engine$", printed, re.M)


def test_a_torch_that_does_not_load(tmp_path: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    code, found, _ = doctor(path=f"{tmp_path}{os.pathsep}{PYTHONPATH}")
    assert code == 1
    for name in ("torch", "gloo", "engine"):
        assert found[name][0] == "FAILED" and "libcudart.so.13: cannot open" in found[name][1]
    assert "ZEROLAB_TORCH=cpu" in found["torch"][2]
    assert found["numpy"][0] == found["memory"][0] == "ok"


def fail(text: str):
    """A stand-in that raises, whatever it is called with."""

    def fails(*_, **__):
        raise RuntimeError(text)

    return fails


def test_ranks_that_cannot_meet(monkeypatch, capsys):
    error = launcher.WorkerError("rank 1 failed: connection refused\n\nTraceback ...", 1)
    monkeypatch.setattr(launcher, "launch", lambda *_, **__: (_ for _ in ()).throw(error))
    code, found = examined(capsys, probe("gloo"))
    assert code == 1
    assert found["gloo"][:2] == ("FAILED", "WorkerError: rank 1 failed: connection refused")
    assert "ip link set lo up" in found["gloo"][2]


def test_ranks_that_add_wrongly(monkeypatch, capsys):
    monkeypatch.setattr(launcher, "launch", lambda *_, **__: [2.0, 1.0])
    code, found = examined(capsys, probe("gloo"))
    assert code == 1 and "two ranks added 1 and 1 to 2.0 and 1.0" in found["gloo"][1]


def test_an_engine_that_differs_from_plain_training(monkeypatch, capsys):
    differing = SimpleNamespace(ok=False, max_abs_diff=0.125)
    monkeypatch.setattr(parity, "verify", lambda **_: differing)
    code, found = examined(capsys, probe("engine"))
    assert code == 1 and "differs from one process by 1.2e-01" in found["engine"][1]
    assert "./zero verify" in found["engine"][2]


@pytest.mark.parametrize(
    "version, mark", [("2.10.1", "FAILED"), ("2.11.0+cu128", "ok"), ("2.14.0", "FAILED")]
)
def test_a_package_outside_its_bounds(version: str, mark: str, monkeypatch, capsys):
    monkeypatch.setattr(probes.metadata, "version", lambda name: version)
    code, found = examined(capsys, probe("torch"))
    assert found["torch"][0] == mark and code == (mark == "FAILED")
    assert version in found["torch"][1] and (
        mark == "ok" or "torch>=2.11,<2.14 is needed" in found["torch"][1]
    )


@pytest.mark.parametrize(
    "version, mark", [((3, 10, 9), "FAILED"), ((3, 13, 0), "ok"), ((3, 14, 0), "FAILED")]
)
def test_a_python_outside_its_bounds(version: tuple, mark: str, monkeypatch, capsys):
    monkeypatch.setattr(probes.sys, "version_info", version)
    code, found = examined(capsys, probe("python"))
    assert found["python"][0] == mark and code == (mark == "FAILED")


def test_too_little_memory_and_shared_memory(monkeypatch, capsys):
    monkeypatch.setattr(probes, "available_bytes", lambda limit: [0.4e9])
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(full), raising=False)
    code, found = examined(capsys, probe("memory"), probe("shared memory"))
    assert code == 1
    assert found["memory"][0] == "FAILED" and "0.4 GB available" in found["memory"][1]
    if Path("/dev/shm").is_dir():
        assert found["shared memory"][0] == "no" and "No space left" in found["shared memory"][1]
        assert "--shm-size" in found["shared memory"][2]


def test_a_kernel_that_belongs_to_another_python(monkeypatch, capsys, tmp_path: Path):
    """Its own stays out of it: a kernel spec under JUPYTER_PATH comes first."""
    spec = tmp_path / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named zerolab' >&2\nexit 1\n")
    other.chmod(0o755)
    spec.write_text(f'{{"argv": ["{other}"], "display_name": "other", "language": "python"}}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    code, found = examined(capsys, probe("kernel"))
    assert code == 1 and f"{other}: ModuleNotFoundError: No module named zerolab" in found["kernel"][1]
    assert "ipykernel install" in found["kernel"][2]


def test_gpus_are_described_and_a_driver_without_gpus_is_no_failure_of_the_course(monkeypatch, capsys):
    driver, exists = Path("/proc/driver/nvidia/version"), Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path == driver or exists(path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    code, found = examined(capsys, probe("GPUs"))
    assert code == 0 and found["GPUs"][0] == "no" and "sees no GPU" in found["GPUs"][1]
    assert "ZEROLAB_TORCH=default" in found["GPUs"][2]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ["Tesla T4", "NVIDIA L4"][index])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(7, 5), (8, 9)][index])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (15e9, 16e9))
    monkeypatch.setattr(torch, "ones", lambda size, device: torch.full((size,), 1.0))
    text = (
        "Tesla T4, 15.0 GB free of 16.0 GB, no native bf16; NVIDIA L4, 15.0 GB free of 16.0 GB, native bf16"
    )
    assert examined(capsys, probe("GPUs")) == (0, {"GPUs": ("ok", text, "")})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_is_tried_where_there_is_a_gpu():
    _, found, printed = doctor()
    assert found["NCCL"][1] == "two ranks were started and added 1 and 1", printed
    assert torch.cuda.get_device_name(0) in found["GPUs"][1]


# A probe can do no harm.


def test_a_probe_that_hangs_is_ended_with_what_it_started(capsys, tmp_path: Path):
    def hang() -> str:
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "pid").write_text(str(child.pid))
        time.sleep(600)

    code, found = examined(
        capsys, Probe("slow", hang, "be patient"), Probe("next", lambda: "ran", ""), seconds=2
    )
    assert code == 1
    assert found["slow"] == ("FAILED", "no answer after 2 seconds", "be patient")
    assert found["next"] == ("ok", "ran", "")
    assert eventually(lambda: not runs(int((tmp_path / "pid").read_text())))


def segfault() -> None:
    faulthandler.disable()  # pytest's would print every frame
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    "crash, words",
    [
        (segfault, "its process ended with signal 11 (SIGSEGV)"),
        (lambda: os._exit(3), "its process ended with exit code 3"),
        (lambda: sys.exit("enough"), "SystemExit: enough"),
        (fail("first line\nsecond line"), "RuntimeError: first line"),
    ],
)
def test_a_probe_that_crashes_fails_alone(crash, words: str, capsys):
    code, found = examined(capsys, Probe("it", crash, "mend it"), Probe("next", lambda: "ran", ""))
    assert code == 1 and found == {"it": ("FAILED", words, "mend it"), "next": ("ok", "ran", "")}


def test_what_a_probe_prints_is_not_part_of_the_report(capfd):
    def speak() -> str:
        os.write(1, b"noise")
        os.write(2, b"noise")
        return "quiet"

    run(argparse.Namespace(timeout=60.0), [Probe("it", speak, "")])
    assert "noise" not in "".join(capfd.readouterr())


def test_what_the_course_does_not_need_may_fail(capsys):
    code, found = examined(capsys, Probe("extra", fail("absent"), "get it", needed=False))
    assert code == 0 and found["extra"] == ("no", "RuntimeError: absent", "get it")


def test_without_room_for_a_process_the_report_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(os, "fork", lambda: (_ for _ in ()).throw(OSError(errno.EAGAIN, "try again")))
    code, found = examined(capsys, Probe("it", lambda: "ran", "end some processes"))
    assert code == 1 and "no process could be started" in found["it"][1]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_timeout_that_is_none(seconds: str, capsys):
    assert main(["doctor", f"--timeout={seconds}"]) == 2
    assert f"--timeout is {seconds}; it must be a finite number" in capsys.readouterr().err


def test_it_asks_for_what_pyproject_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert list(probes.ENGINE) == project["dependencies"]
    assert list(probes.NOTEBOOKS) == project["optional-dependencies"]["course"]
    assert project["requires-python"] == ">={}.{}".format(*probes.PYTHONS[0])

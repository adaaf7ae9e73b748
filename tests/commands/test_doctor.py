"""Promise: the doctor tries what the course needs, names what fails with its way out, and never hangs."""

import errno
import os
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import PYTHONPATH
from support import ROOT
from support.doctors import doctor, examined, probe

from zerolab import launcher, parity
from zerolab.doctor import probes
from zerolab.doctor.probes import PROBES


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


def test_it_asks_for_what_pyproject_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert list(probes.ENGINE) == project["dependencies"]
    assert list(probes.NOTEBOOKS) == project["optional-dependencies"]["course"]
    assert project["requires-python"] == ">={}.{}".format(*probes.PYTHONS[0])

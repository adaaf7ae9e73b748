"""Promise: a probe of the doctor can do no harm. One that hangs or crashes is ended, and fails alone."""

import argparse
import errno
import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import eventually, runs
from support.doctors import examined, fail

from zerolab.__main__ import main
from zerolab.doctor import run
from zerolab.doctor.examine import Probe


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

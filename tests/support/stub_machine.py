"""A machine of stub tools, on which ./zero runs. Its Python only notes how it was called, or fails."""

import shutil
import subprocess
from pathlib import Path

from support import ROOT

TOOLS = ["sh", "dirname", "cat", "id", "uname", "df", "awk", "sed", "grep", "cksum"]
TOOLS += ["rm", "mkdir", "ls", "sleep", "cp", "cmp"]
FILES = ["zero", "pyproject.toml", "requirements.txt", "binder/requirements.txt", "zerolab/__main__.py"]
FILES += ["tools/colab.sh", "tools/colab.txt"]

STUB_PYTHON = """#!/bin/sh
echo "$*" >>"$STUB_LOG"
case "$1 $2" in
    "-c import sys"*) echo "${STUB_VERSION:-3.12}" ;;
    "-c import ensurepip"*) exit "${STUB_NO_VENV:-0}" ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip")
        [ -z "${STUB_SLOW_PIP:-}" ] || sleep 30
        case "$*" in *" --quiet "*) ;; *) echo "Requirement already satisfied" ;; esac
        log=/dev/null
        while [ $# -gt 0 ]; do [ "$1" != --log ] || log=$2; shift; done
        echo "${STUB_PIP:-}" >"$log"
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
        return self.run("zero", *words, **settings)

    def run(self, script: str, *words: str, **settings: str) -> tuple[int, str, list[str]]:
        """Run a script of the clone."""
        self.log.write_text("")
        command = ["sh", str(self.clone / script), *words]
        done = subprocess.run(
            command,
            env=self.environment(**settings),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        return done.returncode, done.stdout + done.stderr, self.log.read_text().splitlines()

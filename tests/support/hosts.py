"""Two hosts on one machine: network namespaces, each with its name and its /etc/hosts, and a cable between.

To a launcher they are two machines on one network. Only processor, memory and file system are shared.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

INTERFACE = "eth0"
NAMES = ("node01", "node02")
ADDRESSES = ("10.77.0.1", "10.77.0.2")

# The name, then /etc/hosts, then no name server, for there is none to wait for. Seen inside alone.
ENTER = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind /dev/null /etc/resolv.conf || exit 1
shift 2
exec "$@"
"""


class Host(NamedTuple):
    """One of the two, as a command prefix that runs a program there."""

    name: str
    namespace: str
    known: Path

    def on(self, *command: str) -> list[str]:
        """The command that runs `command` on this host."""
        inside = ["sh", "-c", ENTER, "sh", self.name, str(self.known), *command]
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", *inside]


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[list[Host]]:
    """Two hosts, gone at the end with every process on them. Skips the test where they may not be made."""
    namespaces = [f"zerolab-{os.getpid()}-{name}" for name in NAMES]
    hosts = []
    try:
        make(namespaces)
        for number, (name, namespace) in enumerate(zip(NAMES, namespaces, strict=True)):
            ip("-n", namespace, "link", "set", "lo", "up")
            ip("-n", namespace, "addr", "add", f"{ADDRESSES[number]}/24", "dev", INTERFACE)
            ip("-n", namespace, "link", "set", INTERFACE, "up")
            known = folder / f"hosts-{name}"
            known.write_text("127.0.0.1 localhost\n" + "".join(map("{} {}\n".format, ADDRESSES, NAMES)))
            hosts.append(Host(name, namespace, known))
        yield hosts
    finally:
        for namespace in namespaces:
            remove(namespace)


def make(namespaces: list[str]) -> None:
    """The two namespaces and the cable, or a skip that says what is missing."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("two hosts need iproute2 and unshare: apt-get install -y iproute2 util-linux")
    try:
        for namespace in namespaces:
            ip("netns", "add", namespace)
        first, second = namespaces
        ip(
            "link",
            "add",
            INTERFACE,
            "netns",
            first,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            second,
        )
    except subprocess.CalledProcessError as error:
        pytest.skip(f"two hosts need root with CAP_NET_ADMIN and CAP_SYS_ADMIN: {error.stderr.strip()}")


def remove(namespace: str) -> None:
    """End what still runs in a namespace, and the namespace with its end of the cable."""
    if not shutil.which("ip"):
        return
    running = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
    for pid in running.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

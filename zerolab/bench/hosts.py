"""Hosts: several on one machine, each with a cable to one switch, whose rate can be held.

They are network namespaces. To a program they are machines on one network: each has a name, an address, its
/etc/hosts, and counters of what its cable carried. Processor, memory and files are shared.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTERFACE = "eth0"
MOST_HOSTS = 250  # addresses of one network
_SWITCH = "switch"
_BURST_SECONDS = 0.004  # what a limit lets through at once: a timer's tick or so
_LEAST_BURST = 128 * 1024  # a segment that the kernel has not cut into packets yet has 64 KiB

# The name, then /etc/hosts, then no name server, for there is none to wait for. Seen inside alone.
_ENTER = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind /dev/null /etc/resolv.conf || exit 1
shift 2
exec "$@"
"""


class Unavailable(RuntimeError):
    """Hosts cannot be made on this machine. The text says what is missing."""


@dataclass(frozen=True)
class Host:
    """One of them. ``on`` gives a command that runs a program there.

    Attributes: known: its /etc/hosts.
    """

    name: str
    namespace: str
    address: str
    known: Path

    def on(self, *command: str) -> list[str]:
        """The command that runs `command` on this host."""
        inside = ["sh", "-c", _ENTER, "sh", self.name, str(self.known), *command]
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", *inside]


@contextlib.contextmanager
def hosts(count: int, folder: Path) -> Iterator[list[Host]]:
    """Make so many hosts. They are gone at the end, with every process on them, after SIGTERM too.

    Args: folder: for their /etc/hosts. Raises: Unavailable.
    """
    prefix = f"zerolab-{os.getpid()}"
    names = [f"node{number:02}" for number in range(1, count + 1)]
    addresses = [f"10.77.0.{number}" for number in range(1, count + 1)]
    made = [
        Host(name, f"{prefix}-{name}", address, folder / f"hosts-{name}")
        for name, address in zip(names, addresses, strict=True)
    ]
    switch = f"{prefix}-{_SWITCH}"
    lines = "".join(f"{address} {name}\n" for address, name in zip(addresses, names, strict=True))
    before = _exit_when_terminated()
    try:
        _make(switch, made)
        for host in made:
            host.known.write_text(f"127.0.0.1 localhost\n{lines}")
        yield made
    finally:
        with _undisturbed():
            for namespace in (*(host.namespace for host in made), switch):
                _remove(namespace)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore a second SIGTERM or Ctrl-C, which would leave a part of the hosts there. Main thread only."""
    if not _in_main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, each in zip(numbers, before, strict=True):
            signal.signal(number, each)


def _in_main_thread() -> bool:
    """Whether this thread may set what signals do."""
    return threading.current_thread() is threading.main_thread()


def _exit_when_terminated() -> Any:
    """Let SIGTERM raise SystemExit, so that `finally` runs; returns what was set. Main thread only."""
    if not _in_main_thread():
        return None
    return signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def hold(made: list[Host], bits_per_second: float | None) -> None:
    """Hold the rate of every cable, in each of its directions; None lets it go. Raises: Unavailable."""
    switch = f"{made[0].namespace.removesuffix(made[0].name)}{_SWITCH}"
    for host in made:
        for namespace, device in ((host.namespace, INTERFACE), (switch, host.name)):
            _tc(namespace, device, bits_per_second)


def _tc(namespace: str, device: str, bits_per_second: float | None) -> None:
    if not shutil.which("tc"):
        raise Unavailable("a rate needs tc: apt-get install -y iproute2")
    subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], capture_output=True)
    if bits_per_second is None:
        return
    burst = max(_LEAST_BURST, int(bits_per_second / 8 * _BURST_SECONDS))
    limit = ["tbf", "rate", f"{bits_per_second:.0f}bit", "burst", str(burst), "latency", "200ms"]
    _run(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *limit])


def _make(switch: str, made: list[Host]) -> None:
    if not shutil.which("ip") or not shutil.which("unshare"):
        raise Unavailable("hosts need iproute2 and unshare: apt-get install -y iproute2 util-linux")
    _run(["ip", "netns", "add", switch])
    _ip(switch, "link", "add", _SWITCH, "type", "bridge")
    _ip(switch, "link", "set", _SWITCH, "up")
    for host in made:
        _run(["ip", "netns", "add", host.namespace])
        ends = ["type", "veth", "peer", "name", host.name, "netns", switch]
        _ip(host.namespace, "link", "add", INTERFACE, *ends)
        _ip(switch, "link", "set", host.name, "master", _SWITCH, "up")
        _ip(host.namespace, "link", "set", "lo", "up")
        _ip(host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        _ip(host.namespace, "link", "set", INTERFACE, "up")


def _ip(namespace: str, *words: str) -> None:
    _run(["ip", "-n", namespace, *words])


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip()
        raise Unavailable(f"hosts need root with CAP_NET_ADMIN and CAP_SYS_ADMIN: {why}") from error


def _remove(namespace: str) -> None:
    """End what still runs in a namespace, and the namespace with its end of the cable."""
    if not shutil.which("ip"):
        return
    running = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
    for pid in running.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def sent_bytes() -> int:
    """What this host's cable has carried out of it, by the counter of its interface, with all headers."""
    lines = Path("/proc/net/dev").read_text("utf-8").splitlines()
    fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return int(fields[8])


def machine_seconds() -> float:
    """Processor time of this machine so far: of all programs, and of the kernel for their messages."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text("utf-8").split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")

"""SLURM's own daemons, started for a test and ended with it: munged, slurmctld and a slurmd for each node.

They share no file and no port with a SLURM that this machine may have: everything lies in one folder.
"""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel")
PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"  # where Debian has the daemons
CPUS = 4  # what each node claims to have, whatever this machine has
PATIENCE_SECONDS = 20.0  # for the daemons to answer, and to end; each takes a fraction of a second

CONFIGURATION = """
ClusterName=zerolab
SlurmctldHost={controller}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=2
MailProg=/bin/true
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def needs_slurm() -> pytest.MarkDecorator:
    """Skips a test where SLURM is not installed."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
    reason = f"{', '.join(missing)} not found: apt-get install -y slurm-wlm munge"
    return pytest.mark.skipif(bool(missing), reason=reason)


class Node(NamedTuple):
    """A node of the cluster: its host's name and address, and the prefix that runs a command there."""

    name: str
    address: str
    prefix: list[str]


def this_host() -> Node:
    """This machine itself, on its loopback."""
    return Node(socket.gethostname().partition(".")[0], "127.0.0.1", [])


@contextlib.contextmanager
def cluster(nodes: list[Node]) -> Iterator[dict[str, str]]:
    """A cluster of these nodes, as the variables with which its commands are run; gone at the end."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, contextlib.ExitStack() as daemons:
        folder = Path(name)  # a short one: a socket's path may have 107 characters
        configure(folder, nodes)
        environment = os.environ | {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": PATH}
        munge = ["munged", "--foreground", "--force", *(f"--{file}-file={folder}/munge.{file}" for file in
            ("key", "log", "pid", "seed")), f"--socket={folder}/munge.socket"]  # fmt: skip
        commands = [munge, [*nodes[0].prefix, "slurmctld", "-D"]]
        commands += [[*node.prefix, "slurmd", "-D", "-N", node.name] for node in nodes]
        for number, command in enumerate(commands):
            output = daemons.enter_context(open(folder / f"output-{number}", "w"))
            started = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            daemons.callback(end, started)
        daemons.callback(cancel_jobs, nodes[0], environment)
        await_nodes(nodes, environment, folder)
        yield {"SLURM_CONF": environment["SLURM_CONF"]}


def configure(folder: Path, nodes: list[Node]) -> None:
    """Write slurm.conf, and the key that the daemons and commands prove themselves with."""
    lines = [f"NodeName={each.name} NodeAddr={each.address} CPUs={CPUS} State=UNKNOWN" for each in nodes]
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            folder=folder,
            controller=f"{nodes[0].name}({nodes[0].address})",
            ports=free_ports(2),
            user=pwd.getpwuid(os.getuid()).pw_name,
            nodes="\n".join(lines),
        )
    )
    # Only named, never used; otherwise slurmd looks for one, and a network namespace has none.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))


def free_ports(count: int) -> list[int]:
    """Ports that nobody has on this machine."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def await_nodes(nodes: list[Node], environment: dict[str, str], folder: Path) -> None:
    """Wait until every node takes jobs; fail with what the daemons wrote."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    states: list[str] = []
    while states != ["idle"] * len(nodes):
        if time.monotonic() > deadline:
            written = "\n".join(path.read_text() for path in sorted(folder.glob("output-*")))
            raise AssertionError(f"the nodes are {states} after {PATIENCE_SECONDS:g} s:\n{written}")
        command = [*nodes[0].prefix, "sinfo", "--noheader", "--Node", "--format=%t"]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        states = found.stdout.split()
        time.sleep(0.05)


def cancel_jobs(node: Node, environment: dict[str, str]) -> None:
    """End every job that is left, and wait for its processes to be gone."""
    run = lambda *words: subprocess.run(
        [*node.prefix, *words], env=environment, capture_output=True, text=True, timeout=30
    )
    run("scancel", "--me")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while run("squeue", "--noheader").stdout.strip() and time.monotonic() < deadline:
        time.sleep(0.1)


def end(daemon: subprocess.Popen) -> None:
    """Stop a daemon that this test has started."""
    daemon.terminate()
    try:
        daemon.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()

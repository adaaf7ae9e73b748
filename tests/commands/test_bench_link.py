"""Promise: `bench --link` holds the rate of each cable, counts what it carries, and leaves no host behind."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from support.contestants import settings
from support.hosts import INTERFACE, hosts_or_skip

import zerolab
from zerolab.__main__ import main
from zerolab.bench import bench, cable, hosts, race
from zerolab.bench.contestants import FLOOR
from zerolab.bench.links import Link, in_words, parse_rate

RACERS = (FLOOR, "ddp", "zerolab-1", "zerolab-3")
FAST, SLOW = "200Mbit", "50Mbit"
TRANSFER = """
import socket, sys, time
if sys.argv[1] == "receive":
    with socket.create_server((sys.argv[2], int(sys.argv[3]))) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        with connection:
            while connection.recv(1 << 20):
                pass
else:
    with socket.create_connection((sys.argv[2], int(sys.argv[3]))) as connection:
        begin = time.monotonic()
        connection.sendall(bytes(int(sys.argv[4])))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # returns when the other side has read all and closes
        print(time.monotonic() - begin)
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> SimpleNamespace:
    """What a short run over two rates printed and saved."""
    folder = tmp_path_factory.mktemp("links")
    with hosts_or_skip(2, folder):
        pass
    flags = ["--link", FAST, SLOW, "--model", "gpt-tiny", "--rounds", "3", "--contestants", *RACERS]
    environment = os.environ | {"PYTHONPATH": str(Path(zerolab.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "zerolab", "bench", *flags, "--out", str(folder)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, printed
    saved = json.loads((folder / "links.json").read_text("utf-8"))
    return SimpleNamespace(printed=printed, folder=folder, saved=saved, pid=process.pid)


@pytest.mark.long("a test of a program that is run by hand")
def test_the_cable_carries_what_each_stage_promises(ran):
    """Of N = 2 ranks each sends Ψ a step at stage 1, and one and a half times that at stage 3."""
    psi_bytes = 4 * sum(p.numel() for p in zerolab.models.make("gpt-tiny").parameters())
    for link in ran.saved["links"]:
        sent = {name: sorted(each)[1] for name, each in link["rounds_sent_bytes"].items()}
        assert sent[FLOOR] < 0.01 * psi_bytes
        assert sent["ddp"] == pytest.approx(psi_bytes, rel=0.05)
        assert sent["zerolab-1"] == pytest.approx(psi_bytes, rel=0.05)
        assert 1.3 * psi_bytes < sent["zerolab-3"] < 1.55 * psi_bytes


def test_no_step_is_shorter_than_its_bytes_over_the_rate(ran):
    for link in ran.saved["links"]:
        for name in ("ddp", "zerolab-1", "zerolab-3"):
            sent, times = link["rounds_sent_bytes"][name], link["rounds_seconds"][name]
            pairs = zip(sent, times, strict=True)
            assert all(seconds > 0.8 * 8 * each / link["bits_per_second"] for each, seconds in pairs)


def test_the_table_the_numbers_and_the_picture_are_saved(ran):
    assert [link["bits_per_second"] for link in ran.saved["links"]] == [200e6, 50e6]
    for rate in (FAST, SLOW):
        assert f"{rate}/s in each direction of a cable: gpt-tiny, 2 hosts with a rank each" in ran.printed
    assert (ran.folder / "links.txt").read_text("utf-8") in ran.printed
    assert (ran.folder / "links.png").read_bytes().startswith(b"\x89PNG")


def test_all_have_trained_alike(ran):
    for link in ran.saved["links"]:
        off = dict(link["parameters_off_by"])
        assert off.pop(FLOOR) > 0.1
        assert max(off.values()) < 1e-3


def test_no_host_is_left(ran):
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"zerolab-{ran.pid}-" not in names


@pytest.mark.long("a test of a program that is run by hand")
def test_a_run_that_is_terminated_leaves_no_host(tmp_path: Path):
    with hosts_or_skip(2, tmp_path):
        pass
    flags = ["--link", FAST, "--model", "gpt-tiny", "--rounds", "9999", "--contestants", FLOOR, "zerolab-1"]
    command = [sys.executable, "-m", "zerolab", "bench", *flags]
    environment = os.environ | {"PYTHONPATH": str(Path(zerolab.__file__).parents[1])}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert any("round" in line for line in process.stdout), "the ranks train"
            process.terminate()
            process.communicate(timeout=60)
        finally:
            process.kill()
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"zerolab-{process.pid}-" not in names


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_stop_the_removal(number: int, tmp_path: Path, monkeypatch):
    remove, removed = hosts._remove, []

    def interrupted(namespace: str) -> None:
        os.kill(os.getpid(), number)
        remove(namespace)
        removed.append(namespace)

    with hosts_or_skip(2, tmp_path) as made:
        monkeypatch.setattr(hosts, "_remove", interrupted)
    assert removed[:2] == [host.namespace for host in made] and len(removed) == 3
    before = signal.signal(number, signal.SIG_DFL)
    signal.signal(number, before)
    assert before is not signal.SIG_IGN, "as it was before"


def test_ranks_that_were_started_end_when_the_start_of_another_is_interrupted(tmp_path: Path, monkeypatch):
    started = []

    def start(made: list, rank: int, folder: Path) -> subprocess.Popen:
        if started:
            sys.exit(143)  # as on SIGTERM
        started.append(subprocess.Popen(["sleep", "300"]))
        return started[0]

    monkeypatch.setattr(cable, "_start", start)
    try:
        with pytest.raises(SystemExit):
            cable.race_over([None, None], settings("ddp"), tmp_path)
        assert started[0].poll() == -signal.SIGKILL
    finally:
        started[0].kill()


@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 0)])
def test_a_rate_holds_in_both_directions_and_is_let_go(sender: int, receiver: int, tmp_path: Path):
    number = 5_000_000
    with hosts_or_skip(2, tmp_path) as made:
        hosts.hold(made, 20e6)
        held = seconds_to_send(made[sender], made[receiver], number)
        hosts.hold(made, None)
        free = seconds_to_send(made[sender], made[receiver], number)
    assert held > 0.9 * 8 * number / 20e6, "2 s at 20 Mbit/s"
    assert free < held / 2


def test_two_senders_share_the_rate_of_the_one_that_receives(tmp_path: Path):
    number = 2_500_000
    with hosts_or_skip(3, tmp_path) as made, ThreadPoolExecutor() as threads:
        hosts.hold(made, 20e6)
        senders = [
            threads.submit(seconds_to_send, made[rank], made[2], number, 29501 + rank) for rank in (0, 1)
        ]
        assert max(each.result() for each in senders) > 0.9 * 2 * 8 * number / 20e6, "2 s, and 1 s alone"


def seconds_to_send(sender: hosts.Host, receiver: hosts.Host, number: int, port: int = 29501) -> float:
    program = [sys.executable, "-c", TRANSFER]
    command = receiver.on(*program, "receive", receiver.address, str(port))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiving:
        try:
            assert receiving.stdout.readline() == "ready\n"
            sending = sender.on(*program, "send", receiver.address, str(port), str(number))
            return float(subprocess.check_output(sending, text=True, timeout=60))
        finally:
            receiving.kill()


def test_a_rank_that_fails_ends_the_race_with_its_last_lines(tmp_path: Path):
    def build():
        if dist.get_rank() == 1:
            raise RuntimeError("no model today")
        time.sleep(300)  # a rank that does not notice

    with hosts_or_skip(2, tmp_path) as made:
        begin = time.monotonic()
        with pytest.raises(cable.RaceFailed, match=r"(?s)rank 1 ended with exit code 1:.*no model today"):
            cable.race_over(made, settings("ddp", build=build, on_hosts=True), tmp_path)
        assert time.monotonic() - begin < 60
        for host in made:
            pids = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True)
            assert pids.stdout == ""


def test_without_root_it_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(hosts.shutil, "which", lambda name: None)
    assert main(["bench", "--link", "1Gbit", "--model", "gpt-tiny"]) == 1
    assert "hosts need iproute2 and unshare: apt-get install -y iproute2" in capsys.readouterr().err


def test_a_refusal_of_the_kernel_is_passed_on(tmp_path: Path, monkeypatch):
    def refused(command, **_):
        raise subprocess.CalledProcessError(1, command, stderr="Operation not permitted\n")

    monkeypatch.setattr(hosts.shutil, "which", lambda name: name)
    monkeypatch.setattr(hosts, "_remove", lambda namespace: None)
    monkeypatch.setattr(hosts.subprocess, "run", refused)
    refusal = pytest.raises(hosts.Unavailable, match="root with CAP_NET_ADMIN and CAP_SYS_ADMIN: Operation")
    with refusal, hosts.hosts(2, tmp_path):
        pass


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--link 1", "--link is '1': write a rate of at least 1Mbit, as 1Gbit or 400Mbit, or unlimited"),
        ("--link 1Gbit 5kbit", "--link is '5kbit': write a rate of at least 1Mbit"),
        ("--link 0.5Mbit", "--link is '0.5Mbit': write a rate of at least 1Mbit"),
        ("--link 1Gbit --sweep", "--link and --sweep are two measurements: ask for one at a time"),
        ("--link 1Gbit --backend nccl", "leave --backend nccl out"),
        (
            "--link 1Gbit --world-size 1",
            "--link takes 2 to 250 hosts with a rank each, and --world-size",
        ),
    ],
)
def test_a_bad_flag_is_named_before_anything_starts(flags: str, complaint: str, capsys, monkeypatch):
    monkeypatch.setattr(bench, "by_rate", lambda *_: pytest.fail("hosts were made"))
    assert main(["bench", "--model", "gpt-tiny", *flags.split()]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "rate"), [("1Gbit", 1e9), ("0.4Gbit", 4e8), ("10Mbit", 1e7), ("unlimited", None)]
)
def test_rates_are_read_and_written_alike(text: str, rate: float | None):
    assert parse_rate(text) == rate
    assert parse_rate(in_words(rate)) == rate


def test_the_least_is_computation_or_bytes_over_the_rate():
    """Round by round: 0.1 s and 0.3 s of computation, and 10 Mbit at 100 Mbit/s and at 40 Mbit/s."""
    result = race.Result(
        {FLOOR: [0.1, 0.3], "ddp": [0.5, 0.6], "zerolab-1": [0.2, 0.6]},
        {},
        {FLOOR: [0, 0], "ddp": [1_250_000] * 2, "zerolab-1": [1_250_000] * 2},
        {},
    )
    fast, slow, free = Link(100e6, result), Link(40e6, result), Link(None, result)
    assert (fast.messages("ddp"), slow.messages("ddp"), free.messages("ddp")) == (0.1, 0.25, 0)
    assert free.over_least("ddp").median == pytest.approx((5.0 + 2.0) / 2)
    assert fast.over_least("zerolab-1").median == pytest.approx((2.0 + 2.0) / 2)
    assert slow.over_least("zerolab-1").median == pytest.approx((0.8 + 2.0) / 2)
    assert slow.ratio("zerolab-1").median == pytest.approx((0.4 + 1.0) / 2)


def test_the_interface_of_a_host_is_what_is_counted(tmp_path: Path):
    number = 1_000_000
    program = "from zerolab.bench.hosts import sent_bytes; print(sent_bytes())"
    with hosts_or_skip(2, tmp_path) as made:
        counted = [sys.executable, "-c", program]

        def counters() -> list[int]:
            return [int(subprocess.check_output(host.on(*counted), text=True)) for host in made]

        before = counters()
        seconds_to_send(made[0], made[1], number)
        sent = [after - first for after, first in zip(counters(), before, strict=True)]
    assert number < sent[0] < 1.2 * number, INTERFACE
    assert sent[1] < 0.2 * number, "acknowledgements"


BUSY = "import time\nwhile time.process_time() < 0.5: pass"


def test_on_hosts_the_processor_time_is_the_machines_divided_by_the_ranks():
    """Another process takes half a second of it, and this one nothing."""
    alone, on_hosts = (
        race.processor_clock(settings(FLOOR, world_size=2, on_hosts=each)) for each in (False, True)
    )
    before = alone(), on_hosts()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    assert alone() - before[0] < 0.2 <= on_hosts() - before[1]

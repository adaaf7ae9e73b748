"""Promise: the same traffic. 2Ψ, 2Ψ, 2Ψ, 3Ψ, counted from messages that were really sent."""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from conftest import PYTHONPATH
from support import network, subjects

import zerolab
from zerolab import cost
from zerolab.collectives import collective_check

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

WORLD_SIZES = (1, 2, 3, 4)
STEPS = 3
MODELS = ("gpt", "ladder", "patchwork", "headed")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Wire:
    """Counts what is handed to the process group, beside the trace: a wrapper around each of its methods."""

    def __init__(self):
        self.sent_bytes, self.received_bytes, self.control_bytes, self.calls = 0, 0, 0, Counter()
        for name in ("broadcast", "allreduce", "_allgather_base", "alltoall_base"):
            setattr(dist.ProcessGroup, name, self._called(name, getattr(dist.ProcessGroup, name)))
        for name in ("send", "recv"):
            setattr(dist.ProcessGroup, name, self._counted(name, getattr(dist.ProcessGroup, name)))

    def _called(self, name: str, method):
        @functools.wraps(method)
        def called(group, *args):
            self.calls[name] += 1
            return method(group, *args)

        return called

    def _counted(self, name: str, method):
        @functools.wraps(method)
        def counted(group, tensors: list[torch.Tensor], peer: int, tag: int):
            self.calls[name] += 1
            nbytes = sum(tensor.nbytes for tensor in tensors)
            control = tag % 2**20 >= 2**20 - 2**12 - 1  # not a unit's: collective checks and exchanges
            self.control_bytes += nbytes * (name == "send" and control)
            self.sent_bytes += nbytes * (name == "send" and not control)
            self.received_bytes += nbytes * (name == "recv" and not control)
            return method(group, tensors, peer, tag)

        return counted

    def read(self) -> tuple[int, int, int, Counter]:
        """What came together since the last reading."""
        found = self.sent_bytes, self.received_bytes, self.control_bytes, self.calls
        self.sent_bytes, self.received_bytes, self.control_bytes, self.calls = 0, 0, 0, Counter()
        return found


def count_steps(cases: list) -> list[tuple]:
    """For each case the trace's traffic of the last step, what the wire saw of it, and the units' sizes."""
    wire, results = Wire(), []
    for subject, stage in cases:
        build, inputs = subjects.SUBJECTS[subject]
        model = build()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
        for step in range(STEPS):
            wire.read()
            optimizer.zero_grad()
            model(*inputs(step, optimizer.rank)).backward()
            optimizer.step()
            optimizer.engine.finish_gathers()  # those that the next forward would wait for
        units = [(unit.name, unit.trainable, unit.numel, unit.padded_numel) for unit in optimizer.units]
        results.append((optimizer.trace.traffic(STEPS - 1), *wire.read(), units))
    return results


CASES = [(subject, stage) for subject in MODELS for stage in range(4)]


@functools.cache
def counted(world_size: int) -> list[list[tuple]]:
    """By case, then by rank."""
    return list(zip(*zerolab.launch(count_steps, world_size, CASES), strict=True))


def passes(stage: int, name: str, trainable: bool) -> int:
    """How often a unit's parameters or gradients cross the wire in a step, spelled out."""
    if stage == 3:
        gathers = 1 if name.startswith("root") else 2
        return gathers + 1 if trainable else gathers
    return 2 if trainable else 0


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("subject, stage", CASES)
def test_the_payload_is_2_2_2_and_3_psi(subject: str, stage: int, world_size: int):
    for traffic, *_, units in counted(world_size)[CASES.index((subject, stage))]:
        volumes = [numel * passes(stage, name, trainable) for name, trainable, numel, _ in units]
        assert traffic.logical_bytes == 4 * sum(volumes)
        psi = sum(numel for _, _, numel, _ in units)
        root = sum(numel for name, _, numel, _ in units if name == "root")
        if subject != "patchwork":  # which has frozen parameters: they are only gathered
            kept = root if stage == 3 else 0
            assert traffic.logical_bytes == 4 * (cost.communication_volume(psi, stage) - kept)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("subject, stage", CASES)
def test_the_wire_carries_all_but_a_ranks_own_share(subject: str, stage: int, world_size: int):
    """(N-1)/N of the payload with its padding, sent and received alike, and nothing goes another way."""
    ranks = counted(world_size)[CASES.index((subject, stage))]
    for traffic, sent_bytes, received_bytes, _, calls, units in ranks:
        volumes = [padded * passes(stage, name, trainable) for name, trainable, _, padded in units]
        assert traffic.wire_bytes * world_size == 4 * sum(volumes) * (world_size - 1)
        assert sent_bytes == received_bytes == traffic.wire_bytes
        assert calls.keys() <= {"send", "recv"}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_each_operation_moves(stage: int):
    for traffic, *_, units in counted(3)[CASES.index(("gpt", stage))]:
        payload = 4 * sum(numel for _, _, numel, _ in units)
        root = 4 * sum(numel for name, _, numel, _ in units if name == "root")
        expected = {
            0: {"all_reduce": 2 * payload},
            1: {"reduce_scatter": payload, "all_gather": payload},
            2: {"reduce_scatter": payload, "all_gather": payload},
            3: {"reduce_scatter": payload, "all_gather": 2 * payload - root},
        }
        assert {op: part.logical_bytes for op, part in traffic.by_op.items()} == expected[stage]
        assert sum(part.wire_bytes for part in traffic.by_op.values()) == traffic.wire_bytes


def broadcasts_at_construction() -> tuple[int, int]:
    """The bytes that this rank's broadcasts count as sent, and those of the parameters with their padding."""
    model = subjects.SUBJECTS["ladder"][0]()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=1, lr=0.1)
    sent = [event.wire_bytes for event in optimizer.trace.step(-1) if event.op == "broadcast"]
    return sum(sent), 4 * sum(unit.padded_numel for unit in optimizer.units)


def test_a_broadcast_is_counted_by_the_rank_that_sends():
    (sent, params_bytes), *others = zerolab.launch(broadcasts_at_construction, 3)
    assert sent == params_bytes and all(other == (0, params_bytes) for other in others)


def test_control_messages_are_small_and_counted_apart():
    """A rank sends a check for each collective, and a byte a parameter and a digest in the exchange."""
    for traffic, _, _, control_bytes, _, units in counted(4)[CASES.index(("gpt", 2))]:
        announced_bytes = collective_check.MESSAGE_BYTES * (2 * len(units) + 1)
        assert announced_bytes < control_bytes < announced_bytes + 1000
        assert traffic.control_bytes == control_bytes
        assert "exchange" not in traffic.by_op
    for traffic, *_ in counted(1)[CASES.index(("gpt", 2))]:
        assert traffic.control_bytes == 0


@pytest.mark.parametrize("reduce_each, psis", [(True, (4, 3, 3, 6)), (False, (2, 2, 2, 5))])
def test_two_micro_batches_are_reduced_each_or_under_no_sync_once(reduce_each: bool, psis: tuple):
    """So stage 2 moves (M+1)Ψ and stage 3 3MΨ; once alone they keep a whole gradient and save Ψ a pass."""

    def accumulate(stage: int) -> tuple[int, int]:
        build, inputs = subjects.SUBJECTS["ladder"]
        model = build()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1, prefetch=0)
        with nullcontext() if reduce_each else optimizer.no_sync():
            model(*inputs(0, optimizer.rank)).backward()
        model(*inputs(1, optimizer.rank)).backward()
        optimizer.step()
        return optimizer.trace.traffic(0).logical_bytes, sum(unit.numel for unit in optimizer.units)

    for ranks in zerolab.launch(lambda: [accumulate(stage) for stage in range(4)], 2):
        assert [logical_bytes / (4 * psi) for logical_bytes, psi in ranks] == list(psis)
        assert list(psis) == [cost.communication_volume(1, stage, 2, reduce_each) for stage in range(4)]


# The kernel's own count.

NETWORK_PROGRAM = """
import fcntl, json, socket, struct
import zerolab
from support import network

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:  # bring lo up: SIOCSIFFLAGS, IFF_UP
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 1))

ranks = zerolab.launch(lambda: [network.count(stage, "lo") for stage in range(4)], 3, timeout=60)
print(json.dumps([
    (counts[0].sent_bytes, sum(each.wire_bytes for each in counts), counts[0].again_bytes)
    for counts in zip(*ranks)
]))
"""


def private_network() -> list[str] | None:
    """A command prefix that gives a program a network of its own, or None where that is not permitted."""
    for prefix in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        if shutil.which("unshare") and Path("/proc/net/dev").exists():
            tried = subprocess.run([*prefix, "true"], capture_output=True, timeout=10)
            if tried.returncode == 0:
                return prefix
    return None


def test_the_network_interface_counts_the_same_bytes(tmp_path: Path):
    """The loopback's, which all ranks share; tests/launcher/test_two_hosts.py has an interface for each."""
    prefix = private_network()
    if prefix is None:
        pytest.skip("needs `unshare --net`, to have a loopback interface that nobody else uses")
    program = tmp_path / "program.py"
    program.write_text(NETWORK_PROGRAM)
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [*prefix, sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for interface_bytes, trace_bytes, again_bytes in json.loads(done.stdout):
        assert network.agrees(interface_bytes, trace_bytes, again_bytes)

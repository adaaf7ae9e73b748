"""Promise: ranks on two hosts train as ranks on one, and the cable carries the bytes that the ledger says.

The hosts are network namespaces, see hosts.py; what is run there is what docs/launchers.md gives.
"""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import ADDRESSES, INTERFACE, Host, two_hosts
from support.launchers import check, guide_command, run_all, shell
from support.network import Count, agrees, count

import zerolab
from zerolab.bench.hosts import hold


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with two_hosts(tmp_path) as made:
        yield made


def on_each(hosts: list[Host], command: str) -> list[list[str]]:
    return [host.on(*shell(command)) for host in hosts]


def test_torchrun_with_its_c10d_rendezvous(hosts: list[Host], tmp_path: Path):
    command = f"{guide_command('torchrun, on each of two hosts')} --save {tmp_path / 'saved'}"
    runs = run_all(on_each(hosts, command), tmp_path)
    check(runs, tmp_path / "saved")
    assert [set(done.losses) for done in runs] in ([{0}, {1}], [{1}, {0}]), "a rank on each host"


NETWORK_PROGRAM = """
    import json, torch.distributed as dist, zerolab
    from pathlib import Path
    from support import network
    zerolab.init_process_group()
    counts = [network.count(stage, "eth0") for stage in range(4)]
    Path(f"counts{dist.get_rank()}.json").write_text(json.dumps(counts))
"""


def counts_by_rank(folder: Path) -> list[list[Count]]:
    """What each rank wrote into its own file: lines that ranks print at the same moment can mix."""
    files = sorted(folder.glob("counts*.json"))
    return [[Count(*each) for each in json.loads(file.read_text())] for file in files]


def test_the_cable_carries_the_bytes_of_the_ledger(hosts: list[Host], tmp_path: Path):
    """On each host, in each direction, at each stage; what one rank receives is what the other sent."""
    (tmp_path / "program.py").write_text(textwrap.dedent(NETWORK_PROGRAM))
    torchrun = guide_command("torchrun, on each of two hosts").partition(" -m zerolab")[0]
    runs = run_all(on_each(hosts, f"{torchrun} program.py"), tmp_path)
    assert all(done.returncode == 0 for done in runs), [done.output for done in runs]
    first, second = counts_by_rank(tmp_path)
    assert len(first) == len(second) == 4
    for stage, (one, other) in enumerate(zip(first, second, strict=True)):
        for sender, receiver in ((one, other), (other, one)):
            sent = sender.wire_bytes, sender.again_bytes
            assert agrees(sender.sent_bytes, *sent), (stage, sender)
            assert agrees(receiver.received_bytes, *sent), (stage, sender, receiver)


GROUPS_PROGRAM = """
    import json, torch.distributed as dist, zerolab
    from pathlib import Path
    from support import network
    zerolab.init_process_group()
    counts = [network.count(3, "eth0", 2, shard_size) for shard_size in (None, 2)]
    Path(f"counts{dist.get_rank()}.json").write_text(json.dumps(counts))
"""


@pytest.mark.long("tests/promises/test_hybrid.py counts the same bytes on one host")
def test_hybrid_sharding_leaves_the_cable_a_share_of_the_gradients(hosts: list[Host], tmp_path: Path):
    """Two ranks on each of two hosts, and a cable of 200 Mbit/s. A host sends Ψ, and at stage 3 it sends 3Ψ.

    The bits are those of four ranks on one host.
    """
    hold(hosts, 200e6)
    (tmp_path / "program.py").write_text(textwrap.dedent(GROUPS_PROGRAM))
    torchrun = guide_command("torchrun, on each of two hosts").partition(" -m zerolab")[0]
    command = f"{torchrun.replace('--nproc-per-node 1', '--nproc-per-node 2')} program.py"
    runs = run_all(on_each(hosts, command), tmp_path)
    assert all(done.returncode == 0 for done in runs), [done.output for done in runs]
    by_rank = counts_by_rank(tmp_path)
    assert len(by_rank) == 4
    psi_bytes = 4 * 4 * (512 * 512 + 512)
    for place, (shard_size, passes) in enumerate(((None, 3), (2, 1))):
        found = [of_rank[place] for of_rank in by_rank]
        assert {each.between_bytes for each in found} == {2 * passes * psi_bytes // 2}, "over two steps"
        for each in found:
            assert agrees(each.sent_bytes, 2 * each.between_bytes, each.again_bytes), each
        on_one_host = zerolab.launch(count, 4, 3, "lo", 2, shard_size)
        assert {each.checksum for each in found} == {each.checksum for each in on_one_host}


FAILING_PROGRAM = """
    import os, signal, torch, torch.distributed as dist, zerolab
    zerolab.init_process_group()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
"""


def test_a_rank_that_dies_on_one_host_ends_the_job_on_both(hosts: list[Host], tmp_path: Path):
    (tmp_path / "program.py").write_text(textwrap.dedent(FAILING_PROGRAM))
    torchrun = guide_command("torchrun, on each of two hosts").partition(" -m zerolab")[0]
    runs = run_all(on_each(hosts, f"{torchrun} program.py"), tmp_path)
    assert all(done.returncode != 0 for done in runs)
    assert any("SIGKILL" in done.output for done in runs)


def test_a_host_whose_name_leads_to_its_loopback_is_refused_at_once(hosts: list[Host], tmp_path: Path):
    """As Debian and Ubuntu write /etc/hosts; and with the way out that the error names it trains."""
    for host, address in zip(hosts, ADDRESSES, strict=True):
        host.known.write_text(host.known.read_text().replace(address, "127.0.1.1"))
    command = f"{guide_command('torchrun').partition(' -m ')[2]} --epochs 1 --steps 5"
    place = f"WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR={ADDRESSES[0]} MASTER_PORT=29500"
    commands = [
        host.on("sh", "-c", f"RANK={rank} {place} exec python -m {command}")
        for rank, host in enumerate(hosts)
    ]
    for done in run_all(commands, tmp_path):
        assert done.returncode == 2
        assert "resolves to 127.0.1.1" in done.output and f"of these: {INTERFACE}\n" in done.output
    for done in run_all(commands, tmp_path, GLOO_SOCKET_IFNAME=INTERFACE):
        assert done.returncode == 0, done.output

"""Promise: whatever befalls a rank or the caller, the culprit is named and nothing is left behind."""

import ctypes
import errno
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import PYTHONPATH, descendants, eventually, run_script, runs

import zerolab
from zerolab.launcher import forkclient, stacks
from zerolab.launcher.failures import Failure, first_cause

DEADLINE_SECONDS = 3.0  # by then all ranks are where they stay, on a busy machine too


@pytest.fixture(autouse=True)
def no_file_left(monkeypatch, tmp_path_factory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield
    assert list(directory.iterdir()) == []


def fail(fn, world_size: int, *args, **kwargs) -> zerolab.WorkerError:
    with pytest.raises(zerolab.WorkerError) as caught:
        zerolab.launch(fn, world_size, *args, **kwargs)
    assert no_rank_left()
    return caught.value


def no_rank_left() -> bool:
    return descendants(forkclient.current_pid()) == set()


def all_reduce_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(1000))


def save_and_be_slow_to_tell(culprit: int, path: Path, disk_is_full: bool) -> None:
    """A save that fails on one rank is an error on all of them; here the culprit reports its own last."""
    from zerolab.checkpoint import records

    def full(value, file) -> None:
        raise OSError(errno.ENOSPC, "no room")

    optimizer = zerolab.ZeroOptimizer(torch.nn.Linear(8, 8), torch.optim.SGD, lr=0.1)
    if disk_is_full and dist.get_rank() == culprit:
        records._put = full
    try:
        zerolab.save(optimizer, path)
    finally:
        time.sleep(1.0 * (dist.get_rank() == culprit))


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_could_not_write_is_named_not_those_it_told(culprit: int, tmp_path: Path):
    error = fail(save_and_be_slow_to_tell, 3, culprit, tmp_path / "run", True)
    assert error.rank == culprit
    assert f"rank {culprit} failed: OSError: {tmp_path}" in str(error)
    assert f"rank {culprit} failed with OSError: [Errno {errno.ENOSPC}] no room" in str(error)


def test_rank_0_is_named_for_what_it_does_for_all(tmp_path: Path):
    (tmp_path / "file").touch()
    error = fail(save_and_be_slow_to_tell, 3, 0, tmp_path / "file", False)
    assert error.rank == 0 and str(error).startswith("rank 0 failed: FileExistsError")


def test_the_error_begins_on_a_line_of_its_own(capsys):
    """A progress bar leaves its line unfinished; where nothing fails it stays as the rank wrote it."""

    def work(error) -> None:
        print("50%", end="", flush=True)
        print("loss", end="\r", file=sys.stderr, flush=True)
        if error:
            raise error

    zerolab.launch(work, 1, None)
    assert capsys.readouterr() == ("50%", "loss\r")
    fail(work, 1, ValueError())
    assert capsys.readouterr() == ("50%\n", "loss\r")


class Unbuildable(Exception):
    def __init__(self, first, second):
        super().__init__("needs two")


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_rank_that_raised_is_named_with_its_traceback(culprit: int):
    def work() -> None:
        dist.barrier()
        if dist.get_rank() == culprit:
            {}["absent"]
        all_reduce_for_ever()

    error = fail(work, 3)
    assert error.rank == culprit and error.exitcode is None
    assert str(error).startswith(f"rank {culprit} failed: KeyError: 'absent'")
    assert '{}["absent"]' in str(error) and "rank.py" not in str(error)
    assert isinstance(error.__cause__, KeyError)


def test_the_first_of_two_that_raise_is_named():
    def work() -> None:
        time.sleep(0.1 * (1 - dist.get_rank()))
        raise ValueError(dist.get_rank())

    assert fail(work, 2).rank == 1


def test_an_exception_that_cannot_be_rebuilt_is_told_in_words():
    def work() -> None:
        raise Unbuildable(1, 2)

    error = fail(work, 1)
    assert "Unbuildable: needs two" in str(error) and error.__cause__ is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_rank_that_was_killed_is_named_not_those_that_lost_it(culprit: int, number: signal.Signals):
    def work() -> None:
        dist.barrier()
        if dist.get_rank() == culprit:
            os.kill(os.getpid(), number)
        all_reduce_for_ever()

    error = fail(work, 3)
    assert (error.rank, error.exitcode) == (culprit, -number)
    assert f"rank {culprit} was killed by signal {int(number)} ({number.name}" in str(error)


def test_a_crash_shows_where_the_rank_was():
    def crash() -> None:
        ctypes.string_at(0)

    error = fail(crash, 1)
    assert "SIGSEGV" in str(error) and "in crash" in str(error)


@pytest.mark.parametrize("code", [0, 5])
def test_a_rank_that_ends_itself_is_named(code: int):
    def leave(end) -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            end(code)
        all_reduce_for_ever()

    error = fail(leave, 2, sys.exit)
    assert error.rank == 1 and f"sys.exit({code})" in str(error)
    error = fail(leave, 2, os._exit)
    assert (error.rank, error.exitcode) == (1, code) and f"exited with code {code}" in str(error)


def test_a_rank_that_returns_early_leaves_no_other_waiting():
    def work() -> None:
        if dist.get_rank() == 0:
            all_reduce_for_ever()

    error = fail(work, 2)
    assert error.rank == 0 and "waited for a message of rank 1, which had returned" in str(error)


def sleep() -> None:
    time.sleep(1000)


def loop() -> None:
    while True:
        pass


def loop_in_c() -> None:
    sum(range(10**15))  # never lets another thread run


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_ranks_that_hang_are_named_at_the_deadline():
    """Asleep, in Python, in C, stopped: each is told from the ranks that wait for it."""
    hangs = [sleep, loop, loop_in_c, stop]

    def work() -> None:
        rank = dist.get_rank()
        dist.barrier()
        if 0 < rank <= len(hangs):
            hangs[rank - 1]()
        all_reduce_for_ever()

    with pytest.raises(zerolab.LaunchTimeout) as caught:
        zerolab.launch(work, 6, timeout=DEADLINE_SECONDS)
    assert no_rank_left()
    message = str(caught.value)
    assert caught.value.ranks == (1, 2, 3, 4), message
    assert message.startswith("ranks 1, 2, 3, 4 still ran code of its own after 3 s")
    assert message.endswith("waiting for another rank: ranks 0, 5")
    for hang in (sleep, loop, loop_in_c):
        assert f"in {hang.__name__}" in message
    assert "the process does not answer" in message


def test_waiting_for_others_is_told_from_hanging():
    """Point to point, asynchronous work, and backward hooks are collectives too."""

    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x

        @staticmethod
        def backward(context, gradient):
            dist.all_reduce(gradient)
            return gradient

    def work() -> None:
        rank = dist.get_rank()
        if rank == 1:
            dist.recv(torch.ones(1), src=0)
        if rank == 2:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            work.wait()
        if rank == 3:
            Reduce.apply(torch.ones(1, requires_grad=True)).backward()
        time.sleep(1000)

    with pytest.raises(zerolab.LaunchTimeout) as caught:
        zerolab.launch(work, 4, timeout=DEADLINE_SECONDS)
    assert caught.value.ranks == (0,), caught.value
    assert "time.sleep(1000)" in str(caught.value)


BACKWARD_ON_A_GPU = """
Thread 0x00007f0000000002 (most recent call first):
  File "/lib/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/code/hooks.py", line 7 in reduce

Current thread 0x00007f0000000001 (most recent call first):
  File "/lib/torch/autograd/graph.py", line 800 in _engine_run_backward
  File "/lib/torch/_tensor.py", line 600 in backward
  File "/code/train.py", line 5 in step
  File "/lib/zerolab/launcher/rank.py", line 90 in call
  File "/lib/zerolab/launcher/forkserver.py", line 160 in become_rank
"""


def test_a_hook_that_waits_in_the_devices_own_thread_waits():
    threads = stacks.parse(BACKWARD_ON_A_GPU)
    assert [frame.function for frame in stacks.main_thread(threads)] == [
        "_engine_run_backward",
        "backward",
        "step",
    ]
    assert stacks.in_collective(threads)
    assert not stacks.in_collective(threads[1:])


def test_ranks_that_all_wait_are_asked_whether_they_agree():
    def work() -> None:
        if dist.get_rank() == 0:
            dist.recv(torch.ones(1), src=1)
        if dist.get_rank() == 1:
            dist.recv(torch.ones(1), src=0)

    with pytest.raises(zerolab.LaunchTimeout, match="do all make the same calls") as caught:
        zerolab.launch(work, 3, timeout=DEADLINE_SECONDS)
    assert caught.value.ranks == () and "returned: rank 2" in str(caught.value)
    assert "every rank that has not returned waits for another" in str(caught.value)


def test_what_a_rank_started_ends_with_it(tmp_path: Path):
    def work() -> None:
        child = subprocess.Popen(["sleep", "1000"])
        (tmp_path / f"{dist.get_rank()}").write_text(str(child.pid))
        dist.barrier()
        if dist.get_rank() == 0:
            raise ValueError
        time.sleep(1000)

    fail(work, 2)
    children = [int((tmp_path / f"{rank}").read_text()) for rank in range(2)]
    assert eventually(lambda: not any(map(runs, children)))


@pytest.mark.parametrize(
    "world_size, error, words",
    [
        (0, ValueError, "between 1 and"),
        (-1, ValueError, "got -1"),
        (10**6, ValueError, "got 1000000"),
        (True, TypeError, "got True"),
        (2.0, TypeError, "got 2.0"),
        ("2", TypeError, "got '2'"),
        (None, TypeError, "got None"),
    ],
)
def test_a_world_size_that_cannot_be_is_refused(world_size, error, words):
    with pytest.raises(error, match=words):
        zerolab.launch(int, world_size)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "3"])
def test_a_timeout_that_cannot_be_is_refused(timeout):
    with pytest.raises((ValueError, TypeError), match="timeout must be"):
        zerolab.launch(int, 1, timeout=timeout)


def test_other_bad_arguments_are_refused():
    with pytest.raises(TypeError, match=r"fn must be a function.*got 3"):
        zerolab.launch(3, 2)
    with pytest.raises(ValueError, match="backend must be one of auto, gloo, nccl, got 'mpi'"):
        zerolab.launch(int, 1, backend="mpi")


def test_nccl_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="at least 1 CUDA device for 2 ranks, found 0"):
        zerolab.launch(int, 2, backend="nccl")


def test_a_launch_inside_a_rank_is_refused():
    assert "called inside rank 0" in str(fail(lambda: zerolab.launch(int, 1), 1))


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot send argument 1 \(a lock\)"):
        zerolab.launch(print, 2, 5, lock)
    with pytest.raises(TypeError, match=r"cannot send argument 'key' \(a lock\)"):
        zerolab.launch(print, 2, key=lock)
    with pytest.raises(TypeError, match=r"the variable 'lock' \(a lock\) that <lambda> uses"):
        zerolab.launch(lambda: lock, 2)
    with pytest.raises(TypeError, match=r"cannot send fn \(a builtin_function_or_method\)"):
        zerolab.launch(lock.acquire, 2)


def test_a_result_that_cannot_be_sent_is_named():
    error = fail(lambda: threading.Lock() if dist.get_rank() == 1 else 0, 2)
    assert error.rank == 1 and "its result, of type lock, cannot be pickled" in str(error)


def refuse_to_be_rebuilt(where: str):
    """Fails to unpickle in ranks or in the caller, whichever is named."""
    from zerolab.launcher import rank

    if (rank.current is None) == (where == "here"):
        raise LookupError("no such thing here")
    return 0


class Picky:
    def __init__(self, where: str):
        self.where = where

    def __reduce__(self):
        return refuse_to_be_rebuilt, (self.where,)


def test_what_cannot_be_rebuilt_is_named():
    error = fail(print, 2, Picky("there"))
    assert "cannot be rebuilt in a rank: no such thing here" in str(error)
    error = fail(lambda: Picky("here"), 2)
    assert error.rank == 0 and "result cannot be rebuilt here: no such thing here" in str(error)


def test_a_killed_fork_server_is_told_and_replaced():
    def kill() -> None:
        pid = forkclient.current().pid
        assert eventually(lambda: len(descendants(pid)) == 2)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RuntimeError, match="the process that starts ranks was killed"):
        zerolab.launch(time.sleep, 2, 1000)
    killer.join()
    assert zerolab.launch(int, 2, "3") == [3, 3]


ORPHANING_PROGRAM = """
    import os, time, zerolab
    def hang():
        print("working", flush=True)
        {hang}
    zerolab.launch(int, 1, backend="gloo")
    if (bystander := os.fork()) == 0:  # it holds a copy of all that the caller had open
        os.closerange(0, 3)
        time.sleep(1000)
    print(bystander, flush=True)
    zerolab.launch(hang, 2, backend="gloo")
"""


@pytest.mark.parametrize(
    "number, hang", [(signal.SIGKILL, "sum(range(10**15))"), (signal.SIGINT, "time.sleep(1000)")]
)
def test_no_rank_outlives_its_caller(tmp_path: Path, number: signal.Signals, hang: str):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(ORPHANING_PROGRAM.format(hang=hang)))
    with subprocess.Popen(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as caller:
        bystander = int(caller.stdout.readline())
        assert caller.stdout.readline() == "working\n"
        family = descendants(caller.pid) - {bystander}
        assert len(family) == 3, "the fork server and two ranks"
        os.kill(caller.pid, number)
        _, complaint = caller.communicate(timeout=60)
        gone = eventually(lambda: not any(map(runs, family)))
        os.kill(bystander, signal.SIGKILL)
    assert gone
    assert list(tmp_path.glob("zerolab-*")) == []
    assert caller.returncode == -number and ("KeyboardInterrupt" in complaint) == (number == signal.SIGINT)


CROWDED_PROGRAM = """
    import errno, os, socket
    from zerolab.launcher import forkserver, protocol

    def no_room():
        raise OSError(errno.EAGAIN, "no room")

    os.fork = no_room
    read, write = os.pipe()
    ours, theirs = socket.socketpair()
    forkserver.Server(theirs).start_ranks(1, 2, "nowhere", [write])
    event = protocol.Event._make(protocol.EVENT.unpack(os.read(read, 100)))
    print(event.kind == protocol.NOT_STARTED, event.rank, event.value == errno.EAGAIN)
"""


def test_a_system_without_room_for_a_rank_is_told(tmp_path: Path):
    assert run_script(CROWDED_PROGRAM, tmp_path).split() == ["True", "0", "True"]


def test_deaths_come_before_exceptions_and_what_befell_another_rank_comes_last():
    peer = Failure(
        0, 1.0, summary="RuntimeError: [gloo/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9"
    )
    vanished = Failure(
        6, 1.2, summary="RuntimeError: Read error. This is typically caused by a remote worker"
    )
    told = Failure(5, 1.5, summary="OSError: no room", raised_on=1)
    raised = Failure(1, 2.0, summary="OSError: no room", raised_on=1)
    left = Failure(2, 3.0, exitcode=1)
    killed = Failure(3, 4.0, exitcode=-9)
    later = Failure(4, 5.0, exitcode=-9)
    failures = [peer, vanished, told, left, later, killed, raised]
    for expected in (killed, later, raised, left, peer, vanished, told):
        assert first_cause(failures) == expected
        failures.remove(expected)

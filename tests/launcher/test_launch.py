"""Promise: a function given to launch runs on N real processes, as if it had been called here."""

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import descendants, run_script

import zerolab
from zerolab.launcher import forkclient, launcher


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_by_rank_from_one_process_group_of_other_processes(world_size: int):
    def work(offset: int, scale: int = 1) -> tuple:
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        return dist.get_rank(), dist.get_world_size(), total.item() * scale + offset, os.getpid()

    results = zerolab.launch(work, world_size, 10, scale=2)
    total = world_size * (world_size + 1) / 2
    assert [result[:3] for result in results] == [(r, world_size, 2 * total + 10) for r in range(world_size)]
    assert len({os.getpid(), *(result[3] for result in results)}) == world_size + 1


def test_results_and_arguments_may_be_tensors_and_large():
    values = torch.arange(300_000, dtype=torch.float64)
    for rank, result in enumerate(zerolab.launch(lambda x: x * dist.get_rank(), 2, values)):
        assert torch.equal(result, values * rank)


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool]
)
def test_results_and_arguments_may_be_tensors_of_any_dtype(dtype: torch.dtype):
    sent = torch.tensor([[1, 0, 1], [2, 3, 1]]).to(dtype).t()
    (got,) = zerolab.launch(lambda tensor: tensor, 1, sent)
    assert (got.dtype, got.stride()) == (dtype, sent.stride())
    assert torch.equal(got.to(torch.float32), sent.to(torch.float32))


def test_ranks_see_the_environment_directory_and_path_of_this_moment(monkeypatch, tmp_path: Path):
    zerolab.launch(int, 1)  # the fork server is older than what follows
    monkeypatch.setenv("ZEROLAB_TEST", "today")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program", "--flag"])

    def look() -> tuple:
        names = ("ZEROLAB_TEST", "HOME", "RANK", "LOCAL_RANK", "WORLD_SIZE")
        return [os.environ.get(name) for name in names], os.getcwd(), sys.path[0], sys.argv

    for rank, (environment, directory, first, arguments) in enumerate(zerolab.launch(look, 2)):
        assert environment == ["today", None, str(rank), str(rank), "2"]
        assert directory == first == str(tmp_path) and arguments == ["program", "--flag"]


def test_an_edited_module_is_seen_by_the_next_launch(monkeypatch, tmp_path: Path):
    monkeypatch.syspath_prepend(tmp_path)

    def answer() -> int:
        import edited_module

        return edited_module.ANSWER

    for value in (1, 22, 333):  # of different length: a source's age is noted in whole seconds
        (tmp_path / "edited_module.py").write_text(f"ANSWER = {value}\n")
        assert zerolab.launch(answer, 1) == [value]


def test_an_edited_zerolab_is_seen_by_the_next_launch(monkeypatch, tmp_path: Path):
    zerolab.launch(int, 1)
    shutil.copytree(Path(zerolab.__file__).parent, tmp_path / "zerolab")
    with open(tmp_path / "zerolab" / "__init__.py", "a") as file:
        file.write("\nEDITED = 'yes'\n")
    monkeypatch.syspath_prepend(tmp_path)

    def look() -> str:
        import zerolab as theirs

        return theirs.EDITED

    assert zerolab.launch(look, 1) == ["yes"]


def test_rank_0_is_printed_while_it_runs(monkeypatch, tmp_path: Path):
    class Ear:
        def write(self, text: str) -> None:
            if "ready" in text:
                (tmp_path / "printed").touch()

        def flush(self) -> None: ...

    def speak(printed: Path) -> bool:
        print("ready")
        deadline = time.monotonic() + 10
        while not printed.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return printed.exists()

    monkeypatch.setattr(sys, "stdout", Ear())
    assert zerolab.launch(speak, 1, tmp_path / "printed") == [True]


def test_what_ranks_print_comes_in_rank_order(capsys):
    def speak() -> None:
        rank = dist.get_rank()
        time.sleep(0.05 * (2 - rank))
        print(f"out {rank} é")
        print(f"\r{rank} of 3", file=sys.stderr, end="")
        os.write(1, f"raw {rank}\n".encode())

    zerolab.launch(speak, 3)
    printed = capsys.readouterr()
    assert printed.out == "".join(f"out {rank} é\nraw {rank}\n" for rank in range(3))
    assert printed.err == "\r0 of 3\r1 of 3\r2 of 3"


def test_what_ranks_print_is_shown_when_one_fails(capsys):
    def speak() -> None:
        print("before", dist.get_rank())
        dist.barrier()
        raise ValueError

    with pytest.raises(zerolab.WorkerError):
        zerolab.launch(speak, 2)
    assert capsys.readouterr().out == "before 0\nbefore 1\n"


def test_each_rank_takes_its_share_of_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for world_size in (1, 2):
        share = launcher.threads_per_rank(world_size)
        assert share == max(1, launcher.core_count() // world_size)
        assert zerolab.launch(torch.get_num_threads, world_size) == [share] * world_size
    assert launcher.threads_per_rank(10_000) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert zerolab.launch(torch.get_num_threads, 2) == [3, 3]


def test_a_long_healthy_run_is_not_cut_off_by_the_backend():
    def patience() -> float:
        group = dist.distributed_c10d._get_default_group()
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    assert zerolab.launch(patience, 2)[0] >= 30 * 24 * 3600


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_messages_stay_on_this_machine(name: str, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    assert zerolab.launch(os.getenv, 1, name)[0] in ("lo", "lo0")
    monkeypatch.setenv(name, "lo,lo")
    assert zerolab.launch(os.getenv, 1, name) == ["lo,lo"]


def test_launches_from_several_threads_do_not_meet():
    results: dict[int, list] = {}

    def one(number: int) -> None:
        results[number] = zerolab.launch(lambda: (number, dist.get_rank()), 2)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [(number, 0), (number, 1)] for number in range(4)}


def test_twenty_launches_leave_no_file_descriptor_process_or_directory(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def leftovers() -> tuple:
        fds = len(os.listdir("/proc/self/fd"))
        return fds, descendants(os.getpid()), os.listdir(tmp_path), threading.active_count()

    zerolab.launch(int, 2)
    before = leftovers()
    for number in range(20):
        if number % 5:
            zerolab.launch(int, 2)
        else:
            with pytest.raises(zerolab.WorkerError):
                zerolab.launch(int, 2, "no number")
    assert leftovers() == before
    server_fds = f"/proc/{forkclient.current_pid()}/fd"
    assert len(os.listdir(server_fds)) < 16


FORKING_PROGRAM = """
    import os, zerolab
    print(zerolab.launch(int, 1, "7", backend="gloo"), flush=True)
    if (pid := os.fork()) == 0:
        print(zerolab.launch(int, 1, "8", backend="gloo"))
    else:
        os.waitpid(pid, 0)
        print(zerolab.launch(int, 1, "9", backend="gloo"))
"""


def test_a_process_forked_from_the_caller_has_a_fork_server_of_its_own(tmp_path: Path):
    assert run_script(FORKING_PROGRAM, tmp_path).split() == ["[7]", "[8]", "[9]"]


KERNEL_PROGRAM = """
    import threading, time
    from jupyter_client.manager import start_new_kernel
    from conftest import descendants, eventually, runs

    manager, client = start_new_kernel()
    printed = []

    def on_output(message):
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])
            if "working" in printed[-1]:
                manager.interrupt_kernel()

    def run(code):
        content = client.execute_interactive(code, timeout=60, output_hook=on_output)["content"]
        return content.get("ename"), content.get("evalue", "")

    run("import zerolab, time; N = 2")
    run("def cell():\\n    print('in a cell')\\n    return N")
    run("print(zerolab.launch(cell, 2, backend='gloo'))")
    print("".join(printed).split("\\n"))

    run("def bad():\\n    raise ValueError('told')")
    name, value = run("zerolab.launch(bad, 2, backend='gloo')")
    print(name, "raise ValueError('told')" in value)

    run("def hang():\\n    print('working')\\n    time.sleep(100)")
    print(run("zerolab.launch(hang, 2, backend='gloo')")[0])
    print(len(descendants(manager.provisioner.process.pid)))

    run("import threading; threading.Thread(target=zerolab.launch, args=(sum, 2, range(10**15))).start()")
    eventually(lambda: len(descendants(manager.provisioner.process.pid)) == 3)
    family = descendants(manager.provisioner.process.pid)
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    print(len(family), eventually(lambda: not any(map(runs, family))))
"""


def test_a_notebook_kernel(tmp_path: Path):
    """Functions live in cells, output is no file, an interrupt stops the ranks alone, a killed kernel all."""
    pytest.importorskip("ipykernel")
    printed = run_script(KERNEL_PROGRAM, tmp_path)
    assert printed.splitlines() == [
        "['in a cell', 'in a cell', '[2, 2]', '']",
        "WorkerError True",
        "KeyboardInterrupt",
        "1",
        "3 True",
    ]


def test_code_keeps_the_name_of_its_file_in_a_rank():
    """Stacks and checks quote the reader's lines, which they find by this name."""
    names: dict = {}
    exec(compile("def outer():\n    return lambda: None\n", "/tmp/a cell.py", "exec"), names)
    ((outer, inner),) = zerolab.launch(files_of, 1, names["outer"])
    assert outer == inner == "/tmp/a cell.py"


def files_of(fn: Callable) -> tuple[str, str]:
    return fn.__code__.co_filename, fn().__code__.co_filename

"""Promise: a launch bears what its caller and its function do with files and processes of their own."""

import os
import time

import pytest
import torch.distributed as dist
from conftest import run_script

import zerolab

CROWDED_PROGRAM = """
    import os, resource, zerolab
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [open(os.devnull) for _ in range(1100)]
    print(zerolab.launch(int, 2, "3", backend="gloo"))
    print(zerolab.launch(int, 2, "4", backend="gloo"))
"""


def test_a_caller_with_more_than_1024_open_files_can_launch(tmp_path):
    assert run_script(CROWDED_PROGRAM, tmp_path) == "[3, 3]\n[4, 4]\n"


def raise_error() -> None:
    raise ValueError("of the child")


@pytest.mark.parametrize(
    "end, code, printed",
    [
        (lambda: None, 0, ""),
        (raise_error, 1, "ValueError: of the child"),
        (lambda: exit(3), 3, ""),
        (lambda: exit("why"), 1, ""),
    ],
    ids=["returns", "raises", "exits", "exits with words"],
)
def test_a_process_that_the_function_forks_does_not_speak_for_the_rank(end, code: int, printed: str, capfd):
    def work() -> tuple:
        if (child := os.fork()) == 0:
            print("child of", dist.get_rank())
            end()
            return "the child's"
        _, status = os.waitpid(child, 0)
        time.sleep(0.2)  # for a report of the child, if it made one
        return dist.get_rank(), os.waitstatus_to_exitcode(status)

    assert zerolab.launch(work, 2) == [(0, code), (1, code)]
    output, complaint = capfd.readouterr()
    assert output == "child of 0\nchild of 1\n"
    assert complaint.count(printed) == 2 if printed else complaint == ""

"""Promise: control messages wait as long as the group's collectives do, and then say for whom they waited."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist
from support.lessons import solutions_travel_by_value

import zerolab
from zerolab.collectives import gloo_group

solutions_travel_by_value(__name__)
CPU = torch.device("cpu")


def control_timeouts() -> list[float]:
    """Of a group with gloo for CPUs, and of one with a backend for GPUs alone, for which a group is made."""
    timeout = datetime.timedelta(seconds=7)
    groups = [dist.new_group(timeout=timeout, backend=name) for name in ("cpu:gloo,cuda:gloo", "cuda:gloo")]
    control = [gloo_group(group) for group in groups]
    assert control[0] is groups[0] and control[1] is not groups[1]
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in control]


def test_the_control_group_has_the_timeout_of_its_group():
    """gloo's own default would be 1800 s."""
    assert zerolab.launch(control_timeouts, 2) == [[7, 7], [7, 7]]


def test_under_launch_the_launcher_alone_watches_the_clock():
    (seconds,) = zerolab.launch(
        lambda: dist.group.WORLD._get_backend(CPU).options._timeout.total_seconds(), 1
    )
    assert seconds > 30 * 86400


def wait_for_rank_0() -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    optimizer = zerolab.ZeroOptimizer(torch.nn.Linear(2, 2), torch.optim.SGD, process_group=group, lr=0.1)
    optimizer.model(torch.ones(1, 2)).sum().backward()
    if dist.get_rank() == 0:
        time.sleep(6)
        return ""
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def test_the_rank_that_is_waited_for_is_named():
    """Rank 1 waits for rank 0's announcement, rank 3 for its own to be taken, and rank 2 for data."""
    _, first, second, third = zerolab.launch(wait_for_rank_0, 4)
    assert first.startswith("rank 1 waited 2 s for rank 0 at exchange of unit order")
    assert second.startswith("rank 2 waited 2 s for the other ranks at exchange of unit order")
    assert third.startswith("rank 3 waited 2 s for rank 0 at exchange of unit order")
    assert "init_process_group(timeout=...)" in first

"""Promise: at stages 1 and 2 step() leaves its gathers under way, and nothing reads a parameter too early."""

import copy
import io
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from support import launchers
from support.hostile import hostile_backend
from support.long import long_where
from support.trained import on_two_ranks
from torch import nn

import zerolab
from zerolab.unit.gathering import Gathering
from zerolab.unit.sharded import Sharded

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

WIDTH = 32


class Net(nn.Module):
    """Three blocks and a head; the head is in the root unit."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.blocks(x)).square().mean()


def updated(stage: int = 2, **settings) -> zerolab.ZeroOptimizer:
    """An optimizer after one step, whose gathers nothing has waited for."""
    torch.manual_seed(0)
    optimizer = zerolab.ZeroOptimizer(Net(), torch.optim.AdamW, stage=stage, lr=0.1, **settings)
    torch.manual_seed(1)
    optimizer.model(torch.randn(5, WIDTH)).backward()
    optimizer.step()
    return optimizer


def under_way(optimizer: zerolab.ZeroOptimizer) -> list[str]:
    return [unit.name for unit in optimizer.units if unit.gather is not None]


def expected(steps: int = 1) -> dict[str, torch.Tensor]:
    """The parameters after that step, or after more with the same gradients, by a plain loop."""
    torch.manual_seed(0)
    model = Net()
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    model(torch.randn(5, WIDTH)).backward()
    for _ in range(steps):
        plain.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def when_each_unit_is_waited_for(stage: int, prefetch: int) -> list[list[str]]:
    """Which units are under way after step(), and in the next forward before each block."""
    found: list[list[str]] = []
    with hostile_backend():
        optimizer = updated(stage, prefetch=prefetch)
        found.append(under_way(optimizer))
        for block in optimizer.model.blocks:
            block.register_forward_hook(lambda *_: found.append(under_way(optimizer)))
        optimizer.model(torch.ones(1, WIDTH))
        found.append(under_way(optimizer))
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_a_unit_is_waited_for_at_its_next_forward(stage: int):
    every, root = ["blocks.0", "blocks.1", "blocks.2", "root"], []
    for found in on_two_ranks(when_each_unit_is_waited_for, stage, 1):
        assert found == [every, every[1:3], every[2:3], root, root]


@pytest.mark.parametrize("stage, prefetch", [(0, 1), (3, 1), (1, 0), (2, 0)])
def test_nothing_is_under_way_where_nothing_is_gathered_or_overlap_is_off(stage: int, prefetch: int):
    for found in on_two_ranks(when_each_unit_is_waited_for, stage, prefetch):
        assert found == [[]] * 5


def clone_in_a_thread(weight: nn.Parameter) -> torch.Tensor:
    """Read by several threads at once."""
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(weight.detach().clone())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(torch.equal(each, found[0]) for each in found)
    return found[0]


def saved(weight: nn.Parameter) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(weight, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def averaged(weight: nn.Parameter) -> torch.Tensor:
    """As a moving average of weights reads them, several in one call."""
    average = [torch.zeros_like(weight)]
    torch._foreach_lerp_(average, [weight.detach()], 1.0)
    return average[0]


READS: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "detach": lambda weight: weight.detach().clone(),
    "data": lambda weight: weight.data.clone(),
    "arithmetic": lambda weight: (weight * 1).detach(),
    "a list": lambda weight: torch.stack([weight, weight])[1].detach(),
    "out=": lambda weight: torch.add(weight.detach(), 0, out=torch.empty(1)),
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy().copy()),
    "tolist": lambda weight: torch.tensor(weight.tolist()),
    "item": lambda weight: torch.tensor([[each.item() for each in row] for row in weight]),
    "deepcopy": copy.deepcopy,
    "pickle": lambda weight: pickle.loads(pickle.dumps(weight)),
    "torch.save": saved,
    "a moving average": averaged,
    "a thread": clone_in_a_thread,
    "vector": lambda weight: nn.utils.parameters_to_vector([weight]).view_as(weight).detach(),
    "broadcast": lambda weight: (dist.broadcast(weight.detach(), 0), weight.detach())[1],
}


def read_each_way() -> dict[str, tuple[bool, bool, bool]]:
    """For each way to read: whether it was under way, has the values of the update, and is no placeholder."""
    right, found = expected(), {}
    with hostile_backend():
        for what, read in READS.items():
            optimizer = updated()
            weight = optimizer.model.blocks[1].weight
            before = type(weight) is Gathering and weight.shape == (WIDTH, WIDTH) and weight.grad is not None
            value = read(weight)
            plain = not isinstance(weight, Sharded) and not vars(weight)
            found[what] = before, torch.equal(value, right["blocks.1.weight"]), plain
            assert type(optimizer.model.blocks[2].weight) is Gathering, "one unit is waited for, not all"
            optimizer.engine.finish_gathers()
    return found


def test_whatever_reads_a_parameter_waits_for_it_alone():
    """On a backend whose results come on wait() alone, and are NaN until then."""
    for found in on_two_ranks(read_each_way):
        assert found == dict.fromkeys(READS, (True, True, True))


def read_while_another_thread_restores() -> bool:
    """One thread has the gather's result and has not yet made the parameters whole; others need them."""
    optimizer = updated()
    unit = next(unit for unit in optimizer.units if unit.name == "blocks.1")
    restore, begun = unit._views.restore, threading.Event()

    def slowly() -> None:
        begun.set()
        time.sleep(0.3)
        restore()

    unit._views.restore = slowly
    weight = optimizer.model.blocks[1].weight
    first = threading.Thread(target=weight.detach)
    first.start()
    assert begun.wait(5)
    value = clone_in_a_thread(weight)
    first.join()
    return torch.equal(value, expected()["blocks.1.weight"])


ALIASES = {
    "data": lambda model: [parameter.data for parameter in model.parameters()],
    "detach": lambda model: [parameter.detach() for parameter in model.parameters()],
    "part": lambda model: [parameter.detach()[0] for parameter in model.parameters()],
    "state_dict": lambda model: list(model.state_dict().values()),
}


def read_through_aliases(take: Callable, stage: int) -> tuple:
    """What was under way after a step with aliases and after one without, and whether aliases were right."""
    optimizer = updated(stage, prefetch=1)
    model = optimizer.model
    kept = take(model)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(5, WIDTH)).backward()
        optimizer.step()
        found.append(under_way(optimizer))
        if kept:
            read = [each.clone() for each in kept]
            kept.clear()
            right = all(map(torch.equal, read, take(model)))
    return *found, right


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ALIASES)
def test_a_step_waits_where_users_hold_tensors_in_the_parameters_memory(name: str, stage: int):
    """As averages of weights do that keep ``[p.data for p in ...]``. Nothing tells when these are read."""
    for with_aliases, without, right in on_two_ranks(read_through_aliases, ALIASES[name], stage):
        assert with_aliases == [] and right and len(without) == 4


def in_a_child(work: Callable[[], object]) -> str:
    """Fork this process; return what ``work`` returns in the child, or its error, as text."""
    reading, writing = os.pipe()
    if not os.fork():
        try:
            said = str(work())
        except Exception as error:
            said = str(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.wait()
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def read_in_a_child(stage: int) -> tuple:
    optimizer = updated(stage)
    before, weight = under_way(optimizer), optimizer.model.head.weight
    seen = in_a_child(lambda: weight.sum().item())
    return before, under_way(optimizer), seen, str(weight.sum().item())


@pytest.mark.parametrize("stage", [1, 2])
def test_a_process_that_is_forked_after_a_step_can_read_parameters(stage: int):
    """The thread that ends the gathers is not in the child, so they are waited for before the fork."""
    for before, after, seen, expected in on_two_ranks(read_in_a_child, stage):
        assert len(before) == 4 and after == [] and seen == expected


def forward_in_a_child() -> str:
    model = updated(3).model
    return in_a_child(lambda: model(torch.ones(1, WIDTH)))


def test_a_forward_at_stage_3_in_a_forked_process_is_refused():
    for said in on_two_ranks(forward_in_a_child):
        assert (
            said.startswith("a process that was forked from a rank takes no part") and "full_params" in said
        )


def test_threads_wait_for_the_one_that_makes_the_parameters_whole():
    assert on_two_ranks(read_while_another_thread_restores) == [True, True]


def traffic_of_a_trace_that_travels() -> tuple[int, int]:
    """Of a trace as a rank returns it, and of the trace itself."""
    optimizer = updated()
    travelled = pickle.loads(pickle.dumps(optimizer.trace))
    return travelled.traffic().wire_bytes, optimizer.trace.traffic().wire_bytes


def test_a_trace_can_be_sent_and_is_complete():
    for travelled, own in on_two_ranks(traffic_of_a_trace_that_travels):
        assert travelled == own > 0


def read_around_the_class() -> bool:
    """As C++ code does that takes the tensor and does not ask its class."""
    optimizer = updated()
    with torch._C.DisableTorchFunctionSubclass():
        return bool(optimizer.model.blocks[0].weight.detach().isnan().all())


def test_what_goes_around_the_class_reads_nan_and_not_half_of_the_values():
    assert on_two_ranks(read_around_the_class) == [True, True]


def finish_each_way(folder: Path) -> dict[str, tuple[bool, list[str]]]:
    """What asks for everything: whether values are right after it, and what is still under way."""

    def full(optimizer):
        with optimizer.full_params():
            assert torch.equal(optimizer.model.head.weight, right["head.weight"])

    ways = {
        "full_params": full,
        "save": lambda optimizer: zerolab.save(optimizer, folder / "checkpoint"),
        "export": lambda optimizer: zerolab.export(optimizer, folder / "model"),
        "model.state_dict": lambda optimizer: optimizer.model.state_dict(),
        "eval": lambda optimizer: optimizer.model.eval()(torch.ones(1, WIDTH)),
        "deepcopy of the model": lambda optimizer: copy.deepcopy(list(optimizer.model.children())),
        "memory": lambda optimizer: optimizer.memory(),
        "traffic": lambda optimizer: optimizer.trace.traffic(),
        "repr": lambda optimizer: repr(list(optimizer.model.parameters())),
    }
    right, found = expected(), {}
    for what, finish in ways.items():
        optimizer = updated()
        finish(optimizer)
        left = under_way(optimizer)
        values = dict(optimizer.model.named_parameters())
        found[what] = all(torch.equal(values[name], each) for name, each in right.items()), left
    return found


def test_what_needs_all_parameters_waits_for_all(tmp_path: Path):
    for found in on_two_ranks(finish_each_way, tmp_path):
        assert len(found) == 9 and set(map(str, found.values())) == {str((True, []))}


def step_again(stage: int) -> bool:
    """A second step at once, with the gradients of the first; nothing has waited for its gathers."""
    optimizer, right = updated(stage), expected(steps=2)
    optimizer.step()
    with optimizer.full_params():
        return all(torch.equal(right[name], each) for name, each in optimizer.model.named_parameters())


@pytest.mark.parametrize("stage", [1, 2])
def test_a_second_step_with_the_same_gradients_is_torchs(stage: int):
    assert on_two_ranks(step_again, stage) == [True, True]


def write_and_step(write: str) -> list[torch.Tensor]:
    """A write just after an update, on every rank, and one more step."""
    optimizer = updated()
    weight = optimizer.model.blocks[0].weight
    with torch.no_grad():
        if write == "in place":
            weight.mul_(0.5)
        elif write == "through data":
            weight.data.mul_(0.5)
        else:
            values = {name: 0.5 * each for name, each in optimizer.model.blocks[0].state_dict().items()}
            optimizer.model.blocks[0].load_state_dict(values)
    assert torch.equal(weight, 0.5 * expected()["blocks.0.weight"])
    optimizer.zero_grad()
    optimizer.model(torch.ones(2, WIDTH)).backward()
    optimizer.step()
    return [parameter.detach().clone() for parameter in optimizer.model.blocks.parameters()]


def test_a_write_after_an_update_is_kept():
    first, *others = [on_two_ranks(write_and_step, each) for each in ("in place", "through data")]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first[0], other[1], strict=True))
    on_two_ranks(write_and_step, "load_state_dict")


def backward_through_an_older_forward() -> str:
    """A second loss of a forward before the update: plain PyTorch refuses its backward too."""
    torch.manual_seed(0)
    optimizer = zerolab.ZeroOptimizer(Net(), torch.optim.AdamW, stage=2, lr=0.1)
    second = optimizer.model(torch.ones(2, WIDTH))
    optimizer.model(torch.ones(2, WIDTH)).backward()
    optimizer.step()
    assert under_way(optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
        second.backward()
    return str(error.value)


def test_a_backward_through_an_older_forward_is_refused_while_gathers_are_under_way():
    assert on_two_ranks(backward_through_an_older_forward)


def fail_a_gather() -> list[str]:
    """The first gather fails; the parameter is then needed twice."""
    optimizer = updated()
    unit = next(unit for unit in optimizer.units if unit.name == "blocks.1")

    def failing():
        raise RuntimeError("connection closed")

    optimizer.engine.finish_gathers()
    unit.expect(failing)
    said = []
    for use in (lambda: unit.spans[0].parameter.sum(), lambda: optimizer.model(torch.ones(1, WIDTH))):
        with pytest.raises(RuntimeError, match="connection closed") as error:
            use()
        said.append(str(error.value))
    unit.gather = lambda: None
    return said


def test_a_gather_that_failed_fails_again_where_the_parameter_is_needed_again():
    assert on_two_ranks(fail_a_gather) == [["connection closed"] * 2] * 2


def differentiate() -> tuple[str, bool]:
    """torch.func takes the parameters as they are, so it cannot wait for them."""
    optimizer = updated()
    values = dict(optimizer.model.named_parameters())
    loss = lambda values: torch.func.functional_call(optimizer.model, values, torch.ones(1, WIDTH))
    with pytest.raises(RuntimeError, match="still on their way") as error:
        torch.func.grad(loss)(values)
    with optimizer.full_params():
        gradients = torch.func.grad(loss)(values)
    return str(error.value), all(each.isfinite().all().item() for each in gradients.values())


def test_torch_func_is_refused_until_the_parameters_are_there():
    for said, finite in on_two_ranks(differentiate):
        assert "full_params()" in said and "prefetch=0" in said and finite


ENDING = """
import sys, time, torch, zerolab
from torch import nn
from zerolab.collectives.control import Control
zerolab.init_process_group()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(70, 70) for _ in range(4)))
optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=2, lr=0.1)
model(torch.ones(2, 70)).sum().backward()
post = Control.post
def late(control, *message):
    time.sleep(0.5)  # in the thread of the collectives, long after the other rank's script has ended
    return post(control, *message)
if optimizer.rank == 1:
    Control.post = late
optimizer.step()
if "destroy" in sys.argv:
    torch.distributed.destroy_process_group()
if "read" in sys.argv and optimizer.rank == 1:
    print("sum", sum(p.sum().item() for p in model.parameters()))
"""


PARTS = "each is a part of the way that leaves the group and reads afterwards"


@pytest.mark.parametrize(
    "ways",
    long_where(lambda ways: len(ways) == 1, PARTS, [[], ["destroy"], ["destroy", "read"], ["read"]]),
    ids="-".join,
)
def test_a_script_may_end_or_leave_the_group_after_its_last_step(ways: list[str], tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(ENDING)
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", str(script), *ways]
    done = launchers.run(command, tmp_path, timeout=60)
    assert done.returncode == 0, done.output
    assert "Error" not in done.output and "Exception" not in done.output
    assert done.output.count("sum") == ("read" in ways)

"""Promise: over a backend whose results come late, as NCCL's do on a GPU, nothing reads or writes too early.

The native collectives run over gloo here (support/hostile.py), so that this needs no GPU.
"""

import functools
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from support import hostile, subjects, training
from support.hostile import hostile_backend
from support.long import long_where
from support.user_models import every_case
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ReduceOp

import zerolab
from zerolab.collectives import Comm, NativeComm, connect, gloo_group, names
from zerolab.optimizer.settings import device_of
from zerolab.storages import MemoryMeter
from zerolab.trace import Trace

for module in (sys.modules[__name__], hostile):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest

CASES = every_case()
STAGES = (0, 1, 2, 3)
OVERLAP = {
    "in step": {"prefetch": 0, "reduces_in_flight": 0},
    "one ahead": {},
    "two ahead": {"prefetch": 2, "reduces_in_flight": 2},
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Threads that wait for each other on a busy machine take far longer than such small models do."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def compare_all(cases: dict, settings: dict) -> dict[str, dict]:
    with hostile_backend():
        return training.compare_all(cases, STAGES, **settings)


@functools.cache
def outcomes(group: str, overlap: str) -> list[dict]:
    return zerolab.launch(compare_all, 2, CASES[group], OVERLAP[overlap], backend="gloo", timeout=120)


FIRST = ("stock", "passes", "sharing", "checkpointed")
GROUPS = "more models; all of them train with late and direct reductions in tests/engine"
OTHERS = pytest.mark.long(
    "the same models and stages as with the default overlap, which the short tests have"
)


@pytest.mark.parametrize(
    "overlap",
    [pytest.param(name, marks=OTHERS if settings else []) for name, settings in OVERLAP.items()],
)
@pytest.mark.parametrize("group", long_where(lambda group: group not in FIRST, GROUPS, CASES))
def test_bits_of_plain_training(group: str, overlap: str):
    """On two ranks a sum has no order, so the native one has the bits of the reference."""
    for by_case in outcomes(group, overlap):
        assert by_case == {name: {stage: [] for stage in STAGES} for name in CASES[group]}


def train_late_and_direct(stage: int, precision: str) -> tuple[subjects.Run, subjects.Run]:
    torch.use_deterministic_algorithms(True)
    arguments = ("gpt", stage, torch.optim.Adam, 3)
    with hostile_backend():
        late, optimizer = subjects.train_sharded(*arguments, lr=0.02, precision=precision)
        assert isinstance(optimizer.comm, NativeComm)
    return late, subjects.train_sharded(*arguments, lr=0.02, precision=precision)[0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "mixed", "mixed_fp32_grads"])
def test_deterministic_algorithms_add_up_in_rank_order(stage: int, precision: str):
    """They leave the bits of gloo's own collectives on four ranks, where the order of a sum matters."""
    for late, direct in zerolab.launch(
        train_late_and_direct, 4, stage, precision, backend="gloo", timeout=120
    ):
        assert subjects.same(late, direct)


# One collective.


class Buffer:
    """What a message is about."""

    index = 0

    def __init__(self, numel: int, name: str = "buffer", cuts: list[int] | None = None):
        self.name, self.numel, self.cuts = name, numel, cuts

    def describe(self, part: slice) -> tuple[str, ...]:
        return ()


def comm_here() -> Comm:
    return connect(None, torch.device("cpu"), Trace(), MemoryMeter())


def reduce_all(values: list[float], dtype: torch.dtype, deterministic: bool) -> dict[tuple, list[float]]:
    """On a rank with one of the values everywhere: what each reduction leaves in the rank's own shard."""
    torch.use_deterministic_algorithms(deterministic)
    found = {}
    with hostile_backend():
        comm = comm_here()
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            for name in ("reduce_scatter", "all_reduce"):
                flat = torch.full((3 * 16,), values[comm.rank], dtype=dtype)
                getattr(comm, name)(flat, Buffer(flat.numel()), op).wait()
                found[name, str(op)] = comm.own(flat).tolist()
    return found


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_reduction_is_the_sum_or_the_mean(dtype: torch.dtype, deterministic: bool):
    values = [1.0, 2.5, 4.0]
    for found in zerolab.launch(reduce_all, 3, values, dtype, deterministic, backend="gloo"):
        for (_, op), shard in found.items():
            expected = sum(values) / (1 if op == str(ReduceOp.SUM) else 3)
            assert shard == pytest.approx([expected] * 16, rel=2e-3)


def test_a_mean_in_fp16_does_not_overflow_on_the_way():
    """The sum, 90,000, is more than fp16 can hold."""
    for found in zerolab.launch(reduce_all, 3, [30_000.0] * 3, torch.float16, False, backend="gloo"):
        assert found["reduce_scatter", str(ReduceOp.AVG)] == pytest.approx([30_000.0] * 16, rel=2e-3)


def gather_something_else_on_rank_1() -> str:
    with hostile_backend():
        comm = comm_here()
        work = comm.all_gather(torch.zeros(64), Buffer(64, f"unit {comm.rank}"))
        try:
            work.wait()
        except RuntimeError as error:
            hostile.LateWork.under_way = 0
            return str(error)
    return "nothing was raised"


def test_ranks_that_issue_different_collectives_are_told_before_their_devices_wait():
    for said in zerolab.launch(gather_something_else_on_rank_1, 2, backend="gloo", timeout=30):
        assert "ranks took different paths" in said and "all_gather of unit 1" in said


# Which of the two a model gets.


def gpu_model(*devices: str) -> torch.nn.Module:
    """A model whose parameters are, by their own account, on these devices."""
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.empty(4, device=each)) for each in devices]
    model = torch.nn.Module()
    model.weights = torch.nn.ParameterList(parameters)
    return model


def refusal(*devices: str) -> str:
    try:
        connect(None, device_of(gpu_model(*devices)), Trace(), MemoryMeter())
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_model_on_a_gpu_is_refused_where_the_group_has_gloo_alone():
    (said,) = zerolab.launch(refusal, 1, "cuda:0", backend="gloo")
    assert said.startswith("the model's parameters are on cuda:0, and this process group has gloo for cpu")
    assert "zerolab.device(), which is cpu here" in said and 'backend="nccl"' in said


@pytest.mark.parametrize("devices", [("cuda:0", "cpu"), ("cuda:0", "cpu", "cuda:1")])
def test_a_model_on_several_devices_is_refused(devices: tuple[str, ...]):
    (said,) = zerolab.launch(refusal, 1, *devices, backend="gloo")
    assert said.startswith("parameter weights.0 is on cuda:0 and weights.1 on cpu: move the whole model")


def test_a_group_of_another_backend_gets_one_of_gloo_for_its_control_messages(monkeypatch):
    """As under torchrun after dist.init_process_group("nccl")."""

    def control_backend() -> tuple[str, str]:
        store = dist.HashStore()
        dist.destroy_process_group()
        dist.init_process_group("cuda:gloo", store=store, rank=0, world_size=1)
        return dist.get_backend(gloo_group(dist.group.WORLD)), dist.get_backend_config()

    assert zerolab.launch(control_backend, 1, backend="gloo") == [("gloo", "cuda:gloo")]


@pytest.mark.parametrize(
    "new, old",
    [("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor")],
)
def test_the_names_that_do_not_warn_are_taken(new: str, old: str):
    assert getattr(names, new) is getattr(dist, new, getattr(dist, old))

"""Promise: a GPU's work is done when its rank reports, and a rank that NCCL aborts is not the one to blame.

What needs no GPU is tested here, with stand-ins for it.
"""

import io
import logging
import os
import pickle
import time
import types

import pytest
import torch
import torch.distributed as dist

import zerolab
from zerolab.launcher import payload, rank, rendezvous, stacks
from zerolab.launcher.failures import Failure, first_cause
from zerolab.launcher.gpus import choose_backend


class OnAGpu(torch.Tensor):
    """A tensor that says it is on a GPU, and cannot be pickled as long as it does."""

    device = torch.device("cuda", 0)

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: int):
        raise AssertionError("pickled where it is")


def sent(value):
    """What the caller gets for a value that a rank returns."""
    file = io.BytesIO()
    payload.dump(value, file)
    return pickle.loads(file.getvalue())


def test_a_result_on_a_gpu_comes_back_on_the_cpu():
    values = torch.arange(6.0).reshape(2, 3).t()
    result = {"loss": values.as_subclass(OnAGpu), "others": [values.as_subclass(OnAGpu), 5]}
    found = sent(result)
    for tensor in (found["loss"], found["others"][0]):
        assert type(tensor) is torch.Tensor and torch.equal(tensor, values)
        assert tensor.stride() == values.stride()


def test_a_model_on_a_gpu_comes_back_on_the_cpu(monkeypatch):
    """A parameter is pickled by its data, here a tensor that says it is on a GPU."""
    model = torch.nn.Linear(2, 2, bias=False)
    on_a_gpu = model.weight.detach().as_subclass(OnAGpu)
    monkeypatch.setattr(torch.nn.Parameter, "data", property(lambda parameter: on_a_gpu))
    file = io.BytesIO()
    payload.dump(model, file)
    monkeypatch.undo()
    found = pickle.loads(file.getvalue())
    assert type(found.weight) is torch.nn.Parameter and found.weight.requires_grad
    assert torch.equal(found.weight, model.weight)


def test_other_results_are_pickled_as_they_are():
    weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    found, meta = sent((weight, torch.ones(3, device="meta")))
    assert type(found) is torch.nn.Parameter and not found.requires_grad and meta.device.type == "meta"


def test_the_device_is_awaited_before_a_rank_reports():
    """And an error that only comes up then is the rank's."""

    def work() -> None:
        torch.cuda.is_initialized = lambda: True
        torch.cuda.synchronize = raise_late

    def raise_late() -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    with pytest.raises(zerolab.WorkerError, match="rank 0 failed: RuntimeError: CUDA error: an illegal"):
        zerolab.launch(work, 1)


def test_a_rank_that_waits_for_its_gpu_waits_for_its_peers():
    for source in ("loss.item()", "torch.cuda.synchronize()"):
        stacks.linecache.cache["<gpu>"] = (len(source), None, [source], "<gpu>")
        assert stacks.in_collective([[stacks.Frame("<gpu>", 1, "step")]])
    stacks.linecache.cache["<gpu>"] = (9, None, ["time.sleep(9)"], "<gpu>")
    assert not stacks.in_collective([[stacks.Frame("<gpu>", 1, "step")]])


@pytest.fixture
def lines(caplog, monkeypatch):
    """What is logged; the course, where it is imported, lets each line through once."""
    monkeypatch.setattr(logging.getLogger("zerolab"), "filters", [])
    return caplog


@pytest.mark.parametrize(
    "asked, ranks, gpus, chosen",
    [
        ("auto", 2, 0, "gloo"),
        ("auto", 2, 1, "gloo"),
        ("auto", 2, 2, "nccl"),
        ("nccl", 4, 1, "nccl"),
        ("gloo", 1, 8, "gloo"),
    ],
)
def test_the_backend_follows_the_gpus(lines, asked: str, ranks: int, gpus: int, chosen: str):
    assert choose_backend(asked, ranks, gpus) == chosen
    said = [record.getMessage() for record in lines.records]
    if (asked, gpus) == ("auto", 1):
        assert said[0].startswith("2 ranks run on the CPU, over gloo, because there are GPUs for 1: pass")
    elif (asked, gpus) == ("nccl", 1):
        assert said[0].startswith("4 ranks share GPUs, over NCCL, because there are GPUs for 1: the results")
    else:
        assert not said
    assert len(said) == (gpus == 1)


@pytest.fixture
def seen(monkeypatch) -> dict:
    """Stand-ins for four GPUs. What a rank does with them before it joins NCCL, which is not here."""
    seen = {}
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: seen.update(gpu=index))
    share = lambda fraction: seen.update(share=fraction)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", share)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **named: seen.update(backend=backend))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: seen.setdefault("sent", []).append(tensor))
    monkeypatch.setattr(dist, "FileStore", lambda *args: types.SimpleNamespace(set_timeout=id))
    monkeypatch.setattr(torch, "zeros", lambda size, device="cpu": device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return seen


NINE_RANKS = {"world_size": 9, "backend": "nccl", "threads": 1, "gpus": 4}


def init_under_torchrun(monkeypatch, backend: str = "auto", number: int = 0, ranks: int = 9) -> None:
    names = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    names |= {"MASTER_PORT": 1, "MASTER_ADDR": "localhost"}
    monkeypatch.setattr(os, "environ", dict(os.environ) | {name: str(each) for name, each in names.items()})
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(rendezvous.local_store, "store_file", lambda job, rank: "")
    rendezvous.init_process_group(backend)


@pytest.mark.parametrize("number", [0, 1])
def test_under_torchrun_rank_0_alone_names_the_backend(seen: dict, lines, number: int, monkeypatch):
    """And it says nothing where the choice is the obvious one."""
    for ranks in (4, 9):
        init_under_torchrun(monkeypatch, "auto", number, ranks)
    said = [record.getMessage() for record in lines.records]
    assert len(said) == (number == 0) and all("9 ranks run on the CPU" in line for line in said)


def test_a_rank_on_a_gpu_has_gloo_too_and_nccl_does_not_abort_it(seen: dict):
    """The launch itself stops ranks whose peer is gone. NCCL starts later, at its first collective."""
    rank.join_group(2, {"world_size": 4, "backend": "nccl", "threads": 1, "gpus": 4}, "")
    assert seen == {"gpu": 2, "backend": "cpu:gloo,cuda:nccl", "sent": ["cpu"]}
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert "NCCL_HOSTID" not in os.environ


def test_ranks_that_share_a_gpu_are_hosts_to_nccl(seen: dict):
    """NCCL refuses two ranks of one host on one GPU. Each gets its share of the GPU's memory.

    They connect at once.
    """
    rank.join_group(6, NINE_RANKS, "")
    assert seen == {"gpu": 2, "share": 1 / 3, "backend": "cpu:gloo,cuda:nccl", "sent": ["cpu", "cuda"]}
    assert os.environ["NCCL_HOSTID"].endswith("-6") and os.environ["NCCL_NET"] == "Socket"


@pytest.mark.parametrize(
    "refusal",
    [
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
        "Multiple Ranks are using the same GPU/Partition.",
    ],
)
def test_an_nccl_that_does_not_let_ranks_share_is_named_with_the_way_out(seen, monkeypatch, refusal: str):
    def all_reduce(tensor) -> None:
        if tensor == "cuda":
            raise dist.DistBackendError(f"NCCL error, ncclInvalidUsage. Last error:\n{refusal}")

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 31, 1))
    says = r'9 ranks were to share 4 GPUs, and NCCL 2\.31\.1 refused: use at most 4 ranks, or backend="gloo"'
    for join in (
        lambda: rank.join_group(6, NINE_RANKS, ""),
        lambda: init_under_torchrun(monkeypatch, "nccl"),
    ):
        with pytest.raises(RuntimeError, match=says):
            join()


def test_another_error_of_nccl_stays_as_it_is(seen, monkeypatch):
    def all_reduce(tensor) -> None:
        if tensor == "cuda":
            raise dist.DistBackendError("NCCL error: unhandled system error")

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with pytest.raises(dist.DistBackendError, match="unhandled system error"):
        rank.join_group(6, NINE_RANKS, "")


@pytest.mark.parametrize("kind", ["raises", "exits"])
def test_a_rank_that_is_aborted_is_not_blamed_for_the_one_that_failed(kind: str):
    """NCCL's watchdog is quick, and the failure that it saw may be reported after its abort."""

    def work() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            os.abort()
        time.sleep(1)
        if kind == "raises":
            raise ValueError("the cause")
        os._exit(5)

    with pytest.raises(zerolab.WorkerError, match=r"the cause|exited with code 5") as caught:
        zerolab.launch(work, 2)
    assert caught.value.rank == 1


def test_an_abort_comes_before_complaints_about_a_peer():
    aborted = Failure(0, 2.0, exitcode=-6)
    complaint = Failure(1, 1.0, summary="RuntimeError: Connection closed by peer")
    raised, killed = Failure(2, 3.0, summary="ValueError"), Failure(3, 4.0, exitcode=-9)
    failures = [complaint, aborted, raised, killed]
    for expected in (killed, raised, aborted, complaint):
        assert first_cause(failures) == expected
        failures.remove(expected)

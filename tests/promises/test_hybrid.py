"""Promise: hybrid sharding has the bits of a process that adds up by groups, and the bytes of its formula."""

import gc
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from support import meshes, training
from support.meshes import backward, cut_and_optimizer, values_of
from support.references import Tensors
from support.user_models import Net
from torch import nn

import zerolab
from zerolab.collectives import Work
from zerolab.parity import parity
from zerolab.precision import PRECISIONS
from zerolab.stages.hybrid import HybridStage3
from zerolab.unit import FlatUnit
from zerolab.unit.owned_part import OwnedPart

for module in (sys.modules[__name__], meshes):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest

MUON = {"optimizer_class": torch.optim.AdamW, "params": zerolab.matrices_by(torch.optim.Muon)}


@pytest.mark.parametrize(
    ("world_size", "shard_size", "settings"),
    [
        (4, 2, {}),
        (4, 1, {"precision": "mixed"}),
        (4, 4, {"offload": "cpu"}),
        (6, 2, {"precision": "mixed"}),
        (6, 3, MUON),
        (4, 2, {"precision": "mixed_fp16", "prefetch": 0, "reduces_in_flight": 0}),
        (4, 2, {"precision": "mixed_fp32_grads", "reduces_in_flight": 3, "bucket_bytes": 1024}),
    ],
    ids=["fp32", "groups of one", "one group", "bf16", "Muon", "fp16 without overlap", "fp32 gradients"],
)
def test_bits_bytes_and_messages_are_those_foretold(world_size: int, shard_size: int, settings: dict):
    report = zerolab.verify(3, world_size, shard_size=shard_size, lr=1e-3, **settings)
    assert (report.bit_identical, report.memory_matches, report.traffic_matches) == (True, True, True)


def test_memory_is_divided_by_a_group_and_the_rest_is_sent_between_groups():
    """With 4 groups of 2: 16Ψ/2 bytes, 3Ψ less the root among 2 ranks, and 2Ψ/2 among 4."""
    psi = 10 * 64 * 64

    def model_fn() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(10)))

    found = zerolab.rehearse(model_fn, 8, 3, shard_size=2, inputs=lambda: torch.zeros(1, 64))
    assert found.memory.total_bytes == pytest.approx(16 * psi / 2, rel=0.01)
    ops = {name: (op.logical_bytes, op.wire_bytes) for name, op in found.traffic.by_op.items()}
    assert ops == {
        "all_gather": (2 * 2 * psi, 2 * 2 * psi // 2),
        "reduce_scatter": (2 * psi, 2 * psi // 2),
        "all_reduce": (2 * 2 * psi // 2, 2 * 2 * (psi // 2) * 3 // 4),
    }


def train(shard_size: int | None, micro_batches: str = "s", stage: int = 3) -> tuple[Tensors, list[float]]:
    """Three steps, each with micro-batches that are reduced (s) or kept under no_sync (n)."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = Net()
    settings = training.DEFAULTS | {"stage": stage, "shard_size": shard_size}
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, **settings)
    norms = []
    for step in range(3):
        for place, letter in enumerate(micro_batches):
            loss = lambda at=10 * step + place: model(training.micro_batch(at, rank)).square().mean()
            if letter == "n":
                with optimizer.no_sync():
                    loss().backward()
            else:
                loss().backward()
        norms.append(optimizer.clip_grad_norm_(0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return training.whole(model, optimizer), norms


@pytest.mark.parametrize("micro_batches", ["s", "ss", "ns"])
def test_every_rank_ends_with_stage_3s_parameters_and_norms(micro_batches: str):
    """They differ by the rounding of the sums, which are added up in another order; copies do not differ."""
    (expected, norms), *_ = zerolab.launch(train, 4, None, micro_batches)
    found = zerolab.launch(train, 4, 2, micro_batches)
    for parameters, its_norms in found:
        assert training.differing(parameters, found[0][0]) == []
        assert its_norms == pytest.approx(norms, rel=1e-5)
        for name, values in expected.items():
            torch.testing.assert_close(parameters[name], values)


@pytest.mark.parametrize(("shard_size", "stage"), [(3, 3), (1, 0)])
def test_one_group_has_the_bits_of_stage_3_and_groups_of_one_rank_those_of_stage_0(
    shard_size: int, stage: int
):
    (found, _), *_ = zerolab.launch(train, 3, shard_size)
    (expected, _), *_ = zerolab.launch(train, 3, None, stage=stage)
    assert training.differing(found, expected) == []


def test_each_element_is_counted_and_stored_by_one_rank():
    def shares() -> list[tuple[slice, slice, int]]:
        optimizer = zerolab.ZeroOptimizer(Net(), torch.optim.SGD, stage=3, shard_size=2, lr=0.1)
        return [(optimizer.stage.share(u), u.owned, u.padded_numel) for u in optimizer.units]

    for of_ranks in zip(*zerolab.launch(shares, 6), strict=True):
        parts = sorted((share.start, share.stop) for share, _, _ in of_ranks)
        assert all(before[1] == after[0] for before, after in pairwise(parts))
        assert (parts[0][0], parts[-1][1]) == (0, of_ranks[0][2])
        assert all(own.start <= share.start <= share.stop <= own.stop for share, own, _ in of_ranks)


@pytest.mark.parametrize("saved", [None, 2])
def test_a_checkpoint_is_the_same_file_for_every_division(saved: int | None, tmp_path: Path):
    """Saved by 4 ranks, with groups or without; loaded by 2 ranks that share one copy, and by 4 in groups."""

    def save() -> dict:
        torch.manual_seed(0)
        model = Net()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=3, shard_size=saved, lr=0.05)
        model(training.micro_batch(0, dist.get_rank())).square().mean().backward()
        optimizer.step()
        zerolab.save(optimizer, tmp_path / "step")
        return training.whole(model, optimizer)

    def load(shard_size: int | None) -> dict:
        model = Net()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=3, shard_size=shard_size, lr=0.05)
        zerolab.load(optimizer, tmp_path / "step")
        return training.whole(model, optimizer)

    expected = zerolab.launch(save, 4)[0]
    for world_size, shard_size in ((2, None), (4, 2), (4, 1)):
        for found in zerolab.launch(load, world_size, shard_size):
            assert training.differing(found, expected) == []


def test_what_differs_between_the_groups_is_found_before_the_update():
    """The second group writes other values to its parameters than the first."""

    def diverge():
        model = Net()
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=3, shard_size=2, lr=0.1)
        with optimizer.full_params(), torch.no_grad():
            next(model.parameters()).add_(dist.get_rank() // 2)

    with pytest.raises(zerolab.WorkerError, match=r"full_params\(\) ends with other values .* on rank 2"):
        zerolab.launch(diverge, 4)


def small(**settings) -> tuple[Net, zerolab.ZeroOptimizer]:
    torch.manual_seed(0)
    model = Net()
    settings = {"lr": 0.1, "momentum": 0.9, "shard_size": 2} | settings
    return model, zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=3, **settings)


def one_backward(model: Net) -> None:
    model(training.micro_batch(0, 0)).square().mean().backward()


def one_more_step(model: Net, optimizer: zerolab.ZeroOptimizer, odd: bool) -> None:
    one_backward(model)
    for _ in range(1 + odd):
        optimizer.step()
    one_backward(model)


def one_more_backward(model: Net, optimizer: zerolab.ZeroOptimizer, odd: bool) -> None:
    for _ in range(1 + odd):
        one_backward(model)
    optimizer.step()


def whole_parameters_on_some(model: Net, optimizer: zerolab.ZeroOptimizer, odd: bool) -> None:
    if odd:
        with optimizer.full_params():
            pass
    one_backward(model)


@pytest.mark.parametrize("odd_ranks", [(3,), (2, 3)], ids=["a rank", "a group"])
@pytest.mark.parametrize("diverge", [one_more_step, one_more_backward, whole_parameters_on_some])
def test_ranks_and_groups_that_take_other_paths_are_named_and_none_hangs(diverge: Callable, odd_ranks: tuple):
    """What a rank does in its group and what another does among all ranks are compared, too."""

    def run():
        diverge(*small(), dist.get_rank() in odd_ranks)

    with pytest.raises(zerolab.WorkerError, match=r"took different paths.* on rank (1|2|3)") as caught:
        zerolab.launch(run, 4, timeout=60)
    named = {int(rank) for rank in re.findall(r" on rank (\d)", str(caught.value))}
    assert len(named & set(odd_ranks)) == 1, "one of the two neighbors is odd"


def saved_while_offloaded(path: str, precision: str) -> tuple[Tensors, Tensors, float]:
    """The parameters of a run that saves each step, with masters and state on the CPU and without.

    And the bytes of optimizer state that are on the device after the last save of the first.
    """
    runs, held = [], 0.0
    for offload in (None, "cpu"):
        model, optimizer = small(offload=offload, precision=precision)
        for _ in range(2):
            one_backward(model)
            optimizer.step()
            zerolab.save(optimizer, f"{path}/{offload}")
        held = optimizer.memory().optimizer_bytes
        runs.append(training.whole(model, optimizer))
    return runs[0], runs[1], held


@pytest.mark.parametrize("precision", ["fp32", "mixed"])
def test_the_comparison_before_a_save_leaves_what_is_offloaded_as_it_was(precision: str, tmp_path: Path):
    for kept, offloaded, held in zerolab.launch(
        saved_while_offloaded, 4, str(tmp_path), precision, timeout=60
    ):
        assert training.differing(offloaded, kept) == []
        assert held == 0


def other_momentum(steps: int, store: Callable | None = None, path: str = "") -> None:
    """Ranks 2 and 3 forget their momentum, as a node that has loaded another file; then all go on."""
    model, optimizer = small()
    for step in range(1 + steps):
        one_backward(model)
        optimizer.step()
        if step == 0 and dist.get_rank() >= 2:
            for state in optimizer.state.values():
                state["momentum_buffer"].zero_()
    if store is not None:
        store(optimizer, path)


def test_copies_that_drift_apart_are_found_after_as_many_steps_as_there_are_units():
    with pytest.raises(
        zerolab.WorkerError, match=r"values of a copy of the model.*rank [01] has.*rank [23] has"
    ):
        zerolab.launch(other_momentum, 4, 12)


@pytest.mark.parametrize("store", [zerolab.save, zerolab.export])
def test_copies_that_differ_are_not_saved(store: Callable, tmp_path: Path):
    with pytest.raises(zerolab.WorkerError, match=r"copy of the model.*\(momentum_buffer\) with the hash"):
        zerolab.launch(other_momentum, 4, 0, store, str(tmp_path / "step"))
    assert not list(tmp_path.glob("step*/*")) and not (tmp_path / "step").is_file()


def test_other_reductions_in_flight_are_refused_because_they_decide_the_order():
    with pytest.raises(
        zerolab.WorkerError, match="rank 1 has Stage3 over groups of 2 ranks, reduces_in_flight 3"
    ):
        zerolab.launch(lambda: small(reduces_in_flight=3 * dist.get_rank()), 2, timeout=60)


def left_behind(optimizers: int) -> list[tuple[int, int]]:
    """By optimizer, how many process groups there are after it, and how many works nothing refers to."""
    found = []
    for _ in range(optimizers):
        model, optimizer = small()
        gc.collect()
        gc.disable()
        one_backward(model)
        optimizer.step()
        dead = sum(isinstance(each, Work) for each in gc.get_objects())
        found.append((len(dist.distributed_c10d._world.pg_map), dead))
        gc.enable()
        del model, optimizer
    return found


def test_optimizers_share_their_groups_and_reductions_leave_no_cycles():
    for of_rank in zerolab.launch(left_behind, 2, 3):
        assert len({groups for groups, _ in of_rank}) == 1
        assert [dead for _, dead in of_rank] == [0, 0, 0]


def test_ranks_that_ask_for_other_groups_are_refused_before_any_group_is_made():
    def differ():
        shard_size = 2 if dist.get_rank() else None
        zerolab.ZeroOptimizer(Net(), torch.optim.SGD, stage=3, shard_size=shard_size, lr=0.1)

    with pytest.raises(zerolab.WorkerError, match="rank 1 has Stage3 over groups of 2 ranks"):
        zerolab.launch(differ, 2, timeout=60)


@pytest.mark.parametrize("shard_size", [0, -1, 3, 8])
def test_groups_that_do_not_divide_the_ranks_are_refused(shard_size: int):
    with pytest.raises(ValueError, match=rf"shard_size is {shard_size}: .* a divisor of the 4 ranks"):
        zerolab.verify(3, 4, shard_size=shard_size)


@pytest.mark.parametrize("shard_size", [True, 2.0, "2"])
def test_a_size_of_another_type_is_refused(shard_size: object):
    with pytest.raises(TypeError, match="a divisor of the 4 ranks"):
        zerolab.verify(3, 4, shard_size=shard_size)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_another_stage_has_no_groups(stage: int):
    with pytest.raises(ValueError, match=f"shard_size is 2 at Stage{stage}: .* pass stage=3"):
        zerolab.verify(stage, 4, shard_size=2)


def train_a_part(shard_size: int | None) -> tuple[Tensors, float]:
    """Steps of one of 2 x 2 ranks, two of which share each copy of the model."""
    model, optimizer = cut_and_optimizer(2, 2, 3, shard_size=shard_size)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, optimizer, step)
        norm = optimizer.clip_grad_norm_(0.1).item()
        optimizer.step()
    return values_of(model, optimizer), norm


def test_groups_may_be_those_of_one_part_of_a_model_that_is_cut():
    """Two ranks hold a part each whole, and sum in the order in which stage 3 does."""
    runs = zip(zerolab.launch(train_a_part, 4, 1), zerolab.launch(train_a_part, 4, None), strict=True)
    for (found, norm), (expected, its_norm) in runs:
        assert (training.differing(found, expected), norm) == ([], its_norm)


def test_the_trace_names_the_slices_of_what_a_rank_owns():
    """16 numbers fill 64 bytes, so the second parameter is the second half, which rank 1 owns."""
    named = [("weight", nn.Parameter(torch.zeros(16))), ("bias", nn.Parameter(torch.zeros(16)))]
    unit = FlatUnit("unit", 0, named, 2, PRECISIONS["fp32"])
    unit.own(slice(16, 32))
    part = OwnedPart(unit, 2)
    assert part.describe(slice(0, 8)) == ("bias[0:8]",) and part.describe(slice(8, 16)) == ("bias[8:16]",)


def narrow(unit: FlatUnit) -> None:
    unit.grads.narrow_local()


def without_the_other_groups(self: HybridStage3, unit: FlatUnit) -> Work:
    """The gradients stay those of this group."""
    within = self.comm.reduce_scatter(unit.grads.local, unit, unit.grads.op)
    return within.then(lambda: narrow(unit))


def over_all_of_it(self: HybridStage3, unit: FlatUnit) -> Work:
    """All gradients are reduced between the groups, and then within them: right, and S times the bytes."""
    whole = self.copies.all_reduce(unit.grads.local, unit, unit.grads.op)
    return whole.then(lambda: self.comm.reduce_scatter(unit.grads.local, unit, unit.grads.op)).then(
        lambda: narrow(unit)
    )


@pytest.mark.parametrize(
    ("broken", "bits", "traffic"), [(without_the_other_groups, False, False), (over_all_of_it, None, False)]
)
def test_a_broken_reduction_is_seen(broken: Callable, bits: bool | None, traffic: bool):
    def model_fn() -> torch.nn.Module:
        HybridStage3.reduce_grads = broken
        return parity.small_gpt()

    report = zerolab.verify(3, 4, model_fn, parity.random_tokens, steps=1, shard_size=2, lr=1e-3)
    assert report.traffic_matches is traffic
    assert bits is None or report.bit_identical is bits

"""Promise: what concerns the whole model is decided by the ranks of both groups."""

import re
import sys
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from support import cut_models, meshes
from support.cut_models import SIZES
from support.meshes import backward, cut_and_optimizer, values_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

import zerolab

for module in (sys.modules[__name__], cut_models, meshes):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest


def skipped_steps(stage: int) -> tuple[int, bool]:
    """A gradient overflows on one tensor-parallel rank: whether this rank skips, and keeps its values."""
    model, optimizer = cut_and_optimizer(2, 2, stage, precision="mixed_fp16")
    before = values_of(model, optimizer)
    if optimizer.axes.parallel.rank == 1:
        model.blocks[0].mlp_in.weight.register_hook(lambda gradient: gradient.fill_(torch.inf))
    backward(model, optimizer, 0)
    optimizer.step()
    after = values_of(model, optimizer)
    return optimizer.loss_scale.skipped_steps, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("stage", range(4))
def test_an_overflow_on_one_rank_is_skipped_on_all(stage: int):
    assert zerolab.launch(skipped_steps, 4, stage, timeout=60) == [(1, True)] * 4


def one_rank_changes_lr() -> None:
    model, optimizer = cut_and_optimizer(1, 2, 2)
    backward(model, optimizer, 0)
    if optimizer.axes.parallel.rank == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def test_a_learning_rate_of_one_tensor_parallel_rank_is_refused():
    with pytest.raises(
        zerolab.WorkerError, match=r"ranks disagree about a step of tensor-parallel ranks.*lr"
    ):
        zerolab.launch(one_rank_changes_lr, 2, timeout=60)


def train_with_dropout(same_masks: bool) -> int:
    model, optimizer = cut_and_optimizer(1, 2, 3)
    handle = model.blocks[1].register_forward_hook(lambda m, x, y: torch.nn.functional.dropout(y, 0.5))
    for step in range(20):
        torch.manual_seed(step if same_masks else 100 * step + optimizer.axes.parallel.rank)
        backward(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    return step


def test_other_dropout_masks_on_the_ranks_of_one_copy_are_found():
    assert zerolab.launch(train_with_dropout, 2, True, timeout=60) == [19, 19]
    with pytest.raises(
        zerolab.WorkerError, match=r"ranks disagree about a step of tensor-parallel ranks.* with the bits"
    ):
        zerolab.launch(train_with_dropout, 2, False, timeout=60)


def whole_parameters_stay_equal(stage: int) -> dict:
    model, optimizer = cut_and_optimizer(1, 2, stage, noise=0.25)
    for step in range(3):
        backward(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    splits = {name for name, p in model.named_parameters() if p in optimizer.axes.splits}
    return {name: value for name, value in values_of(model, optimizer).items() if name not in splits}


@pytest.mark.parametrize("stage", (0, 3))
def test_parameters_that_are_not_cut_stay_the_same_on_all_ranks(stage: int):
    first, second = zerolab.launch(whole_parameters_stay_equal, 2, stage, timeout=60)
    assert len(first) == 2 + 2 + 1 + 2 * 6, "embeddings, last norm, head; in each block two norms, two biases"
    assert all(torch.equal(first[name], second[name]) for name in first)


def traffic_of_a_step(stage: int) -> tuple[int, int, int, int]:
    """What this rank sends within its copy, in the paper's count and on the wire; to others; 2Ψ or 3Ψ."""
    model, optimizer = cut_and_optimizer(2, 2, stage)
    psi = sum(parameter.numel() for parameter in model.parameters())  # of this rank's part
    root = sum(flat.numel for run in optimizer.engine.units if run.is_root for flat in run.flats)
    parallel = optimizer.axes.parallel
    for step in range(2):
        backward(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    sent = parallel.trace.traffic(0)
    assert parallel.trace.traffic(1) == sent
    assert {event.phase for event in parallel.trace.step(0)} == {"forward", "backward", "control"}
    own = optimizer.trace.traffic(0).logical_bytes
    return sent.logical_bytes, sent.wire_bytes, own, 4 * (3 * psi - root if stage == 3 else 2 * psi)


@pytest.mark.parametrize("stage", (1, 3))
def test_a_block_sends_eight_times_its_input_and_the_data_parallel_bytes_are_those_of_a_part(stage: int):
    stream_bytes = 4 * 2 * 8 * SIZES["width"]  # fp32, batch, length, width
    expected = SIZES["depth"] * 8 * stream_bytes
    for logical, wire, own, of_a_part in zerolab.launch(traffic_of_a_step, 4, stage, timeout=60):
        assert (logical, wire) == (expected, expected // 2)
        assert own == of_a_part


def second_derivative() -> None:
    model, _ = cut_and_optimizer(1, 2, 0)
    tokens = meshes.batch(0, 0, 0)
    loss = meshes.loss_of(model, tokens)
    (gradient,) = torch.autograd.grad(loss, model.norm.weight, create_graph=True)
    (first,) = torch.autograd.grad(loss, model.embedding.weight, create_graph=True)
    (first.sum() + gradient.sum()).backward()


def test_a_second_derivative_is_refused():
    with pytest.raises(zerolab.WorkerError, match=r"differentiate twice"):
        zerolab.launch(second_derivative, 2, timeout=60)


class Scaled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def wrong(kind: str) -> None:
    mesh = meshes.mesh_of(1, 2)
    from zerolab.tensor_parallel import TensorParallel, parallelize

    parallel = TensorParallel(mesh.get_group("tp"))
    adam = partial(zerolab.ZeroOptimizer, optimizer_class=torch.optim.Adam)
    if kind == "heads":
        parallelize(zerolab.models.GPT(vocab=8, width=9, depth=1, heads=3, context=4), parallel)
    if kind == "width":
        layers = torch.nn.Linear(4, 3), torch.nn.Linear(3, 4)
        parallelize(torch.nn.Sequential(*layers), parallel, pairs=[layers])
    if kind == "no pair":
        parallelize(torch.nn.Linear(4, 4), parallel)
    if kind == "foreign":
        parallelize(torch.nn.Linear(4, 4), parallel, pairs=[(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))])
    if kind == "own forward":
        layers = Scaled(4, 4), torch.nn.Linear(4, 4)
        parallelize(torch.nn.Sequential(*layers), parallel, pairs=[layers])
    if kind == "group":
        TensorParallel("tp")
    if kind == "dimensions":
        TensorParallel(mesh)
    if kind in ("no group", "a mesh"):
        parallelize(cut_models.whole_model(), None if kind == "no group" else mesh)
    if kind == "no module":
        parallelize("gpt", parallel)
    if kind == "twice":
        parallelize(parallelize(cut_models.whole_model(), parallel), parallel)
    if kind == "sections":
        layers = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        parallelize(torch.nn.Sequential(*layers), parallel, pairs=[(*layers, 3)])
    if kind == "two pairs":
        layers = [torch.nn.Linear(4, 4) for _ in range(3)]
        parallelize(torch.nn.Sequential(*layers), parallel, pairs=[layers[:2], layers[1:]])
    if kind == "DTensor":
        cut = torch.nn.Linear(4, 4)
        distribute_module(cut, mesh["tp"])
        parallelize(torch.nn.Sequential(cut), parallel)
    model = parallelize(cut_models.whole_model(), parallel)
    if kind == "not given":
        adam(model, process_group=mesh.get_group("dp"))
    if kind == "not cut":
        adam(cut_models.whole_model(), process_group=mesh.get_group("dp"), tensor_parallel=parallel)
    if kind == "same group":
        adam(model, tensor_parallel=parallel)
    if kind == "pickle":
        torch.save(model, "/dev/null")


REFUSALS = {
    "heads": r"an attention has 3 heads, which 2 tensor-parallel ranks do not divide: take a number",
    "width": r"0 has 3 features to cut, which 2 tensor-parallel ranks do not divide: take a number",
    "no pair": r"Linear has no zerolab.models.Block: name its pairs of linear layers",
    "foreign": r"is no linear layer of the model: pass nn.Linear modules that are found in",
    "own forward": r"0 is a Scaled with a forward of its own, which its part would not have: take a plain",
    "group": r"group is str: pass the process group of the ranks that share one copy",
    "dimensions": r"the mesh has 2 dimensions: pass one of them, as in init_device_mesh",
    "no group": r"parallel is NoneType: pass zerolab.TensorParallel\(group\), with the process group",
    "a mesh": r"parallel is DeviceMesh: pass zerolab.TensorParallel\(group\)",
    "no module": r"model is str: pass an nn.Module",
    "twice": r"was cut by parallelize\(\) before: cut a model once, with all its pairs",
    "sections": r"0 has 8 outputs, which 3 sections do not divide: pass the number of equal sections",
    "two pairs": r"pairs: 1 is in two pairs, or twice in one: name each layer once",
    "DTensor": r"parameter 0.weight is a DTensor, which PyTorch's own parallelism has cut: pass a model with",
    "not given": r"the model was cut for 2 ranks and tensor_parallel is None: cut it with parallelize",
    "not cut": r"the model is not cut and tensor_parallel is a TensorParallel of [12] ranks",
    "same group": r"process_group has the ranks \[0, 1\] and the tensor-parallel group \[0, 1\]",
    "pickle": r"does not pickle, because each rank has a part of it: store it with zerolab.save",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_does_not_fit_is_refused_with_a_way_out(kind: str):
    with pytest.raises(zerolab.WorkerError, match=REFUSALS[kind]):
        zerolab.launch(wrong, 2, kind, timeout=60)


def crossed(stage: int) -> str:
    """Data-parallel groups join the left half of one copy of the model and the right of the other."""
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 3), (1, 2))}
    mine = lambda *pairs: next(groups[pair] for pair in pairs if rank in pair)
    parallel = zerolab.TensorParallel(mine((0, 1), (2, 3)))
    model = zerolab.parallelize(cut_models.whole_model(), parallel)
    try:
        zerolab.ZeroOptimizer(
            model,
            torch.optim.Adam,
            stage=stage,
            process_group=mine((0, 3), (1, 2)),
            tensor_parallel=parallel,
        )
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("stage", [0, 3])
def test_groups_that_average_different_parts_are_refused(stage: int):
    for said in zerolab.launch(crossed, 4, stage, timeout=60):
        assert re.search(r"process_group have the parts \[[01], [01]\] of the model.* take both groups", said)


def without_some_ranks() -> str:
    """A data-parallel group of this rank alone, where two ranks have each part of the model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("all", "alone")).get_group("alone")
    parallel = zerolab.TensorParallel(mesh.get_group("tp"))
    model = zerolab.parallelize(cut_models.whole_model(), parallel)
    return refused(model, alone, parallel)


def test_groups_that_leave_out_ranks_are_refused():
    for said in zerolab.launch(without_some_ranks, 4, timeout=60):
        assert (
            "process_group has 1 ranks and the tensor-parallel group 2, and their product is not the 4"
            in said
        )


def not_a_member() -> str:
    group = dist.new_group([0, 1])
    try:
        return repr(zerolab.TensorParallel(group))
    except ValueError as error:
        return str(error)


def test_a_rank_outside_its_group_is_told_to_make_one_of_its_own():
    members, outside = (said := zerolab.launch(not_a_member, 3, timeout=60))[:2], said[2]
    assert members == ["a TensorParallel of 2 ranks"] * 2
    assert outside.startswith(
        "this rank is not a member of the group: every rank needs one, as in init_device_mesh"
    )


def in_a_mesh(sizes: tuple[int, int]) -> str:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    try:
        return repr(zerolab.TensorParallel(mesh["tp"]))
    except ValueError as error:
        return str(error)


def test_a_mesh_is_taken_by_the_ranks_in_it_and_refused_by_others():
    assert zerolab.launch(in_a_mesh, 4, (2, 2), timeout=60) == ["a TensorParallel of 2 ranks"] * 4
    *members, third, fourth = zerolab.launch(in_a_mesh, 4, (1, 2), timeout=60)
    assert members == ["a TensorParallel of 2 ranks"] * 2
    assert third.startswith("this rank is not in the mesh of the ranks [0, 1]: every rank needs one, as in")
    assert third == fourth and third.endswith("whose sizes multiply to the number of ranks")


def divided_and_not_cut() -> str:
    model = cut_models.whole_model()
    model.checkpointing = zerolab.Checkpointing(zerolab.TensorParallel(dist.group.WORLD))
    return refused(model, dist.group.WORLD, None)


def test_inputs_that_are_divided_in_a_model_that_is_not_cut_are_refused():
    for said in zerolab.launch(divided_and_not_cut, 2, timeout=60):
        assert (
            "checkpointing of the model divides inputs over 2 tensor-parallel ranks, and tensor_parallel is"
            in said
        )


def refused(model: torch.nn.Module, group: dist.ProcessGroup, parallel: zerolab.TensorParallel | None) -> str:
    try:
        zerolab.ZeroOptimizer(model, torch.optim.Adam, 1, process_group=group, tensor_parallel=parallel)
    except ValueError as error:
        return str(error)
    return "accepted"


def buffers_and_parameters() -> list[torch.Tensor]:
    """What a model that differs by rank holds after it was cut: none of it is in a pair."""
    parallel = zerolab.TensorParallel(dist.group.WORLD)
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model.register_buffer("scale", torch.randn(3))
    model.register_buffer("count", torch.tensor(dist.get_rank()))
    zerolab.parallelize(model, parallel, pairs=[(model[0], model[1])])
    return [model.scale, model.count, model[2].running_mean, model[1].bias.detach()]


def test_buffers_start_as_rank_0s_too():
    first, second = zerolab.launch(buffers_and_parameters, 2, timeout=60)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and second[1] == 0

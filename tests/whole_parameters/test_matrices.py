"""Groups for Muon: hidden matrices have their own optimizer, and what cannot work is refused."""

import sys

import cloudpickle
import pytest
import torch
from support import whole_updates
from support.whole_updates import Orthogonal, everything, matrices_and_others
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerolab
from zerolab.models import GPT

for module in (sys.modules[__name__], whole_updates):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def names_of(model: nn.Module, group: dict) -> list[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for p in group["params"]]


def test_the_matrices_of_blocks_and_nothing_else():
    model = GPT(vocab=8, width=8, depth=2, heads=2, context=4)
    model.blocks[0].table = nn.Embedding(3, 8)
    model.blocks[0].table_of_bags = nn.EmbeddingBag(3, 8)
    model.blocks[1].requires_grad_(False)
    others, hidden = zerolab.matrices_by(torch.optim.Muon, lr=0.02)(model)
    assert (hidden["optimizer"], hidden["lr"]) == (torch.optim.Muon, 0.02)
    found = names_of(model, hidden)
    assert found and all(name.startswith("blocks.0.") and "table" not in name for name in found)
    assert all(dict(model.named_parameters())[name].dim() == 2 for name in found)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sorted(found + names_of(model, others)) == sorted(trainable)


def test_a_matrix_that_two_blocks_share_is_one_of_theirs():
    model = GPT(vocab=8, width=8, depth=2, heads=2, context=4)
    model.blocks[1].mlp_in.weight = model.blocks[0].mlp_in.weight
    _, hidden = zerolab.matrices_by(torch.optim.Muon)(model)
    assert "blocks.0.mlp_in.weight" in names_of(model, hidden)


def test_a_model_without_blocks_is_refused_with_the_way_out():
    with pytest.raises(
        ValueError, match=r"^the Linear has no trainable matrix in a block.+params=\[\{'params'"
    ):
        zerolab.matrices_by(torch.optim.Muon)(nn.Linear(4, 4))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def said(params, **keywords) -> str:
    """What the engine says of these groups on a rank."""
    try:
        zerolab.ZeroOptimizer(Blocks(), torch.optim.AdamW, params=params, **keywords)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    "params, message",
    [
        (
            everything(torch.optim.Muon),
            "ValueError: parameter group 0: Muon takes parameters of 2 dimensions, and one of shape (8,)",
        ),
        (everything(torch.optim.LBFGS), "ValueError: parameter group 0: LBFGS cannot be sharded: "),
        (
            everything("Muon"),
            "TypeError: parameter group 0: optimizer_class is 'Muon', not a torch.optim.Optimizer class",
        ),
        (
            zerolab.matrices_by(torch.optim.Muon, lr=-1.0),
            "ValueError: parameter group 1: Learning rate should be >= 0 but is: -1.0",
        ),
    ],
)
def test_groups_that_cannot_work_are_refused_on_every_rank(params, message: str):
    for found in zerolab.launch(said, 2, params, timeout=60):
        assert found.startswith(message)


def other_classes_by_rank() -> str:
    rank = torch.distributed.get_rank()
    return said(everything((Orthogonal, torch.optim.Adam)[rank]))


def test_ranks_with_other_optimizers_are_refused():
    for found in zerolab.launch(other_classes_by_rank, 2, timeout=60):
        assert "ranks disagree about the parameter groups" in found and "group 0 by" in found


def add_a_group(optimizer_class: type | None) -> str:
    model = Blocks()
    some = [
        {"params": [b.bias for b in model.blocks]},
        {"params": [model.blocks[0].weight], "optimizer": Orthogonal},
    ]
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, params=some, lr=0.1)
    group = {"params": [model.blocks[1].weight], "lr": 0.5}
    try:
        optimizer.add_param_group(group | ({"optimizer": optimizer_class} if optimizer_class else {}))
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    "optimizer_class, accepted", [(None, True), (torch.optim.AdamW, False), (Orthogonal, False)]
)
def test_a_group_that_is_added_has_the_optimizer_that_its_parameters_are_laid_out_for(
    optimizer_class, accepted
):
    for found in zerolab.launch(add_a_group, 2, optimizer_class, timeout=60):
        assert (found == "accepted") is accepted
        assert accepted or "these parameters are laid out for AdamW (elementwise), and the group's" in found


def with_tensor_parallelism(params) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = GPT(vocab=8, width=8, depth=1, heads=2, context=4)
    parallel = zerolab.TensorParallel(mesh.get_group("tp"))
    zerolab.parallelize(model, parallel)
    params = params(model)
    try:
        zerolab.ZeroOptimizer(
            model,
            torch.optim.AdamW,
            params=params,
            process_group=mesh.get_group("dp"),
            tensor_parallel=parallel,
        )
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_matrix_that_is_cut_by_tensor_parallelism_is_refused_by_name():
    for found in zerolab.launch(
        with_tensor_parallelism, 2, zerolab.matrices_by(torch.optim.Muon), timeout=60
    ):
        assert found.startswith(
            "Muon updates whole parameters, and each tensor-parallel rank has a part of blocks.0."
        )


def frozen_parts(model: nn.Module) -> list[dict]:
    """Only biases are trained, and Muon has the matrices."""
    for p in model.parameters():
        p.requires_grad_(p.dim() == 1)
    own = {"optimizer": torch.optim.Muon, "params": [p for p in model.parameters() if p.dim() == 2]}
    return [own, {"params": [p for p in model.parameters() if p.requires_grad]}]


def test_a_frozen_matrix_may_be_cut_by_tensor_parallelism():
    assert zerolab.launch(with_tensor_parallelism, 2, frozen_parts, timeout=60) == ["accepted"] * 2


def cut_a_matrix() -> str:
    torch.manual_seed(0)
    optimizer = zerolab.ZeroOptimizer(Blocks(), torch.optim.AdamW, params=matrices_and_others)
    unit = next(each for each in optimizer.units if each.cuts is not None)
    try:
        unit.own(slice(0, unit.padded_numel - 16))
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_stage_that_cuts_a_whole_parameter_is_refused():
    (found,) = zerolab.launch(cut_a_matrix, 1, timeout=60)
    assert "take the range that Stage.share returns" in found


@pytest.mark.parametrize("given", [nn.Linear(2, 2), "Muon", nn.Linear])
def test_what_is_no_optimizer_class_is_refused_at_once(given):
    with pytest.raises(
        TypeError, match=r"takes an optimizer class, not a \w+: write params=zerolab.matrices_by"
    ):
        zerolab.matrices_by(given)

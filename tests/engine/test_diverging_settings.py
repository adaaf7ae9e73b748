"""Promise: hyperparameters that differ between ranks are named before any parameter changes."""

import fractions
import pickle
import sys

import cloudpickle
import numpy as np
import pytest
import torch
from support.user_models import WIDTH, Net

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


def loss(optimizer: zerolab.ZeroOptimizer) -> torch.Tensor:
    return optimizer.model(torch.ones(2, WIDTH)).sum()


def odd_one_out(optimizer: zerolab.ZeroOptimizer) -> bool:
    return optimizer.rank == optimizer.world_size - 1


def another_rate(optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.25


def another_schedule(optimizer) -> None:
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)


def another_group(optimizer) -> None:
    optimizer.add_param_group({"params": list(optimizer.model.after.parameters()), "lr": 0.25})


SETTINGS = {another_rate: "lr=0.25", another_schedule: "lr=0.05", another_group: "rank 0 has nothing"}


@pytest.mark.parametrize("stage", (0, 1, 3))
@pytest.mark.parametrize("change", SETTINGS)
def test_hyperparameters_that_differ_are_named_before_any_parameter_changes(change, stage: int):
    def train() -> str | None:
        torch.manual_seed(0)
        model = Net()
        inner = [*model.before.parameters(), *model.blocks.parameters()]
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, params=inner, lr=0.1)
        loss(optimizer).backward()
        optimizer.step()
        if odd_one_out(optimizer):
            change(optimizer)
        loss(optimizer).backward()
        shards = [unit.shard.clone() for unit in optimizer.units]
        with pytest.raises(RuntimeError, match="ranks disagree about the hyperparameters") as caught:
            optimizer.step()
        assert all(map(torch.equal, shards, (unit.shard for unit in optimizer.units)))
        return str(caught.value)

    for said in zerolab.launch(train, 3, timeout=60):
        assert SETTINGS[change] in said and "rank 2 has" in said


NUMBERS = {
    "a scalar": np.float32,
    "an array without dimensions": np.array,
    "an array": lambda value: np.array([value, 1.0]),
    "in a tuple": lambda value: (np.float16(value), 0.5),
    "a fraction": fractions.Fraction,
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_of_other_types_that_differ_are_named_too(kind: str):
    def train() -> None:
        optimizer = zerolab.ZeroOptimizer(Net(), torch.optim.SGD, stage=1, lr=0.5)
        optimizer.param_groups[0]["mine"] = NUMBERS[kind](0.25 if odd_one_out(optimizer) else 0.5)
        loss(optimizer).backward()
        optimizer.step()

    with pytest.raises(zerolab.WorkerError, match="ranks disagree about the hyperparameters"):
        zerolab.launch(train, 2, timeout=60)


def test_an_array_that_is_changed_in_place_counts():
    def train() -> list[float]:
        optimizer = zerolab.ZeroOptimizer(Net(), torch.optim.SGD, stage=1, lr=np.array(0.5))
        for _ in range(2):
            optimizer.param_groups[0]["lr"] *= 0.5  # NumPy does this in place
            loss(optimizer).backward()
            optimizer.step()
        return [float(each.param_groups[0]["lr"]) for each in optimizer.local.optimizers]

    assert zerolab.launch(train, 1, timeout=60) == [[0.125]]


@pytest.mark.parametrize(
    "value", [lambda step: 1.0, object(), {"a", "b", "c"}, (torch.ones(2), 0.9), "decay"]
)
def test_what_only_looks_different_on_ranks_that_agree_is_accepted(value):
    def train() -> int:
        spent = [object() for _ in range(100 * torch.distributed.get_rank())]  # so that addresses differ
        group = {"params": list((model := Net()).parameters()), "name": "all of them"}
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, params=[group], lr=0.1)
        optimizer.param_groups[0]["mine"] = pickle.loads(cloudpickle.dumps(value))
        loss(optimizer).backward()
        optimizer.step()
        return optimizer.trace.step_number + 0 * len(spent)

    assert zerolab.launch(train, 2, timeout=60) == [1, 1]


def test_a_norm_to_clip_to_that_differs_is_named():
    def train() -> None:
        optimizer = zerolab.ZeroOptimizer(Net(), torch.optim.SGD, stage=2, lr=0.1)
        loss(optimizer).backward()
        optimizer.clip_grad_norm_(2.0 if odd_one_out(optimizer) else 1.0)

    with pytest.raises(zerolab.WorkerError, match=r"exchange of norms to clip to [12].0 in L2.0 on rank"):
        zerolab.launch(train, 3, timeout=60)

"""Promise: a model that something else synchronizes, holds or has changed is refused by name."""

import sys

import cloudpickle
import pytest
import torch
from support.trained import on_two_ranks
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))


def optimizer_of(model: nn.Module, stage: int = 1) -> zerolab.ZeroOptimizer:
    return zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)


def ddp_before(stage: int) -> None:
    optimizer_of(nn.parallel.DistributedDataParallel(small()), stage)


def data_parallel(stage: int) -> None:
    optimizer_of(nn.DataParallel(small()), stage)


def ddp_inside(stage: int) -> None:
    optimizer_of(nn.Sequential(nn.parallel.DistributedDataParallel(small()), nn.Linear(2, 2)), stage)


def ddp_after(stage: int) -> None:
    model = small()
    optimizer_of(model, stage)
    nn.parallel.DistributedDataParallel(model)(torch.randn(3, 8)).sum().backward()


def fsdp(stage: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = small()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer_of(model, stage)


def tensor_parallel(stage: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = small()
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    optimizer_of(model, stage)


def shared_with_another_model(stage: int) -> None:
    encoder = nn.Linear(8, 8)
    optimizer_of(nn.Sequential(encoder, nn.Linear(8, 2)), stage)
    optimizer_of(nn.Sequential(encoder, nn.Linear(8, 3)), stage)


def part_of_another_model(stage: int) -> None:
    model = small()
    optimizer_of(model, stage)
    optimizer_of(model[0], stage)


def replaced_module(stage: int) -> None:
    model = small()
    optimizer = optimizer_of(model, stage)
    model[1] = nn.Linear(8, 2)
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()


def removed_module(stage: int) -> None:
    model = small()
    optimizer = optimizer_of(model, stage)
    del model[1]
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()


def complex_parameter(stage: int) -> None:
    model = small()
    model.weight = nn.Parameter(torch.randn(4, dtype=torch.cfloat))
    optimizer_of(model, stage)


def kept_transpose(stage: int) -> None:
    """As autoencoders have it that tie the decoder's weight to the encoder's."""
    model = small()
    model.decoder_weight = model[0].weight.t()
    optimizer_of(model, stage)


def kept_in_a_buffer(stage: int) -> None:
    model = small()
    model[1].register_buffer("first_row", model[0].weight.data[0])
    optimizer_of(model, stage)


def kept_in_a_list(stage: int) -> None:
    model = small()
    model.average = [parameter.detach() for parameter in model.parameters()]
    optimizer_of(model, stage)


def grad_scaler(stage: int) -> None:
    model, scaler = small(), torch.amp.GradScaler("cpu")
    optimizer = optimizer_of(model, stage)
    scaler.scale(model(torch.randn(3, 8)).sum()).backward()
    scaler.step(optimizer)


def thawed_parameter(stage: int) -> None:
    model = small()
    model[0].requires_grad_(False)
    optimizer = optimizer_of(model, stage)
    model[0].requires_grad_(True)
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()


def frozen_afterwards(stage: int) -> bool:
    """What the error for a thawed parameter advises: gradual unfreezing."""
    model = small()
    optimizer = optimizer_of(model, stage)
    with optimizer.full_params():
        before = model[0].weight.detach().clone()
    moved = []
    for frozen in (True, False):
        model[0].requires_grad_(not frozen)
        model(torch.ones(3, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.full_params():
            moved.append(not torch.equal(before, model[0].weight))
    return moved == [False, True]


@pytest.mark.parametrize("stage", [0, 3])
def test_the_way_out_for_gradual_unfreezing_works(stage: int):
    assert on_two_ranks(frozen_afterwards, stage) == [True] * 2


def uneven_inputs(stage: int) -> None:
    from torch.distributed.algorithms.join import Join

    with Join([optimizer_of(small(), stage)]):
        pass


REFUSED = {
    ddp_before: "the model is a DistributedDataParallel, .*: pass the bare module",
    data_parallel: "the model is a DataParallel, .*: pass the bare module",
    ddp_inside: "submodule 0 is a DistributedDataParallel, .*: pass the bare module",
    ddp_after: "wrapped in DistributedDataParallel after it, .*: call the model itself",
    fsdp: "the model is a FSDPModule, .*: pass the bare module",
    tensor_parallel: r"parameter 0.weight is a DTensor, .*: pass a model of plain parameters",
    shared_with_another_model: "parameter 0.weight belongs to another ZeroOptimizer, that of a Sequential",
    part_of_another_model: "parameter weight belongs to another ZeroOptimizer, that of a Sequential",
    thawed_parameter: "parameter 0.weight was frozen when .* and freeze it afterwards",
    replaced_module: "module 1 was replaced or removed .*: change the model first",
    removed_module: "module 1 was replaced or removed .*: change the model first",
    complex_parameter: r"weight is torch.complex64, .* torch.view_as_real\(...\), the parameter",
    uneven_inputs: r"Join is not supported: let every rank make the same number of steps. .* count=0",
    kept_transpose: "decoder_weight shares memory with parameter 0.weight, .* in forward .* make it a clone",
    kept_in_a_buffer: "1.first_row shares memory with parameter 0.weight, .*: 1.first_row would keep the old",
    kept_in_a_list: "average shares memory with parameter 0.weight",
    grad_scaler: r'GradScaler .* precision="mixed_fp16" and call optimizer.scale\(loss\).backward\(\)',
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_it_is_refused_with_the_way_out(case):
    with pytest.raises(zerolab.WorkerError, match=REFUSED[case]):
        on_two_ranks(case, 1)


@pytest.mark.parametrize("case", [shared_with_another_model, part_of_another_model, replaced_module])
def test_at_stage_3_in_the_same_words(case):
    with pytest.raises(zerolab.WorkerError, match=REFUSED[case]):
        on_two_ranks(case, 3)


def parts_of_one_file(stage: int) -> bool:
    """Parameters, buffers and attributes that lie beside each other in one storage, as in a mapped file."""
    model, content = small(), torch.arange(100.0)
    model[0].weight = nn.Parameter(content[:64].view(8, 8))
    model[0].register_buffer("scale", content[64:72])
    model.rest = {"of the file": content[72:]}
    optimizer = optimizer_of(model, stage)
    with optimizer.full_params():
        return torch.equal(model[0].weight.detach().flatten(), content[:64])


@pytest.mark.parametrize("stage", [1, 3])
def test_tensors_beside_a_parameter_in_one_storage_are_no_reason_to_refuse(stage: int):
    assert on_two_ranks(parts_of_one_file, stage) == [True] * 2


class Normed(nn.Module):
    """Both keep tensors in the memory of weights, and make them again in forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.LSTM(4, 4)
        nn.utils.parametrizations.weight_norm(self.cell, "weight_hh_l0")
        self.head = nn.utils.spectral_norm(nn.Linear(4, 4))

    def forward(self, x):
        return self.head(self.cell(x)[0])


def train_normed(stage: int | None) -> torch.Tensor:
    model = Normed()
    plain = torch.optim.SGD(model.parameters(), lr=0.1) if stage is None else None
    optimizer = plain or optimizer_of(model, stage)
    for _ in range(3):
        model(torch.ones(2, 3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model(torch.ones(2, 3, 4)).detach()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_a_module_makes_again_in_forward_is_no_reason_to_refuse(stage: int):
    expected = train_normed(None)
    assert all(torch.equal(found, expected) for found in on_two_ranks(train_normed, stage))


class OfComplexNumbers(nn.Module):
    """What the error for a complex parameter advises."""

    def __init__(self):
        super().__init__()
        self.pairs = nn.Parameter(torch.view_as_real(torch.ones(4, dtype=torch.cfloat)))

    def forward(self, x):
        return (torch.view_as_complex(self.pairs) * x).abs().square().sum()


def train_complex(stage: int) -> float:
    model = OfComplexNumbers()
    optimizer = optimizer_of(model, stage)
    model(torch.ones(4)).backward()
    optimizer.step()
    with optimizer.full_params():
        return model.pairs.sum().item()


@pytest.mark.parametrize("stage", [1, 3])
def test_the_way_out_for_complex_parameters_works(stage: int):
    assert on_two_ranks(train_complex, stage) == [pytest.approx(4 * (1 - 0.1 * 2))] * 2

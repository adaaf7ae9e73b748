"""A cut GPT and its optimizer on a mesh of ranks, and training steps, for the tests of tensor parallelism."""

import torch
from torch.distributed.device_mesh import init_device_mesh

import zerolab
from support.cut_models import whole_model
from zerolab.tensor_parallel import TensorParallel, parallelize


def mesh_of(data_parallel: int, tensor_parallel: int):
    return init_device_mesh(
        zerolab.device().type, (data_parallel, tensor_parallel), mesh_dim_names=("dp", "tp")
    )


def cut_and_optimizer(
    data_parallel: int, tensor_parallel: int, stage: int = 3, noise: float = 0.0, **settings
):
    """The part of this rank, with AdamW. Each rank draws other start values; parallelize() takes rank 0's.

    ``noise``: what is added to all values after that, times the rank.
    """
    mesh = mesh_of(data_parallel, tensor_parallel)
    torch.manual_seed(torch.distributed.get_rank())
    parallel = TensorParallel(mesh.get_group("tp"))
    model = parallelize(whole_model().to(zerolab.device()), parallel)
    for parameter in model.parameters():
        parameter.data += noise * torch.distributed.get_rank()
    settings = {"process_group": mesh.get_group("dp"), "tensor_parallel": parallel, "lr": 0.01} | settings
    return model, zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, **settings)


def batch(step: int, micro: int, replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + replica)
    return torch.randint(0, 32, (2, 9), generator=generator).to(zerolab.device())


def loss_of(model, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[:, :-1], tokens[:, 1:])


def backward(model, optimizer, step: int, micro: int = 0, replica: int | None = None) -> None:
    loss = loss_of(model, batch(step, micro, optimizer.rank if replica is None else replica))
    (loss if optimizer.loss_scale is None else optimizer.scale(loss)).backward()


def values_of(model, optimizer) -> dict[str, torch.Tensor]:
    with optimizer.full_params():
        return {name: p.detach().clone() for name, p in model.named_parameters()}

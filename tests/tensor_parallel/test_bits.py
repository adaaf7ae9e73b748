"""Promise: a GPT that is cut over ranks trains bit for bit as the same products in one process do."""

import sys

import cloudpickle
import pytest
import torch
from support import cut_models, meshes, references
from support.cut_models import cut_model, name_in_cut_model
from support.meshes import backward, batch, cut_and_optimizer, loss_of, values_of
from support.references import Replicas

import zerolab

for module in (sys.modules[__name__], cut_models, meshes, references):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest

STEPS, MICRO_BATCHES = 3, 2


def train(stage: int, data_parallel: int, tensor_parallel: int, precision: str, max_norm: float):
    """One rank: its parameters by their names in the cut model, and the norms."""
    model, optimizer = cut_and_optimizer(data_parallel, tensor_parallel, stage, precision=precision)
    norms = []
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            backward(model, optimizer, step, micro)
        norms.append(optimizer.clip_grad_norm_(max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    rank = optimizer.axes.parallel.rank
    return {name_in_cut_model(name, rank): p for name, p in values_of(model, optimizer).items()}, norms


def reference(data_parallel: int, parts: int, precision: str, max_norm: float):
    """One process: the cut model's parameters, and the norms."""
    torch.set_num_threads(1)  # as each of several ranks has here: threads add up in another order
    replicas = Replicas(
        lambda: cut_model(parts), data_parallel, torch.optim.AdamW, precision=precision, lr=0.01
    )
    norms = []
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            for rank, model in enumerate(replicas.models):
                replicas.scaled(loss_of(model, batch(step, micro, rank))).backward()
            replicas.collect()
            replicas.reduce()
        norms.append(replicas.clip_grad_norm_(max_norm).item())
        replicas.step()
        replicas.zero_grad()
    return {name: p.detach() for name, p in replicas.models[0].named_parameters()}, norms


MESHES = [(2, 2, "fp32"), (1, 4, "fp32"), (2, 1, "fp32")]
PRECISIONS = ("mixed", "mixed_fp32_grads", "mixed_fp16")
MESHES += [(*mesh, precision) for mesh in ((2, 2), (1, 4)) for precision in PRECISIONS]


@pytest.mark.parametrize(("data_parallel", "tensor_parallel", "precision"), MESHES)
@pytest.mark.parametrize("stage", range(4))
def test_the_bits_of_one_process(stage: int, data_parallel: int, tensor_parallel: int, precision: str):
    arguments = (data_parallel, tensor_parallel, precision, 0.5)
    ((expected, norms),) = zerolab.launch(reference, 1, *arguments, timeout=120)
    seen = set()
    for found, own_norms in zerolab.launch(
        train, data_parallel * tensor_parallel, stage, *arguments, timeout=120
    ):
        assert own_norms == norms
        different = [name for name, values in found.items() if not torch.equal(values, expected[name])]
        assert different == []
        seen |= found.keys()
    assert seen == expected.keys()

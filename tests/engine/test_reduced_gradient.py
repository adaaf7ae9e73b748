"""Promise: every use of a gradient that is in the flat buffer is an error that says how to do it instead."""

import copy
import io
import pickle
import sys

import cloudpickle
import pytest
import torch
from support.trained import build, on_two_ranks
from support.training import WIDTH
from torch import nn

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.mark.parametrize("stage", [0, 3])
def test_every_use_of_a_reduced_gradient_is_an_error_that_says_how(stage: int):
    def use(stage: int) -> list[str]:
        model, _ = build(stage)
        model(torch.ones(2, WIDTH)).sum().backward()
        uses = {
            "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            "clip_grad_value_": lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
            "get_total_norm": lambda: nn.utils.get_total_norm([p.grad for p in model.parameters()]),
            "norm": lambda: model.before.weight.grad.norm(),
            "scale": lambda: model.before.weight.grad.mul_(0.5),
            "zero_": lambda: model.before.weight.grad.zero_(),
            "clone": lambda: model.before.weight.grad.clone(),
            "numpy": lambda: model.before.weight.grad.numpy(),
            "item": lambda: model.before.weight.grad.sum().item(),
            "index": lambda: model.before.weight.grad[0, 0],
            "deepcopy": lambda: copy.deepcopy(model.before.weight.grad),
            "pickle": lambda: pickle.dumps(model.before.weight.grad),
            "save": lambda: torch.save(model.before.weight.grad, io.BytesIO()),
            "zero_grad": lambda: model.zero_grad(set_to_none=False),
        }
        wrong = []
        for what, do in uses.items():
            print(what, flush=True)
            try:
                do()
                wrong.append(f"{what}: no error")
            except RuntimeError as error:
                if "optimizer." not in str(error):
                    wrong.append(f"{what}: {error}")
        grad = model.before.weight.grad
        assert (
            grad.shape == model.before.weight.shape and grad.numel() == WIDTH**2 and "Reduced" in repr(grad)
        )
        return wrong

    for wrong in on_two_ranks(use, stage):
        assert wrong == []

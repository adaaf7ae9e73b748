"""Promise: on GPUs Adam is fused, unless somebody chose otherwise or wants the bits of a plain loop."""

import pytest
import torch
from torch import nn

from zerolab.optimizer.settings import with_fused

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class OwnAdam(torch.optim.Adam):
    """A subclass that does not take the keyword."""

    def __init__(self, params, lr: float = 1e-3):
        super().__init__(params, lr=lr)


@pytest.mark.parametrize("adam", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_is_fused_on_a_gpu(adam: type):
    assert with_fused(adam, {"lr": 0.1}, [{"params": []}], GPU) == {"lr": 0.1, "fused": True}
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    adam([parameter], **with_fused(adam, {"lr": 0.1}, [], GPU)).step()  # torch takes it


@pytest.mark.parametrize(
    "adam, defaults, group, device",
    [
        (torch.optim.Adam, {}, {}, CPU),
        (torch.optim.SGD, {"lr": 0.1}, {}, GPU),
        (OwnAdam, {}, {}, GPU),
        (torch.optim.Adam, {"foreach": True}, {}, GPU),
        (torch.optim.Adam, {"fused": False}, {}, GPU),
        (torch.optim.Adam, {"capturable": True}, {}, GPU),
        (torch.optim.Adam, {}, {"foreach": False}, GPU),
    ],
)
def test_what_somebody_chose_stays(adam: type, defaults: dict, group: dict, device: torch.device):
    assert with_fused(adam, defaults, [group], device) == defaults


def test_deterministic_algorithms_keep_the_bits_of_a_plain_loop():
    torch.use_deterministic_algorithms(True)
    try:
        assert with_fused(torch.optim.Adam, {}, [], GPU) == {}
    finally:
        torch.use_deterministic_algorithms(False)

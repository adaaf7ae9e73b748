"""Promise: a parameter keeps its order in memory, so that channels-last models run the kernels they chose."""

from pathlib import Path

import pytest
import torch
from torch import nn

import zerolab


class Turned(nn.Module):
    """A convolution in channels-last form, and a weight that is the transpose of what is stored."""

    def __init__(self, channels_last: bool = True):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 2)
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        if channels_last:
            self.convolution = self.convolution.to(memory_format=torch.channels_last)

    def forward(self, images):
        return (self.convolution(images).mean((2, 3)) @ self.turned).square().mean()


def build(stage: int, channels_last: bool = True) -> zerolab.ZeroOptimizer:
    torch.manual_seed(0)
    return zerolab.ZeroOptimizer(Turned(channels_last), torch.optim.Adam, stage=stage, lr=0.1)


def step(optimizer: zerolab.ZeroOptimizer) -> None:
    torch.manual_seed(optimizer.rank)
    optimizer.model(torch.randn(2, 3, 4, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_strides_are_kept_while_whole_and_told_while_sharded(stage: int):
    def strides():
        torch.manual_seed(0)
        expected = {name: p.stride() for name, p in Turned().named_parameters()}
        optimizer = build(stage)
        found = [{name: p.stride() for name, p in optimizer.model.named_parameters()}]
        step(optimizer)
        grads = {name: gradient.shape for name, gradient in optimizer.full_grads().items()}
        with optimizer.full_params():
            found.append({name: p.stride() for name, p in optimizer.model.named_parameters()})
            assert optimizer.model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
        return all(each == expected for each in found), grads == {}

    assert zerolab.launch(strides, 2) == [(True, True)] * 2


def test_a_checkpoint_comes_back_and_one_laid_out_otherwise_is_refused(tmp_path: Path):
    def run():
        optimizer = build(3)
        step(optimizer)
        zerolab.save(optimizer, tmp_path / "run")
        zerolab.export(optimizer, tmp_path / "model.pt")
        with optimizer.full_params():
            values = {name: p.detach().clone() for name, p in optimizer.model.named_parameters()}
        again = build(1)
        zerolab.load(again, tmp_path / "run")
        assert all(torch.equal(p, values[name]) for name, p in again.model.named_parameters())
        plain = Turned(channels_last=False)
        plain.load_state_dict(torch.load(tmp_path / "model.pt"))
        assert all(torch.equal(p, values[name]) for name, p in plain.named_parameters())
        try:
            zerolab.load(build(1, channels_last=False), tmp_path / "run")
        except ValueError as error:
            return str(error)

    refused = r"parameter convolution.weight is of shape (4, 3, 2, 2) with strides (12, 1, 6, 3) in the check"
    assert [answer[: len(refused)] for answer in zerolab.launch(run, 2)] == [refused] * 2

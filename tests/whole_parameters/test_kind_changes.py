"""Promise: options with which slices may not be updated any more are refused before anything is updated."""

import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from support import whole_updates
from support.user_models import Net
from support.whole_updates import Orthogonal, Trusting, everything

import zerolab

for module in (sys.modules[__name__], whole_updates):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest


def build(optimizer_class=Trusting, **settings) -> zerolab.ZeroOptimizer:
    torch.manual_seed(0)
    return zerolab.ZeroOptimizer(Net(), optimizer_class, stage=2, **settings)


def step(optimizer: zerolab.ZeroOptimizer) -> None:
    optimizer.zero_grad()
    optimizer.model(torch.ones(3, 8)).square().mean().backward()
    optimizer.step()


def said(action) -> str:
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "accepted"


def whole(optimizer: zerolab.ZeroOptimizer) -> torch.Tensor:
    with optimizer.full_params():
        return torch.cat([p.detach().flatten() for p in optimizer.model.parameters()])


def switch_on_and_off() -> tuple[str, bool, str]:
    optimizer = build()
    step(optimizer)
    before = whole(optimizer)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    refused = said(lambda: step(optimizer))
    unchanged = torch.equal(before, whole(optimizer))
    optimizer.param_groups[0]["weight_decay"] = 0.0
    return refused, unchanged, said(lambda: step(optimizer))


def test_an_option_that_makes_the_update_one_of_whole_parameters_is_refused():
    for refused, unchanged, again in zerolab.launch(switch_on_and_off, 2, timeout=60):
        assert refused == (
            "the options of parameter group 0 are lr=0.1, weight_decay=0.1 now. Trusting then updates whole "
            "parameters, and these are cut between ranks: build the ZeroOptimizer with these options"
        )
        assert unchanged and again == "accepted"


class NothingAtZero(Orthogonal):
    """Without a rate it looks at no gradient, so it looks elementwise."""

    def step(self, closure=None) -> None:
        if self.param_groups[0]["lr"]:
            super().step(closure)


def start_at_zero(optimizer_class: type) -> list[str]:
    optimizer = build(optimizer_class, lr=0.0)
    first = said(lambda: step(optimizer))
    optimizer.param_groups[0]["lr"] = 0.1
    return [first, said(lambda: step(optimizer))]


def test_a_class_that_was_tried_with_a_rate_of_zero_is_tried_again():
    for first, then in zerolab.launch(start_at_zero, 2, NothingAtZero, timeout=60):
        assert first == "accepted" and "NothingAtZero then updates whole parameters" in then


def test_a_class_that_spreads_what_is_not_finite_is_seen_to_need_whole_parameters_at_a_rate_of_zero_too():
    assert zerolab.launch(start_at_zero, 2, Orthogonal, timeout=60) == [["accepted", "accepted"]] * 2


def warm_up() -> str:
    """A rate of zero needs less than the layout gives, and a rate above it what it was built for."""
    optimizer = build(Orthogonal, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, epoch / 3))
    rates = []
    for _ in range(5):
        step(optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return ", ".join(f"{rate:.2f}" for rate in rates)


def test_a_warm_up_from_zero_goes_on():
    assert zerolab.launch(warm_up, 2, timeout=60) == ["0.00, 0.03, 0.07, 0.10, 0.10"] * 2


def save(path: Path) -> None:
    optimizer = build(weight_decay=0.1)
    step(optimizer)
    zerolab.save(optimizer, path)


def load(path: Path) -> tuple[str, bool]:
    optimizer = build()
    step(optimizer)
    before = whole(optimizer)
    return said(lambda: zerolab.load(optimizer, path)), torch.equal(before, whole(optimizer))


def test_a_checkpoint_with_such_options_is_refused_before_anything_is_loaded(tmp_path: Path):
    zerolab.launch(save, 2, tmp_path, timeout=60)
    for refused, unchanged in zerolab.launch(load, 2, tmp_path, timeout=60):
        assert "Trusting then updates whole parameters" in refused and unchanged


def load_a_state_dict() -> tuple[str, dict]:
    state_dict = build().state_dict()
    state_dict["param_groups"][0]["weight_decay"] = 0.1
    optimizer = build()
    return said(lambda: optimizer.load_state_dict(state_dict)), optimizer.param_groups[0]["weight_decay"]


def test_so_is_a_state_dict():
    for refused, kept in zerolab.launch(load_a_state_dict, 2, timeout=60):
        assert "Trusting then updates whole parameters" in refused and kept == 0.0


def always_divides(self, closure=None) -> None:
    with torch.no_grad():
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.add_(p.grad / (1 + p.norm()), alpha=-0.1)


def other_kind_on_one_rank() -> str:
    if torch.distributed.get_rank():
        Trusting.step = always_divides  # as a processor with other kernels might round otherwise
    return said(lambda: build(params=everything(Trusting)))


def test_ranks_that_find_other_kinds_are_refused():
    for found in zerolab.launch(other_kind_on_one_rank, 2, timeout=60):
        assert "ranks disagree about the parameter groups" in found and "by parameter" in found


def load_theirs(same_tag: bool) -> str:
    """A state_dict of momentum, where Adafactor has rows and columns."""
    theirs, ours = build(Orthogonal).state_dict(), build(torch.optim.Adafactor)
    if same_tag:
        theirs["zerolab"] = ours.state_dict()["zerolab"]
    return said(lambda: ours.load_state_dict(theirs))


@pytest.mark.parametrize(
    "same_tag, message",
    [
        (False, "this state_dict is the shard of {'rank': "),
        (
            True,
            "parameter group 0 of the state_dict has no beta2_decay, d, eps, foreach, maximize, and",
        ),
    ],
)
def test_the_state_dict_of_another_class_is_refused(same_tag: bool, message: str):
    for found in zerolab.launch(load_theirs, 2, same_tag, timeout=60):
        assert found.startswith(message)

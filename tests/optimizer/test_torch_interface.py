"""Promise: what torch.optim.Optimizer offers has its effect on a ZeroOptimizer too, or is refused."""

import copy
import io
import pickle
import sys
from collections.abc import Callable

import cloudpickle
import pytest
import torch
from support.trained import train_a_step
from torch import nn

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def with_hooks(optimizer: torch.optim.Optimizer) -> list:
    """Save and load with all hooks registered; return what they did, in order."""
    calls = []

    def note(name: str) -> Callable:
        return lambda given, *_: calls.append((name, given is optimizer))

    def marked(given, state_dict: dict) -> dict:
        calls.append(("replace the saved", "state" in state_dict))
        return state_dict | {"mine": 1}

    def unmarked(given, state_dict: dict) -> dict:
        calls.append(("replace the loaded", state_dict.pop("mine")))
        groups = [group | {"lr": 0.5} for group in state_dict["param_groups"]]
        return state_dict | {"param_groups": groups}

    removed = optimizer.register_state_dict_pre_hook(note("removed"))
    removed.remove()
    optimizer.register_state_dict_pre_hook(note("second before saving"))
    optimizer.register_state_dict_pre_hook(note("first before saving"), prepend=True)
    optimizer.register_state_dict_post_hook(marked)
    optimizer.register_load_state_dict_pre_hook(unmarked)
    optimizer.register_load_state_dict_pre_hook(note("second before loading"))
    optimizer.register_load_state_dict_post_hook(note("after loading"))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    return [*calls, saved["mine"], optimizer.param_groups[0]["lr"]]


def test_hooks_of_state_dict_and_load_state_dict_are_called_as_in_torch():
    def look(stage: int | None) -> list:
        model = nn.Linear(4, 4)
        if stage is None:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        else:
            optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=stage, lr=0.1)
        train_a_step(model, optimizer)
        return with_hooks(optimizer)

    expected = look(None)
    assert len(expected) == 8 and expected[-1] == 0.5
    for stage in (0, 3):
        assert zerolab.launch(look, 2, stage, timeout=60) == [expected] * 2


class WithModes(torch.optim.SGD):
    """Has public methods that ZeroOptimizer lacks, as the schedule-free optimizers."""

    mode = "train"

    def eval(self) -> None:
        self.mode = "eval"

    def _private(self) -> None:
        pass


NAMES = ["eval", "mode", "_private", "engien", "__nothing__"]


def attributes_of(optimizer: zerolab.ZeroOptimizer) -> dict[str, str]:
    said = {}
    for name in NAMES:
        try:
            said[name] = f"there: {hasattr(optimizer, name)}"
        except RuntimeError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize("own", (False, True))
def test_a_method_that_only_the_class_given_has_is_refused_and_not_skipped(own: bool):
    def look() -> tuple[dict[str, str], str]:
        model = nn.Linear(4, 4)
        group = {"params": list(model.parameters()), "optimizer": WithModes, "lr": 0.1}
        if own:
            optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, params=[group])
        else:
            optimizer = zerolab.ZeroOptimizer(model, WithModes, lr=0.1)
        with pytest.raises(AttributeError) as caught:
            optimizer.engien  # noqa: B018
        return attributes_of(optimizer), str(caught.value)

    ((said, usual),) = zerolab.launch(look, 1, timeout=60)
    for name in ("eval", "mode"):
        assert f"WithModes.{name} is not passed on" in said[name]
        assert "with optimizer.full_params(): ..." in said[name]
    assert [said[name] for name in NAMES[2:]] == ["there: False"] * 3
    assert usual == "'ZeroOptimizer' object has no attribute 'engien'"


def test_an_optimizer_that_is_not_complete_has_no_more_attributes():
    bare = zerolab.ZeroOptimizer.__new__(zerolab.ZeroOptimizer)
    assert not hasattr(bare, "updates") and not hasattr(bare, "eval") and not hasattr(bare, "rank")


WAYS_TO_COPY = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "torch.save": lambda optimizer: torch.save({"optimizer": optimizer}, io.BytesIO()),
}


@pytest.mark.parametrize("offload", (None, "cpu"))
def test_copies_of_an_optimizer_are_refused_and_those_of_its_model_are_not(offload: str | None):
    def look() -> dict[str, str]:
        model = nn.Linear(4, 4)
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=2, lr=0.1, offload=offload)
        train_a_step(model, optimizer)
        said = {}
        for name, way in WAYS_TO_COPY.items():
            with pytest.raises(TypeError) as caught:
                way(optimizer)
            said[name] = str(caught.value)
            assert way(model) or name == "torch.save"
        assert copy.deepcopy(optimizer.state_dict())["state"].keys() == {0, 1}
        return said

    for said in zerolab.launch(look, 2, timeout=60):
        assert all("zerolab.save(" in text and "optimizer.state_dict()" in text for text in said.values())

"""Promise: all that reads or writes masters and state works while they are away, or is refused."""

import copy
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
from support import offloaded, subjects, together
from support.long import long_where
from support.offloaded import STEPS, held, resident_bytes, train

import zerolab
from zerolab.checkpoint import records

for module in (sys.modules[__name__], offloaded, subjects, together):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest

WAYS = ((None, "cpu"), ("cpu", None), ("cpu", "cpu"))
LATER = range(STEPS, STEPS + 2)


def build(stage: int, precision: str, offload: str | None, together_too: bool = False):
    together.update_together(together_too)
    return offloaded.build("gpt", stage=stage, precision=precision, offload=offload, lr=0.02)


def alike(*actions: Callable) -> bool:
    """Whether each pair of what the actions leave behind is the same, bit for bit."""
    first, *others = [action() for action in actions]
    return all(offloaded.differing(first, other) == [] for other in others)


# Checkpoints.


def save_and_load(stage: int, precision: str, folder: Path) -> list[bool]:
    """On a rank: go on from a checkpoint, offloaded before or after or both, as without any of it."""

    def whole() -> dict:
        optimizer = build(stage, precision, None)
        train(optimizer, "gpt")
        train(optimizer, "gpt", LATER)
        return held(optimizer)

    def resumed(place: int, before: str | None, after: str | None) -> dict:
        first = build(stage, precision, before)
        train(first, "gpt")
        zerolab.save(first, folder / str(place))
        zerolab.export(first, folder / f"{place}.pt")
        second = build((stage + 1) % 4, precision, after)
        zerolab.load(second, folder / str(place))
        assert after is None or resident_bytes(second) == 0
        train(second, "gpt", LATER)
        return held(second)

    def of_whole(values: dict) -> dict:  # slices differ by stage
        return {key: value for key, value in values.items() if key[1] == "whole"}

    expected = of_whole(whole())
    return [
        offloaded.differing(of_whole(resumed(place, *ways)), expected) == []
        for place, ways in enumerate(WAYS)
    ]


MIXED = "stage 1 in fp32 and stage 3 in mixed precision have all that these have"


@pytest.mark.parametrize(
    "stage, precision",
    long_where(
        lambda each: each[0] in (0, 2), MIXED, [(0, "mixed"), (1, "fp32"), (2, "mixed_fp16"), (3, "mixed")]
    ),
)
def test_a_checkpoint_knows_nothing_of_offloading(stage: int, precision: str, tmp_path: Path):
    for same in zerolab.launch(save_and_load, 2, stage, precision, tmp_path, timeout=100):
        assert same == [True] * len(WAYS)
    exported = [torch.load(tmp_path / f"{place}.pt") for place in range(len(WAYS))]
    for other in exported[1:]:
        assert all(torch.equal(other[name], values) for name, values in exported[0].items())


def loads_twice(folder: Path) -> list[int]:
    """A checkpoint that cannot be written or read leaves nothing resident, and the training as it was."""
    optimizer = build(2, "mixed", "cpu")
    train(optimizer, "gpt")
    before, found = held(optimizer), []
    zerolab.save(optimizer, folder)

    def breaks(first, second, third):
        shards = third if isinstance(second, dict) else second
        next(iter(shards))  # some of what is offloaded has come back
        raise OSError("broken")

    for name, action in (("write", zerolab.save), ("fill", zerolab.load)):
        own = getattr(records, name)
        setattr(records, name, breaks)
        try:
            action(optimizer, folder)
        except OSError as error:
            found.append(resident_bytes(optimizer))
            assert "broken" in str(error)
        finally:
            setattr(records, name, own)
    zerolab.load(optimizer, folder)
    return [*found, len(offloaded.differing(held(optimizer), before))]


def test_an_error_in_a_checkpoint_leaves_nothing_resident(tmp_path: Path):
    assert zerolab.launch(loads_twice, 2, tmp_path, timeout=60) == [[0, 0, 0]] * 2


# state_dict and load_state_dict.


def states() -> dict[str, bool]:
    optimizer, plain = build(1, "fp32", "cpu"), build(1, "fp32", None)
    train(optimizer, "gpt"), train(plain, "gpt")
    saved, expected = optimizer.state_dict(), copy.deepcopy(plain.state_dict())

    def same(ours: dict, theirs: dict) -> bool:
        pairs = [(ours["state"][n][k], v) for n, values in theirs["state"].items() for k, v in values.items()]
        return ours["state"].keys() == theirs["state"].keys() and all(torch.equal(*pair) for pair in pairs)

    found = {"saved": same(saved, expected), "away": resident_bytes(optimizer) == 0}
    train(optimizer, "gpt", LATER)
    found["a copy lasts"] = same(saved, expected)
    optimizer.load_state_dict(saved)
    found["loaded"] = same(optimizer.state_dict(), expected) and resident_bytes(optimizer) == 0
    train(optimizer, "gpt", LATER)
    found["the user's own lasts"] = same(saved, expected)
    optimizer.load_state_dict(copy.deepcopy(expected) | {"state": {}})
    found["dropped"] = len(optimizer.state) == 0 and optimizer.offload.away_bytes == 0
    optimizer.load_state_dict(pickle.loads(pickle.dumps(saved)))
    return found | {"loaded again": same(optimizer.state_dict(), expected)}


def test_a_state_dict_is_a_copy_and_loads_as_one():
    for found in zerolab.launch(states, 2, timeout=60):
        assert found == dict.fromkeys(found, True)


def reads_of_state() -> tuple[list[str], int]:
    optimizer = build(1, "fp32", "cpu")
    train(optimizer, "gpt")
    tensor = next(iter(optimizer.state))
    actions = (
        lambda: optimizer.state[tensor],
        lambda: list(optimizer.state.values()),
        lambda: optimizer.state.pop(tensor),
        lambda: optimizer.state.update({tensor: {}}),
        lambda: copy.deepcopy(optimizer.state),
        lambda: pickle.dumps(optimizer.state),
    )
    found = []
    for action in actions:
        try:
            action()
        except RuntimeError as error:
            found.append(str(error))
    assert len(optimizer.state) == len(list(optimizer.state)) > 0 and tensor in optimizer.state
    assert optimizer.state.get(torch.nn.Parameter(torch.ones(1))) is None
    return [error.split(" ", 1)[1] for error in found], len(actions)


def test_reading_a_state_that_is_away_is_refused_with_the_way_out():
    ((errors, count),) = zerolab.launch(reads_of_state, 1, timeout=60)
    message = (
        "the optimizer's state is refused, because it is offloaded between steps: read a copy with "
        "optimizer.state_dict(), and change it with optimizer.load_state_dict(...)"
    )
    assert errors == [message] * count


# What users write to parameters.


@torch.no_grad()
def write(optimizer, inside_full_params: bool) -> None:
    """Some elements, so that the others have to keep the digits of their masters."""
    if inside_full_params:
        with optimizer.full_params():
            optimizer.model.head.weight[0] += 1.0
    else:
        optimizer.model.head.weight[0] += 1.0


def written(stage: int, inside: bool, offload: str | None, folder: Path) -> dict:
    optimizer = build(stage, "mixed", offload)
    train(optimizer, "gpt")
    write(optimizer, inside)
    after_writing = held(optimizer)
    write(optimizer, inside)
    zerolab.save(optimizer, folder / f"{stage} {inside} {offload}")
    write(optimizer, inside)
    zerolab.load(optimizer, folder / f"{stage} {inside} {offload}")
    loaded = held(optimizer)
    write(optimizer, inside)
    train(optimizer, "gpt", LATER)
    values = {"written": after_writing, "loaded": loaded, "trained": held(optimizer)}
    return {(when, *key): each for when, found in values.items() for key, each in found.items()}


def writes_are_kept(folder: Path) -> list[bool]:
    cases = [(stage, True) for stage in range(4)] + [(0, False), (2, False)]
    return [alike(*(partial(written, *case, way, folder) for way in (None, "cpu"))) for case in cases]


def test_what_users_write_to_parameters_is_kept(tmp_path: Path):
    assert zerolab.launch(writes_are_kept, 2, tmp_path, timeout=100) == [[True] * 6] * 2


# Groups that are added, an overflow, an error.


def adds_a_group(offload: str | None, folder: str | None = None) -> dict:
    together.update_together(True)
    torch.manual_seed(0)
    model = subjects.gpt()
    parameters = dict(model.named_parameters())
    last = parameters.pop("head.weight")
    optimizer = zerolab.ZeroOptimizer(
        model, torch.optim.AdamW, params=parameters.values(), precision="mixed", lr=0.02, offload=offload,
        offload_dir=folder,
    )  # fmt: skip
    train(optimizer, "gpt")
    optimizer.add_param_group({"params": [last], "lr": 0.1, "initial_lr": 0.1})
    allocated_bytes = optimizer.offload.tier._allocated if folder else 0
    train(optimizer, "gpt", LATER)
    if folder:  # when it was added, room was made for its state
        assert optimizer.offload.tier._used == optimizer.offload.away_bytes == allocated_bytes
    return held(optimizer)


def finds_the_disk_full(folder: str) -> tuple[str, list[bool]]:
    """What adding a group says, and what is the same as without that: before it is added again, and after."""
    found = []
    for full in (False, True):
        torch.manual_seed(0)
        model = subjects.gpt()
        parameters = dict(model.named_parameters())
        last = parameters.pop("head.weight")
        optimizer = zerolab.ZeroOptimizer(
            model, torch.optim.AdamW, params=parameters.values(), lr=0.02, offload="disk", offload_dir=folder
        )
        train(optimizer, "gpt")
        said = ""
        if full:
            optimizer.offload.reserve = no_room
            try:
                optimizer.add_param_group({"params": [last], "lr": 0.1, "initial_lr": 0.1})
            except OSError as error:
                said = str(error)
            del optimizer.offload.reserve
        optimizer.load_state_dict(optimizer.state_dict())
        train(optimizer, "gpt", LATER)
        before = held(optimizer)
        optimizer.add_param_group({"params": [last], "lr": 0.1, "initial_lr": 0.1})
        optimizer.load_state_dict(optimizer.state_dict())
        train(optimizer, "gpt", LATER)
        found.append((before, held(optimizer)))
    return said, [
        list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)
        for ours, theirs in zip(*found, strict=True)
    ]


def no_room(nbytes: int) -> None:
    raise OSError("No space left on device")


def test_a_group_for_which_there_is_no_room_is_not_there(tmp_path: Path):
    for said, same in zerolab.launch(finds_the_disk_full, 2, str(tmp_path), timeout=100):
        assert said == "No space left on device" and same == [True, True]


def overflows(offload: str | None) -> dict:
    optimizer = build(1, "mixed_fp16", offload)
    train(optimizer, "gpt")
    before = optimizer.offload.tier.read_bytes if offload else 0
    optimizer.scale(optimizer.model(*subjects.tokens(0, optimizer.rank)).float() * torch.inf).backward()
    optimizer.step()
    assert not offload or optimizer.offload.tier.read_bytes == before, "a step that is skipped reads nothing"
    train(optimizer, "gpt", LATER)
    return held(optimizer)


def same_after_odd_steps(folder: str) -> list[bool]:
    ways = ((None, None), ("cpu", None), ("disk", folder))
    groups = alike(*(partial(adds_a_group, *way) for way in ways))
    return [groups, alike(lambda: overflows(None), lambda: overflows("cpu"))]


def test_groups_that_are_added_and_steps_that_are_skipped(tmp_path: Path):
    assert zerolab.launch(same_after_odd_steps, 2, str(tmp_path), timeout=100) == [[True, True]] * 2


class Raises(torch.optim.AdamW):
    armed = False

    def step(self, closure=None):
        if Raises.armed:
            raise ArithmeticError
        super().step(closure)


def raises_in_a_step() -> tuple[int, bool]:
    """After an error in the update the states are away again, and whole."""
    together.update_together(True)
    optimizer = offloaded.build("gpt", Raises, precision="mixed", offload="cpu", lr=0.02)
    train(optimizer, "gpt")
    before = held(optimizer)
    Raises.armed = True
    try:
        train(optimizer, "gpt", LATER)
    except ArithmeticError:
        Raises.armed = False
    resident = resident_bytes(optimizer)
    unwhole = {key: value for key, value in before.items() if key[1] != "whole"}
    after = {(s.name, s.key, s.start): s.values.clone() for s in optimizer.shards()}
    return resident, all(torch.equal(after[key], unwhole[key]) for key in after)


def test_an_error_in_a_step_leaves_the_states_away_and_whole():
    assert zerolab.launch(raises_in_a_step, 1, timeout=60) == [(0, True)]

"""Promise: a model that nobody prepared trains as it is, at every stage, to the bits of plain training."""

import functools
import importlib

import plain
import pytest

import zerolab

GROUPS = ("outputs", "sharing", "containers", "stock", "frozen", "passes", "flow")
CASES = {group: importlib.import_module(f"unprepared.{group}").case.named for group in GROUPS}
NAMES = [(group, name) for group in GROUPS for name in CASES[group]]
SETTINGS = (
    (2, (0, 1, 2, 3), {}),
    (3, (3,), {"prefetch": 0, "reduces_in_flight": 0}),
)


@functools.cache
def outcomes(group: str, setting: int) -> list[dict]:
    """By rank and case. One launch for a group: starting processes is what takes the time."""
    world_size, stages, settings = SETTINGS[setting]
    return zerolab.launch(plain.compare_all, world_size, CASES[group], stages, timeout=60, **settings)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Threads that wait for each other on a busy machine take far longer than such small models do."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("setting", range(len(SETTINGS)), ids=["2 ranks", "3 ranks in step"])
@pytest.mark.parametrize(("group", "name"), NAMES, ids=[name for _, name in NAMES])
def test_bits_of_plain_training(group: str, name: str, setting: int):
    for by_case in outcomes(group, setting):
        assert by_case[name] == {stage: [] for stage in SETTINGS[setting][1]}

"""Promise: an optimizer that updates whole parameters trains any model to the bits of one process."""

import functools
import sys

import cloudpickle
import pytest
from support import training, whole_updates
from support.user_models import every_case
from support.whole_updates import everything, matrices_and_others

import zerolab

for module in (sys.modules[__name__], whole_updates):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest

CASES = every_case()
NAMES = [(group, name) for group, named in CASES.items() for name in named]
OPTIMIZERS = {"all by Orthogonal": everything(), "matrices by Muon": matrices_and_others}


@functools.cache
def outcomes(group: str, optimizers: str) -> list[dict]:
    """By rank and case. One launch for a group: starting processes is what takes the time."""
    world_size, stages = (3, (1, 3)) if optimizers == "all by Orthogonal" else (2, (2, 3))
    settings = {"params": OPTIMIZERS[optimizers]}
    return zerolab.launch(training.compare_all, world_size, CASES[group], stages, timeout=120, **settings)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


ORTHOGONAL = pytest.mark.long(
    "the same models as with Muon, on three ranks and with an optimizer of all shapes"
)


FIRST = ("stock", "passes", "sharing", "containers")
GROUPS = pytest.mark.long("more models; tests/engine trains all of them with Adam")
MODELS = [pytest.param(group, name, id=name, marks=[] if group in FIRST else GROUPS) for group, name in NAMES]


@pytest.mark.parametrize(
    "optimizers", [pytest.param("all by Orthogonal", marks=ORTHOGONAL), "matrices by Muon"]
)
@pytest.mark.parametrize(("group", "name"), MODELS)
def test_bits_of_one_process(group: str, name: str, optimizers: str):
    for by_case in outcomes(group, optimizers):
        assert by_case[name] and by_case[name] == {stage: [] for stage in by_case[name]}

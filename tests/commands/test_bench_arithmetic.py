"""Promise: ratios are taken within a round, and targets, bytes and profiles follow from what was measured."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from support.contestants import settings

import zerolab
from zerolab import models
from zerolab.bench import overhead, targets
from zerolab.bench.footprint import Footprint
from zerolab.bench.race import WARM_UP_ROUNDS
from zerolab.bench.ratios import Spread, pairwise, slowest, spread
from zerolab.bench.table import _captions

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


def test_ratios_are_taken_within_a_round():
    """The machine was ten times slower in the second round; the quotient of the medians would be 3.5."""
    assert pairwise([2.0, 20.0, 7.0], [1.0, 10.0, 2.0]).median == 2.0
    assert pairwise([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5) == Spread(3.0, 2.0, 4.0)
    assert spread([0.5]) == Spread(0.5, 0.5, 0.5)


@pytest.mark.parametrize("ours, theirs", [([1.0], [1.0, 2.0]), ([], [])])
def test_rounds_that_do_not_pair_up_are_refused(ours, theirs):
    with pytest.raises(ValueError, match="rounds"):
        pairwise(ours, theirs)


def test_a_step_is_over_when_the_last_rank_is():
    assert slowest([[1.0, 5.0], [2.0, 4.0]]) == [2.0, 5.0]


def test_targets_compare_with_the_better_and_only_with_who_was_there():
    seconds = {"ddp": [2.0, 2.0], "ddp+zero": [1.0, 1.0], "zerolab-1": [1.5, 1.5], "zerolab-3": [1.0, 1.0]}
    (found,) = targets.times(seconds)
    assert (found.contestant, found.what, found.found) == ("zerolab-1", "step, of ddp+zero's", 1.5)
    assert not found.held and found.verdict == "missed by 0.500"
    (found,) = targets.times({"zerolab-3": [0.7], "fully_shard": [1.0]})
    assert found.held and found.verdict == "held"
    assert found.floor is None
    (found,) = targets.times({"zerolab-3": [0.7, 0.8], "fully_shard": [1.0, 1.0], "floor": [0.5, 0.7]})
    assert found.floor == pytest.approx(0.6)


def test_wire_and_states_are_held_against_formulas():
    assert [targets.minimum_wire_bytes(1000, 4, stage) for stage in range(4)] == [6000, 6000, 6000, 9000]
    weight = Footprint(1, 6300, states_bytes=8000.0, formula_bytes=7000.0, states_match=False)
    wire, states = targets.bytes_held_and_sent({"zerolab-1": weight}, {"zerolab-1": 1}, 1000, 4)
    assert (wire.found, wire.held) == (1.05, False)
    assert (states.found, states.held) == (1000.0, False)


def test_a_profile_is_split_by_whose_code_it_was():
    """A built-in function counts to its caller: collectives' are wire, the unit's are engine."""
    package = Path(zerolab.__file__).parent
    file = lambda name: (str(package / name), 1, "f")
    torch_file = lambda name: (f"/x/site-packages/torch/{name}", 1, "f")
    called = lambda seconds: (1, 1, seconds, seconds)
    stats = {
        file("unit/grads.py"): (1, 1, 1.0, 9.0, {}),
        file("collectives/direct.py"): (1, 1, 2.0, 9.0, {}),
        file("models.py"): (1, 1, 4.0, 9.0, {}),
        torch_file("distributed/distributed_c10d.py"): (1, 1, 8.0, 9.0, {}),
        torch_file("optim/adam.py"): (1, 1, 16.0, 9.0, {}),
        ("~", 0, "<acquire>"): (1, 1, 128.0, 128.0, {(threading.__file__, 1, "wait"): called(128.0)}),
        ("~", 0, "<copy_>"): (
            2, 2, 96.0, 96.0,
            {file("unit/grads.py"): called(32.0), torch_file("nn/functional.py"): called(64.0)},
        ),
    }  # fmt: skip
    shares = overhead.attribute(SimpleNamespace(stats=stats), steps=2)
    assert (shares.compute, shares.wire, shares.engine) == (
        (4 + 16 + 64) / 2,
        (2 + 8 + 128) / 2,
        (1 + 32) / 2,
    )
    assert shares.engine_share == 33 / 255


def test_hooks_run_where_the_profile_sees_them():
    """Backward has threads of its own on a GPU, which a profile of the main thread does not see."""
    seen = []

    class Watched(models.GPT):
        def forward(self, *args):
            loss = super().forward(*args)
            loss.register_hook(lambda gradient: seen.append(torch._C._is_multithreading_enabled()))
            return loss

    def profile() -> list[bool]:
        build = lambda: Watched(width=16, depth=2, heads=2, context=16)
        overhead._profile(settings("zerolab-2", build=build), "zerolab-2")
        return seen[WARM_UP_ROUNDS:]

    (found,) = zerolab.launch(profile, 1)
    assert found == [False] * overhead.PROFILED_STEPS


@pytest.mark.parametrize(
    ("backend", "gpus", "memory", "shared"),
    [
        ("gloo", 0, "peak: resident memory above", False),
        ("nccl", 2, "peak: the GPU memory of torch's allocator above", False),
        ("nccl", 1, "peak: the GPU memory of torch's allocator above", True),
    ],
)
def test_the_captions_name_the_memory_that_was_measured(backend: str, gpus: int, memory: str, shared: bool):
    found = "\n".join(
        _captions(SimpleNamespace(world_size=2, reference="ddp"), {"backend": backend, "gpus": gpus})
    )
    assert memory in found
    assert ("2 ranks take turns on 1 GPU(s)" in found) == shared

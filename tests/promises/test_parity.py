"""Promise: the same bits. Sharding leaves what a single process would have left, at every stage and size."""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import cloudpickle
import pytest
import torch
from support import subjects

import zerolab
from zerolab.collectives import DirectComm, Work
from zerolab.parity import parity
from zerolab.trace import Event

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

WORLD_SIZES = (1, 2, 3, 4)
STEPS = 3
OPTIMIZERS = (
    ("Adam", {"lr": 0.02}),
    ("AdamW", {"lr": 0.02, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("RMSprop", {"lr": 0.01, "centered": True}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.01}),
)
MODELS = ("gpt", "tied", "patchwork", "tiny", "headed")
# Each model meets each stage, and the optimizers take turns: not the whole product.
CASES = [
    (model, stage, *OPTIMIZERS[(place + 2 * stage) % len(OPTIMIZERS)])
    for place, model in enumerate(MODELS)
    for stage in range(4)
]
KNOBS = [(prefetch, in_flight) for prefetch in (0, 1, 2) for in_flight in (0, 1, 2)]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Threads that wait for each other on a busy machine take far longer than such small models do."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def train_all(cases: list) -> list[subjects.Run]:
    return [
        subjects.train_sharded(model, stage, getattr(torch.optim, optimizer), STEPS, **defaults)[0]
        for model, stage, optimizer, defaults in cases
    ]


def train_all_here(cases: list, world_size: int) -> list[list[subjects.Run]]:
    return [
        subjects.train_replicas(model, world_size, getattr(torch.optim, optimizer), STEPS, **defaults)
        for model, _, optimizer, defaults in cases
    ]


@functools.cache
def sharded(world_size: int) -> list[tuple[subjects.Run, ...]]:
    """By case, then by rank. One launch for all cases: starting processes is what takes the time."""
    return list(zip(*zerolab.launch(train_all, world_size, CASES), strict=True))


@functools.cache
def expected(world_size: int) -> list[list[subjects.Run]]:
    (runs,) = zerolab.launch(train_all_here, 1, CASES, world_size)
    return runs


def differing(ours: subjects.Tensors, theirs: subjects.Tensors) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case[:3])) for case in CASES])
def test_the_same_bits(case: int, world_size: int):
    ours, theirs = sharded(world_size)[case], expected(world_size)[case]
    for rank in range(world_size):
        assert differing(ours[rank].parameters, theirs[rank].parameters) == []
        assert differing(ours[rank].buffers, theirs[rank].buffers) == []
        assert ours[rank].losses == theirs[rank].losses


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case[:3])) for case in CASES])
def test_the_same_optimizer_state(case: int, world_size: int):
    """The ranks' slices, put together, are the single process's state; at stage 0 each rank has it all."""
    ours, theirs, stage = sharded(world_size)[case], expected(world_size)[case][0], CASES[case][1]
    for owners in [[run] for run in ours] if stage == 0 else [list(ours)]:
        for name, state in ((name, state) for name, state in theirs.state.items() if name in owners[0].state):
            assert all(run.state[name].keys() - {"start"} == state.keys() for run in owners)
            for key, value in state.items():
                if value.dim() == 0:
                    assert all(run.state[name][key] == value for run in owners)
                else:
                    assert torch.equal(subjects.joined_state(owners, name, key), value.flatten()), (name, key)


def test_training_changes_what_is_used_and_nothing_else():
    """Or equal bits would mean nothing: used parameters move, frozen and unused ones do not."""
    case = next(index for index, case in enumerate(CASES) if case[0] == "patchwork")
    torch.manual_seed(0)
    start = subjects.copies(subjects.Patchwork().named_parameters())
    still = {"unused", "nothing", "layers.7.weight", "layers.7.bias"}
    assert set(differing(sharded(2)[case][0].parameters, start)) == start.keys() - still
    assert set(differing(sharded(1)[case][0].parameters, start)) == start.keys() - still - {
        "detour.weight",
        "detour.bias",
    }


def test_ranks_start_from_rank_0s_parameters_and_keep_their_own_buffers():
    case = next(index for index, case in enumerate(CASES) if case[0] == "patchwork")
    first, second = sharded(2)[case]
    assert differing(first.parameters, second.parameters) == []
    assert "layers.1.running_mean" in differing(first.buffers, second.buffers)


# Overlap.


def train_with_knobs(stage: int) -> list[tuple[subjects.Run, list[tuple]]]:
    """The last step's collectives with each setting: what began, in order, and how many were under way."""
    results = []
    for prefetch, in_flight in KNOBS:
        issued = []
        with count_under_way(issued):
            run, optimizer = subjects.train_sharded(
                "ladder", stage, torch.optim.Adam, STEPS, prefetch=prefetch, reduces_in_flight=in_flight
            )
        events = [e for e in optimizer.trace.step(STEPS - 1) if e.phase in ("forward", "backward")]
        under_way = {id(event): number for event, number in issued}
        results.append((run, [(e.op, e.unit, under_way[id(e)]) for e in events]))
    return results


@contextmanager
def count_under_way(issued: list[tuple[Event, int]]) -> Iterator[None]:
    """Note with each collective how many were issued before it and not waited for yet."""
    start, waiting = DirectComm._start, set()

    def counted(self, event: Event, *args) -> Work:
        issued.append((event, len(waiting)))
        work = start(self, event, *args)
        waiting.add(id(event))
        return work.then(lambda: waiting.discard(id(event)))

    DirectComm._start = counted
    try:
        yield
    finally:
        DirectComm._start = start


@pytest.mark.parametrize("stage, world_size, distinct", [(1, 2, 3), (3, 3, 9)])
def test_overlap_changes_the_trace_and_not_the_bits(stage: int, world_size: int, distinct: int):
    """At stage 1 nothing is gathered ahead, so that only the reductions' knob shows."""
    (((theirs, *_),),) = zerolab.launch(train_all_here, 1, [("ladder", stage, "Adam", {})], world_size)
    for results in zerolab.launch(train_with_knobs, world_size, stage):
        traces = {knob: trace for knob, (_, trace) in zip(KNOBS, results, strict=True)}
        assert all(differing(run.parameters, theirs.parameters) == [] for run, _ in results)
        assert all(sorted(e[:2] for e in t) == sorted(e[:2] for e in traces[0, 0]) for t in traces.values())
        assert {under_way for *_, under_way in traces[0, 0]} == {0}, "0 and 0 wait for every collective"
        assert max(under_way for *_, under_way in traces[0, 2]) == 2
        assert len({tuple(trace) for trace in traces.values()}) == distinct


# The package's own reference.


@pytest.mark.parametrize("model", ["gpt", "tied", "tiny"])
def test_the_packages_reference_says_the_same_as_this_one(model: str):
    def both() -> tuple:
        build, inputs = subjects.SUBJECTS[model]
        ours, *_ = subjects.train_replicas(model, 3, torch.optim.Adam, STEPS, lr=0.02)
        return ours, parity.reference(build, inputs, 3, torch.optim.Adam, STEPS, lr=0.02)

    ((ours, (parameters, losses)),) = zerolab.launch(both, 1)
    assert differing(ours.parameters, parameters) == []
    assert ours.losses == losses


@pytest.mark.parametrize("model", MODELS)
def test_verify_finds_every_kind_of_model_identical(model: str):
    build, inputs = subjects.SUBJECTS[model]
    report = zerolab.verify(3, 2, build, inputs, torch.optim.AdamW, STEPS, lr=0.02)
    assert report.bit_identical and report.max_abs_diff == 0.0
    assert report.losses == report.reference_losses


def test_threads_may_be_many(monkeypatch):
    """A matrix product split over threads adds up in another order: the reference has as many as a rank."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert zerolab.verify(2, 2, steps=2).bit_identical

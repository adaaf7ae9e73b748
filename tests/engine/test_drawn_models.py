"""Promise: the same bits and the same bytes for any model, drawn by chance, at any stage and world size.

Hypothesis draws the models, the same ones every time; all go through one launch for each world size. A case
that fails is printed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from support import random_models
from support.examples import draw
from support.random_models import STAGES, Case, Expected, Found, Weight
from support.training import differing

import zerolab
from zerolab import memory

WORLD_SIZES = (1, 2, 3, 4)
TIMEOUT_SECONDS = 120  # against a hang: no launch is meant to come near it

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
weights = lambda uses: st.lists(st.builds(Weight, shapes, uses), min_size=1, max_size=3).map(tuple)
in_any_order = lambda *choices: st.sampled_from(choices).flatmap(st.permutations).map(tuple)


@st.composite
def cases(draw) -> Case:
    depth = draw(st.integers(0, 4))
    hidden = draw(st.lists(st.integers(1, 19), min_size=depth, max_size=depth).map(tuple))
    chosen = st.sets(st.integers(0, len(hidden) - 1)) if hidden else st.just(set())
    return Case(
        hidden,
        weights=tuple(
            draw(weights(st.sampled_from(random_models.USES))) for _ in (*hidden, "the model's own")
        ),
        tied=draw(st.booleans()),
        frozen=draw(in_any_order((False,), (True, False, False), (True, True, False))),
        groups=draw(in_any_order((2, 1, 0), (2, 0, 3), (3, 2, 1, 0, 0))),
        units=draw(st.just("default") | chosen.map(sorted).map(tuple)),
        optimizer=draw(st.sampled_from(sorted(random_models.OPTIMIZERS))),
        prefetch=draw(st.integers(0, 2)),
        reduces_in_flight=draw(st.integers(0, 2)),
    )


CASES = draw(cases(), 16)


@dataclass
class Results:
    """What came of all cases, by world size: expected, from one process; found, by stage and rank; loaded, by
    rank. ``writers``: which world size saved each.
    """

    expected: dict[int, list[Expected]]
    found: dict[int, list[list[tuple[Found, ...]]]]
    writers: list[int]
    loaded: dict[int, list]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Iterator[Results]:
    scratch = tmp_path_factory.mktemp("saved")
    folders = [scratch / str(place) for place in range(len(CASES))]
    writers = [WORLD_SIZES[place // len(STAGES) % len(WORLD_SIZES)] for place in range(len(CASES))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        expected = dict(
            zip(WORLD_SIZES, launch(random_models.train_here, max(WORLD_SIZES), CASES), strict=True)
        )
        found, loaded = {}, {}
        for size in WORLD_SIZES:
            own = [f if writer == size else None for f, writer in zip(folders, writers, strict=True)]
            ranks = launch(random_models.train_sharded, size, CASES, own)
            found[size] = [list(zip(*stages, strict=True)) for stages in zip(*ranks, strict=True)]
        for size in WORLD_SIZES:
            loaded[size] = launch(random_models.load, size, CASES, folders)
        yield Results(expected, found, writers, loaded)


def launch(function, world_size: int, *args) -> list:
    return zerolab.launch(function, world_size, *args, backend="gloo", timeout=TIMEOUT_SECONDS)


def outcomes(results: Results, world_size: int) -> Iterator[tuple[Case, int, Expected, tuple[Found, ...]]]:
    """Each case with each stage, what was expected, and what each rank found."""
    together = zip(CASES, results.expected[world_size], results.found[world_size], strict=True)
    for case, expected, stages in together:
        for stage, found in zip(STAGES, stages, strict=True):
            yield case, stage, expected, found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_same_bits(world_size: int, results: Results):
    for case, stage, expected, ranks in outcomes(results, world_size):
        for found in ranks:
            assert differing(found.parameters, expected.parameters) == [], (stage, case)


@pytest.mark.parametrize("readers", WORLD_SIZES)
def test_what_any_world_size_saved_any_other_loads(readers: int, results: Results):
    for loaded in results.loaded[readers]:
        for place, (case, writers, parameters) in enumerate(zip(CASES, results.writers, loaded, strict=True)):
            expected = results.expected[writers][place]
            assert differing(parameters, expected.parameters) == [], (writers, case)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_same_bytes(world_size: int, results: Results):
    for case, stage, expected, ranks in outcomes(results, world_size):
        formula = memory.model_states(
            expected.psi,
            world_size,
            stage,
            "fp32",
            random_models.STATE_BYTES[case.optimizer],
            expected.frozen_psi,
        )
        for held in (found.memory for found in ranks):
            assert held.params_bytes == pytest.approx(formula.params_bytes), (stage, case)
            assert held.grads_bytes == pytest.approx(formula.grads_bytes), (stage, case)
        state_bytes = sum(found.memory.optimizer_bytes + found.memory.uneven_bytes for found in ranks)
        copies = world_size if stage == 0 else 1
        updated_bytes = random_models.STATE_BYTES[case.optimizer] * expected.updated_psi
        assert state_bytes == pytest.approx(copies * updated_bytes), (stage, case)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_same_traffic(world_size: int, results: Results):
    """2Ψ below stage 3, whatever was used; there Ψ of gradients, and nothing is gathered a third time."""
    for case, stage, expected, ranks in outcomes(results, world_size):
        for found in ranks:
            moved = {op: each.logical_bytes for op, each in found.traffic.by_op.items()}
            gathered_bytes = moved.pop("all_gather", 0)
            reduced = {"all_reduce": 8 * expected.psi} if stage == 0 else {"reduce_scatter": 4 * expected.psi}
            assert moved == reduced, (stage, case)
            if stage < 3:
                assert gathered_bytes == 4 * expected.psi * (stage > 0), (stage, case)
            else:
                whole_bytes = 4 * (expected.psi + expected.frozen_psi)
                assert gathered_bytes <= 2 * whole_bytes, (stage, case)


def test_the_cases_have_in_them_what_they_are_drawn_for():
    """Or the rest would mean less than it says."""
    every = [weight for case in CASES for part in case.weights for weight in part]
    assert len(CASES) == 16 and {weight.use for weight in every} == set(random_models.USES)
    assert {len(weight.shape) for weight in every} == {0, 1, 2, 3} and any(0 in w.shape for w in every)
    depths = {len(case.hidden) for case in CASES}
    assert 0 in depths and len(depths) >= 3
    assert any(case.tied and len(case.hidden) > 1 for case in CASES)
    models = [random_models.Drawn(case) for case in CASES]
    assert {all(p.requires_grad for p in model.parameters()) for model in models} == {True, False}
    groups = [random_models.groups(case, model) for case, model in zip(CASES, models, strict=True)]
    assert {all(group["params"] for group in each) for each in groups} == {True, False}
    assert {case.units == "default" for case in CASES} == {True, False}
    parting = [
        case for case in CASES for part in case.weights[:-1] for w in part if w.use == random_models.USES[2]
    ]
    assert parting  # ranks use different parameters of one unit, at stage 3 too
    assert () in {case.units for case in CASES}
    assert {case.optimizer for case in CASES} == random_models.OPTIMIZERS.keys()
    assert {case.prefetch for case in CASES} == {case.reduces_in_flight for case in CASES} == {0, 1, 2}

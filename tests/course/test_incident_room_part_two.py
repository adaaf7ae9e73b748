"""Lesson 09, second part: what the check of the reader's own test says of good tests and of weak ones."""

import contextlib
import linecache
import os
import sys
from collections.abc import Callable

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from zerolab import cost, memory
from zerolab.course.attempts import attempt
from zerolab.course.lessons.incident_room import own_tests
from zerolab.course.lessons.incident_room.engines import BROKEN, RIGHT
from zerolab.course.lessons.incident_room.own_tests import check_test
from zerolab.course.lessons.incident_room.part_two_solution import my_test
from zerolab.course.lessons.incident_room.trainings import MOST_RANKS, Ranks, Trainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as a notebook's cells travel


def look(train, stages=range(4), ranks=3, steps=2, micro_batches=2, clip=0.1, close=None, who=slice(None)):
    """A good test, with a knob for each thing that a weak one leaves out."""
    for stage in stages:
        run = train(ranks, stage, steps, micro_batches, clip)
        for parameters in run.parameters[who]:
            same = torch.allclose(parameters, run.alone) if close else torch.equal(parameters, run.alone)
            assert same, "values"
        for held, sent in zip(run.memory[who], run.sent[who], strict=True):
            yield run, stage, ranks, held, sent, micro_batches


def see_memory(run, stage, ranks, held):
    right = memory.model_states(run.psi, ranks, stage, "fp32", k=4)
    for name in ("params_bytes", "grads_bytes", "optimizer_bytes"):
        assert getattr(held, name) == getattr(right, name), name


def see_traffic(run, stage, sent, micro_batches):
    assert sent == 4 * cost.communication_volume(run.psi, stage, micro_batches, reduce_each=True)


def good(train, **knobs):
    for run, stage, ranks, held, sent, micro_batches in look(train, **knobs):
        see_memory(run, stage, ranks, held)
        see_traffic(run, stage, sent, micro_batches)


def one_thing_at_a_time(train):
    """Right: three trainings of each stage."""
    good(train, steps=1)
    good(train, micro_batches=1)
    good(train, clip=None)


def compared_with_stage_0(train):
    """Right: numbers instead of formulas, and stages compared with each other."""
    whole = {"params_bytes": 3072, "grads_bytes": 3072, "optimizer_bytes": 3072}
    volume = {0: 4, 1: 3, 2: 3, 3: 6}
    for stage in range(4):
        run = train(clip=0.1, ranks=3, stage=stage, steps=2, micro_batches=2)
        for rank in range(3):
            if run.parameters[rank].tolist() != run.alone.tolist():
                raise AssertionError(f"rank {rank} at stage {stage}")
            for place, name in enumerate(("optimizer_bytes", "grads_bytes", "params_bytes"), start=1):
                if getattr(run.memory[rank], name) * (3 if stage >= place else 1) != whole[name]:
                    raise AssertionError(name)
            assert run.sent[rank] == volume[stage] * 4 * 768


def raises_another_error(train):
    """Right: whatever a test raises, it has found something."""
    try:
        good(train)
    except Exception as error:
        raise ValueError("this engine is broken") from error


def only_values(train):
    for _ in look(train):
        pass


def without_memory(train):
    for run, stage, _, _, sent, micro_batches in look(train):
        see_traffic(run, stage, sent, micro_batches)


def without_traffic(train):
    for run, stage, ranks, held, _, _ in look(train):
        see_memory(run, stage, ranks, held)


def only_rank_0(train):
    good(train, steps=1, clip=None, who=slice(1))


def good_on_rank_0(train):
    good(train, who=slice(1))


def two_ranks(train):
    good(train, ranks=2)


def nearly_equal(train):
    good(train, close=True)


def one_step(train):
    good(train, steps=1)


def one_micro_batch(train):
    good(train, micro_batches=1)


def without_clipping(train):
    good(train, clip=None)


def stage_2_alone(train):
    good(train, stages=[2])


def asserts_nothing(train):
    train(ranks=3, stage=3)


def swallows_everything(train):
    with contextlib.suppress(Exception):
        good(train)


def sums_alone(train):
    for stage in range(4):
        run = train(3, stage, steps=2, micro_batches=2, clip=0.1)
        assert all(each.sum() == run.alone.sum() for each in run.parameters)
    without_values(train)


def without_values(train):
    for stage in range(4):
        run = train(3, stage, steps=2, micro_batches=2, clip=0.1)
        for held, sent in zip(run.memory, run.sent, strict=True):
            see_memory(run, stage, 3, held)
            see_traffic(run, stage, sent, 2)


def without_stage_0(train):
    good(train, stages=[1, 2, 3])


def clips_nothing(train):
    good(train, clip=2)


def catches_itself(train):
    for stage in range(4):
        run = train(3, stage, steps=2, micro_batches=2, clip=0.1)
        try:
            assert all(torch.equal(each, run.alone) for each in run.parameters)
        except AssertionError:
            print("stage", stage, "is wrong")


(
    SUM,
    BY_TWO,
    REMAINDER,
    ORDER,
    LAST_BATCH,
    MOMENTUM,
    CLIP,
    LAST_RANK,
    THREE_PSI,
    STATE,
    VIEW,
    COPY,
    ALONE,
) = BROKEN[:13]
EXCHANGED = BROKEN[13]
LET_PASS = {
    only_values: {THREE_PSI, STATE, VIEW, COPY},
    without_memory: {VIEW, COPY},
    without_traffic: {THREE_PSI},
    only_rank_0: {MOMENTUM, CLIP, LAST_RANK, COPY},
    good_on_rank_0: {COPY},
    two_ranks: {BY_TWO, REMAINDER, ORDER},
    nearly_equal: {SUM, BY_TWO, ORDER},  # clipping hides by what a gradient was divided
    one_step: {MOMENTUM},
    one_micro_batch: {LAST_BATCH},
    without_clipping: {CLIP},
    stage_2_alone: {THREE_PSI, STATE, COPY, ALONE},
    sums_alone: {ORDER, EXCHANGED},
    without_stage_0: {ALONE},
    clips_nothing: {CLIP},
    asserts_nothing: set(BROKEN),
}
CATCHING = [catches_itself, swallows_everything]
SOUND = [my_test, good, one_thing_at_a_time, compared_with_stage_0, raises_another_error]


def returns_false(train):
    return bool(train().alone.isnan().any())


def expects_too_much(train):
    run = train(ranks=3, stage=2)
    held = run.memory[0].params_bytes
    assert held == 1024


def takes_the_total(train):
    run = train(ranks=3, stage=2)
    held, right = run.memory[0].total_bytes, memory.model_states(run.psi, 3, 2, "fp32", k=4).total_bytes
    assert held == right, f"{held} and {right}"


def forgets_the_micro_batches(train):
    run = train(ranks=3, stage=1, micro_batches=2)
    assert run.sent[0] == 4 * 2 * run.psi, f"{run.sent[0]}"


def as_under_no_sync(train):
    run = train(ranks=3, stage=1, micro_batches=2)
    sent, volume = run.sent[0], 4 * cost.communication_volume(run.psi, 1, 2)
    assert sent == volume, f"{sent} and {volume}"


def counts_elements(train):
    run = train(ranks=3, stage=3, micro_batches=2)
    sent, volume = run.sent[0], cost.communication_volume(run.psi, 3, 2, reduce_each=True)
    assert sent == volume, f"{sent} and {volume}"


def forgets_k(train):
    run = train(ranks=3, stage=1)
    seen, held = run.memory[0], memory.model_states(run.psi, 3, 1, precision="fp32")
    assert seen.optimizer_bytes == held.optimizer_bytes, f"{seen.optimizer_bytes} {held.optimizer_bytes}"


def forgets_the_precision(train):
    run = train(ranks=3, stage=1)
    seen, held = run.memory[0], memory.model_states(run.psi, 3, 1, k=4)
    assert seen.params_bytes == held.params_bytes, f"{seen.params_bytes} {held.params_bytes}"


def does_not_know_padding(train):
    assert train(ranks=3, stage=1).memory[0].padding_bytes == 0, "there is padding"


def five_ranks(train):
    train(ranks=5)


def misspelt(train):
    assert train().params


def exits(train):
    train()
    sys.exit(1)


def never_trains(train): ...


REFUSED = {
    returns_false: "Your test returns bool False",
    expects_too_much: "assert 3072 == 1024 (line ",
    does_not_know_padding: "AssertionError: there is padding (line ",
    takes_the_total: "In train(ranks=3, stage=2, steps=1, micro_batches=1, clip=None) a right rank holds",
    forgets_k: "2048 is what memory.model_states gives without k=4 (SGD with momentum remembers 4 bytes a "
    "parameter)",
    forgets_the_precision: '1536 is what memory.model_states gives without precision="fp32"',
    forgets_the_micro_batches: "a right rank sends 9216 bytes, 3 times Ψ elements",
    as_under_no_sync: "6144 is what the formula gives without reduce_each=True or without micro_batches. 4 * "
    "cost.communication_volume(run.psi, 1, micro_batches=2, reduce_each=True) is 9216",
    counts_elements: "4608 is what the formula gives without 4 bytes for each element",
    five_ranks: "ValueError: ranks is 5: pass a whole number from 1 to 4",
    misspelt: "AttributeError: 'Run' object has no attribute 'params'",
    exits: "Your test called sys.exit",
    never_trains: "Not written yet: your test never calls train",
}


def _try_all(tests: list[Callable], broken: bool) -> list[list]:
    """In the worker: as `own_tests._try`, for many tests, which share the trainings."""
    engines = BROKEN if broken else RIGHT
    ranks = Ranks(engines)
    if dist.get_rank() > 0:
        ranks.serve()
        return []
    with ranks.serving():
        return [[own_tests._verdict(fn, Trainer(ranks, n)) for n in range(len(engines))] for fn in tests]


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[str, bool], list]:
    """What each test says of each engine, by the test's name and by whether the engines are broken."""
    seen = {}
    for broken, tests in (
        (
            False,
            [
                *(*SOUND, *LET_PASS, *CATCHING, close_to_anything, *REFUSED),
                holds_with_the_defaults_alone,
            ],
        ),
        (True, [*SOUND, *LET_PASS, *CATCHING, close_to_anything]),
    ):
        outcome = attempt(_try_all, [(tests, broken)] * MOST_RANKS, timeout=240)
        assert outcome.failure is None
        seen |= {(fn.__name__, broken): own for fn, own in zip(tests, outcome.values[0], strict=True)}
    return seen


@pytest.fixture
def judged(verdicts, monkeypatch) -> Callable[[Callable], str]:
    """What check_test prints of one of these tests."""
    known = lambda fn, seconds, broken=False: (verdicts[fn.__name__, broken], None)
    monkeypatch.setattr(own_tests, "_verdicts", known)
    return lambda fn: check_test(fn).message


@pytest.mark.parametrize("fn", SOUND, ids=lambda fn: fn.__name__)
def test_a_test_that_finds_every_broken_engine_passes_however_it_is_written(judged, fn):
    assert judged(fn) == "Your test passes with the right engine, and it finds all 14 broken ones."


@pytest.mark.parametrize("fn", LET_PASS, ids=lambda fn: fn.__name__)
def test_the_engines_that_a_weak_test_lets_pass_are_named(judged, fn):
    message, survivors = judged(fn), LET_PASS[fn]
    assert f"finds {14 - len(survivors) or 'none'} of 14 broken engines" in message
    named = {engine for engine in BROKEN if f"- an engine that {engine.does}" in message}
    assert {engine.does for engine in named} == {engine.does for engine in survivors}


def close_to_anything(train):
    for stage in range(4):
        run = train(3, stage, steps=2, micro_batches=2, clip=0.1)
        assert all(torch.allclose(each, run.alone, rtol=0.1, atol=0.1) for each in run.parameters)


SHOWN = {
    two_ranks: (
        f"{BY_TWO.does} (no training of yours shows it)",
        "All your trainings have ranks=2, steps=2, micro_batches=2, clip=0.1: the other engines need",
    ),
    nearly_equal: (
        f"{ORDER.does} (train(ranks=3, stage=0, steps=2, micro_batches=2, clip=0.1) shows it: "
        "run.parameters[0] is not run.alone, off by up to",
        "allows for a difference. Use torch.equal for values",
    ),
    close_to_anything: (
        "run.parameters[0] is not run.alone",
        "run.sent[0] is",
        "run.memory[0].grads_bytes is",
    ),
    clips_nothing: ("With clip=2 nothing is clipped, in any step: the gradients are never longer than that",),
    only_values: (
        f"{THREE_PSI.does} (train(ranks=3, stage=1,",
        "run.sent[0] is",
        f"{STATE.does} (train(ranks=3, stage=1, steps=2, micro_batches=2, clip=0.1) shows it: "
        "run.memory[0].optimizer_bytes is 3072, and 1024 is right; and run.sent[0] is 12288, and 9216 is",
    ),
    good_on_rank_0: (f"{COPY.does} (train(ranks=3, stage=3", "run.memory[2].params_bytes is"),
    stage_2_alone: (f"{COPY.does} (no training", "All your trainings have ranks=3, stage=2, steps=2"),
}


@pytest.mark.parametrize("fn", SHOWN, ids=lambda fn: fn.__name__)
def test_what_the_trainings_show_of_an_engine_that_passes_is_told(judged, fn):
    message = judged(fn)
    assert [words for words in SHOWN[fn] if words not in message] == [], message


@pytest.mark.parametrize("fn", CATCHING, ids=lambda fn: fn.__name__)
def test_a_test_that_catches_its_own_error_is_named(judged, fn):
    message = judged(fn)
    assert message.startswith("Your test catches its own AssertionError, and passes although an assert has")
    assert "of 14 broken engines pass it. Let the error out, or raise it again (line " in message


TUPLE = 'def asserts_a_tuple(train):\n    run = train()\n    assert (run.psi == 3, "numel")\n'


@pytest.mark.filterwarnings("ignore:assertion is always true")
def test_an_assert_of_a_tuple_is_told(verdicts, monkeypatch):
    names: dict = {}
    monkeypatch.setitem(linecache.cache, "<tuple>", (len(TUPLE), None, TUPLE.splitlines(True), "<tuple>"))
    exec(compile(TUPLE, "<tuple>", "exec"), names)
    known = lambda fn, seconds, broken=False: (verdicts["asserts_nothing", broken], None)
    monkeypatch.setattr(own_tests, "_verdicts", known)
    message = check_test(names["asserts_a_tuple"]).message
    assert message.startswith("Line 3 of asserts_a_tuple asserts a tuple")


def holds_with_the_defaults_alone(train):
    """Fails with the second of the right engines. A test cannot tell them apart, so this one counts."""
    seen = getattr(holds_with_the_defaults_alone, "calls", 0)
    holds_with_the_defaults_alone.calls = seen + 1
    assert train(ranks=3).psi and seen % 2 == 0, "not again"


def test_settings_of_the_engine_are_named_only_where_the_test_passes_with_others(judged):
    assert judged(expects_too_much).startswith("Your test fails with an engine that is right: AssertionError")
    assert judged(holds_with_the_defaults_alone).startswith(
        "Your test fails with an engine that is right, with prefetch=0 and reduces_in_flight=0: Assertion"
    )


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_a_test_that_fails_the_right_engine_is_told_why(judged, fn):
    assert REFUSED[fn] in judged(fn)


def test_an_assert_without_a_text_is_told_with_its_values(tmp_path):
    cell = tmp_path / "cell.py"
    cell.write_text("held, ranks = 3072, 3\nassert held == 1024 * ranks / 2\n")
    with pytest.raises(AssertionError) as raised:
        exec(compile(cell.read_text(), cell, "exec"), {})
    said = own_tests.compared(raised.traceback[-1].frame.raw, str(cell), 2)
    assert said == "held is 3072, 1024 * ranks / 2 is 1536.0"
    assert own_tests.compared(raised.traceback[-1].frame.raw, str(cell), 1) == ""


IN_OTHER_FORMS = {
    "run = [6, 7]; assert run[0] == 3 * 4": "run[0] is 6, 3 * 4 is 12",
    "run = [6, 7]; assert run[1] == 7; assert run[0] == 3 * 4": "run[0] is 6, 3 * 4 is 12",
    "run = [6, 7]\nassert (\n    run[0]\n    == 3 * 4\n)": "run[0] is 6, 3 * 4 is 12",
    "for each in [6, 7]: assert each > 6": "each is 6",
    "run = [6, 7]\nassert run[0] == 6 and run[1] == 3 * 4": "run[1] is 7, 3 * 4 is 12",
    "run = [6, 7]\nassert not run": "",
}


@pytest.mark.parametrize("code", IN_OTHER_FORMS)
def test_the_values_of_an_assert_are_told_however_its_lines_are_written(tmp_path, code):
    cell = tmp_path / "cell.py"
    cell.write_text(f"{code}\n")
    with pytest.raises(AssertionError) as raised:
        exec(compile(cell.read_text(), cell, "exec"), {})
    last = raised.traceback[-1]
    assert own_tests.compared(last.frame.raw, str(cell), last.lineno + 1) == IN_OTHER_FORMS[code]


def ends_its_process(train):
    os._exit(3)


def never_ends(train):
    while train().psi:
        pass


def prints_megabytes(train):
    for _ in range(20_000):
        print("x" * 100)
    never_trains(train)


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (ends_its_process, "your test ended its own process, as os._exit does"),
        (never_ends, "your test was still computing, not waiting: an endless loop? (line "),
        (prints_megabytes, "not written yet"),
        (lambda run, train: None, "called as my_test(train), and that does not fit yours"),
        (good.__code__, "needs a function"),
    ],
    ids=["exit", "loop", "print", "arguments", "value"],
)
def test_a_test_that_cannot_be_used_is_named(monkeypatch, capsys, fn, says):
    monkeypatch.setattr(own_tests, "RIGHT_SECONDS", 12.0)
    assert says in check_test.diagnose(fn)
    assert len(capsys.readouterr().out) < 10_000

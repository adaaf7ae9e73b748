"""Promise: whatever a reader's answer does, its check says one clear sentence, in time."""

import functools
import importlib
import io
import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from support.lessons import EXERCISES, exercise, solutions_travel_by_value

import zerolab
from zerolab import ring
from zerolab.course import attempts
from zerolab.course.alive import Alive, first_name, kept_by, nbytes
from zerolab.course.attempts import Brief, Odd, attempt
from zerolab.course.evidence import Finding, examine
from zerolab.course.exercise import Result, graded
from zerolab.course.lessons.memory_accounting import check_bytes_per_gpu
from zerolab.course.lessons.ranks import check_average
from zerolab.course.messages import RETURNED, Message, Place
from zerolab.course.reading import coefficients, elsewhere, made_of, unlike
from zerolab.course.stopped import unmatched
from zerolab.course.targets import bronze, silver
from zerolab.course.wording import sentences

solutions_travel_by_value(__name__)


def check_of(name: str, place: int):
    call = exercise(name, place)[1]
    return getattr(importlib.import_module(f"zerolab.course.lessons.{name}"), call.partition("(")[0])


CALLABLES = [each for each in EXERCISES if check_of(*each).__name__ != "check_stages"]  # it gets four classes


# ---- answers that are no answers


def exits(*_):
    os._exit(3)


def leaves(*_):
    sys.exit(0)


def raises(*_):
    raise KeyError("a key")


def sums_of_text(*_):
    return "17"


HOSTILE = {
    exits: "ended its own process, as os._exit does",
    leaves: "called sys.exit",
    raises: "KeyError: 'a key'",
}


@pytest.mark.parametrize("name, place", CALLABLES)
@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: answer.__name__)
def test_an_answer_that_ends_its_process_or_raises_gets_its_sentence(name, place, answer):
    said = check_of(name, place).diagnose(answer)
    assert HOSTILE[answer] in said and ("(line " in said or answer is not raises)


@pytest.mark.parametrize("name, place", CALLABLES)
def test_what_cannot_be_called_as_the_exercise_says_is_named_without_a_launch(name, place, monkeypatch):
    monkeypatch.setattr(zerolab, "launch", None, raising=False)
    check = check_of(name, place)
    assert "of type Tensor: write check_" in check.diagnose(torch.zeros(3))
    assert "the check needs a function" in check.diagnose(None)
    assert "and that does not fit yours" in check.diagnose(lambda *, other: 0)

    async def later(*_): ...

    def piecewise(*_):
        yield

    assert "async def" in check.diagnose(later) and "has a yield" in check.diagnose(piecewise)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(attempts, "SECONDS", 2.5)


def loops(*_):
    while True:
        pass


@pytest.mark.parametrize("check", [check_average, check_bytes_per_gpu])
def test_an_endless_loop_is_named_with_its_line(check, soon):
    said = check.diagnose(loops)
    assert "still computing" in said and "endless loop? (line " in said and "of loops" in said


def exchanges_and_loops(own):
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(own, (rank + 1) % size)
    dist.recv(torch.empty_like(own), (rank - 1) % size)
    sent.wait()
    while True:
        pass


def test_an_endless_loop_after_messages_is_told_with_them(soon):
    said = check_average.diagnose(exchanges_and_loops)
    assert ". It had made 2 calls before. The last one was dist.recv (seen with" in said


def divides_none(own):
    return dist.all_reduce(own) / dist.get_world_size()


def adds_what_a_ring_returns(own):
    return ring.all_reduce(own).div_(2)


@pytest.mark.parametrize("answer, call", [(divides_none, "dist"), (adds_what_a_ring_returns, "ring")])
def test_what_a_call_returns_is_said_where_none_is_used(answer, call):
    said = check_average.diagnose(answer)
    assert "NoneType" in said
    assert f"). Is it what {call}.all_reduce returned? It returns None, and leaves its result in" in said


def waits_and_reads_a_gradient(own):
    dist.all_reduce(own, async_op=True).wait()
    return own.grad / 2


def test_a_call_that_returned_a_handle_is_not_asked_about():
    said = check_average.diagnose(waits_and_reads_a_gradient)
    assert "NoneType" in said and "Is it what" not in said


def floods(own):
    for _ in range(100_000):
        print("to be " * 10)
    return own


def test_a_flood_of_output_is_cut(capsys):
    assert "nothing that arrived was used" in check_average(floods).message
    printed = capsys.readouterr().out
    assert printed.count("\n") < 30 and "the rest is left out" in printed and printed.count("✗") == 1


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), "holds nan"),
        (float("inf"), "holds inf"),
        (0.0, "all zeros"),
    ],
)
def test_values_that_are_no_numbers(value, says):
    assert says in check_average.diagnose(lambda own: torch.full_like(own, value))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("text", "returned str, 'text'"),
        ((1, 2), "returned tuple, (1, 2)"),
        (threading.Lock, "returned builtin_function_or_method"),
        (None, "not written yet"),
    ],
)
def test_values_that_are_no_tensors(value, says):
    assert says in check_average.diagnose(lambda own: value)
    wanted = says.replace(", ", " ") if value != (1, 2) else "returned tuple (1, 2)"
    assert wanted in check_bytes_per_gpu.diagnose(lambda psi, world_size, stage: value)


def test_other_types_shapes_and_precisions_are_named():
    want = torch.randn(6, dtype=torch.float64)
    assert "float32, and its input is float64" in unlike(want.float(), want)
    assert "shape (2, 3), and the right one (6,)" in unlike(want.view(2, 3), want)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert f"went through {str(dtype)[6:]}" in unlike(want.to(dtype).double(), want)
    assert unlike(want * 2, want) is None


def test_numbers_near_zero_are_not_taken_for_the_right_ones_cut_off():
    want = torch.tensor([-3.0, -0.1, 0.2, 5.0], dtype=torch.float64)
    assert "cut off at -1 and 1" in unlike(want.clamp(-1, 1), want)
    unwritten = torch.tensor([4e-310, 7e-310, 4e-310, 4e-310], dtype=torch.float64)
    assert "4e-310, as memory does that was never written" in unlike(unwritten, want)
    assert unlike(1e-200 * torch.tensor([1.0, 2.0, 1.0, 1.0], dtype=torch.float64), want) is None
    assert "never written" not in unlike(unwritten, 2 * unwritten)  # such numbers are right here


# ---- results


def test_a_result_is_true_where_the_answer_passed_and_is_shown_once(capsys):
    @graded("It is four.", call="four()")
    def check_four(fn):
        return None if fn() == 4 else "that is not four"

    passed, failed = check_four(lambda: 4), check_four(lambda: 5)
    assert passed and not failed and passed.message == "It is four."
    assert failed.to_dict() == {"check": "check_four", "passed": False, "message": "That is not four."}
    assert capsys.readouterr().out == "✓ It is four.\n✗ That is not four.\n"
    formatter = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell().display_formatter
    assert formatter.format(failed) == ({}, {}) and capsys.readouterr().out == ""
    assert failed == Result("check_four", False, "That is not four.")


def test_a_check_that_fails_itself_says_so(capsys):
    @graded("Never.")
    def check_nothing(fn):
        raise ZeroDivisionError("1 / 0")

    assert not check_nothing(len)
    assert "cannot judge your answer: ZeroDivisionError('1 / 0')" in capsys.readouterr().out


def test_the_first_lines_pass():
    shown = io.StringIO()
    brief = Brief(shown, lines=3)
    for number in range(10):
        print(number, file=brief)
    assert shown.getvalue().startswith("0\n1\n2\n… (your function prints more")
    assert shown.getvalue().count("\n") == 4


# ---- what stopped


def said_of(fn, size=3) -> str:
    return attempt(fn, [()] * size).failure


def test_a_receive_that_nobody_sends_for_is_named():
    def waits():
        if dist.get_rank() == 1:
            dist.recv(torch.ones(2), 0)

    said = said_of(waits)
    assert "rank 1 waits for a message from rank 0 that was never sent: rank 0 has returned" in said
    assert "of waits: `dist.recv(torch.ones(2), 0)`" in said


def test_a_send_that_nobody_receives_is_named(soon):
    def sends():
        if dist.get_rank() == 2:
            dist.send(torch.ones(2), 0)
        if dist.get_rank() == 0:
            dist.recv(torch.ones(2), 1)
        dist.barrier()

    said = said_of(sends)
    assert said.startswith("deadlock: after 2.5 s rank 0 waits for a message from rank 1 that was never sent")


@pytest.mark.parametrize(("first", "word"), [(dist.send, "send"), (dist.recv, "receive")])
def test_ranks_that_all_do_the_same_first_are_named(first, word, soon):
    second = dist.recv if word == "send" else dist.send

    def stuck():
        rank, size = dist.get_rank(), dist.get_world_size()
        first(torch.ones(2), (rank + 1) % size)
        second(torch.ones(2), (rank - 1) % size)

    assert f"because all of them {word} first" in said_of(stuck)


def test_messages_that_do_not_fit_are_named_and_gloo_is_not_heard(capfd):
    def too_short():
        if dist.get_rank() == 0:
            dist.send(torch.ones(6), 1)
        elif dist.get_rank() == 1:
            dist.recv(torch.ones(3), 0)

    said = said_of(too_short)
    assert "rank 0 sends 6 elements of float32, and rank 1 receives them into a tensor of 3 elements" in said

    def unequal():
        dist.all_reduce(torch.ones(4 - dist.get_rank()))

    assert "dist.all_reduce of 4 elements" in said_of(unequal, 2)
    assert "gloo" not in capfd.readouterr().err


def test_a_collective_that_one_rank_skips_is_named():
    def skips():
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(4))

    said = said_of(skips, 2)
    assert "rank 0 waits in dist.all_reduce, its collective number 1, and rank 1 makes only 0" in said
    assert "Connection" not in said


def test_what_cannot_be_sent_to_a_rank_is_named():
    lock = threading.Lock()
    said = check_average.diagnose(lambda own: lock)
    assert "cannot be sent to the ranks, because of the variable 'lock'" in said


# ---- which mistake explains the numbers


def finding(seen, right=(1.0, 1.0), **mistakes) -> Finding:
    tensors = lambda values: [torch.tensor([value], dtype=torch.float64) for value in values]
    named = {why: tensors(values) for why, values in mistakes.items()}
    return Finding("a case", None, tensors(seen), tensors(right), named)


def test_a_mistake_is_named_if_it_explains_all_cases():
    first = finding((3.0, 3.0), a=(3.0, 3.0), b=(3.0, 3.0), c=(3.0, 1.0))
    assert examine([first], lambda case: case) == "a, or else b (seen with a case)"
    later = finding((4.0, 4.0), a=(2.0, 2.0), b=(4.0, 4.0), c=(4.0, 4.0))
    assert examine([first, later], lambda case: case) == "b (seen with a case)"
    earlier = finding((1.0, 1.0), a=(1.0, 1.0), b=(2.0, 2.0), c=(1.0, 1.0))
    assert examine([earlier, first], lambda case: case) == "a (seen with a case)"


def test_a_mistake_of_some_ranks_is_named_beside_those_that_are_right():
    said = examine([finding((1.0, 3.0), a=(3.0, 3.0))], lambda case: case)
    assert said == "rank 0 is right, but rank 1 is not: a (seen with a case)"


def test_wrong_values_come_before_costs_and_stops_before_all():
    right, wrong = finding((1.0, 1.0)), finding((3.0, 3.0), a=(3.0, 3.0))
    right.cost = "too many bytes"
    assert examine([right, wrong], lambda case: case).startswith("a ")
    assert examine([right, right], lambda case: case) == "too many bytes (seen with a case)"
    assert examine([right, Finding("b", "it hangs")], lambda case: case).startswith("it hangs")


def test_what_cases_cost_before_one_that_stops_is_said_in_a_sentence_of_its_own():
    right, stops = finding((1.0, 1.0)), Finding("b", "it hangs")
    for target in (bronze, silver):
        right.cost = target("rank 0 sends 2 messages, and one is enough")
        said = sentences(examine([right, stops], lambda case: case))
        assert said == (
            "It hangs (seen with b). Before this case the values are right, and they cost too much: rank 0 "
            "sends 2 messages, and one is enough (seen with a case)"
        )
    right.cost = "the order is wrong"
    said = sentences(examine([right, stops], lambda case: case))
    assert said.endswith(". Before this case the values are right, but the order is wrong (seen with a case)")


def test_a_value_is_taken_apart_into_what_it_is_a_sum_of():
    torch.manual_seed(0)
    parts = {name: torch.randn(20, dtype=torch.float64) for name in "abc"}
    right = sum(parts.values())
    assert coefficients(right * 2, parts) == pytest.approx({"a": 2, "b": 2, "c": 2})
    assert coefficients(right**2, parts) is None
    assert coefficients(torch.ones(2, dtype=torch.float64), parts) is None  # fits by accident
    said = {
        "c is missing": right - parts["c"],
        "what is there is 1/3 times what it should be": right / 3,
        "b counts 2 times what it should": right + parts["b"],
        "b and c count -1 times what it should": parts["a"] - parts["b"] - parts["c"],
    }
    for sentence, value in said.items():
        assert made_of(value, right, [parts]) == sentence
    only = parts["a"] + parts["b"]
    said = "nothing of what should be in it is there; it has 1 × c in it instead"
    assert made_of(parts["c"], only, [parts]) == said


def test_a_value_that_is_right_elsewhere_or_in_part_is_named():
    right = torch.randn(20, dtype=torch.float64)
    assert "elements 3 to 8 of 20" in elsewhere(right[3:8], right[:5], right)
    assert "right numbers in the wrong order" in elsewhere(right.flip(0), right, None)
    assert elsewhere(right * 2, right, right) is None
    assert "all is right but elements 18 to 19 of 20" in unlike(torch.cat([right[:18], right[:2]]), right)
    assert "rounded to whole numbers" in unlike(right.floor(), right)
    parts = {"a": right, "b": right.flip(0)}
    said = made_of(torch.maximum(right, right.flip(0)), sum(parts.values()), [parts])
    assert said == "its value is the largest of a and b, where the sum is right"


# ---- what is alive


class Keeper:
    shelf = {}  # noqa: RUF012


def test_a_new_storage_is_found_where_an_earlier_tensor_has_let_go_of_its_own():
    """An engine gives parameters other storages. A new tensor may then get the address of an old storage."""
    earlier = [torch.ones(50) for _ in range(50)]
    alive, nothing = Alive(), torch.empty(0)
    for tensor in earlier:
        tensor.data = nothing
    made = [torch.ones(50) for _ in range(50)]
    assert len(alive.storages(at_least=200)) == len(made)


def test_new_storages_are_found_and_the_name_that_keeps_each():
    alive, keeper = Alive(), Keeper()
    assert alive.storages() == {}
    made = [torch.ones(50) for _ in range(5)]
    keeper.history, Keeper.shelf["m"] = [made[0][:2]], made[1]

    def fn(default=made[2]):
        return made[3], default

    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    found = alive.storages()
    assert nbytes(found) == 5 * 200 + 24 and len(alive.storages(at_least=200)) == 5
    assert len(alive.storages(leave_out=[made[0], None, Odd("str", "")])) == 6
    names = [kept_by(tensor, self=keeper) for tensor in made[:2]]
    assert names == ["self.history[0]", "Keeper.shelf['m']"]
    assert kept_by(made[2], fn=fn) == "fn's default" and kept_by(made[3], fn=fn) == "made[3]"
    assert kept_by(weight.grad, w=weight) == "w.grad" and kept_by(made[4], self=keeper) is None
    assert first_name([None, "history[10]", "log[2]", "log[0]"]) == "log[0]" and first_name([None]) is None
    held = functools.reduce(lambda inner, _: [inner], range(3), made[4])
    assert kept_by(made[4], held=held) == "held[0][0][0]"


def test_the_name_is_found_in_a_base_class_too():
    log = [torch.ones(3)]

    class Base:
        def step(self):
            log.append(torch.ones(3))

    class Derived(Base):
        pass

    assert kept_by(log[0], self=Derived()) == "log[0]"


def test_a_rank_waits_in_its_last_call_and_one_that_returned_waits_in_none():
    call = lambda op, peer, line: Message(op, peer, 3, 12, torch.float32, op, Place("answer.py", line, "f"))
    notes = [[call("send", 1, 1), call("recv_", 1, 2)], [call("recv_", 0, 3), RETURNED]]
    assert unmatched(notes) == (
        "rank 0 waits for a message from rank 1 that was never sent: rank 1 has returned, after 1 receive "
        "and no send (line 2 of f)"
    )


@pytest.mark.parametrize(
    "mistake, printed",
    [
        ("rank 0 is wrong", "Rank 0 is wrong."),
        ("16-bit numbers are too short", "16-bit numbers are too short."),
        ("all-reduces are missing", "All-reduces are missing."),
        ("w1.grad is zeros", "w1.grad is zeros."),
        ("b2 is added twice", "b2 is added twice."),
        ("dist.all_reduce adds up", "dist.all_reduce adds up."),
        ("f's backward is missing", "f's backward is missing."),
        ("g and f are exchanged", "g and f are exchanged."),
    ],
)
def test_a_name_from_the_readers_code_keeps_its_first_letter(mistake: str, printed: str):
    @graded("Never.", call=None)
    def check(answer):
        return mistake

    assert check(None).message == printed

"""Promise: a quiz takes any spelling of a letter, has a button for each answer, and hides its reasons."""

import html
import importlib
import re
from types import SimpleNamespace

import ipywidgets
import pytest
from support.lessons import NAMES, source

from zerolab.course import answer, questions, quizzes
from zerolab.course.questions import Prediction
from zerolab.course.quizzes import Choice, Quiz

SUM = Quiz("Is `a < b`?", "b", {"a": Choice("Never.", "Take 1 and 2."), "b": Choice("At `1`.", "1 < 2.")})
MEAN = Quiz("And `b < a`?", "a", {"a": Choice("Rarely.", "As seldom."), "b": Choice("Daily.", "Hardly.")})
BOTH = (SUM, MEAN)


@pytest.fixture
def shown(monkeypatch) -> list[dict]:
    """What is displayed, without a front end."""
    outputs: list[dict] = []
    for module in (questions, quizzes):
        monkeypatch.setattr(module, "display", lambda data, raw: outputs.append(data))
    return outputs


@pytest.fixture
def panels(monkeypatch, shown) -> list[SimpleNamespace]:
    """For each question of a quiz that is shown: its words, its buttons, and the verdict below them."""
    made: list[ipywidgets.VBox] = []
    build = quizzes._panel
    monkeypatch.setattr(quizzes, "_panel", lambda *of: made.append(build(*of)) or made[-1])
    answer(..., BOTH)
    rows = [panel.children for panel in made]
    return [SimpleNamespace(asked=asked, buttons=buttons, verdict=said) for asked, *buttons, said in rows]


# ---- letters


@pytest.mark.parametrize("letter", ["b", "B", " b)", "(b)", "b.", "\tB )\n", ["b"], ["B)"]])
def test_a_letter_is_taken_however_it_is_written(letter, capsys):
    answer(letter, BOTH)
    assert capsys.readouterr().out == "1. b) Right. 1 < 2.\n"


@pytest.mark.parametrize("letters", ["a a", "aA", "a, a)", ["a", "a"], ("A)", " a")])
def test_several_letters_are_judged_in_order(letters, capsys):
    answer(letters, BOTH)
    assert capsys.readouterr().out == "1. a) No. Take 1 and 2.\n2. a) Right. As seldom.\n"


@pytest.mark.parametrize(
    "letters", [[..., "b"], ["", "b"], ["-", "b"], "- b", ". b", "?, b", "_ B)", ["- b"]]
)
def test_a_question_may_be_left_out(letters, capsys):
    answer(letters, BOTH)
    assert capsys.readouterr().out == "1. No answer yet.\n2. b) No. Hardly.\n"


@pytest.mark.parametrize(
    ("letters", "says"),
    [
        ("d", "has 'd' for question 1: the letters offered are a, b"),
        ("b, x", "has 'x' for question 2"),
        ("a b a", "holds 3 letters: write 1 to 2"),
        ("", "holds 0 letters"),
        (2, "is 2: write letters in quotes"),
        (["a", 2], "holds 2: write letters in quotes"),
        (["a", None], "holds None: write letters in quotes, as in 'b a', and '-' for no answer"),
    ],
)
def test_what_is_no_offered_letter_is_refused_before_anything_is_judged(letters, says, capsys):
    with pytest.raises(ValueError, match=re.escape(says)):
        answer(letters, BOTH)
    assert capsys.readouterr().out == ""


# ---- a page that is only read


def test_a_page_without_buttons_has_the_questions_in_view_and_the_reasons_folded(shown, capsys):
    answer(..., BOTH)
    asked, folded = shown
    assert asked["text/plain"] == "\n".join(
        ["1. Is `a < b`?", "a) Never.", "b) At `1`.", "", "2. And `b < a`?", "a) Rarely.", "b) Daily."]
    )
    assert (
        "<code>a &lt; b</code>" in asked["text/html"]
        and "<li>b) At <code>1</code>.</li>" in asked["text/html"]
    )
    in_view, _, below = folded["text/html"].partition("<details>")
    for quiz in BOTH:
        for letter, choice in quiz.choices.items():
            everywhere = asked["text/plain"] + asked["text/html"] + folded["text/plain"] + in_view
            assert html.escape(choice.why) not in everywhere and choice.why not in everywhere
            word = "Right" if letter == quiz.right else "No"
            assert f"{letter}) {word}. {html.escape(choice.why)}</p>" in below
    assert "<p>Without buttons: write letters" in in_view and capsys.readouterr().out == ""


# ---- buttons


def test_every_button_is_labelled_with_its_answer_and_names_its_question(panels):
    for number, (panel, quiz) in enumerate(zip(panels, BOTH, strict=True), 1):
        offered = [f"{letter}) {choice.says}".replace("`", "") for letter, choice in quiz.choices.items()]
        assert [button.description for button in panel.buttons] == offered
        names = [f"Question {number}, answer {letter}" for letter in quiz.choices]
        assert [button.tooltip for button in panel.buttons] == names
        assert f"<b>{number}.</b>" in panel.asked.value and panel.verdict.value == ""


def test_the_widgets_of_a_quiz_share_their_looks(panels):
    """A notebook stores every layout and style: with one for each widget a quiz takes 100 kB."""
    shown_widgets = [w for panel in panels for w in (panel.asked, *panel.buttons, panel.verdict)]
    assert len({widget.layout.model_id for widget in shown_widgets}) == 1
    assert len({widget.style.model_id for widget in shown_widgets}) == 2


def test_a_click_says_in_words_whether_the_answer_is_right_and_why(panels):
    panel, untouched = panels
    wrong, right = panel.buttons
    for _ in range(2):  # a second click says the same
        wrong.click()
        assert (wrong.description, right.description) == ("✗ No: a) Never.", "b) At 1.")
        assert re.search(r'role="alert"><b>a\)</b> No. Take 1 and 2.<', panel.verdict.value)
    right.click()
    assert (wrong.description, right.description) == ("✗ No: a) Never.", "✓ Right: b) At 1.")
    assert "Right. 1 &lt; 2." in panel.verdict.value and "Take" not in panel.verdict.value
    assert untouched.verdict.value == "" and untouched.buttons[0].description == "a) Rarely."


def test_no_widget_holds_a_reason_before_a_click(panels):
    state = str(
        [widget.get_state() for panel in panels for widget in (panel.asked, *panel.buttons, panel.verdict)]
    )
    assert "Never." in state and not [c.why for quiz in BOTH for c in quiz.choices.values() if c.why in state]


# ---- the lessons


def room(name: str) -> dict:
    return vars(importlib.import_module(f"zerolab.course.lessons.{name}.quiz"))


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_asks_five_questions_in_one_cell(name):
    assert len(room(name)["QUESTIONS"]) == 5
    heading, cell = source(name).partition("\n# ## Quiz\n")[::2]
    assert heading and cell.count("# %%\nmy_answers = ...\nanswer(my_answers, quiz.QUESTIONS)\n") == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_choice_is_explained(name):
    asked = room(name)["QUESTIONS"]
    for quiz in asked:
        letters = "".join(quiz.choices)
        assert letters in ("abc", "abcd") and quiz.right in letters and quiz.question.endswith("?")
        reasons = [choice.why for choice in quiz.choices.values()]
        assert len(set(reasons)) == len(letters) and all(
            len(why.split()) >= 5 and why.endswith(".") for why in reasons
        )
        assert not [choice for choice in quiz.choices.values() if choice.says in choice.why]
    assert len({quiz.right for quiz in asked}) >= 3, "the letter gives the answer away"


@pytest.mark.parametrize("name", NAMES)
def test_a_mistake_says_what_the_reader_did(name):
    """Behind "63 GB: " it reads rightly: you sharded m and v and kept all master weights."""
    for value in room(name).values():
        for mistake in value.mistakes if isinstance(value, Prediction) else ():
            assert re.fullmatch(r"you .*[^.]", mistake), mistake

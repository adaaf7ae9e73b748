"""Quizzes: a lesson's questions with a button for each answer, and in text where a page has no buttons.

The questions, the answers and the reason for each answer stand in the lesson's ``quiz.py``. One cell of the
notebook asks them all, so nobody reads a reason together with its question.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import EllipsisType
from typing import NamedTuple

import ipywidgets
from IPython.display import display

from zerolab.course.classroom.record import quiz_in_notebook, remember
from zerolab.course.questions import display_folded, in_html

Letters = str | Sequence[str | EllipsisType]

# ipywidgets cuts the words of a button off at one line; these stay whole on a page of any width.
_STYLE = """<style>
.zerolab-choice.jupyter-button { white-space: normal; text-align: left; height: auto; min-height: 32px;
  line-height: 1.4; padding: 6px 10px; overflow: visible; }
.zerolab-choice.jupyter-button:focus-visible { outline: 2px solid currentColor; outline-offset: 1px; }
</style>"""
_TEXT = '<div style="line-height: 1.4; overflow-wrap: break-word; margin-{}">{}</div>'


class _Looks(NamedTuple):
    """The layout and styles that all widgets of a quiz share, because a notebook stores each one of them."""

    layout: ipywidgets.Layout
    text: ipywidgets.Widget
    button: ipywidgets.ButtonStyle


class Choice(NamedTuple):
    """An answer that is offered, and why it is right or wrong."""

    says: str
    why: str


class Quiz(NamedTuple):
    """A question, the letter of the right answer, and the answers by letter."""

    question: str
    right: str
    choices: Mapping[str, Choice]

    def verdict(self, letter: str) -> str:
        """Return whether the answer with this letter is right, and why."""
        return f"{'Right' if letter == self.right else 'No'}. {self.choices[letter].why}"


def answer(letters: Letters | EllipsisType, questions: Sequence[Quiz]) -> None:
    """Ask the questions with buttons, or judge letters: "b", or several as in "b a" or ["b", "a"].

    For `...` the answers and their reasons are folded below the buttons. A page without buttons shows the
    questions in text. Letters may be large, and may have blanks and brackets around them. A question without
    an answer is "-" or "", as in "- a".

    Raises: ValueError for a letter that is not offered, for none, and for more letters than questions.
    """
    if letters is ...:
        _display_questions(questions)
        return
    for number, (letter, quiz) in enumerate(zip(letters_of(letters, questions), questions, strict=False), 1):
        if letter is not ...:
            remember(quiz_in_notebook(), "quiz", str(number), letter == quiz.right)
        said = "No answer yet." if letter is ... else f"{letter}) {quiz.verdict(letter)}"
        print(textwrap.fill(f"{number}. {said}", width=100, subsequent_indent="   "))


def letters_of(letters: Letters, questions: Sequence[Quiz]) -> list[str | EllipsisType]:
    """Return the letter for each question in order, small, or `...` for one that was left out.

    Raises: ValueError for a letter that is not offered, for none, and for more letters than questions.
    """
    given = _letters(letters)
    if not 0 < len(given) <= len(questions):
        raise ValueError(f"my_answers holds {len(given)} letters: write 1 to {len(questions)}, as in 'b a'")
    for number, (letter, quiz) in enumerate(zip(given, questions, strict=False), 1):
        if letter is not ... and letter not in quiz.choices:
            offered = ", ".join(quiz.choices)
            raise ValueError(
                f"my_answers has {letter!r} for question {number}: the letters offered are {offered}"
            )
    return given


def number_right(letters: Letters | EllipsisType, questions: Sequence[Quiz]) -> int:
    """Return how many of the questions the letters answer rightly; for `...` it is 0."""
    given = [] if letters is ... else letters_of(letters, questions)
    return sum(letter == quiz.right for letter, quiz in zip(given, questions, strict=False))


def _letters(given: Letters) -> list[str | EllipsisType]:
    """Return one item for each answer: a small letter, or `...` where the reader left the question out."""
    items = [given] if isinstance(given, str) else given
    if not isinstance(items, Sequence):
        raise ValueError(f"my_answers is {given!r}: write letters in quotes, as in 'b a'")
    letters: list[str | EllipsisType] = []
    for item in items:
        if item is not ... and not isinstance(item, str):
            raise ValueError(
                f"my_answers holds {item!r}: write letters in quotes, as in 'b a', and '-' for no answer"
            )
        if item is ... or (item is not given and not item.strip()):
            letters.append(...)
        else:
            letters += _in_order(item)
    return letters


def _in_order(text: str) -> list[str | EllipsisType]:
    """Return the letters of a text, and `...` for each sign that stands alone, such as "-" or "?"."""
    letters: list[str | EllipsisType] = []
    for word in text.lower().replace(",", " ").split():
        left_out = not word.strip("-_.?…")
        letters += [...] if left_out else [sign for sign in word if sign.isalnum()]
    return letters


def _display_questions(questions: Sequence[Quiz]) -> None:
    """Show the buttons, with the questions in text for pages that have none, and the answers folded below."""
    numbered = list(enumerate(questions, 1))
    sheet = ipywidgets.HTML(_STYLE, layout={"width": "auto", "height": "auto"})
    looks = _Looks(sheet.layout, sheet.style, ipywidgets.ButtonStyle())
    panel = ipywidgets.VBox([sheet, *(_panel(*each, looks) for each in numbered)], layout=looks.layout)
    view = {"version_major": 2, "version_minor": 0, "model_id": panel.model_id}
    text = "\n\n".join("\n".join([f"{n}. {q.question}", *_offers(q)]) for n, q in numbered)
    page = "".join(f"<p><b>{n}.</b> {in_html(q.question)}</p>{_list(_offers(q))}" for n, q in numbered)
    forms = {"application/vnd.jupyter.widget-view+json": view, "text/html": page, "text/plain": text}
    display(forms, raw=True)
    asked = "Without buttons: write letters in place of the ..., such as `'b a'`, and run this cell again."
    reasons = [f"{n}. {letter}) {q.verdict(letter)}" for n, q in numbered for letter in q.choices]
    display_folded(asked, "The answers, and why not the others", reasons)


def _offers(quiz: Quiz) -> list[str]:
    return [f"{letter}) {choice.says}" for letter, choice in quiz.choices.items()]


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{in_html(line)}</li>" for line in lines)
    return f'<ul style="list-style: none">{items}</ul>'


def _panel(number: int, quiz: Quiz, looks: _Looks) -> ipywidgets.VBox:
    """A question with its buttons. A click says in words whether it was right, on the button and below it."""
    words = _TEXT.format("top: 1em", f"<b>{number}.</b> {in_html(quiz.question)}")
    asked, verdict = (ipywidgets.HTML(text, layout=looks.layout, style=looks.text) for text in (words, ""))
    labels = dict(zip(quiz.choices, _offers(quiz), strict=True))
    buttons = {at: _button(f"Question {number}, answer {at}", label, looks) for at, label in labels.items()}

    def judge(letter: str) -> None:
        remember(quiz_in_notebook(), "quiz", str(number), letter == quiz.right)
        said = quiz.verdict(letter)
        word = "✓ Right" if letter == quiz.right else "✗ No"
        buttons[letter].description = f"{word}: {_plain(labels[letter])}"
        # A screen reader reads an alert out when it appears.
        verdict.value = _TEXT.format(
            "top: 4px", f'<span role="alert"><b>{letter})</b> {in_html(said)}</span>'
        )

    for letter, button in buttons.items():
        button.on_click(lambda _, letter=letter: judge(letter))
    return ipywidgets.VBox([asked, *buttons.values(), verdict], layout=looks.layout)


def _button(name: str, label: str, looks: _Looks) -> ipywidgets.Button:
    """A button whose words are the answer, so that a screen reader speaks it; its tooltip says which one."""
    traits = {"layout": looks.layout, "style": looks.button}
    button = ipywidgets.Button(description=_plain(label), tooltip=name, **traits)
    button.add_class("zerolab-choice")
    return button


def _plain(label: str) -> str:
    return label.replace("`", "")  # a button shows no HTML

"""The course's own tools: predictions, quizzes, pictures, sliders, live source, attempts."""

import base64
import gc
import html
import itertools
import math
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import TightLayoutEngine
from support.lessons import drawing, solutions_travel_by_value

from zerolab import course, ring
from zerolab.course import (
    choice,
    explore,
    figure,
    look,
    number,
    predict,
    questions,
    quizzes,
    show,
    show_diff,
    show_source,
    slider,
    sliders,
    source,
)
from zerolab.course.attempts import attempt
from zerolab.course.lessons.ranks import check_average
from zerolab.course.look import magnify, paint, svg
from zerolab.course.questions import Prediction
from zerolab.stages import stage1, stage2

solutions_travel_by_value(__name__)


@pytest.fixture
def shown(monkeypatch):
    """What is displayed, as (data, metadata), without a front end."""
    outputs = []

    def display(data, metadata=None, raw=True, display_id=None):
        outputs.append((data, metadata))
        return SimpleNamespace(update=lambda data, raw: outputs.append((data, "in place")))

    for module in (look, questions, quizzes, sliders, source):
        monkeypatch.setattr(module, "display", display)
    return outputs


# ---- predictions

SHARDED = Prediction({"you sharded m and v < all": 63.0}, "GB", why="2 + 2 + 12/8 bytes.")


@pytest.mark.parametrize(
    ("guess", "says"),
    [
        (38.5, "Right: 38.5 GB."),
        (38.6, "Right: 38.5 GB."),
        (63.0, "63 GB: you sharded m and v < all. It is 38.5 GB."),
        (62.5, "62.5 GB: you sharded m and v < all. It is 38.5 GB."),
        (35.86, "35.86 GB: you gave the size in GiB (1 GB is 10^9 bytes, 1 GiB is 2^30). It is 38.5 GB."),
        (308, "308 GB: you counted bits, and a byte has eight of them. It is 38.5 GB."),
        (38.5e9, "that is bytes, and the answer is in GB. It is 38.5 GB."),
        (38_500, "check the power of ten. It is 38.5 GB."),
        (77, "You said 77 GB; it is 38.5 GB: 2 times too much."),
        (40.5, "You said 40.5 GB; it is 38.5 GB: 5.2 % too much."),
        (33, "You said 33 GB; it is 38.5 GB: 14 % too little."),
    ],
)
def test_predict_names_the_mistake(guess, says, capsys):
    predict(guess, 38.5, SHARDED, "params 14 GB")
    verdict, *rest = capsys.readouterr().out.splitlines()
    assert verdict.endswith(says) and rest == ["2 + 2 + 12/8 bytes.", "params 14 GB"]


def test_a_prediction_does_not_show_its_answer_before_the_guess(shown, capsys):
    """Neither the answer, nor what was measured, nor the reason; all of them are there, folded."""
    predict(..., 38.5, SHARDED, "38.5 GB on each rank")
    ((data, _),) = shown
    assert "No guess yet" in data["text/plain"] and "38.5" not in data["text/plain"] + capsys.readouterr().out
    asked, _, folded = data["text/html"].partition("<details>")
    assert not re.search(r"\d", asked)
    assert "<p>38.5 GB.</p><pre>38.5 GB on each rank</pre><p>2 + 2 + 12/8 bytes.</p>" in folded
    assert "63 GB: you sharded m and v &lt; all." in folded


@pytest.mark.parametrize(
    ("unit", "said"),
    [("blocks", "1 block."), ("ms", "1 ms."), ("billion parameters", "1 billion parameters.")],
)
def test_one_of_a_unit_is_no_plural(unit: str, said: str, capsys):
    predict(1, 1, Prediction({}, unit))
    assert capsys.readouterr().out == f"Right: {said}\n"


def test_predict_confuses_units_only_where_there_are_bytes(capsys):
    predict(8, 1, Prediction({}))
    assert "bits" not in capsys.readouterr().out


@pytest.mark.parametrize("guess", ["38.5", True, None])
def test_predict_refuses_what_is_no_number(guess):
    with pytest.raises(TypeError, match="plain number"):
        predict(guess, 1.0, Prediction({}))


@pytest.mark.parametrize("answer", [0, 5.0, 1])
@pytest.mark.parametrize("guess", [float("nan"), float("inf"), -float("inf")])
def test_predict_refuses_what_is_not_finite(guess, answer):
    with pytest.raises(ValueError, match=f"my_guess is {guess}: write a finite number of GB, such as 12.5"):
        predict(guess, answer, SHARDED)


def test_predict_refuses_an_int_that_no_float_holds():
    with pytest.raises(ValueError, match="write a finite number of GB, such as 12"):
        predict(10**400, 1.0, SHARDED)


# ---- pictures and sliders


def dot(fig, size=1):
    fig.subplots().plot([1], [1], "o", markersize=size, label="dot")
    return f'a dot of size "{size}" & nothing else'


def shown_dot(shown, size=3) -> dict:
    fig = figure(height=1)
    show(fig, dot(fig, size))
    return shown[-1][0]


def test_a_figure_carries_its_alt_text_in_every_form(shown):
    data = shown_dot(shown)
    in_html = "a dot of size &quot;3&quot; &amp; nothing else"
    assert data["text/plain"] == html.unescape(in_html)
    assert f'alt="{in_html}"' in data["text/html"] and f'aria-label="{in_html}"' in data["image/svg+xml"]
    assert ElementTree.fromstring(data["image/svg+xml"]).get("aria-label") == data["text/plain"]


def test_the_img_holds_the_drawing_itself_and_words_stay_words(shown):
    data = shown_dot(shown)
    (embedded,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', data["text/html"])
    assert base64.b64decode(embedded).decode() == data["image/svg+xml"]
    assert ">dot</text>" in data["image/svg+xml"] and "\n" not in data["image/svg+xml"]


def test_the_same_figure_is_the_same_file(shown):
    assert shown_dot(shown) == shown_dot(shown)


@pytest.mark.parametrize("alt", [None, "", " "])
def test_a_figure_without_alt_text_is_refused(alt):
    with pytest.raises(ValueError, match="alt text"):
        show(figure(), alt)


def test_sliders_show_their_default_state_and_redraw_it_in_place(shown, monkeypatch):
    drawn = []

    def draw(fig, **values):
        fig.subplots()
        drawn.append(values)
        return str(values)

    size, kind = slider(1, 9, 4), choice([("one", 1), ("two", 2)], 2)
    explore(draw, size=size, kind=kind)
    (widget, _), (picture, _) = shown
    assert widget["text/plain"].endswith("size = 4, kind = two.")
    assert "application/vnd.jupyter.widget-view+json" in widget
    assert picture["text/plain"] == "{'size': 4, 'kind': 2}"
    monkeypatch.setattr(TightLayoutEngine, "execute", None)  # once is enough
    size.value = 7
    assert (shown[2][0]["text/plain"], shown[2][1]) == ("{'size': 7, 'kind': 2}", "in place")
    assert drawn == [{"size": 4, "kind": 2}, {"size": 7, "kind": 2}]


@pytest.mark.parametrize("options, value", [(["off", "on"], "off"), ([1, 8, 64], 8), ([("off", 0)], 0)])
def test_the_text_of_a_choice_names_the_option(shown, options, value):
    explore(lambda fig, **_: "a figure", mode=choice(options, value))
    expected = "off" if options[0] in ("off", ("off", 0)) else value
    assert shown[0][0]["text/plain"].endswith(f"shown at mode = {expected}.")


def test_the_field_beside_a_slider_has_its_name_and_its_value():
    """A slider over values speaks their places; the field speaks the values, and sets them."""
    for control, other in ((choice([1, 8, 64], 8), 64), (number(0.1, 1000, 7.5), 70.0)):
        row = sliders._row("how many", control)
        assert row.children == (control, control.beside) and control.description == "how many"
        control.beside.value = other
        assert control.value == other
        control.value = 8
        assert control.beside.value == pytest.approx(8, rel=0.06)  # its nearest place


@pytest.mark.parametrize("typed", [6.66, 13, 70, 1.5, 0.1, 2000, 1.2345])
def test_a_number_between_two_places_of_the_slider_can_be_typed_and_stays(typed: float):
    """A browser moves the handle to the nearest place and reports that place."""
    control = number(0.1, 2000, 7.5)
    control.value = typed
    nearest = control.beside.value
    control.beside.value = nearest * (1 + 1e-9)  # as reported, with the rounding of another language
    assert control.value == typed
    control.beside.value = nearest * 10**-0.05 if typed > 1 else nearest * 10**0.05  # a place further
    assert control.value == float(f"{control.beside.value:.3g}") != typed


def test_a_play_button_has_as_many_steps_as_its_slider():
    control = slider(0, 6, 2, play=True)
    control.max = 3
    control.beside.value = 5
    assert (control.beside.max, control.value) == (3, 3)


@pytest.mark.parametrize(
    ("lesson", "name"), [("memory_accounting", "stage_bars"), ("data_parallel", "buckets")]
)
def test_a_redraw_draws_the_figure_once_and_no_minor_ticks(monkeypatch, lesson: str, name: str):
    """Both cost more than the rest of a redraw, and a reader waits while the slider moves."""
    canvas, draw, drawn = figure(2.8), drawing(lesson, name), []
    monkeypatch.setattr(canvas, "draw", lambda page: drawn.append(page) or Figure.draw(canvas, page))
    for gpus in (2, 64):
        paint(canvas, draw, {"gpus": gpus})
    assert len(drawn) == 2
    axes = [axis for each in canvas.axes for axis in (each.xaxis, each.yaxis)]
    assert axes and not any(axis.get_minor_ticks() for axis in axes)


def test_a_redraw_is_the_picture_that_a_new_figure_would_be():
    canvas, draw = figure(2.8), drawing("memory_accounting", "stage_bars")
    paint(canvas, draw, {"gpus": 1, "model_billions": 2000})
    assert paint(canvas, draw, {}) == paint(figure(2.8), draw, {})


def test_a_redraw_frees_the_last_drawing_and_collects_nothing_while_it_draws():
    """A collection of the oldest generation, which has all objects of torch, takes longer than a redraw."""
    canvas, axes = figure(), []

    def draw(canvas: Figure) -> str:
        axes.append(weakref.ref(canvas.subplots()))
        assert not gc.isenabled()
        return "Axes."

    for _ in range(2):
        paint(canvas, draw, {})
        assert gc.isenabled()
    assert axes[0]() is None and axes[1]() is not None


@pytest.mark.parametrize("on", [True, False])
def test_a_drawing_that_fails_leaves_the_collector_as_it_was(on: bool):
    def draw(canvas: Figure) -> str:
        raise ValueError("no data")

    try:
        gc.enable() if on else gc.disable()
        with pytest.raises(ValueError, match="no data"):
            paint(figure(), draw, {})
        assert gc.isenabled() == on
    finally:
        gc.enable()


def test_a_bar_that_is_too_short_to_see_is_drawn_again_enlarged():
    axes = figure().subplots()
    axes.barh(["long", "short"], [1000, 0.4], color="red")
    axes.barh(["long", "short"], [0, 0.1], left=[0, 0.4], color="blue")
    magnify(axes)
    assert [text.get_text() for text in axes.texts] == ["×500"]
    assert [round(bar.get_width(), 6) for bar in axes.patches[4:]] == [200, 50]


def test_whatever_has_a_label_gets_a_legend_unless_there_is_one():
    fig = figure()
    left, right = fig.subplots(1, 2)
    left.plot([1], label="a line")
    right.plot([1], label="another")
    own = right.legend(loc="upper right")
    assert ">a line</text>" in svg(fig, "two axes") and right.get_legend() is own


def test_words_are_legible_on_every_colour():
    for colour in [*look.COLOURS.values(), *map(look.rank_colour, range(8))]:
        assert look.contrast(look.ink_on(colour), colour) >= 4.5, colour
    for ink in (look.INK, look.QUIET, *(entry["color"] for entry in look._SERIES)):
        assert look.contrast(ink, look.PAPER) >= 4.5, ink


def test_category_colours_are_no_others():
    """In CIE Lab a distance of 2 is just visible; 25 is a plain difference."""
    others = {entry["color"] for entry in look._SERIES} | {look.rank_colour(rank) for rank in range(8)}
    for name, colour in look.COLOURS.items():
        for other in others:
            assert math.dist(lab(colour), lab(other)) > 25, f"{other} looks like the colour of {name}"


def test_the_colours_of_ranks_are_not_each_others():
    for one, other in itertools.combinations(map(look.rank_colour, range(8)), 2):
        assert math.dist(lab(one), lab(other)) > 25, (one, other)


def lab(colour: str) -> tuple[float, float, float]:
    """A colour in CIE Lab (D65), where equal distances look equally different."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour))
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    f, g, h = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * g - 16, 500 * (f - g), 200 * (g - h)


# ---- live source


def test_show_source_is_the_file_that_runs_without_its_docstring_if_asked(shown):
    show_source(ring.all_gather, docstring=False)
    text, page = shown[0][0]["text/plain"], shown[0][0]["text/html"]
    assert text.startswith("`zerolab/ring.py`, `all_gather`\n\ndef all_gather(")
    assert "_exchange(" in text and '"""' not in text
    on_page = html.unescape(re.sub("<[^>]*>", "", page))
    assert "".join(on_page.split()) == "".join(text.replace("`", "").split())


def test_code_is_legible_on_a_dark_page_that_has_not_been_run(shown):
    """JupyterLab's sanitizer leaves a colour that is written as such; it removes inherit and transparent."""
    show_source(look)
    show_diff(stage1, stage2)
    for page in (shown[0][0]["text/html"], shown[1][0]["text/html"]):
        (letters,) = re.findall(r'<pre style="([^"]*)"', page)
        assert f"background: {look.PAPER}; color: {look.INK}" in letters
        assert "white-space: pre; overflow-x: auto" in letters  # on a narrow page it scrolls
        for colour in set(re.findall(r'<span style="[^"]*?(?<!-)color: (#\w+)', page)):
            assert look.contrast(to_hex(colour), look.PAPER) >= 4.5, colour


def test_a_decorated_function_bears_the_name_of_its_own_file(shown):
    show_source(check_average)
    assert shown[0][0]["text/plain"].startswith("`zerolab/course/lessons/ranks/check.py`, `check_average`")


def test_show_diff_shows_both_stages_and_counts_the_lines(shown):
    show_diff(stage1, stage2)
    text = shown[0][0]["text/plain"]
    assert "`zerolab/stages/stage1.py` → `zerolab/stages/stage2.py`" in text
    body = text.split("\n\n", 1)[1]
    gone, come = (sum(line.startswith(sign) for line in body.splitlines()) for sign in "-+")
    assert f"{gone} lines go, {come} come" in text and gone and come


# ---- what a check sees


def test_attempt_sees_every_message_under_any_name():
    def chatty():
        rank, tensor = dist.get_rank(), torch.zeros(5)
        if rank == 0:
            dist.isend(tensor[:2], 1).wait()
        else:
            dist.recv(tensor[:2], 0)
        dist.all_reduce(tensor)
        return tensor

    outcome = attempt(chatty, [(), ()])
    sent = [tuple(message)[:6] for message in outcome.messages[0]]
    assert sent == [
        ("send", 1, 2, 8, torch.float32, "dist.isend"),
        ("allreduce_", None, 5, 20, torch.float32, "dist.all_reduce"),
    ]
    assert str(outcome.messages[0][1].place).endswith("of chatty: `dist.all_reduce(tensor)`")
    assert outcome.collectives == ["dist.all_reduce"] and outcome.bytes_sent(1) == 20


def test_attempt_sees_functional_collectives_and_sends_of_no_barrier():
    def functional():
        group, tensor = dist.group.WORLD, torch.zeros(6)
        functional_collectives.all_reduce(tensor, "sum", group)
        functional_collectives.all_gather_tensor(tensor, 0, group)
        functional_collectives.reduce_scatter_tensor(tensor, "sum", 0, group)
        dist.barrier()
        return functional_collectives.broadcast(tensor, 0, group)

    outcome = attempt(functional, [(), ()])
    assert [tuple(message)[:6] for message in outcome.messages[0]] == [
        ("allreduce_", None, 6, 24, torch.float32, "dist.all_reduce"),
        ("_allgather_base_", None, 12, 48, torch.float32, "dist.all_gather_into_tensor"),
        ("_reduce_scatter_base_", None, 3, 12, torch.float32, "dist.reduce_scatter_tensor"),
        ("broadcast_", None, 6, 24, torch.float32, "dist.broadcast"),
    ]
    assert [call.op for call in outcome.calls[1]][-2:] == ["barrier", "broadcast_"]


def test_functional_collectives_send_what_torchs_own_do():
    """Of both, as they are noted."""

    def both():
        group, tensor = dist.group.WORLD, torch.zeros(6)
        dist.all_reduce(tensor.clone())
        dist.all_gather_into_tensor(torch.zeros(12), tensor)
        dist.reduce_scatter_tensor(torch.zeros(3), tensor)
        functional_collectives.all_reduce(tensor, "sum", group)
        functional_collectives.all_gather_tensor(tensor, 0, group)
        functional_collectives.reduce_scatter_tensor(tensor, "sum", 0, group)

    sent = [tuple(message)[:6] for message in attempt(both, [(), ()]).messages[1]]
    assert len(sent) == 6 and sent[:3] == sent[3:]


def test_attempt_tells_a_busy_rank_from_a_deadlock():
    def one_rank_counts_for_ever():
        busy = dist.get_rank() == 1
        while busy:
            pass
        dist.barrier()

    failure = attempt(one_rank_counts_for_ever, [(), ()], timeout=2).failure
    assert "rank 1 was still computing" in failure and "deadlock" not in failure


def test_attempt_says_who_raised_what():
    def second_rank_raises():
        if dist.get_rank() == 1:
            raise IndexError("no such chunk")

    failure = attempt(second_rank_raises, [(), ()]).failure
    assert failure.startswith("rank 1 stopped with IndexError: no such chunk (line ")


def test_no_module_of_the_course_bears_the_name_of_a_function_that_lessons_import():
    """Importing the module would put it in the function's place."""
    modules = {path.stem for path in Path(course.__file__).parent.glob("*.py")}
    assert not modules & set(course.__all__)

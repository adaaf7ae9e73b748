"""Promise: in a browser a lesson runs without an error, and a reader can use all of it.

One lesson is tried on a wide light page and one on a dark page as narrow as a phone; where all lessons are
asked for, each is tried on these, a narrow light and a wide dark page.
Each slider is moved by keyboard and by mouse, and its picture follows. Each answer of the quiz is given, and
one exercise is solved. What no other test sees: JupyterLab's own handling of the widgets, the message to the
kernel and the picture's way back. It needs Debian's chromium or any other Chrome, and is skipped without one.
"""

import base64
import contextlib
import html
import importlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support import ROOT
from support.lessons import drawing, exercise, spoken

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
PATIENCE_SECONDS = 120
LESSON_SECONDS = 1200  # the longest lesson runs for minutes, and for several times as many on a busy machine
RUNNING = ".jp-InputPrompt:text('[*]')"
CUT_OFF = "labels => labels.filter(l => l.scrollWidth > l.clientWidth).map(l => l.textContent)"
PLAY = ".widget-play .fa-play"
COMPLAINTS = (
    "[data-mime-type='application/vnd.jupyter.error'], [data-mime-type='application/vnd.jupyter.stderr']"
)

WIDE, NARROW = 1300, 400  # the pixels of a page across
LOOKS = {
    "wide-light": ("JupyterLab Light", WIDE),
    "narrow-dark": ("JupyterLab Dark", NARROW),
    "narrow-light": ("JupyterLab Light", NARROW),
    "wide-dark": ("JupyterLab Dark", WIDE),
}
BADGES = re.compile(r"https://(colab\.research\.google\.com|mybinder\.org)/.*badge.*\.svg$")


def explored(notebook: Path) -> int:
    """How many figures with sliders a lesson has."""
    return notebook.read_text("utf-8").count('"explore(')


def committed(notebook: Path) -> list[str]:
    """What the figures with sliders say of themselves in the notebook as it is committed."""
    cells = [
        cell
        for cell in json.loads(notebook.read_text("utf-8"))["cells"]
        if "explore(" in "".join(cell["source"])
    ]
    figures = [cell["outputs"][-1]["data"] for cell in cells if cell.get("outputs")]
    return ["".join(data["text/plain"]) for data in figures if "text/html" in data]


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ALL = "ZEROLAB_ALL_LESSONS" in os.environ
TRIED = [(notebook, look) for look in LOOKS for notebook in NOTEBOOKS]
if not ALL:  # a workflow asks for all; here a short lesson and the one with most sliders are enough
    TRIED = [(NOTEBOOKS[1], "wide-light"), (max(NOTEBOOKS, key=explored), "narrow-dark")]
LONG = [pytest.mark.long("three times as long as the short lesson, with sliders of the same kind")]

# Where all are asked for, a missing browser is an error.
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not ALL, reason="no chromium: apt-get update && apt-get install -y chromium"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end(server: subprocess.Popen) -> None:
    """The server and whatever it started, kernels and their ranks: by request, then by force."""
    started = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(20)
    for process in [*started, server]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    server.wait()
    psutil.wait_procs(started, timeout=20)


def set_up(folder: Path, extension: str, **settings: str) -> None:
    """Give an extension of JupyterLab settings."""
    file = folder / f"lab/@jupyterlab/{extension}.jupyterlab-settings"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(settings))


@pytest.fixture
def lab(tmp_path: Path, notebook: Path, look: tuple[str, int]) -> Iterator[str]:
    """The address of a JupyterLab of its own, with a copy of the notebook and nobody's settings."""
    (tmp_path / "lessons").mkdir()
    shutil.copy(notebook, tmp_path / "lessons")
    set_up(tmp_path, "notebook-extension/tracker", windowingMode="none")  # all cells, not only those in view
    set_up(tmp_path, "apputils-extension/themes", theme=look[0])
    folders = {f"JUPYTER_{kind}_DIR": str(tmp_path / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    folders |= {"IPYTHONDIR": str(tmp_path / "ipython"), "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "lab")}
    port, token = free_port(), secrets.token_hex()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    command += [f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"]
    command += [f"--ServerApp.root_dir={tmp_path / 'lessons'}"]
    with (tmp_path / "server.log").open("w") as log:
        environ = os.environ | folders | {"PYTHONPATH": str(ROOT)}
        server = subprocess.Popen(command, env=environ, stdout=log, stderr=log, cwd=tmp_path)
        try:
            wait_until_it_answers(f"http://127.0.0.1:{port}/api", server, tmp_path / "server.log")
            yield f"http://127.0.0.1:{port}/lab/tree/{notebook.name}?token={token}"
        finally:
            end(server)


def wait_until_it_answers(address: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return
        assert server.poll() is None and time.monotonic() < deadline, f"no JupyterLab:\n{log.read_text()}"
        time.sleep(0.1)


@pytest.fixture
def console() -> list[str]:
    """The errors that the browser reports. A badge that cannot be loaded is none."""
    return []


@pytest.fixture
def page(lab: str, console: list[str], look: tuple[str, int]) -> Iterator["playwright.Page"]:
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            opened = browser.new_page(viewport={"width": look[1], "height": 900})
            opened.set_default_timeout(PATIENCE_SECONDS * 1000)
            playwright.expect.set_options(timeout=PATIENCE_SECONDS * 1000)
            opened.on("console", lambda message: console.extend(errors_in(message)))
            opened.on("pageerror", lambda error: console.append(str(error)))
            opened.goto(lab)
            opened.locator(".jp-Notebook .jp-Cell").first.wait_for()
            if look[1] == NARROW:
                opened.keyboard.press("Control+b")  # the list of files takes the place of a narrow page
            yield opened
        finally:
            browser.close()


def errors_in(message: "playwright.ConsoleMessage") -> list[str]:
    address = message.location["url"]
    return [f"{message.text} ({address})"] if message.type == "error" and not BADGES.match(address) else []


def run_all_cells(page: "playwright.Page") -> None:
    page.locator("#jp-main-statusbar").get_by_text("Idle").wait_for()
    page.locator(".jp-Notebook .jp-Cell").first.click()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.locator(RUNNING).first.wait_for()
    playwright.expect(page.locator(RUNNING)).to_have_count(0, timeout=LESSON_SECONDS * 1000)


def drawn(picture: "playwright.Locator") -> str:
    """What the drawing that the browser holds says of itself. The image's alt text says the same."""
    alt, source = picture.evaluate("image => [image.alt, image.src]")  # together, because a button plays on
    svg = base64.b64decode(source.partition("base64,")[2]).decode()
    assert html.unescape(re.search(r'aria-label="([^"]*)"', svg)[1]) == alt
    return alt


def answer_the_quiz(page: "playwright.Page", lesson: str) -> None:
    """Each answer of each question, by mouse and by keyboard: one of them is right, and each says why."""
    questions = importlib.import_module(f"zerolab.course.lessons.{lesson}.quiz").QUESTIONS
    offered = [(number, letter) for number, quiz in enumerate(questions) for letter in quiz.choices]
    buttons = page.locator(".zerolab-choice")
    playwright.expect(buttons).to_have_count(len(offered))
    for place, ((number, letter), button) in enumerate(zip(offered, buttons.all(), strict=True)):
        if place % 2:
            button.click()
        else:
            button.press("Space")
        playwright.expect(button).to_have_text(re.compile(rf"^(✓ Right|✗ No): {letter}\) "))
        verdict = page.get_by_role("alert").nth(number)
        playwright.expect(verdict).to_have_text(re.compile(rf"^{letter}\) (Right|No)\. "))
    playwright.expect(buttons.filter(has_text="✓ Right")).to_have_count(5)


def follows(picture: "playwright.Locator", move: Callable[[], None]) -> None:
    """The picture changes after the move, and its alt text with it."""
    before = drawn(picture)
    move()
    playwright.expect(picture).not_to_have_attribute("alt", before)
    assert drawn(picture) != before


def press_an_arrow(handle: "playwright.Locator") -> None:
    at_its_end = handle.get_attribute("aria-valuenow") == handle.get_attribute("aria-valuemax")
    handle.press("ArrowLeft" if at_its_end else "ArrowRight")


def type_a_number(cell: "playwright.Locator", number: str) -> None:
    field = cell.locator("input[type=number]").first
    field.fill(number)
    field.press("Enter")


def drag(handle: "playwright.Locator") -> None:
    """Pull the handle with the mouse to the end of its slider that is further away."""
    handle.scroll_into_view_if_needed()
    track = handle.locator("xpath=ancestor::*[contains(@class, 'noUi-base')]").bounding_box()
    at, mouse = handle.bounding_box(), handle.page.mouse
    x, y = at["x"] + at["width"] / 2, at["y"] + at["height"] / 2
    in_left_half = x < track["x"] + track["width"] / 2
    mouse.move(x, y)
    mouse.down()
    mouse.move(track["x"] + in_left_half * track["width"], y)
    mouse.up()


def move_the_sliders(page: "playwright.Page", notebook: Path) -> None:
    """Every slider by keyboard, then every slider by mouse, then the buttons that play one."""
    cells = page.locator(".jp-CodeCell", has=page.locator(".noUi-handle"))
    playwright.expect(cells).to_have_count(explored(notebook))
    assert cells.locator(".widget-label").evaluate_all(CUT_OFF) == []
    assert [drawn(cell.locator("img")) for cell in cells.all()] == committed(notebook)  # no handle has jumped
    handles = [
        (cell.locator("img"), handle) for cell in cells.all() for handle in cell.locator(".noUi-handle").all()
    ]
    for picture, handle in handles:
        follows(picture, lambda handle=handle: press_an_arrow(handle))
    if notebook.stem.endswith("memory_accounting"):  # each slider went one step to the right
        moved = {"model_billions": 8.91, "gpus": 128, "gpu_memory_GB": 40, "precision": "fp32"}
        states = spoken(drawing("memory_accounting", "stage_bars"), **moved)
        one_gpu = {"batch": 64, "checkpointing": "on", "gpu_memory_GB": 40}
        activations = spoken(drawing("memory_accounting", "one_gpu"), **one_gpu)
        assert [drawn(cell.locator("img")) for cell in cells.all()] == [states, activations]
        follows(cells.first.locator("img"), lambda: type_a_number(cells.first, "13"))
        assert drawn(cells.first.locator("img")) == spoken(
            drawing("memory_accounting", "stage_bars"), **moved | {"model_billions": 13.0}
        )
    for picture, handle in handles:
        follows(picture, lambda handle=handle: drag(handle))
    played = cells.filter(has=page.locator(PLAY))
    playwright.expect(played).to_have_count(notebook.read_text("utf-8").count("play=True"))
    for cell in played.all():
        follows(cell.locator("img"), cell.locator(PLAY).click)


def solve_the_exercise(page: "playwright.Page", lesson: str) -> None:
    """Type the solution of the lesson's first exercise into its cell; before, its check finds a mistake."""
    _, call, solution = exercise(lesson)
    heading = page.locator(".cm-line", has_text=re.compile("^# Exercise$"))
    cell = page.locator(".jp-CodeCell", has=heading).first
    said = cell.locator(".jp-Cell-outputWrapper")
    playwright.expect(said).to_contain_text("✗")
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(f"# Exercise\n{solution}\n\n\n{call}")
    page.keyboard.press("Shift+Enter")
    playwright.expect(said).to_contain_text("✓", timeout=LESSON_SECONDS * 1000)


@pytest.mark.timeout(2 * LESSON_SECONDS)
@pytest.mark.parametrize(
    ("notebook", "look"),
    [
        pytest.param(
            notebook, LOOKS[look], id=f"{look}-{notebook.stem}", marks=LONG if number and not ALL else []
        )
        for number, (notebook, look) in enumerate(TRIED)
    ],
)
def test_a_reader_can_use_all_of_a_lesson(page: "playwright.Page", notebook: Path, console: list[str]):
    lesson = notebook.stem.partition("_")[2]
    run_all_cells(page)
    assert page.locator(COMPLAINTS).all_inner_texts() == []
    answer_the_quiz(page, lesson)
    move_the_sliders(page, notebook)
    solve_the_exercise(page, lesson)
    assert page.locator(COMPLAINTS).all_inner_texts() == []
    assert console == []

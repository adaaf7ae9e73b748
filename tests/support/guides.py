"""Find the commands and examples in the guides: README, CONTRIBUTING, cloud/README.md, docs/ and the lessons.

A comment above an example names the tests that run it, as in

    <!-- run by tests/launcher/test_soak.py::test_a_short_soak_as_it_is_run_by_hand -->

An example without a comment is run as it is written, by tests/repo/test_guides.py. A comment that begins with
``not run:`` gives the reason, and the test keeps the list of these.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from support import ROOT

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
GUIDES = ["README.md", "CONTRIBUTING.md", "cloud/README.md", *PAGES]
LESSONS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks/source").glob("*.py"))
RUN, SHOWN = ("sh", "python", "ipython"), ("text",)
"""The languages of fences that are run, and of those that show an output."""

CHUNK = re.compile(r"^```(\w*)\n(.*?)^```$|^<!-- (.*?) -->$|((?:^(?!```|<!--)[^\n]+\n?)+)", re.M | re.S)
PROGRAMS = r"\./zero|python3?|torchrun|mpirun|srun|sbatch|ssh|git|pip|nbgrader|\.venv/bin/\w+"
INLINE = re.compile(rf"(?<!`)`((?:{PROGRAMS}) [^`]+)`")
FENCE = re.compile(r"^[ \t>]*(?:```|~~~).*$", re.M)
A_NAME = re.compile(r"\./zero \w+|.*(…|COMMAND|FOLDER|NAME).*")
"""What only names a command in a sentence: `./zero lab`, or one with a placeholder in it."""


class Example(NamedTuple):
    """A command (``sh``), program (``python``) or cell (``ipython``), and what the comment above it says."""

    guide: str
    language: str
    text: str
    comment: str

    def __str__(self) -> str:
        return f"{self.guide}: {self.text.splitlines()[0]}"


def text(guide: str) -> str:
    """Return what a reader of the guide sees; the text of a lesson is in comments."""
    written = (ROOT / guide).read_text("utf-8")
    return re.sub(r"^# ?", "", written, flags=re.M) if guide.endswith(".py") else written


def section(guide: str, title: str) -> str:
    return text(guide).split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(guide: str, language: str) -> list[str]:
    """The fenced blocks of a guide in that language, without their fences."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text(guide), re.M | re.S)


def hidden_fences(written: str) -> list[str]:
    """Return the fences that could hide a command: of another language, indented, or an output."""
    found = [language for language, block, *_ in CHUNK.findall(written) if block]
    unknown = [language or "no language" for language in found if language not in RUN + SHOWN]
    indented = [line for line in FENCE.findall(written) if not line.startswith("```")]
    commands = [
        line
        for language, block, *_ in CHUNK.findall(written)
        for line in re.findall(rf"^(?:[$!] ?)?(?:{PROGRAMS}) .*", block, re.M)
        if language in SHOWN
    ]
    odd = [] if len(FENCE.findall(written)) == 2 * len(found) else ["a fence that is not closed"]
    return unknown + indented + commands + odd


def examples(guide: str, written: str) -> Iterator[Example]:
    """Yield every command and program in a guide."""
    comment = ""
    for language, block, said, paragraph in CHUNK.findall(written):
        if language in RUN:
            yield Example(guide, language, block, comment)
        for command in INLINE.findall(paragraph.replace("\n", " ")):
            if not A_NAME.fullmatch(command):
                yield Example(guide, "sh", command, comment)
        comment = said

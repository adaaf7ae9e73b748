"""The guides (README, CONTRIBUTING and the pages of docs/), and the commands and examples in them.

A comment above an example names the tests that run it, as in

    <!-- run by tests/launcher/test_soak.py::test_a_short_soak_as_it_is_run_by_hand -->

One without a comment is run as it is written, by tests/repo/test_guides.py. A comment that begins with
``not run:`` gives the reason.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from support import ROOT

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
GUIDES = ["README.md", "CONTRIBUTING.md", *PAGES]

CHUNK = re.compile(r"^```(\w*)\n(.*?)^```$|^<!-- (.*?) -->$|((?:^(?!```|<!--)[^\n]+\n?)+)", re.M | re.S)
INLINE = re.compile(r"`((?:\./zero|python3?|torchrun|mpirun|srun|\.venv/bin/\w+) [^`]+)`")
A_NAME = re.compile(r"\./zero \w+|.*(…|COMMAND|FOLDER|NAME).*")
"""What only names a command in a sentence: `./zero lab`, or one with a placeholder in it."""


class Example(NamedTuple):
    """A command (``sh``) or a program (``python``), and what the comment above it says."""

    guide: str
    language: str
    text: str
    comment: str

    def __str__(self) -> str:
        return f"{self.guide}: {self.text.splitlines()[0]}"


def text(guide: str) -> str:
    return (ROOT / guide).read_text("utf-8")


def section(guide: str, title: str) -> str:
    return text(guide).split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(guide: str, language: str) -> list[str]:
    """The fenced blocks of a guide in that language, without their fences."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text(guide), re.M | re.S)


def examples(guide: str, written: str) -> Iterator[Example]:
    """Every command and program in a guide."""
    comment = ""
    for language, block, said, paragraph in CHUNK.findall(written):
        if language in ("sh", "python"):
            yield Example(guide, language, block, comment)
        for command in INLINE.findall(paragraph.replace("\n", " ")):
            if not A_NAME.fullmatch(command):
                yield Example(guide, "sh", command, comment)
        comment = said

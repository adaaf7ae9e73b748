"""Promise: no lesson uses a word of the glossary before it is explained; each links the glossary."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from support import ROOT
from support.lessons import NAMES, SOURCES, source

GLOSSARY = ROOT / "docs/glossary.md"
# Words with an everyday meaning too, and symbols.
EVERYDAY = {"K", "M", "1", "2", "3", "Work", "numel", "slice", "reference", "unit", "ring", "Sharded"}


class Cell(NamedTuple):
    """A cell of prose: the lesson's file, and the text."""

    lesson: str
    text: str


def terms() -> list[str]:
    entries = re.findall(r"^(\S.*)\n:   ", GLOSSARY.read_text("utf-8"), re.MULTILINE)
    return [term for entry in entries for term in entry.split(", ") if term not in EVERYDAY]


def prose(scripts: Sequence[tuple[str, str]]) -> list[Cell]:
    """The markdown cells in order of reading, without titles, code, and the link to the next lesson."""
    cells = []
    for lesson, script in scripts:
        parts = re.split(r"^# %%(.*)\n", script, flags=re.MULTILINE)[1:]
        marked = [text for marks, text in zip(parts[::2], parts[1::2], strict=True) if "[markdown]" in marks]
        for text in marked:
            text = re.sub(
                r"^# # .*\n", "", text, flags=re.MULTILINE
            )  # a title names what the lesson explains
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
            cells.append(Cell(lesson, re.sub(r"```.*?```|\*\*Next:\*\*.*", "", text, flags=re.DOTALL)))
    return cells


def explained(text: str) -> str:
    """What stands in emphasis or as code, a few words each: so a cell marks the word that it explains."""
    code, prose_only = re.findall(r"`([^`]+)`", text), re.sub(r"`[^`]+`", "", text)
    marked = [*code, *re.findall(r"\*{1,2}([^*]+)\*{1,2}", prose_only)]
    return "\n".join(words for words in marked if len(words.split()) <= 4)


def used_too_early(words: Sequence[str], cells: Sequence[Cell]) -> list[str]:
    """The words whose first cell does not explain them."""
    early = []
    for word in words:
        pattern = rf"(?<![\w-]){re.escape(word)}(?:e?s)?(?![\w-])".replace(r"\ ", r"\s+")
        first = next((cell for cell in cells if re.search(pattern, cell.text, re.IGNORECASE)), None)
        if first and not re.search(pattern, explained(first.text), re.IGNORECASE):
            early.append(f"{first.lesson}: {word}")
    return early


def test_no_word_of_the_glossary_is_used_before_it_is_explained():
    scripts = [(path.stem, path.read_text("utf-8")) for path in sorted(SOURCES.glob("[0-9][0-9]_*.py"))]
    assert len(terms()) > 40 and used_too_early(terms(), prose(scripts)) == []


def test_a_word_that_is_used_too_early_is_found():
    """The test above can fail: used plainly first, and explained in the next cell or in the next lesson."""
    box, plain = "# %% [markdown]\n# # Parts\n", "# %% [markdown]\n# Each rank keeps a\n# shard.\n"
    explained = "# %% [markdown]\n# A *shard* is a part.\n"
    assert used_too_early(["shard"], prose([("00", box + plain), ("01", box + explained)])) == ["00: shard"]
    assert used_too_early(["shard"], prose([("00", box + explained + plain)])) == []
    first_box = box + "# > *You need:* a shard.\n"
    assert used_too_early(["shard"], prose([("00", first_box + explained)])) == ["00: shard"]


@pytest.mark.parametrize("name", NAMES)
def test_every_lesson_links_the_glossary_in_its_first_box(name):
    (path,) = re.findall(r"\[glossary\]\(([^)]+)\)", source(name).split("\n# %%")[0])
    assert (ROOT / "notebooks" / path).resolve() == GLOSSARY

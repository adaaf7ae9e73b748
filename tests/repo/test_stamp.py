"""Promise: one command gives the repository its address, in every place, and a forgotten place is found."""

import re
import subprocess
import sys
from pathlib import Path

import build
import nbformat
import pytest
import stamp
from support import ROOT

NEW_OWNER, NEW_NAME = "Some-Body", "zero.course"
NEW = f"{NEW_OWNER}/{NEW_NAME}"  # in two parts, so that this file is not stamped itself
OTHERS = {  # repositories that are not ours, as the files name them
    "actions", "astral-sh", "pre-commit", "python-jsonschema", "rhysd", "pytorch", "mybinder-org",
    "deepspeedai", "awslabs", "hiyouga", "nvidia", "kellerjordan",
}  # fmt: skip
ADDRESS = re.compile(
    r"(?:github\.com/|colab\.research\.google\.com/github/|mybinder\.org/v2/gh/)([\w.-]+)/[\w.-]+|([\w-]+)\.github\.io"
)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of every text file of this clone."""
    for path, _ in stamp.texts(ROOT):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    return tmp_path


def forgotten(root: Path, owner: str) -> list[str]:
    """Each line that still has the owner's name, or names a repository of nobody we know."""
    ours = stamp.repository_slug(root).split("/")[0].lower()
    found = []
    for path, text in stamp.texts(root):
        if path == root / "tests/repo/test_stamp.py":
            continue
        for line in text.splitlines():
            owners = {(a or b).lower() for a, b in ADDRESS.findall(line)} - OTHERS - {ours, "owner"}
            if re.search(rf"(?<![\w-]){re.escape(owner)}(?![\w-])", line, re.I) or owners:
                found.append(f"{path.relative_to(root)}: {line.strip()[:100]}")
    return found


def test_every_address_in_the_repository_is_its_own():
    assert forgotten(ROOT, "no such owner") == []


def test_stamping_leaves_no_place_out(clone: Path):
    owner = stamp.repository_slug(clone).split("/")[0]
    said = subprocess.run(
        [sys.executable, clone / "tools/stamp.py", NEW], capture_output=True, text=True, check=True
    ).stdout
    assert stamp.repository_slug(clone) == NEW
    assert forgotten(clone, owner) == []
    for file in ("README.md", "CITATION.cff", "pyproject.toml", "mkdocs.yml", "notebooks/00_ranks.ipynb"):
        assert file in said.splitlines() and NEW in (clone / file).read_text("utf-8"), file
    assert f"{NEW_OWNER.lower()}.github.io/{NEW_NAME}" in (clone / "mkdocs.yml").read_text("utf-8")


def test_stamped_notebooks_are_those_that_the_builder_makes(clone: Path):
    stamp.stamp(clone, NEW)
    for name in build.lesson_names():
        committed = nbformat.read(clone / f"notebooks/{name}.ipynb", as_version=4)
        made = build.notebook(name, NEW)
        assert [cell.source for cell in committed.cells] == [cell.source for cell in made.cells]
        assert [cell.id for cell in committed.cells] == [cell.id for cell in made.cells]


def test_stamping_back_gives_every_byte_back(clone: Path):
    before = {path: text for path, text in stamp.texts(clone)}
    old = stamp.repository_slug(clone)
    assert len(stamp.stamp(clone, NEW)) > 10
    stamp.stamp(clone, old)
    assert {path: text for path, text in stamp.texts(clone)} == before


def test_no_file_that_git_tracks_is_left_out():
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(done.stderr)
    pictures = {name for name in done.stdout.split("\0") if name.endswith(".png")}
    seen = {path.relative_to(ROOT).as_posix() for path, _ in stamp.texts(ROOT)}
    assert pictures and {name for name in done.stdout.split("\0") if name} - seen == pictures


@pytest.mark.long("a test of a program that is run by hand")
@pytest.mark.parametrize(
    "line",
    [
        "maintainer: @{owner}",  # the owner without the name
        "https://github.com/somebody-else/zerolab",  # an address that was never ours
        "https://mybinder.org/v2/gh/{owner}%2Fzerolab",  # one that the command cannot read
    ],
)
def test_a_place_that_is_forgotten_is_found(clone: Path, line: str):
    owner = stamp.repository_slug(clone).split("/")[0]
    (clone / "new.md").write_text(line.format(owner=owner))
    stamp.stamp(clone, NEW)
    assert [place.split(":")[0] for place in forgotten(clone, owner)] == ["new.md"]


def test_an_address_is_replaced_as_a_word_only():
    text = "git+https://github.com/a/b https://a.github.io/b/x a/b.git a/b-c aa/b torch/torch A/b"
    after = (
        "git+https://github.com/Me/my.c https://me.github.io/my.c/x Me/my.c.git a/b-c aa/b torch/torch A/b"
    )
    assert stamp.stamped(text, "a/b", "Me/my.c") == after


@pytest.mark.parametrize("slug", ["zerolab", "https://github.com/a/b", "a/b.git", "a/b/c", "-a/b", "a b/c"])
def test_what_is_no_address_is_refused(slug: str, capsys, monkeypatch):
    monkeypatch.setattr(stamp, "stamp", lambda *_: pytest.fail("files were changed"))
    with pytest.raises(SystemExit):
        stamp.main(["--", slug])
    assert f"{slug!r} is not OWNER/NAME" in capsys.readouterr().err


def test_the_slug_must_be_a_github_address(tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://example.com/x"\n')
    with pytest.raises(ValueError, match="OWNER/NAME"):
        stamp.repository_slug(tmp_path)

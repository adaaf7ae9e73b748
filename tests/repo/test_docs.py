"""Promise: the site builds without a warning, has every public name, and shows the course's own pictures."""

import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

import pictures
import pytest
from docs_hooks import LINK, outside_link
from support import ROOT, guides

import zerolab


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_has_every_page_and_public_name(site: Path):
    html = {path.relative_to(site).as_posix(): path.read_text("utf-8") for path in site.rglob("*.html")}
    for page in guides.PAGES:
        name = page.removeprefix("docs/").removesuffix(".md")
        assert ("index.html" if name == "index" else f"{name}/index.html") in html
    api = "".join(text for name, text in html.items() if name.startswith("api/"))
    for name in set(zerolab.__all__) - {"__version__"}:
        assert f'id="zerolab.{name}"' in api, name
    used = set(re.findall(r"\boptimizer\.(\w+)\(", "".join(map(guides.text, guides.PAGES))))
    for method in used:
        assert f'id="zerolab.ZeroOptimizer.{method}"' in api, method
    assert {"scale", "mean_loss", "full_params", "clip_grad_norm_"} <= used


def test_the_lessons_page_has_the_table_and_links_to_github(site: Path):
    page = (site / "lessons/index.html").read_text("utf-8")
    address = f"{repository()}/blob/main/notebooks/00_ranks.ipynb"
    assert f'<a href="{address}">00_ranks</a>' in page


def repository() -> str:
    return re.search(r"^repo_url: (\S+)", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)[1]


def test_every_public_name_is_on_an_api_page():
    pages = "\n".join(map(guides.text, guides.PAGES))
    documented = set(re.findall(r"^::: zerolab\.(\w+)", pages, re.M))
    assert documented == set(zerolab.__all__) - {"__version__"}


def test_every_page_is_in_the_navigation():
    named = re.findall(r"^ +- .*: ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    assert sorted(f"docs/{page}" for page in named) == guides.PAGES


def test_a_link_out_of_the_pages_must_lead_to_a_file():
    def link(text: str) -> str:
        return outside_link(LINK.search(text), PurePosixPath("docs/api"), "docs", "https://x/y/z")

    assert link("[a](../../zero)") == "[a](https://x/y/z/blob/main/zero)"
    assert link("![a](../../zerolab/ring.py)") == "![a](https://x/y/z/raw/main/zerolab/ring.py)"
    assert link("[a](../index.md#top)") == "[a](../index.md#top)"
    with pytest.raises(
        FileNotFoundError, match=r"docs/api links to \.\./\.\./gone\.py, which does not exist"
    ):
        link("[a](../../gone.py)")


@pytest.mark.parametrize("name", pictures.pictures())
def test_a_picture_is_the_one_that_its_source_gives(name: str):
    committed = (ROOT / "docs/images" / name).read_text("utf-8")
    assert committed == pictures.pictures()[name], "run python tools/pictures.py"
    svg = ElementTree.fromstring(committed)
    assert svg.get("aria-label") and name in guides.text("README.md")


def test_the_readme_is_two_screens():
    """Three sentences, two commands, a table whose rows are one line each, and ten lines of engine."""
    text = guides.text("README.md")
    assert len(text.splitlines()) <= 84
    about = next(part for part in text.split("\n\n") if part.startswith("zerolab is"))
    assert len(re.findall(r"[.!?](?=\s|$)", about)) == 3
    assert [block.split()[0] for block in guides.blocks("README.md", "sh")] == ["git", "./zero"]
    rows = re.findall(r"^\| \[.* \| (.*) \|$", text, re.M)
    assert len(rows) >= 9 and max(map(len, rows)) <= 72
    (engine,) = guides.blocks("README.md", "python")
    assert len([line for line in engine.splitlines() if line]) <= 10

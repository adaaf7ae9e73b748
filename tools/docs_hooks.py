"""Hooks of mkdocs: links from a page to a file of the repository work on GitHub and on the site.

A page links to ``../notebooks/00_ranks.ipynb`` as a reader of GitHub needs it. The site has pages alone, so
such a link becomes one to the file on GitHub; an image becomes its contents there.
"""

import re
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\.[^)#]*)(#[^)]*)?\)")
SECTION = re.compile(r"<!-- README: (.+) -->")


def on_page_markdown(markdown: str, page, config, **_) -> str:
    """Put in the sections of the README that a page asks for, and point links out of docs/ to GitHub."""
    docs = Path(config.docs_dir).relative_to(ROOT).as_posix()
    folder = PurePosixPath(docs, page.file.src_uri).parent
    up = "../" * len(folder.parts)
    markdown = SECTION.sub(lambda match: readme_section(match[1], up), markdown)
    return LINK.sub(lambda match: outside_link(match, folder, docs, config.repo_url), markdown)


def readme_section(title: str, up: str) -> str:
    """A section of the README without its heading; ``up`` is the page's way to the root of the repository."""
    readme = (ROOT / "README.md").read_text("utf-8")
    return re.sub(r"\]\((?=\w+/)", f"]({up}", readme.split(f"\n## {title}\n")[1].split("\n## ")[0])


def outside_link(match: re.Match, folder: PurePosixPath, docs: str, repository: str) -> str:
    """The link as it is inside docs/, and to the file on GitHub outside.

    Raises: FileNotFoundError for a link to nothing.
    """
    image, text, target, anchor = match.groups(default="")
    path = (ROOT / folder / target).resolve()
    if path.is_relative_to(ROOT / docs):
        return match[0]
    if not path.exists():
        raise FileNotFoundError(f"{folder} links to {target}, which does not exist")
    kind = "raw" if image else "blob"
    address = f"{repository.rstrip('/')}/{kind}/main/{path.relative_to(ROOT).as_posix()}"
    return f"{image}[{text}]({address}{anchor})"

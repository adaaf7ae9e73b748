"""Give the repository its address: replace OWNER/NAME in every file that names it.

    python3 tools/stamp.py OWNER/NAME

The address is read from one place, ``[project.urls] Repository`` in pyproject.toml. What names it elsewhere
(badges, install lines, the notebooks, the site, CITATION.cff, the workflows) is found by the text itself:
OWNER/NAME as a word, and OWNER.github.io/NAME. It needs nothing but Python.
"""

import argparse
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLUG = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?/[\w.-]+?"


def repository_slug(root: Path = ROOT) -> str:
    """OWNER/NAME, from the one place that has it.

    Raises: ValueError if pyproject.toml's Repository is not a GitHub address.
    """
    url = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
    match = re.fullmatch(rf"https://github\.com/({SLUG})(?:\.git)?/?", url)
    if not match:
        raise ValueError(f"[project.urls] Repository is {url!r}; write https://github.com/OWNER/NAME")
    return match[1]


def texts(root: Path) -> Iterator[tuple[Path, str]]:
    """Every text file of the clone, outside of the folders that .gitignore names."""
    ignored = [".git", *(line.rstrip("/") for line in (root / ".gitignore").read_text("utf-8").split())]

    def kept(names: list[str]) -> list[str]:
        return sorted(name for name in names if not any(fnmatch(name, pattern) for pattern in ignored))

    for folder, folders, names in os.walk(root):
        folders[:] = kept(folders)
        for path in (Path(folder, name) for name in kept(names)):
            try:
                yield path, path.read_bytes().decode("utf-8")
            except (UnicodeDecodeError, FileNotFoundError):
                continue  # a picture, or a link to nothing


def stamped(text: str, old: str, new: str) -> str:
    """The text with the address `new` wherever it had `old`."""
    (owner, name), (new_owner, new_name) = old.split("/"), new.split("/")
    text = re.sub(rf"(?<![\w.-]){re.escape(old)}(?![\w-])", new, text)
    pages = rf"(?<![\w.-]){re.escape(owner.lower())}\.github\.io/{re.escape(name)}(?![\w-])"
    return re.sub(pages, f"{new_owner.lower()}.github.io/{new_name}", text)


def stamp(root: Path, new: str) -> list[Path]:
    """Write the new address into every file that has the old one; the files that changed."""
    old, changed = repository_slug(root), []
    for path, text in texts(root):
        replaced = stamped(text, old, new)
        if replaced != text:
            path.write_bytes(replaced.encode("utf-8"))
            changed.append(path)
    return changed


def main(argv: list[str] | None = None) -> int:
    """Stamp this clone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("slug", metavar="OWNER/NAME", help="of the repository on GitHub")
    slug = parser.parse_args(argv).slug
    if not re.fullmatch(SLUG, slug) or slug.endswith(".git"):
        parser.error(f"{slug!r} is not OWNER/NAME, as in octocat/zerolab")
    for path in stamp(ROOT, slug):
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())

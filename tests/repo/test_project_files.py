"""Promise: workflows, templates and citation are sound files, and agree with pyproject and the pins."""

import itertools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from support import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted(path.name for path in (GITHUB / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def read(path: str) -> dict:
    return yaml.safe_load((ROOT / path).read_text("utf-8"))


def steps(workflow: str) -> list[dict]:
    jobs = read(f".github/workflows/{workflow}")["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def pinned(package: str) -> str:
    (version,) = re.findall(rf"^{package}==(\S+)$", (ROOT / "requirements.txt").read_text("utf-8"), re.M)
    return version


def test_there_is_a_workflow_for_style_tests_notebooks_and_docs():
    assert WORKFLOWS == ["docs.yml", "notebooks.yml", "style.yml", "tests.yml"]


SCHEMAS = {
    "github-workflows": "workflows/*.yml",
    "github-issue-forms": "ISSUE_TEMPLATE/[!c]*.yml",
    "github-issue-config": "ISSUE_TEMPLATE/config.yml",
    "dependabot": "dependabot.yml",
    "citation-file-format": "../CITATION.cff",
}
"""The schema of each kind of file, and the files, from `.github`."""


def fit(schema: str, files: Iterable[Path]) -> subprocess.CompletedProcess:
    """Whether files fit a schema that check-jsonschema brings along; it needs no network for that."""
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_file_fits_its_schema(schema: str):
    files = sorted(GITHUB.glob(SCHEMAS[schema]))
    assert files
    checked = fit(schema, files)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("runs-on: ubuntu-24.04", "run-on: ubuntu-24.04", "run-on"),
        ("timeout-minutes: 10", "timeout-minutes: soon", "soon"),
        ("permissions: {contents: read}", "permissions: {contents: all}", "all"),
        ("    steps:", "    step:", "step"),
    ],
)
def test_a_workflow_with_a_mistake_does_not_fit(right: str, wrong: str, says: str, tmp_path: Path):
    text = (GITHUB / "workflows/style.yml").read_text("utf-8")
    assert right in text
    (tmp_path / "style.yml").write_text(text.replace(right, wrong))
    checked = fit("github-workflows", [tmp_path / "style.yml"])
    assert checked.returncode == 1 and says in checked.stdout


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_only_read_and_ends(name: str):
    """Every job has a deadline, every action a version, and writing is granted where a job publishes."""
    workflow = read(f".github/workflows/{name}")
    assert workflow["permissions"] == {"contents": "read"}
    assert {"push", "pull_request"} == workflow[True].keys()  # YAML reads the key `on` as true
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        assert "permissions" not in job or "if" in job
    for step in steps(name):
        assert "run" in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])


def test_every_python_meets_every_torch_that_pyproject_takes():
    matrix = read(".github/workflows/tests.yml")["jobs"]["tests"]["strategy"]["matrix"]
    (torch,) = (Requirement(line) for line in PROJECT["dependencies"] if line.startswith("torch"))
    versions = [text.replace("*", "0") for text in matrix["torch"]]
    assert [version in torch.specifier for version in versions] == [True] * 3
    minors = [int(version.split(".")[1]) for version in versions]
    assert minors == list(range(minors[0], minors[-1] + 1))
    for outside in (minors[0] - 1, minors[-1] + 1):
        assert f"2.{outside}.0" not in torch.specifier, "the matrix leaves out a torch"
    assert pinned("torch") in versions
    pythons = SpecifierSet(PROJECT["requires-python"])
    assert all(python in pythons for python in matrix["python"]) and "3.10" not in pythons
    assert matrix["python"] == re.findall(r"\b(3\.1\d) *[|)]", (ROOT / "zero").read_text("utf-8"))[:3]


def test_a_workflow_uses_every_lesson_in_a_browser():
    (step,) = [step for step in steps("notebooks.yml") if "test_browser.py" in step.get("run", "")]
    assert step["env"] == {"ZEROLAB_ALL_LESSONS": 1}
    tests = (ROOT / "tests/course/test_browser.py").read_text("utf-8")
    assert "ZEROLAB_ALL_LESSONS" in tests
    asked = read(".github/workflows/notebooks.yml")["jobs"]["browser"]["strategy"]["matrix"]["look"]
    assert asked == re.findall(r'^    "([\w-]+)": \("JupyterLab (?:Light|Dark)"', tests, re.MULTILINE)


def test_files_that_a_workflow_names_are_there():
    for workflow in WORKFLOWS:
        for step in steps(workflow):
            named = re.findall(r"(?<![\w./-])(?:tests|notebooks|binder|tools)/?[\w./]*", step.get("run", ""))
            assert [name for name in named if not (ROOT / name).exists()] == []


def test_issue_forms_ask_for_something():
    """GitHub shows a form only with these keys, and with ids that differ."""
    forms = [path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert len(forms) == 3
    for path in forms:
        form = yaml.safe_load(path.read_text("utf-8"))
        assert form.keys() == {"name", "description", "labels", "body"}
        assert len({field["id"] for field in form["body"]}) == len(form["body"])
        assert all(field["attributes"]["label"] for field in form["body"])
    assert "./zero test" in (GITHUB / "pull_request_template.md").read_text("utf-8")


def test_the_hooks_before_a_commit_have_the_pinned_ruff():
    (hooks,) = read(".pre-commit-config.yaml")["repos"]
    assert hooks["rev"] == f"v{pinned('ruff')}"


def test_dependabot_watches_what_is_there():
    watched = {update["package-ecosystem"] for update in read(".github/dependabot.yml")["updates"]}
    assert watched == {"github-actions", "pip"}


def test_the_container_sets_up_by_a_command_of_the_guide():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text("utf-8"))
    assert container["postCreateCommand"].startswith("./zero verify")
    assert container["containerEnv"] == {"ZEROLAB_TORCH": "cpu"}


def test_the_citation_names_this_version_and_the_paper():
    citation = read("CITATION.cff")
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
    (paper,) = citation["references"]
    assert paper["identifiers"][0]["value"] == "arXiv:1910.02054" and len(paper["authors"]) == 4


def test_the_changelog_begins_with_this_version():
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert headings[0] == PROJECT["version"] and len(set(headings)) == len(headings)


def test_no_page_has_a_placeholder_address():
    guides = itertools.chain(ROOT.glob("*.md"), (ROOT / "docs").rglob("*.md"))
    for path in guides:
        assert (
            re.findall(r"[\w.]+@[\w-]+\.\w+|TODO|FIXME|example\.(?:com|org)", path.read_text("utf-8")) == []
        )


def test_a_job_runs_the_tests_that_skip_without_a_framework():
    files = sorted((ROOT / "tests/commands").glob("*.py"))
    skipping = {
        path.relative_to(ROOT).as_posix(): set(
            re.findall(r'importorskip\("(\w+)"\)', path.read_text("utf-8"))
        )
        for path in files
    }
    pins = (ROOT / "examples/requirements.txt").read_text("utf-8")
    pinned_frameworks = {name.replace("-", "_") for name in re.findall(r"^([\w-]+)==", pins, re.M)}
    needing = {
        path: names & pinned_frameworks for path, names in skipping.items() if names & pinned_frameworks
    }
    assert set().union(*needing.values()) == pinned_frameworks
    (job,) = (step["run"] for step in steps("tests.yml") if "test_frameworks" in step.get("run", ""))
    assert needing.keys() <= set(job.split())

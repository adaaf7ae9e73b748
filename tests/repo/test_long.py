"""Promise: a test that ./zero test leaves out says why, and a workflow runs it on every push."""

import ast

import yaml
from support import ROOT


def reasons() -> dict[str, str]:
    """The source of what the mark ``long`` is given, by the place where it stands."""
    found = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.long":
                found.setdefault(place, "")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.long":
                found[place] = ", ".join(map(ast.unparse, node.args))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "long_where":
                found[place] = ast.unparse(node.args[1]) if len(node.args) == 3 else ""
    return found


def test_every_long_test_gives_its_reason():
    found = reasons()
    assert len(found) > 5 and [place for place, reason in found.items() if reason.strip("'\"") == ""] == []


def test_a_workflow_runs_the_long_tests_too():
    steps = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text("utf-8"))["jobs"]["tests"][
        "steps"
    ]
    (command,) = (step["run"] for step in steps if "pytest" in step.get("run", ""))
    assert "pytest tests " in command and "-m not" not in command and "not long" not in command

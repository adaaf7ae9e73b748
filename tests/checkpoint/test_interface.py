"""Promise: checkpoints see the optimizer from outside, so neither's insides can break the other."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import zerolab

PACKAGE = Path(zerolab.__file__).parent / "checkpoint"
INSIDES = {"engine", "local", "stage", "units", "slices"}


def uses_of_insides(source: str) -> Iterator[str]:
    """Attributes of the optimizer that are not for others, and imports of the modules behind it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in INSIDES:
            yield ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("zerolab.optimizer."):
            yield ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and any(name.name == "FlatUnit" for name in node.names):
            yield ast.unparse(node)


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_checkpoints_use_the_optimizers_interface(path: Path):
    assert list(uses_of_insides(path.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    [
        "optimizer.engine.gatherer.reshard([])",
        "for unit in optimizer.units: pass",
        "from zerolab.unit import FlatUnit",
        "from zerolab.optimizer.local import LocalUpdate",
    ],
)
def test_a_use_of_insides_is_seen(line: str):
    assert list(uses_of_insides(line))

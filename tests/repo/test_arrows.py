"""Promise: imports run down the house only, and a stage is looked up in one place.

A reader can therefore open the modules in the order of this table and never meet a name from below.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import zerolab

PACKAGE = Path(zerolab.__file__).parent

# layer: (its modules, the layers whose modules they may import)
HOUSE = {
    "times": ("device_times", ""),
    "events": ("events", "times"),
    "timeline": ("timeline", "times events"),
    "checks": ("checks", ""),
    "ground": ("memory cost presets paper trace", "checks times events timeline"),
    "residual": ("residual step_time", "checks ground"),
    "warnings": ("warn", ""),
    "tensors": ("precision storages devices tier", "warnings"),
    "arena": ("arena", "arena"),
    "exit": ("before_exit", ""),
    "wire": ("ring collectives", "checks times ground tensors wire"),
    "unit": ("unit measure", "ground tensors wire unit"),
    "base": ("stages stages.base", "wire unit"),
    "stages": ("stages.stage0 stages.stage1 stages.stage2 stages.stage3 stages.hybrid", "wire unit base"),
    "engine": ("engine", "exit ground tensors wire unit base engine"),
    "launch": ("launcher", "exit launch"),
    "material": ("models data", ""),
    "parallel": ("tensor_parallel checkpointing", "ground tensors wire material parallel"),
    "optimizer": ("optimizer", "warnings ground tensors wire unit base stages engine parallel optimizer"),
    "checkpoint": ("checkpoint", "warnings tensors wire optimizer checkpoint"),
    "programs": (
        "parity rehearsal simulation bench doctor progress flags train",
        "checks events timeline ground tensors wire unit base engine launch parallel optimizer checkpoint "
        "material programs",
    ),
    "plan": ("plan", "ground residual material parallel programs plan"),
    # on first use
    "face": (
        "zerolab __main__",
        "tensors arena ground residual launch parallel optimizer checkpoint programs face",
    ),
}
COURSE = "course"  # may import everything; nobody imports it
CALCULATORS = {"memory", "cost", "plan"}  # their formulas are by stage


def module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or package.name


def modules(package: Path) -> dict[str, ast.Module]:
    paths = package.rglob("*.py")
    return {module_name(path, package): ast.parse(path.read_text("utf-8"), str(path)) for path in paths}


def in_course(module: str) -> bool:
    return module == COURSE or module.startswith(COURSE + ".")


def imports(module: str, tree: ast.Module, known: set[str], package: str) -> Iterator[tuple[int, str]]:
    """Line and target of every import of ours, inside functions too; a.b for ``from a import b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively; write it out"
            inner = [f"{node.module}.{name.name}" for name in node.names]
            found = [full if full.removeprefix(f"{package}.") in known else node.module for full in inner]
        else:
            continue
        for full in found:
            if full == package or full.startswith(package + "."):
                yield node.lineno, full.removeprefix(f"{package}.")


def layer_of(module: str) -> str | None:
    """A package other than stages/ lies in one layer, with all that is in it."""
    place = module if module.startswith("stages.") else module.split(".")[0]
    return next((layer for layer, (members, _) in HOUSE.items() if place in members.split()), None)


def broken_arrows(package: Path) -> list[str]:
    """Each import that runs up the house, and each module that has no place in it."""
    trees, broken = modules(package), []
    for module, tree in sorted(trees.items()):
        if in_course(module):
            continue
        layer = layer_of(module)
        if layer is None:
            broken.append(f"{module}: place it in a layer of the house (tests/repo/test_arrows.py)")
            continue
        for line, target in dict.fromkeys(imports(module, tree, set(trees), package.name)):
            if target != module and layer_of(target) not in HOUSE[layer][1].split():
                broken.append(f"{module}:{line} ({layer}) imports {target} ({layer_of(target) or COURSE})")
    return broken


def names_a_stage(node: ast.expr) -> bool:
    """``stage``, ``x.stage``, ``config.zero_stage``."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name == "stage" or name.endswith("_stage")


def stage_reads(tree: ast.Module) -> Iterator[int]:
    """Lines that decide by a stage: compared, computed with, tested for truth, matched, or used as a key."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare():
                asked = [node.left, *node.comparators]
            case ast.BinOp():
                asked = [node.left, node.right]
            case ast.BoolOp():
                asked = node.values
            case ast.If() | ast.IfExp() | ast.While() | ast.Assert():
                asked = [node.test]
            case ast.UnaryOp(op=ast.Not()):
                asked = [node.operand]
            case ast.Match():
                asked = [node.subject]
            case ast.Subscript():
                asked = [node.slice]
            case ast.Call(func=ast.Name(id="isinstance" | "type")):
                asked = node.args[:1]
            case _:
                continue
        if any(names_a_stage(one) for one in asked):
            yield node.lineno


def stage_flags(trees: dict[str, ast.Module]) -> set[str]:
    """Constants on the stage classes (``shards_grads = True``): switches, if anybody outside read them."""
    flags = set()
    for module, tree in trees.items():
        for node in (
            n for n in ast.walk(tree) if module.startswith("stages") and isinstance(n, ast.ClassDef)
        ):
            for statement in node.body:
                targets = getattr(statement, "targets", [getattr(statement, "target", None)])
                if isinstance(getattr(statement, "value", None), ast.Constant):
                    flags |= {target.id for target in targets if isinstance(target, ast.Name)}
    return flags


def stage_switches(package: Path) -> list[str]:
    """Each place outside stages/ that tells one stage from another."""
    trees = modules(package)
    flags, found = stage_flags(trees), []
    for module, tree in sorted(trees.items()):
        if module.startswith("stages") or in_course(module) or module.split(".")[0] in CALCULATORS:
            continue
        lines = set(stage_reads(tree))
        lines |= {n.lineno for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in flags}
        found += [f"{module}:{line} decides by a stage" for line in sorted(lines)]
    return found


def circles(package: Path) -> list[list[str]]:
    """Each chain of modules that imports its own beginning, imports inside functions included."""
    trees = modules(package)
    targets = {
        module: {to for _, to in imports(module, tree, set(trees), package.name)}
        for module, tree in trees.items()
    }
    found: list[list[str]] = []
    done: set[str] = set()

    def follow(module: str, chain: list[str]) -> None:
        if module in chain:
            found.append([*chain[chain.index(module) :], module])
        elif module not in done:
            for target in sorted(targets.get(module, ())):
                follow(target, [*chain, module])
            done.add(module)

    for module in sorted(targets):
        follow(module, [])
    return found


def test_imports_run_down_the_house():
    assert broken_arrows(PACKAGE) == []


def test_no_module_imports_itself_by_way_of_others():
    assert circles(PACKAGE) == []


def test_no_stage_is_told_apart_outside_the_stages():
    assert stage_switches(PACKAGE) == []


def test_a_stage_is_looked_up_once():
    """``STAGES`` turns a number into a class; elsewhere it only says which numbers there are."""
    names = [node for node in ast.walk(modules(PACKAGE)["optimizer.optimizer"]) if isinstance(node, ast.Name)]
    assert [type(node.ctx) for node in names if node.id == "STAGES"] == [ast.Store, ast.Load]


def test_no_module_bears_the_name_of_a_function_of_the_face():
    functions = set(zerolab.__all__) - set(zerolab._MODULES)
    assert functions & {path.stem for path in PACKAGE.glob("*.py")} == set()


def test_every_module_of_the_face_exists():
    assert {*zerolab._MODULE_OF.values(), *zerolab._MODULES} - modules(PACKAGE).keys() == set()


def small_house(folder: Path, files: dict[str, str]) -> Path:
    """A sound little package in ``folder``, with the given files on top."""
    sound = {
        "__init__.py": "",
        "stages/__init__.py": "",
        "stages/base.py": "from zerolab.unit import FlatUnit",
        "stages/stage0.py": "from zerolab.stages.base import Stage\nclass A(Stage):\n  shards_grads = False",
        "cost.py": "",
        "unit.py": "from zerolab import trace",
        "trace.py": "",
        "engine.py": "run(stage)\nself.stage.update()",
        "course/__init__.py": "import zerolab.engine",
    }
    for path, source in (sound | files).items():
        (folder / "zerolab" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "zerolab" / path).write_text(source, "utf-8")
    return folder / "zerolab"


def test_a_sound_house_passes(tmp_path: Path):
    package = small_house(tmp_path, {})
    assert broken_arrows(package) == stage_switches(package) == circles(package) == []


@pytest.mark.parametrize(
    "file, source, complaint",
    [
        ("memory.py", "import zerolab.cost", "memory:1 (ground) imports cost (ground)"),
        ("trace.py", "from zerolab import unit", "trace:1 (ground) imports unit (unit)"),
        ("unit.py", "def f():\n    import zerolab.engine", "unit:2 (unit) imports engine (engine)"),
        (
            "stages/stage1.py",
            "import zerolab.stages.stage0",
            "stages.stage1:1 (stages) imports stages.stage0 (stages)",
        ),
        (
            "engine.py",
            "from zerolab.stages import stage0",
            "engine:1 (engine) imports stages.stage0 (stages)",
        ),
        (
            "train.py",
            "from zerolab.stages.stage0 import A",
            "train:1 (programs) imports stages.stage0 (stages)",
        ),
        ("train.py", "import zerolab.course", "train:1 (programs) imports course (course)"),
        ("helpers.py", "", "helpers: place it in a layer of the house (tests/repo/test_arrows.py)"),
    ],
)
def test_a_broken_arrow_is_seen(tmp_path: Path, file: str, source: str, complaint: str):
    assert broken_arrows(small_house(tmp_path, {file: source})) == [complaint]


@pytest.mark.parametrize(
    "files, circle",
    [
        ({"trace.py": "from zerolab import unit"}, "unit trace unit"),
        ({"trace.py": "def f():\n    import zerolab.unit"}, "unit trace unit"),
        ({"a/__init__.py": "import zerolab.a.b", "a/b.py": "from zerolab.a import c"}, "a a.b a"),
        ({"a.py": "import zerolab.b", "b.py": "import zerolab.c", "c.py": "import zerolab.a"}, "a b c a"),
    ],
)
def test_a_circle_is_seen(tmp_path: Path, files: dict[str, str], circle: str):
    assert circles(small_house(tmp_path, files)) == [circle.split()]


@pytest.mark.parametrize(
    "line",
    [
        "x = 1 if self.stage == 3 else 2",
        "if stage in (2, 3): pass",
        "if config.zero_stage: pass",
        "x = TABLE[stage]",
        "x = stage + 1",
        "isinstance(self.stage, str)",
        "x = self.stage.shards_grads",
    ],
)
def test_a_stage_switch_is_seen(tmp_path: Path, line: str):
    assert stage_switches(small_house(tmp_path, {"engine.py": line})) == ["engine:1 decides by a stage"]

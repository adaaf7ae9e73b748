"""Break the engine on purpose, in many places: python tests/mutants.py --count 60 --seed 0

Each mutant is one change in a private copy of the tree: another operator, a condition turned round, a number
one off, or a statement left out. Then the tests that can see that package run, without the long ones, until
one fails and fails again: a test may fail by itself on a busy machine. Tests that saw earlier mutants of the
same run go first, then the files that name most of the broken module. A mutant that none fails for has
survived: either a test is missing, or the change is no fault. The exit code is 1 if any survived. With
--since, only lines are broken that are new since a commit.

Which tests call which function is in the file of --recorded. The first run writes it, which takes as long as
all these tests. Then only the tests that call the broken function run, the quickest first, and the files
where tests share the run that calls it: no other test can see the change.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from support import ROOT, reached

TIMEOUT_SECONDS = 480  # for one group of a mutant's tests; a test that hangs fails by pytest's own limit
NO_TESTS = 5  # the exit code of pytest where none is to be run
EVERYWHERE = (  # the quickest first
    "promises/test_traffic.py",
    "promises/test_accumulation.py",
    "promises/test_memory.py",
    "engine/test_full_params.py",
    "promises/test_parity.py",
    "promises/test_peaks.py",
    "promises/test_hybrid.py",
    "promises/test_reduction_order.py",
    "promises/test_drawn_loops.py",
)
TESTS = {
    "stages": ("promises", "engine/test_drawn_models.py"),
    "unit": ("engine", "optimizer/test_precision.py"),
    "engine": ("engine",),
    "optimizer": (
        "optimizer",
        "whole_parameters",
        "offload",
        "tensor_parallel",
        "checkpoint/test_checkpoint.py",
        "engine/test_models_as_they_come.py",
    ),
    "collectives": ("collectives", "engine/test_diverging_ranks.py", "engine/test_trace.py"),
    "checkpoint": ("checkpoint",),
    "tensor_parallel": ("tensor_parallel", "activation_checkpointing"),
    "checkpointing": ("activation_checkpointing",),
    "tier.py": ("offload",),
    "arena": ("promises/test_arena.py",),
    "residual.py": ("promises/test_residual.py", "promises/test_paper.py", "commands/test_plan_residual.py"),
    "step_time.py": ("promises/test_residual.py", "promises/test_paper.py", "commands/test_plan_residual.py"),
    "memory.py": (
        "promises/test_accounting.py",
        "promises/test_formula_properties.py",
        "commands/test_plan.py",
    ),
    "cost.py": (
        "promises/test_accounting.py",
        "promises/test_formula_properties.py",
        "commands/test_plan.py",
    ),
    "plan": ("commands/test_plan.py", "commands/test_plan_residual.py", "promises/test_accounting.py"),
    "rehearsal.py": ("promises/test_rehearsal.py", "promises/test_rehearsed_axes.py"),
}
"""By package or module: the tests that can see it."""
SEEN_EVERYWHERE = ("stages", "unit", "engine", "optimizer", "collectives")
"""Those for which the tests in `EVERYWHERE` run after these."""

QUICKEST = 12
"""So many of the tests that saw most mutants go first."""
FIRST_CALLING = 40
"""And so many of those that call the broken function: pytest takes long to begin where tests are many."""

ON_GPUS = ("native.py", "producers.py")  # their work is seen on GPUs only

OTHERS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "//",
    ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.BitOr: "&", ast.BitAnd: "|",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A change of the source between two places, where it says ``before``. ``line``: from 1."""

    path: Path
    line: int
    start: int
    stop: int
    text: str
    before: str

    @property
    def package(self) -> str:
        return self.path.parts[1]

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.stop :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before!r} -> {self.text!r}"


def modules_of(package: str) -> list[Path]:
    place = ROOT / "zerolab" / package
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All changes of one module. What only makes an error's text is left alone."""
    source = (ROOT / path).read_text("utf-8")
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()
    offset = lambda line, column: len(raw[: starts[line - 1] + column].decode())
    for node in walk(ast.parse(source)):
        for first, last, text in changes(node, source, offset):
            yield Mutant(path, node.lineno, first, last, text, source[first:last])


def walk(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        is_text = isinstance(child, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom))
        is_text |= isinstance(child, ast.keyword) and child.arg == "strict"  # of zip: it only guards
        if not is_text and not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
            yield child
            yield from walk(child)


def changes(node: ast.AST, source: str, offset) -> Iterator[tuple[int, int, str]]:
    """What can be changed at one node: from where, to where, and into what."""
    begin = lambda each: offset(each.lineno, each.col_offset)
    end = lambda each: offset(each.end_lineno, each.end_col_offset)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OTHERS:
        if not set("()") & set(source[end(node.left) : begin(node.comparators[0])]):
            yield end(node.left), begin(node.comparators[0]), f" {OTHERS[type(node.ops[0])]} "
    elif isinstance(node, ast.BinOp) and type(node.op) in OTHERS and not annotates(node):
        between = source[end(node.left) : begin(node.right)]
        if not set("()") & set(between):
            yield end(node.left), begin(node.right), f" {OTHERS[type(node.op)]} "
    elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
        between = source[end(node.values[0]) : begin(node.values[1])]
        if between.strip() in ("and", "or"):
            yield end(node.values[0]), begin(node.values[1]), f" {OTHERS[type(node.op)]} "
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield begin(node), end(node), f"bool({source[begin(node.operand) : end(node.operand)]})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        yield begin(node), end(node), repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, (ast.If, ast.While)):
        yield begin(node.test), end(node.test), f"not ({source[begin(node.test) : end(node.test)]})"
    elif isinstance(node, (ast.Expr, ast.AugAssign)):
        yield begin(node), end(node), "pass"


def annotates(node: ast.BinOp) -> bool:
    """Whether it is `Tensor | None` and the like."""
    return isinstance(node.op, ast.BitOr) and isinstance(node.right, (ast.Name, ast.Constant, ast.Attribute))


def lines_since(commit: str, root: Path = ROOT) -> set[tuple[Path, int]]:
    """The lines of the package that were added or changed since a commit."""
    command = ["git", "diff", "--unified=0", "--no-prefix", "--no-renames", commit, "--", "zerolab"]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    path, found = Path(), set()
    for line in said.splitlines():
        if line.startswith("+++ "):
            path = Path(line.removeprefix("+++ "))
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            found |= {(path, number) for number in range(first, first + count)}
    return found


def chosen(
    count: int, seed: int, packages: list[str], new: set[tuple[Path, int]] | None = None
) -> list[Mutant]:
    """So many mutants, spread evenly over the packages. ``new``: the only lines where they may be."""
    chance, found = random.Random(seed), []
    by_package = {}
    for package in packages:
        paths = [path.relative_to(ROOT) for path in modules_of(package) if path.name not in ON_GPUS]
        every = [mutant for path in paths for mutant in mutants_of(path)]
        every = [mutant for mutant in every if new is None or (mutant.path, mutant.line) in new]
        by_package[package] = chance.sample(every, len(every))
    while len(found) < count and any(by_package.values()):
        found += [waiting.pop() for waiting in by_package.values() if waiting]
    return found[:count]


@contextmanager
def applied(mutant: Mutant, tree: Path) -> Iterator[None]:
    target = tree / mutant.path
    source = target.read_text("utf-8")
    target.write_text(mutant.apply(source))
    try:
        yield
    finally:
        target.write_text(source)


def survives(mutant: Mutant, tree: Path, groups: list[list[str]]) -> tuple[bool, str]:
    """Whether no test fails with it, and what the first that did was, or why not all have run.

    Args: groups: of tests, which run one group after the other.
    """
    not_all = ""
    with applied(mutant, tree):
        for tests in filter(None, groups):
            try:
                if said := failure(tree, tests):
                    return False, said
            except Undecided as error:
                not_all = str(error)
    return True, not_all


def groups_of(mutant: Mutant, recorded: dict[str, dict], killers: list[str]) -> list[list[str]]:
    """The tests that can see it, after those that saw most others.

    Where it is recorded, they are the tests that call the broken function, and the files where tests share a
    run: only the first of them is recorded as its caller. A line outside of functions runs at the import.
    """
    span = function_of(mutant)
    calling = reached.tests_of(recorded, *span) if span else []
    if not calling:
        return [killers, *tests_by_package(mutant)]
    first = list(dict.fromkeys([*killers, *calling[:FIRST_CALLING]]))
    files = sorted({test.partition("::")[0] for test in calling})
    return [first, calling[FIRST_CALLING:], [file for file in files if shares_a_run(ROOT / file)]]


def shares_a_run(file: Path) -> bool:
    """Whether a test of this file may read what another one ran."""
    return bool(re.search(r"@(functools\.)?(lru_)?cache|@pytest\.fixture\(.*scope=", file.read_text("utf-8")))


def tests_by_package(mutant: Mutant) -> list[list[str]]:
    """The tests that can see its package, and those that can see most of the engine."""
    own = nearest_first(mutant)
    seen = mutant.package in SEEN_EVERYWHERE
    return [own, [f"tests/{each}" for each in EVERYWHERE if seen and f"tests/{each}" not in own]]


def nearest_first(mutant: Mutant) -> list[str]:
    """The files of tests that can see its package. First come those that name most of what its module has.

    A name counts less where other files have it too.
    """
    nodes = ast.walk(ast.parse((ROOT / mutant.path).read_text("utf-8")))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {*mutant.path.with_suffix("").parts}
    places = [ROOT / "tests" / each for each in TESTS[mutant.package]]
    files = [file for place in places for file in (sorted(place.rglob("test_*.py")) or [place])]
    named = {file: names & set(re.findall(r"\w+", file.read_text("utf-8"))) for file in files}
    files_with = Counter(name for each in named.values() for name in each)
    weight = lambda file: sum(1 / files_with[name] for name in named[file])
    return [str(file.relative_to(ROOT)) for file in sorted(files, key=weight, reverse=True)]


class Run:
    """Mutants, several at once. Each worker has a copy of the tree."""

    def __init__(self, folder: Path, jobs: int, recorded: dict[str, dict]):
        self.recorded = recorded
        self.trees: SimpleQueue[Path] = SimpleQueue()
        self.killers: Counter[str] = Counter()
        """By test: how many mutants it saw."""
        for job in range(jobs):
            ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__")
            shutil.copytree(ROOT, tree := folder / f"tree_{job}", ignore=ignored)
            self.trees.put(tree)

    def alive(self, mutant: Mutant) -> bool:
        """Try one mutant and print what came of it."""
        tree = self.trees.get()
        killers = [test for test, _ in self.killers.most_common(QUICKEST)]
        try:
            alive, said = survives(mutant, tree, groups_of(mutant, self.recorded, killers))
        finally:
            self.trees.put(tree)
        if "::" in (name := name_of(said)):
            self.killers[name] += 1
        print(f"{'SURVIVED' if alive else 'killed':<9}{mutant}\n         {said[:150]}", flush=True)
        return alive


def function_of(mutant: Mutant) -> tuple[str, int, int] | None:
    """The module in zerolab, and the lines of the innermost function with the mutant: first, last."""
    nodes = ast.walk(ast.parse((ROOT / mutant.path).read_text("utf-8")))
    spans = [
        (min([node.lineno, *(each.lineno for each in node.decorator_list)]), node.end_lineno)
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.lineno <= mutant.line <= node.end_lineno
    ]
    return ("/".join(mutant.path.parts[1:]), *max(spans)) if spans else None


def name_of(failed: str) -> str:
    """Return the test's name in pytest's line about it. Parameters may have the dash that ends the name."""
    found = re.match(r"\w+ ([^\[]*?(?:\[.*?\])?)(?: - |$)", failed)
    return found[1] if found else ""


def failure(tree: Path, arguments: list[str]) -> str:
    """What these tests fail with twice, or nothing."""
    passing_alone: list[str] = []
    while failed := first_failure(tree, [*arguments, *(f"--deselect={each}" for each in passing_alone)]):
        name = name_of(failed)
        if "::" not in name or first_failure(tree, [name]):
            return failed
        passing_alone.append(name)
    return ""


class Undecided(Exception):
    """No test has failed, and not all have run: they take too long, or pytest does not know one of them."""


def first_failure(tree: Path, arguments: list[str]) -> str:
    """The first failure of these tests, or nothing. Raises: Undecided if one of them is not there."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "300"]
    command += reached.SHORT
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'tests'}", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, *arguments], cwd=tree, env=environment, capture_output=True, text=True,
            timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Undecided(f"no test has failed within {TIMEOUT_SECONDS} seconds") from error
    if missing := re.search("^ERROR: not found: .*", done.stderr, re.MULTILINE):
        raise Undecided(missing[0])
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "" if done.returncode in (0, NO_TESTS) else (lines or [f"exit code {done.returncode}"])[0]


def recorded_in(file: Path | None, packages: list[str], jobs: int) -> dict[str, dict]:
    """Read which tests call which function. If the file is missing, record it."""
    if file is None:
        return {"seconds": {}, "called": {}}
    if not file.exists():
        tests = {*EVERYWHERE, *(each for package in packages for each in TESTS[package])}
        within = {each for each in tests for other in tests if each.startswith(f"{other}/")}
        reached.record([f"tests/{each}" for each in sorted(tests - within)], jobs, file)
    return json.loads(file.read_text())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="mutants.py", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of their choice")
    parser.add_argument(
        "--since", metavar="COMMIT", help="break only lines of committed files that are new since it"
    )
    parser.add_argument("--skip", type=int, default=0, help="so many of them, to go on with an earlier run")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument("--recorded", type=Path, help="a file that says which tests call which function")
    parser.add_argument("--minutes", type=float, default=1e9, help="for how long to begin new ones")
    parser.add_argument("--packages", nargs="+", choices=sorted(TESTS), default=list(TESTS), help="to break")
    args = parser.parse_args(argv)
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as workers:
        run = Run(Path(folder), args.jobs, recorded_in(args.recorded, args.packages, args.jobs))
        attempt = lambda mutant: (mutant, run.alive(mutant)) if time.monotonic() < end else None
        new = lines_since(args.since) if args.since else None
        places = chosen(args.count, args.seed, args.packages, new)[args.skip :]
        results = [each for each in workers.map(attempt, places) if each]
    survivors = [mutant for mutant, alive in results if alive]
    print(f"\n{len(results) - len(survivors)} of {len(results)} killed. Survivors:")
    print("\n".join(map(str, survivors)) or "none")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Promise: mutants are faults that parse, spread over the engine, and a tree that had one is restored."""

import ast
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import mutants
import pytest
from support import ROOT, reached


@pytest.mark.long("a test of a program that is run by hand")
def test_every_mutant_parses_and_changes_the_program():
    count = Counter()
    for package in mutants.TESTS:
        for path in mutants.modules_of(package):
            source = path.read_text("utf-8")
            tree = ast.dump(ast.parse(source))
            for mutant in mutants.mutants_of(path.relative_to(ROOT)):
                assert ast.dump(ast.parse(mutant.apply(source))) != tree, mutant
                count[package] += 1
    assert sum(count.values()) > 1000 and min(count.values()) > 10, count


def test_a_seed_is_one_choice_over_all_packages():
    count = 10 * len(mutants.TESTS)
    first, again, other = (mutants.chosen(count, seed, list(mutants.TESTS)) for seed in (0, 0, 1))
    assert first == again != other and len(set(first)) == count
    assert set(Counter(mutant.package for mutant in first).values()) == {10}


def test_since_a_commit_only_new_lines_are_broken(tmp_path: Path):
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@example.org"]
    module = tmp_path / "zerolab" / "module.py"
    module.parent.mkdir()
    module.write_text("a = 1\nb = 2\nc = 3\nd = 4\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    module.write_text("a = 1\nb = 5\nd = 4\ne = 6\nf = 7\n")
    assert mutants.lines_since("HEAD", tmp_path) == {(Path("zerolab/module.py"), line) for line in (2, 4, 5)}
    path = Path("zerolab/unit/unit.py")
    lines = sorted({mutant.line for mutant in mutants.mutants_of(path)})
    found = mutants.chosen(10**6, 0, ["unit"], {(path, line) for line in lines[:5]})
    assert {(mutant.path, mutant.line) for mutant in found} == {(path, line) for line in lines[:5]}


def test_the_tests_it_runs_are_there():
    named = {*mutants.EVERYWHERE, *(each for tests in mutants.TESTS.values() for each in tests)}
    assert [each for each in named if not (ROOT / "tests" / each).exists()] == []


def test_a_mutant_is_alive_where_no_test_fails_and_the_tree_is_as_it_was(monkeypatch, tmp_path: Path):
    path = Path("zerolab/stages/stage1.py")
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(source := (ROOT / path).read_text("utf-8"))
    mutant = next(mutants.mutants_of(path))
    ran = []

    def failure(tree: Path, arguments: list[str]) -> str:
        assert (tree / path).read_text("utf-8") == mutant.apply(source)
        ran.append(arguments)
        return said

    monkeypatch.setattr(mutants, "failure", failure)
    said = "FAILED this"
    groups = [[], ["quick"], ["slow"]]
    assert mutants.survives(mutant, tmp_path, groups) == (False, "FAILED this") and ran == [["quick"]]
    said = ""
    assert mutants.survives(mutant, tmp_path, groups) == (True, "") and ran[1:] == [["quick"], ["slow"]]
    assert (tmp_path / path).read_text("utf-8") == source


def test_only_tests_that_call_the_broken_function_run_and_those_that_share_their_run(monkeypatch):
    mutant = next(mutants.mutants_of(Path("zerolab/stages/stage1.py")))
    path, first, _ = mutants.function_of(mutant)
    alone, sharing = "tests/engine/test_units.py::test", "tests/promises/test_parity.py::test[1]"
    seconds = {alone: 2.0, sharing: 1.0, "tests/engine/test_full_params.py::test": 0.1}
    recorded = {"seconds": seconds, "called": {path: {str(first): [alone, sharing]}}}
    groups = mutants.groups_of(mutant, recorded, ["killer"])
    assert groups == [["killer", sharing, alone], [], ["tests/promises/test_parity.py"]]
    monkeypatch.setattr(mutants, "FIRST_CALLING", 1)
    assert mutants.groups_of(mutant, recorded, ["killer"])[:2] == [["killer", sharing], [alone]]
    killers, own, general = mutants.groups_of(mutant, {"seconds": {}, "called": {}}, ["killer"])
    assert killers == ["killer"] and own == mutants.nearest_first(mutant) and not set(own) & set(general)


def test_a_line_outside_of_functions_is_seen_by_all_tests_of_its_package():
    path = Path("zerolab/optimizer/batch.py")
    mutant = next(each for each in mutants.mutants_of(path) if mutants.function_of(each) is None)
    recorded = {"seconds": {"a.py::test": 1.0}, "called": {"optimizer/batch.py": {"20": ["a.py::test"]}}}
    assert mutants.groups_of(mutant, recorded, [])[1] == mutants.nearest_first(mutant)


def test_the_files_that_name_most_of_a_module_go_first():
    for path, nearest in (
        ("optimizer/loss_scale.py", "tests/optimizer/test_loss_scale"),
        ("checkpoint/folder_lock.py", "tests/checkpoint/test_two_runs"),
    ):
        mutant = next(mutants.mutants_of(Path("zerolab", path)))
        files = mutants.nearest_first(mutant)
        assert files[0].startswith(nearest) and len(files) == len(set(files)), files
        folders = [ROOT / "tests" / each for each in mutants.TESTS[mutant.package]]
        assert all(any((ROOT / file).is_relative_to(folder) for folder in folders) for file in files)


def test_a_failure_is_one_that_happens_again_alone(monkeypatch, tmp_path: Path):
    """The first test that fails passes alone; the second one fails again."""
    ran = []

    def run(tree: Path, arguments: list[str]) -> str:
        ran.append(arguments)
        return answers.pop(0)

    monkeypatch.setattr(mutants, "first_failure", run)
    answers = [
        "FAILED a.py::test[two words] - Late",
        "",
        "FAILED b.py::test - Wrong",
        "FAILED b.py::test - Wrong",
    ]
    assert mutants.failure(tmp_path, ["all"]) == "FAILED b.py::test - Wrong"
    assert ran[1] == ["a.py::test[two words]"] and ran[2] == ["all", "--deselect=a.py::test[two words]"]
    answers = ["FAILED a.py::test - Late", "", ""]
    assert mutants.failure(tmp_path, ["all"]) == ""
    answers = ["exit code 3"]
    assert mutants.failure(tmp_path, ["all"]) == "exit code 3"


def test_a_tests_name_may_have_the_dash_that_stands_before_what_it_failed_with():
    assert mutants.name_of("FAILED a.py::test[+ a - b + c] - Wrong") == "a.py::test[+ a - b + c]"
    assert mutants.name_of("FAILED a.py::test[0-+ a - b]") == "a.py::test[0-+ a - b]"
    assert mutants.name_of("FAILED a.py::test - assert [1] - [2]") == "a.py::test"
    assert mutants.name_of("ERROR a.py - no module") == "a.py"


def test_a_test_that_is_not_there_kills_no_mutant(tmp_path: Path):
    """pytest ends with the exit code 4 then, as where a mutant breaks the import of conftest.py."""
    (tmp_path / "test_a.py").write_text("def test():\n    pass\n")
    with pytest.raises(mutants.Undecided, match="not found: "):
        mutants.first_failure(tmp_path, ["test_a.py::missing"])
    (tmp_path / "conftest.py").write_text("1 / 0\n")
    assert mutants.first_failure(tmp_path, ["test_a.py"]) == "exit code 4"


def test_only_the_tests_of_zero_test_kill_a_mutant(tmp_path: Path):
    body = "import pytest\n\n@pytest.mark.long('slow')\ndef test_long():\n    assert False\n"
    (tmp_path / "test_long.py").write_text(body)
    assert mutants.first_failure(tmp_path, ["test_long.py"]) == ""
    (tmp_path / "test_short.py").write_text("def test_short():\n    assert False\n")
    assert mutants.first_failure(tmp_path, ["."]).startswith("FAILED test_short.py::test_short")


def test_a_mutant_survives_where_its_tests_take_too_long(monkeypatch, tmp_path: Path):
    """A slow machine is no failure: only a test that fails kills a mutant."""
    path = "tests/test_slow.py"
    (tmp_path / "tests").mkdir()
    (tmp_path / path).write_text("import time\n\ndef test_slow():\n    time.sleep(60)\n")
    monkeypatch.setattr(mutants, "TIMEOUT_SECONDS", 2)
    monkeypatch.setattr(mutants, "applied", lambda mutant, tree: nullcontext())
    mutant = next(mutants.mutants_of(Path("zerolab/stages/stage2.py")))
    late = (True, "no test has failed within 2 seconds")
    assert mutants.survives(mutant, tmp_path, [[path]]) == late
    (tmp_path / "tests" / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    monkeypatch.setattr(mutants, "TIMEOUT_SECONDS", 30)
    found, said = mutants.survives(mutant, tmp_path, [["tests/test_wrong.py"]])
    assert not found and said.startswith("FAILED tests/test_wrong.py::test_wrong")


def test_tests_that_saw_earlier_mutants_go_first_and_each_worker_has_a_tree(monkeypatch, tmp_path: Path):
    (tmp_path / "root" / "zerolab").mkdir(parents=True)
    monkeypatch.setattr(mutants, "ROOT", tmp_path / "root")
    monkeypatch.setattr(mutants, "groups_of", lambda mutant, recorded, killers: [[*killers, "c.py::test"]])
    run = mutants.Run(tmp_path, 2, {})
    failed = ["FAILED a.py::test - Wrong", "", "exit code 3", "FAILED b.py::test", "FAILED b.py::test"]
    first = []

    def survives(mutant: None, tree: Path, groups: list[list[str]]) -> tuple[bool, str]:
        assert (tree / "zerolab").is_dir() and run.trees.qsize() == 1
        first.extend(groups)
        return not failed[0], failed.pop(0)

    monkeypatch.setattr(mutants, "survives", survives)
    assert [run.alive(None) for _ in range(5)] == [False, True, False, False, False]
    calling = "c.py::test"
    assert first[:2] == [[calling], ["a.py::test", calling]] and first[-1] == [
        "a.py::test",
        "b.py::test",
        calling,
    ]
    assert run.killers.most_common() == [("b.py::test", 2), ("a.py::test", 1)] and run.trees.qsize() == 2


@pytest.mark.long("a test of a program that is run by hand")
def test_the_tests_that_call_a_function_are_recorded_in_ranks_too(tmp_path: Path):
    """One of two tests starts ranks, and shards its gradients there."""
    on_ranks = "tests/engine/test_full_params.py::test_full_grads_are_the_mean_over_ranks[2]"
    alone = "tests/engine/test_units.py::test_a_model_without_containers_is_one_unit"
    reached.record([on_ranks, alone], 1, tmp_path / "recorded")
    recorded = mutants.recorded_in(tmp_path / "recorded", [], 1)
    assert set(recorded["seconds"]) == {on_ranks, alone} and recorded["seconds"][on_ranks] > 0
    path = Path("zerolab/stages/stage2.py")
    mutant = next(each for each in mutants.mutants_of(path) if each.before.startswith("unit.own("))
    assert reached.tests_of(recorded, *mutants.function_of(mutant)) == [on_ranks]


def test_a_test_that_limits_the_size_of_files_goes_on_while_it_is_recorded(tmp_path: Path):
    program = (
        "import resource, sitecustomize\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "sitecustomize._write('called', 'a test')\n"
        "print('went on')"
    )
    environment = {"PYTHONPATH": str(reached.TRACED), "ZEROLAB_REACHED": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "went on\n", done.stderr


def test_a_line_that_was_cut_off_is_no_record():
    lines = [
        "took\ta.py::t\tcall\t0.5\tend",
        "took\ta.py::t\tsetup\t0.2",
        "called\ta.py::t\tunit/unit.py\t12\tend",
    ]
    lines += ["called\ta.py::t\tunit/unit.py\t1", "called\ta.py::t", "took", ""]
    assert reached.merged(lines) == {
        "seconds": {"a.py::t": 0.5},
        "called": {"unit/unit.py": {"12": ["a.py::t"]}},
    }

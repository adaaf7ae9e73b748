"""Promise: what the guides and the lessons tell a reader to run, runs as it is written."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, guides
from support.guides import Example

from zerolab import memory, models
from zerolab.__main__ import COMMANDS, parse

WRITTEN = (*guides.GUIDES, *guides.LESSONS)
EXAMPLES = [example for guide in WRITTEN for example in guides.examples(guide, guides.text(guide))]
AS_WRITTEN = {example.text.strip(): example for example in EXAMPLES if not example.comment}
SHORTER = {  # flags that win over those of the guide, because they come last
    "train": ["--steps", "3", "--batch", "4"],
    "bench": ["--model", "gpt-tiny", "--rounds", "1"],
    "verify": ["--steps", "1"],
}
OF_THE_CLONE = ("tests/", "examples/", "tools/", "notebooks/", "mkdocs", "mypy", "ruff")


def words(line: str) -> list[str]:
    """The words that run a line of a guide with this Python."""
    program, *arguments = shlex.split(line, comments=True)
    if program == "./zero":
        program, arguments = "python", ["-m", "zerolab", *arguments]
    if program.endswith("torchrun"):
        program, arguments = "python", ["-m", "torch.distributed.run", *arguments]
    if Path(program).name in ("python", "python3"):
        program = sys.executable
    shorter = next((SHORTER[word] for word in arguments if word in SHORTER and "zerolab" in arguments), [])
    return [program, *arguments, *shorter]


def run(command: list[str], cwd: Path, **environment: str) -> str:
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | ours | environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


OTHER_FLAGS = "other flags of a command that a short test runs"
LONG = {
    "./zero verify --optimizer muon": "tests/whole_parameters/test_verify.py has each stage on its own",
    "./zero verify --stage 3 --world-size 4 --shard-size 2": "tests/promises/test_hybrid.py has it",
    "./zero train --model gpt-tiny --stage 3 --world-size 2": OTHER_FLAGS,
    "./zero train --model gpt-tiny --stage 3 --trace trace.json": OTHER_FLAGS,
    "./zero train --model logistic --stage 2 --world-size 2 --log runs/x.jsonl": OTHER_FLAGS,
    ".venv/bin/torchrun --nproc-per-node 2 -m zerolab train --model gpt-tiny --stage 3": OTHER_FLAGS,
    "./zero verify --stage 1 2 3 --world-size 4 --optimizer RMSprop --precision mixed": OTHER_FLAGS,
    ".venv/bin/python -m pytest tests/promises/test_formula_properties.py": "it runs among the other tests",
    ".venv/bin/python examples/resume_elsewhere.py": "tests/commands/test_examples.py runs it",
}


def marks(text: str) -> list:
    return [pytest.mark.long(LONG[text])] if text in LONG else []


@pytest.mark.parametrize(
    "example", [pytest.param(each, marks=marks(text)) for text, each in AS_WRITTEN.items()], ids=str
)
def test_an_example_runs_as_it_is_written(example: Example, tmp_path: Path):
    if example.language == "python":
        (tmp_path / "example.py").write_text(example.text)
        run([sys.executable, "example.py"], tmp_path)
        return
    (tmp_path / "runs").mkdir()
    for line in example.text.strip().splitlines():
        of_the_clone = any(word.startswith(OF_THE_CLONE) for word in shlex.split(line))
        run(words(line), ROOT if of_the_clone else tmp_path)


def unknown_tests(example: Example) -> list[str]:
    """What is wrong with the comment of an example: a test that is not there, or knows nothing of it."""
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", example.comment)
    wrong, sources = [] if named else [f"{example}: {example.comment!r} names no test"], ""
    for file, function in named:
        source = (ROOT / file).read_text("utf-8") if (ROOT / file).exists() else ""
        functions = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        wrong += [] if function in functions else [f"{example}: there is no {file}::{function}"]
        sources += source
    if example.language == "sh" and not re.search(rf"\b{subject(example.text)}\b|guides\.", sources):
        wrong.append(f"{example}: {example.comment} says nothing of {subject(example.text)}")
    return wrong


def subject(line: str) -> str:
    """What a command runs: the command of ./zero, the program of Python's, or the launcher."""
    line = re.sub(r"^(\w+=\S+ )+", "", line)
    found = re.match(r"\./zero (\w+)", line) or re.match(
        r"\S*python3? (?:-m zerolab |-m |\S*?)(\w+)(?:\.py)?\b", line
    )
    return found[1] if found else Path(line.split()[0]).name


def test_what_is_not_run_here_is_run_by_a_test_that_is_there():
    run_elsewhere = [each for each in EXAMPLES if each.comment and not each.comment.startswith("not run: ")]
    assert run_elsewhere and [wrong for example in run_elsewhere for wrong in unknown_tests(example)] == []


NOT_RUN = {
    ("README.md", "git clone"): "it needs the network",
    ("CONTRIBUTING.md", "pip install"): "it needs the network",
    ("docs/examples.md", ".venv/bin/python -m"): "it needs the network",
    ("docs/setup.md", "pip install"): "it needs the network",
    ("cloud/README.md", "git clone"): "it needs the network",
    ("cloud/README.md", "cloud/gpu.sh"): "it needs a GPU",
    ("cloud/README.md", "ssh -N"): "it needs a second machine",
    ("cloud/README.md", ".venv/bin/python -m"): "it needs eight GPUs",
    ("docs/gpus.md", "!git clone"): "it needs the network",
    ("docs/gpus.md", "!python -m"): "it needs a GPU",
}
"""Everything in the guides that no test runs, by the page and the first two words, and the reason."""


def test_what_no_test_runs_is_on_the_list_with_its_reason():
    not_run = [each for each in EXAMPLES if each.comment.startswith("not run: ")]
    found = {(each.guide, " ".join(each.text.split()[:2])): each.comment for each in not_run}
    assert found == {place: f"not run: {reason}" for place, reason in NOT_RUN.items()}
    assert len(not_run) == len(found)


def test_the_flags_of_what_no_test_runs_are_there():
    lines = [each.text for each in EXAMPLES if each.comment.startswith("not run: ")]
    arguments = [line.split(" -m zerolab ")[1].split() for line in lines if " -m zerolab " in line]
    assert [parse(each, each[0]).command for each in arguments] == ["train", "verify"]


@pytest.mark.parametrize("guide", guides.GUIDES)
def test_no_command_hides_in_a_fence(guide: str):
    assert guides.hidden_fences(guides.text(guide)) == []


@pytest.mark.parametrize(
    ("written", "hidden"),
    [
        ("```\n./zero lab\n```\n", "no language"),
        ("```bash\n./zero lab\n```\n", "bash"),
        ("- a\n  ```sh\n  ./zero lab\n  ```\n", "  ```sh"),
        ("~~~sh\n./zero lab\n~~~\n", "~~~sh"),
        ("```text\n$ ./zero lab\n```\n", "$ ./zero lab"),
        ("```sh title=1\n./zero lab\n```\n", "a fence that is not closed"),
    ],
)
def test_a_fence_that_escapes_the_tests_is_found(written: str, hidden: str):
    assert hidden in guides.hidden_fences(written)
    assert guides.hidden_fences("```sh\n./zero lab\n```\n\n```text\nout\n```\n") == []


def test_a_command_that_a_sentence_names_is_there():
    for guide in WRITTEN:
        named = set(re.findall(r"`\./zero ([a-z]+)", guides.text(guide)))
        assert named <= {"lab", "test", "help", *COMMANDS}, guide


SAMPLE = """\
# Sample

Run `./zero plan --model gpt2-xl` or `./zero lab`; `./zero train …` is only a name.

<!-- run by tests/repo/test_guides.py::test_gone -->
```sh
./zero verify
```

```python
print(1)

print(2)
```
"""


def test_an_example_that_nobody_runs_is_found():
    inline, fenced, program = guides.examples("sample", SAMPLE)
    assert inline == ("sample", "sh", "./zero plan --model gpt2-xl", "")
    assert unknown_tests(fenced) == [
        "sample: ./zero verify: there is no tests/repo/test_guides.py::test_gone"
    ]
    assert unknown_tests(fenced._replace(comment="run by somebody"))[0].endswith("names no test")
    assert "says nothing of zigzag" in unknown_tests(
        fenced._replace(text="./zero zigzag", comment="run by tests/conftest.py::descendants")
    )[0]  # fmt: skip
    assert program == ("sample", "python", "print(1)\n\nprint(2)\n", "")


# ---- examples that say more than that they ran


def number(text: str) -> int:
    return int(text.replace(",", ""))


def is_all_of(held_bytes: int, states: memory.ModelStates) -> bool:
    """Whether a rank held all model states, and at most 1 % more: padding and step counters."""
    return states.total_bytes <= held_bytes < 1.01 * states.total_bytes


def test_the_script_to_start_from_runs_alone_and_under_torchrun(tmp_path: Path):
    (script,) = guides.blocks("docs/train_your_own_model.md", "python")
    (command,) = guides.blocks("docs/train_your_own_model.md", "sh")
    (tmp_path / "yours.py").write_text(script)
    alone = run([sys.executable, "yours.py"], tmp_path)
    assert command.split()[0].endswith("/torchrun")
    both = run(words(command), tmp_path)
    pattern = r"rank (\d): loss (\d\.\d+), ([\d,]+) bytes of model states"
    ((_, _, whole),) = re.findall(pattern, alone)
    halves = sorted(re.findall(pattern, both))
    assert [rank for rank, *_ in halves] == ["0", "1"]
    psi = 8 * (64 * 64 + 64)
    assert is_all_of(number(whole), memory.model_states(psi, 1, 3, "fp32"))
    for _, loss, held in halves:
        assert float(loss) < 0.8, "it learns"
        assert is_all_of(number(held), memory.model_states(psi, 2, 3, "fp32"))


def test_the_commands_about_checkpoints_run_one_after_the_other(tmp_path: Path):
    (commands,) = guides.blocks("docs/checkpoints.md", "sh")
    first, second = (run(words(line), tmp_path) for line in commands.splitlines())
    assert re.search(r"epoch +2 ", first)
    assert re.search(r"epoch +4 ", second) and not re.search(r"epoch +1 ", second)


def test_a_batch_script_finds_the_first_host(tmp_path: Path):
    (export,) = guides.blocks("docs/launchers.md", "sh")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[01-02]" ] && printf "node01\\nnode02\\n"\n')
    scontrol.chmod(0o755)
    job = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[01-02]"}
    said = run(["sh", "-c", f"{export}\necho $MASTER_ADDR $MASTER_PORT"], tmp_path, **job)
    assert said == "node01 29500\n"


def test_the_example_of_the_readme_gives_the_bytes_of_both_ranks(tmp_path: Path):
    """As a script of its own, without a guard around it: what a reader would paste."""
    (tmp_path / "example.py").write_text(guides.blocks("README.md", "python")[0])
    psi = sum(each.numel() for each in models.make("gpt-tiny").parameters())
    printed = run([sys.executable, "example.py"], tmp_path)
    assert f"It prints `{printed.strip()}`" in (ROOT / "README.md").read_text("utf-8")
    for held in json.loads(printed):
        assert isinstance(held, int) and is_all_of(held, memory.model_states(psi, 2, 3, "fp32"))


def test_the_cell_for_kaggle_runs(tmp_path: Path):
    _, cell, _ = guides.blocks("docs/gpus.md", "ipython")
    lines = cell.splitlines()
    assert re.match(r"2\.\d+", run([sys.executable, "-c", lines[0]], tmp_path))
    (command,) = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert "True" in run(words(command), tmp_path)


def test_the_example_about_checkpoints_goes_on_where_it_stopped(tmp_path: Path):
    (tmp_path / "example.py").write_text(guides.blocks("docs/checkpoints.md", "python")[0])
    assert run([sys.executable, "example.py"], tmp_path) == "[5, 5, 5]\n"
    assert (tmp_path / "model.pt").exists()


def test_the_page_on_accelerate_and_the_trainer_shows_the_files_of_its_examples():
    shown = guides.blocks("docs/accelerate_and_trainer.md", "python")
    files = [ROOT / "examples" / name for name in ("accelerate_loop.py", "trainer_loop.py")]
    assert shown == [path.read_text("utf-8") for path in files]

"""The promise: the training program trains, says the same on every rank, and leaves nothing half-done."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest
import torch
from support import ROOT
from support.losses import losses_by_rank

import zerolab
from zerolab import data, models, progress, train
from zerolab.__main__ import main

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


def run(*command: str) -> subprocess.CompletedProcess:
    """Run Python as a user would, with the package importable and no launcher's variables around."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


# --- the two runs of docs/commands.md ---


def test_both_ranks_of_logistic_print_the_same_falling_loss_and_the_trace_shows_the_partition(tmp_path):
    trace = tmp_path / "trace.txt"
    flags = "--model logistic --stage 1 --world-size 2 --epochs 10 --steps 10 --batch 128"
    done = run("-m", "zerolab", "train", *flags.split(), "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    losses = losses_by_rank(done.stdout)
    assert losses.keys() == {0, 1} and len(losses[0]) == 10
    assert losses[0] == losses[1]
    assert all(later < earlier for earlier, later in zip(losses[0], losses[0][1:], strict=False))

    heading, ranks = trace.read_text().split("\nrank 0\n")
    assert "in the setup and in the first two steps" in heading
    first, second = ranks.split("\nrank 1\n")
    assert first.startswith("setup\n")
    updates = {rank: update_slices(text) for rank, text in ((0, first), (1, second))}
    assert updates == {0: {"weight[0:3936]"}, 1: {"weight[3936:7840]", "bias[0:10]"}}
    assert os.listdir(tmp_path) == ["trace.txt"]


def test_a_trace_that_ends_in_json_is_a_timeline_of_all_ranks(tmp_path):
    trace = tmp_path / "trace.json"
    flags = "--model logistic --stage 3 --world-size 2 --epochs 1 --steps 3"
    assert run("-m", "zerolab", "train", *flags.split(), "--trace", str(trace)).returncode == 0
    events = json.loads(trace.read_text())["traceEvents"]
    for rank in (0, 1):
        names = [event["name"] for event in events if event["pid"] == rank]
        assert {"forward", "backward", "step", "update root", "reduce_scatter root"} <= set(names)


def update_slices(text: str) -> set[str]:
    """The parameter slices listed below the trace's lines about updates."""
    slices, inside = set(), False
    for line in text.splitlines():
        if re.fullmatch(r" {5,}\S+\[\d+:\d+\].*", line):
            slices |= set(re.findall(r"\S+\[\d+:\d+\]", line)) if inside else set()
        else:
            inside = " update " in line
    return slices


def test_torchrun_runs_the_same_program():
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 -m zerolab train"
    flags = "--model gpt-tiny --stage 3 --steps 4 --batch 2"
    done = run(*launcher.split(), *flags.split())
    assert done.returncode == 0, done.stderr
    losses = losses_by_rank(done.stdout)
    assert losses.keys() == {0, 1} and losses[0] == losses[1]
    for expected in ("sample:", "tokens/s", "memory of rank 0", "traffic of rank 0", "unigram entropy"):
        assert done.stdout.count(expected) == 1, f"{expected!r} is rank 0's alone to print"


# --- the loop ---


def run_short(config: train.Config, ends_at: int | None = None) -> list[float]:
    """On a rank: the loop, with less to do after it, or no power after so many steps."""
    train.SAMPLE_NUMEL, train.EVALUATION_BATCHES = 4, 1
    step = progress.Progress.step

    def step_or_end(self, *arguments) -> None:
        step(self, *arguments)
        if len(self.losses) + len(self.pending) == ends_at:
            raise RuntimeError("out of power")

    progress.Progress.step = step_or_end
    return train.train(config)


def test_the_loss_of_a_short_gpt_run_falls():
    config = replace(train.RECIPES["gpt-tiny"], stage=3, steps=30, batch=4)
    first, second = zerolab.launch(run_short, 2, config)
    assert first == second and len(first) == 30
    assert sum(first[-5:]) < sum(first[:5]) - 5


def test_losses_are_those_of_one_process_that_sees_every_ranks_batches():
    config = replace(train.RECIPES["logistic"], stage=2, epochs=2, steps=5, batch=32)
    losses, _ = zerolab.launch(run_short, 2, config)

    torch.manual_seed(config.seed)
    model = models.make("logistic")
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    training, _ = data.training_and_held_out(None, config.batch, config.seed)
    expected = []
    for step in list(range(5)) * 2:
        loss = sum(model(*training.batch(step, rank)) for rank in range(2)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", train.OPTIMIZERS)
def test_every_optimizer_offered_trains(name):
    config = replace(train.RECIPES["logistic"], optimizer=name, lr=1e-3, epochs=1, steps=3, batch=8)
    (losses,) = zerolab.launch(run_short, 1, config)
    assert len(losses) == 3


# --- going on ---


def test_a_run_resumed_prints_and_returns_what_one_that_never_stopped_does(tmp_path):
    """Cut in the middle of an epoch, and gone on with at the same size and another stage."""
    whole = replace(train.RECIPES["gpt-tiny"], stage=2, epochs=2, steps=4, batch=2)
    expected, _ = zerolab.launch(run_short, 2, whole)
    cut = replace(whole, save=tmp_path, save_every=3)
    with pytest.raises(zerolab.WorkerError, match="out of power"):
        zerolab.launch(run_short, 2, cut, 5)
    resumed, _ = zerolab.launch(run_short, 2, replace(whole, stage=3, resume=tmp_path, save=tmp_path))
    assert resumed == expected and len(expected) == 8
    assert sorted(os.listdir(tmp_path)) == [".lock", "LATEST", "generation-000001", "generation-000002"]


def test_a_run_resumed_at_another_size_has_its_own_batches_from_there_on(tmp_path):
    config = replace(train.RECIPES["logistic"], epochs=2, steps=3, batch=8)
    whole, _ = zerolab.launch(run_short, 2, config)
    zerolab.launch(run_short, 2, replace(config, epochs=1, save=tmp_path))
    resumed, *_ = zerolab.launch(run_short, 3, replace(config, resume=tmp_path))
    assert resumed[:3] == whole[:3] and len(resumed) == 6
    assert resumed[3] != whole[3]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--epochs 2 --batch 4", "--batch is 4, but the run in .* was saved with 8"),
        ("--epochs 2 --lr 0.1", "--lr is 0.1, but the run in .* was saved with 0.05"),
        ("--epochs 2 --optimizer adam", "the checkpoint is of SGD and the optimizer is Adam"),
        ("--epochs 1", "has 3 steps done of 3: train it for more --epochs"),
    ],
)
def test_a_run_that_would_not_be_the_same_is_not_resumed(flags, complaint, tmp_path, capsys):
    config = replace(train.RECIPES["logistic"], epochs=1, steps=3, batch=8, save=tmp_path)
    zerolab.launch(run_short, 1, config)
    same = f"train --model logistic --world-size 1 --steps 3 --batch 8 --resume {tmp_path}"
    assert main([*same.split(), *flags.split()]) == 2
    said = capsys.readouterr().err
    assert re.search(f"zerolab train: .*{complaint}", said) and "Traceback" not in said


# --- bad input ---


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--stage 3 --world-size 4 --shard-size 3", "shard_size is 3: .* a divisor of the 4 ranks"),
        ("--stage 1 --world-size 4 --shard-size 2", "shard_size is 2 at Stage1: .* pass stage=3"),
    ],
)
def test_groups_that_cannot_be_are_refused_before_anything_starts(flags, complaint, capsys, monkeypatch):
    monkeypatch.setattr(train, "launch", lambda *args: pytest.fail("ranks were started"))
    assert main(["train", *flags.split()]) == 2
    assert re.match(f"zerolab train: {complaint}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--stage 4", r"--stage: invalid choice: 4 \(choose from 0, 1, 2, 3\)"),
        ("--model gpt-9000", r"--model: invalid choice: 'gpt-9000' \(choose from .*gpt-tiny"),
        ("--optimizer lbfgs", r"--optimizer: invalid choice: 'lbfgs' \(choose from .*adamw"),
        ("--world-size 0", r"--world-size: '0': pass a whole number of 1 or more"),
        ("--world-size two", r"--world-size: 'two': pass a whole number of 1 or more"),
        ("--steps 1.5", r"--steps: '1.5': pass a whole number of 1 or more"),
        ("--epochs -3", r"--epochs: '-3': pass a whole number of 1 or more"),
        ("--batch 0", r"--batch: '0': pass a whole number of 1 or more"),
        ("--seed -1", r"--seed: '-1': pass a whole number of 0 or more"),
        ("--lr nan", r"--lr: 'nan': pass a number of 0 or more"),
        ("--lr inf", r"--lr: 'inf': pass a number of 0 or more, and below 2\*\*63"),
        ("--clip -1", r"--clip: '-1': pass a number of 0 or more"),
        ("--prefetch -1", r"--prefetch: '-1': pass a whole number of 0 or more"),
        (
            "--trace no/such/trace.txt",
            r"--trace: 'no/such/trace.txt' must be a file in a directory that exists",
        ),
        (f"--trace {__file__}/trace.txt", r"--trace: .* must be a file in a directory that exists"),
        ("--trace /dev/null", r"--trace: '/dev/null' must be a file in a directory that exists"),
        ("--trace .", r"--trace: '.' must be a file in a directory that exists"),
        ("--save /dev/null/runs", r"--save: '/dev/null/runs' must be a folder that can be written"),
        (f"--save {__file__}", r"--save: .* must be a folder that can be written"),
        (f"--log {__file__}/x.jsonl", r"--log: .* must be a folder that can be written, or made"),
        ("--log .", r"--log: '.' must be a file that can be written"),
        ("--save-every 0", r"--save-every: '0': pass a whole number of 1 or more"),
        ("--stag 1", r"zerolab train: unrecognized arguments: --stag 1; did you mean --stage\?"),
        ("--world_size=2", r"arguments: --world_size=2; did you mean --world-size\?"),
        ("--colour red", r"zerolab train: unrecognized arguments: --colour red \(--help"),
        ("--resume no/such/folder", r"--resume: no checkpoint in .*no/such/folder"),
        (f"--resume {__file__}", r"--resume: no checkpoint in"),
    ],
)
def test_a_bad_flag_is_named_with_its_bound_before_anything_starts(flags, complaint, capsys, monkeypatch):
    monkeypatch.setattr(train, "launch", lambda *args: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit) as stopped:
        main(["train", *flags.split()])
    assert stopped.value.code == 2
    assert re.search(complaint.replace("'", "['\"]?"), capsys.readouterr().err)


def test_checkpoints_that_would_go_nowhere_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(train, "launch", lambda *args: pytest.fail("ranks were started"))
    assert main(["train", "--save-every", "5"]) == 2
    assert "--save-every=5 without --save: say where, as in --save runs/a" in capsys.readouterr().err


def test_a_world_size_that_contradicts_the_launcher_is_refused(capsys, monkeypatch):
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train, "init_process_group", lambda: pytest.fail("joined a group"))
    assert main(["train", "--world-size", "3"]) == 2
    assert "--world-size=3, but 2 ranks were launched; leave the flag out" in capsys.readouterr().err


def test_a_rank_that_fails_is_reported_and_no_trace_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "train", fail)
    assert main(["train", "--trace", str(tmp_path / "trace.txt")]) == 1
    assert "no steps for rank 1" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def fail(config: train.Config) -> None:
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("no steps for rank 1")


def test_a_trace_that_cannot_be_finished_leaves_the_old_file_and_nothing_else(tmp_path):
    trace = tmp_path / "trace.txt"
    trace.write_text("old")
    assert zerolab.launch(write_and_fail, 1, trace) == ["disk full"]
    assert trace.read_text() == "old" and os.listdir(tmp_path) == ["trace.txt"]


def write_and_fail(path: Path) -> str:
    def replace(source, target):
        raise OSError("disk full")

    os.replace = replace
    try:
        progress.write_trace(path, "new", [])
    except OSError as error:
        return str(error)


# --- logs ---


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log_has_the_numbers_of_each_step(tmp_path):
    """The means are those that train() returns; memory and bytes are those that the run prints at its end."""
    log = tmp_path / "runs/x.jsonl"
    flags = "train --model logistic --stage 2 --world-size 2 --epochs 2 --steps 6 --batch 8 --log"
    done = run("-m", "zerolab", *flags.split(), str(log))
    assert done.returncode == 0, done.stderr
    config = replace(train.RECIPES["logistic"], stage=2, epochs=2, steps=6, batch=8)
    means, _ = zerolab.launch(run_short, 2, config)
    found = records(log)
    assert [each["step"] for each in found] == list(range(1, 13))
    assert [each["loss"] for each in found] == means
    (memory,) = re.findall(r"memory of rank 0, bytes: .* total ([\d,]+)", done.stdout)
    (sent,) = re.findall(r"([\d,]+) sent", done.stdout)
    for each in found:
        assert list(each) == ["step", "tokens_per_second", "memory_bytes", "sent_bytes", "loss"]
        assert each["memory_bytes"] == int(memory.replace(",", ""))
        assert each["sent_bytes"] == int(sent.replace(",", "")) and each["tokens_per_second"] > 0


def test_a_log_changes_no_loss_and_is_written_as_the_run_goes(tmp_path: Path):
    """A run that dies leaves its lines, and the run that goes on drops those of steps it takes again."""
    log = tmp_path / "x.jsonl"
    config = replace(train.RECIPES["logistic"], epochs=1, steps=25, batch=8)
    expected, _ = zerolab.launch(run_short, 2, config)
    cut = replace(config, log=log, save=tmp_path / "saved", save_every=8)
    with pytest.raises(zerolab.WorkerError, match="out of power"):
        zerolab.launch(run_short, 2, cut, 23)
    assert [each["step"] for each in records(log)] == list(range(1, 21))
    log.write_text(log.read_text() + '{"step": 21, "lo')
    again = replace(cut, resume=tmp_path / "saved")
    assert zerolab.launch(run_short, 2, again)[0] == expected
    found = records(log)
    assert [each["step"] for each in found] == list(range(1, 26))
    assert [each["loss"] for each in found] == expected
    zerolab.launch(run_short, 2, replace(config, steps=3, log=log))
    assert [each["step"] for each in records(log)] == [1, 2, 3], "a new run begins a new log"


def test_a_file_that_is_no_log_is_not_cut(tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("do not lose this\n")
    with pytest.raises(ValueError, match=r"notes.txt is not the log of a run: b'do not lose"):
        progress.JsonLines(notes, done=3)
    assert notes.read_text() == "do not lose this\n"


def test_tensorboard_gets_the_same_numbers(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = replace(train.RECIPES["logistic"], epochs=1, steps=4, batch=8, log=tmp_path / "x.jsonl")
    zerolab.launch(run_short, 2, replace(config, tensorboard=tmp_path / "board", save=tmp_path / "saved"))
    again = replace(config, epochs=2, tensorboard=tmp_path / "board", resume=tmp_path / "saved")
    zerolab.launch(run_short, 2, again)
    events = reader.EventAccumulator(str(tmp_path / "board")).Reload()
    for name in ("loss", "tokens_per_second", "memory_bytes", "sent_bytes"):
        written = {event.step: event.value for event in events.Scalars(name)}
        assert written == pytest.approx({each["step"]: each[name] for each in records(tmp_path / "x.jsonl")})


def test_without_tensorboard_the_flag_says_how_to_install_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("zerolab.flags.importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["train", "--tensorboard", str(tmp_path / "board")])
    assert "the package tensorboard is missing: " in (said := capsys.readouterr().err)
    assert "-m pip install tensorboard" in said and os.listdir(tmp_path) == []

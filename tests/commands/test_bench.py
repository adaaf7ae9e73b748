"""Promise: the benchmark is fair. All contestants really train, on the same data to the same parameters;
ratios are taken within a round; what is measured is what was sent and held; who is missing is named.
"""

import functools
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
import torch

import zerolab
from zerolab import models
from zerolab.__main__ import main
from zerolab.bench import bench, contestants, footprint, overhead, race, sweep, targets
from zerolab.bench.contestants import CONTESTANTS, FLOOR
from zerolab.bench.footprint import Footprint
from zerolab.bench.race import Settings
from zerolab.bench.ratios import Spread, pairwise, slowest, spread

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

OTHERS = tuple(name for name in CONTESTANTS if name.startswith("deepspeed"))
HERE = tuple(name for name in CONTESTANTS if name not in OTHERS)
STAGES = ("zerolab-0", "zerolab-1", "zerolab-2", "zerolab-3")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def contestants_as_they_were():
    before = dict(CONTESTANTS)
    yield
    CONTESTANTS.update(before)


def tiny() -> models.GPT:
    return models.GPT(width=32, depth=2, heads=2, context=32)


def settings(*names: str, build=tiny, **options) -> Settings:
    sizes = {"world_size": 2, "rounds": 2, "batch": 1, "threads": 1}
    return Settings(build, names, "fused", **sizes | options)


# The command.


@functools.cache
def one_run(folder: Path) -> tuple[int, str]:
    """Exit code and print of a short run of all contestants in a machine without DeepSpeed."""
    program = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "from zerolab.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    flags = ["--model", "gpt-tiny", "--rounds", "2", "--update", "fused", "--out", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(zerolab.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program, "bench", *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def ran(tmp_path_factory) -> SimpleNamespace:
    """What the run printed, and what it left in its folder."""
    folder = tmp_path_factory.getbasetemp() / "bench"
    code, printed = one_run(folder)
    assert code == 0, printed
    saved = json.loads((folder / "bench.json").read_text("utf-8"))
    return SimpleNamespace(printed=printed, folder=folder, saved=saved, table=saved["tables"]["fused"])


def test_the_table_has_all_contestants_and_says_who_is_missing(ran):
    rows = re.findall(r"^(\S+) +([\d.]+ \[[\d.]+ [\d.]+\]|not installed)", ran.printed, re.M)
    found = dict(rows[: len(CONTESTANTS)])
    assert found.keys() == CONTESTANTS.keys()
    assert [name for name, cell in found.items() if cell == "not installed"] == list(OTHERS)
    assert re.search(r"^zerolab-0 .* at most 1\.00: (held|missed by \d)", ran.printed, re.M)


def test_the_json_holds_every_number_and_the_machine(ran):
    assert ran.saved["machine"].keys() >= {"processor", "cores", "torch", "memory_bytes", "load_before"}
    assert ran.saved["settings"] == {"model": "gpt-tiny", "batch": 1, "rounds": 2, "threads": 1}
    assert ran.table["psi"] == sum(p.numel() for p in models.make("gpt-tiny").parameters())
    for name in HERE:
        one = ran.table["contestants"][name]
        assert len(one["rounds_seconds"]) == len(one["rounds_cpu_seconds"]) == 2
        assert one["step_seconds"]["median"] == pytest.approx(sum(one["rounds_seconds"]) / 2)
        ratios = pairwise(
            one["rounds_seconds"], ran.table["contestants"]["ddp"]["rounds_seconds"]
        )  # not the quotient of the medians
        assert one["of_ddp"]["median"] == ratios.median
    for name in OTHERS:
        assert ran.table["contestants"][name] == {"absent": "not installed"}
    assert ran.table["main_thread_seconds"].keys() == ran.table["of_plain_loop_on_one_rank"].keys()
    assert tuple(ran.table["main_thread_seconds"]) == STAGES


def test_the_text_and_the_picture_are_saved_too(ran):
    assert (ran.folder / "bench.txt").read_text("utf-8") in ran.printed
    assert (ran.folder / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_all_have_trained_alike_and_the_floor_has_not(ran):
    off = {name: ran.table["contestants"][name]["parameters_off_by"] for name in HERE}
    assert off.pop(FLOOR) > 0.1
    assert max(off.values()) < 1e-3
    assert "has not trained what the others have" not in ran.printed


def test_what_is_sent_is_counted_outside_of_the_engine(ran):
    """Within 2 % of what each must send; torch's stage 1 and stage 3 gather more often than they need to."""
    sent = {name: ran.table["contestants"][name]["wire_bytes"] for name in HERE}
    if sent[FLOOR] is None:
        pytest.skip("needs /proc/self/io")
    psi_bytes = 4 * ran.table["psi"] / 2  # (N-1)/N of Ψ
    assert sent[FLOOR] == 0
    for name in ("ddp", "zerolab-0", "zerolab-1", "zerolab-2"):
        assert sent[name] == pytest.approx(2 * psi_bytes, rel=0.02)
    assert sent["zerolab-3"] == pytest.approx(3 * psi_bytes, rel=0.06)  # less the root
    assert sent["ddp+zero"] == pytest.approx(3 * psi_bytes, rel=0.02)


def test_without_the_kernels_counter_only_our_own_ledger_speaks():
    def build() -> models.GPT:
        footprint.written_bytes = lambda: None
        return tiny()

    given = settings(build=build)
    assert footprint.weigh(given, "ddp").wire_bytes is None
    psi_bytes = 4 * sweep.count(tiny) / 2
    assert footprint.weigh(given, "zerolab-2").wire_bytes == pytest.approx(2 * psi_bytes, rel=0.1)  # padding


def test_what_is_held_is_seen_from_outside(ran):
    """The floor holds 16 bytes a parameter; the census of our own stages is the formula."""
    for name in STAGES:
        one = ran.table["contestants"][name]
        assert one["states_match"] and abs(one["states_bytes"] - one["formula_bytes"]) < 1
    peak_bytes = ran.table["contestants"][FLOOR]["peak_bytes"]
    assert peak_bytes is None or 16 * ran.table["psi"] < peak_bytes < 32 * ran.table["psi"]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--model logistic", r"--model: invalid choice: 'logistic' \(choose from 'gpt-tiny', 'gpt-11m'\)"),
        ("--world-size 0", "--world-size: '0': pass a whole number of 1 or more"),
        ("--rounds 0", "--rounds: '0': pass a whole number of 1 or more"),
        ("--batch x", "--batch: 'x': pass a whole number of 1 or more"),
        ("--update slow", r"--update: invalid choice: 'slow' \(choose from 'exact', 'fused', 'both'\)"),
        ("--contestants ddp fsdp", r"--contestants: invalid choice: 'fsdp' \(choose from 'floor', 'ddp',"),
        ("--out /dev/null/runs", "--out: '/dev/null/runs' must be a folder that can be written"),
    ],
)
def test_a_bad_flag_is_named_with_its_bound(flags: str, complaint: str, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda args: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *flags.split()])
    assert stopped.value.code == 2
    assert re.search(complaint.replace("'", "['\"]?"), capsys.readouterr().err)


def test_more_ranks_than_fit_are_refused_in_one_line(capsys):
    assert main(["bench", "--world-size", "100000"]) == 2
    assert "world_size must be between 1 and" in capsys.readouterr().err


def test_a_race_of_nobody_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(contestants.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--contestants", "deepspeed-1"]) == 2
    assert "no contestant can take part: deepspeed-1 is not installed" in capsys.readouterr().err


def spoiled(name: str, spoil) -> models.GPT:
    """A builder of the tiny model that first puts another contestant in a place, on the rank it runs on."""

    def build() -> models.GPT:
        contestants.CONTESTANTS[name] = spoil  # through the module, which a rank imports for itself
        return tiny()

    return build


def broken(model, flags):
    raise RuntimeError("no such kernel")


def test_another_engine_that_fails_is_named_and_left_out(capsys, monkeypatch):
    build = spoiled("fully_shard", broken)
    monkeypatch.setattr(bench.models, "make", lambda name: build())
    assert main(["bench", "--contestants", "ddp", "fully_shard", "--rounds", "1", "--update", "fused"]) == 0
    assert re.search(r"^fully_shard +failed: .*no such kernel", capsys.readouterr().out, re.M)


def test_our_own_engine_that_fails_fails_the_command(capsys, monkeypatch):
    build = spoiled("zerolab-2", broken)
    monkeypatch.setattr(bench.models, "make", lambda name: build())
    assert main(["bench", "--contestants", "zerolab-2", "--rounds", "1", "--update", "fused"]) == 1
    assert "no such kernel" in capsys.readouterr().err


def tell_flags(model, flags):
    raise RuntimeError(f"flags {sorted(flags.items())}")


@pytest.mark.parametrize("update", contestants.UPDATES)
def test_a_table_has_the_update_that_was_asked_for(update: str, capsys, monkeypatch):
    build = spoiled("floor", tell_flags)
    monkeypatch.setattr(bench.models, "make", lambda name: build())
    assert main(["bench", "--contestants", "floor", "--rounds", "1", "--update", update]) == 1
    assert f"flags {sorted(contestants.UPDATES[update].items())}" in capsys.readouterr().err


def flags_of_all(update: str) -> dict[str, dict]:
    """What each contestant's own torch optimizer was told."""
    found = {}
    for name in HERE:
        owner = contestants.enter(name, tiny, update).update.__self__
        (group,) = getattr(owner, "optim", owner).param_groups
        found[name] = {flag: group[flag] for flag in contestants.UPDATES[update]} | {"lr": group["lr"]}
    return found


@pytest.mark.parametrize("update", contestants.UPDATES)
def test_all_sides_make_the_same_update(update: str):
    told = contestants.UPDATES[update] | {"lr": contestants.LEARNING_RATE}
    for found in zerolab.launch(flags_of_all, 2, update):
        assert found == dict.fromkeys(HERE, told)


def test_without_matplotlib_the_numbers_are_still_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(bench.table, "text", lambda report: "words")
    report = bench.Report({"processor": "x"}, {}, [SimpleNamespace(update="fused", as_json=dict)])
    bench.save(report, tmp_path, "bench")
    assert "no plot: it needs matplotlib" in capsys.readouterr().out
    assert json.loads((tmp_path / "bench.json").read_text())["machine"] == {"processor": "x"}


# Nobody cheats.


def without_update(model, flags):
    contestant = contestants.ddp(model, flags)
    contestant.update = lambda: None
    return contestant


def without_messages(model, flags):
    return contestants.alone(model, flags)


def with_more_than_was_asked(model, flags):
    """As an engine that clips unless it is told not to."""
    contestant = contestants.ddp(model, flags)
    update = contestant.update

    def clip_and_update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update()

    contestant.update = clip_and_update
    return contestant


@pytest.mark.parametrize("cheat", [without_update, without_messages, with_more_than_was_asked])
def test_who_trains_something_else_is_found_out(cheat):
    build = spoiled("ddp+zero", cheat)
    found = race.race(settings("ddp", "ddp+zero", "zerolab-1", build=build))
    assert found.odd_ones_out() == ["ddp+zero"] and found.differences["ddp+zero"] > 0.01
    assert found.differences["ddp"] == 0


def test_the_table_says_who_trained_something_else(capsys, monkeypatch):
    build = spoiled("ddp+zero", without_messages)
    monkeypatch.setattr(bench.models, "make", lambda name: build())
    assert main(["bench", "--contestants", "ddp", "ddp+zero", "--rounds", "1", "--update", "fused"]) == 0
    assert "\nddp+zero has not trained what the others have" in capsys.readouterr().out


# The arithmetic.


def test_ratios_are_taken_within_a_round():
    """The machine was ten times slower in the second round; the quotient of the medians would be 3.5."""
    assert pairwise([2.0, 20.0, 7.0], [1.0, 10.0, 2.0]).median == 2.0
    assert pairwise([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5) == Spread(3.0, 2.0, 4.0)
    assert spread([0.5]) == Spread(0.5, 0.5, 0.5)


@pytest.mark.parametrize("ours, theirs", [([1.0], [1.0, 2.0]), ([], [])])
def test_rounds_that_do_not_pair_up_are_refused(ours, theirs):
    with pytest.raises(ValueError, match="rounds"):
        pairwise(ours, theirs)


def test_a_step_is_over_when_the_last_rank_is():
    assert slowest([[1.0, 5.0], [2.0, 4.0]]) == [2.0, 5.0]


def test_targets_compare_with_the_better_and_only_with_who_was_there():
    seconds = {"ddp": [2.0, 2.0], "ddp+zero": [1.0, 1.0], "zerolab-1": [1.5, 1.5], "zerolab-3": [1.0, 1.0]}
    (found,) = targets.times(seconds)
    assert (found.contestant, found.what, found.found) == ("zerolab-1", "step, of ddp+zero's", 1.5)
    assert not found.held and found.verdict == "missed by 0.500"
    (found,) = targets.times({"zerolab-3": [0.7], "fully_shard": [1.0]})
    assert found.held and found.verdict == "held"
    assert found.floor is None
    (found,) = targets.times({"zerolab-3": [0.7, 0.8], "fully_shard": [1.0, 1.0], "floor": [0.5, 0.7]})
    assert found.floor == pytest.approx(0.6)


def test_wire_and_states_are_held_against_formulas():
    assert [targets.minimum_wire_bytes(1000, 4, stage) for stage in range(4)] == [6000, 6000, 6000, 9000]
    weight = Footprint(1, 6300, states_bytes=8000.0, formula_bytes=7000.0, states_match=False)
    wire, states = targets.bytes_held_and_sent({"zerolab-1": weight}, {"zerolab-1": 1}, 1000, 4)
    assert (wire.found, wire.held) == (1.05, False)
    assert (states.found, states.held) == (1000.0, False)


def test_a_profile_is_split_by_whose_code_it_was():
    """A built-in function counts to its caller: collectives' are wire, the unit's are engine."""
    package = Path(zerolab.__file__).parent
    file = lambda name: (str(package / name), 1, "f")
    torch_file = lambda name: (f"/x/site-packages/torch/{name}", 1, "f")
    called = lambda seconds: (1, 1, seconds, seconds)
    stats = {
        file("unit/grads.py"): (1, 1, 1.0, 9.0, {}),
        file("collectives/direct.py"): (1, 1, 2.0, 9.0, {}),
        file("models.py"): (1, 1, 4.0, 9.0, {}),
        torch_file("distributed/distributed_c10d.py"): (1, 1, 8.0, 9.0, {}),
        torch_file("optim/adam.py"): (1, 1, 16.0, 9.0, {}),
        ("~", 0, "<acquire>"): (1, 1, 128.0, 128.0, {(threading.__file__, 1, "wait"): called(128.0)}),
        ("~", 0, "<copy_>"): (
            2, 2, 96.0, 96.0,
            {file("unit/grads.py"): called(32.0), torch_file("nn/functional.py"): called(64.0)},
        ),
    }  # fmt: skip
    shares = overhead.attribute(SimpleNamespace(stats=stats), steps=2)
    assert (shares.compute, shares.wire, shares.engine) == (
        (4 + 16 + 64) / 2,
        (2 + 8 + 128) / 2,
        (1 + 32) / 2,
    )
    assert shares.engine_share == 33 / 255


# The sweep.


def test_the_sweep_lets_ranks_and_parameters_grow(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sweep, "WORLD_SIZES", (1, 2))
    monkeypatch.setattr(sweep, "SHAPES", ((64, 1), (64, 2)))
    flags = ["--sweep", "--model", "gpt-tiny", "--rounds", "1", "--out", str(tmp_path)]
    assert main(["bench", *flags]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "sweep.txt").read_text("utf-8") in printed
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / "sweep.json").read_text("utf-8"))
    ranks, sizes = saved["sweep"]["by_ranks"], saved["sweep"]["by_parameters"]
    tiny_psi = sum(p.numel() for p in models.make("gpt-tiny").parameters())
    psis = [sum(p.numel() for p in sweep.gpt(64, depth).parameters()) for depth in (1, 2)]
    assert [(point["world_size"], point["psi"]) for point in ranks] == [(1, tiny_psi), (2, tiny_psi)]
    assert [(point["world_size"], point["psi"]) for point in sizes] == [(2, psi) for psi in psis]
    for point in (*ranks, *sizes):
        assert tuple(point["extra_cpu_seconds"]) == tuple(point["ratios"]) == ("ddp", *STAGES)
    for point, count in ((ranks[1], 3 * 4 * tiny_psi / 2), (sizes[1], psis[1])):  # by byte, by parameter
        seconds = point["extra_cpu_seconds"]["zerolab-3"]["median"]
        cost = f"{1e3 * seconds:.1f} ({1e9 * seconds / count:.2f})"
        assert re.search(rf"^ +2 +{point['psi']:,} .* {re.escape(cost)}$", printed, re.M)
    assert re.search(r"^ +1 .* \(-\)$", printed, re.M)  # alone in the world, no byte is sent


def test_a_model_that_does_not_fit_is_left_out_aloud(monkeypatch, capsys):
    monkeypatch.setattr(sweep, "memory_bytes", lambda: 10**9)
    monkeypatch.setattr(sweep, "SHAPES", ((768, 14),))
    assert sweep.by_parameters(settings(FLOOR, "zerolab-0")) == []
    assert "a GPT of 100M is left out: 2 ranks would take up to 6 GB" in capsys.readouterr().out

"""Promise: bytes can be traced to events, and events to slices of parameters and to the lines that did it."""

import itertools
import json
import linecache
import re
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from support import ROOT, subjects
from torch import nn

import zerolab
from zerolab import models
from zerolab.trace import CONTROL, Event, Trace

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def train(build, stage: int, steps: int = 1) -> tuple[list[Event], str]:
    """The events of the last step on this rank, and all of the trace as text."""
    model = build()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        if isinstance(model, models.SoftmaxRegression):
            loss = model(torch.ones(2, 784), torch.tensor([1, 2]))
        else:
            loss = model(*subjects.tokens(step, optimizer.rank))
        loss.backward()
        optimizer.step()
    return optimizer.trace.step(steps - 1), optimizer.trace.text()


def test_a_reader_can_point_at_the_line_that_says_which_slices_are_whose():
    """Weights 0 to 3935 are rank 0's, the whole bias is rank 1's: gradients and update."""
    (first, text), (second, _) = zerolab.launch(train, 2, models.SoftmaxRegression, 1)
    owned = {0: ("weight[0:3936]",), 1: ("weight[3936:7840]", "bias[0:10]")}
    for rank, events in enumerate((first, second)):
        found = {event.op: event for event in events if event.phase != CONTROL}
        assert list(found) == ["reduce_scatter", "update", "all_gather"]
        assert all(event.slices == owned[rank] for event in found.values())
        assert found["update"].shape == (3936,) and found["reduce_scatter"].shape == (7872,)
        assert {event.dtype for event in found.values()} == {"float32"}
        assert [event.phase for event in found.values()] == ["backward", "step", "step"]
    update = re.search(r"^  step .*update .*\n( +weight\[0:3936\])$", text, re.MULTILINE)
    assert update and "float32" in update.group() and "(3936,)" in update.group()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_event_names_a_line_of_this_repository_that_does_it(stage: int):
    for events, text in zerolab.launch(train, 2, subjects.gpt, stage, steps=2):
        shown = re.findall(r"(\S+\.py):(\d+)$", text, re.MULTILINE)
        assert len(shown) == len([line for line in text.splitlines() if " logical " in line])
        for event in events:
            path, line = event.where.rsplit(":", 1)
            source = linecache.getline(str(ROOT / path), int(line))
            assert source.strip(), event.where
            if event.phase != CONTROL and event.op != "update":
                assert path == f"zerolab/stages/stage{stage}.py"
                assert event.op in source


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_slices_of_a_steps_updates_are_every_trained_element_once(stage: int):
    sizes = {name: p.numel() for name, p in subjects.gpt().named_parameters()}
    ranks = [events for events, _ in zerolab.launch(train, 3, subjects.gpt, stage)]
    for owners in ranks[:1] if stage == 0 else [ranks]:
        pieces: dict[str, list[range]] = {name: [] for name in sizes}
        for event in (event for events in ([owners] if stage == 0 else owners) for event in events):
            for piece in event.slices if event.op == "update" else ():
                name, start, stop = re.fullmatch(r"(.+)\[(\d+):(\d+)\]", piece).groups()
                pieces[name].append(range(int(start), int(stop)))
        elements = {name: sorted(i for piece in ranges for i in piece) for name, ranges in pieces.items()}
        assert elements == {name: list(range(size)) for name, size in sizes.items()}


def test_phases_and_order_are_those_of_a_step():
    """Stage 3: gather going in, gather and reduce coming back, update; the root gathered once."""
    events = [e for e in zerolab.launch(train, 2, subjects.gpt, 3, steps=2)[0][0] if e.phase != CONTROL]
    assert [e.unit for e in events if (e.phase, e.op) == ("forward", "all_gather")] == [
        "root", "blocks.0", "blocks.1",
    ]  # fmt: skip
    backward = [(e.op, e.unit) for e in events if e.phase == "backward"]
    assert [unit for op, unit in backward if op == "all_gather"] == ["blocks.1", "blocks.0"]
    assert sorted(unit for op, unit in backward if op == "reduce_scatter") == ["blocks.0", "blocks.1", "root"]
    assert {(e.op, e.phase) for e in events if e.phase == "step"} == {("update", "step")}
    assert all(event.start <= event.end for event in events)


# Trace, without an engine.


def filled(steps: int, keep_steps: int) -> Trace:
    trace = Trace(keep_steps=keep_steps, clock=iter(range(100)).__next__)
    for _ in range(steps):
        trace.next_step()
        trace.finish(trace.begin("all_gather", "root", torch.zeros(4), ["w[0:4]"], logical_bytes=16))
    return trace


def test_old_steps_are_forgotten():
    """The step under way and as many before it as were asked for."""
    trace = filled(steps=5, keep_steps=2)
    assert {event.step for event in trace.events} == {2, 3, 4}
    assert trace.step(4)[0].logical_bytes == 16
    assert "step 4" in trace.text() and "step 0" not in trace.text()
    with pytest.raises(ValueError, match=r"step 0 is not in this trace, which remembers steps \[2, 3, 4\]"):
        trace.step(0)


def test_a_long_run_keeps_a_short_trace():
    def look() -> int:
        model = nn.Linear(2, 2)
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=1, lr=0.1)
        for _ in range(20):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return len(optimizer.trace.events)

    assert zerolab.launch(look, 1)[0] <= 5 * 4


def test_an_event_under_way_says_so():
    trace = filled(steps=1, keep_steps=2)
    event = trace.begin("reduce_scatter", "root", torch.zeros(4), wire_bytes=8)
    assert event.seconds is None
    assert "in flight" in str(event) and "in flight" in trace.text()
    trace.finish(event)
    assert event.seconds == 1 and "in flight" not in trace.text()


def test_traffic_is_the_sum_of_events_and_control_stands_apart():
    trace = filled(steps=2, keep_steps=4)
    trace.begin("all_gather", "root", torch.zeros(4), logical_bytes=5, wire_bytes=3)
    trace.begin("exchange", "all", torch.zeros(4), wire_bytes=1000, phase=CONTROL)
    traffic = trace.traffic()
    assert (traffic.logical_bytes, traffic.wire_bytes, traffic.control_bytes) == (21, 3, 1000)
    assert list(traffic.by_op) == ["all_gather"]
    assert traffic == trace.traffic(1) != trace.traffic(0)


def test_where_is_the_callers_own_line():
    trace = Trace()
    event = trace.begin("update", "root", torch.zeros(1))
    path, line = event.where.rsplit(":", 1)
    assert Path(path).name == Path(__file__).name
    assert "trace.begin" in linecache.getline(__file__, int(line))


# The timeline.


def train_and_save(folder: Path) -> list[Event]:
    model = subjects.gpt()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1, reduces_in_flight=2)
    for step in range(2):
        model(*subjects.tokens(step, optimizer.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.trace.save(folder / f"{optimizer.rank}.json")
    return optimizer.trace.events


def spans(file: Path, rank: int) -> list[dict]:
    events = json.loads(file.read_text())["traceEvents"]
    return [event for event in events if event["pid"] == rank and event["ph"] == "X"]


def test_a_timeline_has_every_event_of_every_rank(tmp_path: Path):
    by_rank = zerolab.launch(train_and_save, 2, tmp_path)
    zerolab.trace.merge(sorted(tmp_path.glob("?.json")), tmp_path / "merged.json")
    for rank, events in enumerate(by_rank):
        drawn = [span for span in spans(tmp_path / "merged.json", rank) if "args" in span]
        assert [span["name"] for span in drawn] == [
            f"{e.op} {e.unit}" for e in sorted(events, key=lambda e: e.start)
        ]
        assert sum(span["args"]["wire_bytes"] for span in drawn) == sum(e.wire_bytes for e in events) > 0
        assert all((span["tid"] == 0) == span["name"].startswith("update") for span in drawn)
        assert sum(span["dur"] for span in drawn) == pytest.approx(1e6 * sum(e.seconds for e in events))


def test_a_lane_shows_one_thing_at_a_time_and_updates_lie_in_the_step(tmp_path: Path):
    zerolab.launch(train_and_save, 2, tmp_path)
    drawn = spans(tmp_path / "0.json", 0)
    lanes = {span["tid"] for span in drawn}
    assert len(lanes) > 2, "collectives were under way at once"
    for lane in lanes - {0}:
        ends = [(span["ts"], span["ts"] + span["dur"]) for span in drawn if span["tid"] == lane]
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(sorted(ends)))
    phases = [span for span in drawn if "args" not in span]
    step = ["forward", "backward", "forward", "step"]
    assert [span["name"] for span in phases] == ["setup", *step, *step, "forward"]
    updates = [span for span in drawn if span["name"].startswith("update")]
    assert updates and all(within(u, [p for p in phases if p["name"] == "step"]) for u in updates)


def within(inner: dict, spans: list[dict]) -> bool:
    end = inner["ts"] + inner["dur"]
    return any(each["ts"] <= inner["ts"] and end <= each["ts"] + each["dur"] for each in spans)

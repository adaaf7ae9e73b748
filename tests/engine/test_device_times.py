"""Promise: on a GPU a trace has the GPU's own times, and no step waits for the GPU to learn them.

The GPU is a stand-in here: a queue whose work takes as long as it is told, and whose marks can be read only
after somebody has waited for them.
"""

import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from support import hostile, training
from support.hostile import LateWork, hostile_backend
from support.user_models import Net

import zerolab
from zerolab.timeline import GPU_LANES
from zerolab.trace import CONTROL, Event, Trace

for module in (sys.modules[__name__], hostile):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Queue:
    """A GPU's queue: how many milliseconds of work it has had, and up to where the CPU has waited for it."""

    def __init__(self):
        self.queued_ms = self.reached_ms = 0.0
        self.waits = 0

    def work(self, milliseconds: float) -> None:
        self.queued_ms += milliseconds

    def mark(self) -> "QueueMark":
        return QueueMark(self, self.queued_ms)


class QueueMark:
    """As torch.cuda.Event: elapsed_time is an error before both marks were reached."""

    def __init__(self, queue: Queue, at_ms: float):
        self.queue, self.at_ms = queue, at_ms

    def synchronize(self) -> None:
        self.queue.waits += 1
        self.queue.reached_ms = max(self.queue.reached_ms, self.at_ms)

    def elapsed_time(self, end_event: "QueueMark") -> float:
        if max(self.at_ms, end_event.at_ms) > self.queue.reached_ms:
            raise RuntimeError("both events must be completed before their times are read")
        return end_event.at_ms - self.at_ms

    def __reduce__(self):
        raise TypeError("a timing event of a GPU cannot be pickled")


def traced(queue: Queue) -> Trace:
    trace = Trace()
    trace.mark = queue.mark
    trace.next_step()
    return trace


def gather(trace: Trace, queue: Queue, beside_ms: float, waiting_ms: float, duration=None) -> Event:
    """A collective, computation beside it, and the wait for what is left of it."""
    event = trace.begin("all_gather", "root", torch.zeros(4), ["w[0:4]"])
    wait = event.device.around(lambda: queue.work(waiting_ms), duration)
    queue.work(beside_ms)
    wait()
    trace.finish(event)
    return event


def test_what_the_computation_waited_for_is_exposed_and_the_rest_is_hidden():
    queue = Queue()
    event = gather(traced(queue), queue, beside_ms=5, waiting_ms=2)
    queue.work(100)
    assert (event.device_ms, event.exposed_ms, event.hidden_ms) == (7, 2, 5)
    assert "(GPU 7.000 ms, 2.000 ms exposed)" in str(event)


def test_the_librarys_own_measurement_is_taken_where_there_is_one():
    queue = Queue()
    event = gather(traced(queue), queue, beside_ms=5, waiting_ms=2, duration=lambda: 3.0)
    assert (event.device_ms, event.exposed_ms, event.hidden_ms) == (3, 2, 1)


def test_an_update_takes_from_its_begin_to_its_end():
    queue = Queue()
    trace = traced(queue)
    event = trace.begin("update", "root", torch.zeros(4))
    assert event.device_ms is None and event.hidden_ms is None
    queue.work(4)
    trace.finish(event)
    assert (event.device_ms, event.exposed_ms) == (4, 0)


def test_without_a_gpu_there_are_no_such_times_and_small_messages_never_have_any():
    event = Trace().begin("all_gather", "root", torch.zeros(4))
    assert event.device_ms is event.exposed_ms is event.hidden_ms is None
    assert traced(Queue()).begin("exchange", "norms", torch.zeros(1), phase=CONTROL).device is None


def test_an_event_that_is_sent_elsewhere_has_its_times_with_it():
    queue = Queue()
    event = pickle.loads(pickle.dumps(gather(traced(queue), queue, beside_ms=5, waiting_ms=2)))
    assert (event.device_ms, event.exposed_ms, event.hidden_ms) == (7, 2, 5)


def test_the_timeline_shows_when_the_gpu_did_it(tmp_path: Path):
    """In milliseconds before the end: the phase 10 to 3, in it the gather 9 to 3, of which a wait 4 to 3."""
    queue = Queue()
    trace = traced(queue)
    trace._clock = lambda: 50.0
    trace.enter("forward")
    queue.work(1)
    gather(trace, queue, beside_ms=5, waiting_ms=1)
    trace.enter("step")
    queue.work(3)
    trace.save(tmp_path / "trace.json")
    drawn = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {each["tid"]: each["args"]["name"] for each in drawn if each["ph"] == "M"}
    assert names[GPU_LANES] == "rank 0: GPU compute" and names[0] == "rank 0: compute"
    assert names[GPU_LANES + 1] == "rank 0: GPU communication"
    found = {each["name"]: each for each in drawn if each["ph"] == "X" and each["tid"] >= GPU_LANES}
    before_end = lambda name: pytest.approx((50e6 - found[name]["ts"], found[name]["dur"]), abs=1)
    assert before_end("forward") == (10_000, 7_000) and before_end("step") == (3_000, 3_000)
    assert before_end("wait for all_gather root") == (4_000, 1_000)
    assert before_end("all_gather root") == (9_000, 6_000)
    assert found["all_gather root"]["tid"] == GPU_LANES + 1
    assert found["all_gather root"]["args"]["hidden_ms"] == 5


# In training.


def train(stage: int, waiting_ms: float) -> tuple[int, list[Event], list[dict]]:
    """Two steps in which every wait for a collective takes the GPU as long; how often the CPU waited."""
    queue, before = Queue(), LateWork.wait

    def wait(self: LateWork) -> None:
        queue.work(waiting_ms)
        before(self)

    LateWork.wait = wait
    with hostile_backend():
        optimizer = zerolab.ZeroOptimizer(Net(), torch.optim.SGD, stage=stage, lr=0.1)
        optimizer.trace.mark = queue.mark
        for step in range(2):
            optimizer.model(training.micro_batch(step, optimizer.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.engine.finish_gathers()
    waits = queue.waits
    return waits, optimizer.trace.step(1), optimizer.trace.timeline()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_step_waits_for_the_gpu_to_learn_its_times(stage: int):
    for waits, events, timeline in zerolab.launch(train, 2, stage, 1.5, backend="gloo", timeout=60):
        assert waits == 0
        collectives = [each for each in events if each.phase != CONTROL and each.op != "update"]
        assert collectives and all(each.exposed_ms == 1.5 <= each.device_ms for each in collectives)
        assert all(each.device_ms == 0 for each in events if each.op == "update")
        spans = [each for each in timeline if each["ph"] == "X" and each["tid"] >= GPU_LANES]
        shown = [each["name"] for each in spans if "args" in each and each["args"]["step"] == 1]
        assert sorted(shown) == sorted(f"{e.op} {e.unit}" for e in events if e.phase != CONTROL)


def test_a_duration_is_asked_for_only_where_the_library_measures_it(monkeypatch):
    from zerolab.collectives.native import _timed

    native = SimpleNamespace(wait=lambda: None, _get_duration=lambda: 8.0)
    queue = Queue()
    for setting, expected in (("0", 0.0), ("1", 8.0)):
        monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", setting)
        event = traced(queue).begin("all_gather", "root", torch.zeros(4))
        _timed(event, native)()
        event.device.end()
        assert event.device_ms == expected
    event.device = None
    assert _timed(event, native) is native.wait

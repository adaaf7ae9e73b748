"""A collective waits for every stream that wrote to its buffer; memory is kept until all are done with it.

Streams here are stand-ins that write down what they are asked; tests/gpu/test_gpu.py has real ones.
"""

import sys
from dataclasses import dataclass, field

import cloudpickle
import torch
from support.training import WIDTH
from support.user_models import Net

import zerolab
from zerolab import devices
from zerolab.unit.producers import Producers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

GPU = torch.device("cuda", 0)


@dataclass(eq=False)
class Stream:
    waited_for: list = field(default_factory=list)

    def wait_stream(self, other: "Stream") -> None:
        self.waited_for.append(other)


@dataclass
class Gpu:
    """Knows which stream is current, as `zerolab.devices.current_stream` does."""

    stream: Stream

    def current(self, index: int) -> Stream:
        assert index == GPU.index
        return self.stream


@dataclass
class Buffer:
    streams: list = field(default_factory=list)

    def record_stream(self, stream: Stream) -> None:
        self.streams.append(stream)


def written_on(streams: list[Stream], gpu: Gpu) -> Producers:
    producers = Producers(GPU, gpu.current)
    for gpu.stream in streams:
        producers.note()
    return producers


def test_a_reduction_waits_for_every_other_stream_once():
    side, main = Stream(), Stream()
    gpu, buffer = Gpu(main), Buffer()
    producers = written_on([side, main, side, main], gpu)
    producers.join(buffer)
    assert main.waited_for == [side] and side.waited_for == []
    assert set(buffer.streams) == {side, main}


def test_the_next_pass_begins_with_none():
    side, main = Stream(), Stream()
    gpu, buffer = Gpu(main), Buffer()
    producers = written_on([side, main], gpu)
    producers.join(Buffer())
    producers.join(buffer)
    assert main.waited_for == [side] and buffer.streams == []


def test_memory_is_held_for_the_streams_that_were_at_work():
    side, main = Stream(), Stream()
    buffer = Buffer()
    written_on([side, main], Gpu(main)).hold(buffer)
    assert set(buffer.streams) == {side, main} and main.waited_for == []


def test_cpus_have_no_streams():
    producers = Producers(torch.device("cpu"))
    producers.note()
    producers.join(Buffer())


def test_each_stream_has_one_object(monkeypatch):
    """torch.cuda.current_stream() builds a new one each time, and a step asks several hundred times."""
    built, current = [], [7]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: built.append(index) or Stream())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[0], raising=False)
    monkeypatch.setattr(devices, "_streams", {})
    main, again = devices.current_stream(0), devices.current_stream(0)
    current[0] = 8
    side, elsewhere = devices.current_stream(0), devices.current_stream(1)
    current[0] = 7
    assert main is again is devices.current_stream(0)
    assert len({id(stream) for stream in (main, side, elsewhere)}) == 3
    assert built == [0, 0, 1]


def test_the_engine_joins_before_it_reduces_and_holds_what_it_lets_go():
    """On two CPU ranks whose units are told that they are on a GPU, for their streams alone."""

    def train() -> list[list[str]]:
        seen: list[str] = []
        optimizer = zerolab.ZeroOptimizer(Net(), torch.optim.SGD, stage=3, lr=0.1)
        for unit in optimizer.units:

            class Spy(Producers):
                name = unit.name

                def join(self, *buffers):
                    seen.append(f"join {self.name} {len(self._streams)}")
                    self._streams.clear()

                def hold(self, buffer):
                    if self._streams:
                        seen.append(f"hold {self.name} {buffer.numel() > 0}")

            unit.grads.producers = unit.grads.arrivals.producers = Spy(GPU, Gpu(Stream()).current)
        reduce_grads = optimizer.stage.reduce_grads
        optimizer.stage.reduce_grads = lambda unit: seen.append(f"reduce {unit.name}") or reduce_grads(unit)
        optimizer.model(torch.ones(2, WIDTH)).sum().backward()
        return [[each for each in seen if unit.name in each] for unit in optimizer.units]

    for by_unit in zerolab.launch(train, 2, timeout=60):
        for name, seen in zip(("blocks.0", "blocks.1", "blocks.2", "root"), by_unit, strict=True):
            moved = [f"join {name} 1", f"hold {name} True"]  # its gradients, then its parameters are let go
            reduced = [f"join {name} 1", f"reduce {name}", f"hold {name} True"]  # and lets its gradients go
            assert seen == moved + reduced

"""Inputs of every form are kept and restored; what cannot be kept as promised is refused by name."""

import copy
import dataclasses
import errno
import functools
import gc
import os
import pickle
import resource
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import cloudpickle
import pytest
import torch
from support import meshes
from torch import nn

import zerolab
from zerolab import Checkpointing, TensorParallel
from zerolab.checkpointing.inputs import KeptCopy
from zerolab.residual import activation_checkpoints

for module in (sys.modules[__name__], meshes):
    cloudpickle.register_pickle_by_value(module)  # spares the ranks the import of pytest


def stream(*shape: int) -> torch.Tensor:
    """An input as a block before this one would make it."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_() * 1.0


def mixed_inputs(x, rest, *, mask, scale=2.0):
    """Tensors in a list and by keyword, of several dtypes, beside other values."""
    pair, (double, none) = rest
    assert none is None
    return (x * pair["half"].float() * mask).tanh().sum() * scale + (double.float() * x).sum()


def both_ways(partition: bool, offload: str | None) -> tuple:
    """The gradients with and without checkpointing, for contiguous and other inputs; and what was kept."""
    torch.manual_seed(0)
    parallel = TensorParallel(torch.distributed.group.WORLD) if partition else None
    checkpointing = Checkpointing(parallel, offload)
    found = []
    for run in (lambda block, *args, **kwargs: block(*args, **kwargs), checkpointing):
        x, half = stream(3, 5), torch.linspace(0, 1, 15, dtype=torch.float16).view(3, 5)
        transposed = stream(5, 3).t()  # with strides of its own
        leaves = (x, transposed)
        for leaf in leaves:
            leaf.retain_grad()
        mask = torch.arange(15).view(3, 5) % 2 == 0
        loss = run(mixed_inputs, x, [{"half": half}, (torch.ones(3, 5).double(), None)], mask=mask)
        loss = loss + run(lambda t: (t * t.new_tensor(t.stride(0))).sum(), transposed)
        held = checkpointing.held_bytes + checkpointing.offloaded_bytes
        loss.backward()
        found.append(([leaf.grad for leaf in leaves], loss.item(), held))
    return found, checkpointing.held_bytes + checkpointing.offloaded_bytes


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("partition", [False, True])
def test_nested_and_keyword_inputs_of_any_dtype_and_stride(partition: bool, offload: str | None):
    for (plain, checked), after in zerolab.launch(both_ways, 2, partition, offload, timeout=60):
        assert plain[1] == checked[1]
        assert all(map(torch.equal, plain[0], checked[0]))
        numels = {4: 15 + 15, 2: 15, 8: 15, 1: 15}  # by bytes of an element
        parts = {4: 8 + 8, 2: 8, 8: 8, 1: 8} if partition else numels
        assert (plain[2], checked[2]) == (0, sum(size * numel for size, numel in parts.items()))
        assert after == 0


def test_dropout_repeats_its_mask():
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    x = stream(4, 8)
    grads = []
    for run in (nn.Module.__call__, Checkpointing(), Checkpointing(offload="cpu")):
        block.zero_grad()
        torch.manual_seed(1)
        run(block, x).square().sum().backward(retain_graph=True)
        grads.append([p.grad.clone() for p in block.parameters()])
    assert all(map(torch.equal, grads[0], grads[1])) and all(map(torch.equal, grads[0], grads[2]))


def test_a_graph_may_be_used_twice():
    weight = nn.Parameter(torch.ones(5))
    for checkpointing in (Checkpointing(), Checkpointing(offload="cpu")):
        loss = checkpointing(lambda x: (x * weight).sin().sum(), stream(3, 5))
        first = torch.autograd.grad(loss, weight, retain_graph=True)
        assert torch.equal(*first, *torch.autograd.grad(loss, weight))


def test_without_gradients_nothing_is_kept():
    checkpointing = Checkpointing(offload="cpu")
    with torch.no_grad():
        output = checkpointing(torch.sin, stream(3))
    assert torch.equal(output, stream(3).sin()) and checkpointing.written_bytes == 0


class Boom(Exception):
    pass


@pytest.mark.parametrize("offload", [None, "cpu", "disk"])
def test_nothing_is_left_after_an_exception(offload: str | None, tmp_path: Path):
    checkpointing = Checkpointing(offload=offload, offload_dir=tmp_path if offload == "disk" else None)
    calls = []

    def raises_again(x):
        calls.append(1)
        if len(calls) == 2:  # in backward
            raise Boom
        return x.sin()

    def raises(x):
        raise Boom

    with pytest.raises(Boom):
        checkpointing(raises, checkpointing(torch.sin, stream(3)))
    gc.collect()
    assert checkpointing.held_bytes + checkpointing.offloaded_bytes == 0
    loss = checkpointing(raises_again, checkpointing(torch.sin, stream(3))).sum()
    with pytest.raises(Boom):
        loss.backward()
    del loss
    gc.collect()
    assert checkpointing.held_bytes + checkpointing.offloaded_bytes == 0


class Adding:
    """An object that adds what it holds, as a callable and by a method."""

    def __init__(self, held: torch.Tensor):
        self.held = [held]

    def __call__(self, y):
        return y + self.held[0]

    def add(self, y):
        return y + self.held[0]


@dataclasses.dataclass
class Data:
    held: torch.Tensor


class Slots:
    __slots__ = ("empty", "held")

    def __init__(self, held: torch.Tensor):
        self.held = held


class Plain:
    def __init__(self, held: torch.Tensor):
        self.held = {"list": [held]}


class Attributes(dict):
    """A dict of a class of its own, which PyTorch's pytrees do not open."""


def captures(kind: str):
    x = stream(2, 3)
    inner = lambda y: y + x
    return {
        "a function in a closure": lambda y: inner(y),
        "an object": Adding(x),
        "an object's method": Adding(x).add,
        "partial of an object": functools.partial(Adding(x)),
        "an object in a closure": (lambda held: lambda y: held(y))(Adding(x)),
        "a dataclass in a closure": (lambda data: lambda y: y + data.held)(Data(x)),
        "a namespace in a closure": (lambda data: lambda y: y + data.x)(types.SimpleNamespace(x=x)),
        "slots in a closure": (lambda data: lambda y: y + data.held)(Slots(x)),
        "a set in a closure": (lambda data: lambda y: y + sum(data))({x}),
        "a dict of a class in a closure": (lambda data: lambda y: y + data["x"])(Attributes(x=x)),
        "closure": lambda y: y + x,
        "list in a closure": (lambda held: lambda y: y + held[0])([x]),
        "default": lambda y, other=x: y + other,
        "partial": functools.partial(torch.add, x),
        "partial keyword": functools.partial(torch.add, other=x),
        "partial of a closure": functools.partial(lambda z, y: y + x + z, 1),
    }[kind]


CAPTURES = ["closure", "list in a closure", "default", "partial", "partial keyword", "partial of a closure"]
CAPTURES += ["a function in a closure", "an object", "an object's method", "partial of an object"]
CAPTURES += [
    "a dataclass in a closure",
    "a namespace in a closure",
    "slots in a closure",
    "a set in a closure",
]
CAPTURES += ["a dict of a class in a closure"]


@pytest.mark.parametrize("kind", [*CAPTURES, "an object in a closure"])
def test_a_tensor_in_a_closure_is_refused(kind: str):
    with pytest.raises(ValueError, match=r"a tensor \[2, 3\] in its closure.*pass it as an argument"):
        Checkpointing(offload="cpu")(captures(kind), stream(2, 3))


ARGUMENTS = {
    "Data": Data,
    "Slots": Slots,
    "Plain": Plain,
    "SimpleNamespace": lambda x: types.SimpleNamespace(x=[x]),
    "frozenset": lambda x: frozenset([x]),
    "Attributes": lambda x: Attributes(x=x),
    "function": lambda x: lambda: x,
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_an_activation_inside_an_argument_is_refused(kind: str):
    def block(y, holder):
        pytest.fail("the block was run")

    expected = rf"an argument of .*block is a {kind} with an activation \[2, 3\] in it, .*or in a list"
    with pytest.raises(ValueError, match=expected):
        Checkpointing(offload="cpu")(block, stream(2, 3), {"holder": [ARGUMENTS[kind](stream(2, 3))]})


def test_arguments_without_activations_pass():
    """Modules and parameters are kept anyway; a program that a closure reaches has tensors of other kinds."""
    program = Plain(torch.ones(3))
    norm_and_mask = Data(nn.Parameter(torch.ones(3))), Data(torch.ones(3))
    settings = [*norm_and_mask, Plain(3), Slots(None), {"a", 1}, torch.float32, "text", None]

    def block(y, layer, settings, norm):
        return norm(layer(y)) * len(program.held) * settings[1].held + settings[0].held

    x = stream(2, 3)
    Checkpointing()(block, x, nn.Linear(3, 3), settings, norm=torch.tanh).sum().backward()
    assert settings[0].held.grad is not None


class Model(nn.Module):
    """A module whose method is checkpointed, and a function that calls itself."""

    def __init__(self):
        super().__init__()
        self.layer, self.mask = nn.Linear(3, 3), torch.ones(3)

    def block(self, x):
        return self.layer(x) * self.mask

    def forward(self, x):
        def twice(x, again=True):
            return twice(self.block(x), False) if again else x

        return Checkpointing()(twice, Checkpointing()(self.block, x))


def test_a_function_that_calls_itself_is_searched_once():
    def halved(x, times: int):
        return halved(x / 2, times - 1) if times else x

    x = stream(2)
    assert torch.equal(Checkpointing()(halved, x, 3), x / 8)


def test_what_a_module_holds_is_its_own():
    model = Model()
    model(stream(2, 3)).sum().backward()
    assert model.layer.weight.grad is not None


def test_a_parameter_in_a_closure_is_not_refused():
    weight = nn.Parameter(torch.ones(3))
    Checkpointing()(lambda y: y * weight, stream(2, 3)).sum().backward()
    assert weight.grad is not None


def test_a_block_that_writes_to_its_input_is_refused():
    with pytest.raises(RuntimeError, match=r"writes to one of its inputs.*clone the input"):
        Checkpointing(offload="cpu")(lambda x: x.mul_(2).sin(), stream(3))


def test_an_input_that_is_changed_later_is_refused_or_was_copied():
    x = stream(3)
    loss = Checkpointing()(lambda y: y.sin() * 1.0, x).sum()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place after the block had run"):
        loss.backward()
    grads = []
    for change in (False, True):
        leaf = torch.ones(3, requires_grad=True)
        x = leaf * 1.0
        loss = Checkpointing(offload="cpu")(lambda y: y.sin() * 1.0, x).sum()
        if change:
            x.mul_(2)
        loss.backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def with_inputs_of_its_own(rank_of_difference: int) -> None:
    parallel = TensorParallel(torch.distributed.group.WORLD)
    x = stream(4, 4) + (parallel.rank == rank_of_difference)
    Checkpointing(parallel)(lambda y: y.sin() * 1.0, x).sum().backward()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_have_different_inputs_get_an_error(rank: int):
    assert zerolab.launch(with_inputs_of_its_own, 2, 2, timeout=60) == [None, None]
    with pytest.raises(zerolab.WorkerError, match=r"an input \[4, 4\] .* was not the same on all 2"):
        zerolab.launch(with_inputs_of_its_own, 2, rank, timeout=60)


def test_settings_that_make_no_sense():
    with pytest.raises(ValueError, match="offload is 'ssd': choose from None, 'cpu', 'disk'"):
        Checkpointing(offload="ssd")
    with pytest.raises(TypeError, match="partition is bool: pass the TensorParallel"):
        Checkpointing(partition=True)


def test_folders_that_cannot_be_written_to(tmp_path: Path):
    with pytest.raises(ValueError, match='offload is "disk" and offload_dir None: pass a folder'):
        Checkpointing(offload="disk")
    with pytest.raises(ValueError, match=r"offload_dir is .*missing, which does not exist"):
        Checkpointing(offload="disk", offload_dir=tmp_path / "missing")
    with pytest.raises(ValueError, match=r"offload_dir is .* and offload 'cpu'"):
        Checkpointing(offload="cpu", offload_dir=tmp_path)


def test_a_full_disk_is_an_error_before_a_byte_is_written(tmp_path: Path, monkeypatch):
    def full(file: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpointing = Checkpointing(offload="disk", offload_dir=tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"offload_dir .* has no room for 11 bytes more"):
        checkpointing(torch.sin, stream(3))  # 12 bytes, of which one was allocated at the start
    assert checkpointing.written_bytes == checkpointing.offloaded_bytes == 0


@pytest.mark.parametrize("offload_bytes", [0, 10**6])
def test_a_disk_without_room_is_refused_before_anything_starts(tmp_path: Path, offload_bytes: int):
    room = offload_bytes - 1 if offload_bytes else 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(
            OSError, match=rf"has no room for {offload_bytes or 1:,} bytes more .* are free\)"
        ):
            Checkpointing(offload="disk", offload_dir=tmp_path, offload_bytes=offload_bytes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_with_room_reserved_no_more_is_allocated(tmp_path: Path, monkeypatch):
    blocks, numel = 3, 1001
    need = activation_checkpoints(blocks, hidden=numel, batch=1, seq=1, offload=True, bytes_per_element=4)
    checkpointing = Checkpointing(offload="disk", offload_dir=tmp_path, offload_bytes=int(need.outside_bytes))
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("more was allocated"))
    for _ in range(2):
        x = stream(numel)
        for _ in range(blocks):
            x = checkpointing(torch.sin, x)
        assert checkpointing.offloaded_bytes == need.outside_bytes
        x.sum().backward()
    assert checkpointing.offloaded_bytes == 0


def test_with_the_room_a_rehearsal_counts_and_writes_nothing(tmp_path: Path):
    checkpointing = Checkpointing(offload="disk", offload_dir=tmp_path, offload_bytes=64)
    x = torch.zeros(1000, device="meta", requires_grad=True)
    checkpointing(torch.sin, checkpointing(torch.sin, x))
    assert checkpointing.written_bytes == 2 * 4000


@pytest.mark.parametrize(
    "offload, nbytes, error",
    [
        ("disk", -1, "offload_bytes is -1 and offload 'disk': it must be 0 or more"),
        ("cpu", 8, "offload_bytes is 8 and offload 'cpu': it must be 0 or more, and is for offload=\"disk\""),
        (None, 8, "offload_bytes is 8 and offload None"),
        ("disk", 1.5, "offload_bytes is 1.5: pass a whole number of bytes"),
        ("disk", True, "offload_bytes is True: pass a whole number of bytes"),
    ],
)
def test_room_that_makes_no_sense(tmp_path: Path, offload: str | None, nbytes: int, error: str):
    with pytest.raises((ValueError, TypeError)) as caught:
        Checkpointing(
            offload=offload, offload_dir=tmp_path if offload == "disk" else None, offload_bytes=nbytes
        )
    assert str(caught.value).startswith(error)


def test_the_room_is_pickled_with_the_rest(tmp_path: Path):
    checkpointing = Checkpointing(offload="disk", offload_dir=tmp_path, offload_bytes=64)
    assert pickle.loads(pickle.dumps(checkpointing)).offload_bytes == 64


def test_a_copied_model_keeps_its_inputs_in_the_same_place_and_pickles():
    model = zerolab.models.GPT(vocab=4, width=4, depth=1, heads=1, context=4)
    model.checkpointing = Checkpointing(offload="cpu")
    assert copy.deepcopy(model).checkpointing is model.checkpointing
    assert pickle.loads(pickle.dumps(model)).checkpointing.offload == "cpu"


class Kinds(NamedTuple):
    """An input that an operation of PyTorch does not take, and how the block makes a float of it."""

    make: Callable[[], torch.Tensor]
    to_float: Callable[[torch.Tensor], torch.Tensor] = lambda value: value.float()


KINDS = {
    "empty": Kinds(lambda: torch.empty(0, 5)),
    "uint16": Kinds(lambda: torch.arange(15).to(torch.uint16)),
    "uint64": Kinds(lambda: torch.arange(15).to(torch.uint64)),
    "float8": Kinds(lambda: torch.linspace(-1, 1, 15).to(torch.float8_e4m3fn)),
    "bool": Kinds(lambda: torch.arange(15) % 2 == 0),
    "conjugated": Kinds(lambda: torch.complex(torch.ones(15), torch.arange(15.0)).conj(), torch.view_as_real),
    "negated": Kinds(lambda: torch.complex(torch.ones(15), torch.arange(15.0)).conj().imag),
}


def a_step_with(name: str, partition: bool, offload: str | None, folder: Path) -> tuple[list, list]:
    """The gradient and the loss with and without checkpointing."""
    parallel = TensorParallel(torch.distributed.group.WORLD) if partition else None
    checkpointing = Checkpointing(parallel, offload, folder if offload == "disk" else None)
    kind, found = KINDS[name], []

    def block(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return x.sum() * (kind.to_float(value.resolve_conj()).sum() + 1)

    for run in (lambda block, *args: block(*args), checkpointing):
        x = stream(3, 5)
        x.retain_grad()
        loss = run(block, x, kind.make())
        loss.backward()
        found.append([loss.item(), x.grad.tolist()])
    return tuple(found)


@pytest.mark.parametrize("offload", [None, "cpu", "disk"])
@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_an_input_of_any_kind_comes_back(name: str, partition: bool, offload: str | None, tmp_path: Path):
    for plain, checked in zerolab.launch(a_step_with, 2, name, partition, offload, tmp_path, timeout=60):
        assert plain == checked


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_a_sparse_input_is_refused(offload: str | None):
    checkpointing = Checkpointing(offload=offload)
    with pytest.raises(TypeError, match=r"input \[3, 3\] .* layout torch\.sparse_coo: pass input\.to_dense"):
        checkpointing(lambda x, m: (x * m.to_dense()).sum(), stream(3, 3), torch.eye(3).to_sparse())


@pytest.mark.parametrize("name", ["a column of two", "fewer columns", "expanded", "overlapping"])
def test_a_copied_input_has_its_strides_and_gaps(name: str):
    """The order of a sum, and its last bits, depend on them."""
    values = torch.randn(202, 203, generator=torch.Generator().manual_seed(0))
    tensor = {
        "a column of two": values[:, ::2],
        "fewer columns": values[::2, :101],
        "expanded": values[:, :1].expand(202, 7),
        "overlapping": values.as_strided((5, 4), (2, 1)),
    }[name]
    block = lambda x: x / x.norm(dim=-1, keepdim=True) + x.sum(0) + x.var(0)
    kept = KeptCopy(tensor, None, None).restore()
    assert torch.equal(kept, tensor)
    assert kept.stride() == tensor.stride() or name == "overlapping"
    assert torch.equal(block(kept), block(tensor)) or name == "overlapping"

"""Serialize a call and its result by value, and name the part of a call that cannot be serialized."""

import functools
import importlib
import inspect
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import cloudpickle

if TYPE_CHECKING:  # the process that launches need not have it
    import torch


class Payload(NamedTuple):
    """A call, pickled, and the modules of zerolab that it refers to."""

    pickled: bytes
    modules: list[str]


class Pickler(cloudpickle.Pickler):
    """cloudpickle's. It also keeps the file of code, pickles more modules, and notes what is of `__main__`.

    Args: to_cpu: write tensors of other devices as tensors of the CPU.
    """

    def __init__(self, file: BinaryIO, to_cpu: bool = False) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.to_cpu = to_cpu
        self.of_main: dict[str, Any] = {}  # its classes and functions, by qualified name
        self.modules: set[str] = set()  # of what was pickled

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value whose own way fails, or is not wanted."""
        self.modules.add(module_of(value))
        if isinstance(value, CodeType):
            return code_of_file, (value.co_filename, *self.dispatch_table[CodeType](value))
        if is_unusual_module(value):
            return importlib.import_module, (value.__name__,)
        if self.to_cpu and is_on_a_device(value):
            value = value.cpu()
            return reduce_as_integers(value) or value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if (reduced := reduce_as_integers(value)) is not None:
            return reduced
        if isinstance(value, type | FunctionType) and is_found_in_main(value):
            self.of_main[value.__qualname__] = value
        return super().reducer_override(value)


def code_of_file(file: str, build: Callable[..., CodeType], arguments: tuple) -> CodeType:
    """Return code with the name of its file, by which stacks find its lines.

    From version 3.1.3 on cloudpickle writes "<dynamic-code>" for the code of every file.
    """
    return build(*arguments).replace(co_filename=file)


def module_of(value: Any) -> str:
    """The name of a module, or of the one that defines a class, a function, or an object's class."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return name if isinstance(name, str) else ""


def is_found_in_main(value: type | FunctionType) -> bool:
    """Whether pickle, which looks a class or function up by its name, would find it in the main module."""
    if value.__module__ != "__main__":
        return False
    try:
        return functools.reduce(getattr, value.__qualname__.split("."), sys.modules["__main__"]) is value
    except AttributeError:  # of a class inside a function
        return False


def is_unusual_module(value: Any) -> bool:
    """Whether a value is a module of a class of its own, as torch.backends.cudnn, that an import finds."""
    unusual = isinstance(value, ModuleType) and type(value) is not ModuleType
    return unusual and sys.modules.get(value.__name__) is value


def is_on_a_device(value: Any) -> bool:
    """Return whether a value is a tensor with memory that is not the CPU's."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
        return False  # a parameter is pickled by its data, which is asked about in its turn
    return value.device.type not in ("cpu", "meta")


def reduce_as_integers(value: Any) -> tuple | None:
    """For a tensor of a newer dtype, as float8 and uint16, how to pickle it: as integers, with its dtype.

    PyTorch pickles such a tensor, and torch.load cannot read what it wrote.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_meta:
        return None
    if value.dtype in torch.storage._dtype_to_storage_type_map():
        return None
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.itemsize]
    return view_as, (value.detach().view(same_size), value.dtype, value.requires_grad)


def view_as(integers: "torch.Tensor", dtype: "torch.dtype", requires_grad: bool) -> "torch.Tensor":
    """Return a tensor of another dtype with the same bits."""
    return integers.view(dtype).requires_grad_(requires_grad)


def dumps(value: Any) -> bytes:
    """Pickle a value for another process on this machine. pickle.loads reads it."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def dump(value: Any, file: BinaryIO) -> None:
    """Pickle what a rank sends to the caller; tensors arrive on the CPU, whatever device they are on here."""
    Pickler(file, to_cpu=True).dump(value)


def load_payload(file: BinaryIO) -> tuple[Callable, tuple, dict]:
    """Return the call, in a rank. Its classes and functions take their places in the main module.

    Pickle finds them there by name, as it does in a script that runs by itself: ranks can save and send them.
    """
    unpickler = pickle.Unpickler(file)  # one for both, because the second refers to parts of the first
    call = unpickler.load()
    for name, value in unpickler.load().items():
        value.__qualname__ = name  # cloudpickle forgets in which class a class stood
        if "." not in name:
            setattr(sys.modules["__main__"], name, value)
    return call


def pickle_payload(fn: Callable, args: tuple, kwargs: dict) -> Payload:
    """Return the pickled call. Functions and classes of the caller's main module travel by value.

    Raises: TypeError that names the argument, or the variable that the function uses, which cannot be
    pickled.
    """
    try:
        file = io.BytesIO()
        pickler = Pickler(file)
        pickler.dump((fn, args, kwargs))
        pickler.dump(dict(pickler.of_main))
        return Payload(
            file.getvalue(), sorted(each for each in pickler.modules if each.partition(".")[0] == "zerolab")
        )
    except Exception as error:
        names = [name for name, value in _parts(fn, args, kwargs) if not _pickles(value)]
        raise TypeError(
            f"launch cannot send {' and '.join(names) or 'the call'} to another process ({error}); "
            "create it inside the function, or pass what it is made from"
        ) from error


def _parts(fn: Callable, args: tuple, kwargs: dict) -> Iterator[tuple[str, Any]]:
    """Every piece of the call with the name a reader would give it."""
    for index, value in enumerate(args):
        yield f"argument {index} (a {type(value).__name__})", value
    for name, value in kwargs.items():
        yield f"argument {name!r} (a {type(value).__name__})", value
    if inspect.isfunction(fn):
        used = inspect.getclosurevars(fn)
        for name, value in {**used.nonlocals, **used.globals}.items():
            yield f"the variable {name!r} (a {type(value).__name__}) that {fn.__name__} uses", value
    else:
        yield f"fn (a {type(fn).__name__})", fn


def _pickles(value: Any) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True

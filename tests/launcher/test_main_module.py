"""Promise: what a script or a cell defines is sent to ranks, and ranks can save and send it in their turn."""

import textwrap
from pathlib import Path

import pytest
import torch
from conftest import run_script

import zerolab

MAIN_PROGRAM = """
    import multiprocessing, sys
    import zerolab
    print("main module runs")

    class Point:
        def __init__(self, x): self.x = x
        def double(self): return Point(2 * self.x)

    class Refused(Exception): pass

    OFFSET = Point(5)

    def work(point):
        assert not multiprocessing.get_start_method(allow_none=True)
        assert not hasattr(sys.modules["__main__"], "REQUEST"), "the fork server is nobody's main module"
        return Point(point.double().x + OFFSET.x)

    def refuse():
        raise Refused("no")

    result = zerolab.launch(work, 2, Point(1), backend="gloo")[1]
    print(isinstance(result, Point), result.x, multiprocessing.get_start_method(allow_none=True))
    try:
        zerolab.launch(refuse, 2, backend="gloo")
    except zerolab.WorkerError as error:
        print(isinstance(error.__cause__, Refused), error.__cause__.args)
"""


@pytest.mark.parametrize("stdin", [False, True], ids=["script without a guard", "main module without a file"])
def test_what_the_main_module_defines_travels_by_value(tmp_path: Path, stdin: bool):
    printed = run_script(MAIN_PROGRAM, tmp_path, stdin)
    assert printed.splitlines() == ["main module runs", "True 7 None", "True ('no',)"]


PICKLING_PROGRAM = """
    import dataclasses, enum, torch, torch.distributed as dist, zerolab

    @dataclasses.dataclass
    class Config:
        rank: int

    class Colour(enum.Enum):
        RED = 1

    class Outer:
        class Inner: pass

    class Net(torch.nn.Linear): pass

    def double(x): return 2 * x

    def work(folder):
        rank, gathered = dist.get_rank(), [None, None]
        dist.all_gather_object(gathered, (Config(rank), Colour.RED, Outer.Inner, double))
        assert gathered == [(Config(each), Colour.RED, Outer.Inner, double) for each in range(2)]
        net = Net(3, 3)
        torch.save(net, f"{folder}/net-{rank}")
        assert type(torch.load(f"{folder}/net-{rank}", weights_only=False)) is Net
        optimizer = zerolab.ZeroOptimizer(net, torch.optim.SGD, lr=0.1)
        zerolab.save(optimizer, f"{folder}/run", extra={"config": Config(rank)})
        return net

    nets = zerolab.launch(work, 2, ".", backend="gloo")
    print(type(nets[0]) is Net, type(torch.load("net-1", weights_only=False)) is Net)
"""


@pytest.mark.parametrize("stdin", [False, True], ids=["script without a guard", "main module without a file"])
def test_ranks_pickle_what_the_main_module_defines(tmp_path: Path, stdin: bool):
    assert run_script(PICKLING_PROGRAM, tmp_path, stdin) == "True True\n"


SPAWNING_PROGRAM = """
    import torch, zerolab

    class Squares(torch.utils.data.Dataset):
        def __len__(self): return 4
        def __getitem__(self, index): return index**2

    def load():
        loader = torch.utils.data.DataLoader(Squares(), num_workers=1, multiprocessing_context="spawn")
        return [int(value) for value in loader]
"""
GUARDED = """
    if __name__ == "__main__":
        print(zerolab.launch(load, 1, backend="gloo"))
"""
UNGUARDED = """
    zerolab.launch(load, 1, backend="gloo")
"""


def test_a_data_loader_of_a_rank_may_spawn_its_workers(tmp_path: Path):
    assert run_script(SPAWNING_PROGRAM + GUARDED, tmp_path) == "[[0, 1, 4, 9]]\n"


def test_a_script_without_a_guard_that_spawns_is_told_of_the_guard(tmp_path: Path):
    """Its worker imports the script, as Python has it; the launch in there must not start ranks again."""
    with pytest.raises(AssertionError, match="launch was called while multiprocessing imports this script"):
        run_script(SPAWNING_PROGRAM + UNGUARDED, tmp_path)


def test_a_program_that_python_finds_by_its_name_may_spawn_too(tmp_path: Path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "load.py").write_text(textwrap.dedent(SPAWNING_PROGRAM + GUARDED))
    by_name = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'package.load'], check=True)"
    assert run_script(by_name, tmp_path) == "[[0, 1, 4, 9]]\n"


@pytest.mark.parametrize("name", ["cudnn", "cuda", "mkldnn", "opt_einsum", "quantized", "mps"])
def test_a_function_may_name_the_settings_of_a_backend(name: str):
    """Some of these modules are instances of classes of their own, which pickle does not know."""
    settings = getattr(torch.backends, name)
    assert zerolab.launch(lambda: settings.__name__, 1) == [f"torch.backends.{name}"]


def test_a_function_may_set_a_backend_by_its_full_name():
    def set_it() -> bool:
        torch.backends.cudnn.benchmark = True
        return torch.backends.cudnn.benchmark

    assert zerolab.launch(set_it, 1) == [True] and not torch.backends.cudnn.benchmark

"""Promise: bad input ends in an error that says what was given, what is allowed and the way out. Every rank
raises it, before anything changes, and nothing hangs.
"""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerolab
from zerolab.__main__ import main
from zerolab.optimizer.probe.subject import OWN_KEYWORDS

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

Adam = torch.optim.Adam
TIMEOUT_SECONDS = 60  # against a hang: no test is meant to come near it


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_the_error_about_an_unknown_keyword_lists_all_of_the_optimizers_own():
    parameters = inspect.signature(zerolab.ZeroOptimizer).parameters.values()
    named = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
    assert sorted(OWN_KEYWORDS) == sorted(set(named) - {"model", "optimizer_class"})


# What can be refused before any rank is asked.


def frozen_model() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(
    "model, optimizer_class, keywords, kind, message",
    [
        (nn.Linear, Adam, {}, TypeError, "model is type, not a torch.nn.Module: pass the module to train"),
        ([], Adam, {}, TypeError, "model is list, not a torch.nn.Module"),
        (frozen_model(), Adam, {}, ValueError, "the Linear has no trainable parameters: .*requires_grad_"),
        (nn.ReLU(), Adam, {}, ValueError, "the ReLU has no trainable parameters: build it with some"),
        (None, Adam, {"stage": 4}, ValueError, "stage is 4: choose from 0, 1, 2, 3"),
        (None, Adam, {"stage": -1}, ValueError, "stage is -1: choose from 0, 1, 2, 3"),
        (None, Adam, {"stage": "2"}, ValueError, "stage is '2': choose from 0, 1, 2, 3"),
        (None, Adam, {"stage": True}, ValueError, "stage is True: choose from 0, 1, 2, 3"),
        (None, Adam, {"stage": 2.0}, ValueError, "stage is 2.0: choose from 0, 1, 2, 3"),
        (None, Adam, {"stage": 3e-4}, ValueError, "stage is 0.0003: .* pass the optimizer's settings by"),
        (None, Adam, {"prefetc": 2}, TypeError, "argument 'prefetc'. ZeroOptimizer's own keywords are"),
        (None, Adam, {"stage": None}, ValueError, "stage is None: choose from 0, 1, 2, 3"),
        (None, Adam, {"precision": "fp8"}, ValueError, "precision is 'fp8': choose from .*'?fp32"),
        (None, Adam, {"precision": None}, ValueError, "precision is None: choose from"),
        (None, Adam, {"prefetch": -1}, ValueError, "prefetch is -1: pass a whole number, 0 to wait"),
        (None, Adam, {"prefetch": 1.5}, ValueError, "prefetch is 1.5: pass a whole number"),
        (None, Adam, {"prefetch": True}, ValueError, "prefetch is True: pass a whole number"),
        (None, Adam, {"reduces_in_flight": -2}, ValueError, "reduces_in_flight is -2: pass a whole number"),
        (None, Adam, {"bucket_bytes": 3}, ValueError, "bucket_bytes is 3: .* of at least 4, .* or None"),
        (None, Adam, {"bucket_bytes": 0}, ValueError, "bucket_bytes is 0: .* of at least 4"),
        (None, Adam, {"bucket_bytes": -8}, ValueError, "bucket_bytes is -8: .* of at least 4"),
        (None, Adam, {"bucket_bytes": 64.0}, TypeError, "bucket_bytes is 64.0: pass a whole number"),
        (None, Adam, {"bucket_bytes": True}, TypeError, "bucket_bytes is True: pass a whole number"),
        (None, Adam, {"bucket_bytes": "1MB"}, TypeError, "bucket_bytes is '1MB': pass a whole number"),
        (None, "Adam", {}, TypeError, "optimizer_class is 'Adam', not a torch.optim.Optimizer class"),
        (None, nn.Linear, {}, TypeError, "optimizer_class is <class.*, as in ZeroOptimizer"),
        (None, lambda p: p, {}, TypeError, "not a torch.optim.Optimizer class: pass the class and its"),
        (None, Adam([torch.ones(1)]), {}, TypeError, "optimizer_class is an object of class Adam, not a"),
        (None, Adam, {"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
        (None, Adam, {"momentum": 0.9}, TypeError, "momentum"),
        (None, Adam, {"params": []}, ValueError, "params is empty: pass some of model.parameters"),
        (None, Adam, {"params": [{"params": []}]}, ValueError, "params is empty"),
        (None, Adam, {"params": nn.Parameter(torch.ones(2))}, TypeError, "params is one tensor: pass a list"),
        (None, Adam, {"params": ["weight"]}, TypeError, "params holds a str: pass parameters"),
        (None, Adam, {"params": "weight"}, TypeError, "params is 'weight': pass parameters"),
        (None, Adam, {"params": 3}, TypeError, "params is 3: pass parameters"),
        (None, Adam, {"params": Adam}, TypeError, r"the class Adam: pass params=zerolab.matrices_by\(Adam\)"),
        (
            None,
            Adam,
            {"params": {"params": []}},
            TypeError,
            r"params is one dict: groups are dicts in a list",
        ),
        (None, Adam, {"params": [{"lr": 1}]}, ValueError, "group 0 has 'lr' and no 'params': groups are"),
        (None, Adam, {"params": [{"params": []}, 1]}, TypeError, "parameter group 1 is a int: groups are"),
        (None, Adam, {"params": [(Adam, [])]}, TypeError, r"params holds a list: .*params=\[{'params'"),
        (None, Adam, {"params": [torch.ones(2)]}, TypeError, "params holds a Tensor: pass parameters"),
        (
            None,
            Adam,
            {"params": nn.Linear(3, 1).parameters()},
            ValueError,
            r"shape \(1, 3\) that is not",
        ),
    ],
)
def test_what_is_not_a_training_is_refused(model, optimizer_class, keywords: dict, kind: type, message: str):
    model = nn.Linear(2, 2) if model is None else model
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    before = [parameter.data_ptr() for parameter in parameters]
    with pytest.raises(kind, match=message):
        zerolab.ZeroOptimizer(model, optimizer_class, **keywords)
    assert [parameter.data_ptr() for parameter in parameters] == before


def test_a_lazy_layer_is_refused_until_the_model_was_called_once():
    def train() -> str:
        model = nn.Sequential(nn.LazyLinear(3))
        with pytest.raises(ValueError, match=r"parameter 0\.weight has no shape yet") as refused:
            zerolab.ZeroOptimizer(model, Adam, stage=3)
        model(torch.ones(1, 2))  # the way out
        zerolab.ZeroOptimizer(model, Adam, stage=3)
        return str(refused.value)

    assert "call the model once, with a batch" in zerolab.launch(train, 1, timeout=TIMEOUT_SECONDS)[0]


def test_parameters_that_other_processes_share_are_refused():
    model = nn.Linear(2, 2)
    model.bias.share_memory_()
    with pytest.raises(ValueError, match="parameter bias is in memory that other processes share"):
        zerolab.ZeroOptimizer(model, torch.optim.Adam)


@pytest.mark.parametrize("in_two_groups", (False, True))
def test_a_parameter_that_is_listed_twice_is_refused_by_name(in_two_groups: bool):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    lists = [list(each.parameters()) for each in model]
    params = [{"params": each} for each in lists] if in_two_groups else [p for each in lists for p in each]
    with pytest.raises(ValueError, match=r"params lists 0.weight twice: .*dict.fromkeys"):
        zerolab.ZeroOptimizer(model, Adam, params=params)


def test_without_a_process_group_the_error_names_two_ways_to_one():
    with pytest.raises(
        RuntimeError, match=r"no process group: .*zerolab.launch\(.*zerolab.init_process_group"
    ):
        zerolab.ZeroOptimizer(nn.Linear(2, 2), Adam)


@pytest.mark.parametrize(
    "keywords, kind, message",
    [
        ({"stage": 7}, ValueError, "stage is 7: choose from 0, 1, 2, 3"),
        ({"world_size": 0}, ValueError, "world_size must be .*got 0"),
        ({"world_size": -2}, ValueError, "world_size must be .*got -2"),
        ({"world_size": 2.0}, TypeError, "world_size must be an int.*got 2.0"),
        ({"world_size": "2"}, TypeError, "world_size must be an int.*got '2'"),
        ({"steps": 0}, ValueError, "steps is 0: pass a whole number of 1 or more"),
        ({"steps": 1.5}, ValueError, "steps is 1.5: pass a whole number of 1 or more"),
        ({"optimizer_class": "Adam"}, TypeError, "optimizer_class is 'Adam', not a torch.optim.Optimizer"),
        ({"optimizer_class": torch.optim.LBFGS}, ValueError, "LBFGS cannot be sharded"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
        (
            {"model_fn": frozen_model},
            ValueError,
            "model_fn was given without inputs: pass inputs",
        ),
    ],
)
def test_verify_refuses_before_it_starts_a_process(keywords: dict, kind: type, message: str):
    with pytest.raises(kind, match=message):
        zerolab.verify(**keywords)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--stage 7", "stage is 7: choose from 0, 1, 2, 3"),
        ("--stage -1", "stage is -1: choose from 0, 1, 2, 3"),
        ("--world-size 0", "world_size must be"),
        ("--world-size 100000", "100000"),
        ("--steps 0", "steps is 0: pass a whole number of 1 or more"),
        ("--optimizer Adom", "--optimizer is 'Adom': name a torch.optim class, as adam or SGD"),
        ("--optimizer lr_scheduler", "lr_scheduler"),
        ("--optimizer LBFGS", "LBFGS cannot be sharded"),
        ("--stage 0 7 --world-size 1", "stage is 7: choose from 0, 1, 2, 3"),
    ],
)
def test_the_command_answers_in_one_line_and_exit_code_2(flags: str, message: str, capsys):
    assert main(["verify", *flags.split()]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("zerolab verify: ") and printed.err.count("\n") == 1
    assert message in printed.err
    assert printed.out == "", "nothing is begun that cannot be finished"


@pytest.mark.parametrize("flags", ["--stage two", "--world-size 1.5", "--colour blue"])
def test_what_argparse_refuses_is_named_too(flags: str, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["verify", *flags.split()])
    assert ended.value.code == 2
    assert flags.split()[-1] in capsys.readouterr().err


def test_the_real_command_too():
    environment = os.environ | {"PYTHONPATH": str(Path(zerolab.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "zerolab", "verify", "--stage", "7"],
        env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "zerolab verify: stage is 7: choose from 0, 1, 2, 3\n"


# What only the ranks can find out, together.


def everybodys_error(construct: Callable) -> list[str]:
    """What each of three ranks is told when each builds what ``construct(rank)`` says."""

    def attempt() -> str:
        try:
            construct(dist.get_rank())
        except (RuntimeError, TypeError, ValueError) as error:
            return str(error)
        return "nothing was refused"

    return zerolab.launch(attempt, 3, timeout=TIMEOUT_SECONDS)


def layers(*widths: int, bias: bool = True) -> nn.Module:
    return nn.Sequential(*(nn.Linear(before, after, bias=bias) for before, after in pairwise(widths)))


def another_width(rank: int):
    zerolab.ZeroOptimizer(layers(4, 4, 5 if rank == 2 else 4), Adam)


def one_layer_less(rank: int):
    zerolab.ZeroOptimizer(layers(*[4] * (2 if rank == 1 else 3)), Adam)


def no_bias(rank: int):
    zerolab.ZeroOptimizer(layers(4, 4, bias=rank != 1), Adam)


def frozen_on_one(rank: int):
    model = layers(4, 4, 4)
    model[1].bias.requires_grad_(rank != 1)
    zerolab.ZeroOptimizer(model, Adam)


def another_stage(rank: int):
    zerolab.ZeroOptimizer(layers(4, 4), Adam, stage=1 + (rank == 2))


def another_optimizer(rank: int):
    zerolab.ZeroOptimizer(layers(4, 4), torch.optim.AdamW if rank else Adam)


def another_learning_rate(rank: int):
    zerolab.ZeroOptimizer(layers(4, 4), Adam, lr=0.1 * (1 + rank))


def another_precision(rank: int):
    zerolab.ZeroOptimizer(layers(4, 4), Adam, precision="mixed" if rank == 1 else "fp32")


def other_betas(rank: int):
    zerolab.ZeroOptimizer(layers(4, 4), Adam, betas=(0.9, 0.99 if rank == 2 else 0.999))


def another_tie(rank: int):
    model = layers(4, 4, 4, 4)
    model[2].weight = model[rank % 2].weight
    zerolab.ZeroOptimizer(model, Adam)


def other_units(rank: int):
    model = layers(4, 4, 4)
    zerolab.ZeroOptimizer(model, Adam, units=[model[rank % 2]])


def other_groups(rank: int):
    model = layers(4, 4, 4)
    zerolab.ZeroOptimizer(model, Adam, params=model[rank % 2].parameters())


def another_rate_in_a_group(rank: int):
    model = layers(4, 4)
    zerolab.ZeroOptimizer(model, Adam, params=[{"params": list(model.parameters()), "lr": 0.1 + rank}])


def another_layout(rank: int):
    model = torch.nn.Conv2d(2, 3, 2)
    zerolab.ZeroOptimizer(model.to(memory_format=torch.channels_last) if rank == 1 else model, Adam)


def another_prefetch(rank: int):
    zerolab.ZeroOptimizer(layers(4, 4), Adam, stage=3, prefetch=rank % 2)


def another_bucket(rank: int):
    zerolab.ZeroOptimizer(layers(4, 4), Adam, bucket_bytes=64 if rank == 1 else None)


def another_rate_in_a_tensor(rank: int):
    zerolab.ZeroOptimizer(layers(4, 4), Adam, lr=torch.tensor(0.5 + rank))


def another_class_of_that_name(rank: int):
    kind = type("Adam", (Adam,), {"__module__": "elsewhere"}) if rank == 2 else Adam
    zerolab.ZeroOptimizer(layers(4, 4), kind)


@pytest.mark.parametrize(
    "construct, said",
    [
        (another_layout, ["rank 0 has weight (3, 2, 2, 2)", "rank 1 has", "with strides (8, 1, 4, 2)"]),
        (another_prefetch, ["rank 0 has prefetch 0", "rank 1 has prefetch 1"]),
        (another_bucket, ["rank 0 has bucket_bytes None", "rank 1 has bucket_bytes 64"]),
        (another_rate_in_a_tensor, ["rank 0 has", "lr=0.5", "rank 1 has", "lr=1.5"]),
        (another_class_of_that_name, ["torch.optim.adam.Adam(", "rank 2 has", "elsewhere.Adam("]),
        (another_width, [r"1.weight (4, 4)", r"rank 2 has 1.weight (5, 4)"]),
        (one_layer_less, ["rank 0 has 1.weight (4, 4)", "rank 1 has"]),
        (no_bias, ["rank 0 has 0.bias (4,)", "rank 1 has"]),
        (frozen_on_one, ["1.bias (4,)", "rank 1 has 1.bias (4,)", "frozen"]),
        (another_stage, ["rank 0 has Stage1", "rank 2 has Stage2"]),
        (another_optimizer, ["rank 0 has", "Adam(", "rank 1 has", "AdamW("]),
        (another_learning_rate, ["lr=0.1", "rank 1 has", "lr=0.2"]),
        (another_precision, ["rank 0 has Stage2 in fp32", "rank 1 has Stage2 in mixed"]),
        (other_betas, ["betas=(0.9, 0.999)", "rank 2 has", "betas=(0.9, 0.99)"]),
        (another_tie, ["rank 0 has 0.bias (4,)", "rank 1 has 0.weight (4, 4)"]),
        (other_units, ["rank 0 has", "in unit", "rank 1 has"]),
        (other_groups, ["rank 0 has", "rank 1 has"]),
        (another_rate_in_a_group, ["rank 0 has", "rank 1 has"]),
    ],
)
def test_ranks_that_differ_are_refused_on_every_rank(construct: Callable, said: list[str]):
    errors = everybodys_error(construct)
    assert errors[0] == errors[1] == errors[2]
    assert "ranks disagree about" in errors[0] and "Every rank must build the same model" in errors[0]
    assert all(words in errors[0] for words in said), errors[0]


def test_a_second_optimizer_on_the_same_model_is_refused():
    def twice(rank: int):
        model = layers(4, 4)
        kept = zerolab.ZeroOptimizer(model, Adam)
        zerolab.ZeroOptimizer(model, Adam)
        del kept

    for error in everybodys_error(twice):
        assert error.startswith("this model has a ZeroOptimizer already: use that one, or build")


def test_a_rank_outside_the_group_is_refused():
    def construct(rank: int):
        group = dist.new_group([0, 1])
        zerolab.ZeroOptimizer(layers(4, 4), Adam, process_group=group)

    errors = everybodys_error(construct)
    assert errors[:2] == ["nothing was refused"] * 2
    assert "this rank is not a member of the process_group given: build the optimizer on its" in errors[2]


@pytest.mark.parametrize("max_norm, norm_type", [(-1.0, 2.0), (float("nan"), 2.0), (1.0, 0.0), (1.0, -1.0)])
def test_a_norm_that_is_none_is_refused(max_norm: float, norm_type: float):
    def clip(rank: int):
        model = layers(4, 4)
        optimizer = zerolab.ZeroOptimizer(model, Adam)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.clip_grad_norm_(max_norm, norm_type)

    for error in everybodys_error(clip):
        assert str(max_norm) in error and str(norm_type) in error and "pass max_norm >= 0" in error


@pytest.mark.parametrize(
    ("norm_type", "shown"), [("max", "'max'"), (None, "None"), ([2], "a list"), (torch.ones(2), "a Tensor")]
)
def test_a_norm_type_that_is_no_number_is_refused(norm_type, shown: str):
    def clip(rank: int):
        zerolab.ZeroOptimizer(layers(4, 4), Adam).clip_grad_norm_(1.0, norm_type)

    for error in everybodys_error(clip):
        assert f"norm_type is {shown}, not a number" in error


def test_parameters_given_to_clip_are_refused_with_the_way_to_call_it():
    """As torch.nn.utils.clip_grad_norm_(parameters, max_norm) is called."""

    def by_norm(rank: int):
        model = layers(4, 4)
        zerolab.ZeroOptimizer(model, Adam).clip_grad_norm_(model.parameters(), 1.0)

    def by_value(rank: int):
        model = layers(4, 4)
        zerolab.ZeroOptimizer(model, Adam).clip_grad_value_(list(model.parameters()))

    for given, clip in (("max_norm is a generator", by_norm), ("clip_value is a list", by_value)):
        for error in everybodys_error(clip):
            assert f"{given}, not a number: pass the number alone and no parameters" in error


def test_a_scripted_or_traced_module_is_refused():
    inside = nn.Sequential(torch.jit.script(layers(4, 4)), nn.Linear(4, 4))
    traced = torch.jit.trace(layers(4, 4), torch.ones(1, 4))
    for model in (inside, traced):
        with pytest.raises(
            ValueError, match=r"is a (RecursiveScriptModule|TopLevelTracedModule), which runs"
        ):
            zerolab.ZeroOptimizer(model, Adam)  # before it asks for a process group


def test_units_that_are_not_the_models_are_refused():
    def stranger(rank: int):
        zerolab.ZeroOptimizer(layers(4, 4), Adam, units=[nn.Linear(4, 4)])

    def nested(rank: int):
        model = nn.Sequential(layers(4, 4), nn.Linear(4, 4))
        zerolab.ZeroOptimizer(model, Adam, units=[model[0], model[0][0]])

    assert "Linear is not a submodule of the Sequential given: pass modules" in everybodys_error(stranger)[0]
    assert "'0.0' lies inside '0'" in everybodys_error(nested)[0]


def test_a_state_of_another_rank_or_stage_is_refused():
    def swap(rank: int):
        first = zerolab.ZeroOptimizer(layers(4, 4, 4), Adam, stage=1)
        states = [None] * 3
        dist.all_gather_object(states, first.state_dict())
        first.load_state_dict(states[rank])
        first.load_state_dict(states[(rank + 1) % 3])

    for rank, error in enumerate(everybodys_error(swap)):
        assert (
            f"'rank': {(rank + 1) % 3}" in error and f"'rank': {rank}" in error and "load it on the" in error
        )

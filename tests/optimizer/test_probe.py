"""Promise: an optimizer with an elementwise update is used as it is, and any other is refused."""

import functools
import sys

import cloudpickle
import pytest
import torch
from support import odd_optimizers, subjects
from torch import nn

import zerolab
from zerolab.optimizer.probe import state_bytes_per_parameter

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

STEPS = 3
NOT_ELEMENTWISE = {"LBFGS", "Muon", "Adafactor", "SparseAdam"}
ALL = {
    name
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and name != "Optimizer"
}
# Every elementwise class torch has, a later torch's too; and keywords that change an update.
CASES = [
    *((name, {}) for name in sorted(ALL - NOT_ELEMENTWISE)),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def train_all(cases: list) -> list[subjects.Run]:
    return [
        subjects.train_sharded("gpt", 2, getattr(torch.optim, name), STEPS, **defaults)[0]
        for name, defaults in cases
    ]


def train_all_here(cases: list, world_size: int) -> list[subjects.Run]:
    return [
        subjects.train_replicas("gpt", world_size, getattr(torch.optim, name), STEPS, **defaults)[0]
        for name, defaults in cases
    ]


@functools.cache
def sharded_and_whole() -> tuple[list, list]:
    (whole,) = zerolab.launch(train_all_here, 1, CASES, 2)
    return zerolab.launch(train_all, 2, CASES)[1], whole


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{name}{list(given)}" for name, given in CASES])
def test_an_elementwise_optimizer_leaves_the_same_bits(case: int):
    sharded, whole = sharded_and_whole()
    assert subjects.same(sharded[case], whole[case])


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_an_optimizer_that_cannot_be_sharded_is_refused(name: str):
    with pytest.raises(ValueError, match=f"^{name} cannot be sharded: .+pass AdamW, SGD, Muon or another"):
        zerolab.ZeroOptimizer(nn.Linear(4, 4), getattr(torch.optim, name))


def test_a_parameter_that_the_optimizer_does_not_take_is_refused_by_its_shape():
    with pytest.raises(
        ValueError, match=r"^Muon takes parameters of 2 dimensions, and one of shape \(4,\) has 1"
    ):
        zerolab.ZeroOptimizer(nn.Linear(4, 4), torch.optim.Muon)


@pytest.mark.parametrize("kind", odd_optimizers.ELEMENTWISE)
def test_other_peoples_elementwise_optimizers_pass(kind: type):
    assert state_bytes_per_parameter(kind, {}) == {"CountingAdam": 8, "LateState": 4}.get(kind.__name__, 0)


@pytest.mark.parametrize("kind", odd_optimizers.NOT_ELEMENTWISE)
def test_what_depends_on_more_than_one_element_is_refused(kind: type):
    for _ in range(2):  # not only when it is tried first
        with pytest.raises(ValueError, match=f"^{kind.__name__} cannot be sharded: .+pass Adam, AdamW, SGD"):
            state_bytes_per_parameter(kind, {})


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("TensorNorm", "updating a tensor in pieces gave other numbers than updating it whole"),
        ("GlobalNorm", "its update of a parameter depends on its other parameters"),
        ("CountsParameters", "its update of a parameter depends on its other parameters"),
        ("Estimate", "the distance that it keeps in a parameter group depends on which parameters it has"),
        ("Noise", "it draws random numbers"),
        ("Projection", "with gradients: orthogonal"),
    ],
)
def test_the_refusal_says_what_the_update_depends_on(kind: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        state_bytes_per_parameter(getattr(odd_optimizers, kind), {})


def test_state_that_no_checkpoint_could_store_is_refused_before_training():
    with pytest.raises(
        ValueError, match=r"^GlobalState cannot be sharded: .*state.+A checkpoint stores .+change the class"
    ):
        zerolab.ZeroOptimizer(nn.Linear(4, 4), odd_optimizers.GlobalState)


@pytest.mark.parametrize("kind", odd_optimizers.NOT_STORABLE)
def test_an_optimizer_with_state_that_cannot_be_cut_is_not_elementwise(kind: type):
    with pytest.raises(ValueError, match=f"^{kind.__name__} cannot be sharded: "):
        state_bytes_per_parameter(kind, {})


def test_the_error_names_the_state_and_its_shape():
    with pytest.raises(ValueError, match=r"its state 'tensor_step' is a tensor of shape \(1,\)"):
        state_bytes_per_parameter(odd_optimizers.CounterOfOne, {})


def test_a_class_that_wraps_another_optimizer_is_refused_with_a_way_out():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer):
            super().__init__(optimizer.param_groups, optimizer.defaults)

    with pytest.raises(
        ValueError, match=r"Wrapper cannot be sharded: it does not take parameter groups .+pass a"
    ):
        state_bytes_per_parameter(Wrapper, {})


def test_a_class_that_needs_an_option_in_every_group_says_so_itself():
    class Picky(odd_optimizers.SignSGD):
        def __init__(self, groups, lr: float = 0.1):
            if any("use_sign" not in group for group in groups):
                raise ValueError("use_sign must be set")
            super().__init__(groups, lr)

    with pytest.raises(ValueError, match=r"^use_sign must be set$"):
        state_bytes_per_parameter(Picky, {})
    assert state_bytes_per_parameter(Picky, {}, {"use_sign": True}) == 0


def test_a_groups_own_options_are_tried_too():
    """Rprop with its defaults passes, and a group of LARS-like options would not."""

    class Optional(odd_optimizers.TensorNorm):
        def __init__(self, params, lr: float = 0.1, normalize: bool = False):
            super().__init__(params, lr, normalize=normalize)

        def update(self, group, p, gradient):
            return super().update(group, p, gradient) if group["normalize"] else gradient

    assert state_bytes_per_parameter(Optional, {}) == 0
    for defaults, options in (({"normalize": True}, {}), ({}, {"normalize": True})):
        with pytest.raises(ValueError, match="Optional cannot be sharded"):
            state_bytes_per_parameter(Optional, defaults, options)


def test_the_probe_leaves_the_users_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(ValueError):
        state_bytes_per_parameter(odd_optimizers.Noise, {})
    assert torch.equal(torch.rand(2), expected)


def test_the_probe_does_not_depend_on_the_default_device_and_dtype():
    class Fresh(torch.optim.Adam):
        """One that was not tried before."""

    with torch.device("meta"):
        assert state_bytes_per_parameter(Fresh, {}) == 8
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert state_bytes_per_parameter(Fresh, {"lr": 0.5}) == 8
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "name, defaults, k",
    [
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 4),
        ("Adam", {}, 8),
        ("Adam", {"amsgrad": True}, 12),
        ("Adagrad", {}, 4),
        ("RMSprop", {"centered": True, "momentum": 0.9}, 12),
    ],
)
def test_the_probe_measures_the_state_of_a_parameter(name: str, defaults: dict, k: int):
    assert state_bytes_per_parameter(getattr(torch.optim, name), defaults) == k

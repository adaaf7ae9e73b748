"""Promise: the probe tells by trying where parameters may be cut: anywhere, only between them, nowhere."""

import pytest
import torch
from support import odd_optimizers, whole_optimizers
from torch import nn

import zerolab
from zerolab.optimizer.probe import Kind, kind_of, state_bytes_of, state_bytes_per_parameter, verdict_of

ALL = {
    name: each
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and name != "Optimizer"
}
NOT_ELEMENTWISE = {
    "Muon": Kind.BY_PARAMETER,
    "Adafactor": Kind.BY_PARAMETER,
    "LBFGS": Kind.ACROSS_PARAMETERS,
    "SparseAdam": Kind.UNSUITABLE,
}


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_class_of_torch_has_its_kind(name: str):
    assert kind_of(ALL[name], {}) is NOT_ELEMENTWISE.get(name, Kind.ELEMENTWISE)


@pytest.mark.parametrize(
    "name, defaults",
    [
        ("Muon", {"nesterov": False, "weight_decay": 0.0}),
        ("Muon", {"adjust_lr_fn": "match_rms_adamw"}),
        ("Adafactor", {"maximize": True, "weight_decay": 0.1}),
    ],
)
def test_keywords_are_tried_too(name: str, defaults: dict):
    assert kind_of(ALL[name], defaults) is Kind.BY_PARAMETER


@pytest.mark.parametrize("of_class", odd_optimizers.ELEMENTWISE)
def test_an_elementwise_class_may_be_cut_anywhere(of_class: type):
    verdict = verdict_of(of_class, {})
    assert (verdict.kind, verdict.reason, verdict.refusal) == (Kind.ELEMENTWISE, "", "")


@pytest.mark.parametrize("of_class", whole_optimizers.BY_PARAMETER)
def test_a_class_that_looks_at_one_parameter_at_a_time_keeps_it_whole(of_class: type):
    verdict = verdict_of(of_class, {})
    assert (verdict.kind, verdict.refusal) == (Kind.BY_PARAMETER, ""), verdict.reason
    assert verdict.reason  # why it is not elementwise


@pytest.mark.parametrize("of_class", whole_optimizers.ACROSS_PARAMETERS)
def test_a_class_that_looks_at_other_parameters_is_found(of_class: type):
    verdict = verdict_of(of_class, {})
    assert verdict.kind is Kind.ACROSS_PARAMETERS, verdict
    assert verdict.refusal.startswith(f"{of_class.__name__} cannot be sharded: ")
    assert "whole parameter, by its own history alone: pass AdamW, SGD, Muon" in verdict.refusal


@pytest.mark.parametrize("of_class", whole_optimizers.UNSUITABLE)
def test_a_class_that_cannot_be_judged_or_stored_is_refused(of_class: type):
    assert kind_of(of_class, {}) is Kind.UNSUITABLE
    with pytest.raises(ValueError, match=f"^{of_class.__name__} cannot be sharded: "):
        state_bytes_of(of_class, {}, None, (2, 2))


@pytest.mark.parametrize(
    "name, reason",
    [
        ("MeetInOneGroup", "its update of a parameter depends on its other parameters (seen at step 1"),
        ("LargeGlobalNorm", "depends on its other parameters (seen at step 13, with gradients: one large"),
        ("HugeGlobalNorm", "depends on its other parameters (seen at step 2, with gradients: huge"),
        ("SkipsAll", "depends on its other parameters (seen at step 2, with gradients: one not finite"),
        (
            "SharedState",
            "'last' of a parameter depends on its other parameters (seen at step 1, with gradients: smooth",
        ),
        ("ChangesPhase", "its other parameters (seen at step 2, with gradients: steady"),
        ("FailsAlone", "its step failed with some of the parameters, not with all (RuntimeError: stack"),
        ("RareNoise", "it draws random numbers, and every rank would draw others"),
        ("NeedsAClosure", "its step failed (TypeError: NeedsAClosure.step() missing 1 required positional"),
        ("CountsCalls", "two equal runs of it differ: it draws random numbers, or keeps something outside"),
        (
            "Object",
            "its state 'kept' is an object of class object. A checkpoint stores a parameter's state",
        ),
        ("Growing", "the size of its state still changes after 24 steps"),
        ("SizedByValues", "the size of its state depends on more than the shape of a parameter"),
        ("NoUnused", "its step failed with several parameters (RuntimeError: a gradient is missing; seen at"),
    ],
)
def test_the_reason_says_what_was_seen(name: str, reason: str):
    assert reason in verdict_of(getattr(whole_optimizers, name), {}).refusal


@pytest.mark.parametrize("dims, numel", [(1, 200), (2, 14_000), (4, 1_152)])
def test_a_class_that_looks_at_others_where_parameters_are_large_is_found(dims: int, numel: int):
    """It is one for vectors, matrices or kernels of convolutions alone, and stacks them if they are large."""

    class MeetWhereLarge(whole_optimizers.MeetWithOneShape):
        def also(self, group, p, gradient):
            if gradient.dim() != dims:
                raise RuntimeError(f"a parameter of {gradient.dim()} dimensions")
            return super().also(group, p, gradient) if gradient.numel() >= numel else 1.0

    assert kind_of(MeetWhereLarge, {}) is Kind.ACROSS_PARAMETERS


def test_the_reason_is_asked_once(monkeypatch):
    class Fresh(whole_optimizers.MeetInOneGroup):
        """One that was not tried before."""

    first = verdict_of(Fresh, {})
    monkeypatch.setattr(Fresh, "step", None)
    assert verdict_of(Fresh, {}) is first


def test_a_groups_options_decide_too():
    class Optional(whole_optimizers.LargeGlobalNorm):
        def __init__(self, params, lr: float = 0.1, clip: bool = False):
            odd_optimizers.SignSGD.__init__(self, params, lr, clip=clip)

        def also(self, group, p, gradient):
            return super().also(group, p, gradient) if group["clip"] else 1.0

    assert kind_of(Optional, {}) is kind_of(Optional, {"clip": True}, {"clip": False}) is Kind.BY_PARAMETER
    assert (
        kind_of(Optional, {"clip": True}) is kind_of(Optional, {}, {"clip": True}) is Kind.ACROSS_PARAMETERS
    )


def test_foreach_is_tried_as_it_is_asked_for():
    """With foreach some classes stack parameters of one shape. Their bits may depend on each other then."""

    class Stacked(whole_optimizers.MeetWithOneShape):
        def __init__(self, params, lr: float = 0.1, foreach: bool = False):
            odd_optimizers.SignSGD.__init__(self, params, lr, foreach=foreach)

        def also(self, group, p, gradient):
            return super().also(group, p, gradient) if group["foreach"] else 1.0

    assert kind_of(Stacked, {}) is Kind.BY_PARAMETER
    assert (
        kind_of(Stacked, {"foreach": True})
        is kind_of(Stacked, {}, {"foreach": True})
        is Kind.ACROSS_PARAMETERS
    )
    assert kind_of(torch.optim.Adafactor, {"foreach": True}) is Kind.BY_PARAMETER


def test_a_class_that_wraps_another_is_refused_with_a_way_out():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer):
            super().__init__(optimizer.param_groups, optimizer.defaults)

    refusal = verdict_of(Wrapper, {}).refusal
    assert refusal.startswith(
        "Wrapper cannot be sharded: it does not take parameter groups (AttributeError: "
    )
    assert refusal.endswith("pass a class that takes them and wraps no model or other optimizer")


@pytest.mark.parametrize(
    "of_class, taken, refused, error",
    [
        (
            torch.optim.Muon,
            "2",
            (11,),
            "one of shape (11,) has 1 (a smaller one raised ValueError: Muon only supports 2D",
        ),
        (
            whole_optimizers.OnlyMatrices,
            "2",
            (2, 3, 4),
            "has 3 (a smaller one raised ValueError: only matrices): put it in a group",
        ),
        (
            whole_optimizers.OnlyConvolutions,
            "4",
            (6, 7),
            "has 2 (a smaller one raised ValueError: not enough values to unpack",
        ),
        (torch.optim.Adafactor, "0, 1, 2, 3, 4, 5", (1,) * 6, "has 6 (no more than 5 dimensions were tried)"),
    ],
)
def test_a_parameter_with_another_number_of_dimensions_is_refused(of_class, taken, refused, error):
    verdict = verdict_of(of_class, {})
    assert verdict.refusal_of((2,) * int(taken[-1])) == ""
    refusal = verdict.refusal_of(refused)
    assert f"takes parameters of {taken} dimensions, and one of shape " in refusal and error in refusal
    assert refusal.endswith("put it in a group with another optimizer, such as AdamW")
    with pytest.raises(ValueError, match="put it in a group with another optimizer"):
        state_bytes_of(of_class, {}, None, refused)


def test_only_an_elementwise_class_has_state_bytes_of_an_element():
    for of_class in (torch.optim.Muon, whole_optimizers.RowsAndColumns):
        assert kind_of(of_class, {}) is Kind.BY_PARAMETER
        with pytest.raises(ValueError, match=r"cannot be sharded: .+ elementwise update"):
            state_bytes_per_parameter(of_class, {})


def test_a_bias_given_to_muon_is_refused_before_training():
    with pytest.raises(ValueError, match=r"Muon takes parameters of 2 dimensions.+with another optimizer"):
        zerolab.ZeroOptimizer(nn.Linear(4, 4), torch.optim.Muon)


@pytest.mark.parametrize(
    "of_class, defaults, shape, expected",
    [
        (torch.optim.Adam, {}, (6, 7), 8 * 42),
        (torch.optim.SGD, {}, (6, 7), 0),
        (torch.optim.SGD, {"momentum": 0.9}, (7,), 28),
        (torch.optim.Muon, {}, (6, 7), 4 * 42),
        (torch.optim.Adafactor, {}, (300, 20), 4 * (300 + 20)),
        (torch.optim.Adafactor, {}, (300,), 4 * 300),
        (torch.optim.Adafactor, {}, (8, 3, 5), 4 * (8 * 3 + 8 * 5)),
        (whole_optimizers.StepCountInSelf, {}, (6, 7), 0),
        (whole_optimizers.RowsAndColumns, {}, (6, 7), 4 * (6 + 7)),
        (whole_optimizers.RowsAndColumns, {}, (7,), 4),
        (odd_optimizers.History, {}, (6, 7), 3 * 4 * 42),  # has its size after three steps
        (whole_optimizers.ReadsANumber, {}, (300, 20), 4 * 300),
        (whole_optimizers.WaitsForANumber, {}, (300, 20), 4 * 6000),
        (whole_optimizers.NeedsValues, {}, (300, 20), 8 * 6000),
    ],
)
def test_state_bytes_are_those_of_a_real_run(of_class: type, defaults: dict, shape: tuple, expected: int):
    assert state_bytes_of(of_class, defaults, None, shape) == expected
    parameter = nn.Parameter(torch.ones(shape))
    optimizer = of_class([parameter], **defaults)
    for _ in range(4):
        parameter.grad = torch.ones(shape)
        optimizer.step()
    kept = [value for each in optimizer.state.values() for value in each.values()]
    kept = [t for value in kept for t in flat(value) if isinstance(t, torch.Tensor) and t.dim()]
    assert sum(each.untyped_storage().nbytes() for each in kept) == expected


def flat(value) -> list:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]


@pytest.mark.parametrize(
    "of_class, expected", [(torch.optim.Muon, 4 * 2**40), (torch.optim.Adafactor, 2**23)]
)
def test_the_state_of_a_parameter_that_no_memory_holds_is_measured(of_class: type, expected: int):
    assert state_bytes_of(of_class, {}, None, (2**20, 2**20)) == expected


def test_state_that_is_a_view_costs_its_storage_and_the_parameter_costs_nothing():
    class Views(whole_optimizers.TensorStep):
        def also(self, group, p, gradient):
            if not self.state[p]:
                kept = torch.zeros(3 * p.numel(), device=p.device)
                self.state[p] |= {
                    "first": kept[: p.numel()],
                    "second": kept[p.numel() :],
                    "weights": p.view(-1),
                }
            return 1.0

    assert state_bytes_of(Views, {}, None, (6, 7)) == 4 * 3 * 42


def test_judging_leaves_the_users_random_numbers_and_gradients_mode_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)

    class Fresh(whole_optimizers.RareNoise):
        """One that was not tried before."""

    with torch.no_grad():
        assert kind_of(Fresh, {}) is Kind.UNSUITABLE
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.rand(2), expected)


def test_judging_does_not_depend_on_the_default_device_and_dtype():
    class Fresh(torch.optim.Muon):
        """One that was not tried before."""

    class Fresher(torch.optim.Adafactor):
        """Nor was this."""

    with torch.device("meta"):
        assert state_bytes_of(Fresh, {}, None, (6, 7)) == 4 * 42
    torch.set_default_dtype(torch.float64)
    try:
        assert state_bytes_of(Fresher, {}, None, (6, 7)) == 4 * 13
    finally:
        torch.set_default_dtype(torch.float32)


def test_wrong_keywords_are_the_classs_own_errors():
    with pytest.raises(ValueError, match=r"Adjust learning rate function wide is not supported"):
        kind_of(torch.optim.Muon, {"adjust_lr_fn": "wide"})
    with pytest.raises(TypeError, match=r"'rate'\. ZeroOptimizer's own keywords are stage"):
        kind_of(torch.optim.Muon, {"rate": 1})
    with pytest.raises(TypeError, match=r"optimizer_class is 'Muon', not a torch\.optim\.Optimizer class"):
        kind_of("Muon", {})

"""Promise: a model that nobody prepared trains as it is, at every stage, to the bits of plain training."""

import functools
import sys

import cloudpickle
import pytest
import torch
from support import training
from support.long import long_where
from support.trained import values_of
from support.user_models import Net, every_case
from torch.utils.checkpoint import checkpoint

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

CASES = every_case()
NAMES = [(group, name) for group, named in CASES.items() for name in named]
IN_DETAIL = ("sharing", "passes", "flow", "exceptions", "checkpointed")  # stages 0 to 2 differ in these
SETTINGS = {
    "2 ranks": (2, (0, 1, 2, 3), {}),
    "3 ranks in step": (3, (3,), {"prefetch": 0, "reduces_in_flight": 0}),
}


@functools.cache
def outcomes(group: str, setting: str) -> list[dict]:
    """By rank and case. One launch for a group: starting processes is what takes the time."""
    world_size, stages, settings = SETTINGS[setting]
    if group not in IN_DETAIL:
        stages = [stage for stage in stages if stage in (1, 3)]
    return zerolab.launch(training.compare_all, world_size, CASES[group], stages, timeout=60, **settings)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Threads that wait for each other on a busy machine take far longer than such small models do."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


IN_STEP = "two ranks train the same models at stage 3 with overlap"


@pytest.mark.parametrize("setting", long_where(lambda each: each == "3 ranks in step", IN_STEP, SETTINGS))
@pytest.mark.parametrize(("group", "name"), NAMES, ids=[name for _, name in NAMES])
def test_bits_of_plain_training(group: str, name: str, setting: str):
    for by_case in outcomes(group, setting):
        assert by_case[name] and by_case[name] == {stage: [] for stage in by_case[name]}


class PaddedEncoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        return self.encoder(x, src_key_padding_mask=padding)


def evaluations_after_a_step(stage: int | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, x = PaddedEncoder(), torch.randn(2, 5, 16)
    if stage is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    found = []
    for _ in range(2):
        model.train()(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found += [model.eval()(x) for _ in range(2)]
    return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_encoder_pads_with_zeros_in_evaluation_as_it_does_without_an_optimizer(stage: int):
    """It does so only if it finds plain parameters in its first layer before it calls that layer."""
    expected = evaluations_after_a_step(None)
    for found in zerolab.launch(evaluations_after_a_step, 2, stage, timeout=60):
        assert all(map(torch.equal, found, expected))
    assert not expected[0][1, 3:].any()


def train(stage: int, loop) -> dict[str, torch.Tensor] | str:
    """The parameters after a loop of the user's own; or what was refused."""
    torch.manual_seed(0)
    model = Net()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    try:
        for step in range(3):
            loop(model, optimizer, training.micro_batch(step, optimizer.rank))
            optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return training.whole(model, optimizer)


def step_with_a_closure(model, optimizer, x) -> None:
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0


def clamp_the_weights(model, optimizer, x) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    with torch.no_grad(), optimizer.full_params():
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)


def keep_the_graph_of_the_gradients(model, optimizer, x) -> None:
    model(x).square().mean().backward(create_graph=True)
    optimizer.step()


def checkpoint_reentrantly(model, optimizer, x) -> None:
    x = model.before(x)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    model.after(x).square().mean().backward()
    optimizer.step()


def checkpoint_one_block_twice_reentrantly(model, optimizer, x) -> None:
    x = model.before(x)
    for block in [*model.blocks, *model.blocks]:
        x = checkpoint(block, x, use_reentrant=True)
    model.after(x).square().mean().backward()
    optimizer.step()


def checkpoint_the_whole_model_reentrantly(model, optimizer, x) -> None:
    checkpoint(model, x.requires_grad_(), use_reentrant=True).square().mean().backward()
    optimizer.step()


LOOPS = (step_with_a_closure, clamp_the_weights, keep_the_graph_of_the_gradients)
REENTRANT = (
    checkpoint_reentrantly,
    checkpoint_one_block_twice_reentrantly,
    checkpoint_the_whole_model_reentrantly,
)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__.replace("_", " "))
def test_loops_of_the_users_own_are_the_same_at_every_stage(loop):
    for expected, *others in zerolab.launch(
        lambda: [train(stage, loop) for stage in range(4)], 2, timeout=60
    ):
        for found in others:
            assert training.differing(found, expected) == []


def gradient_penalty():
    def losses(model, x, step):
        loss = model(x.requires_grad_()).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        yield loss + slope.square().sum()

    return Net, losses


def gradients_by_hand():
    def losses(model, x, step):
        yield model(x).square().mean()
        yield lambda: torch.autograd.grad(model(x).sum(), list(model.parameters()))

    return Net, losses


def test_gradients_that_are_asked_for_by_hand_leave_those_of_a_backward_alone():
    training.assert_same_bits(gradients_by_hand, 2, (0, 1, 2))


def ask_between_micro_batches(stage: int) -> tuple[dict[str, torch.Tensor], int]:
    """A gradient of the input is asked for between two micro-batches: the parameters, and the reductions."""
    torch.manual_seed(0)
    model = Net()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    with optimizer.no_sync():
        model(training.micro_batch(0, optimizer.rank)).square().mean().backward()
    x = training.micro_batch(1, optimizer.rank).requires_grad_()
    torch.autograd.grad(model(x).square().mean(), x)
    model(training.micro_batch(2, optimizer.rank)).square().mean().backward()
    optimizer.step()
    reductions = sum("reduce" in event.op for event in optimizer.trace.step(0))
    with optimizer.full_params():
        return values_of(model), reductions - len(optimizer.units)


def test_a_gradient_of_an_input_reduces_nothing_and_leaves_the_bits():
    """On three ranks, where the order of a sum decides about its last bit."""
    ranks = zerolab.launch(lambda: [ask_between_micro_batches(stage) for stage in range(4)], 3, timeout=60)
    for (expected, _), *others in ranks:
        for found, more_reductions in others:
            assert training.differing(found, expected) == [] and more_reductions == 0


def slopes_through_one_graph(stage: int) -> list[torch.Tensor]:
    """The gradient of an input, asked for three times through one graph."""
    torch.manual_seed(0)
    model = Net()
    zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    x = training.micro_batch(0, 0).requires_grad_()
    loss = model(x).square().mean()
    return [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(3)]


def test_a_gradient_can_be_asked_for_again_through_the_same_graph():
    for rank in zerolab.launch(lambda: [slopes_through_one_graph(stage) for stage in (0, 3)], 2, timeout=60):
        first, *others = [slope for slopes in rank for slope in slopes]
        assert first.any() and all(torch.equal(each, first) for each in others)


def test_gradients_of_gradients_have_the_same_bits():
    training.assert_same_bits(gradient_penalty, 2)


def whole_units_after_a_kept_graph() -> list[int]:
    """How many units are whole: after a backward with create_graph=True, and after the next one."""
    torch.manual_seed(0)
    model = Net()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1)
    x = torch.randn(4, training.WIDTH, requires_grad=True)
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    counts = [sum(unit.whole for unit in optimizer.units)]
    (loss + slope.square().sum()).backward()
    return [*counts, sum(unit.whole for unit in optimizer.units)]


def test_a_kept_graph_keeps_the_units_whole_until_the_next_backward_has_ended():
    for kept, after in zerolab.launch(whole_units_after_a_kept_graph, 2, timeout=60):
        assert kept > 1 and after == 0


@pytest.mark.parametrize("loop", REENTRANT, ids=lambda loop: loop.__name__.replace("_", " "))
def test_reentrant_checkpoints_are_refused_with_the_way_out(loop):
    for rank in zerolab.launch(lambda: [train(stage, loop) for stage in range(4)], 2, timeout=60):
        assert all("use_reentrant=False" in found for found in rank)


def test_weights_tied_through_their_data_are_refused_because_they_would_come_apart():
    def build() -> None:
        model = Net()
        model.blocks[1].first.weight.data = model.blocks[0].first.weight.data
        zerolab.ZeroOptimizer(model, torch.optim.SGD, lr=0.1)

    with pytest.raises(zerolab.WorkerError, match=r"blocks\.[01]\.first\.weight") as caught:
        zerolab.launch(build, 1, timeout=60)
    assert isinstance(caught.value.__cause__, ValueError)

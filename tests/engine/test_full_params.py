"""Promise: full_params() makes a model whole at any moment and keeps what is written to it; what was taken
from it is never silently wrong.
"""

import copy
import io
import pickle
import sys

import cloudpickle
import pytest
import torch
from support import training
from support.trained import build, on_two_ranks, train, values_of
from support.training import WIDTH
from support.user_models import Net
from torch import nn

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest


def test_full_params_gives_whole_parameters_and_keeps_what_is_written():
    def use() -> None:
        model, optimizer = build()  # which seeds all ranks alike
        with optimizer.full_params():
            for index, p in enumerate(model.parameters()):
                nn.init.constant_(p, index + 0.5)
            model.before.weight[0, 0].detach().fill_(9.0)
            state = Net().state_dict()
            model.blocks[1].load_state_dict(Net().blocks[1].state_dict())
        with optimizer.full_params():
            for index, (name, p) in enumerate(model.named_parameters()):
                if not name.startswith("blocks.1"):
                    assert p.flatten()[-1] == index + 0.5, name
            assert model.before.weight[0, 0] == 9.0
            model.load_state_dict(state)
        found = training.whole(model, optimizer)
        assert training.differing(found, dict(state)) == []
        train(model, optimizer)  # and the written values are trained on
        reference, theirs = build(stage=0)
        reference.load_state_dict(state)
        train(reference, theirs)
        assert training.differing(training.whole(model, optimizer), training.whole(reference, theirs)) == []

    on_two_ranks(use)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_full_params_at_any_moment(stage: int):
    """Nested, under no_grad, left by an exception, between forward and backward, around a whole step."""

    def use(stage: int) -> list:
        class Refusal(Exception):
            pass

        model, optimizer = build(stage)
        reference, theirs = build(0)
        found = []
        for step in range(3):
            x = training.micro_batch(step, optimizer.rank)
            with optimizer.full_params():
                with optimizer.full_params():
                    inner = values_of(model)
                outer = values_of(model)
            found.append(training.differing(inner, outer))
            with torch.no_grad(), optimizer.full_params():
                model(x)
            with torch.inference_mode(), optimizer.full_params():
                model(x)
            try:
                with optimizer.full_params():
                    raise Refusal
            except Refusal:
                pass
            loss = model(x).square().mean()
            with optimizer.full_params():
                found.append(training.differing(values_of(model), outer))
            loss.backward()
            with optimizer.full_params():
                found.append(training.differing(values_of(model), outer))
            optimizer.step()
            optimizer.zero_grad()
            reference(x).square().mean().backward()
            theirs.step()
            theirs.zero_grad()
            found.append(
                training.differing(training.whole(model, optimizer), training.whole(reference, theirs))
            )
        return found

    for found in on_two_ranks(use, stage):
        assert found == [[]] * len(found)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("what", ["backward", "step", "both"])
def test_training_inside_full_params_is_kept_or_refused(stage: int, what: str):
    def use(stage: int, what: str) -> tuple:
        trained = []
        for inside in (False, True):
            model, optimizer = build(stage if inside else 0)
            train(model, optimizer)
            optimizer.zero_grad()
            loss = model(torch.ones(2, WIDTH)).square().mean() if what == "step" or not inside else None
            try:
                if what == "step" or not inside:
                    loss.backward()
                if inside:
                    with optimizer.full_params():
                        if loss is None:
                            model(torch.ones(2, WIDTH)).square().mean().backward()
                        if what != "backward":
                            optimizer.step()
                    if what == "backward":
                        optimizer.step()
                else:
                    optimizer.step()
            except RuntimeError as error:
                return "refused", "full_params()" in str(error)
            trained.append(training.whole(model, optimizer))
        return "kept", training.differing(*trained)

    for found in on_two_ranks(use, stage, what):
        assert found in (("kept", []), ("refused", True))


@pytest.mark.parametrize("stage", [0, 3])
def test_what_was_taken_inside_full_params_can_be_used_after_it(stage: int):
    """A state dict holds views, and it is natural to save it after the block."""

    def use(stage: int) -> None:
        model, optimizer = build(stage)
        train(model, optimizer)
        with optimizer.full_params():
            state, detached, row = model.state_dict(), model.before.weight.detach(), model.after.weight[0]
            expected = copy.deepcopy(state)
        file = io.BytesIO()
        torch.save(state, file)
        loaded = torch.load(io.BytesIO(file.getvalue()))
        assert training.differing(loaded, expected) == [] and training.differing(dict(state), expected) == []
        assert torch.equal(detached, expected["before.weight"])
        assert torch.equal(row, expected["after.weight"][0])
        train(model, optimizer)
        assert (
            stage == 0 or training.differing(dict(state), expected) == []
        )  # at stage 3 nothing writes to them
        Net().load_state_dict(loaded)

    on_two_ranks(use, stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_copies_of_a_model_in_training_are_plain_models(stage: int):
    """As a moving average or a teacher network is made: deep copies, pickles and saved files."""

    def use(stage: int) -> None:
        model, optimizer = build(stage)
        train(model, optimizer)
        with optimizer.full_params():
            copied = copy.deepcopy(model)
            pickled = pickle.loads(pickle.dumps(model))
            average = torch.optim.swa_utils.AveragedModel(model)
            expected = values_of(model)
        messages = len(optimizer.trace.events)
        for each in (copied, pickled, average.module):
            assert training.differing(values_of(each), expected) == []
            each(torch.ones(2, WIDTH)).sum().backward()
            assert type(each.before.weight) is nn.Parameter and type(each.before.weight.grad) is torch.Tensor
            torch.optim.SGD(each.parameters(), lr=0.1).step()
        assert len(optimizer.trace.events) == messages  # they have nothing to do with the optimizer
        assert training.differing(training.whole(model, optimizer), expected) == []
        train(model, optimizer)
        with optimizer.full_params():
            average.update_parameters(model)

    on_two_ranks(use, stage)


# Gradients, whole.


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_full_grads_are_the_mean_over_ranks(stage: int):
    def use(stage: int) -> list[str]:
        model, optimizer = build(stage)
        model.blocks[2].requires_grad_(False)
        model(training.micro_batch(0, optimizer.rank)).square().mean().backward()
        expected: dict = {}
        for rank in range(optimizer.world_size):
            torch.manual_seed(0)
            replica = Net()
            replica.blocks[2].requires_grad_(False)
            replica(training.micro_batch(0, rank)).square().mean().backward()
            for name, p in replica.named_parameters():
                if p.grad is not None:
                    expected[name] = expected[name] + p.grad if name in expected else p.grad
        expected = {name: total / optimizer.world_size for name, total in expected.items()}
        wrong = training.differing(optimizer.full_grads(), expected)
        wrong += training.differing(optimizer.full_grads(), expected)  # asking changes nothing
        return wrong

    for wrong in on_two_ranks(use, stage):
        assert wrong == []

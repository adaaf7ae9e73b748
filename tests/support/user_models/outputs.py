"""Models that return what they like: whatever a forward returns, its loss is taken from it."""

from collections import OrderedDict, deque
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from support.user_models import Block, Net, cases, squares

case = cases()


def returning(pack, unpack):
    """Blocks and model alike return ``pack(tensor)``; the caller opens it with ``unpack``."""

    class PackingBlock(Block):
        def forward(self, x):
            return pack(super().forward(x))

    class PackingNet(Net):
        def forward(self, x):
            x = self.before(x)
            for block in self.blocks:
                x = unpack(block(x))
            return pack(self.after(x))

    def losses(model, x, step):
        yield unpack(model(x)).square().mean()

    return lambda: PackingNet(PackingBlock), losses


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list


@dataclass(slots=True, frozen=True)
class SlottedOutput:
    logits: torch.Tensor


class NamedOutput(NamedTuple):
    logits: torch.Tensor
    size: int


class ModelOutput(OrderedDict):
    """As transformer libraries have it: a dataclass that is an ordered dict and can be indexed by number."""

    def __init__(self, logits):
        super().__init__(logits=logits)

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class DataclassDict(OrderedDict):
    logits: torch.Tensor = None

    def __post_init__(self):
        for each in fields(self):
            self[each.name] = getattr(self, each.name)


class Plain:
    def __init__(self, logits):
        self.logits, self.note, self.me = logits, "a note", self


class Slots:
    __slots__ = ("empty", "logits")

    def __init__(self, logits):
        self.logits = logits


class Answer:
    """An object that can be called, as a distribution or a decoder might be."""

    def __init__(self, logits):
        self.logits = logits

    def __call__(self):
        return self.logits


@case
def outputs_are_dataclasses():
    return returning(lambda y: Output(y, [y * 2]), lambda out: out.logits + out.hidden[0])


@case
def outputs_are_frozen_dataclasses_with_slots():
    return returning(SlottedOutput, lambda out: out.logits)


@case
def outputs_are_named_tuples():
    return returning(lambda y: NamedOutput(y, 3), lambda out: out.logits)


@case
def outputs_are_dicts():
    return returning(lambda y: {"logits": y, "size": 3, "none": None}, lambda out: out["logits"])


@case
def outputs_are_nested():
    return returning(lambda y: [{"a": ({"b": (y,)},), "c": "text"}, 7], lambda out: out[0]["a"][0]["b"][0])


@case
def outputs_are_ordered_dicts():
    return returning(ModelOutput, lambda out: out.logits)


@case
def outputs_are_dataclasses_that_are_dicts():
    return returning(DataclassDict, lambda out: out["logits"])


@case
def outputs_are_plain_objects():
    return returning(Plain, lambda out: out.logits)


@case
def outputs_are_objects_with_slots():
    return returning(Slots, lambda out: out.logits)


@case
def outputs_are_objects_that_can_be_called():
    return returning(Answer, lambda out: out())


@case
def outputs_are_deques():
    return returning(lambda y: deque([y]), lambda out: out[0])


@case
def outputs_are_distributions():
    return returning(lambda y: torch.distributions.Normal(y, 1.0), lambda out: out.mean)


@case
def outputs_are_complex():
    return returning(lambda y: torch.complex(y, y), lambda out: out.real * out.imag)


@case
def outputs_are_views_changed_in_place():
    class Views(Block):
        def forward(self, x):
            return super().forward(x)[:, :]

    class InPlace(Net):
        def forward(self, x):
            x = self.before(x)
            for block in self.blocks:
                x = block(x)
                x += 1.0
                x.mul_(0.5)
            return self.after(x)

    return lambda: InPlace(Views), squares


@case
def a_loss_from_several_outputs():
    class Several(Net):
        def forward(self, x):
            states = [self.before(x)]
            for block in self.blocks:
                states.append(block(states[-1]))
            return self.after(states[-1]), states

    def losses(model, x, step):
        logits, states = model(x)
        yield logits.square().mean() + sum(state.abs().mean() for state in states)

    return Several, losses


@case
def an_output_that_the_loss_leaves_out():
    class Several(Net):
        def forward(self, x):
            return {"kept": super().forward(x), "left out": self.blocks[0](x)}

    def losses(model, x, step):
        yield model(x)["kept"].square().mean()

    return Several, losses


@case
def keyword_arguments_and_tensors_in_them():
    class Keywords(Block):
        def forward(self, *, state, mask, scale=1.0):
            return super().forward(state["x"]) * mask * scale

    class KeywordNet(Net):
        def forward(self, *, x, mask):
            x = self.before(x)
            for block in self.blocks:
                x = block(state={"x": x}, mask=mask, scale=0.5)
            return self.after(x)

    def losses(model, x, step):
        yield model(x=x, mask=x > 0).square().mean()

    return lambda: KeywordNet(Keywords), losses


@case
def inputs_that_require_gradients():
    def losses(model, x, step):
        x.requires_grad_()
        yield model(x).square().mean() + x.sum()
        assert x.grad is not None

    return Net, losses

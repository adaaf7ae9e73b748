"""Plans: what a loop is, and how a seed draws one."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

from torch import optim

from support.loops.models import KINDS
from support.whole_updates import Orthogonal

Action = tuple
"""A method's name, of `EngineSide` and `ReplicasSide`, and its arguments."""

OPTIMIZERS = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (optim.Adam, {"lr": 0.02}),
    "amsgrad": (optim.AdamW, {"lr": 0.02, "amsgrad": True}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    "NAdam": (optim.NAdam, {"lr": 0.01}),
    "RAdam": (optim.RAdam, {"lr": 0.01}),
    "Adadelta": (optim.Adadelta, {"lr": 0.5}),
    "Adamax": (optim.Adamax, {"lr": 0.01}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
    "ASGD": (optim.ASGD, {"lr": 0.05}),
    "Adafactor": (optim.Adafactor, {"lr": 0.05}),
    "orthogonal": (Orthogonal, {"lr": 0.02}),
}
"""By name: the class, and its keywords. The last two update whole parameters, each on one rank."""


@dataclass(frozen=True)
class Setting:
    """How a run is sharded. ``units``: "default", "all in one", or "the first block"."""

    world_size: int = 2
    stage: int = 3
    precision: str = "fp32"
    units: str = "default"
    prefetch: int = 1
    in_flight: int = 1


@dataclass(frozen=True)
class Loop:
    """A model, an optimizer, and what a user does with them.

    Attributes:
        frozen, held: places of parameters (`picked`): frozen from the start; in no group at the start.
        lists_frozen: whether the groups have the frozen parameters too.
        actions: what every rank does.
        reads: whether parameters are read after every action. Else gathers may go on during the next one.
        odd: a rank and what it alone does after that; every rank then trains one step more.
    """

    setting: Setting
    kinds: tuple[str, ...] = ("linear",)
    tied: bool = False
    frozen: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    lists_frozen: bool = False
    optimizer: str = "SGD"
    actions: tuple[Action, ...] = ()
    reads: bool = True
    odd: tuple[int, Action] | None = None


def place(chance: Random) -> int:
    return chance.randrange(20)


def data(chance: Random) -> int:
    return chance.randrange(1000)


def setting(chance: Random, most_ranks: int) -> Setting:
    return Setting(
        chance.choice(range(1, most_ranks + 1)) if chance.random() < 0.3 else min(2, most_ranks),
        chance.choice((0, 1, 2, 3, 3)),
        chance.choice(("fp32", "fp32", "fp32", "mixed", "mixed_fp32_grads", "mixed_fp16")),
        chance.choice(("default", "default", "all in one", "the first block")),
        chance.choice((0, 1, 1, 2)),
        chance.choice((0, 1, 1, 2)),
    )


WRITES = ("fill", "multiply", "copy", "through data", "initialise")
Draw = Callable[[Random], tuple]
ACTIONS: dict[str, tuple[int, Draw]] = {
    # name: how often, and how its arguments are drawn
    "train": (16, lambda c: (data(c),)),
    "step": (14, lambda c: ()),
    "zero_grad": (8, lambda c: (c.choice(("none", "none", "zeros", "the model's")),)),
    "without_sync": (4, lambda c: (data(c),)),
    "forward": (4, lambda c: (data(c),)),
    "forward_part": (3, lambda c: (data(c), c.choice(("first", "last")))),
    "backward": (6, lambda c: (c.random() < 0.3, c.random() < 0.5, c.random() < 0.7)),
    "train_by_parts": (2, lambda c: (data(c),)),
    "train_hooked": (3, lambda c: (data(c), place(c), c.choice(("before", "after")))),
    "train_on_two": (2, lambda c: (data(c), data(c))),
    "slope": (3, lambda c: (data(c), c.random() < 0.4)),
    "forget": (2, lambda c: (place(c),)),
    "evaluate": (4, lambda c: (data(c), c.random() < 0.4)),
    "clip": (4, lambda c: (c.choice((0.01, 0.3, 1e9)), c.choice((1.0, 2.0, 3.0, float("inf"))))),
    "clip_values": (3, lambda c: (c.choice((0.0, 1e-3, 0.1, 10.0)),)),
    "schedule": (3, lambda c: (c.choice(("ExponentialLR", "StepLR", "CosineAnnealingLR")),)),
    "set_option": (
        3,
        lambda c: (place(c), c.choice(("lr", "lr", "weight_decay")), c.choice((0.0, 0.03, 0.2))),
    ),
    "add_group": (2, lambda c: (c.choice((0.01, 0.1)),)),
    "freeze": (2, lambda c: (place(c),)),
    "thaw": (2, lambda c: (place(c),)),
    "thaw_frozen": (2, lambda c: (place(c),)),
    "write": (4, lambda c: (place(c), c.choice(WRITES), c.random() < 0.6)),
    "load_module": (3, lambda c: (data(c), c.random() < 0.6, c.choice(("", "after", "blocks", "again")))),
    "keep_state": (2, lambda c: ()),
    "restore_state": (2, lambda c: ()),
    "save": (2, lambda c: ()),
    "load": (2, lambda c: ()),
    "resume_elsewhere": (2, lambda c: (setting(c, 3), data(c))),
    "export": (1, lambda c: ()),
    "raise_in_forward": (2, lambda c: (data(c), place(c))),
    "raise_in_backward": (2, lambda c: (data(c), place(c), c.choice(("none", "the model's")))),
    "raise_inside": (1, lambda c: (data(c), place(c))),
    "raise_in_closure": (1, lambda c: (data(c), place(c))),
    "copy": (1, lambda c: (data(c),)),
    "train_inside": (1, lambda c: (data(c),)),
    "evaluate_inside": (2, lambda c: (data(c),)),
    "gradients": (3, lambda c: ()),
    "look": (5, lambda c: ()),
    "step_with_closure": (2, lambda c: (data(c),)),
    "clip_with_torch": (1, lambda c: ()),
    "keep_gradient": (3, lambda c: (place(c),)),
    "put_back": (2, lambda c: ()),
    "set_gradient": (1, lambda c: (place(c),)),
    "watch_a_step": (1, lambda c: ()),
    "step_with_aliases": (5, lambda c: ()),
}
INSIDE = {"write": 3, "load_module": 2}
"""Where the argument stands that says whether it is done inside full_params()."""
HOOKED = "a gradient removed by a hook that only some ranks call"
LATER = "a gradient that only some ranks have, cleared before other gradients are reduced"
COMPARING = ("step", "step_with_aliases", "gradients", "clip", "clip_values")
"""The actions in which ranks compare what they cleared."""
KNOWN = {
    # what is not drawn: an action, or one that a rank does alone
    "thaw_frozen": "refused at every step from then on, after forward has changed buffers",
    LATER: "refused at the next step: a sum on a rank that did not use the parameter has it for good",
    HOOKED: "refused at the next step: what one rank clears is a part of all ranks' gradients",
    "write outside at stage 3": "refused when the unit is freed, so by a later action than the write",
}
ALONE = {
    # what one rank alone may do
    **{name: 1 for name in ACTIONS if name not in ("look", "resume_elsewhere", "schedule")},
    "skip": 3,
}


def unknown(loop: Loop) -> Iterator[Action]:
    """Those of the actions that are not known to go wrong where they stand."""
    stage, sometimes = loop.setting.stage, "sometimes" in loop.kinds
    before: Action = ("",)
    for action, after in itertools.zip_longest(loop.actions, loop.actions[1:], fillvalue=("",)):
        stage = action[1].stage if action[0] == "resume_elsewhere" else stage
        outside = action[0] in INSIDE and not action[INSIDE[action[0]]]
        if outside and f"{action[0]} outside at stage {stage}" in KNOWN:
            continue
        if action[0] == "train_hooked" and sometimes and HOOKED in KNOWN:
            continue
        if action[0] == "keep_gradient" and sometimes:  # only some ranks have one
            continue
        at_once = before[0] == "train" and after[0] in COMPARING
        if action[0] == "forget" and sometimes and not at_once and LATER in KNOWN:
            continue
        before = action
        yield action


def _without_division_by_zero(optimizer: str, kinds: tuple[str, ...]) -> str:
    """Adafactor divides by a parameter's number of elements, and "sometimes" uses one that has none."""
    return "orthogonal" if optimizer == "Adafactor" and "sometimes" in kinds else optimizer


def draw(seed: int, most_ranks: int = 3) -> Loop:
    """The seed's loop: always the same one. Every fifth ends with something that one rank does alone."""
    chance = Random(seed)
    kinds = tuple(chance.choice(sorted(KINDS)) for _ in range(chance.randrange(4)))
    some = lambda: tuple(place(chance) for _ in range(chance.choice((0, 0, 1, 2))))
    usual = {name: often for name, (often, _) in ACTIONS.items() if name not in KNOWN}
    chosen = chance.choices(list(usual), list(usual.values()), k=chance.randrange(3, 25))
    loop = Loop(
        setting(chance, most_ranks),
        kinds,
        chance.random() < 0.3,
        some(),
        some(),
        chance.random() < 0.4,
        _without_division_by_zero(chance.choice(sorted(OPTIMIZERS)), kinds),
        tuple((name, *ACTIONS[name][1](chance)) for name in chosen),
        chance.random() < 0.5,
    )
    loop = replace(loop, actions=tuple(unknown(loop)))
    if seed % 5 or loop.setting.world_size == 1:
        return loop
    rare = {name: often for name, often in ALONE.items() if f"alone: {name}" not in KNOWN}
    name = chance.choices(list(rare), list(rare.values()))[0]
    alone = (name, *(ACTIONS[name][1](chance) if name in ACTIONS else ()))
    few = tuple(action for action in loop.actions[:6] if action[0] != "resume_elsewhere")
    return replace(loop, actions=few, odd=(chance.randrange(loop.setting.world_size), alone))

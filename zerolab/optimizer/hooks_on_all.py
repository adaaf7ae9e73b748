"""Keep hooks that are registered on all optimizers from running for the stock optimizers of one engine."""

import importlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_HOOKS = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"
_torch = importlib.import_module(torch.optim.Optimizer.__module__)


@contextmanager
def no_hooks_on_all() -> Iterator[None]:
    """Leave out what torch.optim's `register_optimizer_step_pre_hook` and `..._post_hook` have registered.

    A ZeroOptimizer runs these hooks itself, once a step. The optimizers inside it take the same step.
    """
    theirs = [getattr(_torch, name) for name in _HOOKS]
    for name in _HOOKS:
        setattr(_torch, name, OrderedDict())
    try:
        yield
    finally:
        for name, hooks in zip(_HOOKS, theirs, strict=True):
            setattr(_torch, name, hooks)

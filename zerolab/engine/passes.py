"""Detect whether a hook runs outside autograd, in a backward pass, or in a nested one."""

import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointFunction

NESTED = (
    "a backward pass began inside another one, as with reentrant checkpointing, which runs one for each "
    "segment: the engine cannot tell then when a unit's gradients are complete. Pass use_reentrant=False to "
    "checkpoint(), which computes the same values. If instead an exception ended an earlier backward pass, "
    "call optimizer.zero_grad() before the next one"
)


AT_STAGE_3 = (
    "at stage 3, because they need weights that are freed after their unit was computed: take stage 2, or "
    "run the forward and backward pass inside `with optimizer.full_params():`"
)

AFTER_AN_UPDATE = (
    "its parameters were still on their way from other ranks when vmap, torch.func or forward-mode "
    "differentiation used them. Use them inside `with optimizer.full_params():`, or build the optimizer "
    "with prefetch=0, whose step() waits for them"
)


_transform_under_way = torch._C._functorch.peek_interpreter_stack

pass_number: Callable[[], int] = torch._C._current_graph_task_id
"""Which backward pass is running on this thread; -1 where none is."""


def inside_backward() -> bool:
    """Whether autograd is running on this thread, so that a forward now is a checkpoint's recomputation."""
    return pass_number() != -1


def inside_reentrant_checkpoint() -> bool:
    """Whether a backward pass that begins now is one that such a checkpoint makes inside the user's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            return True
        frame = frame.f_back
    return False


def inside_functional_transform() -> bool:
    """Whether vmap, torch.func's grad, jvp and the like, or forward-mode differentiation is running."""
    return _transform_under_way() is not None or forward_ad._current_level >= 0


def inside_ddp() -> bool:
    """Return whether a forward of DistributedDataParallel is running."""
    return DistributedDataParallel._get_active_ddp_module() is not None

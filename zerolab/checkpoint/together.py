"""Steps that all ranks take or none: what one rank does for all, and where all have to stand."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from zerolab.collectives import Comm
from zerolab.optimizer import ZeroOptimizer

Answer = TypeVar("Answer")


def from_rank_0(comm: Comm, action: Callable[[], Answer]) -> Answer:
    """What ``action`` returns on rank 0, where alone it runs, on every rank; its error, if it fails, too.

    An error that stayed with rank 0 would leave the others waiting for it. Its ``raised_on`` tells a launcher
    whose it is. Comm: the answer, pickled.
    """
    message = [None, None]
    if comm.rank == 0:
        try:
            message[0] = action()
        except Exception as error:
            message[1] = error
    dist.broadcast_object_list(message, group=comm.control, group_src=0)
    answer, error = message
    if error is not None:
        error.raised_on = dist.get_global_rank(comm.control, 0)
        raise error
    return answer


def require_between_steps(optimizer: ZeroOptimizer, action: str) -> None:
    """See that no pass over the model and no full_params() is open: the shards are not all there is then.

    Collective: it also sees that every rank has come to do the same.
    Raises: RuntimeError.
    """
    optimizer.engine.require_idle(action)
    optimizer.comm.check_same_collective(action)

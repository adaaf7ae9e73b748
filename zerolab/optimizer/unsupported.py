"""Refuse what a torch.optim.Optimizer, or the class given, can do and a ZeroOptimizer cannot."""

from typing import Any

from zerolab.optimizer.base import OptimizerBase


class Unsupported(OptimizerBase):
    """The part of ZeroOptimizer that refuses what it does not support, with the way out."""

    def __getattr__(self, name: str) -> Any:
        """Python asks this for what is not there.

        Raises: RuntimeError for a public name of a stock optimizer's class, because ``hasattr`` would hide an
            AttributeError, and the call would be skipped; AttributeError for any other name.
        """
        updates = self.__dict__.get("updates")  # not there yet while the optimizer is built
        if updates is not None and not name.startswith("_"):
            for each in updates.of_groups:
                if hasattr(each.optimizer_class, name):
                    raise RuntimeError(
                        f"{each.name}.{name} is not passed on by ZeroOptimizer, which has several objects of "
                        "this class for its slices: train with a class that works without it, or, where it "
                        "only changes parameters, change them in `with optimizer.full_params(): ...`"
                    )
        return self.__getattribute__(name)  # raises the usual error, also from inside a property

    def join_hook(self, **_: Any) -> None:
        """torch's Join shadows the collectives of ranks that have no data left. Here every rank has to go on.

        Raises: NotImplementedError, with the way out.
        """
        raise NotImplementedError(
            "torch.distributed.algorithms.join.Join is not supported: let every rank make the same number of "
            "steps. A rank that has no data left takes any batch with optimizer.mean_loss(loss_sum, count=0)"
        )

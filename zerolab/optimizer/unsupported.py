"""Refuse what a torch.optim.Optimizer, or the class given, can do and a ZeroOptimizer cannot."""

from typing import Any, NoReturn

from zerolab.optimizer.base import OptimizerBase


class Unsupported(OptimizerBase):
    """The part of ZeroOptimizer that refuses what it does not support, with the way out."""

    def __getattr__(self, name: str) -> Any:
        """Refuse a public name that only the class given has. Python asks this for what is not there.

        ``hasattr`` would hide an AttributeError, and the call would be skipped.
        Raises: RuntimeError for such a name; AttributeError for any other.
        """
        if not name.startswith("_") and (owner := self._owner_of(name)):
            raise RuntimeError(
                f"{owner}.{name} is not passed on by ZeroOptimizer, which has several objects of this class "
                "for its slices: train with a class that works without it, or, where it only changes "
                "parameters, change them in `with optimizer.full_params(): ...`"
            )
        return self.__getattribute__(name)  # raises the usual error, also from inside a property

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to set what only the class given, or an object of it, has.

        Raises: RuntimeError for such a name, because the stock optimizers would not get the value.
        """
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if not own and (owner := self._owner_of(name)):
            raise RuntimeError(
                f"setting {owner}.{name} has no effect, because ZeroOptimizer has several objects of this "
                "class for its slices: pass it as a keyword, or write it into optimizer.param_groups "
                "if the class reads it there"
            )
        super().__setattr__(name, value)

    def _owner_of(self, name: str) -> str:
        """The class given that has this name, or whose objects have; nothing while the optimizer is built."""
        if "engine" not in self.__dict__:
            return ""
        known = [each.optimizer_class for each in self.updates.of_groups]
        found = [each for each in known if hasattr(each, name)]
        found += [type(each) for each in self.local.optimizers if name in vars(each)]
        return found[0].__name__ if found else ""

    def __deepcopy__(self, memo: dict) -> NoReturn:
        """Raises: TypeError, because the copy would have no model and no ranks to train with."""
        _refuse_copy("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """What copy.copy, pickle and torch.save call. Raises: TypeError, as for a deep copy."""
        _refuse_copy("pickled or copied")

    def join_hook(self, **_: Any) -> None:
        """torch's Join shadows the collectives of ranks that have no data left. Here every rank has to go on.

        Raises: NotImplementedError, with the way out.
        """
        raise NotImplementedError(
            "torch.distributed.algorithms.join.Join is not supported: let every rank make the same number of "
            "steps. A rank that has no data left takes any batch with optimizer.mean_loss(loss_sum, count=0)"
        )


def _refuse_copy(action: str) -> NoReturn:
    raise TypeError(
        f"a ZeroOptimizer cannot be {action}, because it belongs to its model and to the ranks of this run: "
        "store both with zerolab.save(optimizer, folder), and load them into a new one with zerolab.load(); "
        "optimizer.state_dict() has this rank's part of the state alone"
    )

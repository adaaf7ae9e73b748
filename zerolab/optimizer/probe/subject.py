"""Subject: the optimizer class that is tried, with its keywords."""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy

import torch

from zerolab.optimizer.hooks_on_all import no_hooks_on_all
from zerolab.optimizer.probe.refused import OTHER_ARGUMENTS, Refused, shown

PLAIN_LOOP = ("foreach", "fused", "capturable")
"""Keywords that choose how an update is computed and not what it is. Without them torch runs a plain loop."""
AS_ASKED = ("fused", "capturable")
"""With foreach a class may stack parameters of one shape, and then they meet. The others need a GPU."""
_SHAPES = ((2, 2), (2,), (2, 2, 2), (2, 2, 2, 2), (), (2, 2, 2, 2, 2))
"""Parameters to check keywords with: some classes take only matrices, or only vectors."""
OWN_KEYWORDS = (
    *("stage", "params", "units", "precision", "process_group", "prefetch", "reduces_in_flight"),
    *("bucket_bytes", "tensor_parallel", "offload", "offload_dir", "shard_size"),
)


class Subject:
    """An optimizer class with the keywords that every trial gives it.

    Args:
        options: what a parameter group has besides the ``defaults``, or instead of them.
        without: keywords that are left out.
    Raises: TypeError if it is no optimizer class.

    Attributes:
        key: equal for two that behave alike.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: dict,
        options: dict | None,
        without: tuple[str, ...] = PLAIN_LOOP,
    ):
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
            given = repr(optimizer_class)
            if isinstance(optimizer_class, torch.optim.Optimizer):
                given = f"an object of class {type(optimizer_class).__name__}"  # its repr takes many lines
            raise TypeError(
                f"optimizer_class is {given}, not a torch.optim.Optimizer class: pass the class "
                "and its keywords apart, as in ZeroOptimizer(model, torch.optim.AdamW, lr=3e-4)"
            )
        self.optimizer_class = optimizer_class
        self._defaults, self._options = _left(defaults, without), _left(options or {}, without)
        self.name = optimizer_class.__name__
        self.key = optimizer_class, repr((sorted(self._defaults.items()), sorted(self._options.items())))

    def build(self, groups: list[list]) -> torch.optim.Optimizer:
        """Return an optimizer of the class over groups of these parameters."""
        own = [deepcopy(self._options) | {"params": each} for each in groups]
        return self.optimizer_class(own, **deepcopy(self._defaults))

    def sample(self) -> torch.optim.Optimizer:
        """Return the optimizer over one small parameter, after it has checked its keywords.

        It checks no options of groups, so these are keywords here.
        Raises: its own TypeError or ValueError, with ZeroOptimizer's keywords for one that it does not know;
            Refused if it takes no parameter groups.
        """
        known = inspect.signature(self.optimizer_class).parameters
        keywords = self._defaults | {key: value for key, value in self._options.items() if key in known}
        errors = []
        for shape in _SHAPES:
            parameter = torch.ones(shape, dtype=torch.float32, requires_grad=True)
            try:
                self.build([[parameter]])
                return self.optimizer_class([self._options | {"params": [parameter]}], **keywords)
            except TypeError as error:
                if "unexpected keyword argument" in str(error):
                    message = f"{error}. ZeroOptimizer's own keywords are {', '.join(OWN_KEYWORDS)}"
                    raise TypeError(message) from None
                raise
            except AttributeError as error:
                reason = f"it does not take parameter groups ({shown(error)})"
                raise Refused(reason, OTHER_ARGUMENTS) from error
            except ValueError as error:
                errors.append(error)
        raise errors[0]


def keywords_of_group(optimizer_class: type[torch.optim.Optimizer], group: dict) -> tuple[dict, dict]:
    """Divide the options of a group that names its class: its keywords, and what it reads in a group alone.

    Raises: TypeError for no class, and for an option that is no keyword of it, where it can be built without.
    """
    Subject(optimizer_class, group, None)
    known = inspect.signature(optimizer_class).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    keywords = {key: value for key, value in group.items() if takes_any or key in known}
    others = {key: value for key, value in group.items() if key not in keywords}
    if not others:
        return keywords, {}
    try:
        with surroundings():
            Subject(optimizer_class, keywords, {}).sample()
    except Exception:  # some classes ask for more in each group, such as use_muon
        return keywords, others
    named, own = ", ".join(others), ", ".join(key for key in known if key != "params")
    raise TypeError(
        f"{optimizer_class.__name__} has no keyword {named}: its keywords are {own}. To add an entry "
        "of your own, write it into optimizer.param_groups after the ZeroOptimizer is built"
    )


@contextmanager
def surroundings() -> Iterator[None]:
    """Try an optimizer on the CPU, without the user's hooks, and leave the user's random numbers alone."""
    with _on_the_cpu(), torch.random.fork_rng(devices=[]), torch.enable_grad(), no_hooks_on_all():
        yield


def _on_the_cpu() -> AbstractContextManager:
    """For a user who set another default device. Otherwise no context: it costs time at every operation."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _left(keywords: dict, without: tuple[str, ...]) -> dict:
    return {key: value for key, value in keywords.items() if key not in without}

"""Members: see that parameter groups hold parameters that are laid out, and those that were cut for them."""

from operator import is_
from typing import NoReturn

from torch import nn

from zerolab.optimizer.slices import Slice
from zerolab.unit import FlatUnit


def require_members(groups: list[dict], cuts: list[list[Slice]]) -> None:
    """See that ``groups`` are those of the slices in ``cuts``, with the same parameters in the same order.

    Raises: RuntimeError that names the first group that is not.
    """
    if len(groups) != len(cuts):
        _refuse(
            f"optimizer.param_groups has {len(groups)} groups, and the optimizer was built with {len(cuts)}"
        )
    for place, (group, slices) in enumerate(zip(groups, cuts, strict=True)):
        parameters = group["params"]
        same = map(is_, parameters, (each.span.parameter for each in slices))
        if len(parameters) != len(slices) or not all(same):
            _refuse(f"parameter group {place} {_difference(parameters, slices, cuts)}")


def require_laid_out(model: nn.Module, units: list[FlatUnit], parameters: list[nn.Parameter]) -> None:
    """Raises: ValueError for parameters that were added to the model after its optimizer was built."""
    given = {id(p) for p in parameters}
    if names := [name for name, p in _late(model, units) if id(p) in given]:
        raise ValueError(
            f"{', '.join(names)} came into the model after the ZeroOptimizer was built, and cannot be added: "
            "build the optimizer when the model is complete, and pass as params what trains from the start"
        )


def require_complete(model: nn.Module, units: list[FlatUnit]) -> None:
    """Raises: RuntimeError for a model with parameters that were added after its optimizer was built."""
    if names := [name for name, _ in _late(model, units)]:
        raise RuntimeError(
            f"{', '.join(names)} came into the model after the ZeroOptimizer was built, which does not store "
            "them: build the optimizer when the model is complete, or take that module out of it for this "
            "call and keep its state_dict() in save(extra=)"
        )


def _late(model: nn.Module, units: list[FlatUnit]) -> list[tuple[str, nn.Parameter]]:
    """The parameters that were added to the model after its optimizer was built."""
    known = {id(span.parameter) for unit in units for span in unit.spans}
    return [(name, p) for name, p in model.named_parameters() if id(p) not in known]


def _difference(parameters: list[nn.Parameter], slices: list[Slice], cuts: list[list[Slice]]) -> str:
    names = {id(each.span.parameter): each.span.name for every in cuts for each in every}
    built, now = [id(each.span.parameter) for each in slices], {id(p) for p in parameters}
    if lacking := [names[key] for key in built if key not in now]:
        return f"lacks {', '.join(lacking)}, which it was built with"
    added = [p for p in parameters if id(p) not in built]
    if shown := [names.get(id(p), f"a tensor of shape {tuple(p.shape)}") for p in added]:
        return f"has {', '.join(shown)}, which it was not built with"
    return "has its parameters in another order than when it was built, or twice"


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"{what}, and such an edit of optimizer.param_groups has no effect: undo it. Call "
        "optimizer.add_param_group(...) for parameters that are in no group; to stop training one, call "
        "requires_grad_(False) on it, or set lr=0 in its group; to group them otherwise, build the model and "
        "a ZeroOptimizer anew with the groups that you want"
    )

"""Which linear layers can be cut: those with a weight and a bias, and with nothing that a part would lack."""

from collections.abc import Iterable

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def refuse_what_parts_lack(model: nn.Module, layer: nn.Linear, cut: Iterable[str]) -> None:
    """Raises: ValueError for what a part of the layer would not have.

    That is a second place in the model, a tie to another layer, a parametrization, or a hook.
    Args: cut: the names of its parameters of which each rank gets a part.
    """
    name, *others = [name for name, each in model.named_modules(remove_duplicate=False) if each is layer]
    if others:
        raise ValueError(
            f"{name} and {others[0]} are one layer, and only one of them would be cut: give each its own, or "
            "leave the layer out of pairs"
        )
    _refuse_ties(model, layer, name, cut)
    own = {*layer._parameters, *layer._buffers, *layer._modules}
    if more := sorted(own - {"weight", "bias"}) or sorted({"weight", "bias"} - own):
        raise ValueError(
            f"{name} is no plain linear layer, because of {', '.join(more)}: weight_norm and other "
            "parametrizations would be lost when it is cut. Remove them, or leave the layer out of pairs"
        )
    if any(getattr(layer, hooks) for hooks in _HOOKS) or any(
        getattr(layer._parameters[each], hooks)
        for each in cut
        if layer._parameters[each] is not None
        for hooks in _PARAMETER_HOOKS
    ):
        raise ValueError(
            f"{name} has hooks, which would be lost when it is cut: register them after parallelize(), on "
            "the layers that the model has then"
        )


def _refuse_ties(model: nn.Module, layer: nn.Linear, name: str, cut: Iterable[str]) -> None:
    every = list(model.named_parameters(remove_duplicate=False))
    for each in cut:
        places = [place for place, parameter in every if parameter is layer._parameters.get(each)]
        if len(places) > 1:
            raise ValueError(
                f"{' and '.join(places)} are tied, and only {name}.{each} would be cut: give each its own "
                "parameter, or leave the layer out of pairs"
            )

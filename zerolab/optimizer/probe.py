"""Probe: whether an optimizer may be cut into pieces, found out by cutting one.

ZeRO hands each rank a slice of every parameter, cut wherever the flat buffer is. That is sound only for an
optimizer whose update of an element depends on nothing but that element's own history. Adam, SGD with
momentum and RMSprop are such; LBFGS (one curvature for all), Muon (whole matrices) and Adafactor (row and
column means) are not. A list of names would miss every optimizer that is not in it, so a tiny one is run
twice, on a whole tensor and on pieces, and the bits compared.
"""

import torch

_ROWS, _COLUMNS, _CUTS, _STEPS = 6, 7, (5, 11, 26), 3
_IMPLEMENTATIONS = ("foreach", "fused", "capturable")
"""Keywords that choose how an update is computed and not what it is; the probe runs torch's plain loop."""


def state_bytes_per_parameter(optimizer_class: type[torch.optim.Optimizer], defaults: dict) -> float:
    """Bytes of state the optimizer keeps for each fp32 parameter: the K of an fp32 run, 8 for Adam.

    Raises: TypeError where it is no optimizer class; ValueError where its update is not elementwise; whatever
    the optimizer itself raises about its own keywords.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(
            f"optimizer_class is {optimizer_class!r}, not a torch.optim.Optimizer class: pass the class "
            "and its keywords apart, as in ZeroOptimizer(model, torch.optim.AdamW, lr=3e-4)"
        )
    plain = {key: value for key, value in defaults.items() if key not in _IMPLEMENTATIONS}
    start = torch.linspace(-1.0, 1.0, _ROWS * _COLUMNS)
    whole = start.view(_ROWS, _COLUMNS).clone().requires_grad_()
    optimizer = optimizer_class([whole], **plain)
    reason = _run(optimizer, whole, 0, whole.numel())
    pieces = [piece.clone().requires_grad_() for piece in start.tensor_split(_CUTS)]
    reason = reason or _run_pieces(optimizer_class, plain, pieces)
    if reason is None and not torch.equal(whole.detach().view(-1), torch.cat(pieces).detach()):
        reason = "updating a tensor in pieces gave other numbers than updating it whole"
    if reason is not None:
        raise ValueError(
            f"{optimizer_class.__name__} cannot be sharded: {reason}. ZeRO needs an elementwise update, one "
            "that treats each element by its own history alone: Adam, AdamW, SGD, RMSprop, Adagrad and others"
        )
    state = optimizer.state[whole].values()
    return sum(t.nbytes for t in state if isinstance(t, torch.Tensor) and t.dim() > 0) / whole.numel()


def _run_pieces(optimizer_class, plain: dict, pieces: list[torch.Tensor]) -> str | None:
    """Each piece under an optimizer of its own, as on ranks that know nothing of one another."""
    numel = sum(piece.numel() for piece in pieces)
    offset = 0
    for piece in pieces:
        try:
            optimizer = optimizer_class([piece], **plain)
        except Exception as error:
            return f"it does not take a parameter that was cut ({error})"
        if reason := _run(optimizer, piece, offset, numel):
            return reason
        offset += piece.numel()
    return None


def _run(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, offset: int, numel: int) -> str | None:
    """Steps on known gradients for elements ``offset`` and on of ``numel``; what went wrong, if any did."""
    for step in range(_STEPS):
        gradient = torch.cos(torch.linspace(step, step + 5.0, numel)) * (step + 1)
        parameter.grad = gradient[offset : offset + parameter.numel()].clone().view(parameter.shape)
        try:
            optimizer.step()
        except Exception as error:
            return f"its step on a plain gradient failed ({type(error).__name__}: {error})"
    return None

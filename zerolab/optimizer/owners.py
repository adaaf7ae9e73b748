"""Owners: choose which rank updates each parameter that has to be updated as a whole.

An update of a whole matrix takes time by its own rule. One step of Muon's Newton-Schulz iteration takes
s²·(2·l + s) multiplications, where s is the shorter side and l the longer one, and the matrix's state takes
s·l elements. So both are balanced over the ranks, over all parameters of the model. One unit alone has too
few matrices for that. Other optimizers of this kind have other costs; the same count is used for them.
"""

from bisect import bisect_right
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from zerolab.unit import FlatUnit


def update_flops(parameter: torch.Tensor) -> int:
    """How many multiplications a step of Newton-Schulz takes for the parameter, as a matrix.

    These are three products: X·Xᵀ, its square, and the result times X. Muon takes five such steps. A
    parameter with more than two dimensions counts as a matrix with a row for each of its first dimension, and
    one with fewer takes one multiplication an element.
    """
    if parameter.dim() < 2 or not parameter.numel():
        return parameter.numel()
    short, long = sorted((parameter.shape[0], parameter.numel() // parameter.shape[0]))
    return short * short * (2 * long + short)


def choose_owners(units: list[list[nn.Parameter]], ranks: int) -> dict[int, int]:
    """Return the owner of each parameter by id: a rank.

    The longest update goes first, each to the rank whose largest share, of multiplications or of elements, is
    then the smallest. Among equals it goes to the rank that owns the least of the parameter's unit, because a
    unit's gradients are sent at the same time. The result is the same on every rank.
    Args: units: the parameters of each unit.
    Source: longest processing time first, R. L. Graham, Bounds on Multiprocessing Timing Anomalies (1969)
    """
    zeros = partial(torch.zeros, dtype=torch.float64, device="cpu")
    places = [(place, p) for place, parameters in enumerate(units) for p in parameters]
    costs = zeros(len(places), 2)
    for index, (_, parameter) in enumerate(places):
        costs[index, 0], costs[index, 1] = update_flops(parameter), parameter.numel()
    shares = costs / costs.sum(0).clamp(min=1)
    loads = zeros(ranks, 2)
    in_unit = zeros(len(units), ranks)
    owners: dict[int, int] = {}
    for index in sorted(range(len(places)), key=lambda index: costs[index].tolist(), reverse=True):
        place, parameter = places[index]
        largest = (loads + shares[index]).amax(1)
        among = torch.where(largest == largest.min(), in_unit[place], float("inf"))
        owners[id(parameter)] = owner = int(among.argmin())
        loads[owner] += shares[index]
        in_unit[place, owner] += parameter.numel()
    return owners


class Balance(NamedTuple):
    """The largest rank's share over the mean, 1.0 where all ranks have as much, of whole parameters.

    Attributes: elements: of what ranks keep. multiplications: of the work of their updates.
    """

    elements: float
    multiplications: float

    def __str__(self) -> str:
        return (
            f"the busiest rank has {self.multiplications:.2f} times the mean of the multiplications, and the "
            f"rank that owns most has {self.elements:.2f} times the mean of the elements"
        )


def balance_of(units: list[FlatUnit], ranks: int) -> Balance | None:
    """Return how evenly whole parameters are shared; None where all parameters are cut."""
    elements, multiplications = [0.0] * ranks, [0.0] * ranks
    whole = [(cuts, span) for unit in units if (cuts := unit.cuts) is not None for span in unit.spans]
    for cuts, span in whole:
        owner = min(bisect_right(cuts, span.offset), ranks) - 1  # one without elements may lie at the end
        elements[owner] += span.numel
        multiplications[owner] += update_flops(span.layout)
    if not whole:
        return None
    return Balance(imbalance(elements), imbalance(multiplications))


def imbalance(loads: list[float]) -> float:
    """Return the largest share over the mean: 1.0 where all ranks have as much."""
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0

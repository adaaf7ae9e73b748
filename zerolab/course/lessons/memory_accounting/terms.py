"""Read numbers as a formula: which terms it adds up, such as psi and psi / N, and with which factors.

The numbers are taken apart by least squares, with as few terms as explain all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import torch

Numbers = Mapping[tuple, float]
Terms = Mapping[str, Callable[..., float]]
EXACT, CUT_OFF = 1e-12, 4  # a double's rounding; and the bytes that whole division cuts off


def factors_of(numbers: Numbers, terms: Terms, most: int = 3) -> dict[str, float] | None:
    """Return the factors of the fewest terms that add up to the numbers, if `most` terms do.

    A term that is a few bytes, whatever psi is, shows where the numbers were not cut off.
    """
    for rtol, atol in ((EXACT, 0.0), (1e-9, CUT_OFF)):
        for size in range(1, most + 1):
            for names in combinations(terms, size):
                if found := _fit(numbers, names, [terms[name] for name in names], rtol, atol):
                    return found
    return None


def _fit(
    numbers: Numbers, names: Sequence[str], terms: Sequence[Callable[..., float]], rtol: float, atol: float
) -> dict[str, float] | None:
    table = torch.tensor([[term(*case) for term in terms] for case in numbers], dtype=torch.float64)
    values = torch.tensor(list(numbers.values()), dtype=torch.float64)
    scale = table.abs().amax(dim=0)
    factors = torch.linalg.lstsq(table / scale, values.unsqueeze(1), driver="gelsd").solution.flatten()
    off = (table / scale @ factors - values).abs()
    if (off > rtol * values.abs().max() + atol).any():
        return None
    return {name: float(value) for name, value in zip(names, factors / scale, strict=True)}


def in_words(factors: Mapping[str, float]) -> str:
    """Return a formula as it would be written: ``4 * psi + 12 * psi / N``."""
    said = ""
    for name, factor in factors.items():
        sign = (" - " if said else "-") if factor < 0 else " + " if said else ""
        said += f"{sign}{abs(factor):.4g}{'' if name == '1' else f' * {name}'}"
    return said or "0"

"""Find parts of a sum whose elements stand in it in the order of the transposed tensor."""

from collections.abc import Sequence

import torch

from zerolab.course.reading import Parts, coefficients, difference, listed, present


def turned(got: torch.Tensor, want: torch.Tensor, choices: Sequence[Parts]) -> str | None:
    """Take a matrix apart into the first of `choices` of which parts are transposed; say what is wrong."""
    for parts in choices if got.dim() == 2 else ():
        other = {f"{name}, transposed": part.T.reshape(part.shape) for name, part in parts.items()}
        found, should = coefficients(got, {**parts, **other}), coefficients(want, parts)
        there = present(found) if found else []
        names = [name for name in parts if f"{name}, transposed" in there]
        if not found or not should or not names or set(names) & set(there):
            continue
        have = {name: found[f"{name}, transposed" if name in names else name] for name in parts}
        said = (
            f"its value has the elements of {listed(names)} in the order of the transposed tensor: flatten() "
            "follows the elements of any tensor, and needs no t() before it"
        )
        return ". Besides, ".join(filter(None, [said, difference(have, should)]))
    return None

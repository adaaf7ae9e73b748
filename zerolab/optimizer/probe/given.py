"""The gradients that a trial gives: of all sizes, and along and across the weights.

An optimizer may look at more than one element only now and then: at a gradient of a certain norm or angle to
the weights, after a jump in size, or where a parameter had no gradient.
"""

import torch

ONE_LARGE = 2
"""The parameter whose gradient alone is large, or not finite, in the kinds that say so."""


def gradient(kind: str, step: int, weight: torch.Tensor, index: int) -> torch.Tensor:
    """[numel] a gradient of this kind for one parameter."""
    numel, generator = weight.numel(), torch.Generator().manual_seed(100 * step + index)
    noise = torch.randn(numel, generator=generator, dtype=torch.float32)
    match kind:
        case "noise":
            return noise
        case "two thirds zero":
            return torch.where(torch.arange(numel) < 2 * numel // 3, 0.0, noise)
        case "one element not finite":
            return torch.where(torch.arange(numel) == 0, torch.inf, noise)
        case "zero":
            return torch.zeros_like(weight)
        case "small":
            return 1e-6 * noise
        case "large":
            return 1e3 * noise
        case "huge":
            return 1e12 * noise
        case "one large":
            return 1e6 * noise if index == ONE_LARGE else noise
        case "one not finite":
            return torch.full_like(noise, torch.inf) if index == ONE_LARGE else noise
        case "steady":
            return torch.sin(torch.arange(1, numel + 1, dtype=torch.float32))
        case "spiky":
            return noise * 10.0 ** (7 * torch.rand(numel, generator=generator, dtype=torch.float32) - 4)
        case "parallel":
            return 0.3 * weight
        case "orthogonal":
            along = weight / weight.norm().clamp(min=1e-12)
            across = noise - along * (noise @ along)
            return across + along * across.norm() * 1e-4  # a part for a projection to remove
    return torch.cos(torch.linspace(step, step + 5.0, numel, dtype=torch.float32)) * (step + 1)

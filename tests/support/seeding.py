"""Seed torch's random numbers as torch.manual_seed does, in a thousandth of the time."""

import torch


def seed_all(number: int) -> None:
    """Seed every generator. For each kind of device that is absent torch.manual_seed formats a traceback."""
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)

"""Small units are updated together, and large ones one by one. A test's units are small: here it chooses."""

from zerolab.optimizer import batch, local

TOGETHER_NUMEL = batch.TOGETHER_NUMEL


def update_together(small_units: bool) -> None:
    """On a rank, for the optimizers it builds from now on."""
    batch.TOGETHER_NUMEL = local.TOGETHER_NUMEL = TOGETHER_NUMEL if small_units else 0

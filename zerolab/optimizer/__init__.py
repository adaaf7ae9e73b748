"""The torch.optim.Optimizer face over engine and stage: optimizer.py, and what it is made of.

settings.py checks what a user hands in, probe.py whether the optimizer may be cut, slices.py cuts, local.py
updates, gradients.py clips, and slots.py notices parameters that were replaced.
"""

from zerolab.optimizer.optimizer import STAGES, ZeroOptimizer

__all__ = ["STAGES", "ZeroOptimizer"]

"""The torch.optim.Optimizer face over engine and stage: optimizer.py, and what it is made of.

settings.py checks what a user hands in, probe.py whether the optimizer may be cut, slices.py cuts, local.py
updates, gradients.py clips, shards.py is what checkpoints read and write, and slots.py notices modules and
parameters that were replaced.
"""

from zerolab.optimizer.optimizer import STAGES, ZeroOptimizer
from zerolab.optimizer.shards import Shard

__all__ = ["STAGES", "Shard", "ZeroOptimizer"]

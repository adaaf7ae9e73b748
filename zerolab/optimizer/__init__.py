"""The torch.optim.Optimizer face over engine and stage: optimizer.py, and what it is made of.

settings.py checks what a user hands in, and probe.py, by a trial (trial.py), whether the optimizer may be
cut. layout.py lays the parameters out, slices.py cuts them, and local.py updates the slices batch by batch
(batch.py), with the user's parameter groups (groups.py). gradients.py takes norms, loss_scale.py serves fp16,
losses.py weighs unequal batches, slots.py notices modules and parameters that were replaced, and
sharded_state.py is what checkpoints read and write, as the shards of shards.py.
"""

from zerolab.optimizer.optimizer import STAGES, ZeroOptimizer
from zerolab.optimizer.shards import Shard

__all__ = ["STAGES", "Shard", "ZeroOptimizer"]

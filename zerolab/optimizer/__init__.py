"""ZeroOptimizer, a torch.optim.Optimizer that uses engine and stage: optimizer.py, and its parts.

Its parts are clipping.py, whole_tensors.py, sharded_state.py, losses.py and unsupported.py; base.py has what
all of them use.

settings.py checks the user's arguments, probe/ runs the optimizer to see whether it can be sharded, and
updates.py says which optimizer updates which parameters. Whole parameters have owners (owners.py), and
matrices.py makes groups for Muon. layout.py moves the parameters into flat units, slices.py cuts them, and
local.py updates the slices batch by batch (batch.py) with the user's parameter groups (groups.py).
members.py refuses groups that have other parameters than those that were cut.
slice_states.py shows the state of all batches as one, and offload.py keeps it elsewhere between updates.
gradients.py computes norms, loss_scale.py scales the loss for fp16, losses.py weighs unequal batches, and
slots.py finds modules and parameters that were replaced. Checkpoints use sharded_state.py, which describes a
rank's state as shards (shards.py).
"""

from zerolab.optimizer.matrices import matrices_by
from zerolab.optimizer.optimizer import STAGES, ZeroOptimizer
from zerolab.optimizer.shards import Shard

__all__ = ["STAGES", "Shard", "ZeroOptimizer", "matrices_by"]

"""Save and load a run, at another world size and stage too, and export it for plain PyTorch.

Read checkpoint.py first. records.py writes and reads the slices, buffers.py and extra_state.py what else a
model has, manifest.py describes what a checkpoint holds, generations.py keeps the last complete one loadable,
one_optimizer.py keeps two optimizers out of one folder, together.py makes an error of one rank an
error of all, torch_file.py exports.
"""

from zerolab.checkpoint.checkpoint import load, save
from zerolab.checkpoint.torch_file import export

__all__ = ["export", "load", "save"]

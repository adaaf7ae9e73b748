"""Save and load a run, at another world size and stage too, and export it for plain PyTorch.

checkpoint.py is the way in: pieces.py names what a rank writes, generations.py keeps the last whole save
loadable, manifest.py says what it holds, together.py has the ranks fail as one, torch_file.py exports.
"""

from zerolab.checkpoint.checkpoint import load, save
from zerolab.checkpoint.torch_file import export

__all__ = ["export", "load", "save"]

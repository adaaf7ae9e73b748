"""One group of parameters in one flat buffer: span.py says where each lies, unit.py shards and frees the
buffer, grads.py follows the gradients, and sharded.py is what stands in the model meanwhile.
"""

from zerolab.unit.unit import FlatUnit

__all__ = ["FlatUnit"]

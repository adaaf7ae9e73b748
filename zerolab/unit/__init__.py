"""One group of parameters in one flat buffer: span.py says where each lies, unit.py shards and frees the
buffer, grads.py follows the gradients, producers.py the GPU streams that they come on, and sharded.py is what
stands in the model meanwhile.
"""

from zerolab.unit.unit import FlatUnit

__all__ = ["FlatUnit"]

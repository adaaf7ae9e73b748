"""One group of parameters in one flat buffer. span.py and layout.py say where each parameter lies, and
where the buffer is cut. unit.py shards and frees the buffer. writes.py and watched_parameter.py find what
users write to it, grads.py collects the gradients, states.py says which states both go through,
producers.py knows the GPU streams that gradients come on, and sharded.py is what stands in the model for a
parameter or a gradient that is not there.
"""

from zerolab.unit.unit import FlatUnit, publish

__all__ = ["FlatUnit", "publish"]

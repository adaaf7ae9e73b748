"""WHEN the stages' verbs run. units.py finds the units in a model, states.py holds what the run and each unit
are doing, gather.py makes units whole in time, reduction.py reduces their gradients in one order,
model_hooks.py calls both from forward and backward, passes.py tells which backward pass a hook is in,
clearing.py notes which gradients users clear, agreement.py compares the ranks, and engine.py is what the
optimizer uses.
"""

from zerolab.engine.engine import Engine

__all__ = ["Engine"]

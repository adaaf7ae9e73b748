"""WHEN the stages' verbs run: scopes.py finds the units in a model, gather.py makes them whole in time,
reduction.py reduces their gradients in one order, agreement.py has the ranks agree, passes.py tells where in
a backward pass a hook finds itself, and engine.py hangs all of it into the model as hooks.
"""

from zerolab.engine.engine import Engine

__all__ = ["Engine"]

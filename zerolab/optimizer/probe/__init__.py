"""Probe: run an optimizer on small parameters to find whether it can be sharded, and how.

ZeRO gives each rank a slice of every parameter, cut at any element, and updates one unit after the other.
That is correct only for an optimizer whose update of an element depends on nothing but the history of that
element and the number of steps: Adam, SGD with momentum, RMSprop. Others need whole parameters, each of which
one rank can own: Muon (orthogonalizes matrices), Adafactor (means of rows and columns), AdamP (the angle
between gradient and weights). Others look across parameters and cannot be sharded: LBFGS (one curvature for
all), Prodigy (one step size for all), a class that clips by the global norm. A list of names would miss all
others, so the probe runs each optimizer in the ways that ranks would, and compares the bits.

verdict.py asks the question, about an optimizer class with its keywords (subject.py). elementwise.py and
by_parameter.py answer it: they make plans, and run trials (trial.py) with gradients of many kinds (given.py)
side by side (division.py). state_bytes.py measures state, values.py compares it, and refused.py has the kinds
of optimizers and the ways out.
"""

from zerolab.optimizer.probe.contract import is_torchs
from zerolab.optimizer.probe.refused import Kind
from zerolab.optimizer.probe.subject import keywords_of_group
from zerolab.optimizer.probe.verdict import (
    Verdict,
    complete_options,
    kind_of,
    refusal_of_closure,
    state_bytes_of,
    state_bytes_per_parameter,
    verdict_of,
)

__all__ = [
    "Kind",
    "Verdict",
    "complete_options",
    "is_torchs",
    "keywords_of_group",
    "kind_of",
    "refusal_of_closure",
    "state_bytes_of",
    "state_bytes_per_parameter",
    "verdict_of",
]

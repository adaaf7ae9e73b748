"""Compare sharded training with training in one process.

reference.py trains in one process, prediction.py computes the paper's formulas for the model, parity.py
compares, and table.py prints the result.
"""

from zerolab.parity.parity import Report, verify
from zerolab.parity.reference import compute_deterministically

__all__ = ["Report", "compute_deterministically", "verify"]

"""The same training sharded and in one process: reference.py is the one process, prediction.py the paper's
formulas for this model, parity.py the comparison, and table.py prints it.
"""

from zerolab.parity.parity import Report, verify
from zerolab.parity.reference import compute_deterministically

__all__ = ["Report", "compute_deterministically", "verify"]

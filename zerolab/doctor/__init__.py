"""``python -m zerolab doctor``: check what the course needs on this machine, and say how to fix it.

Every line is the result of a probe that runs now. doctor.py is the command, probes.py the table of probes,
and examine.py runs each probe in a process of its own.
"""

from zerolab.doctor.doctor import add_arguments, run

__all__ = ["add_arguments", "run"]

"""``python -m zerolab doctor``: does what the course needs work on this machine, and if not, what helps.

Nothing is read off a list: every line is a probe that is run now. doctor.py is the command, probes.py the
table of what is looked at, and examine.py runs each probe where it can do no harm.
"""

from zerolab.doctor.doctor import add_arguments, run

__all__ = ["add_arguments", "run"]

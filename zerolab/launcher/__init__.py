"""Run a function on N ranks from a notebook or a script, or join the ranks a launcher has started.

launcher.py is the way in; rendezvous.py joins torchrun, mpirun and srun. Behind it, in the order of a launch:
_payload pickles the function, _forkclient asks the _forkserver for processes, _rank is one of them, _output
carries its prints, _watch waits for all, and _failures and _stacks say what went wrong.
"""

from zerolab.launcher._failures import LaunchTimeout, WorkerError
from zerolab.launcher.launcher import launch, threads_per_rank
from zerolab.launcher.rendezvous import init_process_group

__all__ = ["LaunchTimeout", "WorkerError", "init_process_group", "launch", "threads_per_rank"]

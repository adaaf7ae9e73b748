"""Run a function on N ranks from a notebook or a script, or join the ranks a launcher has started.

launcher.py is the way in; rendezvous.py joins torchrun, mpirun and srun. The other modules serve these two.
In the order of a launch: payload pickles the function, forkclient asks the forkserver for processes,
inherited is what of zerolab these need not import, rank is one of them, output carries its prints, watch
waits for all, failures and stacks say what went wrong. protocol has the messages between these processes.
What `__all__` names is public; the modules are not.
"""

from zerolab.launcher.failures import LaunchTimeout, WorkerError
from zerolab.launcher.launcher import launch, threads_per_rank
from zerolab.launcher.rendezvous import init_process_group

__all__ = ["LaunchTimeout", "WorkerError", "init_process_group", "launch", "threads_per_rank"]

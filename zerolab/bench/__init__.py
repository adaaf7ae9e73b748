"""Compare zerolab with DDP, ZeroRedundancyOptimizer, fully_shard and DeepSpeed: ``python -m zerolab bench``.

contestants.py builds the contestants. race.py times their steps, in turn, in one process group. footprint.py
measures the memory and the bytes sent of each one alone. overhead.py measures the engine's own share of a
step. sweep.py varies ranks and parameters. ratios.py is the arithmetic, targets.py has the targets, table.py
and plot.py show the results, machine.py describes the machine, and bench.py is the command.
"""

"""Side by side with DDP, ZeroRedundancyOptimizer, fully_shard and DeepSpeed: ``python -m zerolab bench``.

contestants.py says who takes part and how each trains. race.py has all of them take steps in turn in one
process group; footprint.py weighs each alone, in memory and on the wire; overhead.py tells the engine's own
share from computation and wire; sweep.py lets ranks and parameters grow. ratios.py is the arithmetic,
targets.py what we set out to reach, table.py and plot.py show it, machine.py says where it ran, and bench.py
is the command.
"""

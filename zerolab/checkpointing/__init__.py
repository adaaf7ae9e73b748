"""Activation checkpointing: keep the inputs of a block, and compute its activations again in backward.

The inputs themselves grow with batch x sequence x hidden, and tensor parallelism leaves them whole on every
rank. So they can be partitioned over the tensor-parallel ranks (P_a), and each part can be moved to host
memory or to a file (P_a+cpu).

Source: Chen et al. (arXiv:1604.06174); ZeRO §6.1, partitioned activation checkpointing (arXiv:1910.02054).
"""

from zerolab.checkpointing.blocks import Checkpointing

__all__ = ["Checkpointing"]

"""A solution of lesson 05's exercise."""

from zerolab import ring


def reduce_and_keep(flat, kept):
    # Stage 2 adds this clone to stage 1: a view would keep the whole of flat. See zerolab/stages/stage2.py.
    mine = ring.reduce_scatter(flat).clone()
    return mine if kept is None else kept + mine

"""Drawn loops: sequences of what users do, run by the engine on real ranks and by replicas beside it.

In reading order: plans (what a loop is, and how a seed draws one), models (what is trained), user_code, side,
replicas_side and engine_side (the actions, done to either), session (a loop on a rank, judged after every
action), odd_rank (what one rank does alone), campaign (many loops in few launches), shrinking (the smallest
loop that still fails).
"""

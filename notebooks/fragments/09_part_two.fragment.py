# %%
import torch

import zerolab
from zerolab import cost, memory
from zerolab.collectives import Work
from zerolab.course import show_source
from zerolab.course.lessons.incident_room.from_empty import check_stages, show_trillion
from zerolab.course.lessons.incident_room.own_tests import check_test
from zerolab.stages.base import Stage

# %% [markdown]
# ## A test of your own
#
# In every incident so far somebody else had noticed. The loss looked wrong, or a job ran out of memory. Who
# works on an engine wants to know *before* that. Now you write the test that finds such mistakes.
#
# How good is a test? You find out by breaking what it tests. A **mutant** is the same engine with one mistake
# in it. A good test passes with the right engine and fails with every mutant. We have twelve of them, and all
# are mistakes that people make: in the values, in the bytes that are sent, in memory. Some show with two ranks
# and some only with three, some in the first step and some only later.
#
# > **Second exercise · difficulty 3 of 5 · 15 minutes.** Write `my_test(train)`. It calls `train` as often as
# > you like and uses `assert` for everything that must be so.
# >
# > `run = train(ranks=2, stage=2, steps=1, micro_batches=1, clip=None)` trains a small model on real ranks,
# > with SGD and momentum, in fp32. There are up to 4 ranks, 4 steps and 4 micro-batches. A number for `clip`
# > is the norm that gradients are clipped to. It returns what there is to see:
# >
# > - `run.parameters[rank]`: all parameters of that rank, as one tensor. `run.alone`: the same after the same
# >   training in one process. zerolab promises the same bits.
# > - `run.memory[rank]`: what `optimizer.memory()` says there after the last step: `params_bytes`,
# >   `grads_bytes` and `optimizer_bytes`. SGD with momentum remembers 4 bytes for a parameter.
# > - `run.sent[rank]`: the payload bytes of the last step, without the factor (N−1)/N. Every micro-batch is
# >   reduced by itself: there is no `no_sync()`.
# > - `run.psi`: the number of parameters. It can be divided by the number of ranks.
# >
# > You have `memory.model_states` from lesson 01 and `cost.communication_volume` from lesson 02, where
# > `reduce_each=True` counts a reduction for every micro-batch.
#
# Here is what one training returns, through the eyes of a test:


# %%
# Second exercise
def my_test(train): ...  # run = train(ranks=2, stage=2), and then assert what must be so


check_test(my_test)

# %% [markdown]
# The check names every mutant that passes your test, by what it does wrong. It does not say how to find it.
# Stuck? `check_test.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and `check_test.solution()`
# prints a test.
#
# Look at a test that finds all twelve. It is short, and it is one loop: *all* stages, *all* ranks, every
# promise. Three ranks, a second step, two micro-batches and clipping cost nothing more, and without any one of
# them some mutant lives. zerolab's own tests are made in the same way, in
# `tests/promises/test_broken_stages.py`.

# %% [markdown]
# ## ZeRO from an empty file
#
# You have read the four stages, compared them, and found mistakes in them. Now close the files. Write all four
# from nothing. They fit in 80 lines.
#
# What you write says **what** is sharded. *When* that happens is the engine's part: it has the hooks of
# lessons 03 to 06, and it calls six methods of your classes. This is all that it asks for:

# %%
show_source(Stage)

# %% [markdown]
# The building blocks are a `unit` and `self.comm`. A unit is a group of parameters in one flat buffer.
#
# | Of the parameters | |
# |---|---|
# | `unit.padded_numel` | how many elements the buffer has. N divides it |
# | `unit.own(range)` | choose the range, a `slice`, that this rank updates. Once, in `setup` |
# | `unit.owned` | that range |
# | `unit.flat` | the buffer with all parameters |
# | `unit.detach_shard()` | give the owned range a storage of its own |
# | `unit.free()` | free the buffer. The parameters cannot be used any more |
# | `unit.refill()` | bring the buffer back, with the own shard in its place and nothing else |
# | `unit.restore_parameters()` | the buffer is whole again: let the model use it |
# | `unit.expect(wait)` | others have updated parts of the buffer. Whoever needs it next calls `wait()` first |
#
# | Of the gradients | |
# |---|---|
# | `unit.grads.local` | this rank's own gradients, as long as the buffer. Reduced in place |
# | `unit.grads.op` | what to reduce to. The engine divides a sum by N, once, before the update |
# | `unit.grads.keep(reduced)` | hand over the reduced gradients of `unit.owned` |
# | `unit.grads.free_local()` | free `unit.grads.local` |
#
# | Collectives | |
# |---|---|
# | `self.comm.all_reduce(flat, unit, op)` | every rank gets all of the result |
# | `self.comm.reduce_scatter(flat, unit, op)` | every rank gets its own part of it. The rest is undefined |
# | `self.comm.all_gather(flat, unit)` | every rank sends its own part and receives the others |
# | `self.comm.shard_range(padded_numel)` | this rank's part, as a `slice` |
#
# All work in place and return a `Work`. `work.wait()` waits for the result. `work.then(function)` calls the
# function after that, and returns the work. `Work()` alone is one where there is nothing to wait for.
#
# > **Third exercise · difficulty 5 of 5 · 40 minutes.** Write the four classes. A class may derive from the
# > one before it and say only what changes: `class Stage1(Stage0)`. Run the check after every class. It trains
# > with what is there and says which stage is wrong in values, in traffic or in memory. Stages that are right
# > go through `zerolab.verify`. When all four are, they are rehearsed with 10¹² parameters on 1,024 ranks.
# > That takes about half a minute.


# %%
# Third exercise
class Stage0(Stage): ...


class Stage1(Stage): ...


class Stage2(Stage): ...


class Stage3(Stage): ...


check_stages([Stage0, Stage1, Stage2, Stage3])

# %% [markdown]
# Stuck? `check_stages.hint(1)` is about stages 0 and 1, `hint(2)` about stage 2, `hint(3)` about stage 3, and
# `check_stages.solution()` prints four classes.
#
# ## Your engine, a trillion parameters
#
# The next cell runs *your* stages as rank 0 of 1,024, in a model of 10¹² parameters. It is the rehearsal of
# lesson 06. In the first lesson you computed these numbers from a formula. Now they are counted from what your
# own code holds and sends.

# %%
show_trillion([Stage0, Stage1, Stage2, Stage3])

# %% [markdown]
# A GPU of 80 GB holds the model states of stage 3, and no other. When you have written the four classes,
# compare them with `zerolab/stages`: stage by stage they say the same.

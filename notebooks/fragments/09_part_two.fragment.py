# %%
import torch

from zerolab import cost, memory
from zerolab.collectives import Work
from zerolab.course import show_source
from zerolab.course.lessons.incident_room.from_empty import check_stages, show_trillion
from zerolab.course.lessons.incident_room.own_tests import check_test
from zerolab.stages.base import Stage

# %% [markdown]
# ## A test of your own
#
# In every incident so far somebody else had noticed. The loss looked wrong, or a job ran out of memory. If
# you work on an engine, you want to know *before* that. Now you write the test that finds such mistakes.
#
# How good is a test? You find out by breaking what it tests. A **mutant** is the same engine with one mistake
# in it. A good test passes with the right engine and fails with every mutant. Here are twelve of them. People
# make all of these mistakes: in the values, in the bytes that are sent, in memory. Some show on two ranks,
# some only on three. Some show in the first step, some only later.
#
# What must be so? zerolab promises the *bits* of one process, and the bytes of the paper's formulas. Two
# numbers that are close are not the same bits. Here the numbers of three ranks are added in two orders:

# %%
of_ranks = torch.tensor([0.1, 0.3, 0.4])
up, down = sum(of_ranks), sum(of_ranks.flip(0))
print("close:", torch.allclose(up, down), "and the same bits:", torch.equal(up, down))

# %% [markdown]
# The formulas you know from lessons 01 and 02. For 768 parameters in fp32 on 3 ranks, with SGD and momentum,
# which remembers 4 bytes for a parameter, and with 2 micro-batches, which are reduced one by one:

# %%
for stage in range(4):
    held = memory.model_states(768, 3, stage, precision="fp32", k=4)
    sent = 4 * cost.communication_volume(768, stage, micro_batches=2, reduce_each=True)
    states = (held.params_bytes, held.grads_bytes, held.optimizer_bytes)
    print(f"stage {stage}: {sum(states):,.0f} bytes held, {sent:,} bytes sent")

# %% [markdown]
# > **Second exercise · difficulty 3 of 5 · 15 minutes.** Write `my_test(train)`. It calls `train` as often as
# > you like, and uses `assert` for everything that must be so.
# >
# > `run = train(ranks=2, stage=2, steps=1, micro_batches=1, clip=None)` trains a small model on real ranks,
# > with SGD and momentum, in fp32. You can ask for up to 4 ranks, 4 steps and 4 micro-batches. A number for
# > `clip` is the norm that the gradients are clipped to. `run` is what there is to see:
# >
# > - `run.parameters[rank]`: all parameters of that rank, as one tensor.
# > - `run.alone`: the same after the same training in one process.
# > - `run.memory[rank]`: what `optimizer.memory()` says there after the last step. It has `params_bytes`,
# >   `grads_bytes` and `optimizer_bytes`.
# > - `run.sent[rank]`: the payload bytes of the last step. Every micro-batch is reduced by itself: the loop
# >   has no `no_sync()`.
# > - `run.psi`: the number of parameters.
# >
# > The check runs your test with the right engine first, and then with each mutant.


# %%
# Second exercise
def my_test(train): ...  # run = train(ranks=2, stage=2), and then assert what must be so


check_test(my_test)

# %% [markdown]
# The check names every mutant that passes your test, by what it does wrong. How to find it is for you to see.
# Stuck? `check_test.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and `check_test.solution()`
# prints a test.
#
# Compare your test with that one. It is a single loop: all stages, all ranks, every promise. It trains with
# three ranks, a second step, two micro-batches and clipping. Take out one of these, and some mutant passes.
# zerolab itself is tested in the same way, in `tests/promises/test_broken_stages.py`.

# %% [markdown]
# ## ZeRO from an empty file
#
# You have read the four stages, compared them, and found mistakes in them. Now close the files and write all
# four yourself. They fit in 80 lines.
#
# You write **what** is sharded. **When** something happens is the engine's part. It has the hooks of lessons
# 03 to 06, and it calls six methods of your classes. This is all that it asks of a stage:

# %%
show_source(Stage)

# %% [markdown]
# The building blocks are `unit` and `self.comm`. A unit is a group of parameters in one flat buffer.
#
# | Parameters | |
# |---|---|
# | `unit.padded_numel` | how many elements the buffer has. N divides it |
# | `unit.own(range)` | choose the range, a `slice`, that this rank updates. Once, in `setup` |
# | `unit.owned` | that range |
# | `unit.flat` | the buffer with all parameters |
# | `unit.detach_shard()` | give the owned range a storage of its own |
# | `unit.free()` | free the buffer. From now on the parameters cannot be used |
# | `unit.refill()` | allocate the buffer again and copy the owned range into it |
# | `unit.restore_parameters()` | the buffer is complete: let the model use the parameters |
# | `unit.expect(wait)` | other ranks send what they updated. What reads the parameters next calls `wait()` |
#
# | Gradients | |
# |---|---|
# | `unit.grads.local` | this rank's own gradients, as long as the buffer. They are reduced in place |
# | `unit.grads.op` | what to reduce to. If it is the sum, the engine divides it by N before the update |
# | `unit.grads.keep(reduced)` | hand over the reduced gradients of `unit.owned` |
# | `unit.grads.free_local()` | free `unit.grads.local` |
#
# | Collectives | |
# |---|---|
# | `self.comm.all_reduce(flat, unit, op)` | every rank gets the whole result |
# | `self.comm.reduce_scatter(flat, unit, op)` | every rank gets its own part of it. The rest is undefined |
# | `self.comm.all_gather(flat, unit)` | every rank sends its own part and receives the others |
# | `self.comm.shard_range(padded_numel)` | this rank's part, as a `slice` |
#
# The collectives work in place. Each returns a `Work` at once, and the result is there after `work.wait()`.
# `work.then(function)` calls the function after that, and returns the same work. An empty `Work()` has
# nothing to wait for:

# %%
work = Work().then(lambda: print("done"))
print("not waited for")
work.wait()

# %% [markdown]
# > **Third exercise · difficulty 5 of 5 · 40 minutes.** Write the four classes. A class may derive from the
# > one before it and say only what changes, as in `class Stage1(Stage0)`. Run the check after each class.
# >
# > The check trains with what is there. It says of each stage whether values, traffic and memory are right,
# > and runs `zerolab.verify`. When all four are right, they take a step of 10¹² parameters as one of 1,024
# > ranks. All of that takes about half a minute.


# %%
# Third exercise
class Stage0(Stage): ...


class Stage1(Stage): ...


class Stage2(Stage): ...


class Stage3(Stage): ...


check_stages([Stage0, Stage1, Stage2, Stage3])

# %% [markdown]
# Stuck? `check_stages.hint(1)` is about stage 0, `hint(2)` about stages 1 and 2, `hint(3)` about stage 3, and
# `check_stages.solution()` prints four classes.
#
# ## Your engine, a trillion parameters
#
# The next cell runs *your* stages as rank 0 of 1,024, in a model of 10¹² parameters. It is the rehearsal of
# lesson 06. In lesson 01 you computed such numbers with a formula. Now they are counted from what your own
# code holds and sends.

# %%
show_trillion([Stage0, Stage1, Stage2, Stage3])

# %% [markdown]
# With all four classes written, only stage 3 leaves room on a GPU of 80 GB. Now open `zerolab/stages` again
# and compare. You know why every line is there.

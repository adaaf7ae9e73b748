# %% [markdown]
# # 09 · The incident room: twelve engines, and one fault in each
#
# > **90 minutes, and 80 more for tickets 11 and 12, a test and all four stages, in a second sitting.**
# > *You need:* the four collectives (lesson 02), stages 1 to 3 (lessons 04 to 06), and the ledger of messages
# > (lesson 08).
# >
# > *Afterwards you can* read a loss curve, a ledger, a memory table and the report of a dead job, find the
# > fault behind it in forty lines, and repair it without moving a byte more. You can write a test that tells
# > a right engine from a broken one, and all four stages from an empty file.
# >
# > *Paper:* ZeRO, §5 and §7, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).
# >
# > *Words:* the [glossary](../docs/glossary.md) explains the main ones.

# %% [markdown]
# ## The question
#
# Your team answers questions about training on many GPUs. Twelve teams train with engines of their own, and
# each has written a *ticket*: a report of what goes wrong. Two of them got an error, and neither error said
# what was wrong. Each engine is short, and **exactly one thing in it is wrong**. What is it?
#
# Each fault has a history: an engine that people use had it, or a close relative of it. When your repair
# passes, its check tells you which engine that was and where its users talked about it.

# %%
import torch
import torch.distributed as dist  # noqa: F401, for the exercises

from zerolab import cost, memory, ring  # noqa: F401, for the exercises
from zerolab.collectives import Work
from zerolab.course import answer, figure, predict, show, show_source
from zerolab.course.lessons.incident_room import *
from zerolab.course.lessons.incident_room import quiz
from zerolab.course.lessons.incident_room.lockstep import alone
from zerolab.course.lessons.incident_room.room import start
from zerolab.course.lessons.incident_room.watching import curve, exam, report, watch, watch_resume
from zerolab.course.look import COLOURS, INK, PALE
from zerolab.stages.base import Stage

# %% [markdown]
# ## The engine without a fault
#
# Eleven of the twelve engines have this form, with small changes. (Ticket 8's is about saving.) Here it is
# without a fault: stage 1, with the ring of lesson 02. Its
# optimizer is SGD with *momentum*: a running sum of the gradients, one number for each parameter. The
# momentum is the optimizer state, so it is what stage 1 shards. Read the four methods `cut`, `reduce`,
# `update` and `gather`, and then `step`, which calls them. You will read them often.

# %%
show_source(Engine)

# %% [markdown]
# The job is small and exact: a linear model of 103 parameters in fp64, and four ranks with 120 samples each.
# `watch` runs it on real ranks, and returns what each rank saw: `flat`, its parameters at the end; `passes`,
# how many Ψ it moved in each step (moving Ψ once is one pass over all parameters); and `state`, the elements
# of optimizer state that it holds. `alone` does the same in one process. Both start with the same parameters.

# %%
ranks, (loss_alone, flat_alone) = watch(Engine), alone()
close = all(torch.allclose(rank.flat, flat_alone, rtol=1e-9) for rank in ranks)
print("every rank ends where one process ends:", close)
print(f"a rank moves {ranks[0].passes[-1]:.1f}Ψ a step and holds {ranks[0].state} elements of momentum")


# %%
def draw(step_of_resume=None, **curves):
    fig = figure(height=2.5)
    ax = fig.subplots()
    for place, (label, losses) in enumerate(curves.items()):
        looks = {"color": PALE, "linewidth": 7, "marker": ""} if place == 0 else {"markevery": 4}
        ax.semilogy(losses, label=label.replace("_", " "), **looks)
    if step_of_resume:
        ax.axvline(step_of_resume, color=INK, linestyle=":")
    if max(losses) < 5 * min(losses):
        ax.set_yscale("linear")
    ax.set(xlabel="step" + " (dotted: the resume)" * bool(step_of_resume), ylabel="loss of all samples")
    said = "; ".join(f"{label.replace('_', ' ')} {losses[-1]:.2g}" for label, losses in curves.items())
    show(fig, f"The loss of each step. At the end: {said}.")


# %%
draw(one_process=loss_alone, four_ranks=curve(ranks))

# %% [markdown]
# Both numbers are those of lesson 04: 2Ψ, and 1/N of the optimizer state. The two curves lie on top of each
# other. So this engine has no fault.
#
# ## How to work on a ticket
#
# 1. Read the symptom. Which of the three is wrong: **values, bytes or memory**?
# 2. Read the engine. It stands there in full, and one thing in it is wrong.
# 3. Write `class Repaired(Engine1):` with the methods that you change. The others are inherited.
#    `MOMENTUM` and `UNITS`, which some engines use, are imported.
# 4. The check runs your engine on 3, 2 and 4 ranks. It compares the parameters with one process, the bytes
#    with the ledger, and, where the ticket is about memory, what the engine keeps with what it should keep.
#    If something is still wrong, it says what. A repair may neither move more bytes nor keep more optimizer
#    state than the right engine, so tickets have no targets.
#
# ## Ticket 1: the loss stops falling
#
# > "Our loss falls as it should, and then it stays at 0.76. On two GPUs it falls lower than on four. In one
# > process it falls to nearly zero. Same data, same seed, same learning rate."

# %%
ranks = watch(Engine1)
draw(one_process=loss_alone, ticket_1=curve(ranks))

# %%
changed = ranks[0].flat != start()
print(f"{int(changed.sum())} of {len(changed)} parameters have changed since the start")

# %%
show_source(Engine1)

# %% [markdown]
# > **Repair it. Difficulty 1 of 5 · importance 4 of 5 · 5 minutes.** All parameters learn, on any number of
# > ranks. A step still moves 2Ψ, and the momentum stays sharded.


# %%
# Exercise
class Repaired(Engine1): ...  # the methods that you change


check_1(Repaired)

# %% [markdown]
# Stuck? `check_1.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and `check_1.solution()` prints a
# solution. Every ticket has hints and a solution.
#
# ## Ticket 2: more micro-batches, and the loss falls more slowly
#
# > "We went from one micro-batch to four, to have a larger batch. The memory is fine. But now the loss falls
# > four times more slowly. Somebody has raised the learning rate to make up for it, and I do not like that."

# %%
one, four = watch(Engine2), watch(Engine2, micro_batches=4)
draw(one_process=alone(micro_batches=4)[0], with_one_micro_batch=curve(one), with_four=curve(four))

# %%
show_source(Engine2)

# %% [markdown]
# > **Repair it. Difficulty 1 of 5 · importance 5 of 5 · 4 minutes.** The gradient is the mean over ranks and
# > micro-batches.


# %%
# Exercise
class Repaired(Engine2): ...


check_2(Repaired)

# %% [markdown]
# Stuck? `check_2.hint(1)`, and `check_2.solution()`.
#
# ## Ticket 3: every rank logs a different gradient norm
#
# > "We clip gradients to a norm of 1. The dashboard shows the norm before clipping, a line for each rank, and
# > the lines are different. Which one is right?"

# %%
ranks = watch(Engine3)
for rank, seen in enumerate(ranks):
    print(f"rank {rank} logs a norm of {seen.logs[0]:5.2f} in the first step")

# %% [markdown]
# **What is the norm of the whole gradient?** Each line above is the norm of a quarter of it.

# %%
my_guess = ...

# %%
norms = torch.tensor([seen.logs[0] for seen in ranks])
predict(my_guess, norms.square().sum().sqrt().item(), quiz.NORM)

# %%
show_source(Engine3)

# %% [markdown]
# > **Repair it. Difficulty 2 of 5 · importance 4 of 5 · 6 minutes.** All ranks clip by the norm of the whole
# > mean gradient. That may send a few bytes more, and no second message as long as the gradient.


# %%
# Exercise
class Repaired(Engine3): ...


check_3(Repaired)

# %% [markdown]
# Stuck? `check_3.hint(1)`, and `check_3.solution()`.
#
# ## Ticket 4: memory grows with every micro-batch
#
# > "We run stage 2, and reduce every micro-batch, so that a rank keeps 1/N of a gradient. With four
# > micro-batches we run out of memory, with two we do not. The loss is perfect."
#
# **How many bytes of this step's gradients should rank 0 keep when the last of four micro-batches begins?**
# There are 103 parameters of 8 bytes on four ranks, and rank 0's shard is one of the longer ones.

# %%
my_guess = ...

# %%
predict(my_guess, quiz.KEPT_BYTES, quiz.KEPT)

# %% [markdown]
# And this is what the engine keeps in a step, counted from live storages.

# %%
kept = watch(Engine4, steps=3, micro_batches=4)[0].kept
moments = [f"before micro-batch {number}" for number in range(4)] + ["after the step"]
state = [sum(size for name, size in held.items() if "momentum" in name) for held in kept]
rest = [sum(held.values()) - size for held, size in zip(kept, state, strict=True)]
fig = figure(height=2.4)
ax = fig.subplots()
ax.barh(moments, state, color=COLOURS["optimizer state"], label="optimizer state")
bars = ax.barh(moments, rest, left=state, color=COLOURS["gradients"], label="gradients")
ax.bar_label(bars, [f"{size:,}" for size in rest], padding=5, size=9)
ax.set(xlabel="bytes that rank 0 keeps", xlim=(0, 3400), ylim=(4.5, -0.5))
show(fig, "Bytes of gradients: " + ", ".join(map("{}: {:,}".format, moments, rest)) + ".")

# %%
show_source(Engine4)

# %% [markdown]
# (In every bar 208 bytes are the gradient of the last update, a shard. So a right engine shows 208 in the
# first bar and in the last, and 416 in those between.)
#
# > **Repair it. Difficulty 2 of 5 · importance 4 of 5 · 6 minutes.** Every micro-batch is reduced. Between
# > micro-batches the engine keeps one shard of this step's gradients, for any number of micro-batches: a
# > shard for each of them would still grow.


# %%
# Exercise
class Repaired(Engine4): ...


check_4(Repaired)

# %% [markdown]
# Stuck? `check_4.hint(1)`, and `check_4.solution()`.
#
# ## Ticket 5: the training loss is perfect, and the evaluation is not
#
# > "The training loss is the one of a single process, digit for digit. Then we stop and evaluate, and every
# > rank gets a different loss, and none gets the right one. We have been searching in the evaluation for a
# > week."

# %%
ranks, (loss_alone_12, flat_alone_12) = watch(Engine5, steps=12), alone(steps=12)
off = max(abs(a / b - 1) for a, b in zip(curve(ranks), loss_alone_12, strict=True))
print("training loss as in one process:", off < 1e-9)
print(f"evaluation, one process: {exam(flat_alone_12):.3f}")
for rank, seen in enumerate(ranks):
    print(f"evaluation, rank {rank}:      {exam(seen.flat):.3f}")

# %%
show_source(Engine5)

# %% [markdown]
# > **Repair it. Difficulty 2 of 5 · importance 3 of 5 · 5 minutes.** After `step` every rank has all new
# > parameters. A step still moves 2Ψ.


# %%
# Exercise
class Repaired(Engine5): ...


check_5(Repaired)

# %% [markdown]
# Stuck? `check_5.hint(1)`, and `check_5.solution()`.
#
# ## Ticket 6: the job dies in its first step
#
# > "A process was killed in the middle of the backward pass, and the others lost their connection. It is our
# > new model: half of the ranks take another branch of it. We have two parameters, `body` with 62 elements
# > and `embedding` with 41. Here is what each rank was sending first when it died."
#
# `ring.reduce_scatter` sends a quarter of a buffer in each message. So a message has 15 or 16 elements of
# `body`, or 10 or 11 of `embedding`.

# %%
print(*report(Engine6), sep="\n")

# %% [markdown]
# This engine gets its parameters by name, and `batch.gradients` yields their gradients as backward gets them
# ready.

# %%
show_source(Engine6)

# %% [markdown]
# > **Repair it. Difficulty 3 of 5 · importance 5 of 5 · 8 minutes.** All ranks train, in whichever order
# > their gradients get ready. A step moves 2Ψ.


# %%
# Exercise
class Repaired(Engine6): ...


check_6(Repaired)

# %% [markdown]
# Stuck? `check_6.hint(1)`, and `check_6.solution()`.
#
# This team got an error by chance. If `body` and `embedding` were equally long, no process would have died.
# The messages would have fitted, and numbers of one parameter would have been added to those of the other.
#
# ## Ticket 7: the gradient norm climbs
#
# > "The loss falls for a few steps, and then it explodes. The gradient norm climbs through the first five
# > steps. We call `zero_grad()`, I have checked it three times."

# %%
ranks = watch(Engine7)
draw(one_process=loss_alone, ticket_7=curve(ranks))

# %%
print("rank 0's gradient norm:", *(f"{norm:.0f}" for norm in ranks[0].logs[:6]))

# %%
show_source(Engine7)

# %% [markdown]
# > **Repair it. Difficulty 2 of 5 · importance 4 of 5 · 5 minutes.** Each step uses its own gradients, with
# > any number of micro-batches.


# %%
# Exercise
class Repaired(Engine7): ...


check_7(Repaired)

# %% [markdown]
# Stuck? `check_7.hint(1)`, and `check_7.solution()`.
#
# ## Ticket 8: after a restart the loss falls more slowly
#
# > "We save every five steps. After a restart from the checkpoint the loss falls much more slowly than in a
# > run without a restart. On two ranks all is well, and on four it is not. The parameters in the checkpoint
# > are right, I have compared every number. It has to be the momentum, and I do not see how."
#
# This engine has two units of 42 and 61 elements. Each unit is padded, so that all its shards are equally
# long. `save` returns what a rank writes into its file, and `load` gets the list of all files. All of a step
# is in `step`, so you can read saving and loading by themselves.

# %%
before, after = watch_resume(Engine8, resumed_on=4)
draw(5, without_restart=alone(steps=5, resumed_on=4)[0], ticket_8=curve(before) + curve(after))

# %%
show_source(Engine8)

# %% [markdown]
# > **Repair it. Difficulty 3 of 5 · importance 4 of 5 · 8 minutes.** After `load` every rank has the momentum
# > that it saved. The run resumes on as many ranks as saved it, and their number is any.


# %%
# Exercise
class Repaired(Engine8): ...


check_8(Repaired)

# %% [markdown]
# Stuck? `check_8.hint(1)`, and `check_8.solution()`.
#
# ## Ticket 9: resumed on the rest of the machines
#
# > "Two of our four machines are gone, so we resumed on two. No error. But the loss falls more slowly than it
# > should after the resume. Every rank has loaded a file, I have seen it in the log."

# %%
before, after = watch_resume(Engine9, resumed_on=2)
draw(5, one_process=alone(steps=5, resumed_on=2)[0], ticket_9=curve(before) + curve(after))

# %%
show_source(Engine9)

# %% [markdown]
# > **Repair it. Difficulty 2 of 5 · importance 5 of 5 · 6 minutes.** The momentum is right after a resume on
# > any number of ranks. You may change `save` too, but it still sends nothing, and the files together hold
# > the momentum once.


# %%
# Exercise
class Repaired(Engine9): ...


check_9(Repaired)

# %% [markdown]
# Stuck? `check_9.hint(1)`, and `check_9.solution()`.
#
# ## Ticket 10: the loss ends too high, and all ranks agree
#
# > "Our samples come in micro-batches of different sizes: 120, 20, 10 or 7 samples. With the engine the loss
# > ends almost twice as high as in one process. The ranks agree with each other to the last digit."

# %%
ranks = watch(Engine10, uneven=True)
draw(one_process=alone(uneven=True)[0], ticket_10=curve(ranks))

# %%
print("samples of each rank:", *(seen.samples for seen in ranks))

# %%
show_source(Engine10)

# %% [markdown]
# > **Repair it. Difficulty 3 of 5 · importance 5 of 5 · 8 minutes.** The gradient is that of the mean over
# > *all* samples. `len(batch)` is the number of samples of a micro-batch. A rank may have several
# > micro-batches of different sizes. The ranks may send each other one number more, such as a count.


# %%
# Exercise
class Repaired(Engine10): ...


check_10(Repaired)

# %% [markdown]
# Stuck? `check_10.hint(1)`, and `check_10.solution()`.
#
# ## Ticket 11: more bytes than the model has
#
# > "The model has 103 parameters. Its embedding, 41 of them, is used twice: once at the input, and once more
# > as the head at the output. So there is one tensor with two names, a *tied weight*. The ledger shows 2.8Ψ
# > a step where 2Ψ are right, and the loss falls more slowly than in one process."

# %%
ranks = watch(Engine11, by_name=True, tied=True)
draw(one_process=alone(by_name=True, tied=True)[0], ticket_11=curve(ranks))

# %%
print(f"a rank moves {ranks[0].passes[-1]:.1f}Ψ a step and holds {ranks[0].state} elements of momentum")
print("a quarter of 103 parameters is 25 or 26")

# %%
show_source(Engine11)

# %% [markdown]
# > **Repair it. Difficulty 4 of 5 · importance 4 of 5 · 10 minutes.** The tied weight is one parameter: it is
# > updated once, with the gradients of both its uses. `batch.gradients(parameters)` yields a gradient for
# > each name. A step moves 2Ψ.


# %%
# Exercise
class Repaired(Engine11): ...


check_11(Repaired)

# %% [markdown]
# Stuck? `check_11.hint(1)`, and `check_11.solution()`.
#
# ## Ticket 12: with more micro-batches the network is full
#
# > "We run stage 3. Somebody read in the paper that it costs 1.5 times the traffic at most. We went from one
# > micro-batch to four, and now the GPUs wait for the network most of the time. Values and memory are fine."
#
# **How many Ψ does this engine move in a step with four micro-batches?** Read it first.

# %%
show_source(Engine12)

# %%
my_guess = ...

# %%
runs = [watch(Engine12, steps=2, gathers=True, micro_batches=many) for many in (1, 2, 4)]
moved = [round(ranks[0].passes[-1], 1) for ranks in runs]
rows = [f"M = {many}: {psi:g}Ψ" for many, psi in zip((1, 2, 4), moved, strict=True)]
predict(my_guess, moved[-1], quiz.MOVED, *rows)

# %% [markdown]
# The team has found out that there is room for whole parameters during a step, and for the gradient of one
# micro-batch until it is reduced. There is no room to keep a whole gradient from one micro-batch to the next.
# At rest only shards may stay.
#
# > **Repair it. Difficulty 3 of 5 · importance 4 of 5 · 8 minutes.** Move as little as that allows: (M+1)Ψ
# > for M micro-batches.


# %%
# Exercise
class Repaired(Engine12): ...


check_12(Repaired)

# %% [markdown]
# Stuck? `check_12.hint(1)`, and `check_12.solution()`.
#
# ## Debrief
#
# How many of the twelve engines raised an error? Two: one lost a connection, and one ran out of memory. The
# other ten trained, and no error told you. These are the questions that find such faults, in this order:
#
# - **Does one step equal one step of a single process?** Use data that differs for every element, rank
#   and micro-batch. Use SGD, because Adam hides a gradient that is too large or too small.
# - **On which N?** Test with N = 3: N = 2 and 4 hide more faults. Sizes that N does not divide show the
#   most.
# - **Do the ranks agree?** Compare the parameters over the ranks after every step, and not the losses.
# - **How many Ψ?** Count the bytes of one step with one micro-batch, and with four.
# - **What is alive?** Look between micro-batches and after the step.
# - **Does a resume equal no resume?** On the same N, and on another.

# %% [markdown]
# ## A test of your own
#
# In every ticket somebody else had noticed first. The loss looked wrong, or a job ran out of memory. If you
# work on an engine, you want to know *before* that. Now you write the test that finds such mistakes.
#
# How good is a test? You find out by breaking what it tests. A **mutant** is the same engine with one mistake
# in it. A good test passes with the right engine and fails with every mutant. The check has 14 of them.
# People make all of these mistakes: in the values, in the bytes that are sent, in memory. Some show on two
# ranks, some only on three. Some show in the first step, some only later.
#
# What must hold? A right engine leaves the *bits* of one process, in the bytes of the paper's formulas. Two
# numbers that are close are not the same bits. Here the numbers of three ranks are added in two orders:

# %%
of_ranks = torch.tensor([0.1, 0.3, 0.4])
up, down = sum(of_ranks), sum(of_ranks.flip(0))
print("close:", torch.allclose(up, down), "and the same bits:", torch.equal(up, down))

# %% [markdown]
# The formulas are those of lessons 01, 05 and 06. The model of this exercise has 768 parameters in fp32, and
# none of them are in its root, so at stage 3 a micro-batch moves 3Ψ. It trains on 3 ranks with SGD and
# momentum, which takes 4 bytes for a parameter. The next cell computes what a rank holds, and what it sends
# in a step of 2 micro-batches that are reduced one by one.

# %%
for stage in range(4):
    held = memory.model_states(768, 3, stage, precision="fp32", k=4)
    sent = 4 * cost.communication_volume(768, stage, micro_batches=2, reduce_each=True)
    states = (held.params_bytes, held.grads_bytes, held.optimizer_bytes)
    print(f"stage {stage}: {sum(states):,.0f} bytes held, {sent:,} bytes sent")

# %% [markdown]
# > **Write a test. Difficulty 3 of 5 · importance 5 of 5 · 15 minutes.** Write `my_test(train)`. It calls
# > `train` as often as you like, and uses `assert` for every condition that must hold.
# >
# > `run = train(ranks=2, stage=2, steps=1, micro_batches=1, clip=None)` trains a small model on real ranks,
# > with SGD and momentum, in fp32. You can ask for up to 4 ranks, 4 steps and 4 micro-batches. A number for
# > `clip` is the norm that the gradients are clipped to. Their own norm is between 0.3 and 2 here, so
# > `clip=0.1` clips in every step, and `clip=2` in none. `run` has what you may compare:
# >
# > - `run.parameters[rank]`: all parameters of that rank, as one tensor.
# > - `run.alone`: the same after the same training in one process.
# > - `run.memory[rank]`: what `optimizer.memory()` says there after the last `step()`, while the
# >   gradients are still kept. It has `params_bytes`,
# >   `grads_bytes` and `optimizer_bytes`, one for each term of the formula. Its `total_bytes` has more in it.
# > - `run.sent[rank]`: the *logical bytes* of the last step, as the paper counts them: twice the tensor for
# >   an all-reduce, once for its halves. Every micro-batch is reduced by itself: the loop has no `no_sync()`.
# > - `run.psi`: the number of parameters.
# >
# > The check runs your test with the right engine first, and then with each mutant.


# %%
# Exercise
def my_test(train): ...  # run = train(ranks=2, stage=2), and then assert what must hold


check_test(my_test)

# %% [markdown]
# The check names every mutant that passes your test, by what it does wrong. You decide how to detect it.
# Stuck? `check_test.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and `check_test.solution()`
# prints a test.
#
# Compare your test with that one. It is a single loop: all stages, all ranks, every condition. It trains
# with three ranks, a second step, two micro-batches and clipping. Take out one of these, and some mutant
# passes. zerolab itself is tested in the same way, in `tests/promises/test_broken_stages.py`.

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
# (`share` is written already. Its `unit.cuts` are for lesson 10.)
#
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
# | `unit.expect(wait)` | other ranks still send new values: `wait()` is called before anything reads them |
#
# | Gradients | |
# |---|---|
# | `unit.grads.local` | this rank's own gradients, as long as the buffer. They are reduced in place |
# | `unit.grads.op` | the operation: the sum, which the engine divides by N before the update, or the mean |
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
# > **Write four stages. Difficulty 5 of 5 · importance 5 of 5 · 40 minutes.** Write the four classes. A class
# > may derive from the one before it and say only what changes, as in `class Stage1(Stage0)`. Run the check
# > after each class, with the empty ones still in the list.
# >
# > The check trains with what is there. It says of each stage whether values, traffic and memory are right,
# > the peak too. All are demanded, so there are no targets. It then runs `zerolab.verify`. When all four are
# > right, they take a step of 10¹² parameters as one of 1,024 ranks. All of that takes from ten seconds to a
# > minute, depending on the machine.


# %%
# Exercise
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
# With all four classes written, only stage 3's model states fit on a GPU of 80 GB. (Lesson 06: with prefetch
# and reductions in flight the peak of a step is 94 GB, without them 63 GB.) Now open `zerolab/stages` again
# and compare. You know why every line is there.

# %% [markdown]
# ## Quiz
#
# Five questions. Click an answer, or go to it with the Tab key and press Space. Each answer says why it is
# right or wrong.

# %%
my_answers = ...
answer(my_answers, quiz.QUESTIONS)

# %% [markdown]
# ## Summary
#
# - A fault of a sharded engine seldom raises an error. It shows in values, in bytes or in memory, and each of
#   them has to be compared with a number that is known.
# - Values: a single process. Bytes: 2Ψ, (M+1)Ψ, 3MΨ. Memory: what each stage should keep.
# - The cheapest test has three ranks, sizes that three does not divide, several micro-batches, SGD, and a
#   resume at another N.
# - A test is as good as the broken engines that it finds.
# - The four stages are 80 lines. They say what is sharded, and the engine says when.
#
# **Next:** [10 · Muon](10_whole_matrices.ipynb): an optimizer whose update needs a whole matrix, and how it
# is sharded all the same.

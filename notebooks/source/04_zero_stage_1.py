# %% [markdown]
# # 04 · ZeRO stage 1: each rank updates its own shard
#
# > **65 minutes.** *You need:* the two halves of an all-reduce (lesson 02), data parallelism (lesson 03).
# >
# > *Afterwards you can* shard an optimizer's state over ranks without losing a parameter, say what that
# > saves, what it sends and what it never saves, read the trace of a sharded step, and load a state that
# > another number of ranks has saved.
# >
# > *Paper:* ZeRO, §5.1 and §7.2.1, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).
# >
# > *Words:* the [glossary](../docs/glossary.md) explains the main ones.

# %% [markdown]
# ## The question
#
# Lesson 03 ended with this: after the all-reduce every rank computes the same update, from the same
# gradients, with the same m and v. That is N times the same work, on N copies of the largest model state. Can
# the ranks divide this work among them?

# %%
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import zerolab
from zerolab import cost, data, memory, models, ring
from zerolab.course import answer, explore, figure, predict, show, show_diff, show_source, slider
from zerolab.course.gpus import verify_on_gpus
from zerolab.course.lessons.zero_stage_1 import check_load, check_owned, check_zero1, figures, quiz
from zerolab.course.look import COLOURS, INK, PALE, by_category, ink_on
from zerolab.parity import compute_deterministically
from zerolab.stages import stage0, stage1

# %% [markdown]
# First, is it really the same work? Four ranks take three steps at stage 0, each on its own text, and return
# the m and v of their Adam.

# %%
text = data.NextByte(data.text(), context=32, batch_size=8)


def build():
    compute_deterministically()
    torch.manual_seed(0)
    return models.GPT(width=64, depth=2, heads=2, context=32).to(zerolab.device())


def batch(step, rank):
    return [part.to(zerolab.device()) for part in text.batch(step, rank)]


# %%
def adams_memory():
    model = build()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=0, lr=3e-3)
    for step in range(3):
        model(*batch(step, optimizer.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [state[name].clone() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


by_rank = zerolab.launch(adams_memory, 4)
same = all(torch.equal(a, b) for others in by_rank[1:] for a, b in zip(by_rank[0], others, strict=True))
print(f"{len(by_rank[0])} tensors of m and v, the same bits on all 4 ranks: {same}")

# %% [markdown]
# The four ranks read different text, and they have the same optimizer state, four times.
#
# ## Predict: what would sharding it save?
#
# If each of N ranks updates 1/N of the parameters, it needs 1/N of the optimizer state. Parameters and
# gradients stay whole. A model of 20B parameters trains on 32 GPUs in mixed precision: 2 bytes for a bf16
# parameter, 2 for its gradient, K = 12 for the optimizer. **How many GB of model states does each GPU hold at
# stage 1?**

# %%
my_guess = ...

# %%
states = memory.model_states(20e9, world_size=32, stage=1)
parts = ("params", "grads", "optimizer")
rows = [f"{part:<10} {getattr(states, part + '_bytes') / 1e9:5.1f} GB" for part in parts]
predict(my_guess, states.total_bytes / 1e9, quiz.STAGE_1, *rows)

# %% [markdown]
# In mixed precision the optimizer updates the *master weights*, an fp32 copy of the parameters, because an
# update is often too small to change a bf16 number. They are 4 of the 12 bytes. Only the optimizer reads
# them, so they are easy to forget.
#
# ## A sharded optimizer that is wrong
#
# Below is a first attempt, of a kind that is often written. Each rank takes an equal part of the parameter
# *list* and gives it to its own Adam. The code runs, the loss falls, and memory is saved. It has three bugs.
# Find them before you continue. One of them leaves parameters untrained. The model has 29 tensors, and four
# ranks train it. **How many of the 29 does no rank update?**


# %%
def a_sketch():
    model, rank, world_size = build(), dist.get_rank(), dist.get_world_size()
    before, parameters = build(), list(model.parameters())
    share = len(parameters) // world_size
    adam = torch.optim.Adam(parameters[share * rank : share * (rank + 1)], lr=3e-3)
    for step in range(3):
        model(*batch(step, rank)).backward()
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        adam.step()
        adam.zero_grad()
    moved = [not torch.equal(new, old) for new, old in zip(parameters, before.parameters(), strict=True)]
    return moved, [parameter.grad is None for parameter in parameters]


# %%
my_guess = ...

# %%
moved, cleared = zip(*zerolab.launch(a_sketch, 4), strict=True)
names = [name for name, _ in build().named_parameters()]
rows = [f"rank {r}: {sum(moved[r])} tensors updated, {sum(cleared[r])} gradients cleared" for r in range(4)]
nobody = [name for place, name in enumerate(names) if not any(row[place] for row in moved)]
lost = sum(build().get_parameter(name).numel() for name in nobody)
rows.append(f"updated by no rank: {', '.join(nobody)}, {lost:,} parameters")
predict(my_guess, len(nobody), quiz.UNTRAINED, *rows)

# %% [markdown]
# <details><summary>Answer</summary>
#
# The three bugs:
#
# - **The remainder.** `len(parameters) // world_size` rounds down. 29 tensors make four parts of 7, and the
#   last tensor, the whole output head, is never trained.
# - **No communication.** Each rank updates its own 7 tensors and never gets the other 22. So there are four
#   different models, and none of them is right.
# - **`zero_grad()` clears only the gradients that its own Adam knows.** All other gradients are added up,
#   step after step, and the next all-reduce adds them to those of the ranks that own these tensors.
# </details>
#
# The sketch also has a weakness: 7 tensors can be large or small, so the parts differ in bytes. The rank with
# the largest part decides whether the job fits.

# %%
sizes = [parameter.numel() for parameter in build().parameters()]
print("parameters per rank:", [sum(sizes[7 * rank : 7 * rank + 7]) for rank in range(4)])
print("an even share:      ", sum(sizes) / 4)

# %% [markdown]
# ## Cut the buffer, not the list
#
# The remedy is not to divide the list. Put all parameters of a unit into one flat buffer, one after the
# other, and cut *the buffer* into N equal shards. A cut may go through the middle of a tensor. A little
# *padding* makes the shards equal. The figure shows a real unit of two small layers. **Move the slider: which
# number of ranks spreads the first weight over the most ranks? Does any element ever have two owners, or
# none?**

# %%
layer = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 4))
explore(partial(figures.partition_map, layer=layer), height=3.4, ranks=slider(1, 8, 4))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Eight ranks: then the 120 numbers of the first weight are on four of them, 32 + 32 + 32 + 24. At every
# setting each number of each parameter has exactly one owner. At 5 and 7 ranks the last rank owns only
# padding: all shards have the same size, which is rounded up to a multiple of 64 bytes, and this model is
# tiny.
# </details>
#
# There is padding inside the buffer, too. zerolab starts each parameter and each shard at a multiple of 64
# bytes, as PyTorch does with tensors of its own. At other addresses some CPU matrix products add in another
# order, and the last bits differ. In a model of real size all this padding is negligible.
#
# Adam allows a cut through a tensor because its update is *elementwise*: the new value of each element
# depends on its old value and on its own gradient, m and v alone. (Some optimizers use a whole matrix for
# each update, such as *Muon*. Their matrices cannot be cut like this. zerolab gives each of them to one rank
# as a whole.)
#
# ## Exercise: which slices does a rank own?
#
# > **Difficulty 2 of 5 · importance 4 of 5 · 8 minutes.** Every sharded engine computes this: the optimizer,
# > the files of a saved run and the error messages need to know which part of which parameter is on which
# > rank. A run of neighbouring elements of a parameter is a *slice*.
# >
# > - `sizes` are the numbers of elements of the parameters. They stand in the flat buffer one after the
# >   other, without padding between them (zerolab's padding inside the buffer is left out here).
# > - Padding at the end makes the `world_size` shards equal.
# > - Return a list with one `(start, stop)` for each parameter: the elements that `rank` owns, counted from
# >   the parameter's own first element. Where it owns none of them, that is an empty slice, such as `(0, 0)`.
# >   (The check also takes `slice(start, stop)` and `range(start, stop)`.)
# >
# > `owned_slices([6, 3, 7, 1], 3, 1)` is `[(0, 0), (0, 3), (0, 3), (0, 0)]`: of the 18 places, counted from
# > 0, rank 1 has places 6 to 11.


# %%
# Exercise
def owned_slices(sizes, world_size, rank): ...  # your code


check_owned(owned_slices)

# %% [markdown]
# Stuck? `check_owned.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_owned.solution()` prints a solution.
#
# ## How much must be sent?
#
# Before its update a rank needs the summed gradient of *its own* shard. After the update it needs the updated
# parameters of all ranks. The all-reduce of stage 0 moves 2Ψ elements per rank and step, in the paper's
# count. **How many Ψ does stage 1 move?**

# %%
my_guess = ...

# %%
predict(my_guess, cost.communication_volume(1, stage=1), quiz.TRAFFIC)

# %% [markdown]
# In lesson 02 an all-reduce was made of two halves:

# %%
show_source(ring.all_reduce, docstring=False)

# %% [markdown]
# After the first half each rank has the complete sum of its own shard. Its update needs no more than that. So
# stage 1 updates *between the halves*, and the second half carries new parameters instead of gradients. Both
# stages move the same amount.

# %%
fig = figure(height=2.4)
show(fig, figures.seam(fig))

# %% [markdown]
# Some texts describe stage 1 with *gathered updates*: each rank computes the change of its own parameters,
# the ranks gather the changes, and each rank adds all of them to its copy of the model. Here are the steps
# side by side:
#
# | | data parallel | stage 1 | stage 1, gathered updates |
# |---|---|---|---|
# | backward | Ψ gradients | Ψ gradients | Ψ gradients |
# | gradients | all-reduce, 2Ψ | reduce-scatter, Ψ | reduce-scatter, Ψ |
# | optimizer | updates Ψ | updates its own Ψ/N | computes the change of its own Ψ/N |
# | afterwards | nothing | all-gather of parameters, Ψ | all-gather of changes, Ψ; each rank adds them all |
# | sent in all | 2Ψ | 2Ψ | 2Ψ |
# | optimizer state | KΨ | KΨ/N | KΨ/N |
#
# Gathered updates move as much, and they need a buffer for Ψ changes. In mixed precision they are a bad idea:
# only the owner of a parameter has its fp32 master weight. The others would add the change to a bf16 number,
# and small changes would be lost. So zerolab gathers parameters.
#
# Now look at the code. This is the whole difference between the two stages. (P_os is the paper's name for
# stage 1: partitioned optimizer states.)

# %%
show_diff(stage0, stage1)

# %% [markdown]
# Three of the six methods changed. `setup` owns a shard instead of everything. `reduce_grads` is the first
# half. `update` steps and then starts the second half. `unit.expect` does not wait for it. The next operation
# that uses the unit's parameters waits for it. Usually that is the next forward pass. All stages share the
# rest of the package.
#
# ## Measure it
#
# One training step at each stage, on four ranks, in mixed precision, so that there are master weights to
# count. (The proof below trains in fp32 again.) `optimizer.memory()` counts real storages. The formula is
# computed from Ψ, N and the stage alone.


# %%
def measure(stage):
    model = build()
    options = {"stage": stage, "precision": "mixed"}
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, **options)
    model(*batch(0, optimizer.rank)).backward()
    optimizer.step()
    return optimizer.memory(), optimizer.trace.traffic(0)


measured = {stage: zerolab.launch(measure, 4, stage) for stage in (0, 1)}
psi = sum(sizes)

# %%
fig, left = figure(height=2.4), [0] * 4
ax, ranks = fig.subplots(), [f"rank {rank}" for rank in range(4)]
ax.barh(ranks, 16, color=PALE, label="stage 0")
held = [by_category(held, unit_bytes=psi) for held, _ in measured[1]]  # bytes per parameter
for category in held[0]:
    widths = [by_rank[category] for by_rank in held]
    drawn = ax.barh(ranks, widths, left=left, color=COLOURS[category], label=category)
    ax.bar_label(drawn, label_type="center", color=ink_on(COLOURS[category]), fmt="%g")
    left = [start + width for start, width in zip(left, widths, strict=True)]
ax.invert_yaxis()
ax.set(xlabel="measured bytes per parameter", xlim=(0, 16.5))
said = ", ".join(f"{size:g}Ψ of {category}" for category, size in held[0].items())
show(fig, f"Measured on each of 4 ranks at stage 1: {said}.")

# %% [markdown]
# Each rank holds a quarter of the optimizer state (green), and each a different quarter. The grey bars show
# stage 0: 16 bytes per parameter. By category:

# %%
for stage in (0, 1):
    held, _ = measured[stage][0]
    formula = memory.model_states(psi, 4, stage, "mixed")
    for name in ("params_bytes", "grads_bytes", "optimizer_bytes"):
        got, want = getattr(held, name), getattr(formula, name)
        print(f"stage {stage}  {name:<16} {got:>11,.0f}   equals the formula: {got == want}")

# %% [markdown]
# And what is sent? `logical_bytes` follows the paper's count. `wire_bytes` is what the rank really sends:
# (N−1)/N of the buffer in a reduce-scatter or an all-gather, and twice that in an all-reduce. The buffer
# includes a little padding. In mixed precision an element has 2 bytes.

# %%
for stage in (0, 1):
    _, traffic = measured[stage][0]
    expected = 2 * cost.communication_volume(psi, stage)
    print(f"stage {stage}: {traffic.logical_bytes:,} bytes, formula 2Ψ: {expected:,}")
    for op, part in traffic.by_op.items():
        print(f"         {op:<15}{part.logical_bytes:>8,}, really sent {part.wire_bytes:>8,}")

# %% [markdown]
# Both stages move the same number of bytes. Stage 1 keeps a quarter of the optimizer state and sends nothing
# more.
#
# ## One step, line by line
#
# Now follow one step of the smallest model: one linear layer and a softmax, with a `weight` of 10 × 784
# numbers and a `bias` of 10, on two ranks, with SGD and momentum. Every rank keeps a *trace*: a list of
# *events*. An event is one message or one update.
#
# We leave out the events of the phase `control`. In these messages of a few bytes the ranks compare what they
# are doing. If one rank does something else, the error names that rank, and the others stop waiting. These
# *control messages* carry no parameters and no gradients.


# %%
def one_step():
    model = models.make("logistic").to(zerolab.device())
    options = {"stage": 1, "lr": 0.1, "momentum": 0.9}
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.SGD, **options)
    examples = data.NextKind(data.text()).batch(0, optimizer.rank)
    model(*(part.to(zerolab.device()) for part in examples)).backward()
    optimizer.step()
    return [event for event in optimizer.trace.step(0) if event.phase != "control"]


# %%
for rank, events in enumerate(zerolab.launch(one_step, 2)):
    print(f"rank {rank}")
    for event in events:
        file, _, line = event.where.partition(":")  # the trace knows the line, too
        print(f"  {event.phase:<9}{event.op:<15}{event.wire_bytes:>7,} bytes sent   {file}")
        print(f"  {'':<9}{', '.join(event.slices)}")

# %% [markdown]
# - **backward, reduce-scatter.** Each rank sends half of its gradient, 3,936 numbers of 4 bytes. (The 7,850
#   parameters and their padding are 7,872 numbers.) It keeps the sum of the slices listed here. This is the
#   first half of the all-reduce.
# - **step, update.** Here the ranks differ. Rank 0 updates weights 0–3935. Rank 1 updates the rest of the
#   weights and the whole bias. Each has momentum buffers for its own slices only: this is the memory saved.
# - **step, all-gather.** The second half: each rank sends its updated half, and both have the whole model
#   again.
#
# `print(optimizer.trace.text())` prints the same with line numbers and times. In a terminal you get it from
# `./zero train --model logistic --stage 1 --world-size 2 --trace trace.txt`. (`./zero COMMAND` is short for
# `.venv/bin/python -m zerolab COMMAND`. On Colab there is no `./zero`: write `!python -m zerolab COMMAND` in
# a cell.)
#
# ## Second exercise: your own stage 1
#
# > **Difficulty 3 of 5 · importance 5 of 5 · 15 minutes.** Write `MyZero1` for a model that is already one
# > flat tensor.
# >
# > - `flat` holds all parameters, the same on every rank. It has one dimension, and `requires_grad` is False.
# >   N need not divide its length.
# > - `step(gradient)` gets this rank's own gradient, of the same length, and may overwrite it. When it
# >   returns, `flat` must hold on every rank the parameters of a process that stepped on the **mean**
# >   gradient.
# > - Each rank keeps 1/N of the optimizer state and sends no more than 2Ψ.
# >
# > From `zerolab.ring` use `chunks(numel, world_size)`, `reduce_scatter(tensor)`, which returns your chunk
# > of the sum, and `all_gather(tensor)`, which works in place. The check looks at values, at the state of
# > your optimizer, and at every byte you send. Plain AdamW on the whole model with an all-reduce gets the
# > values right and does not pass.
# >
# > *Silver:* values, state and bytes are right. The check demands all three, so there is no bronze. *Gold:*
# > beside `flat` and `gradient` no rank has another tensor of their length during a step.


# %%
# Second exercise
class MyZero1:
    def __init__(self, flat, optimizer_class, lr):
        self.flat = flat  # which part of it is yours? Build optimizer_class([your part], lr=lr) once

    def step(self, gradient):
        """Reduce-scatter, update, all-gather."""


check_zero1(MyZero1)

# %% [markdown]
# Stuck? `check_zero1.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_zero1.solution()` prints a solution.
#
# ## Saved by 4 ranks, loaded by 6
#
# Each rank has another part of m and v, so each rank saves its own shard, into a file of its own. The next
# job may have more GPUs or fewer. Then the cuts are at other places, and the padding at the end has another
# length: 1,001 numbers on 4 ranks are 4 × 251 with 3 numbers of padding, and on 6 ranks 6 × 167 with 1.
#
# The padding belongs to no parameter. Drop it before the state is cut again. If it stays, the new shards are
# too long, and every cut is at the wrong place. `zerolab.save` and `zerolab.load` do this for you, also where
# the stage is another one.
#
# ## Third exercise: load at another number of ranks
#
# > **Difficulty 3 of 5 · importance 4 of 5 · 10 minutes.** A state of `numel` numbers was saved by
# > `saved_by` ranks. Return the shard that `rank` of `world_size` ranks needs now, a tensor in fp32.
# >
# > - `read(file, start, stop)` returns those elements of the shard that rank `file` saved: a tensor in fp32
# >   with one dimension, of `stop - start` elements. All files have one length: `numel / saved_by`, rounded
# >   up. (Nothing is rounded to 64 bytes here.)
# > - The old padding holds numbers of no use. In the new shards the padding is zeros.
# >
# > *Bronze:* the values are right. *Silver:* a rank reads no more numbers than its shard has. The files of a
# > saved model are its *checkpoint*, and that of a large model does not fit into one machine's memory.


# %%
# Third exercise
def load_shard(read, saved_by, numel, world_size, rank): ...  # your code


check_load(load_shard)

# %% [markdown]
# Stuck? `check_load.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_load.solution()` prints a solution.
#
# ## What stage 1 cannot save
#
# You have GPUs of 32 GB, and as many of them as you like. **Below which size must a model stay, so that its
# model states fit at stage 1 in mixed precision? Give its parameters in billions.**

# %%
my_guess = ...

# %%
replicated, sharded = memory.bytes_per_parameter(stage=1)
rows = [f"{gpus:>5} GPUs: {32 / (replicated + sharded / gpus):.2f}" for gpus in (1, 4, 64, 1024)]
predict(my_guess, 32 / replicated, quiz.LARGEST, *rows)

# %% [markdown]
# With more and more GPUs the size of the model comes near that limit and never reaches it. The paper's Table
# 2 has 64 GPUs of 32 GB, and says 7.6B. (Its authors measured 6.2B there. Activations and buffers take
# memory, too, and this arithmetic leaves them out.)

# %% [markdown]
# ## The same bits
#
# Every stage of this package must pass this test. Four ranks train for thirty steps of Adam at stage 1:

# %%
RANKS, STEPS = 4, 30


def train():
    model = build()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=1, lr=3e-3)
    losses = []
    for step in range(STEPS):
        loss = model(*batch(step, optimizer.rank))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [weight.detach().clone() for weight in model.parameters()], optimizer.trace.traffic()


# %% [markdown]
# For comparison, one process trains with plain Adam. It adds up the gradients of the ranks in rank order and
# divides once. As in lesson 03 it is launched like a rank, which gives it a rank's device and threads:


# %%
def train_alone():
    model, seen = build(), []
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        losses = [model(*batch(step, rank)) for rank in range(RANKS)]
        for loss in losses:
            loss.backward()
        for parameter in model.parameters():
            parameter.grad /= RANKS
        adam.step()
        adam.zero_grad()
        seen.append(sum(loss.item() for loss in losses) / RANKS)
    return seen, [weight.detach() for weight in model.parameters()]


# %%
by_rank, weights, traffic = zip(*zerolab.launch(train, RANKS), strict=True)
single_losses, single = zerolab.launch(train_alone, RANKS)[0]
same = all(torch.equal(a, b) for mine in weights for a, b in zip(mine, single, strict=True))
print("bit-identical:", same)
wanted = 4 * cost.communication_volume(psi, stage=1)
print(f"bytes per rank and step: {traffic[0].logical_bytes:,}, formula 2Ψ: {wanted:,}")
sharded_losses = [sum(losses) / RANKS for losses in zip(*by_rank, strict=True)]

# %%
fig = figure(height=2.4)
ax = fig.subplots()
ax.plot(single_losses, label="one process, plain Adam", color=PALE, linewidth=8, marker="")
ax.plot(sharded_losses, label="stage 1, sharded", color=INK, linewidth=1.2, marker="")
ax.set(xlabel="step", ylabel="loss (nats per byte)")
same = "lie exactly on top of each other" if sharded_losses == single_losses else "part"
show(fig, f"Loss of each step at stage 1 and in one process with plain Adam: the two curves {same}.")

# %% [markdown]
# `bit-identical` compares every parameter on *every* rank with the single process. Rank 0 alone would not be
# enough: another rank could have gathered wrong values. (The loss is the one of lesson 03, in
# nats for each byte of text.)
#
# ## On GPUs
#
# Two libraries send the messages here: NCCL between GPUs, and gloo between CPUs. If this machine has a GPU
# for every rank, the cells above used them, over NCCL. On any other machine they used the CPU, over gloo. The
# next cell trains with stage 1 over NCCL, with one rank for each GPU, and compares the bits with one process
# on one GPU. If there is only one GPU, it runs two ranks, which share it. (NCCL adds in an order of its own.
# With `torch.use_deterministic_algorithms(True)`, which this cell sets, zerolab sends the shards and adds
# them in the order of the ranks.)

# %% tags=["nbval-ignore-output"]
verify_on_gpus(stage=1)

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
# - After the all-reduce all ranks compute the same update on the same state. Stage 1 divides this work: each
#   rank updates 1/N of the parameters and keeps 1/N of the optimizer state.
# - Cut the flat buffer, not the parameter list. Then shards are equal, nothing is left over, and every
#   element has one owner.
# - The update goes between the halves of the all-reduce. That is 2Ψ as before. An implementation that moves
#   3Ψ sends more than it has to.
# - The optimizer state is K = 12 bytes per parameter in mixed precision, *master weights included*. So stage
#   1 takes 4Ψ + 12Ψ/N.
# - 4Ψ stay on every rank. Half of that is gradients, and after the reduce-scatter a rank needs only 1/N of
#   them.
#
# **Next:** [05 · ZeRO stage 2](05_zero_stage_2.ipynb), which frees these gradients.

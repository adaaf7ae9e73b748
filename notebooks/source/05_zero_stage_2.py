# %% [markdown]
# # 05 · ZeRO stage 2: a gradient lives until it is reduced
#
# > **35 minutes.** *You need:* lesson 04, where each rank updates its own 1/N of the parameters and
# > a reduce-scatter brings it the gradients for that.
# >
# > *Afterwards you can* say which bytes of a gradient are dead and when, read a unit's life off a
# > trace, price gradient accumulation in memory and in traffic, and clip gradients that no rank
# > holds whole.
# >
# > *Paper:* ZeRO, §5.2 and §7.2.1, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).

# %% [markdown]
# ## The question
#
# At stage 1 a rank updates 1/N of the parameters. For that it needs the *summed* gradient of this
# 1/N, and the reduce-scatter delivers exactly that. Yet when the step begins, its memory still
# holds a gradient for every parameter of the model. What are the other (N−1)/N good for?
#
# For nothing. They were this rank's contribution to sums that now live on other ranks. Stage 2 lets
# them go.

# %%
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed import get_rank

import zerolab
from zerolab import memory, ring
from zerolab.course import answer, choice, explore, predict, show, show_diff, slider
from zerolab.course.figures import both_losses
from zerolab.course.lessons.zero_stage_2 import check_reduce_and_keep, figures, quiz
from zerolab.data import NextByte, text
from zerolab.models import GPT
from zerolab.stages import stage1, stage2

# %% [markdown]
# ## Predict: what does it buy?
#
# A model of 7.5 billion parameters on 64 GPUs, in the paper's mixed precision: 2 bytes for a
# parameter, 2 for its gradient, 12 for the optimizer. Stage 1 needs 31.4 GB on each GPU.
# **How many GB does stage 2 need?**

# %%
my_guess = ...

# %%
total = memory.model_states(7.5e9, world_size=64, stage=2).total_bytes / 1e9
predict(my_guess, total, quiz.STAGE_2)

# %% [markdown]
# ## Run it
#
# The model for today: a GPT over bytes, eight blocks, small enough that every run below takes
# moments. `batch` gives each rank its own piece of text.

# %%
DATA = NextByte(text(), context=32, batch_size=4)


def fresh_model():
    torch.manual_seed(0)
    return GPT(width=48, depth=8, heads=4, context=32)


def build(stage, **knobs):
    model = fresh_model()
    return model, zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=stage, lr=1e-3, **knobs)


def batch(step):
    return DATA.batch(step, get_rank())


# %% [markdown]
# Four ranks take one step at each stage and then count: `optimizer.memory()` asks every storage for
# its size and sorts the bytes by category. The formula knows only Ψ, N and the stage. (We train in
# fp32: 4 + 4 + 8 bytes for a parameter, its gradient, and Adam's two moments.)


# %%
def bytes_held(stage):
    model, optimizer = build(stage)
    model(*batch(0)).backward()
    optimizer.step()  # gradients stay until zero_grad, so all three categories are there to be counted
    return optimizer.memory(), sum(unit.numel for unit in optimizer.units)


for stage in (1, 2):
    measured, psi = zerolab.launch(bytes_held, 4, stage)[0]
    formula = memory.model_states(psi, world_size=4, stage=stage, precision="fp32")
    for category in ("params_bytes", "grads_bytes", "optimizer_bytes"):
        held, expected = getattr(measured, category), getattr(formula, category)
        print(f"stage {stage}  {category:<16} {held:>11,.0f}   as the formula says: {held == expected}")

# %% [markdown]
# One line differs. Now see how little code it takes.

# %%
show_diff(stage1, stage2)

# %% [markdown]
# Outside the docstrings, one verb changed: `after_reduce`. The collectives are the same, so the
# traffic is the same 2Ψ. What changed is a *lifetime*: stage 1 keeps a slice of the gradient
# buffer, stage 2 copies the slice and drops the buffer.
#
# Why copy? The slice is right there.
# **Keep only `flat[:250_000]` of a gradient buffer of a million fp32 numbers, and drop the name
# `flat`. How many bytes stay in memory?**

# %%
my_guess = ...

# %%
flat = torch.zeros(1_000_000)
view, copy = flat[:250_000], flat[:250_000].clone()
del flat
print(f"behind the copy: {copy.untyped_storage().nbytes():,} bytes")
predict(my_guess, view.untyped_storage().nbytes(), quiz.BEHIND_A_VIEW)

# %% [markdown]
# A view keeps its whole storage alive. Sharding that forgets this looks right in every shape that
# you print, and saves nothing.
#
# ## When is a gradient done?
#
# The buffer can be dropped only after the reduction, and waiting until the end of backward would be
# too late: by then *all* the buffers are full. So reductions have to happen *during* backward, unit
# by unit. (A **unit** is a group of parameters that travel in one message: here one for each block,
# and `root` for the rest, that is embeddings, last norm and output head.)
#
# PyTorch tells us when. `parameter.register_post_accumulate_grad_hook(f)` calls `f(parameter)` each
# time autograd has finished a parameter's `.grad`. (Its sibling `register_hook` hands over the
# *gradient*, and comes before it is accumulated. Swap the two and nothing complains.) The engine
# counts such calls; with the last parameter of a unit, the unit is ready.
#
# We can hang hooks of our own beside the engine's, and take a census at each.


# %%
def watch_backward(stage, **knobs):
    model, optimizer = build(stage, **knobs)
    held = []

    def look(name):
        held.append((name, optimizer.memory().grads_bytes))

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: look(name))
    model(*batch(0)).backward()
    look("end of backward")
    events = [(event.op, event.unit, event.logical_bytes) for event in optimizer.trace.step(0)]
    return held, events, {unit.name: 4 * unit.numel for unit in optimizer.units}


# %% [markdown]
# **The gradients of the whole model take 4Ψ bytes, 1.0 MB. What is the most that a rank of four
# holds at any moment of backward at stage 2, in MB?** Block 7's gradients come first and block 0's
# last. `root` owns the output head *and* the embeddings: its first gradient is the very first, its
# last the very last.

# %%
my_guess = ...

# %%
held, events, unit_bytes = zerolab.launch(watch_backward, 4, 2)[0]
peak = max(grads_bytes for _, grads_bytes in held)
predict(my_guess, peak / 1e6, quiz.gradient_peak(unit_bytes))

# %% [markdown]
# The worst moment is the end of block 0: it is whole, and so is `root`, which waits for its
# embeddings, and so is block 1, whose reduction is still under way. The six blocks above have
# shrunk to a quarter.

# %%
block, root = unit_bytes["blocks.0"], unit_bytes["root"]
print(f"root + block 0 + block 1 + 6 blocks / 4 = {root + 2 * block + 6 * block / 4:,.0f} bytes")
print(f"measured:                                 {peak:,.0f} bytes")
for op, unit, logical_bytes in events:
    print(f"  {op}  {unit:<9} {logical_bytes:>8,} bytes")

# %% [markdown]
# That list is the trace: nine reductions, issued in **one fixed order on every rank**. The order
# matters more than it seems. Where messages carry no name, as in most backends, let rank 0 reduce
# block 3 while rank 1 reduces block 4: buffers of equal size are summed, no error is raised, and
# two blocks train on each other's gradients. So a unit that is ready early waits for its turn.
#
# ## Gradients over time
#
# Here is the census, event by event. The control is the engine's own knob `reduces_in_flight`: how
# many reductions may be under way while backward goes on. 0 waits for each where it is issued. More
# of them hide the network behind the computation, and each holds one more unit whole.

# %%
stage_1, _, _ = zerolab.launch(watch_backward, 4, 1)[0]
knobs = (0, 1, 2, 4, 8)
stage_2 = {k: zerolab.launch(watch_backward, 4, 2, reduces_in_flight=k)[0][0] for k in knobs}


def draw(sketch, reduces_in_flight):
    return figures.gradients_over_time(sketch, stage_1, stage_2, reduces_in_flight)


explore(draw, height=3.4, reduces_in_flight=choice(knobs, 1))

# %% [markdown]
# Read it from the left. Stage 1 is a staircase: each unit's buffer arrives and stays. Stage 2 is a
# saw: a buffer arrives whole, and three quarters of it leave when its sum is there. The teeth rise,
# because each leaves its quarter behind. With more ranks they rise less, and what remains is the
# tooth: **the peak is set by the size of a unit, not of the model.** At 8 in flight nothing has to
# be waited for, and stage 2 has become stage 1.
#
# ## Accumulation: the price appears
#
# You want a batch that does not fit, so you run M micro-batches and add up their gradients before
# one update. At stage 1 that is free: the gradients are whole, so let them add up locally and
# reduce once, after the last.
#
# At stage 2 there is nothing whole to add to. Each micro-batch's gradients are reduced as they
# come, and the *shards* add up.
# **How many Ψ does a rank move in a step of M = 4 micro-batches at stage 2?** (At M = 1 it is 2Ψ:
# reduce-scatter the gradients, all-gather the parameters.)

# %%
my_guess = ...

# %%
predict(my_guess, zerolab.cost.communication_volume(1, stage=2, micro_batches=4), quiz.TRAFFIC)

# %% [markdown]
# There is a way out that every framework offers: `no_sync()`. Backward passes inside it collect
# whole gradients locally, and the first one outside reduces the total. It brings 2Ψ back. Let us
# measure what it costs.


# %%
def accumulate(stage, micro_batches, wait):
    model, optimizer = build(stage)
    peak = 0

    def look(_):
        nonlocal peak
        peak = max(peak, optimizer.memory().grads_bytes)

    for block in model.blocks:  # its first gradient brings its buffer
        block.mlp_out.bias.register_post_accumulate_grad_hook(look)
    for micro in range(micro_batches):
        with optimizer.no_sync() if wait and micro < micro_batches - 1 else nullcontext():
            (model(*batch(micro)) / micro_batches).backward()
    optimizer.step()
    return figures.Cost(optimizer.trace.traffic(0).logical_bytes, peak)


# %%
def all_ways(most):
    ways = {"stage 1, no_sync": (1, True), "stage 2": (2, False), "stage 2, no_sync": (2, True)}
    counts = range(1, most + 1)
    return {(name, m): accumulate(stage, m, wait) for name, (stage, wait) in ways.items() for m in counts}


costs = zerolab.launch(all_ways, 4, 8)[0]
for m in (1, 2, 4, 8):
    moved = {way: costs[way, m].traffic_bytes / (4 * psi) for way in figures.WAYS}
    print(f"M = {m}:  " + "   ".join(f"{way} {volume:g}Ψ" for way, volume in moved.items()))

# %% [markdown]
# Stage 2 moves (M+1)Ψ, to the byte. Now both prices side by side; drag M.

# %%
explore(
    lambda sketch, micro_batches: figures.accumulation(sketch, costs, psi, micro_batches),
    height=2.6,
    micro_batches=slider(1, 8, 4),
)

# %% [markdown]
# ## Quiz
#
# **"Stage 2 never costs more than stage 1."** You will read this often. Is it so?
#
# - **a)** True: both move 2Ψ, and stage 2 holds less
# - **b)** True for one micro-batch only
# - **c)** False: it always moves more, because it reduces unit by unit

# %%
my_answer = ...
answer(my_answer, quiz.NEVER_COSTS_MORE)

# %% [markdown]
# ## A mistake: `zero_grad` that clears only its part
#
# "A rank owns half of the gradients, so its `zero_grad` clears that half." It sounds like sharding.
# Below, two ranks bring a gradient of ones in every step. The sum must be 2, step after step.


# %%
def own_sums(clear_all):
    buffer, sums = torch.zeros(4), []
    for _ in range(4):
        buffer += torch.ones(4)  # what autograd does: it adds to what is there
        mine = ring.reduce_scatter(buffer)
        sums.append(mine[0].item())
        (buffer if clear_all else mine).zero_()
    return sums


print("clears everything:", zerolab.launch(own_sums, 2, True)[0])
print("clears its part:  ", zerolab.launch(own_sums, 2, False)[0])

# %% [markdown]
# The half that a rank does not own is not its to keep, but it *is* its to clear: it is this rank's
# contribution to the other's sum. Uncleared, it is sent again, in every step, for ever. Stage 2
# cannot make this mistake (the buffer is gone), which is one more reason to like it. With
# `zerolab`, `optimizer.zero_grad()` and `model.zero_grad()` both clear everything.
#
# ## A mistake: the norm of a shard taken for the norm
#
# Gradient clipping scales all gradients by `max_norm / norm` where the norm is too large. But no
# rank sees the whole gradient any more. **Two ranks hold shards of norm 3 and 4. What is the norm
# of the whole gradient?**

# %%
my_guess = ...

# %%
shards = [torch.tensor([1.0, 2.0, 2.0]), torch.tensor([4.0, 0.0, 0.0])]
predict(my_guess, torch.cat(shards).norm().item(), quiz.NORM)

# %% [markdown]
# Squares add up, so the ranks exchange one number each and take the root once:
# `optimizer.clip_grad_norm_`. PyTorch's own function, which walks over `parameter.grad`, cannot
# know. It would find nothing there and return 0, silently; so what stands in `parameter.grad` after
# a reduction is a marker that answers.


# %%
def clip():
    model, optimizer = build(2)
    model(*batch(0)).backward()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
    except RuntimeError as error:
        refused = str(error)
    norm = optimizer.clip_grad_norm_(max_norm=0.1)
    gradients = optimizer.full_grads().values()
    return refused, norm.item() > 0.1, torch.cat([each.flatten() for each in gradients]).norm().item()


refused, too_large, after = zerolab.launch(clip, 4)[0]
print(refused)
print(f"the norm was above 0.1: {too_large}; the whole gradient's is now {after:.3f}")

# %% [markdown]
# Clipped by the norm of one shard, the whole gradient would have kept a norm above 0.1, and by each
# rank's own it would have changed its direction too.
#
# ## Exercise: the heart of stage 2
#
# > **Difficulty 2 of 5 · 10 minutes.** Write `reduce_and_keep`, which every rank calls once for
# > each micro-batch of a step:
# >
# > ```python
# > kept = None
# > for flat in gradients_of_the_micro_batches:
# >     kept = reduce_and_keep(flat, kept)
# > ```
# >
# > - `flat` is this rank's gradient, one whole flat buffer, yours to spoil.
# > - Return this rank's shard of the sum over all ranks *and* all micro-batches so far.
# > - Nothing of `flat` may stay in memory, and a micro-batch may send (N−1)/N of it, no more.
# > - From lesson 02: `ring.reduce_scatter(flat)`, which sums in place and returns this rank's
# >   chunk, a view of `flat`.


# %%
# Exercise
def reduce_and_keep(flat, kept): ...  # your code


check_reduce_and_keep(reduce_and_keep)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def reduce_and_keep(flat, kept):
#     mine = ring.reduce_scatter(flat).clone()
#     return mine if kept is None else kept + mine
# ```
#
# The `.clone()` is what stage 2 adds to stage 1. Compare with the verbs of
# `zerolab/stages/stage2.py`.
#
# </details>
#
# ## The proof: the same training, sharded
#
# Two ranks train at stage 2 for 20 steps of two micro-batches each. Beside them one process, which
# never heard of ZeRO, trains with plain Adam on the same micro-batches. If sharding is only
# bookkeeping, the parameters agree
# **to the last bit**.

# %%
STEPS, MICRO_BATCHES, RANKS = 20, 2, 2


def train(stage):
    model, optimizer = build(stage)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES * step, MICRO_BATCHES * (step + 1)):
            loss = model(*batch(micro))
            (loss / MICRO_BATCHES).backward()
            seen.append(loss.item())
        optimizer.step()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return seen, weights, optimizer.memory(), optimizer.trace.traffic(STEPS - 1)


# %% [markdown]
# The single process does what the ranks do, one after the other. Floating-point addition depends on
# its order, so the order is part of the specification: for each micro-batch, add up the ranks'
# gradients from rank 0 on; then add up the micro-batches; divide once.


# %%
def train_alone():
    model, seen = fresh_model(), []
    parameters = list(model.parameters())
    adam = torch.optim.Adam(parameters, lr=1e-3)
    for step in range(STEPS):
        sums = []  # for each micro-batch: the gradients, summed over the ranks
        for micro in range(MICRO_BATCHES * step, MICRO_BATCHES * (step + 1)):
            parts = [model(*DATA.batch(micro, rank)) for rank in range(RANKS)]
            gradients = [torch.autograd.grad(loss / MICRO_BATCHES, parameters) for loss in parts]
            sums.append([sum(over_ranks) for over_ranks in zip(*gradients, strict=True)])
            seen.append(sum(loss.item() for loss in parts) / RANKS)
        for parameter, *over_micro_batches in zip(parameters, *sums, strict=True):
            parameter.grad = sum(over_micro_batches) / RANKS
        adam.step()
    return seen, parameters


# %% [markdown]
# One more thing decides the last bits: how many threads share a matrix product. So the single
# process takes as many as a rank had.

# %%
ranks = zerolab.launch(train, RANKS, 2)
torch.set_num_threads(zerolab.launcher.threads_per_rank(RANKS))
alone, parameters = train_alone()
sharded = [sum(pair) / RANKS for pair in zip(*(seen for seen, *_ in ranks), strict=True)]
pairs = [pair for _, weights, *_ in ranks for pair in zip(weights, parameters, strict=True)]
print("bit-identical:", all(torch.equal(ours, theirs) for ours, theirs in pairs) and sharded == alone)

# %%
_, _, measured, traffic = ranks[0]
formula = memory.model_states(psi, RANKS, stage=2, precision="fp32")
moved = 4 * zerolab.cost.communication_volume(psi, stage=2, micro_batches=MICRO_BATCHES)
for category in ("params_bytes", "grads_bytes", "optimizer_bytes"):
    print(
        f"{category:<16} {getattr(measured, category):>9,.0f}   formula {getattr(formula, category):>9,.0f}"
    )
print(f"traffic a step   {traffic.logical_bytes:>9,}   formula {moved:>9,.0f}")

# %%
show(both_losses, sharded=sharded, single=alone, stage=2, per="micro-batch")

# %% [markdown]
# ## Summary
#
# - At stage 2 a gradient is whole from its birth in backward until its unit is reduced; then 1/N of
#   it stays. In the code that is one verb: copy the slice, free the buffer. A view would have kept
#   it all.
# - Units are reduced during backward, when their last gradient comes, in one order on every rank.
#   The peak is set by the units in flight; `reduces_in_flight` buys overlap with memory.
# - One micro-batch: 2Ψ, as at stage 1. M micro-batches: (M+1)Ψ, or 2Ψ under `no_sync` with whole
#   gradients.
# - Everything that looks at gradients must know that they are sharded: clearing, clipping, reading.
#
# What is still whole is the parameters themselves: 2Ψ bytes that no number of GPUs makes smaller.
# Next: [06 · ZeRO stage 3](06_zero_stage_3.ipynb).

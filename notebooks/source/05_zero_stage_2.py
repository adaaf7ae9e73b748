# %% [markdown]
# # 05 · ZeRO stage 2: a gradient is freed once it is reduced
#
# > **80 minutes.** *You need:* lesson 04, where each rank updates its own 1/N of the parameters and a
# > reduce-scatter brings it the gradients for that.
# >
# > *Afterwards you can* say which bytes of a gradient are no longer needed and when, follow a unit through
# > a trace, compute what gradient accumulation costs in memory and in traffic, and clip gradients that no
# > rank holds whole.
# >
# > *Paper:* ZeRO, §5.2 and §7.2.1, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).
# >
# > *Words:* the [glossary](../docs/glossary.md) explains the main ones.

# %% [markdown]
# ## The question
#
# At stage 1 a rank updates 1/N of the parameters. For that it needs the *summed* gradient of this 1/N, and
# the reduce-scatter gives it exactly that. Yet when the step begins, the rank still holds a gradient for
# every parameter of the model.
#
# It does not need the other (N−1)/N. They were this rank's contribution to sums that are now on other
# ranks. Stage 2 frees them.

# %%
import time
from contextlib import nullcontext
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

import zerolab
from zerolab import data, memory, models, ring
from zerolab.course import answer, choice, explore, figure, predict, show, show_diff, slider, verify_on_gpus
from zerolab.course.lessons.zero_stage_2 import check_clip, check_order, check_reduce_and_keep, figures, quiz
from zerolab.course.look import COLOURS, INK, PALE, QUIET
from zerolab.parity import compute_deterministically
from zerolab.stages import stage1, stage2

# %% [markdown]
# ## Predict: what does it save?
#
# Lesson 04 had a model of 20 billion parameters on 32 GPUs, in mixed precision: 2 bytes for a parameter, 2
# for its gradient, 12 for the optimizer. Stage 1 needs 87.5 GB on each GPU. **How many GB does stage 2
# need?**

# %%
my_guess = ...

# %%
total = memory.model_states(20e9, world_size=32, stage=2).total_bytes / 1e9
predict(my_guess, total, quiz.STAGE_2)

# %% [markdown]
# ## Run it
#
# This lesson's model is a GPT over bytes with eight blocks. It is small, so that every run below takes only
# moments. `batch` gives each rank its own piece of text.

# %%
DATA = data.NextByte(data.text(), context=32, batch_size=4)


def fresh_model():
    compute_deterministically()
    torch.manual_seed(0)
    return models.GPT(width=48, depth=8, heads=4, context=32).to(zerolab.device())


def build(stage, **options):
    model = fresh_model()
    return model, zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=stage, lr=1e-3, **options)


# %%
def batch(step, rank=None):
    parts = DATA.batch(step, dist.get_rank() if rank is None else rank)
    return [part.to(zerolab.device()) for part in parts]


# %% [markdown]
# Four ranks take one step at each stage and then count. `optimizer.memory()` asks every storage for its size
# and adds up the bytes by category. The formula knows only Ψ, N and the stage. (This lesson trains in fp32,
# so a parameter, its gradient and Adam's m and v take 4 + 4 + 8 bytes.)


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
# One line of this output differs between the stages, `grads_bytes`. Now look at the code for it. (P_os+g is
# the paper's name for stage 2: partitioned optimizer states and gradients.)

# %%
show_diff(stage1, stage2)

# %% [markdown]
# Outside the docstrings one method changed: `after_reduce`. The collectives are the same, so stage 2 moves
# the same 2Ψ. What changed is a *lifetime*: stage 1 keeps a slice of the gradient buffer, stage 2 copies the
# slice and frees the buffer. This is the table of lesson 04, with a column for stage 2:
#
# | | data parallel | stage 1 | stage 2 |
# |---|---|---|---|
# | backward | Ψ gradients | Ψ gradients | the gradients of the units that backward is computing |
# | gradients | all-reduce, 2Ψ | reduce-scatter, Ψ | reduce-scatter, Ψ; then frees all but Ψ/N |
# | optimizer | updates Ψ | updates its own Ψ/N | updates its own Ψ/N |
# | afterwards | nothing | all-gather of parameters, Ψ | all-gather of parameters, Ψ |
# | sent in all | 2Ψ | 2Ψ | 2Ψ |
# | gradients held at the end | Ψ | Ψ | Ψ/N |
#
# Why does it copy the slice? **Keep only `flat[:250_000]` of a gradient buffer of a million fp32 numbers, and
# delete the name `flat`. How many bytes stay in memory?**

# %%
my_guess = ...

# %%
flat = torch.zeros(1_000_000)
view, copy = flat[:250_000], flat[:250_000].clone()
del flat
row = f"behind a copy of the slice: {copy.untyped_storage().nbytes():,} bytes"
predict(my_guess, view.untyped_storage().nbytes(), quiz.BEHIND_A_VIEW, row)

# %% [markdown]
# An implementation that keeps views has the right shapes and saves no memory.
#
# ## When is a gradient complete?
#
# The buffer can be freed only after the reduction. If the reductions came after backward, *all* buffers would
# be full by then. So each unit is reduced *during* backward. (A **unit** is a group of parameters that are
# sent in one message. Here there is one for each block, and `root` for the rest: embeddings, last norm and
# output head.)
#
# A *hook* is a function that PyTorch calls at a certain moment.
# `parameter.register_post_accumulate_grad_hook(f)` calls `f(parameter)` each time autograd has finished a
# parameter's `.grad`. The engine counts these calls. When the last parameter of a unit has its gradient, the
# unit is ready.
#
# We register hooks of our own in addition to the engine's, and count the bytes at each call.


# %%
def watch_backward(stage, **options):
    model, optimizer = build(stage, **options)
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
# The gradients of the whole model take 4Ψ bytes, 1.0 MB. Each of the eight blocks has 113,088 bytes of that,
# and `root` has 104,832. Backward computes the gradients of block 7 first and those of block 0 last. `root`
# takes part at both ends: it has the output head, whose gradient comes first of all, and the embeddings,
# whose gradients come last of all. A unit gets its whole buffer with its first gradient, and gives it back
# after its reduction. While one unit's gradients are computed, the reduction of the unit that was complete
# before it is still running. **What is the most that one of four ranks holds at any moment of
# backward at stage 2, in MB?**

# %%
my_guess = ...

# %%
held, events, unit_bytes = zerolab.launch(watch_backward, 4, 2)[0]
peak = max(grads_bytes for _, grads_bytes in held)
block, root = unit_bytes["blocks.0"], unit_bytes["root"]
rows = [f"root + block 0 + block 1 + 6 blocks / 4 = {root + 2 * block + 6 * block / 4:,.0f} bytes"]
rows.append(f"measured:                                 {peak:,.0f} bytes")
predict(my_guess, peak / 1e6, quiz.gradient_peak(unit_bytes), *rows)

# %% [markdown]
# These are the messages of that backward pass, from the trace:

# %%
for op, unit, logical_bytes in events:
    print(f"{op}  {unit:<9} {logical_bytes:>8,} bytes")

# %% [markdown]
# Nine reductions, started in **the same order on every rank**. The order matters. The library that sends the
# messages is called the *backend*: gloo on CPUs and NCCL on GPUs. In most backends a message has no name.
# Suppose that rank 0 reduces block 3 while rank 1 reduces block 4. The buffers have the same size, so they
# are summed without an error, and two blocks train on each other's gradients. So a unit that is ready early
# waits for its turn.
#
# This does occur: where a model has two branches, one rank may finish the first branch first, and another
# rank the second. And a unit may get no gradient at all on one rank, if its batch did not use that part of
# the model. The other ranks still wait for that rank's message. So that rank takes part with zeros.
#
# ## Exercise: reduce in one order
#
# > **Difficulty 3 of 5 · importance 4 of 5 · 12 minutes.** Write `InOrder`, which reduces units as they get
# > ready.
# >
# > - `sizes` maps the name of each unit to its number of elements. It has the same order on every rank.
# > - `ready(name, flat)` is called when the unit's gradient is complete: `flat`, one whole buffer. Each
# >   rank has an order of its own.
# > - `finish()` is called when backward is over. A unit that never got ready on this rank has a gradient of
# >   zeros. All gradients are in fp32.
# > - After `finish()`, `self.shards[name]` is this rank's chunk of the sum over the ranks, for every unit.
# > - From lesson 02: `ring.reduce_scatter(flat)` sums in place and returns this rank's chunk, which is a
# >   view of `flat`. Do not use torch's own collectives here.
# >
# > *Bronze:* the values are right. *Silver:* each unit is reduce-scattered once, in one order on all
# > ranks. *Gold:* the order is that of `sizes`, and when it is a unit's turn, its buffer is reduced and
# > freed at once, so only the buffers that wait are in memory.


# %%
# Exercise
class InOrder:
    def __init__(self, sizes):
        self.sizes, self.shards = sizes, {}

    def ready(self, name, flat): ...  # reduce what can be reduced now

    def finish(self): ...  # reduce the rest


check_order(InOrder)

# %% [markdown]
# Stuck? `check_order.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_order.solution()` prints a solution.
#
# ## Overlap: messages during backward
#
# Below are four linear layers on two ranks. A hook on each parameter notes when its gradient is ready. The
# trace knows when each reduction started and when its result was there. `reduces_in_flight` is an option of
# the engine: how many reductions may run while backward continues. With 0 the engine waits for each of them
# at once.


# %%
def watch_order(in_flight):
    model, ready = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(zerolab.device()), []

    def note(name):
        ready.append((time.perf_counter(), name))

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(name))
    options = {"stage": 2, "reduces_in_flight": in_flight}
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, **options)
    model(torch.ones(8, 64, device=zerolab.device())).square().mean().backward()
    return figures.in_order(ready, optimizer.trace.step(0))


# %% tags=["nbval-ignore-output"]
runs = {f"reduces_in_flight={n}": zerolab.launch(watch_order, 2, n)[0] for n in (0, 1)}
fig = figure(height=3.6)
show(fig, figures.timeline(fig, runs))

# %% [markdown]
# Read the columns from left to right. The figure shows the order of the events and not how long they took. In
# the upper run each reduction ends before the next gradient is computed: the network is idle while the rank
# computes, and the rank waits while the network sends. In the lower run the next gradients can be computed
# while a reduction is still running. The number of gradients that are computed meanwhile differs from run to
# run, because these layers are tiny.
#
# The results are the same, bit for bit. Overlap changes when messages are sent, and nothing else.
#
# ## Gradients over time
#
# Overlap takes memory: for each reduction that is still running one more unit is whole. The next figure shows
# the bytes after every event. The slider sets `reduces_in_flight`.

# %%
stage_1, _, _ = zerolab.launch(watch_backward, 4, 1)[0]
limits = (0, 1, 2, 4, 8)
stage_2 = {n: zerolab.launch(watch_backward, 4, 2, reduces_in_flight=n)[0][0] for n in limits}


# %%
def mark_units(ax, names):
    owners = [name.split(".")[1] if name.startswith("blocks.") else "root" for name in names]
    first = [event for event, owner in enumerate(owners) if event == 0 or owner != owners[event - 1]]
    middles = [(start + stop) / 2 for start, stop in pairwise([*first, len(names)])]
    ax.set_xticks(middles, [owners[event] for event in first])
    ax.set_xlabel("whose gradients are computed: a block's, or root's")


# %%
def gradients_over_time(fig, reduces_in_flight):
    ax, ends = fig.subplots(), []
    for stage, held, colour in ((1, stage_1, QUIET), (2, stage_2[reduces_in_flight], COLOURS["gradients"])):
        MB = [grads_bytes / 1e6 for _, grads_bytes in held]
        ends.append(f"stage {stage}: up to {max(MB):.2f} MB, {MB[-1]:.2f} MB at the end")
        ax.step(range(len(MB)), MB, where="post", color=colour, label=ends[-1], marker="")
        if stage == 2:
            ax.fill_between(range(len(MB)), MB, step="post", color=colour, alpha=0.3)
            ax.plot(MB.index(max(MB)), max(MB), "v", color=INK)
            ax.annotate("peak", (MB.index(max(MB)), max(MB)), (0, 6), textcoords="offset points", ha="center")
    ax.set(ylabel="MB of gradients held", ylim=(0, 1.15))
    mark_units(ax, [name for name, _ in stage_1])
    many = f"{reduces_in_flight} reduction{'s' * (reduces_in_flight != 1)} in flight"
    return f"Gradients held in one backward pass, {many}. {'; '.join(ends)}."


# %%
explore(gradients_over_time, height=2.8, reduces_in_flight=choice(limits, 1))

# %% [markdown]
# Read it from left to right. At stage 1 each unit's buffer is filled and stays. (Small gradients wait beside
# the buffer until several of them are copied in one call. That is the small step down at the end of each
# unit.) At stage 2 the bytes grow and fall with every unit: a buffer is filled, and three quarters of it are
# freed when its sum is there. The low points rise, because a quarter of each unit stays. With more ranks they
# rise less. So with many ranks the *peak*, the most that is held at once, **depends on the size of a unit and
# hardly on the size of the model.** With 8 in flight the engine waits for nothing, and stage 2 holds as much
# as stage 1.
#
# ## Gradient accumulation: what it costs
#
# Suppose the batch you want does not fit into memory. Then you run M micro-batches and add up their gradients
# before one update. At stage 1 this need not cost traffic: the gradients are whole, so each rank can add them
# up locally and reduce once, after the last micro-batch. (`zerolab` does so under `no_sync()`, which comes
# below. Without it the engine reduces each micro-batch at every stage, and stage 1 moves (M+1)Ψ too.)
#
# At stage 2 there are no whole gradients to add to. The gradients of each micro-batch are reduced at once,
# and the *shards* are added up. **How many Ψ does a rank move in a step of M = 4 micro-batches at stage 2?**
# (With M = 1 it is 2Ψ: the reduce-scatter of the gradients and the all-gather of the parameters.)

# %%
my_guess = ...

# %%
predict(my_guess, zerolab.cost.communication_volume(1, stage=2, micro_batches=4), quiz.TRAFFIC)

# %% [markdown]
# There is a way to move less: `no_sync()`. Backward passes inside it collect whole gradients locally, and the
# first backward pass outside reduces the total. So it moves 2Ψ again. (DDP can do the same, and so can
# *FSDP*, PyTorch's own sharding. DeepSpeed's `no_sync()` raises an error at stages 2 and 3.)
#
# The next cells measure what that costs in memory. The second of them takes 24 steps on four ranks, of up to
# eight micro-batches each. That takes ten seconds to a minute, in which nothing is printed.


# %%
def accumulate(stage, micro_batches, wait):
    model, optimizer = build(stage)
    peak = 0

    def look(_):
        nonlocal peak
        peak = max(peak, optimizer.memory().grads_bytes)

    for block in model.blocks:  # a unit gets its buffer when its first large gradient comes
        block.mlp_out.weight.register_post_accumulate_grad_hook(look)
    for micro in range(micro_batches):
        with optimizer.no_sync() if wait and micro < micro_batches - 1 else nullcontext():
            (model(*batch(micro)) / micro_batches).backward()
    optimizer.step()
    return optimizer.trace.traffic(0).logical_bytes / (4 * psi), peak / (4 * psi)


# %%
WAYS = {"stage 1, no_sync": (1, True), "stage 2": (2, False), "stage 2, no_sync": (2, True)}


def all_ways(most):
    counts = range(1, most + 1)
    return {(name, m): accumulate(stage, m, wait) for name, (stage, wait) in WAYS.items() for m in counts}


costs = zerolab.launch(all_ways, 4, 8)[0]
for m in (1, 2, 4, 8):
    print(f"M = {m}:  " + "   ".join(f"{way} {costs[way, m][0]:g}Ψ" for way in WAYS))

# %% [markdown]
# Stage 2 moves (M+1)Ψ, to the byte. The figure shows traffic and memory side by side. Move the slider, M.
# (Stage 2 holds more from the second micro-batch on, 0.58Ψ in place of 0.50Ψ: by then a rank has the shards
# of all units while a unit is reduced. These cells look once in each block, so they miss the few bytes at the
# exact peak.)


# %%
def accumulation(fig, micro_batches):
    said = []
    for place, (ax, what) in enumerate(zip(fig.subplots(1, 2), ("moved", "held"), strict=True)):
        sizes = [costs[way, micro_batches][place] for way in WAYS]
        drawn = ax.barh(range(len(WAYS)), sizes, color=COLOURS["gradients"])
        ax.bar_label(drawn, [f"{size:.3g} Ψ" for size in sizes], padding=3)
        most, ticks = (12, [0, 4, 8, 12]) if what == "moved" else (1.4, [0, 0.5, 1])
        ax.set(xlim=(0, most), xticks=ticks, xlabel=f"Ψ {what}", ylim=(2.5, -0.5), yticks=[])
        said += [f"{way}: {size:.2f} Ψ {what}" for way, size in zip(WAYS, sizes, strict=True)]
    fig.axes[0].set_yticks(range(len(WAYS)), list(WAYS))
    title = f"One step of {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
    fig.suptitle(title, x=0.02, ha="left", size=10, weight="bold")
    return f"{title}, in units of Ψ. {'; '.join(said)}."


# %%
explore(accumulation, height=2.1, micro_batches=slider(1, 8, 4))

# %% [markdown]
# ## Second exercise: the core of stage 2
#
# > **Difficulty 2 of 5 · importance 5 of 5 · 10 minutes.** Write `reduce_and_keep`. Every rank calls it
# > once for each micro-batch of a step:
# >
# > ```python
# > kept = None
# > for flat in gradients_of_the_micro_batches:
# >     kept = reduce_and_keep(flat, kept)
# > ```
# >
# > - `flat` is this rank's gradient, one whole flat buffer. You may overwrite it. N need not divide its
# >   length: a rank's shard is its chunk, `flat[ring.chunks(flat.numel(), N)[rank]]`.
# > - Return this rank's shard of the sum over all ranks *and* over all micro-batches of this step so far.
# > - Nothing of `flat` may stay in memory. For each micro-batch a rank may send (N−1)/N of `flat` and no
# >   more.
# > - `ring.reduce_scatter(flat)` returns a view of `flat`, as above. Do not use torch's own collectives:
# >   over gloo its reduce-scatter sends twice the bytes.
# >
# > *Silver:* the sums, what stays in memory and the bytes are right. The check demands all three, so there is
# > no bronze. *Gold:* during a call no rank has a second tensor as large as `flat`.


# %%
# Second exercise
def reduce_and_keep(flat, kept): ...  # your code


check_reduce_and_keep(reduce_and_keep)

# %% [markdown]
# Stuck? `check_reduce_and_keep.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_reduce_and_keep.solution()` prints a solution.
#
# ## A mistake: `zero_grad` that clears only its part
#
# "A rank owns half of the gradients, so its `zero_grad` clears that half." That sounds right, and it is
# wrong. Below, each of two ranks adds a gradient of ones in every step. The sum must be 2 in every step.


# %%
def own_sums(clear_all):
    buffer, sums = torch.zeros(4, device=zerolab.device()), []
    for _ in range(4):
        buffer += 1  # what autograd does: it adds to what is there
        mine = ring.reduce_scatter(buffer)
        sums.append(mine[0].item())
        (buffer if clear_all else mine).zero_()
    return sums


print("clears everything:", zerolab.launch(own_sums, 2, True)[0])
print("clears its part:  ", zerolab.launch(own_sums, 2, False)[0])

# %% [markdown]
# Each rank must clear the half that it does not own, too. That half is its contribution to the other rank's
# sum. If it is not cleared, it is sent again in every later step. Stage 2 cannot make this mistake, because
# its buffer is freed. With `zerolab`, `optimizer.zero_grad()` and `model.zero_grad()` both clear everything.
#
# ## A mistake: the wrong hook
#
# To send a gradient during the backward pass, you register a hook on each parameter. PyTorch has two kinds:
#
# - `register_hook(f)` calls `f(gradient)` *before* the gradient is added to `.grad`;
# - `register_post_accumulate_grad_hook(f)` calls `f(parameter)` *after* that.
#
# So there is one averaging function for each. (PyTorch's documentation asks the first kind of hook to leave
# its argument as it is and to return a new gradient. `average` changes it in place, so that both functions
# look alike. Nothing else reads the gradient here.)


# %%
def average(gradient):
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def average_grad_of(parameter):
    if parameter.grad is not None:
        average(parameter.grad)


# %% [markdown]
# Now all four combinations. Two ranks make three steps each on their own batches. **How many of the four keep
# the two replicas equal?** Guess, too, which of the others raise an error.

# %%
my_guess = ...


# %%
def train_with_hooks(hook, function):
    model = fresh_model()
    for parameter in model.parameters():
        getattr(parameter, hook)(function)
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(3):
        adam.zero_grad()
        model(*batch(step)).backward()
        adam.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# %%
equal, rows = 0, []
for hook in ("register_hook", "register_post_accumulate_grad_hook"):
    for function in (average, average_grad_of):
        same = torch.equal(*zerolab.launch(train_with_hooks, 2, hook, function))
        equal += same
        rows.append(f"{hook:<35} {function.__name__:<15} replicas equal: {same}")
predict(my_guess, equal, quiz.EQUAL_REPLICAS, *rows)

# %% [markdown]
# <details><summary>Answer</summary>
#
# None of the combinations raises an error. `register_hook` passed a gradient to `average_grad_of`. A gradient
# has no `.grad` of its own, so the `if` that was meant for unused parameters skipped it. The other hook
# passed the *weights* to `average`: the weights were averaged, one step late, and the gradients never. Only a
# comparison of the ranks shows the mistake.
# </details>
#
# zerolab uses the second hook. It is called when the gradient is complete, so from then on the gradient can
# be moved into the flat buffer.
#
# ## A mistake: clipping by the norm of one shard
#
# *Gradient clipping* multiplies all gradients by `max_norm / norm` if the norm is too large. But now no rank
# has the whole gradient. **Two ranks hold shards of norm 3 and 4. What is the norm of the whole gradient?**

# %%
my_guess = ...

# %%
shards = [torch.tensor([1.0, 2.0, 2.0]), torch.tensor([4.0, 0.0, 0.0])]
predict(my_guess, torch.cat(shards).norm().item(), quiz.NORM)

# %% [markdown]
# Norms do not add up, but their squares do. So each rank sends one number, the square of its norm, and
# takes the root of the sum. That is `optimizer.clip_grad_norm_`. PyTorch's own function looks at
# `parameter.grad` on one rank. It would find nothing there and return 0 without an error. So zerolab puts an
# object into `parameter.grad` that raises an error:


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
# If all ranks divided by the norm of one shard, which is smaller, the whole gradient would still have a norm
# above 0.1. If each rank used the norm of its own shard, the direction of the gradient would change, too.
#
# ## Third exercise: clip a sharded gradient
#
# > **Difficulty 2 of 5 · importance 4 of 5 · 6 minutes.** Write `clip_shard`. Every rank calls it with its
# > own shard of the gradient, a tensor of one dimension.
# >
# > - Multiply `shard` in place by `max_norm / norm` if `norm`, the norm of the whole gradient, is larger
# >   than `max_norm`.
# > - Return that norm, a float or a tensor of one element, as it was before.
# > - Shards may differ in length, and a shard may be empty.
# > - Here you may use torch's own collectives, such as `dist.all_reduce`.
# >
# > *Bronze:* the values are right. *Silver:* a rank sends a number, not its shard.


# %%
# Third exercise
def clip_shard(shard, max_norm): ...  # your code


check_clip(clip_shard)

# %% [markdown]
# Stuck? `check_clip.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and `check_clip.solution()`
# prints a solution.
#
# ## The proof: the same training, sharded
#
# Two ranks train at stage 2 for 20 steps of two micro-batches each. For comparison, one process trains with
# plain Adam on the same micro-batches, without ZeRO. If sharding only moves numbers, the parameters agree
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
# The single process does what the ranks do, one rank after the other. A floating-point sum depends on its
# order, so the order is part of the specification: for each micro-batch add up the gradients of the ranks
# from rank 0 on, then add up the micro-batches, then divide by the number of ranks, once. (Each loss is
# divided by the number of micro-batches before its backward.)


# %%
def train_alone():
    model, seen = fresh_model(), []
    parameters = list(model.parameters())
    adam = torch.optim.Adam(parameters, lr=1e-3)
    for step in range(STEPS):
        sums = []  # for each micro-batch: the gradients, summed over the ranks
        for micro in range(MICRO_BATCHES * step, MICRO_BATCHES * (step + 1)):
            parts = [model(*batch(micro, rank)) for rank in range(RANKS)]
            gradients = [torch.autograd.grad(loss / MICRO_BATCHES, parameters) for loss in parts]
            sums.append([sum(over_ranks) for over_ranks in zip(*gradients, strict=True)])
            seen.append(sum(loss.item() for loss in parts) / RANKS)
        for parameter, *over_micro_batches in zip(parameters, *sums, strict=True):
            parameter.grad = sum(over_micro_batches) / RANKS
        adam.step()
    return seen, [parameter.detach() for parameter in parameters]


# %% [markdown]
# The last bits also depend on the device and on the number of threads. So the single process is launched like
# a rank, as in lessons 03 and 04.

# %%
ranks = zerolab.launch(train, RANKS, 2)
alone, parameters = zerolab.launch(train_alone, RANKS)[0]
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
fig = figure(height=2.4)
ax = fig.subplots()
ax.plot(alone, label="one process, plain Adam", color=PALE, linewidth=8, marker="")
ax.plot(sharded, label="stage 2, sharded", color=INK, linewidth=1.2, marker="")
ax.set(xlabel="micro-batch", ylabel="loss (nats per byte)")
same = "lie exactly on top of each other" if sharded == alone else "part"
show(fig, f"Loss of each micro-batch at stage 2 and in one process with plain Adam: the two curves {same}.")

# %% [markdown]
# ## On GPUs
#
# If this machine has a GPU for every rank, the cells above used them, over NCCL. On any other machine they
# used the CPU, over gloo. The next cell trains with stage 2 over NCCL, with one rank for each GPU, and
# compares the bits with one process on one GPU. If there is only one GPU, it runs two ranks, which share it.

# %% tags=["nbval-ignore-output"]
verify_on_gpus(stage=2)

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
# - At stage 2 a gradient is whole from the backward pass until its unit is reduced. Then 1/N of it stays. In
#   the code this is one method: it copies the slice and frees the buffer. A view would keep the whole buffer.
# - A unit is reduced during backward, when its last gradient is there, in the same order on every rank. The
#   units in flight decide the peak. A larger `reduces_in_flight` gives more overlap and takes more memory.
# - One micro-batch moves 2Ψ, as at stage 1. M micro-batches move (M+1)Ψ, or 2Ψ under `no_sync` with whole
#   gradients.
# - Everything that uses gradients must know that they are sharded: clearing, clipping, reading.
#
# The parameters are still whole: 2Ψ bytes on every GPU, for any number of GPUs. Next: [06 · ZeRO stage
# 3](06_zero_stage_3.ipynb).

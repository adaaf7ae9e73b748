# %% [markdown]
# # 06 · ZeRO stage 3: a parameter is whole only while its unit computes
#
# > **40 minutes.** *You need:* lesson 05, where a gradient lives until it is reduced.
# >
# > *Afterwards you can* follow one parameter through a step, free and refill its storage, predict
# > traffic unit by unit and the peak from `prefetch`, and say what a sharded parameter refuses and
# > why.
# >
# > *Paper:* ZeRO, §5.3 and §7.2.2, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).

# %% [markdown]
# ## The question
#
# Stages 1 and 2 made the optimizer's state and the gradients 1/N. What is left is 2Ψ bytes of
# parameters on every GPU, and no number of GPUs makes them less: for a model of 10¹² parameters,
# 2,000 GB each.
#
# But which parameters does a GPU *use* at any one moment? Those of the layer that it computes.
# Stage 3 keeps 1/N of every layer, collects the rest just in time, and lets go of it right after.

# %%
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import get_rank

import zerolab
from zerolab import memory, ring
from zerolab.course import explore, predict, show, show_diff, show_source, slider
from zerolab.course.figures import both_losses
from zerolab.course.lessons.zero_stage_3 import check_sharded_pass, figures, quiz
from zerolab.data import NextByte, text
from zerolab.models import GPT
from zerolab.stages import stage2, stage3

# %% [markdown]
# ## Predict: a trillion parameters
#
# Ψ = 10¹² on 1,024 GPUs, mixed precision: 2 bytes for a parameter, 2 for its gradient, 12 for the
# optimizer. Everything is sharded now. **How many GB of model states does each GPU hold?**

# %%
my_guess = ...

# %%
total = memory.model_states(1e12, world_size=1024, stage=3).total_bytes / 1e9
predict(my_guess, total, quiz.TRILLION)

# %% [markdown]
# ## Run it
#
# A GPT of six blocks on four ranks, in fp32 (4 + 4 + 8 bytes). Bytes are counted from storages,
# after a step.

# %%
DATA = NextByte(text(), context=32, batch_size=4)


def fresh_model():
    torch.manual_seed(0)
    return GPT(width=64, depth=6, heads=4, context=32)


def build(stage=3, **knobs):
    model = fresh_model()
    return model, zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=stage, lr=1e-3, **knobs)


# %%
def bytes_held(stage):
    model, optimizer = build(stage)
    model(*DATA.batch(0, get_rank())).backward()
    optimizer.step()
    return optimizer.memory(), {unit.name: unit.numel for unit in optimizer.units}


for stage in (2, 3):
    measured, numels = zerolab.launch(bytes_held, 4, stage)[0]
    psi = sum(numels.values())
    formula = memory.model_states(psi, world_size=4, stage=stage, precision="fp32")
    for category in ("params_bytes", "grads_bytes", "optimizer_bytes"):
        held, expected = getattr(measured, category), getattr(formula, category)
        print(f"stage {stage}  {category:<16} {held:>11,.0f}   as the formula says: {held == expected}")

# %% [markdown]
# The parameters went to a quarter, and so everything is 1/N now: 16Ψ/N. Here is what it took.

# %%
show_diff(stage2, stage3)

# %% [markdown]
# Four verbs changed, and one of them got shorter:
#
# - `setup`: copy the own shard out, then free the flat buffer around it.
# - `unshard` and `reshard`, idle until now: bring the storage back, all-gather, *reveal*; and free.
# - `update` does **not** all-gather any more. Nobody needs whole parameters at the end of a step;
#   whoever needs a unit next gathers it then.
#
# ## The life of a parameter
#
# Let us watch a single weight, in the middle of three layers, through one step. `unit.whole` says
# whether its unit is there; a few hooks tell us the time.


# %%
def life():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=3, prefetch=0)
    unit, seen = optimizer.units[1], []

    def look(when):
        seen.append((when, unit.whole, unit.flat.untyped_storage().nbytes()))

    for index, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda *_, i=index: look(f"layer {i} forward"))
        layer.bias.register_hook(lambda _, i=index: look(f"layer {i} backward"))
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    look("after step()")
    return seen


# %%
for when, whole, nbytes in zerolab.launch(life, 2)[0]:
    print(f"{when:<17} layer 1's weight is {'whole' if whole else 'away'}, {nbytes} bytes")

# %% [markdown]
# Whole twice, away otherwise. (72 numbers take 288 bytes; the rest of the 384 is padding, because
# every shard begins at a multiple of 64 bytes.) The weight is gathered for forward, let go, and
# gathered **again** for backward: the gradient of the layer's input is the output's gradient times
# the *weight*. Forgetting this second gather is the classic mistake of a first stage 3; you can
# make it in the exercise below.
#
# ## How does one free a parameter?
#
# Autograd remembers the weight between forward and backward. That is why the obvious way, to put
# something small in `parameter.data`, frees nothing:

# %%
linear = nn.Linear(1000, 1000, bias=False)
output = F.linear(torch.ones(1, 1000, requires_grad=True), linear.weight)
linear.weight.data = torch.empty(0)
remembered = output.grad_fn._saved_mat2  # what backward will multiply by: a view of the weight
print(f"the parameter shows {linear.weight.numel()} elements")
print(f"and autograd still holds {remembered.untyped_storage().nbytes():,} bytes")

# %% [markdown]
# So the tensor must stay, and its *storage* has to shrink underneath it, for all views at once:
# `storage.resize_(0)`. Grow it again, fill it, and every view, autograd's included, sees the values
# at their old place.

# %%
flat = torch.arange(4.0)
weight = flat.view(2, 2)  # what the model sees
flat.untyped_storage().resize_(0)
print("away:", tuple(weight.shape), "and", flat.untyped_storage().nbytes(), "bytes behind it")
flat.untyped_storage().resize_(4 * flat.numel())
flat.copy_(torch.arange(4.0))
print("back:", weight.tolist())

# %% [markdown]
# The engine does just this. These are the three methods that `unshard` and `reshard` call:

# %%
for method in (zerolab.unit.FlatUnit.free, zerolab.unit.FlatUnit.refill, zerolab.unit.FlatUnit.reveal):
    show_source(method, docstring=False)

# %% [markdown]
# ## `Sharded`: a parameter that says what it is
#
# Between `free` and `refill` a parameter is a trap. PyTorch does not know that the storage is gone:
# `weight.sum()` reads freed memory and ends the process, `torch.save` writes garbage without a
# word. So `free` does one more thing: it changes the parameter's class to `Sharded`, which answers
# what can be answered and refuses the rest.


# %%
def ask():
    model, optimizer = build()
    weight = model.blocks[0].mlp_in.weight
    answers = [repr(weight), f"shape {tuple(weight.shape)}, numel {weight.numel()}"]
    for use in (torch.sum, copy.deepcopy):
        try:
            use(weight)
        except RuntimeError as error:
            answers.append(str(error))
    with optimizer.full_params():  # collective: every rank enters
        answers.append(f"in full_params(): a {type(weight).__name__}, finite: {weight.isfinite().all()}")
    return answers


print(*zerolab.launch(ask, 2)[0], sep="\n\n")

# %% [markdown]
# `optimizer.full_params()` gathers everything for as long as it is open: to evaluate with code of
# your own, to export, to change weights by hand. It takes the memory that stage 3 saves, and every
# rank has to enter.
#
# Gradients speak up too. `torch.nn.utils.clip_grad_norm_` on this model would have found no
# gradients and returned a norm of 0, silently. Now:


# %%
def clip():
    model, optimizer = build()
    model(*DATA.batch(0, get_rank())).backward()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except RuntimeError as error:
        refused = str(error)
    return refused, optimizer.clip_grad_norm_(1.0).item() > 0


refused, found = zerolab.launch(clip, 2)[0]
print(refused)
print("optimizer.clip_grad_norm_ finds a norm:", found)

# %% [markdown]
# ## Traffic, unit by unit
#
# The paper's count for stage 3 is 3Ψ: gather for forward, gather for backward, reduce-scatter the
# gradients. No gather after the update.
#
# Our GPT has six blocks and a `root` unit with what lies around them: embeddings, last norm, output
# head. The head is the last thing forward uses and the first thing backward wants, so `root` stays
# whole in between.
# **Blocks have 49,984 parameters each, root 34,944. How many bytes does one step move, in fp32, in
# MB?**

# %%
my_guess = ...


# %%
def one_step(prefetch=1):
    model, optimizer = build(prefetch=prefetch)
    for step in (0, 1):  # in step 0 the engine learns the order of the units
        optimizer.zero_grad()
        model(*DATA.batch(step, get_rank())).backward()
        optimizer.step()
    return optimizer.trace.step(1), optimizer.trace.traffic(1)


# %%
events, traffic = zerolab.launch(one_step, 4)[0]
predict(my_guess, traffic.logical_bytes / 1e6, quiz.traffic(numels))

# %% [markdown]
# The trace says it unit by unit. Predicted: 3 times its size for a block, 2 times for the root.

# %%
for name, numel in numels.items():
    mine = [event for event in events if event.unit == name and event.op != "update"]
    ops = ", ".join(f"{event.op} in {event.phase}" for event in mine)
    predicted = 4 * numel * (2 if name == "root" else 3)
    right = sum(event.logical_bytes for event in mine) == predicted
    print(f"{name}: {predicted:,} bytes predicted, measured the same: {right}\n    {ops}")

# %% [markdown]
# ## How many layers are there at once?
#
# If block 3 is gathered only when block 3 wants to compute, the GPU waits for the network at every
# block. So the engine starts on the next block while this one computes: `prefetch=1`. With a larger
# `prefetch` more is under way, and more is in memory. We look at each unit's storage whenever a
# block computes, forward and backward.


# %%
def watch_units(prefetch):
    model, optimizer = build(prefetch=prefetch)
    moments = []

    def look(label):
        states = [2 if u.whole else int(u.flat.untyped_storage().nbytes() > 0) for u in optimizer.units]
        nbytes = [u.flat.untyped_storage().nbytes() for u in optimizer.units]
        moments.append(figures.Moment(label, states, nbytes))

    model(*DATA.batch(0, get_rank())).backward()  # the engine learns the order
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, i=index: look(f"forward {i}"))
        block.mlp_out.bias.register_post_accumulate_grad_hook(lambda _, i=index: look(f"backward {i}"))
    model(*DATA.batch(1, get_rank())).backward()
    return moments


# %% [markdown]
# **With `prefetch=1`, how many blocks are whole or on their way at the worst moment?**

# %%
my_guess = ...

# %%
moments = {prefetch: zerolab.launch(watch_units, 4, prefetch)[0] for prefetch in range(6)}
blocks = [sum(state > 0 for state in moment.states[:-1]) for moment in moments[1]]
predict(my_guess, max(blocks), quiz.BLOCKS_AT_ONCE)

# %% [markdown]
# Now drag `prefetch` from 0, the synchronous textbook, to 5, where all six blocks are there, and
# stage 3 has become stage 2 with more traffic.

# %%
names = ["root" if name == "root" else name.replace("blocks.", "block ") for name in numels]


def draw(sketch, prefetch):
    return figures.residency(sketch, moments, names, prefetch)


explore(draw, height=4.4, prefetch=slider(0, 5, 1))

# %% [markdown]
# The dark cells walk down the diagonal and back up: one block at work. The pale ones run ahead of
# it by `prefetch`, in the order that the engine learned in the first step. `root` is dark
# throughout. So the peak is `root + (prefetch + 1) blocks`, beside the shards:

# %%
for prefetch, run in moments.items():
    peak = max(sum(moment.nbytes) for moment in run)
    expected = 4 * (numels["root"] + (prefetch + 1) * numels["blocks.0"])
    print(f"prefetch={prefetch}: at most {peak:>9,} bytes whole, formula {expected:>9,}")

# %% [markdown]
# The numbers computed are the same at every setting; what changes is when messages travel, and how
# much is held.
#
# ## Exercise: be the engine
#
# > **Difficulty 3 of 5 · 15 minutes.** You are given four layers `y = x @ weight` whose weights are
# > away, and one micro-batch `x` on each rank. Run forward, then backward from a gradient of ones,
# > and leave in every `layer.grad_shard` this rank's shard of the gradient summed over the ranks.
# >
# > - `layer.flat` is the weight, P numbers in float64 with 0 bytes behind them now; `layer.owned`
# >   is your range of it, `layer.shard` that range's values.
# > - `layer.forward(x)` returns the output. `layer.backward(grad)` returns the input's gradient and
# >   leaves the weight's in `layer.grad`, P numbers. Both need the whole weight, and say so.
# > - From lesson 02: `ring.all_gather(flat)`, in place, and `ring.reduce_scatter(flat)`, which
# >   returns this rank's chunk as a view.
# >
# > The check looks at the gradients, at how many weights are whole at once (one), at what stays
# > behind (nothing), and at the bytes that you send.


# %%
# Exercise
def unshard(layer):
    ...  # the storage back, and the own shard in its place
    ring.all_gather(layer.flat)


def reshard(layer): ...  # the storage away


def forward_backward(layers, x): ...  # through the layers, and back from torch.ones_like(output)


check_sharded_pass(forward_backward)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def unshard(layer):
#     layer.flat.untyped_storage().resize_(8 * layer.flat.numel())
#     layer.flat[layer.owned] = layer.shard
#     ring.all_gather(layer.flat)
#
#
# def reshard(layer):
#     layer.flat.untyped_storage().resize_(0)
#
#
# def forward_backward(layers, x):
#     for layer in layers:
#         unshard(layer)
#         x = layer.forward(x)
#         reshard(layer)
#     grad = torch.ones_like(x)
#     for layer in reversed(layers):
#         unshard(layer)
#         grad = layer.backward(grad)
#         reshard(layer)
#         layer.grad_shard = ring.reduce_scatter(layer.grad).clone()
#         layer.grad = None
# ```
#
# Take out one line at a time and run the check: each has its own complaint.
#
# </details>
#
# ## The proof: the same training, sharded
#
# Two ranks train at stage 3 for 30 steps, no block ever whole for longer than it computes. Beside
# them one process trains the same model with plain Adam: it adds up the two ranks' gradients in
# rank order and divides once.

# %%
STEPS, RANKS = 30, 2


def train(stage):
    model, optimizer = build(stage)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*DATA.batch(step, get_rank()))
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    held, traffic = optimizer.memory(), optimizer.trace.traffic(STEPS - 1)
    with optimizer.full_params():
        return seen, [parameter.detach().clone() for parameter in model.parameters()], held, traffic


# %%
def train_alone():
    model, seen = fresh_model(), []
    parameters = list(model.parameters())
    adam = torch.optim.Adam(parameters, lr=1e-3)
    for step in range(STEPS):
        parts = [model(*DATA.batch(step, rank)) for rank in range(RANKS)]
        gradients = [torch.autograd.grad(loss, parameters) for loss in parts]
        for parameter, *over_ranks in zip(parameters, *gradients, strict=True):
            parameter.grad = sum(over_ranks) / RANKS
        adam.step()
        seen.append(sum(loss.item() for loss in parts) / RANKS)
    return seen, parameters


# %%
ranks = zerolab.launch(train, RANKS, 3)
torch.set_num_threads(zerolab.launcher.threads_per_rank(RANKS))  # threads decide the last bits, too
alone, parameters = train_alone()
sharded = [sum(pair) / RANKS for pair in zip(*(seen for seen, *_ in ranks), strict=True)]
pairs = [pair for _, weights, *_ in ranks for pair in zip(weights, parameters, strict=True)]
print("bit-identical:", all(torch.equal(ours, theirs) for ours, theirs in pairs) and sharded == alone)

# %%
_, _, measured, traffic = ranks[0]
formula = memory.model_states(psi, RANKS, stage=3, precision="fp32")
for category in ("params_bytes", "grads_bytes", "optimizer_bytes"):
    print(
        f"{category:<16} {getattr(measured, category):>9,.0f}   formula {getattr(formula, category):>9,.0f}"
    )
print(f"traffic a step   {traffic.logical_bytes:>9,}   formula {4 * (3 * psi - numels['root']):>9,}")

# %%
show(both_losses, sharded=sharded, single=alone, stage=3)

# %% [markdown]
# ## The trillion, run
#
# The prediction at the top was a sum on paper. You have neither 1,024 GPUs nor a trillion
# parameters, but the engine can be run without them. `rehearse` builds the model on torch's meta
# device, where tensors have shapes and no contents, and joins a make-believe group of 1,024 ranks
# of which this process is number 0. Then the same hooks, the same stage and the same Adam take two
# steps. What rank 0 holds and sends is counted from its storages and messages; no formula is
# asked.


# %%
def trillion():
    return zerolab.models.GPT(vocab=50_257, width=25_600, depth=127, heads=200, context=1024)


rehearsed = {stage: zerolab.rehearse(trillion, world_size=1024, stage=stage) for stage in (2, 3)}
print(f"{rehearsed[3].psi:,} parameters")
for stage, run in rehearsed.items():
    states, peak = run.memory.total_bytes, max(run.peak_by_phase.values())
    print(f"stage {stage}: {states / 1e9:7,.1f} GB of model states, {peak / 1e9:7,.1f} GB at the peak")

# %% [markdown]
# The model states are what you predicted: 16 GB. But **look at the peak**: more than five times
# that, too much for a GPU of 80 GB. Each of the 127 blocks has 7.9 billion parameters, 15.7 GB in
# 16 bits. At the worst moment of the backward pass two blocks are whole, the gradients of two are on
# their way, and the embeddings, which the root holds, are whole with their gradient.
#
# The knobs of this lesson are the way out. What does it cost, in GB, to wait for every
# collective?

# %%
patient = zerolab.rehearse(trillion, world_size=1024, stage=3, prefetch=0, reduces_in_flight=0)
print(f"prefetch 0, nothing in flight: {max(patient.peak_by_phase.values()) / 1e9:.1f} GB at the peak")

# %% [markdown]
# Smaller units would do it without waiting: `units=` names the modules to gather as one, so a model
# that keeps attention and MLP in modules of their own can be cut there. What fits is a question of
# the largest unit as much as of the number of ranks.
#
# ## Summary
#
# - At stage 3 a rank holds 16Ψ/N bytes, and the units at work: a unit is whole while it computes,
#   in forward and once more in backward.
# - Freeing means `storage.resize_(0)` under a tensor that stays: autograd's views of it come back
#   with the storage. While it is away, the parameter is `Sharded` and says so; `full_params()`
#   makes everything whole.
# - Traffic is 3Ψ − Ψ_root, 1.5 times stage 2's at most. The gather after the update is gone, two
#   others came.
# - The peak is `root + (prefetch + 1)` units. `prefetch` buys time with memory and changes no bit.
#
# Everything that a model *is* can now be divided by N. What is left in memory is what a batch
# *does*: activations, buffers, fragments. That is lesson 07's subject.

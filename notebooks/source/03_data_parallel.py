# %% [markdown]
# # 03 · Data parallelism: the mean of the gradients
#
# > **45 minutes.** *You need:* a PyTorch training loop, ranks and messages (lesson 00), and the two halves
# > of an all-reduce (lesson 02).
# >
# > *Afterwards you can* say what exactly data parallelism averages and when that average is wrong, why
# > gradients travel in buckets and while the backward pass still runs, and what all ranks hold N times
# > over.
# >
# > *Paper:* ZeRO, §3.1 and §7.1, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).

# %% [markdown]
# ## The question
#
# Every rank has the same model and its own micro-batch. After the step all ranks must have the same model
# again, and it should be the one that a single process with all the data would have. What has to travel,
# and when?

# %%
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import zerolab
from zerolab import cost, data, memory, models
from zerolab.course import answer, attempt, choice, explore, predict, show, show_source
from zerolab.course.figures import held_by_rank
from zerolab.course.lessons.data_parallel import check_average_gradients, figures, quiz
from zerolab.launcher import threads_per_rank
from zerolab.stages.stage0 import Stage0
from zerolab.unit import FlatUnit

# %% [markdown]
# ## A gradient is not a weight update
#
# The *gradient* is what `backward()` computes. The *update* is what the optimizer makes of it. One could
# average either: the gradients before `step()`, or the weights after it. Plain SGD can't tell the
# difference. Adam can.
#
# One weight, and Adam with `lr=0.1`, first step. Rank 0's gradient is 6, rank 1's is −2. **Average the
# gradients, then step: how far does the weight move?**

# %%
my_guess = ...


# %%
def step_once(average_gradients):
    weight = nn.Parameter(torch.zeros(1))
    adam = torch.optim.Adam([weight], lr=0.1)
    weight.grad = torch.tensor([6.0 if dist.get_rank() == 0 else -2.0])
    if average_gradients:
        average(weight.grad)
    adam.step()
    if not average_gradients:
        average(weight.data)
    return round(abs(weight.item()), 3)


def average(tensor):
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


# %%
moved = zerolab.launch(step_once, 2, True)
print("average the gradients, then step:", moved)
print("step, then average the weights:  ", zerolab.launch(step_once, 2, False))
predict(my_guess, moved[0], quiz.FIRST_STEP)

# %% [markdown]
# Adam divides by the size of the gradient, so its first step is `lr` long whatever the gradient. Averaged
# first, the ranks agree on a direction and go. Averaged last, two confident steps in opposite directions
# cancel, and the fact that rank 0's gradient was three times as large is lost.
#
# Data parallelism averages **gradients**. Then all ranks feed the same numbers into the same optimizer, and
# get the same weights.
#
# ## Each rank its own micro-batch
#
# Below, four ranks each take the gradient of *their* eight windows of text and average it. Beside them, one
# process takes the gradient of all 32 windows at once.

# %%
text = data.NextByte(data.text(), context=32, batch_size=8)


def build():
    torch.manual_seed(0)  # every rank starts from the same weights
    return models.GPT(width=64, depth=2, heads=2, context=32)


def average_each(parameters):
    for parameter in parameters:
        average(parameter.grad)


# %%
def averaged_gradients():
    model = build()
    model(*text.batch(0, dist.get_rank())).backward()
    average_each(model.parameters())
    return [parameter.grad for parameter in model.parameters()]


by_rank = zerolab.launch(averaged_gradients, 4)


# %%
def close(some, others):
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(some, others, strict=True))


whole = build()
batches = [text.batch(0, rank) for rank in range(4)]
whole(*map(torch.cat, zip(*batches, strict=True))).backward()
gradients = [parameter.grad for parameter in whole.parameters()]
print("each rank has it, up to rounding:", all(close(grads, gradients) for grads in by_rank))

# %% [markdown]
# The mean of the gradients is the gradient of the mean, because differentiation is linear:
#
# $$\nabla\, \frac1N \sum_r L_r \;=\; \frac1N \sum_r \nabla L_r$$
#
# The left side is what you want; the right side is what the ranks can compute. Only: *which* mean is $L_r$?
#
# ## When the mean of means is wrong
#
# A loss is usually a mean itself, over the tokens of the rank's batch. Let rank 0 have 30 tokens and a mean
# loss of 2, and rank 1, where most of the batch is padding, 10 tokens and a mean loss of 6. **What is the
# mean loss over all 40 tokens?**

# %%
my_guess = ...

# %%
counts, losses = [30, 10], [2, 6]
over_all = sum(count * loss for count, loss in zip(counts, losses, strict=True)) / sum(counts)
predict(my_guess, over_all, quiz.MEAN_LOSS)

# %% [markdown]
# The same on real ranks. Rank 1 keeps only the first 8 of its 32 targets in each window (`-100` is
# PyTorch's "do not count this one"). The remedy is to weigh each rank's loss by its share of the tokens
# *before* the backward pass. The factor N is there because the averaging will divide by N.


# %%
def padded_batch(rank):
    tokens, targets = text.batch(0, rank)
    targets = targets.clone()
    targets[:, 8 if rank == 1 else 32 :] = -100
    return tokens, targets


# %%
def with_padding(weigh):
    model, (tokens, targets) = build(), padded_batch(dist.get_rank())
    mine = (targets != -100).sum()
    total = mine.clone()
    dist.all_reduce(total)
    share = mine / total * dist.get_world_size() if weigh else 1
    (share * model(tokens, targets)).backward()
    average_each(model.parameters())
    return [parameter.grad for parameter in model.parameters()]


# %%
whole = build()
whole(*map(torch.cat, zip(padded_batch(0), padded_batch(1), strict=True))).backward()
gradients = [parameter.grad for parameter in whole.parameters()]
for weigh in (False, True):
    right = close(zerolab.launch(with_padding, 2, weigh)[0], gradients)
    print(f"weighed by tokens: {weigh!s:<6} gradient of the mean over all tokens: {right}")

# %% [markdown]
# Nothing warns you: the unweighed run trains, only on a slightly different loss. No engine can fix this for
# you, neither PyTorch's nor this one, because only you know what you counted.
#
# ## One message per parameter
#
# `average_each` sends one all-reduce per parameter. Is that a problem? A message costs a fixed time α
# however small it is (*latency*), and a time β for each byte (*1 / bandwidth*). On a ring of N ranks an
# all-reduce is 2(N−1) messages in a row.
#
# GPT-2 1.5B has 580 parameter tensors. Take 64 GPUs and α = 10 µs. **How many milliseconds of pure latency
# does one step pay, if each tensor travels by itself?**

# %%
my_guess = ...

# %%
link = {"latency_seconds": 10e-6, "bandwidth_bytes_per_second": 25e9}
alone = cost.collective_seconds(0, 64, "all_reduce", **link)  # no bytes: latency only
predict(my_guess, 580 * alone * 1e3, quiz.LATENCY)
together = cost.collective_seconds(3e9, 64, "all_reduce", **link)
print(f"all 3 GB of gradients in one all-reduce: {together * 1e3:.0f} ms")

# %% [markdown]
# Three times as long for latency alone as for all the bytes. So pack first: lay the gradients end to end in
# one *flat* tensor, reduce that, and copy the pieces back.


# %%
def average_flat(parameters):
    parameters = list(parameters)
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    average(flat)
    pieces = flat.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


# %% [markdown]
# `attempt` runs a function on real ranks and notes every call that it makes on the process group. Same
# gradients, same bytes; count the messages:


# %%
def one_backward(average_them):
    model = build()
    model(*text.batch(0, dist.get_rank())).backward()
    average_them(model.parameters())


for average_them in (average_each, average_flat):
    sent = attempt(one_backward, [(average_them,)] * 4).messages[0]
    bytes_sent = sum(message.nbytes for message in sent)
    print(f"{average_them.__name__:<13} {len(sent):>3} all-reduces, {bytes_sent:,} bytes of gradients")

# %% [markdown]
# ## Buckets: neither one nor all
#
# One message for everything has the least latency, and a flaw: it can't leave before the *last* gradient is
# there. Gradients appear one by one, from the last layer to the first. A *bucket* leaves as soon as its own
# gradients are complete, and travels while the backward pass goes on.
#
# Below is a model of it, not a measurement: 3 GB of gradients appear evenly during 0.4 s of backward;
# messages go over a ring with α = 10 µs and 25 GB/s. **Where is the best bucket size for 64 GPUs? And for
# 8?**

# %%
sizes, gpus = choice(figures.BUCKET_MB, 3000), choice((2, 8, 64, 256), 64)
explore(figures.buckets, height=4.4, bucket_MB=sizes, gpus=gpus)

# %% [markdown]
# Too small, and you pay α for each bucket. Too large, and the last one has the wire to itself while
# everybody waits. More GPUs mean more latency per bucket, so the best size grows with N. PyTorch's DDP
# starts from 25 MB.
#
# zerolab's buckets are its *units*: one for each block of the model. A unit goes one step further than
# `average_flat`: its parameters *live* in the flat buffer, as views, so that whole blocks move without
# being packed first.

# %%
show_source(FlatUnit._adopt)

# %% [markdown]
# ## Overlap, seen in a real step
#
# Four linear layers, two ranks, stage 0. Each parameter's hook notes the moment its gradient is ready; the
# optimizer's trace has the moments at which each all-reduce started and at which its result was there.
# `reduces_in_flight` says how many may be under way when the next unit's gradients arrive: with 0 each
# is waited for on the spot.


# %%
def watch_backward(in_flight):
    model, ready = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), []

    def note(name, parameter):
        ready.append((time.perf_counter(), name))

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(note, name))
    options = {"stage": 0, "reduces_in_flight": in_flight}
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, **options)
    model(torch.ones(8, 64)).square().mean().backward()
    return figures.in_order(ready, optimizer.trace.step(0))


# %% tags=["nbval-ignore-output"]
runs = {f"reduces_in_flight={n}": zerolab.launch(watch_backward, 2, n)[0] for n in (0, 1)}
show(figures.timeline, height=3.6, runs=runs)

# %% [markdown]
# Read the columns from left to right; the figure shows their order, not their length in time. Above, each
# layer's all-reduce ends before the next gradient is computed: the wire and the processor take turns.
# Below, layer 3's bytes travel while layer 2's gradient is computed. Only the all-reduce of layer 0 has
# nothing to hide behind.
#
# The numbers that come out are the same, bit for bit. Overlap changes when, never what.
#
# ## The hook that fails silently
#
# To start a message during the backward pass, you hang a hook on each parameter. PyTorch has two, and they
# are not alike:
#
# - `register_hook(f)` calls `f(gradient)` *before* the gradient is added to `.grad`;
# - `register_post_accumulate_grad_hook(f)` calls `f(parameter)` *after* that.
#
# One averaging function for each. `average`, from above, wants the gradient. This one wants the parameter:


# %%
def average_grad_of(parameter):
    if parameter.grad is not None:
        average(parameter.grad)


# %% [markdown]
# Now all four pairings. Two ranks take three steps each on their own batches. **Which pairings keep the two
# replicas equal, and which of the others raise an error?**


# %%
def train_with_hooks(hook, function):
    model = build()
    for parameter in model.parameters():
        getattr(parameter, hook)(function)
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(3):
        adam.zero_grad()
        model(*text.batch(step, dist.get_rank())).backward()
        adam.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# %%
for hook in ("register_hook", "register_post_accumulate_grad_hook"):
    for function in (average, average_grad_of):
        first, second = zerolab.launch(train_with_hooks, 2, hook, function)
        print(f"{hook:<35} {function.__name__:<15} replicas equal: {torch.equal(first, second)}")

# %% [markdown]
# Two are right, two are wrong, and none complains. `register_hook` gave `average_grad_of` a gradient, whose
# own `.grad` is `None`: skipped, with the `if` that was meant for unused parameters. The other hook gave
# `average` the *weights*, so the weights were averaged, a step late, and the gradients never. The losses
# fall nicely in all four runs; only a comparison of ranks tells.
#
# zerolab uses the second hook: it comes with the parameter, when its gradient is complete, so the gradient
# can move into the flat buffer at once.
#
# ## Stage 0
#
# Everything above in one class is *stage 0*, data parallelism before ZeRO removes anything from it. Of the
# six verbs of a stage it needs three: own everything, all-reduce, update everything.

# %%
show_source(Stage0)

# %% [markdown]
# The loop is your own; only the optimizer's class is new.

# %%
RANKS, STEPS = 4, 5


def train_stage_0():
    model = build()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=0, lr=3e-3)
    for step in range(STEPS):
        model(*text.batch(step, optimizer.rank)).backward()
        held = optimizer.memory()  # here, where the gradients are alive
        optimizer.step()
        optimizer.zero_grad()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return weights, held, optimizer.trace.traffic()


# %% [markdown]
# And a single process, with no ranks and no package. It adds up the four micro-batches' gradients *in the
# order of the ranks*, and divides once: floating-point sums depend on their order, so to ask for the same
# bits, ask for the same order. (The number of threads changes the order too, inside a matrix product.)

# %%
torch.set_num_threads(threads_per_rank(RANKS))
single = build()
adam = torch.optim.Adam(single.parameters(), lr=3e-3)
for step in range(STEPS):
    for rank in range(RANKS):
        single(*text.batch(step, rank)).backward()  # .grad adds up
    for parameter in single.parameters():
        parameter.grad /= RANKS
    adam.step()
    adam.zero_grad()

# %%
results = zerolab.launch(train_stage_0, RANKS)
same = [
    torch.equal(mine, reference)
    for weights, _, _ in results
    for mine, reference in zip(weights, single.parameters(), strict=True)
]
print(f"{len(same)} tensors on {RANKS} ranks against one process: bit-identical: {all(same)}")

# %% [markdown]
# Not close: the same bits, on every rank, after five steps. Each lesson from here on ends with this line.
#
# And PyTorch's own `DistributedDataParallel`? On two ranks there is only one order to add in, so it can be
# held to the bit as well:


# %%
def train_beside_ddp():
    ours, theirs = build(), build()
    wrapped = nn.parallel.DistributedDataParallel(theirs)
    zero = zerolab.ZeroOptimizer(ours, torch.optim.Adam, stage=0, lr=3e-3)
    adam = torch.optim.Adam(theirs.parameters(), lr=3e-3)
    for step in range(STEPS):
        for model, optimizer in ((ours, zero), (wrapped, adam)):
            model(*text.batch(step, zero.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(torch.equal(mine, its) for mine, its in pairs)


print("stage 0 beside DDP, on each of 2 ranks: same weights:", zerolab.launch(train_beside_ddp, 2))

# %% [markdown]
# ## What it costs
#
# Bytes first. An all-reduce is a reduce-scatter and an all-gather, so the paper counts 2Ψ elements per rank
# per step, here 4 bytes each. `logical_bytes` is that; `wire_bytes` is what a rank really handed to the
# network, (N−1)/N of it.

# %%
psi = sum(parameter.numel() for parameter in single.parameters())
_, _, traffic = results[0]
print(f"Ψ = {psi:,} parameters in fp32")
print(f"formula  2Ψ   {4 * cost.communication_volume(psi, stage=0):>9,} bytes")
print(f"measured      {traffic.logical_bytes:>9,} bytes")
print(f"on the wire   {traffic.wire_bytes:>9,} bytes, {traffic.wire_bytes / traffic.logical_bytes} of it")
print("by operation ", list(traffic.by_op))

# %% [markdown]
# Now memory. **A model of 7.5B parameters trains on 64 GPUs in mixed precision, 16 bytes per parameter. How
# many GB of model states do the 64 GPUs hold, all together?**

# %%
my_guess = ...

# %%
each = memory.model_states(7.5e9, world_size=64, stage=0).total_bytes
predict(my_guess, 64 * each / 1e9, quiz.HELD_BY_64_GPUS)
show(held_by_rank, height=2.8, memories=[held for _, held, _ in results], psi=psi)

# %% [markdown]
# This is a census of real storages on our four ranks (in fp32, where 4 + 4 + 8 also makes 16). All four
# rows are the same, and so are the numbers in them. One row would be enough to know everything; the others
# are copies. 64 GPUs hold 7,680 GB, of which 120 GB are information.
#
# ## Quiz
#
# The ranks see different data. Which part of the step do all of them compute identically, on identical
# inputs?
#
# - **a)** the forward pass
# - **b)** the backward pass
# - **c)** the optimizer's update

# %%
my_answer = ...
answer(my_answer, quiz.IDENTICAL_WORK)

# %% [markdown]
# ## Exercise: average the gradients
#
# > **Difficulty 3 of 5 · 15 minutes.** Write `average_gradients(parameters, count)`, to be called after
# > `backward()`. This rank's loss was the mean over `count` tokens. When it returns, every `parameter.grad`
# > holds, on every rank, the gradient of the mean over **all ranks' tokens**.
# >
# > - Ranks may have different counts.
# > - A parameter that this rank did not use has `grad = None`; others may have used it. For this rank,
# >   that's zero.
# > - A gradient may be laid out in memory like a transposed tensor. (`all_reduce` adds storages, not
# >   elements: try to see what that means if only one rank's is.)
# > - One message in all. The count can travel with the gradients.


# %%
# Exercise
def average_gradients(parameters, count): ...  # your code


check_average_gradients(average_gradients)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def average_gradients(parameters, count):
#     for parameter in parameters:
#         if parameter.grad is None:
#             parameter.grad = torch.zeros_like(parameter)
#     pieces = [count * parameter.grad.flatten() for parameter in parameters]
#     flat = torch.cat([*pieces, pieces[0].new_tensor([count])])
#     dist.all_reduce(flat)
#     *sums, total = flat.split([*(piece.numel() for piece in pieces), 1])
#     for parameter, summed in zip(parameters, sums, strict=True):
#         parameter.grad.copy_((summed / total).view_as(parameter))
# ```
#
# `flatten()` follows the elements and `copy_` puts them back into whatever layout the gradient has.
# </details>
#
# ## Summary
#
# - Data parallelism averages gradients, not updates and not weights; then every rank makes the same step.
# - The mean of the ranks' means is right only if all count the same number of tokens. Otherwise weigh the
#   loss.
# - Small messages pay latency, one large message can't overlap: buckets, sent from the last layer to the
#   first while the backward pass goes on.
# - Stage 0 moves 2Ψ per step, and is single-process training to the bit.
# - Every rank holds 16Ψ bytes, and each of them is a copy. Worse, every rank computes the same update.
#
# **Next:** [04 · ZeRO stage 1](04_zero_stage_1.ipynb), which makes each rank update only its own share.

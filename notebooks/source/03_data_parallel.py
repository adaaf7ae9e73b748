# %% [markdown]
# # 03 · Data parallelism: the mean of the gradients
#
# > **60 minutes, and 10 more for the first exercise.** *You need:* a PyTorch training loop, ranks and
# > messages (lesson 00), and the two halves of an all-reduce (lesson 02).
# >
# > *Afterwards you can* say what data parallelism averages and when that average is wrong, why gradients are
# > sent several at a time and during the backward pass, and which copies the ranks hold. (The first exercise
# > can be left out.)
# >
# > *Paper:* ZeRO, §3.1 and §7.1, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).
# >
# > *Words:* the [glossary](../docs/glossary.md) explains the main ones.

# %% [markdown]
# ## The question
#
# Every rank has the same model, a *replica* of it, and its own *micro-batch*: the part of the batch that it
# processes at once. After the step all ranks must again have the same model. It should be the model that a
# single process gets from all the data. What must be sent, and when?

# %%
import torch
import torch.distributed as dist
from torch import nn

import zerolab
from zerolab import cost, data, memory, models
from zerolab.course import answer, attempt, choice, explore, figure, number, predict, show, show_source
from zerolab.course.lessons.data_parallel import check_average_gradients, check_buckets, figures, quiz
from zerolab.course.look import COLOURS, PAPER, QUIET, by_category, ink_on
from zerolab.parity import compute_deterministically
from zerolab.stages.stage0 import Stage0

# %% [markdown]
# ## A gradient is not a weight update
#
# The *gradient* is what `backward()` computes. The *update* is what the optimizer makes of it. The ranks
# could average the gradients before `step()`, or the weights after it. With plain SGD both give the same
# weights. With Adam they do not.
#
# Take one weight and the first step of Adam with `lr=0.1`. The gradient of rank 0 is 6, that of rank 1 is −2.
# **The ranks average the gradients, then step: how far does the weight move?**

# %%
my_guess = ...


# %%
def step_once(average_gradients):
    weight = nn.Parameter(torch.zeros(1, device=zerolab.device()))
    adam = torch.optim.Adam([weight], lr=0.1)
    weight.grad = torch.full_like(weight, 6 if dist.get_rank() == 0 else -2)
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
rows = [f"average the gradients, then step: {moved}"]
rows.append(f"step, then average the weights:   {zerolab.launch(step_once, 2, False)}")
predict(my_guess, moved[0], quiz.FIRST_STEP, *rows)

# %% [markdown]
# If the gradients are averaged first, both ranks step in the direction of the mean. If the weights are
# averaged last, two steps of equal length in opposite directions cancel. The gradient of rank 0 was three
# times as large, and the result does not show it.
#
# Data parallelism averages **gradients**. Then all ranks give the same numbers to the same optimizer and get
# the same weights.
#
# ## Each rank has its own micro-batch
#
# Below, each of four ranks computes the gradient of *its* eight windows of text, and they average the
# gradients. For comparison, one process computes the gradient of all 32 windows at once. (A window is 32
# bytes of the text in a row. Each byte is a token, and its target is the byte after it.)

# %%
text = data.NextByte(data.text(), context=32, batch_size=8)


def build():
    compute_deterministically()  # on a GPU too, equal inputs give equal bits
    torch.manual_seed(0)  # every rank starts from the same weights
    return models.GPT(width=64, depth=2, heads=2, context=32).to(zerolab.device())


def batch(step, rank):
    return [part.to(zerolab.device()) for part in text.batch(step, rank)]


# %%
def average_each(parameters):
    for parameter in parameters:
        average(parameter.grad)


# %%
def averaged_gradients():
    model = build()
    model(*batch(0, dist.get_rank())).backward()
    average_each(model.parameters())
    return [parameter.grad for parameter in model.parameters()]


by_rank = zerolab.launch(averaged_gradients, 4)


# %%
def close(some, others):
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(some, others, strict=True))


whole = build()
batches = [batch(0, rank) for rank in range(4)]
whole(*map(torch.cat, zip(*batches, strict=True))).backward()
gradients = [parameter.grad for parameter in whole.parameters()]
print("each rank has it, up to rounding:", all(close(grads, gradients) for grads in by_rank))

# %% [markdown]
# The gradient of a mean is the mean of the gradients, because differentiation is linear. Here $L_r$ is the
# loss of rank r:
#
# $$\nabla\, \frac1N \sum_r L_r \;=\; \frac1N \sum_r \nabla L_r$$
#
# You want the left side, and the ranks can compute the right side. (This needs a loss that treats each sample
# by itself. `nn.BatchNorm` in training mode does not: it computes mean and variance of its own rank's
# samples.)
#
# But *which* mean is $L_r$?
#
# ## When the mean of means is wrong
#
# A loss is usually a mean, too: over the tokens of the rank's micro-batch. Suppose that rank 0 has 30 tokens
# and a mean loss of 2. The texts of rank 1 are shorter: it has 10 tokens and a mean loss of 6. **What is the
# mean loss over all 40 tokens?**

# %%
my_guess = ...

# %%
counts, losses = [30, 10], [2, 6]
over_all = sum(count * loss for count, loss in zip(counts, losses, strict=True)) / sum(counts)
predict(my_guess, over_all, quiz.MEAN_LOSS)

# %% [markdown]
# What does the wrong mean do to a run? Below rank 1 keeps only the first 8 of its 32 targets in each window.
# (PyTorch's cross-entropy ignores a target of `-100`.) Its few tokens are also of another kind: its text runs
# backwards.
#
# One run averages the ranks' means. The other run multiplies each rank's loss by its share of the tokens
# *before* the backward pass, times N, because the averaging divides by N. Both runs train on the same tokens,
# and both are measured by the loss over all of them. (The loss is a cross-entropy with the natural logarithm.
# It is measured in *nats*.)


# %%
def two_kinds(step, rank):
    tokens, targets = batch(step, rank)
    if rank == 1:
        tokens, targets = targets.flip(1), tokens.flip(1)
        targets[:, 8:] = -100
    return tokens, targets


# %%
def train_on_two_kinds(weigh, steps=60):
    model, seen = build(), []
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens, targets = two_kinds(step, dist.get_rank())
        loss, mine = model(tokens, targets), (targets != -100).sum()
        both = torch.stack([loss.detach() * mine, mine])
        dist.all_reduce(both)
        seen.append((both[0] / both[1]).item())  # over all tokens, before the update
        share = mine / both[1]  # of all tokens
        (loss * share * dist.get_world_size() if weigh else loss).backward()
        average_each(model.parameters())
        adam.step()
        adam.zero_grad()
    return seen


# %%
right, wrong = (zerolab.launch(train_on_two_kinds, 2, weigh)[0] for weigh in (True, False))
excess = [more - less for more, less in zip(wrong, right, strict=True)]
fig = figure(height=3.2)
losses, difference = fig.subplots(2, height_ratios=[2, 1])
losses.plot(wrong, label="mean of the ranks' means", marker="")
losses.plot(right, label="weighted by tokens", marker="", linestyle="--")
losses.set(ylabel="loss (nats)", xticks=[])
difference.axhline(0, color=QUIET)
difference.plot(excess, marker="")
difference.set(xlabel="step", ylabel="wrong − right")
higher = sum(excess[20:]) > 0
show(fig, f"Loss over all tokens in two runs. After step 20 the wrong mean's is higher on average: {higher}.")

# %% [markdown]
# The lower plot is the difference. After step 20 the loss over all tokens is higher on average in the run
# that averages the ranks' means. No warning says so. That run trains, too, but it minimizes a different loss:
# rank 1's few tokens count as much as rank 0's many.
#
# An *engine*, the code that shards and sends, gets the loss alone. It does not know the number of tokens. So
# you pass two values to zerolab, the sum of the losses and the number of tokens:
# `optimizer.mean_loss(loss_sum, count).backward()` computes the gradient of the mean over the tokens of all
# ranks.
#
# ## One all-reduce per parameter
#
# `average_each` makes one all-reduce per parameter. Is that a problem? A send costs a fixed time α for any
# size (*latency*), and a time β for each byte (*1 / bandwidth*). On a ring of N ranks an all-reduce is a
# sequence of 2(N−1) sends.
#
# GPT-2 1.5B has 580 parameter tensors. Take 64 GPUs and α = 10 µs. **If each tensor is sent by itself, how
# many milliseconds of latency does one step have?**

# %%
my_guess = ...

# %%
link = {"latency_seconds": 10e-6, "bandwidth_bytes_per_second": 25e9}
alone = cost.collective_seconds(0, 64, "all_reduce", **link)  # no bytes: latency only
together = cost.collective_seconds(3e9, 64, "all_reduce", **link)
row = f"all 3 GB of gradients in one all-reduce: {together * 1e3:.0f} ms"
predict(my_guess, 580 * alone * 1e3, quiz.LATENCY, row)


# %% [markdown]
# Look at other links and other numbers of GPUs: what does a faster network change, and what does it not
# change?


# %%
def cost_of_all_reduce(fig, GB_per_second=25, latency_microseconds=10):
    gpus, ax, ends = [2**power for power in range(1, 11)], fig.subplots(), []
    for count in (1, 580):
        link = (latency_microseconds * 1e-6, GB_per_second * 1e9)
        seconds = [count * cost.collective_seconds(3e9 / count, n, "all_reduce", *link) for n in gpus]
        ax.loglog(gpus, [1e3 * s for s in seconds], label=f"3 GB in {count} all-reduce{'s' * (count > 1)}")
        ends.append(f"{1e3 * seconds[-1]:,.0f} ms in {count}")
    ax.set(xlabel="number of GPUs", ylabel="milliseconds", xticks=gpus[::3], xticklabels=gpus[::3])
    ax.set(ylim=(1, 2e6), yticks=[1, 1e3, 1e6], yticklabels=["1", "1,000", "1,000,000"])
    return f"{GB_per_second:g} GB/s, latency {latency_microseconds:g} µs: on 1024 GPUs " + ", ".join(ends)


explore(cost_of_all_reduce, GB_per_second=number(1, 900, 25), latency_microseconds=number(1, 1000, 10))

# %% [markdown]
# <details><summary>Answer</summary>
#
# More bandwidth lowers both lines. It does not change the latency, and with many GPUs the upper line is
# almost all latency.
# </details>
#
# So put the gradients into one *flat* tensor, one after the other, reduce that tensor, and copy the results
# back.


# %%
def average_flat(parameters):
    parameters = list(parameters)
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    average(flat)
    pieces = flat.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


# %% [markdown]
# `attempt` runs a function on real ranks and records every call to torch.distributed that sends something.
# Such a call is one *message* here, however many sends an all-reduce makes inside. The gradients and the
# bytes are the same as before. Compare the number of messages:


# %%
def one_backward(average_them):
    model = build()
    model(*batch(0, dist.get_rank())).backward()
    average_them(model.parameters())


for average_them in (average_each, average_flat):
    sent = attempt(one_backward, [(average_them,)] * 4).messages[0]
    bytes_sent = sum(message.nbytes for message in sent)
    many = f"{len(sent):>3} all-reduce{'s' * (len(sent) > 1)}"
    print(f"{average_them.__name__:<13} {many}, {bytes_sent:,} bytes of gradients")

# %% [markdown]
# ## Buckets
#
# One message for all gradients has the least latency. But it can only be sent when the *last* gradient is
# there. Gradients are computed one after the other, from the last layer to the first. A *bucket* is a group
# of gradients that are sent together. A bucket is sent as soon as all its gradients are there, while the
# backward pass continues.
#
# The figure below shows a model, not a measurement. 3 GB of gradients appear evenly during 0.4 s of backward.
# The messages go over a ring with α = 10 µs and 25 GB/s. Find the best bucket size for 64 GPUs, and then for
# 8, with the sliders.


# %%
def draw_messages(lanes, sent):
    messages = [(start, end - start) for start, end in figures.visible(sent)]
    lanes.broken_barh([(0, figures.BACKWARD_SECONDS)], (-0.4, 0.8), color=QUIET)
    lanes.broken_barh(messages, (0.6, 0.8), facecolor=COLOURS["gradients"], edgecolor=PAPER)
    lanes.set(xlim=(0, None), xlabel="seconds (model)", yticks=[0, 1], yticklabels=["backward", "all-reduce"])
    lanes.locator_params(axis="x", nbins=4)


# %%
def buckets(fig, bucket_MB=3000, gpus=64):
    (lanes, curve), sent = fig.subplots(2), figures.send_buckets(bucket_MB, gpus)
    waits = [1e3 * figures.exposed_seconds(size, gpus) for size in figures.BUCKET_MB]
    now = waits[figures.BUCKET_MB.index(bucket_MB)]
    draw_messages(lanes, sent)
    lanes.set_title(f"after backward the step waits {now:,.0f} ms")
    curve.loglog(figures.BUCKET_MB, waits)
    curve.plot(bucket_MB, now, "o", color=COLOURS["gradients"], markersize=9, clip_on=False)
    curve.set(xlabel="bucket size, MB", ylabel="waiting, ms")
    ticks, labels = [1, 10, 100, 1000], ["1", "10", "100", "1,000"]
    curve.set(xticks=ticks, xticklabels=labels, yticks=ticks, yticklabels=labels)
    many = f"{len(sent):,} message{'s' * (len(sent) > 1)} of {bucket_MB:,} MB"
    return f"{many}, {gpus} GPUs: {now:,.0f} ms. By bucket size: {figures.by_bucket(waits)}"


# %%
sizes, gpus = choice(figures.BUCKET_MB, 3000), choice((2, 8, 64, 256), 64)
explore(buckets, height=3.8, bucket_MB=sizes, gpus=gpus)

# %% [markdown]
# <details><summary>Answer</summary>
#
# In this model 25 MB is best for 64 GPUs, where the step waits 3 ms, and 5 MB for 8 GPUs. (For 256 GPUs it is
# 100 MB.)
# </details>
#
# Each bucket costs a latency of 2(N−1)α. Small buckets need many all-reduces, and the sum of their latencies
# can be longer than the backward pass. If buckets are too large, all ranks wait for the last one after the
# backward pass. With more GPUs a bucket has more latency, so the best size grows with N. PyTorch's own data
# parallelism, `DistributedDataParallel` or *DDP*, fills buckets of 25 MiB by default. (Its first bucket has 1
# MiB, so that the first message leaves early.)
#
# In zerolab a bucket is called a *unit*: there is one for each block of the model, and one for the rest. Its
# parameters are *views* of one *flat buffer* all the time. Each gradient moves into a second flat buffer when
# it is computed, so a message needs no `torch.cat`, and nothing is copied back. When a message is on its way
# while the rank computes, that is called *overlap*. Lesson 05 shows it in a real step.
#
# ## Optional exercise (10 minutes): fill the buckets
#
# > **Difficulty 2 of 5 · importance 3 of 5 · 10 minutes.** Write
# > `average_in_buckets(gradients, bucket_bytes)`. The gradients are in the order in which backward computes
# > them. Put as many into a bucket as fit, and all-reduce each bucket when it is full. A gradient that is
# > larger than a bucket is sent by itself. Afterwards every gradient holds, in place, the mean over all
# > ranks. All gradients are contiguous and have one dtype.
# >
# > - **Bronze:** the mean is right.
# > - **Silver:** as few messages as this rule gives, each as large as its gradients. So none is larger than
# >   `bucket_bytes`, but for a single larger gradient.
# > - **Gold:** the buckets are sent in the order of the list, and beside the gradients never more than two
# >   buckets are in memory.


# %%
# Exercise
def average_in_buckets(gradients, bucket_bytes): ...  # your code


check_buckets(average_in_buckets)

# %% [markdown]
# Stuck? `check_buckets.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_buckets.solution()` prints a solution. The check says which target your function has reached, and
# what is missing for the next.
#
# ## Stage 0
#
# All of this in one class is *stage 0*: data parallelism, before ZeRO shards anything. Every stage of zerolab
# is a class with the same six methods:
#
# - `setup` chooses which part of a unit this rank owns;
# - `unshard` and `reshard` gather a unit's parameters before they are used and free them afterwards;
# - `reduce_grads` starts the collective that sums a unit's gradients, and returns a `Work`, the handle to
#   wait for;
# - `after_reduce` keeps what this rank needs of the sum;
# - `update` steps the optimizer and shares the result.
#
# At stage 0 each rank owns everything, so `unshard` and `reshard` do nothing, and an empty `Work()` is a
# collective that is already done. `unit.own` chooses the range that this rank updates, `unit.owned`: here all
# of the flat buffer, which has `padded_numel` elements. `grads.local` is the buffer of this rank's gradients,
# `grads.op` says whether the reduction is a sum or a mean, and `grads.keep` takes the result. (M is the
# number of micro-batches that a rank runs before one update. Here it is 1, and in lesson 05 more.)

# %%
show_source(Stage0)

# %% [markdown]
# The training loop is still yours. Only the class of the optimizer is new. `optimizer.memory()` is a
# *census*: it asks every storage for its size and adds up the bytes by category. `optimizer.trace` is the
# *trace*: a record of every message and every update.

# %%
RANKS, STEPS = 4, 5


def train_stage_0():
    model = build()
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=0, lr=3e-3)
    for step in range(STEPS):
        model(*batch(step, optimizer.rank)).backward()
        held = optimizer.memory()  # here, where the gradients are alive
        optimizer.step()
        optimizer.zero_grad()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return weights, held, optimizer.trace.traffic()


# %% [markdown]
# For comparison, a single process trains without messages and without a sharded optimizer. It adds up the
# gradients of the four micro-batches *in the order of the ranks* and divides once. A floating-point sum
# depends on its order, so equal bits need an equal order. Lesson 02's ring adds in a different order: there
# the sum of chunk 0 begins with rank 1. So over gloo, PyTorch's library for messages between CPUs, the engine
# sends each chunk directly to the rank that adds it, and this rank adds in the order of the ranks. That takes
# as many bytes as the ring.


# %%
def train_alone():
    model = build()
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        for rank in range(RANKS):
            model(*batch(step, rank)).backward()  # .grad adds up
        for parameter in model.parameters():
            parameter.grad /= RANKS
        adam.step()
        adam.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


# %% [markdown]
# The order inside a matrix product depends on the device, and on the number of threads. So the single process
# is launched like a rank. `launch` starts four of them: each does the whole training, and we look at the
# first.

# %%
results = zerolab.launch(train_stage_0, RANKS)
alone = zerolab.launch(train_alone, RANKS)[0]
same = [
    torch.equal(mine, reference)
    for weights, _, _ in results
    for mine, reference in zip(weights, alone, strict=True)
]
print(f"{len(same)} tensors on {RANKS} ranks against one process: bit-identical: {all(same)}")

# %% [markdown]
# The results are not only close. They have the same bits, on every rank, after five steps. Lessons 04
# to 06 make the same comparison.
#
# ## What it costs
#
# First the bytes. An all-reduce is a reduce-scatter and an all-gather, so the paper counts 2Ψ elements per
# rank and step. Here each element has 4 bytes. `logical_bytes` follows the paper's count. `wire_bytes` is
# what a rank really sends, (N−1)/N of that.

# %%
psi = sum(parameter.numel() for parameter in alone)
_, _, traffic = results[0]
logical, wire = traffic.logical_bytes, traffic.wire_bytes
print(f"Ψ = {psi:,} parameters in fp32")
print(f"formula 2Ψ            {4 * cost.communication_volume(psi, stage=0):>9,} bytes")
print(f"counted, paper's way  {logical:>9,} bytes")
print(f"really sent           {wire:>9,} bytes, {wire / logical} of it")
print("by operation         ", list(traffic.by_op))

# %% [markdown]
# Now the memory. **A model of 7.5B parameters trains on 64 GPUs in mixed precision, 16 bytes per parameter.
# How many GB of model states do the 64 GPUs hold together?**

# %%
my_guess = ...

# %%
each = memory.model_states(7.5e9, world_size=64, stage=0).total_bytes
predict(my_guess, 64 * each / 1e9, quiz.HELD_BY_64_GPUS)

# %%
fig, left = figure(height=2.4), [0] * RANKS
ax, ranks = fig.subplots(), [f"rank {rank}" for rank in range(RANKS)]
held = [by_category(held, unit_bytes=psi) for _, held, _ in results]  # bytes per parameter
for category in held[0]:
    sizes = [by_rank[category] for by_rank in held]
    drawn = ax.barh(ranks, sizes, left=left, color=COLOURS[category], label=category)
    ax.bar_label(drawn, label_type="center", color=ink_on(COLOURS[category]), fmt="%g")
    left = [start + size for start, size in zip(left, sizes, strict=True)]
ax.invert_yaxis()
ax.set(xlabel="measured bytes per parameter", xlim=(0, 16.5))
said = ", ".join(f"{size:g}Ψ of {category}" for category, size in held[0].items())
show(fig, f"Measured on each of {RANKS} ranks: {said}. All rows are equal.")

# %% [markdown]
# The figure shows the census of our four ranks. (They train in fp32, where 4 + 4 + 8 also makes 16.) All four
# rows are equal, and the numbers in the tensors are equal, too. One row holds all the information, and the
# others are copies. It is the same on the 64 GPUs: one of them holds it all in 120 GB, and 63 hold copies.

# %% [markdown]
# ## Second exercise: average the gradients
#
# > **Difficulty 3 of 5 · importance 5 of 5 · 15 minutes.** Write `average_gradients(parameters, count)`. It
# > is called with a list after `backward()`, where this rank's loss was the mean over `count` tokens. When it
# > returns, every `parameter.grad` must hold, on every rank, the gradient of the mean over the tokens of
# > **all ranks**.
# >
# > - Ranks may have different counts, each at least 1.
# > - A parameter that this rank did not use has `grad = None`. At least one other rank has used it. Count it
# >   as zero on this rank.
# > - A gradient may be stored like a transposed tensor, also on one rank only. Its elements must be sent in
# >   the order of their indices, which is the order of `flatten()`, and not in the order of its storage.
# > - Send one message in all. The count can be sent with the gradients. The message has the type of the
# >   gradients, and no elements but these and one count.
# >
# > This exercise has no targets: the check demands the fewest bytes, and memory does not count.


# %%
# Second exercise
def average_gradients(parameters, count): ...  # your code


check_average_gradients(average_gradients)

# %% [markdown]
# Stuck? `check_average_gradients.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_average_gradients.solution()` prints a solution.
#
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
# - Data parallelism averages gradients, not updates and not weights. Then every rank makes the same step.
# - The mean of the ranks' means is right only if all ranks have the same number of tokens. Otherwise weight
#   the loss, or use `optimizer.mean_loss`.
# - Many small messages cost latency, and one large message cannot overlap. So gradients are sent in buckets,
#   from the last layer to the first, during the backward pass.
# - Stage 0 moves 2Ψ per step and has the bits of single-process training.
# - Every rank holds the same 16Ψ bytes, and every rank computes the same update.
#
# **Next:** [04 · ZeRO stage 1](04_zero_stage_1.ipynb), where each rank updates only its own part.

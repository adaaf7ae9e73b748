# %% [markdown]
# # 10 · Muon: an update that needs the whole matrix
#
# > **45 minutes.** *You need:* the flat buffer and its shards (lesson 04), what a rank sends (lessons 04
# > to 06).
# >
# > *Afterwards you can* say for which optimizers a parameter may be cut and which may not, show what a cut
# > does to Muon, give every matrix an owner so that the busiest rank has little more to do than the mean, and
# > compute what a rank then keeps.
# >
# > *Paper:* K. Jordan et al., [Muon](https://kellerjordan.github.io/posts/muon), 2024; J. Liu et al.,
# > [Muon is scalable](https://arxiv.org/abs/2502.16982), 2025.
# >
# > *Words:* the [glossary](../docs/glossary.md) explains the main ones.

# %% [markdown]
# ## The question
#
# In lesson 04 a cut may go through the middle of a tensor, because Adam's update is elementwise: the new
# value of each parameter depends on its own gradient, m and v alone. Since 2025 large models are trained with
# *Muon*, and its update of an element depends on the whole matrix. What has to change in ZeRO?

# %%
import torch

import zerolab
from zerolab import data, memory, models
from zerolab.course import answer, explore, figure, predict, show, slider
from zerolab.course.lessons.whole_matrices import check_owners, quiz
from zerolab.course.look import INK, PALE, QUIET
from zerolab.optimizer.owners import choose_owners, update_flops
from zerolab.optimizer.probe import kind_of
from zerolab.parity import compute_deterministically

# %% [markdown]
# ## What Muon does
#
# Muon keeps one momentum buffer for each matrix, as SGD does. Before the update it *orthogonalizes* the
# momentum: it keeps the directions of the matrix and makes every singular value 1. (The *singular values* of
# a matrix say how much it stretches each of its directions.) A gradient usually has a few large singular
# values and many small ones, so a plain step follows a few directions alone. After the orthogonalization all
# directions count as much. Below, a product of random matrices stands for a gradient.
#
# A singular value decomposition would do that, but it is slow on GPUs. Muon takes five steps of a
# *Newton-Schulz iteration*, which needs matrix products only. The three coefficients are those of K. Jordan.
# torch's Muon adds Nesterov momentum, weight decay, and a factor for matrices with more rows than columns.
# With this factor the step of a matrix is about as large as the steps of its parts together, so only
# directions differ in what follows.


# %%
def orthogonalize(matrix, steps=5):
    x = matrix / matrix.norm()  # no singular value is above 1 now
    for _ in range(steps):
        product = x @ x.T
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return x


torch.manual_seed(0)
gradient = torch.randn(64, 64) @ torch.diag(torch.linspace(0.02, 1, 64)) @ torch.randn(64, 64)
values = [torch.linalg.svdvals(each) for each in (gradient / gradient.norm(), orthogonalize(gradient))]

# %%
fig = figure(height=2.4)
ax = fig.subplots()
ax.plot(values[0], label="the gradient, divided by its norm", color=PALE, linewidth=4, marker="")
ax.plot(values[1], label="after five steps", color=INK, linewidth=1.5, marker="")
ax.set(xlabel="singular value, the largest first", ylim=(0, 1.3))
show(fig, "Singular values of a matrix: before, they fall from 0.35 to 0; after five steps most are near 1.")

# %% [markdown]
# Five steps bring 58 of the 64 singular values to between 0.66 and 1.21, and not exactly to 1. For training
# that is enough.
#
# Look at `x @ x.T`. Element (i, j) of the product depends on rows i and j, and an element of the next
# product depends on all rows. So no element of the result can be computed from a part of the matrix.
#
# ## Predict: two halves
#
# A flat cut leaves rows 0 to 31 of a 64 × 64 matrix on rank 0, and rows 32 to 63 on rank 1. Each rank
# orthogonalizes what it has. In exact arithmetic each half then has 32 singular values of 1, where the whole
# matrix has 64 of them, and a norm of √64 = 8. (The norm of a matrix is the root of the sum of the squares of
# its singular values.) **What is the norm of the two halves, one above the other?**

# %%
my_guess = ...


# %%
def exactly(matrix):  # U and V of the decomposition, and 1 for every singular value
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ v


whole = exactly(gradient)
halves = torch.cat([exactly(half) for half in gradient.chunk(2)])
predict(my_guess, halves.norm().item(), quiz.NORM_OF_HALVES)

# %% [markdown]
# So the update is as large as it should be, and nothing in the size of the steps shows that something is
# wrong. Look at the singular values of the two halves together.

# %%
fig = figure(height=2.4)
ax = fig.subplots()
ax.plot(torch.linalg.svdvals(whole), label="the whole matrix", color=PALE, linewidth=4, marker="")
ax.plot(torch.linalg.svdvals(halves), label="two halves", color=INK, linewidth=1.5, marker="")
ax.set(xlabel="singular value, the largest first", ylim=(0, 1.5))
show(fig, "Singular values: all 1 for the whole matrix; for two halves they fall from 1.41 to near 0.")

# %% [markdown]
# Within each half the rows are orthogonal. Between the halves they are not. Some directions are in both
# halves and count √2 times, and others hardly count. Muon orthogonalizes in order to prevent just that.
#
# ## Train with the cut
#
# Does it matter? Below, a small GPT trains with torch's own Muon for the matrices of its blocks, and with
# AdamW for all other parameters, as is usual. One run gives Muon whole matrices. Two give it each matrix in 4
# and in 16 parts, cut between rows, as so many ranks would have them. A fourth run is for comparison: its
# matrices are whole, and a millionth larger at the start.

# %%
text = data.NextByte(data.text(), context=32, batch_size=8)


def build():
    return models.GPT(width=64, depth=2, heads=2, context=32).to(zerolab.device())


def batch(step, rank=0):
    return [part.to(zerolab.device()) for part in text.batch(step, rank)]


def backward(model, step, rank=0):
    loss = model(*batch(step, rank))
    loss.backward()
    return loss.item()


# %%
def build_larger(by):
    model = build()
    matrices = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
    for matrix in matrices:
        matrix.data *= 1 + by
    return model, matrices, [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]


# %%
def train(parts, larger):
    model, matrices, others = build_larger(larger)
    cut = [matrix.detach().chunk(parts) for matrix in matrices]
    muon = torch.optim.Muon([part for each in cut for part in each], lr=0.02)
    adam, losses, seen = torch.optim.AdamW(others, lr=3e-3), [], []
    for step in range(60):
        seen.append(torch.cat([matrix.detach().flatten() for matrix in matrices]))
        losses.append(backward(model, step))
        for matrix, own in zip(matrices, cut, strict=True):
            for part, grad in zip(own, matrix.grad.chunk(parts), strict=True):
                part.grad = grad  # the parts are views: an update of a part is one of the matrix
        muon.step(), adam.step(), model.zero_grad()
    return losses, torch.stack(seen).cpu()


# %%
def run(parts, larger=0.0):
    compute_deterministically()
    torch.manual_seed(0)
    return train(parts, larger)


right_losses, right = zerolab.launch(run, 1, 1)[0]
how = {"4 parts": (4,), "16 parts": (16,), "a millionth larger": (1, 1e-6)}
runs = {name: zerolab.launch(run, 1, *each)[0] for name, each in how.items()}

# %% [markdown]
# The run with 4 parts and the run with whole matrices begin with the same parameters. In the run with whole
# matrices they move away from their start: call this distance 100 %. Before the last update, how far are the
# matrices of the run with 4 parts from those of the run with whole matrices? **Choose 1, 10, 30 or
# 90 percent.**

# %%
my_guess = ...

# %%
moved = (right[-1] - right[0]).norm()
percent = {name: 100 * (seen - right).norm(dim=1) / moved for name, (_, seen) in runs.items()}
predict(my_guess, round(percent["4 parts"][-1].item(), -1), quiz.DISTANCE)

# %%
fig = figure(height=2.4)
ax = fig.subplots()
for name, each in percent.items():
    ax.plot(each, label=name, markevery=10)
ax.set(xlabel="step", ylabel="distance (%)", ylim=(0, 125))
show(fig, "The distances of both cuts grow with every step; that of the run a millionth larger is small.")

# %% [markdown]
# The run that began a millionth larger ends at a distance of a little under 6 %. Rounding makes differences
# as small as that, and they grow like this one. The cuts into 4 and into 16 parts end about 16 and 21 times
# as far away: each number of ranks trains a different model. Does the loss show it?

# %%
fig = figure(height=2.4)
ax = fig.subplots()
ax.plot(right_losses, label="whole matrices", color=PALE, linewidth=5, marker="")
ax.plot(runs["4 parts"][0], label="4 parts", color=INK, linewidth=1.2, marker="")
ax.set(xlabel="step", ylabel="loss (nats per byte)")
show(fig, "The losses of both runs fall together, from 5.5 to about 2.5 nats.")

# %%
more = {name: sum(losses[-20:]) / 20 - sum(right_losses[-20:]) / 20 for name, (losses, _) in runs.items()}
print("No run differs by 0.1 nats or more:", all(abs(nats) < 0.1 for nats in more.values()))

# %% tags=["nbval-ignore-output"]
print("The mean of the last 20 steps, beside whole matrices, on this machine:")
for name, nats in more.items():
    print(f"{name:<20} {nats:+.2f} nats")

# %% [markdown]
# The two curves are nearly one: from one batch to the next the loss differs by about 0.3 nats, and the cut
# into 4 parts costs a tenth of that. So the loss curve of one run does not show the fault. The mean over many
# steps does, for those who have the right run to compare with.
#
# An engine did this with the shards of tensor parallelism, and skipped the orthogonalization at stage 0,
# without an error: see DeepSpeed's issues [8437](https://github.com/deepspeedai/DeepSpeed/issues/8437) and
# [8441](https://github.com/deepspeedai/DeepSpeed/issues/8441).
#
# ## Which optimizers may be cut?
#
# There are three kinds. An *elementwise* optimizer may be cut anywhere. A *by-parameter* optimizer updates
# every parameter by itself, and needs it whole. A third kind looks *across* parameters: one step size or one
# curvature for all of them. zerolab keeps no list of names. It runs each class on a few small tensors, whole
# and in parts, and compares the bits.

# %%
for name in ("SGD", "Adam", "AdamW", "Muon", "Adafactor", "LBFGS"):
    print(f"{name:<10}", kind_of(getattr(torch.optim, name), {"lr": 0.01}).name.lower().replace("_", " "))

# %% [markdown]
# ## One owner for each matrix
#
# The remedy: do not cut the matrices. Each has one *owner*, a rank that updates it as a whole with the
# unchanged optimizer. At stages 1 to 3 the same reduce-scatter as before gives each rank the gradients of
# what it owns. One thing changes: each rank's part now ends where a matrix ends. So the parts differ in
# length. AdamW's parameters are cut as before. `matrices_by` gives the matrices in the blocks to Muon.
# `optimizer.slices` lists what a rank updates: whole parameters, and slices of the others.


# %%
def train_sharded():
    compute_deterministically()
    torch.manual_seed(0)
    model = build()
    muon = zerolab.matrices_by(torch.optim.Muon, lr=0.02)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=2, lr=3e-3, params=muon)
    for step in range(10):
        backward(model, step, optimizer.rank)
        optimizer.step()
        optimizer.zero_grad()
    owned = [each.span.name for each in optimizer.slices if each.whole and each.tensor.numel()]
    return owned, [p.detach().clone() for p in model.parameters()], optimizer.memory()


# %%
by_rank = zerolab.launch(train_sharded, 4)
for rank, (owned, _, _) in enumerate(by_rank):
    print(f"rank {rank} updates", ", ".join(name.removesuffix(".weight") for name in owned))

# %% [markdown]
# For comparison, one process trains with plain Muon and plain AdamW on the mean of the four ranks' gradients.
# As in lesson 03 it is launched like a rank, because a product of matrices gives different bits with a
# different number of threads.


# %%
def train_alone():
    compute_deterministically()
    torch.manual_seed(0)
    model = build()
    others, matrices = zerolab.matrices_by(torch.optim.Muon)(model)
    muon = torch.optim.Muon(matrices["params"], lr=0.02)
    adam = torch.optim.AdamW(others["params"], lr=3e-3)
    for step in range(10):
        for rank in range(4):
            backward(model, step, rank)
        for parameter in model.parameters():
            parameter.grad /= 4
        muon.step(), adam.step(), model.zero_grad()
    return [p.detach() for p in model.parameters()]


# %%
single = zerolab.launch(train_alone, 4)[0]
same = all(torch.equal(a, b) for _, mine, _ in by_rank for a, b in zip(mine, single, strict=True))
print("bit-identical on all 4 ranks:", same)

# %% [markdown]
# ## Who works how long?
#
# Let a matrix have a shorter side s and a longer side l. Torch's Muon transposes a matrix that has more rows
# than columns, so `product` is s × s. A step of Newton-Schulz takes s²·l multiplications for `product`, s³
# for its square, and s²·l for the last product: s²·(2l + s). That is not in proportion to the number of
# elements. Before, equal shards were equal work. Now a rank may have more to do than another, and all wait
# for the one that has most to do.
#
# A block of width h has four matrices: 3h × h and h × h in the attention, 4h × h and h × 4h in the MLP. A
# step takes 7h³, 3h³, 9h³ and 9h³ for them. **Two ranks share one block as well as they can. How much does
# the busier one do, in h³?**

# %%
my_guess = ...

# %%
predict(my_guess, 16, quiz.BUSIEST)

# %% [markdown]
# One block on two ranks cannot be balanced. A whole model can: it has many blocks, and every rank gets
# matrices of all sizes. The figure gives the matrices of a GPT to the ranks as zerolab does. **Move the
# sliders. With 8 blocks, what is the largest number of ranks at which the busiest has less than 1.2 times the
# mean? What happens beyond 32 ranks, and why?**


# %%
BLOCKS = models.GPT(width=64, depth=16, heads=2, context=32).blocks
MATRICES = [[p for p in block.parameters() if p.dim() == 2] for block in BLOCKS]


# %%
def shares(figure, blocks, ranks):
    units = MATRICES[:blocks]
    owner, work = choose_owners(units, ranks), [0] * ranks
    for matrix in (matrix for unit in units for matrix in unit):
        work[owner[id(matrix)]] += update_flops(matrix)
    work, ax = [each * ranks / sum(work) for each in work], figure.subplots()
    ax.bar(range(ranks), work, color=QUIET, label="a rank's work over the mean")
    ax.axhline(1, color=INK, linewidth=1)
    ax.set(xlabel="rank", xticks=range(0, ranks, 1 + ranks // 8), ylim=(0, max(2, 1.2 * max(work))))
    ax.set_title(f"the busiest: {max(work):.2f}")
    return f"{blocks} blocks on {ranks} ranks: the busiest has {max(work):.2f} times the mean."


explore(shares, height=2.8, blocks=slider(1, len(MATRICES), 8), ranks=slider(1, 64, 15))

# %% [markdown]
# <details><summary>Answer</summary>
#
# 29 ranks. (At 15, and at 17 to 23, it has more than that.) Eight blocks have 32 matrices, and 224h³ in all.
# With 27 ranks the busiest has 9h³, one matrix of the MLP, and with more ranks one of them still has such a
# matrix. So from 27 ranks on the update gets no faster, while the mean goes on falling. Beyond 32 ranks some
# own no matrix at all.
# </details>
#
# ## Exercise: who owns which matrix?
#
# > **Difficulty 3 of 5 · importance 4 of 5 · 10 minutes.** `work[i]` is what the update of matrix i takes.
# > Return a list with the owner of each matrix, the whole number of a rank from 0 to `world_size - 1`.
# >
# > - The time of an update is that of the busiest rank: make its work as small as you can. The best possible
# >   owners are hard to find (the problem is NP-hard). The check takes every list whose busiest rank has no
# >   more to do than with a simple rule, which you will find. `work` may be empty.
# > - Every rank computes the list by itself, in a process of its own, and all must come to the same one.
# >
# > For `owners([7, 3, 9, 9], 2)` the list `[1, 1, 0, 1]` is valid and not good enough: rank 0 has 9 to do,
# > and rank 1 has 19.


# %%
# Exercise
def owners(work, world_size): ...  # your code


check_owners(owners)

# %% [markdown]
# Stuck? `check_owners.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_owners.solution()` prints a solution.
#
# ## What does a rank keep?
#
# Muon has a momentum and no second moment. In mixed precision K is 4 bytes of fp32 master weight and 4 of
# momentum. A model of 20B parameters trains on 32 GPUs at stage 1, all of it with Muon, and its matrices are
# balanced. **How many GB of model states does a GPU hold?** (With Adam it was 87.5 GB, in lesson 04.)

# %%
my_guess = ...

# %%
states = memory.model_states(20e9, world_size=32, stage=1, k=8)
predict(my_guess, states.total_bytes / 1e9, quiz.STAGE_1)

# %% [markdown]
# And measured, in the run above: fp32, so 4 bytes of momentum for an element of Muon's matrices, and 8 bytes
# of m and v for all others. A rank keeps the states of what it owns. `uneven_bytes` counts what it keeps
# beyond an equal share, and is negative where it keeps less. The sum over the ranks has to be that of one
# process.

# %%
model = build()
others, matrices = zerolab.matrices_by(torch.optim.Muon)(model)
of_muon, of_adam = (sum(p.numel() for p in group["params"]) for group in (matrices, others))
held = [states.optimizer_bytes + states.uneven_bytes for _, _, states in by_rank]
print("on each rank:", *(f"{each:,.0f}" for each in held))
print("all ranks together, as one process:", sum(held) == 4 * of_muon + 8 * of_adam)

# %% [markdown]
# What is sent does not change. At stages 1 and 2, Ψ gradients go to their owners and Ψ new values to all: 2Ψ
# in the mean over the ranks. At stage 3 it is 3Ψ, and the whole parameters are there within `with
# optimizer.full_params():`, as in lesson 06. Stage 0 has no owners: it all-reduces the gradients, 2Ψ, and
# every rank updates every matrix. `./zero verify --optimizer muon` compares every bit and byte of
# all four stages in a terminal, and [the page on whole parameters](../docs/whole_parameters.md) has the rest:
# checkpoints, other optimizers of this kind, and what is refused.
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
# - ZeRO may cut a parameter anywhere only if the optimizer is elementwise. Muon is not: it orthogonalizes
#   whole matrices.
# - A cut raises no error. The steps have the right size, the loss is a little worse, and each number of ranks
#   trains a different model. Only a comparison with one process shows it.
# - The remedy is an owner for each matrix. Gradients are reduced to it, and new values come from it: 2Ψ and
#   3Ψ, as before.
# - A step of Newton-Schulz takes s²·(2l + s) multiplications. So equal numbers of elements are not equal
#   work. zerolab balances both over the whole model: the matrix with most work is the first to get an owner.
#   More ranks than matrices do not make the update faster.
# - Muon keeps K = 8 bytes a parameter in mixed precision, Adam 12.

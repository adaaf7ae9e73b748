# %% [markdown]
# # 00 · Ranks: several processes that work as one
#
# > **25 minutes.** *You need:* PyTorch, and a training loop that you have written yourself. Nothing about
# > distributed training.
# >
# > *Afterwards you can* start several processes from a notebook, send a tensor from one to another, read the
# > report of a hang, and say why averaging gradients needs communication.
# >
# > *Paper:* ZeRO, §1 and §2.1, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).

# %% [markdown]
# ## The question
#
# A model is too slow to train on one GPU, so you take four. What exactly are "four"? Four copies of one
# program, started together, each with a number. That is all. Nothing is shared, and nobody is in charge:
# whatever looks like teamwork later in this course is built from messages between these copies.
#
# Everything below runs for real, on your CPU: each rank is a process of its own.

# %%
import torch
import torch.distributed as dist

import zerolab
from zerolab.course import answer, predict, show
from zerolab.course.lessons.ranks import check_average, figures, quiz

# %% [markdown]
# ## One function, four processes
#
# `zerolab.launch(fn, world_size)` starts `world_size` processes, calls `fn` in each, and returns the results
# in a list. Inside, two numbers tell a process who it is:
#
# - **rank**: its own number, from 0;
# - **world size**: how many there are.


# %%
def who_am_i():
    print(f"I am rank {dist.get_rank()} of {dist.get_world_size()}")
    return dist.get_rank() ** 2


zerolab.launch(who_am_i, 4)

# %% [markdown]
# The same function ran four times, and the list holds what each rank returned: entry 2 is rank 2's.
# Programs of this kind are called *SPMD*, single program, multiple data: one text, and `rank` makes the
# difference.
#
# ## What is shared?
#
# Below, a tensor is made once, before the launch. Each of four ranks adds 1 to all three elements of `x`.
# **What is `x.sum()` here, in the notebook, when they are done?** Put your number in place of the `...`.

# %%
my_guess = ...


# %%
def add_one(x):
    x += 1
    return x.sum().item()


x = torch.zeros(3)
inside = zerolab.launch(add_one, 4, x)
print("each rank saw", inside)
predict(my_guess, x.sum().item(), quiz.SUM_OF_X)

# %% [markdown]
# Each rank got a *copy* of `x` and changed the copy. The notebook's `x` never heard of it.

# %%
show(figures.separate_memories, height=1.7)

# %% [markdown]
# This is the fact that the whole of ZeRO rests on. Because nothing is shared, plain data parallelism
# keeps the model, its gradients and its optimizer state **once per rank**: four ranks, four copies of
# everything. Lesson 01 counts what that costs.
#
# ## Send and receive
#
# One message takes two: `dist.send(tensor, dst)` on one rank, `dist.recv(tensor, src)` on the other.
# The receiver brings an empty tensor of the right shape, and the message is written into it.
#
# Here a token goes from rank to rank. Every rank waits for it, doubles it, adds its own number, and
# passes it on.
# **The token starts as 1 on rank 0. What does rank 3 hold at the end?**

# %%
my_guess = ...


# %%
def relay():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    token = torch.tensor(1)
    if rank > 0:
        dist.recv(token, src=rank - 1)
        token = 2 * token + rank
    if rank < last:
        dist.send(token, dst=rank + 1)
    return token.item()


held = zerolab.launch(relay, 4)
print("token on each rank:", held)
predict(my_guess, held[3], quiz.TOKEN)

# %% [markdown]
# Notice who waited. Rank 3's `recv` blocked until rank 2 had sent, which waited for rank 1, which waited for
# rank 0: four processes, and never two of them busy at once. Lesson 02 arranges messages so that all
# links are busy all the time.
#
# ## What hangs
#
# A receive that nobody answers waits for ever. So does a send. With real GPUs this is the most common
# accident there is: the job stands still, no error, no output. Below, all ranks send first and receive
# second. It reads well; and every one of them waits for a receive that comes one line later.


# %%
def everybody_sends_first():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine, theirs = torch.ones(2), torch.empty(2)
    dist.send(mine, dst=(rank + 1) % world_size)
    dist.recv(theirs, src=(rank - 1) % world_size)


try:
    zerolab.launch(everybody_sends_first, 3, timeout=2)
except zerolab.LaunchTimeout as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# `timeout` is the wall time, in seconds, after which `launch` stops the ranks and says who was where;
# `str(error)` goes on with each rank's stack. Nothing is left running.
#
# A second kind of hang: one rank never comes. Which rank is to blame, when everybody stands still? The one
# that is *not* waiting.


# %%
def rank_two_is_late():
    if dist.get_rank() == 2:
        while True:
            pass
    dist.barrier()  # waits until every rank is here


try:
    zerolab.launch(rank_two_is_late, 3, timeout=2)
except zerolab.LaunchTimeout as error:
    print(str(error).splitlines()[0])
    print("to blame:", error.ranks)

# %% [markdown]
# And a rank that raises takes the others with it: they lose a peer, and complain. `launch` reports the
# first cause, with the rank's number, not its victims' complaints.


# %%
def rank_one_fails():
    if dist.get_rank() == 1:
        raise ValueError("no batch left")
    dist.barrier()


try:
    zerolab.launch(rank_one_fails, 3)
except zerolab.WorkerError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# ## Why averaging gradients needs communication
#
# Now train. Two ranks start from the same weights and fit the same line, `y = 3a - 2b`, each on **its own**
# batch. Nothing is sent yet: after every step each rank keeps a copy of its weights.


# %%
def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 2, generator=generator)
    return inputs, inputs @ torch.tensor([3.0, -2.0])


def gradient(weights, inputs, targets):
    error = inputs @ weights - targets
    return 2 * inputs.T @ error / len(targets)  # of the mean squared error


# %%
def train(combine):
    weights, history = torch.zeros(2), []
    for step in range(12):
        own = gradient(weights, *batch(dist.get_rank(), step))
        weights = weights - 0.1 * combine(own)
        history.append(weights)
    return torch.stack(history)


# %%
def alone(own):
    return own


on_their_own = zerolab.launch(train, 2, alone)
print("same weights at the end:", torch.equal(on_their_own[0][-1], on_their_own[1][-1]))

# %% [markdown]
# Two batches, two gradients, two models. The remedy is not to average the *weights* at the end, but the
# *gradients* at every step: then all ranks take the same step from the same place, and stay one model.
#
# A rank cannot do that by itself, because its neighbour's gradient is in another process. It takes messages.
#
# ## Exercise: the average
#
# > **Difficulty 2 of 5 · 10 minutes.** Write `average(own)`: it gets this rank's gradient and returns
# > the mean over all ranks, on every rank, for any world size. Use `dist.send` and `dist.recv` only.
# > One way: all send to rank 0, rank 0 adds up, divides, and sends the result back.


# %%
# Exercise
def average(own):
    # your code, with dist.get_rank(), dist.get_world_size(), dist.send and dist.recv
    return None


check_average(average)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def average(own):
#     rank, world_size = dist.get_rank(), dist.get_world_size()
#     if rank > 0:
#         dist.send(own, dst=0)
#         mean = torch.empty_like(own)
#         dist.recv(mean, src=0)
#         return mean
#     total, theirs = own.clone(), torch.empty_like(own)
#     for other in range(1, world_size):
#         dist.recv(theirs, src=other)
#         total += theirs
#     for other in range(1, world_size):
#         dist.send(total / world_size, dst=other)
#     return total / world_size
# ```
#
# Adding in the order of the ranks is deliberate. Floating-point sums depend on their order, and this course
# will compare results bit by bit.
# </details>
#
# torch has this built in: `dist.all_reduce(tensor)` leaves the sum over all ranks on every rank, in
# place. With it, the same training run again:


# %%
def averaged(own):
    dist.all_reduce(own)
    return own / dist.get_world_size()


in_step = zerolab.launch(train, 2, averaged)
print("same weights at the end:", torch.equal(in_step[0][-1], in_step[1][-1]))

# %%
distances = [(first - second).norm(dim=1).tolist() for first, second in (on_their_own, in_step)]
show(figures.drift, height=2.6, alone=distances[0], averaged=distances[1])

# %% [markdown]
# The two ranks are now one model. Which one? The one that a *single* process gets from both batches
# together. The mean of two batches' mean gradients is the mean gradient of the joint batch, as long as the
# batches are of equal size.

# %%
weights = torch.zeros(2)
for step in range(12):
    own, theirs = batch(0, step), batch(1, step)
    joint = [torch.cat(pair) for pair in zip(own, theirs, strict=True)]
    weights = weights - 0.1 * gradient(weights, *joint)
print("close to one process with both batches:", torch.allclose(weights, in_step[0][-1]))

# %% [markdown]
# Close, not equal: sixteen numbers added in one go round differently from twice eight. Later,
# `zerolab.verify` will sum in the same order on both sides, and ask for *the same bits*.
#
# ## What it costs
#
# In the solution above, rank 0 talks to everyone. **With 8 ranks and a gradient of 100 MB, how many MB
# does rank 0 send and receive, in all, for one average?**

# %%
my_guess = ...

# %%
ranks, gradient_mb = 8, 100
received = (ranks - 1) * gradient_mb  # one gradient from each of the others
sent = (ranks - 1) * gradient_mb  # one mean to each of the others
predict(my_guess, received + sent, quiz.MB_THROUGH_RANK_0)

# %% [markdown]
# And the more ranks, the worse: rank 0's cable carries everything while the others' are idle. Lesson 02
# does the same job with less than 200 MB each way per rank, whatever the number of ranks.
#
# ## Quiz
#
# Four ranks train with averaged gradients, each on batches of 8. Which single-process run is the same?
#
# - **a)** batch size 8, since each rank has 8
# - **b)** batch size 32
# - **c)** batch size 8, at four times the learning rate

# %%
my_answer = ...
answer(my_answer, quiz.SAME_RUN)

# %% [markdown]
# ## Summary
#
# - A rank is a process with a number; ranks share nothing, so plain data parallelism holds everything N
#   times.
# - A message takes a send *and* a receive. When one of them is missing, ranks hang: the one to blame is
#   the one that is not waiting.
# - Averaging gradients at every step keeps N copies one model. It needs communication, and doing it through
#   rank 0 loads one cable with everything.
#
# **Next:** [01 · Where the memory goes](01_memory_accounting.ipynb)

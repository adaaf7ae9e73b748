# %% [markdown]
# # 00 · Ranks: several processes that work as one
#
# > **35 minutes.** *You need:* PyTorch, and a training loop that you have written yourself. You need to know
# > nothing about distributed training.
# >
# > *Afterwards you can* start several processes from a notebook, send a tensor from one to another, read the
# > report of a hang, and say why averaging gradients needs communication.
# >
# > *Paper:* Rajbhandari et al., 2019, §1 and §2.1, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).
# >
# > *Words:* each is explained where it first comes up. The [glossary](../docs/glossary.md) has the main ones.

# %% [markdown]
# ## The question
#
# A model trains too slowly on one GPU, so you take four. What runs on the four GPUs? Four copies of one
# program, started together, each with a number. The copies share nothing, and none of them is in charge.
# They work together by sending each other *messages*: copies of tensors.
#
# Everything below really runs, on your CPU: each copy is a process of its own.

# %%
import time

import torch
import torch.distributed as dist

import zerolab
from zerolab.course import answer, figure, hang_report, predict, show
from zerolab.course.lessons.ranks import check_average, check_shift, figures, quiz

# %% [markdown]
# ## One function, four processes
#
# `zerolab.launch(fn, world_size)` starts `world_size` processes, calls `fn` in each of them, and returns the
# results in a list. Inside `fn`, two numbers tell a process who it is:
#
# - **rank**: its own number, counted from 0;
# - **world size**: the number of processes.


# %%
def who_am_i():
    print(f"I am rank {dist.get_rank()} of {dist.get_world_size()}")
    return dist.get_rank() ** 2


zerolab.launch(who_am_i, 4)

# %% [markdown]
# The same function ran four times. The list holds what each rank returned: entry 2 comes from rank 2.
# Programs of this kind are called *SPMD*: single program, multiple data. All ranks run the same code, and the
# code looks at `rank` where ranks should do different things.
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
predict(my_guess, x.sum().item(), quiz.SUM_OF_X, f"each rank saw {inside}")

# %% [markdown]
# Each process has a memory of its own. `launch` sent each of them a copy of the function and of `x`, so what
# they add to their copies does not reach the notebook. (`torch.multiprocessing` can put tensors into memory
# that the processes of one machine share. Processes on two machines cannot, so `launch`
# does not.)

# %%
fig = figure(height=1.5)
show(fig, figures.separate_memories(fig))

# %% [markdown]
# This matters for training. In *data parallelism* each rank holds a copy of the model and computes gradients
# from its own part of the batch. So four ranks hold four copies of the model, of its gradients, and of the
# *optimizer state*: the numbers that an optimizer such as Adam keeps for each parameter. Lesson 01 counts
# what these copies cost. *ZeRO*, the Zero Redundancy Optimizer, removes them. It is the subject of this
# course.
#
# ## Send and receive
#
# One message takes two calls: `dist.send(tensor, dst)` on one rank and `dist.recv(tensor, src)` on the other.
# The receiver provides a tensor of the same shape and dtype. The message overwrites whatever that tensor
# holds.
#
# Below, a number goes from rank to rank. Each rank but the first waits for it, doubles it and adds its own
# rank. Then it sends the result on. **The number starts as 1 on rank 0. What does rank 3 hold at the end?**

# %%
my_guess = ...


# %%
def relay():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    number = torch.tensor(1)
    if rank > 0:
        dist.recv(number, src=rank - 1)  # overwrites the 1
        number = 2 * number + rank
    if rank < last:
        dist.send(number, dst=rank + 1)
    return number.item()


held = zerolab.launch(relay, 4)
predict(my_guess, held[3], quiz.RELAYED, f"the number on each rank: {held}")

# %% [markdown]
# Look at who waited. Rank 3's `recv` waited until rank 2 had sent. Rank 2 waited for rank 1, and rank 1 for
# rank 0. Only one of the four processes was busy at any time. Lesson 02 orders the messages so that all
# *links* are busy all the time. A link is the connection over which a rank sends and receives: here inside
# your machine, elsewhere a cable.
#
# ## What hangs
#
# A receive waits for ever if nobody sends. A send waits for ever if nobody receives. With real GPUs this is
# the most common accident: the job stands still, without an error and without output. Below, all ranks send
# first and receive second. The code looks right, but every rank waits in its send for a receive that comes
# one line later.
#
# `launch` stops the ranks after `timeout` seconds and reports what each of them was doing. `hang_report`
# leaves out the lines that are torch's own.


# %%
def everybody_sends_first():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine, theirs = torch.ones(2), torch.empty(2)
    dist.send(mine, dst=(rank + 1) % world_size)
    dist.recv(theirs, src=(rank - 1) % world_size)


try:
    zerolab.launch(everybody_sends_first, 3, timeout=2)
except zerolab.LaunchTimeout as error:
    print(hang_report(error))

# %% [markdown]
# The first line says that all ranks wait for each other. Below it is the *stack* of each rank: the lines of
# your code that it was in. All three ranks wait in `send`, and none of them receives. (`str(error)` has
# torch's lines, too.) No process is left running.
#
# There is a second kind of hang: one rank never arrives. Below, two ranks call `dist.barrier()`. It is a
# *collective*: a call that all ranks must make together. It returns when all ranks have called it. Rank 2 has
# not called it yet when the run ends, because it does something else: here it sleeps. The rank to blame is
# the one that is *not* waiting.


# %%
def rank_two_is_late():
    if dist.get_rank() == 2:
        time.sleep(60)  # or it reads a large file
    dist.barrier()  # waits until every rank is here


try:
    zerolab.launch(rank_two_is_late, 3, timeout=2)
except zerolab.LaunchTimeout as error:
    print(hang_report(error))

# %% [markdown]
# This report names rank 2 and shows its stack alone. The others wait, so their stacks do not matter.
#
# There is a third case: one rank raises an error. The other ranks then lose their connection to it and fail,
# too. `launch` reports the first error, with the number of its rank, and not the errors that followed from
# it.


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
# Now we train. Two ranks start from the same weights and fit the same line, `y = 3a - 2b`, each on **its
# own** batch. Nothing is sent yet. After every step each rank notes its weights.


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
# Two batches gave two gradients, and two gradients gave two models. The remedy is to average the *gradients*
# at every step. Then all ranks take the same step from the same weights, and their models stay equal.
#
# A rank cannot do this alone, because the other rank's gradient is in another process. It needs messages.
#
# ## Exercise: the average
#
# > **Difficulty 2 of 5 · importance 5 of 5 · 10 minutes.** Write `average(own)`. It gets this rank's gradient
# > and returns the mean over all ranks. Shape and dtype are the same on every rank, and the dtype need not be
# > float32. It must return the mean on every rank, for two ranks and for more. Use `dist.send` and
# > `dist.recv`, and no collective. (`dist.barrier` moves no tensor, and is allowed.) One way: all ranks send
# > to rank 0; rank 0 adds up, divides, and sends the result back. The check looks at the values only. Lesson
# > 02 counts the bytes. (`dist.isend`, `dist.irecv` and `dist.batch_isend_irecv`, which lesson 02 explains,
# > are allowed, too.)


# %%
# Exercise
def average(own):
    # your code, with dist.get_rank(), dist.get_world_size(), dist.send and dist.recv
    return None


check_average(average)

# %% [markdown]
# Stuck? `check_average.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_average.solution()` prints a solution.
#
# torch has a collective for this: `dist.all_reduce(tensor)` adds the tensors of all ranks and leaves the sum
# on every rank, in place. The same training again, with it:


# %%
def averaged(own):
    dist.all_reduce(own)
    return own / dist.get_world_size()


in_step = zerolab.launch(train, 2, averaged)
print("same weights at the end:", torch.equal(in_step[0][-1], in_step[1][-1]))

# %%
fig = figure(height=2.4)
ax = fig.subplots()
for name, (first, second) in {"each on its own": on_their_own, "gradients averaged": in_step}.items():
    distance = (first - second).norm(dim=1)  # between the weights of the two ranks, after each step
    ax.plot(range(1, 13), distance, label=f"{name}: {distance[-1]:.2g} at the end")
ax.set(xlabel="training step", ylabel="distance of the weights")
show(fig, "Distance between two ranks' weights. " + ", ".join(ax.get_legend_handles_labels()[1]))

# %% [markdown]
# The two ranks now hold equal models. A *single* process gets the same model from both batches together. The
# mean of two mean gradients is the mean gradient of the joint batch, if the two batches have the same size.

# %%
weights = torch.zeros(2)
for step in range(12):
    own, theirs = batch(0, step), batch(1, step)
    joint = [torch.cat(pair) for pair in zip(own, theirs, strict=True)]
    weights = weights - 0.1 * gradient(weights, *joint)
print("close to one process with both batches:", torch.allclose(weights, in_step[0][-1]))

# %% [markdown]
# Why only close? A sum of sixteen numbers may be rounded differently from two sums of eight, so the last bits
# can differ. In later lessons both sides add in the same order, and then we ask for *the same bits*.
#
# ## Second exercise: pass it on
#
# Above, all ranks sent first, and all of them hung. Here the same messages arrive.
#
# > **Difficulty 2 of 5 · importance 4 of 5 · 5 minutes.** Lesson 02 needs this step. Write `shift(own)`.
# > Each rank sends its tensor to the next rank, the last one to rank 0, and returns the tensor of the rank
# > before it. It must not hang, with two ranks and with more. The same calls as in the first exercise are
# > allowed.
# >
# > A check may have *targets* beyond a right answer, and says which one your function has reached. This one
# > has two. *Bronze:* the values are right. *Silver:* each rank sends one message.


# %%
# Second exercise
def shift(own):
    # your code: which rank sends first, and which receives first?
    return None


check_shift(shift)

# %% [markdown]
# Stuck? `check_shift.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and `check_shift.solution()`
# prints a solution. Lesson 02 has N ranks pass tensors on in this way N-1 times, with all links busy at once.
#
# ## What it costs
#
# In the simplest solution rank 0 exchanges messages with every other rank. **With 8 ranks and a gradient of
# 100 MB, how many MB does rank 0 send and receive in total for one average?**

# %%
my_guess = ...

# %%
ranks, gradient_mb = 8, 100
received = (ranks - 1) * gradient_mb  # one gradient from each of the others
sent = (ranks - 1) * gradient_mb  # one mean to each of the others
predict(my_guess, received + sent, quiz.MB_THROUGH_RANK_0)

# %% [markdown]
# This grows with the number of ranks. All messages go over rank 0's link. Each of the other links carries
# 200 MB and is idle most of the time. Lesson 02 does the same job with less than 200 MB sent and 200 MB
# received by each rank, for any number of ranks.
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
# - A rank is a process with a number. Ranks share no memory, so data parallelism holds everything once per
#   rank.
# - A message takes a send *and* a receive. If one of them is missing, ranks hang. If one rank is not waiting,
#   it is the one to blame. If all wait, look at the order of their calls.
# - Averaging gradients at every step keeps the copies of the model equal. This needs communication. If all
#   messages go through rank 0, the others wait for its link.
#
# **Next:** [01 · Where the memory goes](01_memory_accounting.ipynb)

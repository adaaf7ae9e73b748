# %% [markdown]
# # 02 · Collectives: four ways to move a tensor
#
# > **45 minutes, and 15 more for the second exercise.** *You need:* lessons 00 (rank, send, receive) and
# > 01 (Ψ, the stages), and some index arithmetic.
# >
# > *Afterwards you can* explain four operations that all ranks call together, build a ring that carries them,
# > and compute the bytes each rank sends. (The second exercise can wait. Lesson 03 does not need it.)
# >
# > *Paper:* ZeRO, §7.1, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).
# >
# > *Words:* the [glossary](../docs/glossary.md) explains the main ones.

# %% [markdown]
# ## The question
#
# In lesson 00 rank 0 averaged the gradients of all ranks, and every message went through its link. With 8
# ranks and 100 MB rank 0 received 700 MB and sent 700 MB, while the others sent 100 MB each. **Can the ranks
# share the work so that none of them sends more than 200 MB, for any number of ranks?**
#
# A *collective* is a call that all ranks make together. This lesson has four that move or combine tensors.
# You meet them one after the other. Stages 1 to 3 of zerolab are built from two of them.

# %%
from functools import partial

import torch
import torch.distributed as dist

import zerolab
from zerolab import cost, ring
from zerolab.course import answer, explore, predict, show_source, slider
from zerolab.course.lessons.collectives import check_all_reduce, check_reduce_scatter, figures, quiz

# %% [markdown]
# ## Four collectives on four ranks
#
# Each rank has a tensor of four numbers. The first digit of a number is its rank, and the second digit counts
# the elements from 1. So 23 is the third element of rank 2, and rank 0 has 1, 2, 3 and 4. The tensors are on
# `zerolab.device()`, which is the rank's own GPU where every rank has one, and the CPU everywhere else.


# %%
def brought():
    return 10 * dist.get_rank() + torch.arange(1, 5, device=zerolab.device())


def broadcast():
    tensor = brought()
    dist.broadcast(tensor, src=2)
    return tensor.tolist()


zerolab.launch(broadcast, 4)

# %% [markdown]
# **Broadcast**: every rank gets the tensor of rank 2. A broadcast is the usual way to give all ranks the same
# first weights.
#
# The other three collectives come from the package's own `zerolab.ring`. You will read its source below.
#
# **Reduce-scatter**: add the tensors of all ranks, and leave each rank *its chunk* of the sum, which is 1/N
# of it: the part that a ring sends at a time. Rank 0 gets the first chunk. **What is the one element of rank
# 3?**

# %%
my_guess = ...


# %%
def reduce_scatter():
    return ring.reduce_scatter(brought()).tolist()


own_chunks = zerolab.launch(reduce_scatter, 4)
predict(my_guess, own_chunks[3][0], quiz.CHUNK_OF_RANK_3, f"all four ranks: {own_chunks}")

# %% [markdown]
# **All-gather** is the reverse: each rank starts with one chunk, and every rank ends with all chunks. Nothing
# is added.


# %%
def all_gather():
    tensor = torch.zeros(4, dtype=torch.int64, device=zerolab.device())
    tensor[dist.get_rank()] = 100 + dist.get_rank()  # my chunk; the rest is still to come
    ring.all_gather(tensor)
    return tensor.tolist()


zerolab.launch(all_gather, 4)


# %% [markdown]
# **All-reduce**: every rank gets the whole sum. Now combine: a reduce-scatter, followed by an all-gather of
# the chunks.


# %%
def both_ways():
    ready_made, built = brought(), brought()
    dist.all_reduce(ready_made)
    ring.reduce_scatter(built)
    ring.all_gather(built)
    return torch.equal(ready_made, built), built.tolist()


zerolab.launch(both_ways, 4)

# %% [markdown]
# > **All-reduce = reduce-scatter + all-gather.**
#
# Remember this equation. Between the two halves each rank holds *one complete chunk* of the summed gradient.
# With that chunk a rank can update *one chunk* of the parameters. Stage 1 of ZeRO does this update between
# the halves, and its all-gather then carries parameters instead of gradients.
#
# ## The ring
#
# How does a reduce-scatter work inside? Arrange the ranks in a ring. Each rank sends only to the next rank
# and receives only from the one before. Cut the tensor into N chunks. In every round each rank sends one
# chunk, and *adds* the chunk that arrives to its own copy. After N-1 rounds every chunk has visited all
# ranks.
#
# Below is a real run. The ring calls `on_step` after each round and reports which chunk was sent and which
# was received. The figure is drawn from that record.


# %%
def record(numel):
    rounds = []
    tensor = torch.ones(numel, device=zerolab.device())
    ring.all_reduce(tensor, on_step=lambda *report: rounds.append(report))
    return rounds


recorded = {ranks: zerolab.launch(record, ranks, 60) for ranks in (2, 3, 4, 5)}
for step, sent, received, sent_bytes in recorded[4][0][:3]:
    what = f"sent chunk {sent} ({sent_bytes} bytes) and received chunk {received}"
    print(f"reduce-scatter, round {step + 1} of 3: rank 0 {what}")

# %% [markdown]
# On the ring at the left, each arrow is a message of this round, with the number of its chunk. At the right,
# each box is a chunk on a rank. The digits in it are the ranks whose contributions have been added. A dashed
# frame means that the chunk has just arrived, a thick one that the sum is complete. At step 0 of the slider
# nothing has been sent yet. Then come N-1 rounds of reduce-scatter and N-1 rounds of all-gather. Press ▶ to
# see them one by one.

# %%
draw = partial(figures.ring_step, recorded=recorded)
ranks, step = slider(2, 5, 4), slider(0, 6, 2, play=True)
ranks.observe(lambda change: setattr(step, "max", 2 * (change.new - 1)), names="value")
explore(draw, height=2.7, ranks=ranks, step=step)

# %% [markdown]
# Look at these three things:
#
# - In every round all ranks send at the same time, and every link carries exactly one chunk. If all links are
#   equally fast, all ranks finish a round at the same time.
# - The sum in a chunk grows by one contribution per round. Rank 1 sends chunk 0 first, and rank 0 adds to it
#   last.
# - After round N-1 of the reduce-scatter exactly one chunk per rank is complete: its own.
#
# ## Count the bytes
#
# The *payload* of a collective is the tensor that it works on. In a reduce-scatter each rank sends N-1
# chunks, each 1/N of the tensor: **(N-1)/N of the payload**. That is less than one tensor for any N. An
# all-reduce is twice that. **For a tensor of 240 bytes on 4 ranks, how many bytes does each rank send in an
# all-reduce?**

# %%
my_guess = ...

# %%
payload = 60 * 4  # float32
sent = {n: [sum(sent_bytes for *_, sent_bytes in rank) for rank in ranks] for n, ranks in recorded.items()}
rows = ["ranks   sent by each   2(N-1)/N formula   by rank 0 in lesson 00"]
for ranks, (by_each, *_) in sent.items():
    formula = cost.wire_bytes(payload, ranks, "all_reduce")
    rows.append(f"{ranks:>5}   {by_each:>12}   {formula:>16g}   {(ranks - 1) * payload:>12}")
predict(my_guess, sent[4][0], quiz.BYTES_OF_AN_ALL_REDUCE, *rows)
print("all ranks of a ring send the same:", all(len(set(by_rank)) == 1 for by_rank in sent.values()))

# %% [markdown]
# On the ring every rank sends less than two tensors. In lesson 00's solution rank 0 sends N-1 tensors. So the
# answer to the first question is yes.
#
# The paper counts *elements* and leaves the factor (N-1)/N out: an all-reduce of Ψ gradients is 2Ψ, and each
# of its halves is Ψ. This course counts bytes, and names both counts: *logical* bytes leave the factor out,
# as the paper does, and *wire* bytes are what a ring really sends.
#
# ## The cut
#
# This is how the ring cuts a tensor into chunks:

# %%
show_source(ring.chunks, docstring=False)

# %% [markdown]
# `chunks` cuts any length: 11 elements on 4 ranks are 3 + 3 + 3 + 2. (`torch.chunk` cuts in another way: 9
# elements on 4 ranks would be three chunks of 3, and none for rank 3.) If each chunk had `11 // 4 = 2`
# elements, the last three would be in no chunk, and no error would say so. In training every rank would keep
# its own gradient of these three parameters, so they would become different on every rank.
#
# ## Exercise: write the ring
#
# > **Difficulty 4 of 5 · importance 5 of 5 · 25 minutes.** This is the most useful exercise in this course.
# > Write `my_reduce_scatter(tensor)` without looking at the source: it returns this rank's chunk of the sum.
# > `tensor` has one dimension. Use `ring.chunks` for the cuts. You may overwrite `tensor`, or leave it as it
# > is.
# >
# > - **Silver:** the chunks are right, each rank sends to one neighbour alone, and no rank sends more than
# >   N−1 chunks. The neighbour is rank + 1, or rank - 1 if your ring runs the other way. The check demands
# >   these three things, so there is no bronze.
# > - **Gold:** beside `tensor` no rank ever holds more than two chunks.
#
# All ranks must send and receive at the same time. If all of them call `dist.send` first, all of them wait,
# as in lesson 00. PyTorch has an *asynchronous* pair for this: `dist.isend` and `dist.irecv` start a message
# and return at once, and you wait for its end later. `dist.batch_isend_irecv` starts several messages
# together. It takes a list of `dist.P2POp`, each of which describes one message between two ranks ("P2P"
# means point to point):
#
# - `dist.P2POp(dist.isend, chunk, peer)` sends `chunk` to rank `peer`;
# - `dist.P2POp(dist.irecv, buffer, peer)` receives from rank `peer` into `buffer`.
#
# It returns a list of handles. Call `.wait()` on each of them: then the messages have been sent and received.
# The check runs your function on 1 to 4 ranks and names the mistake it finds. It looks at values, at bytes,
# and at which ranks talk to each other. A check gives you tensors on the CPU, and you may return them on any
# device.


# %%
# Exercise
def my_reduce_scatter(tensor):
    # your code, with dist.get_rank(), dist.get_world_size() and ring.chunks
    return None


check_reduce_scatter(my_reduce_scatter)

# %% [markdown]
# Stuck? `check_reduce_scatter.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_reduce_scatter.solution()` prints a solution.
#
# ## The source
#
# This is the code that ran in the figure. Find the line that adds, and compare the two indices of a round
# with yours. (`_place` returns the rank and all chunks. `_exchange` sends to the next rank and receives from
# the one before at the same time.)

# %%
show_source(ring.reduce_scatter, docstring=False)

# %% [markdown]
# ## Second exercise: the other half
#
# > **Difficulty 3 of 5 · importance 4 of 5 · 15 minutes.** A training loop calls all-reduce, and ZeRO
# > replaces this call by its two halves. Write `my_all_reduce(tensor)` with send and receive: every rank ends
# > with the sum over all ranks. Return it, or overwrite `tensor` with it and return nothing. It may call your
# > `my_reduce_scatter` and `ring.chunks`, and no other function of `ring`.
# >
# > - **Bronze:** the sum is right, for any number of ranks.
# > - **Silver:** no rank sends more than 2(N−1) chunks.
# > - **Gold:** beside `tensor` no rank ever holds more than two chunks. On a GPU that is full of gradients
# >   there is no room for a second copy of them.


# %%
# Second exercise
def my_all_reduce(tensor):
    # your code
    return None


check_all_reduce(my_all_reduce)

# %% [markdown]
# Stuck? `check_all_reduce.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_all_reduce.solution()` prints a solution. The check says which target your function has reached, and
# what is missing for the next.

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
# - A reduce-scatter adds and leaves each rank one chunk. An all-gather gives every rank all chunks. Together
#   they are an all-reduce.
# - On a ring each half sends (N-1)/N of the tensor per rank, for any number of ranks.
# - Between the halves every rank has one complete chunk. ZeRO starts from that.
#
# **Next:** [03 · Data parallel](03_data_parallel.ipynb): the ranks train one model together.

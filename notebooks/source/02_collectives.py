# %% [markdown]
# # 02 · Collectives: four ways to move a tensor
#
# > **35 minutes.** *You need:* lesson 00 (rank, send, receive) and a quarter of an hour's patience with
# > indices.
# >
# > *Afterwards you can* say what broadcast, reduce-scatter, all-gather and all-reduce do, build the ring that
# > carries them, and compute the bytes each rank sends.
# >
# > *Paper:* ZeRO, §7.1, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).

# %% [markdown]
# ## The question
#
# In lesson 00 rank 0 averaged everyone's gradients, and its cable carried everything. With 8 ranks and
# 100 MB that was 700 MB in and 700 MB out, for rank 0; the others sent 100 MB each. **Can the work be
# spread so that no rank sends more than 200 MB, for any number of ranks?**
#
# A *collective* is a message pattern that all ranks take part in. ZeRO needs three of them, and once you see
# how they fit together, its stages are short stories.

# %%
from functools import partial

import torch
import torch.distributed as dist

import zerolab
from zerolab import cost, ring
from zerolab.course import answer, choice, explore, predict, show_source, slider
from zerolab.course.lessons.collectives import check_reduce_scatter, figures, quiz

# %% [markdown]
# ## Four collectives on four ranks
#
# Rank r brings the tensor `[r1, r2, r3, r4]`, so you can see who contributed what: 23 is rank 2's third
# element.


# %%
def brought():
    return 10 * dist.get_rank() + torch.arange(1, 5)


def broadcast():
    tensor = brought()
    dist.broadcast(tensor, src=2)
    return tensor.tolist()


zerolab.launch(broadcast, 4)

# %% [markdown]
# **Broadcast**: everyone gets rank 2's tensor. It is how a model's first weights reach all ranks.
#
# The other three come from the package's own `zerolab.ring`, whose source you will read below.
#
# **Reduce-scatter**: add up all tensors, and leave each rank *its chunk* of the sum, one Nth of it.
# Rank 0 gets the first. **What is rank 3's one element?**

# %%
my_guess = ...


# %%
def reduce_scatter():
    return ring.reduce_scatter(brought()).tolist()


own_chunks = zerolab.launch(reduce_scatter, 4)
print(own_chunks)
predict(my_guess, own_chunks[3][0], quiz.CHUNK_OF_RANK_3)

# %% [markdown]
# 4 + 14 + 24 + 34 = 76. Each rank came with four numbers and left with one, which is complete.
#
# **All-gather** is the way back: each rank has one chunk, and at the end everyone has all of them.
# Nothing is added.


# %%
def all_gather():
    tensor = torch.zeros(4, dtype=torch.int64)
    tensor[dist.get_rank()] = 100 + dist.get_rank()  # my chunk; the rest is still to come
    ring.all_gather(tensor)
    return tensor.tolist()


zerolab.launch(all_gather, 4)


# %% [markdown]
# **All-reduce**: everyone gets the whole sum. Now put the pieces together: what would you get from a
# reduce-scatter, followed by an all-gather of what it left?


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
# Keep this equation: ZeRO lives in its plus sign. Between the two halves each rank holds *one complete
# chunk* of the summed gradient, which is all that it needs to update *one chunk* of the parameters.
# Stage 1 does just that, and then gathers parameters in place of gradients.
#
# ## The ring
#
# How does a reduce-scatter work inside? Stand the ranks in a ring. Each sends only to the next rank and
# receives only from the one before. Cut the tensor into N chunks. In every round each rank passes one
# chunk on, and *adds* what arrives to its own copy. After N-1 rounds, every chunk has visited everyone.
#
# Here is a real run. `on_step` is called after each round with what went where; the picture is drawn
# from that record.


# %%
def record(numel):
    rounds = []
    tensor = torch.ones(numel)
    ring.all_reduce(tensor, on_step=lambda *report: rounds.append(report))
    return rounds


recorded = {ranks: zerolab.launch(record, ranks, 60) for ranks in (2, 3, 4, 5)}
for step, sent, received, sent_bytes in recorded[4][0][:3]:
    print(f"round {step}: rank 0 sent chunk {sent} ({sent_bytes} bytes) and received chunk {received}")

# %% [markdown]
# Each box is a chunk on a rank; the digits in it say whose contributions it holds. A thick frame means
# the sum is complete. Step through it: first N-1 rounds of reduce-scatter, then N-1 of all-gather.
# (Step 0 is the start.)

# %%
draw = partial(figures.ring_step, recorded=recorded)
explore(draw, height=3.6, ranks=choice([2, 3, 4, 5], 4), step=slider(0, 8, 2))

# %% [markdown]
# Things to look for:
#
# - In every round all ranks send at once, and every link carries exactly one chunk. Nobody waits, and
#   no cable is busier than another.
# - A chunk's sum grows by one contribution per round. Chunk 0 starts its way at rank 1 and comes home
#   to rank 0 last.
# - After round N-1 of the reduce-scatter, exactly one chunk per rank is complete: its own.
#
# ## Count the bytes
#
# Each rank sends N-1 chunks of 1/N of the tensor in a reduce-scatter: **(N-1)/N of the payload**, less
# than one tensor, whatever N is. An all-reduce is twice that. **For a tensor of 240 bytes on 4 ranks,
# how many bytes does each rank send in an all-reduce?**

# %%
my_guess = ...

# %%
payload = 60 * 4  # float32
sent = [sum(sent_bytes for *_, sent_bytes in rounds) for rounds in recorded[4]]
print("bytes sent by each rank:", sent)
predict(my_guess, sent[0], quiz.BYTES_OF_AN_ALL_REDUCE)

# %%
print("ranks   measured   (N-1)/N formula   naive rank 0")
for ranks, rounds in recorded.items():
    measured = sum(sent_bytes for *_, sent_bytes in rounds[0])
    formula = cost.wire_bytes(payload, ranks, "all_reduce")
    print(f"{ranks:>5}   {measured:>8}   {formula:>15g}   {(ranks - 1) * payload:>12}")

# %% [markdown]
# The ring stays below two tensors; the naive rank 0 grows with N. That answers the question we began with.
#
# The paper counts *elements* and leaves (N-1)/N out: an all-reduce of Ψ gradients is 2Ψ, each of its
# halves Ψ. We shall say which of the two we mean: *logical* volume is the paper's, *wire* bytes are
# what the ring sends.
#
# ## The source
#
# This is the code that ran. Find the one line that adds, and the two indices of a round.

# %%
show_source(ring.reduce_scatter, docstring=False)

# %%
show_source(ring.chunks, docstring=False)

# %% [markdown]
# `chunks` cuts any length: 11 elements on 4 ranks are 3 + 3 + 3 + 2. Cutting into `11 // 4 = 2` each
# would lose three elements, silently, and in training that means three parameters that are never updated.
#
# ## Exercise: write the ring
#
# > **Difficulty 4 of 5 · 15 minutes · the most useful exercise in this course.** Write
# > `my_reduce_scatter(tensor)` without looking up: it returns this rank's chunk of the sum. Use
# > `ring.chunks` for the cuts, and for each round
# > `dist.batch_isend_irecv` of one `dist.P2POp(dist.isend, chunk, peer)` and one
# > `dist.P2POp(dist.irecv, buffer, peer)`; call `.wait()` on all it returns.
#
# Why batched? Lesson 00's hang: if all ranks send first, all of them wait. The check runs your function
# on 1 to 4 ranks, names the mistake it finds, and grades bytes and neighbours, not only values.


# %%
# Exercise
def my_reduce_scatter(tensor):
    # your code, with dist.get_rank(), dist.get_world_size() and ring.chunks
    return None


check_reduce_scatter(my_reduce_scatter)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Rank r ends with chunk r, so in the last round it must receive chunk r, and in the round before chunk
# r-1. Count backwards from there: in round s (from 0) it receives chunk r-s-2 and sends chunk r-s-1,
# both modulo N.
# </details>
#
# <details><summary>A solution</summary>
#
# ```python
# def my_reduce_scatter(tensor):
#     rank, world_size = dist.get_rank(), dist.get_world_size()
#     pieces = [tensor[cut] for cut in ring.chunks(tensor.numel(), world_size)]
#     for step in range(world_size - 1):
#         sent = pieces[(rank - step - 1) % world_size]
#         received = pieces[(rank - step - 2) % world_size]
#         buffer = torch.empty_like(received)
#         operations = [
#             dist.P2POp(dist.isend, sent, (rank + 1) % world_size),
#             dist.P2POp(dist.irecv, buffer, (rank - 1) % world_size),
#         ]
#         for work in dist.batch_isend_irecv(operations):
#             work.wait()
#         received += buffer
#     return pieces[rank]
# ```
# </details>
#
# ## Quiz
#
# A library offers `reduce_scatter`, and inside it does an all-reduce and keeps its own slice. The
# values are right. What does that cost?
#
# - **a)** nothing, as the result is the same
# - **b)** the same bytes, but more memory
# - **c)** twice the bytes

# %%
my_answer = ...
answer(my_answer, quiz.ALL_REDUCE_INSIDE)

# %% [markdown]
# ## Summary
#
# - Reduce-scatter adds and leaves everyone one chunk; all-gather hands the chunks round. Together:
#   all-reduce.
# - On a ring each half sends (N-1)/N of the tensor per rank, however many ranks there are.
# - Between the halves every rank owns one complete chunk. That is where ZeRO begins.
#
# **Next:** [03 · Data parallel](03_data_parallel.ipynb): gradients in buckets, while the backward pass
# still runs.

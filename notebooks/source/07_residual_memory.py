# %% [markdown]
# # 07 · Residual memory: what no stage divides
#
# > **60 minutes, and 35 more for the second exercise and the optional parts.** *You need:* lesson 06, after
# > which all model states are divided by N.
# >
# > *Afterwards you can* say what else fills a GPU, split a block over ranks with two operators, predict what
# > checkpoints take and what it costs to divide or to move them, bound a buffer, say why an allocation fails
# > beside free memory, and decide when several GPUs should share one copy of a model.
# >
# > *Paper:* ZeRO, §6, §8 and §10.5, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).
# >
# > *Words:* the [glossary](../docs/glossary.md) explains the main ones.

# %% [markdown]
# ## The question
#
# At stage 3 a rank holds 16Ψ/N bytes of model states. With enough GPUs that is as little as you like. Yet
# training still stops with "out of memory". What is the rest?
#
# The paper calls it **residual memory**, and finds three parts: activations, buffers, and memory that is
# free but in pieces. No stage divides any of them. This lesson takes them one after the other.

# %%
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import gelu, linear  # noqa: F401, for the exercise
from torch.utils.checkpoint import set_checkpoint_early_stop

import zerolab
from zerolab import arena, data, memory, models, paper, ring, tensor_parallel  # noqa: F401, for the exercise
from zerolab.course import answer, choice, explore, figure, predict, show, show_source, slider
from zerolab.course.lessons.residual_memory import check_block, check_bytes, check_packing, figures, quiz
from zerolab.course.lessons.residual_memory.operators import operator
from zerolab.course.lessons.residual_memory.saved import saved_bytes
from zerolab.course.lessons.residual_memory.scratch import watch_scratch
from zerolab.course.look import COLOURS, INK, PALE, PAPER, magnify
from zerolab.parity import compute_deterministically

# %% [markdown]
# ## Predict: the activations of 100 billion parameters
#
# The largest part is activations, which forward keeps for backward. Lesson 01 made them fewer by *activation
# checkpointing*: keep some tensors, and compute the others again in backward. Here we keep one tensor for
# each block, its input. This tensor is called a *checkpoint*. (The same word is used for the files of a saved
# model.)
#
# The paper trains a model of 100 billion parameters: 125 blocks, 8,192 features wide. Groups of 16 GPUs share
# one copy of the model, and each GPU of a group computes the same b = 32 sequences of s = 1,024 tokens, in 16
# bits. **How many GB do the inputs of all blocks take on each
# GPU?**

# %%
my_guess = ...

# %% [markdown]
# The next cell does not compute it. It builds that model on torch's meta device, where tensors have shapes
# and no values, runs forward through `zerolab.Checkpointing`, and asks that object what it keeps.


# %%
def held_after_forward(checkpointing):
    with torch.device("meta"):
        model = models.GPT(vocab=50_257, width=8192, depth=125, heads=64, context=1024).bfloat16()
    tokens = torch.zeros(32, 1024, dtype=torch.long, device="meta")
    model.checkpointing = checkpointing  # its forward then runs checkpointing(block, input) for each block
    loss = model(tokens, tokens)
    return checkpointing.held_bytes


predict(my_guess, held_after_forward(zerolab.Checkpointing()) / 1e9, quiz.CHECKPOINTS)

# %% [markdown]
# The paper's GPUs have 32 GB. (By the estimate of lesson 01, 12 tensors for each block, it would be 12 times
# as much without checkpointing.) A smaller batch would help, but then each GPU has less to compute between
# two messages.
#
# Why does no stage divide this? Ranks can share a model state because all of them have the *same* one. Each
# rank of data parallelism has other sequences, so other activations. **No activation is there twice, so there
# is nothing to remove.**
#
# That changes where GPUs compute the same sequences, as the 16 that share a copy of the model.
#
# ## Split a block
#
# A block of a transformer is mostly products of matrices. Take the two of its MLP: `gelu(x @ A) @ B`. Two
# ranks can share them:
#
# - Rank 0 gets the left half of the *columns* of A, rank 1 the right half. Each computes half of the features
#   of `x @ A`.
# - gelu works on each feature alone. So each rank applies it to its half.
# - Rank 0 gets the upper half of the *rows* of B, rank 1 the lower half: those that its features are
#   multiplied by. Each rank then has a part of every sum.
# - Add the parts up, and the result is whole.
#
# There is one message, at the end. Try it in one process, in float64:

# %%
torch.manual_seed(0)
x, A, B = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 8), (8, 32), (32, 8)))
whole = gelu(x @ A) @ B
parts = [gelu(x @ columns) @ rows for columns, rows in zip(A.chunk(2, 1), B.chunk(2, 0), strict=True)]
print("shapes of the parts:", [tuple(part.shape) for part in parts])
print("their sum is the whole product:", torch.allclose(sum(parts), whole))

# %% [markdown]
# The paper speaks of *model parallelism*. This kind of it is called **tensor parallelism**, and comes from
# Megatron-LM ([arXiv:1909.08053](https://arxiv.org/abs/1909.08053)). Two operators join the parts. They are
# named *f and g*:

# %%
fig = figure(height=2.1)
show(fig, figures.split_pair(fig))

# %% [markdown]
# - **g** adds up. In forward it is an all-reduce of the parts. In backward the gradient of a sum is the
#   gradient of each term, so g does nothing.
# - **f** does the opposite. In forward every rank takes the same x, so f does nothing. In backward x was used
#   by all ranks, and the gradient of x is the *sum* of what they computed: an all-reduce.
#
# Without f the loss is right and training is silently wrong: `x.grad` on a rank has this rank's part of the
# sum alone. The layers before it train on a wrong gradient, and on each rank it is a different one.
#
# Attention has such a pair, too. Its first product makes queries, keys and values; each rank computes some of
# the heads. Its second product takes the heads together.

# %% [markdown]
# ## Exercise: split a block
#
# A function with a backward pass of its own is a `torch.autograd.Function`. Here is one in a single call:

# %%
show_source(operator)

# %% [markdown]
# > **Difficulty 3 of 5 · importance 5 of 5 · 12 minutes.** Write the MLP of one rank. The whole MLP is
# > `linear(gelu(linear(x, w1, b1)), w2, b2)`, and its output has the shape of `x`. `x` is the same on every
# > rank, and so are the whole weights that you are given. Rank r works with part r of N equal parts.
# >
# > - A weight has the shape `[outputs, inputs]`. `nn.Linear` stores the transpose: columns of A are rows of
# >   `w1`, rows of B are columns of `w2`. N divides the width of the hidden layer.
# > - `f` goes around `x`, `g` around the partial product. `b2` is added once, to the sum. The output is the
# >   same on every rank.
# > - After the backward pass `x.grad` and `b2.grad` are those of the whole MLP on every rank. The gradients
# >   of `w1`, `b1` and `w2` are zeros outside this rank's part.
# > - `dist.all_reduce` works in place: give it a clone.
# >
# > *Bronze:* the output and all five gradients are right. *Silver:* a rank multiplies with its own parts
# > alone, and sends two all-reduces of the size of `x`, one in forward and one in backward.


# %%
# Exercise
def summed(tensor): ...  # your code: the sum over the ranks, in a tensor of its own


def f(x): ...  # your code: return operator(x, forward=..., backward=...)


def g(product): ...  # your code


def split_mlp(x, w1, b1, w2, b2): ...  # your code


check_block(split_mlp)

# %% [markdown]
# Stuck? `check_block.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and `check_block.solution()`
# prints a solution.
#
# The engine's f and g are `TensorParallel.enter` and `TensorParallel.leave`, in
# `zerolab/tensor_parallel/group.py`.

# %% [markdown]
# ## Run it
#
# These are the two layers of the engine. `enter` is f, and `leave` is g:

# %%
show_source(tensor_parallel.ColumnParallelLinear.forward)
show_source(tensor_parallel.RowParallelLinear.forward)

# %% [markdown]
# `zerolab.parallelize(model, parallel)` puts them in the place of the linear layers of each block. The ranks
# form a *mesh*, a table. The ranks of a row share one copy of the model. The ranks of a column hold the same
# part of the model. ZeRO shards the states of this part over them.

# %%
DATA = data.NextByte(data.text(), context=32, batch_size=8)
LAYERS = 6
BATCH = 8
TOKENS = 32
WIDTH = 64
BSH = BATCH * TOKENS * WIDTH  # numbers in the input of a block: b·s·h


def fresh_model():
    compute_deterministically()
    torch.manual_seed(0)
    return models.GPT(width=WIDTH, depth=LAYERS, heads=4, context=TOKENS).to(zerolab.device())


# %%
def build(copies, ranks_of_a_copy, **options):
    shape = (copies, ranks_of_a_copy)
    mesh = init_device_mesh(zerolab.device().type, shape, mesh_dim_names=("dp", "tp"))
    parallel = zerolab.TensorParallel(mesh["tp"])
    model = zerolab.parallelize(fresh_model(), parallel)
    axes = {"process_group": mesh.get_group("dp"), "tensor_parallel": parallel}
    return model, zerolab.ZeroOptimizer(model, torch.optim.Adam, lr=1e-3, **axes, **options), parallel


def batch(step, copy, copies=1):
    """One copy's share of eight sequences: the ranks of a copy get the same ones."""
    return [part.chunk(copies)[copy].to(zerolab.device()) for part in DATA.batch(step, 0)]


# %% [markdown]
# Four ranks, two copies of two ranks each. Each rank looks at its part of block 0:


# %%
def look():
    model, optimizer, _ = build(copies=2, ranks_of_a_copy=2, stage=0)
    shapes = {name: list(p.shape) for name, p in model.blocks[0].named_parameters() if "weight" in name}
    copy = optimizer.rank  # this rank's place in its column, so the number of its copy
    return shapes, model(*batch(0, copy, 2)).item()


found = zerolab.launch(look, 4)
for name, shape in found[0][0].items():
    print(f"{name:<24} {shape}")
for copy in (0, 1):
    (_, one), (_, other) = found[2 * copy : 2 * copy + 2]
    print(f"copy {copy}: both of its ranks have the same loss: {one == other}")

# %% [markdown]
# The whole model has 192 × 64 numbers in `query_key_value` and 256 × 64 in `mlp_in`. Each rank has half of
# them, and whole norms: they work on all features, so every rank of a copy computes them.
#
# ## Predict: what does a block send?
#
# f and g add up tensors of b·s·h numbers: b sequences of s tokens with h features. Count as the paper does,
# so an all-reduce counts its tensor twice. **How many times b·s·h does one block send in forward and
# backward?**

# %%
my_guess = ...


# %%
def sent_by_a_block(make, early_stop=True):
    model, _, parallel = build(1, 2, stage=0)
    model.checkpointing = make(parallel)
    parallel.trace.next_step()
    with set_checkpoint_early_stop(early_stop):
        model(*batch(0, 0)).backward()
    return parallel.trace.traffic().logical_bytes / (4 * LAYERS * BSH)  # 4 bytes each


sent = {"no checkpointing": zerolab.launch(sent_by_a_block, 2, lambda parallel: None)[0]}
predict(my_guess, sent["no checkpointing"], quiz.VOLUME)

# %% [markdown]
# Every all-reduce here makes the ranks wait, because the next product needs its result. In forward nothing
# can be computed meanwhile. (In backward f's all-reduce could run while the weight's gradient is computed.
# Megatron does that, and this engine waits.) ZeRO's messages run beside computation. So the ranks of a copy
# belong on the fastest link: within a machine.
#
# ## Predict: and with checkpointing?
#
# Now the block's forward runs twice: once in forward, and once more in backward, to compute its activations
# again. The two all-reduces of forward are in it. The paper counts a block whose forward runs to its end both
# times. PyTorch knows which activations it has to compute again, and *stops* as soon as it has the last one.
# The last thing that a block computes is the second g, and then it adds the result to its input. Backward
# does not need that result. **How many times b·s·h does a block send in PyTorch?**

# %%
my_guess = ...

# %%
plain = lambda parallel: zerolab.Checkpointing()
sent["checkpointing"] = zerolab.launch(sent_by_a_block, 2, plain)[0]
sent["the whole block again"] = zerolab.launch(sent_by_a_block, 2, plain, early_stop=False)[0]
rows = [f"{way:<24} {times:g} b·s·h" for way, times in sent.items()]
predict(my_guess, sent["checkpointing"], quiz.RECOMPUTED, *rows)

# %% [markdown]
# The paper counts one all-reduce more. In PyTorch the second all-reduce of the second forward is never
# reached. The last row is a block that was told not to stop, and it is the paper's number. The gradients are
# the same, and the bytes are a fifth more.
#
# ## Divide the checkpoints: P_a
#
# So 16 GPUs compute the same sequences. Then the input of a block *is* there 16 times, once on each. The
# paper removes the copies: each rank keeps 1/N_m of each input. (*N_m* is the number of ranks that share a
# copy, *N_d* the number of copies.) In backward an all-gather brings the input back before the block is
# computed again. This is **P_a**, partitioned activation checkpointing. Here it is one argument:
#
#     model.checkpointing = zerolab.Checkpointing(partition=parallel)
#
# With N_m = 16 each GPU keeps 4.2 GB in place of 67.1 GB. (The other copies of the model do not divide them
# any further: they have other sequences. In §6.1 the paper says that P_a reduces 33 GB to about 2. By its own
# sizes it is twice that, before and after.) Now measure it, with 1, 2 and 4 ranks in a copy. L is the number
# of blocks, 6 here, and a number has 4 bytes:


# %%
def kept_bytes(partitioned):
    ranks = dist.get_world_size()
    model, _, parallel = build(1, ranks, stage=0)
    checkpointing = model.checkpointing = zerolab.Checkpointing(parallel if partitioned else None)
    loss = model(*batch(0, 0))
    held = checkpointing.held_bytes
    loss.backward()
    return held, checkpointing.held_bytes


# %%
for ranks in (1, 2, 4):
    (whole, _), (part, left) = (zerolab.launch(kept_bytes, ranks, each)[0] for each in (False, True))
    right = part == 4 * LAYERS * BSH // ranks
    print(f"N_m = {ranks}: {whole:,} bytes, with P_a {part:>7,}; after backward {left}")
    print(f"         with P_a it is L·b·s·h·4/N_m: {right}")

# %% [markdown]
# Without P_a more ranks change nothing. The price is one all-gather for each block, which counts b·s·h
# once:

# %%
for name, early_stop in (("P_a", True), ("P_a, the whole block", False)):
    sent[name] = zerolab.launch(sent_by_a_block, 2, zerolab.Checkpointing, early_stop)[0]
for one, other in (("checkpointing", "P_a"), ("the whole block again", "P_a, the whole block")):
    print(f"{other:<21} {sent[other] / sent[one] - 1:.1%} more bytes than without P_a")

# %% [markdown]
# A tenth more bytes, 8.3 % by the paper's count, for a sixteenth of the memory at N_m = 16. Nothing is
# rounded, so the training is the same, bit for bit. Four ranks, 2 × 2, stage 3, three steps each way:


# %%
def trained(make):
    model, optimizer, parallel = build(2, 2, stage=3)
    model.checkpointing = make(parallel)
    for step in range(3):
        model(*batch(step, optimizer.rank, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.full_params():
        return [parameter.detach().clone() for parameter in model.parameters()]


plainly = zerolab.launch(trained, 4, lambda parallel: None)
with_pa = zerolab.launch(trained, 4, zerolab.Checkpointing)
same = [torch.equal(*pair) for ours in zip(plainly, with_pa, strict=True) for pair in zip(*ours, strict=True)]
print("bit-identical:", all(same))

# %% [markdown]
# ## Second exercise: pack and unpack
#
# > **Difficulty 3 of 5 · importance 4 of 5 · 12 minutes.** In tensor parallelism the input of a block is the
# > same on all N ranks. Write the class that keeps it from forward to backward.
# >
# > - `Packed(tensor)` is called in the forward pass, once for each block. It keeps this rank's part of the
# >   tensor, and sends nothing. The caller drops the tensor afterwards. Several blocks may have inputs of
# >   equal shape, so a shape does not tell which input it is. Each step packs new inputs.
# > - `tensor` is the result of an operator that saved it for its backward. Autograd keeps the
# >   whole `tensor` as long as your part has a `grad_fn`, and that counts as memory, too.
# > - `unpack()` is called in the backward pass, for the last block first. It gathers the parts and returns
# >   the tensor, with its shape and dtype. All ranks call it at the same time.
# > - N does not always divide the number of elements. `ring.chunks(numel, N)` cuts for any number, and
# >   `ring.all_gather(flat)` fills a flat tensor of which each rank has its own chunk. You may also pad all
# >   parts to one length.
# >
# > *Bronze:* every tensor comes back as it was. *Silver:* nothing is sent in `__init__`. In `unpack` a rank
# > sends N−1 parts and no more, which is (N−1)/N of the tensor. *Gold:* from forward to backward no rank has
# > more than 1/N of each input in memory, rounded up to a whole element. After `unpack`, once the returned
# > tensor is dropped, it has the parts alone again.


# %%
# Second exercise
class Packed:
    def __init__(self, tensor): ...  # your code

    def unpack(self): ...  # your code


check_packing(Packed)

# %% [markdown]
# Stuck? `check_packing.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_packing.solution()` prints a solution.

# %% [markdown]
# ## Move them away: P_a+cpu
#
# From forward to backward nobody reads the parts, so they need not be on the GPU. The CPU's memory, *host
# memory*, is much larger. With `offload="cpu"` each part is copied there in forward, and copied back in
# backward. The paper calls this *P_a+cpu*. The GPU then holds no checkpoints. The price: each part crosses
# the link between GPU and CPU, once in each direction.


# %%
def moved_by_a_rank():
    model, _, parallel = build(1, 4, stage=0)
    checkpointing = model.checkpointing = zerolab.Checkpointing(parallel, offload="cpu")
    loss = model(*batch(0, 0))
    held = checkpointing.held_bytes, checkpointing.offloaded_bytes
    loss.backward()
    return *held, checkpointing.written_bytes, checkpointing.read_bytes


held, away, written, read = zerolab.launch(moved_by_a_rank, 4)[0]
print(f"on the device {held}, in host memory {away:,}, written {written:,}, read {read:,} bytes")
print("L·b·s·h·4/N_m each:", away == written == read == 4 * LAYERS * BSH // 4)

# %% [markdown]
# (On a machine without a GPU the device *is* the CPU, and nothing is gained. The bytes are the same.)
#
# The paper trains this model on 400 GPUs, as 25 copies of 16 GPUs each. This is what one of them holds at
# stage 2, with whole checkpoints, with P_a and with P_a+cpu. The blocks alone are counted: a GPU has 1/16 of
# their parameters. Embeddings and head stay whole on each GPU, and their states are 2.1 GB more. Activations
# are the checkpoints and, in backward, one block that is computed again.


# %%
WAYS = {"whole": lambda ranks: 1, "P_a": lambda ranks: 1 / ranks, "P_a+cpu": lambda ranks: 0}


def on_a_gpu(layers, width, sequences, ranks, copies, stage=2, way="whole"):
    """GB by category. A block has 12·h² parameters, all cut, and 12 tensors; s = 1,024, 16 bits."""
    states = memory.model_states(12 * layers * width**2 / ranks, copies, stage)
    stream = sequences * 1024 * width * 2
    sizes = states.params_bytes, states.grads_bytes, states.optimizer_bytes
    sizes = *sizes, layers * stream * WAYS[way](ranks) + 12 * stream
    names = "parameters", "gradients", "optimizer state", "activations"
    return {name: size / 1e9 for name, size in zip(names, sizes, strict=True)}


# %%
def memory_bars(ax, rows, gpu_GB=32):
    """A bar for each name in `rows`, made of the sizes of its categories; returns what it shows, in words."""
    total = [0.0] * len(rows)
    for category in next(iter(rows.values())):
        sizes = [sizes[category] for sizes in rows.values()]
        drawn = ax.barh(list(rows), sizes, left=total, color=COLOURS[category], label=category)
        total = [before + size for before, size in zip(total, sizes, strict=True)]
    ax.axvline(gpu_GB, color=INK, linestyle="--")
    said = [f"{size:.1f} GB, {'fits' if size <= gpu_GB else 'does not fit'}" for size in total]
    ax.bar_label(drawn, said, padding=7, size=9, backgroundcolor=PAPER)
    ax.set(xlabel="GB on each GPU (dashed: what it has)", xmargin=0.75)
    ax.invert_yaxis()
    ax.locator_params(axis="x", nbins=5)
    magnify(ax)
    return "; ".join(map(" ".join, zip(rows, said, strict=True)))


# %%
fig = figure(height=2.3)
bars = {way: on_a_gpu(125, 8192, 32, ranks=16, copies=25, way=way) for way in WAYS}
said = memory_bars(fig.subplots(), bars)
show(fig, f"GB on each of 400 GPUs for 100 billion parameters, by what is done with checkpoints: {said}.")

# %% [markdown]
# With P_a it fits. P_a+cpu is for models that are larger still, as the paper says: the link is slow, so take
# it only where nothing else fits.
#
# The count takes 12 tensors for the block that is computed again. That is more than there are: tensor
# parallelism divides most of them. Four are whole on each rank: the input, the sum after attention, and what
# the two norms return. Twelve are divided: queries, keys and values, the result of attention, and the two
# inner tensors of the MLP, which count as four each. So it is about 4 + 12/N_m, and 4.75 for 16 ranks.
# (Sequence parallelism divides the four as well: V. Korthikanti et al.,
# [2022](https://arxiv.org/abs/2205.05198).) This is what PyTorch keeps of a block on this machine, apart from
# its parameters:


# %% tags=["nbval-ignore-output"]
def kept_by_a_block():
    model, _, _ = build(1, dist.get_world_size(), stage=0)
    stream = torch.randn(BATCH, TOKENS, WIDTH, device=zerolab.device(), requires_grad=True)
    return saved_bytes(model.blocks[0], stream) / (4 * BSH)


for ranks in (1, 2, 4):
    tensors = zerolab.launch(kept_by_a_block, ranks)[0]
    print(f"N_m = {ranks}: {tensors:.1f} tensors of b·s·h; 4 + 12/N_m is {4 + 12 / ranks:g}")

# %% [markdown]
# We stay with 12, the paper's estimate. Keep in mind that it is too large where several ranks share a copy.
# With one rank it is too small: the formula gives 16, so lesson 01's batches are up to a third too large.
#
# ## Move the optimizer state away
#
# The optimizer state is read and written once in a step, in the update. So it can live in host memory as
# well. In this engine each unit's part comes to the device, is updated, and goes back: KΨ/N bytes in each
# direction. (DeepSpeed's ZeRO-Offload updates on the CPU. Then the state stays there. The gradients go out
# and the new 16-bit parameters come back: about 2Ψ/N bytes in each direction.) The argument is
# `offload="cpu"`. With `offload="disk"` and a folder the state lies in a file.
#
# Our model has 334,848 parameters. Four ranks train it at stage 2 in mixed precision, where K is 12. **How
# many MB of optimizer state does each rank then keep in host memory?**


# %%
def states_kept(offload):
    options = {"stage": 2, "precision": "mixed", "lr": 1e-3, "offload": offload}
    optimizer = zerolab.ZeroOptimizer(model := fresh_model(), torch.optim.Adam, **options)
    moved = []
    for step in (0, 1):
        model(*batch(step, optimizer.rank, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if offload:
            moved.append((optimizer.offload.tier.read_bytes, optimizer.offload.tier.written_bytes))
    in_a_step = [after - before for before, after in zip(*moved, strict=True)]
    return optimizer.memory(), in_a_step, [parameter.detach().clone() for parameter in model.parameters()]


# %%
my_guess = ...

# %%
(kept, _, weights), (away, moved, same) = (zerolab.launch(states_kept, 4, way)[0] for way in (None, "cpu"))
rows = [
    f"on the device {kept.optimizer_bytes:,.0f} bytes, with offload {away.optimizer_bytes:.0f}",
    f"in host memory {away.offloaded_bytes:,} bytes; read in a step {moved[0]:,}, written {moved[1]:,}",
]
predict(my_guess, away.offloaded_bytes / 1e6, quiz.OFFLOADED)

# %% [markdown]
# **And how many MB does a rank then move in one step, in and out together?**

# %%
my_guess = ...

# %%
predict(my_guess, sum(moved) / 1e6, quiz.MOVED_IN_A_STEP, *rows)
print("bit-identical:", all(map(torch.equal, weights, same)))

# %% [markdown]
# (12 bytes × 334,848 / 4 are 1.0045 MB. Host memory has 1,152 bytes more, which are padding.) A larger batch
# makes this cheaper, because a step computes more and the state stays the same. On disk it is slower still.

# %% [markdown]
# ## Third exercise: the bytes of a step (optional)
#
# > **Difficulty 2 of 5 · importance 3 of 5 · 6 minutes.** Optimizer offload keeps a rank's optimizer state
# > in host memory: each step reads it for the update, and writes it back. P_a+cpu keeps the parts of the
# > blocks' inputs there: forward writes them, and backward reads them. Return the bytes that one rank moves
# > in a step, both ways together.
# >
# > - `psi` is the number of parameters of this rank's part of the model. `n_d` data-parallel ranks have the
# >   same part, and ZeRO shards its optimizer state over them.
# > - `kept` is the number of elements of the inputs of all blocks, L·b·s·h. They are partitioned over `n_m`
# >   tensor-parallel ranks.
# > - `precision` is `"mixed"` or `"fp32"`. The optimizer is Adam, so K is 12 or 8. An element of an input has
# >   2 bytes or 4.
# > - Write the formula yourself. `memory.optimizer_bytes_per_parameter` may give you K.


# %%
# Third exercise
def moved_bytes(psi, n_d, kept, n_m, precision): ...  # your code


check_bytes(moved_bytes)

# %% [markdown]
# Stuck? `check_bytes.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and `check_bytes.solution()`
# prints a solution.

# %% [markdown]
# ## Buffers
#
# The second part of residual memory is buffers: memory that a message needs while it is on its way. Some
# engines copy all gradients into one buffer to send them together. For 100 billion parameters in fp32 that is
# 400 GB. The paper's answer is *C_B*, constant-size buffers: as large as a message must be to be efficient,
# and no larger, whatever the size of the model.
#
# Our engine reduces unit by unit, so more blocks do not make its buffers larger. But *wider* blocks do: a
# unit grows with h². Over gloo the engine does not use a ring. Each rank receives the other ranks' gradients
# of its own shard, all at once: N − 1 buffers. Then it adds them in rank order, for equal bits. These buffers
# are called *scratch*. `bucket_bytes` bounds each of them. The shard then comes in several rounds, into the
# same scratch. (So a bucket is a part of a message here. In lesson 03 it was several gradients that make one
# message.)
#
# Take four ranks and the default, `reduces_in_flight=1`. Then two reductions hold scratch at the same time. A
# block has 49,984 parameters. (So a shard has 49,984 bytes, by chance: a quarter of the numbers, of 4 bytes
# each.) **With `bucket_bytes=16_384`, how many MB of scratch does a rank hold at the worst moment?**


# %%
my_guess = ...


# %%
def buffers(bucket_bytes):
    options = {"stage": 2, "lr": 1e-3, "bucket_bytes": bucket_bytes}
    optimizer = zerolab.ZeroOptimizer(model := fresh_model(), torch.optim.Adam, **options)
    landing = watch_scratch(optimizer)  # notes each buffer of the engine that messages are received into
    model(*batch(0, optimizer.rank, 4)).backward()
    optimizer.step()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return max(landing), optimizer.trace.traffic().wire_bytes, weights


# %%
SIZES = {f"{size:,}": size for size in (1024, 4096, 16_384, 65_536)} | {"none": None}
buckets = {name: zerolab.launch(buffers, 4, size, backend="gloo")[0] for name, size in SIZES.items()}
predict(my_guess, buckets["16,384"][0] / 1e6, quiz.SCRATCH)


# %%
def draw_scratch(fig, bucket_bytes):
    ax, peaks = fig.subplots(), [peak / 1e3 for peak, *_ in buckets.values()]
    colours = [INK if name == bucket_bytes else PALE for name in buckets]
    ax.barh(list(buckets), peaks, color=colours)
    ax.set(xlabel="kB of scratch at the worst moment", ylabel="bucket_bytes", xlim=(0, 420))
    peak, sent, weights = buckets[bucket_bytes]
    _, sent_whole, whole = buckets["none"]
    same = sent == sent_whole and all(map(torch.equal, weights, whole))
    ax.text(peak / 1e3 + 6, list(buckets).index(bucket_bytes), f"{peak:,} bytes", va="center")
    ax.set_title(f"bucket_bytes {bucket_bytes}: same bits and bytes sent: {same}")
    return f"Scratch at the worst moment, {peak:,} bytes with {ax.get_title('left')}."


explore(draw_scratch, height=2.6, bucket_bytes=choice(list(buckets), "none"))

# %% [markdown]
# The formula is (1 + in flight)(N − 1) · bucket, as long as a bucket is smaller than a shard. 65,536 bytes
# are more than a shard, so they bound nothing. Bits and bytes are the same at every size. What a small bucket
# costs is time: each round waits for its messages.

# %% [markdown]
# ## Holes
#
# The third part is *fragmentation*: free memory in pieces. An allocator gives out parts of an *arena*, one
# range of addresses, and a tensor needs a part in one piece. If tensors that live long lie between tensors
# that live only briefly, then what becomes free is a row of holes, and the next large tensor fits into none
# of them.
#
# In forward a checkpoint, which lives until backward, is followed by activations, which live for one block,
# then by the next checkpoint. In backward the gradients stay, and the activations between them are freed. The
# paper's answer is *M_D*: copy what lives long into one region of its own, reserved before training.

# %% [markdown]
# Try it with numbers. An allocator that takes the *first fit* gives a tensor the lowest hole that is large
# enough. Neighbouring free parts join, also with the free end of the arena. There are three blocks. The first
# has 4 MB, the second 5 MB and the third 6 MB. For each: allocate the block, allocate its checkpoint of 1 MB,
# free the block. After the third, allocate 6 MB once more, for backward. At most 9 MB live at the same time.
# **How many MB must the arena have?** (Take a sheet of paper.)


# %%
my_guess = ...

# %%
blocks, requests = 0, []
for size in (4, 5, 6):
    requests += [arena.Alloc(blocks, size), arena.Alloc(blocks + 1, 1, long_lived=True), arena.Free(blocks)]
    blocks += 2
requests.append(arena.Alloc(blocks, 6))
by_hand = arena.replay(requests, fit="first", alignment=1)
predict(my_guess, by_hand.arena_bytes, quiz.FIRST_FIT)

# %% [markdown]
# The first checkpoint lies at 4, behind the first block. The hole before it has 4 MB. No later block fits
# into it, so all of them lie above 5. The small checkpoints use the hole, and 2 MB of it stay free. With a
# region of its own for checkpoints nothing is lost:

# %%
region = arena.replay(requests, fit="first", regions=2, alignment=1)
print("as much as lives at once:", region.arena_bytes == region.peak_bytes)

# %% [markdown]
# A real step has more to it. There a region may help or harm: it depends on the allocator and on the model.
# The next section tries it, and [Memory fragmentation](../docs/fragmentation.md) has more sizes. (Our
# engine's gradients lie in one flat buffer for each unit, so they leave no holes.)
#
# ## A real step in the arena (optional)
#
# `arena.record` notes each allocation and each release of a training step. `arena.replay` serves them again,
# in an arena of a size that you choose. Here is a step of 24 checkpointed blocks in one process. The step is
# plain PyTorch, without zerolab's flat buffers. *Best fit* takes the smallest hole that is large enough.


# %%
def recorded(depth):
    model = models.GPT(width=WIDTH, depth=depth, heads=4, context=TOKENS).to(zerolab.device())
    model.checkpointing = zerolab.Checkpointing()
    tokens, targets = batch(0, 0)

    def step():
        loss = model(tokens, targets)
        yield  # what lives now lives long: the checkpoints
        loss.backward()

    return arena.record(step)


# %%
KINDS = [(fit, regions) for fit in ("first", "best") for regions in (1, 2)]
requests = recorded(24)
needed = {kind: arena.replay(requests, *kind) for kind in KINDS}


def verdict(kind, percent_to_spare):
    size = int(needed[kind].peak_bytes * (1 + percent_to_spare / 100))
    if (failure := arena.replay(requests, *kind, size_bytes=size).failure) is None:
        return "fits"
    MB = [each / 1e6 for each in (failure.request.size_bytes, *failure[1:])]
    return "fails: {:.2f} MB asked for,\n{:.2f} free, largest hole {:.2f}".format(*MB)


SPARE = range(26)  # the places of the slider below, which then has nothing to replay
verdicts = {percent: {kind: verdict(kind, percent) for kind in KINDS} for percent in SPARE}


# %%
def draw_arena(fig, percent_to_spare):
    ax, said = fig.subplots(), []
    labels = [f"{fit} fit,\n{'one region' if n == 1 else 'two regions'}" for fit, n in KINDS]
    ax.barh(range(len(KINDS)), [needed[kind].excess_percent for kind in KINDS], color=PALE)
    for row, (kind, words) in enumerate(verdicts[percent_to_spare].items()):
        excess = needed[kind].excess_percent
        ax.text(max(excess, percent_to_spare) + 0.6, row, words, va="center", size=9)
        said.append(f"{labels[row]} {words}".replace("\n", " "))
    ax.axvline(percent_to_spare, color=INK, linestyle="--", linewidth=0.8, zorder=0)
    axis = "percent of arena needed above the live bytes\n(dashed: what this arena has)"
    ax.set(xlim=(0, 44), ylim=(3.6, -0.6), xlabel=axis)
    ax.set_yticks(range(4), labels)
    return f"An arena of {percent_to_spare} percent above the live bytes: {'; '.join(said)}."


# %% tags=["nbval-ignore-output"]
explore(draw_arena, height=3, percent_to_spare=slider(0, SPARE[-1], 5))

# %% [markdown]
# On this machine first fit in one region fails although several times as many bytes are free as it asks for:
# no hole is large enough. Here a region helps first fit and harms best fit, because what is free in one
# region cannot be used in the other. With 32 sequences in place of 8 a second region harms both allocators:
# each of them needs 8.6 % above the live bytes in one region, and 12.5 % in two. So **it depends on the
# allocator and on the model**.

# %% [markdown]
# ## An explorer: N_d × N_m (optional)
#
# Now put everything together. The paper compares five configurations. All have C_B and M_D:
#
# | | C1 | C2 | C3 | C4 | C5 |
# |---|---|---|---|---|---|
# | ZeRO stage | 1 | 1 | 2 | 2 | 2 |
# | checkpoints | whole | P_a | whole | P_a | P_a+cpu |
#
# **Find a setting at which 170 billion parameters fit into 32 GB.** There are `N m` GPUs in a copy and `N d`
# copies. Move `N d` first. It divides what the stage divides, and no activations. `N m` divides all states
# and, with P_a, the checkpoints.


# %%
SETTINGS = (1, "whole"), (1, "P_a"), (2, "whole"), (2, "P_a"), (2, "P_a+cpu")
CONFIGURATIONS = dict(zip(("C1", "C2", "C3", "C4", "C5"), SETTINGS, strict=True))
LAYERS_OF = {"40B": 50, "60B": 75, "100B": 125, "140B": 175, "170B": 212}  # of width 8192


def configurations(fig, model, N_m, N_d, batch):
    shape = LAYERS_OF[model], 8192, batch, N_m, N_d
    bars = {name: on_a_gpu(*shape, *how) for name, how in CONFIGURATIONS.items()}
    ax = fig.subplots()
    said = memory_bars(ax, bars)
    ax.set_title(f"{model} on {N_m * N_d:,} GPUs, {batch} sequences for each copy")
    return f"{ax.get_title('left')}: {said}."


# %%
powers = [1, 2, 4, 8, 16, 32]
controls = {"model": choice(list(LAYERS_OF), "100B"), "N_m": choice(powers, 16), "N_d": slider(1, 64, 25)}
explore(configurations, height=3, **controls, batch=slider(1, 64, 32))

# %% [markdown]
# <details><summary>Answer</summary>
#
# One of several: with 16 GPUs in a copy, 25 copies and a batch of 12, C5 fits with 29.7 GB. That is how the
# paper trains 170 billion parameters. C4 needs 32.4 GB by our count. With 4 + 12/N_m tensors for the block in
# place of 12 it needs 30.9 GB, and fits.
# </details>
#
# The explorer counts states, checkpoints and one block against all 32 GB. It leaves nothing for libraries and
# buffers, so what just fits here may not fit on a GPU.
#
# ## Against the paper's Figure 6 (optional)
#
# The paper asks for the largest model that trains with each configuration, on 400 GPUs with 16 in each copy
# and a batch of 16. Can we compute that? Now we count otherwise: states and checkpoints, and 7.3 of the 32 GB
# for all the rest, which is libraries, buffers and the activations of the block that computes. We chose 7.3
# GB so that C1 gets the 40 billion parameters that it had in the paper. The other four follow from that one
# number.
#
# A block has 12·h² = 805 million parameters. At stage 1 it takes 225 MB of states on a GPU, at stage 2 129
# MB. Its input takes 268 MB, with P_a 17 MB. **How many billion parameters fit with C4 into 24.7 GB?**


# %%
my_guess = ...


# %%
def largest(stage, way):
    """How many billion parameters fit: per block, the states on a GPU and its checkpoints."""
    parameters = 12 * 8192**2
    states = memory.model_states(parameters / 16, 25, stage).total_bytes
    checkpoint = 16 * 1024 * 8192 * 2 * WAYS[way](16)
    return parameters * (32e9 - 7.3e9) / (states + checkpoint) / 1e9


computed = {name: largest(*how) for name, how in CONFIGURATIONS.items()}
sizes = zip(computed, paper.LARGEST.values(), computed.values(), strict=True)  # Figure 6 and Table 7
rows = [f"{name}: the paper {theirs:>3}, computed {ours:>3.0f}" for name, theirs, ours in sizes]
predict(my_guess, computed["C4"], quiz.C4, *rows)

# %% [markdown]
# C1 was fitted. C3, C4 and C5 agree to 3 %. **C2 does not: computed 82, paper 60.** With P_a alone the model
# grows 1.5 times in the paper and 2 times in our count. The paper gives no reason, and we know none. (Its run
# of C2 had blocks of width 6,144. With these we compute 80.) So this count of memory, fitted to C1, predicts
# three of the other four, and fails at C2. We print all five, so that you see how far to trust it.
#
# Compare the configurations in the paper: P_a alone gives a model 1.5 times as large, stage 2 alone 1.25
# times, and both together 3.5 times. Each removes what the other leaves. (And C5: by this account it ends at
# 154 billion, and the paper trained 170 with it, at a smaller batch. The 7.3 GB include the activations at
# work for a batch of 16. With a smaller batch they are smaller, and more parameters fit.)
#
# ## More room, larger batch (optional)
#
# Free memory can be turned into speed. The paper trains 60 billion parameters (75 blocks) with N_m = 16 on 64
# to 400 GPUs, at stage 2 with P_a. More copies means smaller shards, and what becomes free takes more
# sequences. How many fit into each copy? We take the 7.3 GB of the section above, and one block with 12
# tensors in addition, which grows with the batch. (The 7.3 GB have such a block for a batch of 16 already, so
# this counts about one block too many.)


# %%
def sequences_that_fit(gpus):
    for_one = on_a_gpu(75, 8192, 1, ranks=16, copies=gpus // 16, way="P_a")
    each = for_one.pop("activations")  # grows with the batch; the states do not
    return (32 - 7.3 - sum(for_one.values())) / each


for gpus, in_the_paper in {64: 16, 128: 48, 256: 48, 400: 64}.items():
    print(f"{gpus} GPUs: {sequences_that_fit(gpus):.0f} sequences fit, the paper used {in_the_paper}")

# %% [markdown]
# On 64, 128 and 400 GPUs the estimate is too low: it allows 14, 38 and 54 sequences, and the paper ran 16, 48
# and 64. On 256 it allows 49, and the paper ran 48. (With 4.75 tensors for the block it would allow 25, 67,
# 87 and 95.) But it has the paper's shape: much more room from 64 GPUs to 128, and little more after that,
# because there is little left to divide.
#
# And P_a? Without it 2.7, 7.2, 9.5 and 10.3 sequences would fit, a fifth of what fits with it. The paper
# expects up to an order of magnitude from P_a, and the checkpoints alone give 16 times. But P_a does not
# divide the block that is computed again, and this count takes 12 whole tensors for it.
#
# ZeRO's messages do not grow with the batch, so with more sequences a GPU computes more in each second. By
# the paper's plot twice the GPUs were 2.93 times as fast from 64 to 128, and 2.07 times from 128 to 256. That
# is *super-linear*. From 256 to 400 it was 1.47 for 1.56 times the GPUs. (Lesson 08 computes the speed of a
# smaller model.)
#
# ## When does a shared copy pay?
#
# You have four ranks and eight sequences in a step. They can be four copies of one rank (4 × 1), two of two
# (2 × 2), or one of four (1 × 4), with checkpointing, P_a where it applies, and stage 3. In 4 × 1 a rank
# computes two sequences, and in 1 × 4 all eight. **How many times the bytes of checkpoints of 4 × 1 does a
# rank of 1 × 4 keep?**

# %%
my_guess = ...


# %%
def one_step(copies, ranks_of_a_copy):
    model, optimizer, parallel = build(copies, ranks_of_a_copy, stage=3)
    checkpointing = model.checkpointing = zerolab.Checkpointing(parallel)
    for step in (0, 1):
        loss = model(*batch(step, optimizer.rank, copies))
        held = checkpointing.held_bytes
        loss.backward()
        optimizer.step()
        states = optimizer.memory()
        optimizer.zero_grad()
    counted = states.params_bytes + states.grads_bytes + states.optimizer_bytes
    return int(counted), held, *(each.trace.traffic(1).wire_bytes for each in (optimizer, parallel))


# %%
table = {f"{n} × {m}": zerolab.launch(one_step, 4, n, m)[0] for n, m in ((4, 1), (2, 2), (1, 4))}
heading = f"{'':6}{'states':>12}{'checkpoints':>13}{'sent by ZeRO':>14}{'within a copy':>15}"
rows = [f"{name:6}{a:>12,}{b:>13,}{c:>14,}{d:>15,}" for name, (a, b, c, d) in table.items()]
predict(my_guess, table["1 × 4"][1] / table["4 × 1"][1], quiz.SAME_CHECKPOINTS, heading, *rows)

# %% [markdown]
# <details><summary>Answer</summary>
#
# A rank of the shared copy computes four times as many sequences, and P_a keeps a quarter of each input. So
# the bytes are the same. At the same global batch a shared copy does not reduce the memory of checkpoints. It
# helps where the checkpoints of a single sequence do not fit: a rank alone cannot compute less.
# </details>

# %% [markdown]
# Look at the other columns of the table, which are bytes for each rank, the last two on the wire:
#
# - **States** are smallest at 4 × 1. ZeRO divides everything, and tensor parallelism leaves embeddings, norms
#   and some biases whole.
# - **ZeRO's messages** shrink with the part that a rank has. They may be overlapped, and run between
#   machines.
# - **Messages within a copy** grow with the tokens that a copy computes. This engine overlaps none of them.
#   Eight sequences of 32 tokens are few, and already 1 × 4 sends more in all than 4 × 1: 3,244,032 bytes,
#   against 2,908,800. With four times as many sequences 2 × 2 does, too: 4,325,376 within its copies.
#
# Before ZeRO, a large model had to be cut, because nothing else divided its states. Stage 3 divides them
# better. What is left are two good reasons to share a copy:
#
# 1. *The batch.* 1,024 GPUs with a copy each need 1,024 sequences in a step at least. That may be more than
#    training takes without losing quality. With 8 GPUs in a copy it is 128.
# 2. *The network.* 2 × 2 sends less than half as much by ZeRO as 4 × 1. If copies are in different machines,
#    that is what crosses the slow link.
#
# %% [markdown]
# ## On GPUs
#
# If this machine has a GPU for every rank, the ranks above used them, over NCCL. Three things differ there:
#
# - Host memory is another memory, so `offload="cpu"` frees memory of the GPU. Parts are copied to *pinned*
#   memory, which the operating system never moves, so that a GPU can read and write it by itself.
# - The cells on buffers ran on the CPU all the same, because they pass `backend="gloo"`. Over NCCL the
#   library adds, without scratch of the engine. (After `compute_deterministically()` the engine adds there,
#   too. Then it refuses `bucket_bytes`.)
# - Holes are in the GPU's memory. PyTorch's allocator keeps freed blocks and splits them, and reports in
#   `torch.cuda.memory_stats()` what lies idle in pieces.
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
# - Residual memory is activations, buffers and holes. No stage divides it. Stages divide what all ranks have
#   alike, and each rank has activations of its own.
# - Tensor parallelism splits pairs of products: columns, then rows. f and g join them. A block sends 8·b·s·h,
#   10 with checkpointing, 12 if all of its forward runs again.
# - P_a keeps 1/N_m of each checkpoint and sends b·s·h more for each block. P_a+cpu keeps none on the GPU and
#   moves each part out and in once. Both leave the bits as they are.
# - Optimizer state away from the device costs KΨ/N read and KΨ/N written in a step, if the device updates it.
# - Buffers need a bound, (1 + in flight)(N − 1) buckets here.
# - Free memory in pieces is no use to a large tensor. A region for what lives long may help or harm: it
#   depends on the allocator and on the model.
# - ZeRO is the better divider of states. Share a copy for a smaller global batch, and for a slow network
#   between machines.
#
# **Next:** [08 · In the wild](08_in_the_wild.ipynb): what other engines hold and send, and which stage suits
# which cluster.

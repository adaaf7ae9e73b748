# %% [markdown]
# # 01 · Where the memory goes
#
# > **50 minutes.** *You need:* PyTorch, Adam, and from lesson 00 the words "rank" and "data parallelism".
# >
# > *Afterwards you can* say what fills a large GPU when a model of 1.5 billion parameters trains, compute the
# > bytes per GPU at each ZeRO stage and the largest batch that fits beside them, say what fine-tuning saves
# > where most weights are not trained, and name two common mistakes in such a computation.
# >
# > *Paper:* ZeRO, §3 and §5, Figure 1 and Table 1, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).
# >
# > *Words:* the [glossary](../docs/glossary.md) explains the main ones.

# %% [markdown]
# ## The question
#
# GPT-2 has 1.5 billion parameters. With 16 bits for each of them, its weights take 3 GB. Yet a training step
# of 32 samples runs out of memory on a GPU of 32 GB. Where do the other 29 GB go? (1 *GB* is 10⁹ bytes, and 1
# *GiB* is 2³⁰ bytes.)
#
# We take a small model, train it for one step, and count the bytes of every tensor.

# %%
import numpy as np
import torch

import zerolab
from zerolab import memory
from zerolab.course import answer, choice, explore, figure, number, predict, show, show_source
from zerolab.course.lessons.memory_accounting import (
    check_adapter_bytes,
    check_bytes_per_gpu,
    check_largest_batch,
    quiz,
)
from zerolab.course.look import COLOURS, INK, PAPER, by_category, ink_on, magnify
from zerolab.measure import storage_bytes

# %% [markdown]
# ## Count the bytes of a model
#
# The bytes of a tensor lie in a *storage*. Two tensors can share one storage, so bytes are counted once for
# each storage. `storage_bytes` does only that:

# %%
show_source(storage_bytes)

# %% [markdown]
# Below, a small GPT takes one step of Adam. All numbers are in *fp32*, PyTorch's default: 32 bits, so 4
# bytes. The variable `psi` is the number of parameters; the paper writes Ψ for it. It counts *elements*: a
# `torch.nn.Parameter` is a tensor of many elements. How large are the parameters, the gradients, and the
# tensors that Adam keeps, **in bytes per parameter, all three together?**

# %%
my_guess = ...

# %%
torch.manual_seed(0)
model = zerolab.models.GPT(width=64, depth=2)
psi = sum(p.numel() for p in model.parameters())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
tokens = torch.randint(256, (4, 33))
model(tokens[:, :-1], tokens[:, 1:]).backward()
optimizer.step()
print(f"{psi:,} parameters")


# %%
def weigh(params, grads, optimizer):
    state = [t for values in optimizer.state.values() for t in values.values()]
    return {
        "parameters": storage_bytes(params),
        "gradients": storage_bytes(grads),
        "m and v": storage_bytes(t for t in state if t.dim() > 0),
        "step counters": storage_bytes(t for t in state if t.dim() == 0),
    }


# %%
params = list(model.parameters())
weights = weigh(params, [p.grad for p in params], optimizer)
rows = [f"{name:>14}: {size:>9,} bytes, {size / psi:6.3f} per parameter" for name, size in weights.items()]
predict(my_guess, sum(weights.values()) / psi, quiz.BYTES_IN_FP32, *rows)

# %% [markdown]
# Adam keeps two moving averages for each parameter: *m*, of the gradient, and *v*, of its square. Its step
# counters are one small number for each *tensor* and do not matter here.
#
# The paper calls these three, **parameters, gradients and optimizer state**, the *model states*. Their size
# depends on the model, the optimizer and the number formats. It does not depend on the batch.
#
# ## The same in mixed precision
#
# Large models are rarely trained in pure fp32, because 16-bit matrix products run several times faster. In
# *mixed precision* the forward and backward passes use weights in *bf16*, a 16-bit format: 2 bytes each. The
# gradients are in bf16, too. But a bf16 number has two to three decimal digits, and an update is often too
# small to change the last of them. So the optimizer keeps a copy of the weights in fp32, the **master
# weights**. It updates the master weights and rounds the result to bf16. Adam's m and v stay in fp32.
#
# (The paper uses fp16, which is as large. `torch.autocast` is something else: it keeps parameters and
# gradients in fp32, needs no master weights, and converts to a 16-bit format inside the forward pass.)
#
# **How many bytes per parameter does that make?**

# %%
my_guess = ...

# %%
half = zerolab.models.GPT(width=64, depth=2).bfloat16()
half(tokens[:, :-1], tokens[:, 1:]).backward()
masters = [p.detach().float().requires_grad_() for p in half.parameters()]
adam = torch.optim.Adam(masters, lr=1e-3)
for master, p in zip(masters, half.parameters(), strict=True):
    master.grad = p.grad.float()
adam.step()
for master, p in zip(masters, half.parameters(), strict=True):
    p.data.copy_(master)
    master.grad = None  # a temporary tensor: it can be made and freed one tensor at a time

# %%
half_params = list(half.parameters())
weights = weigh(half_params, [p.grad for p in half_params], adam)
weights["fp32 master weights"] = storage_bytes(masters)
rows = [f"{name:>20}: {size:>9,} bytes, {size / psi:6.3f} per parameter" for name, size in weights.items()]
predict(my_guess, sum(weights.values()) / psi, quiz.BYTES_IN_MIXED_PRECISION, *rows)

# %% [markdown]
# So mixed precision saves time, and no bytes of these tensors. (It does save *activations*, which come
# below.)

# %%
pieces = [("bf16\nweight", 2, "parameters"), ("bf16\ngradient", 2, "gradients")]
pieces += [(f"fp32\n{name}", 4, "optimizer state") for name in ("master weight", "m", "v")]
fig = figure(height=1.5)
ax, left = fig.subplots(), 0
for name, width, category in pieces:
    ax.barh(0, width, left=left, color=COLOURS[category], edgecolor="white")
    words = {"ha": "center", "va": "center", "color": ink_on(COLOURS[category])}
    ax.text(left + width / 2, 0, name, size=9, **words)
    left += width
ax.set(yticks=[], xticks=range(0, 17, 2), xlabel="bytes of one parameter; K = 12 of them are the optimizer's")
show(fig, f"The {left} bytes of one parameter: " + ", ".join(f"{n} {w}" for n, w, _ in pieces))

# %% [markdown]
# The paper writes **K = 12** for the optimizer's bytes per parameter. Then the model states take 2Ψ + 2Ψ +
# 12Ψ = **16Ψ bytes**. For GPT-2:

# %%
states = memory.model_states(1.5e9, world_size=1, stage=0)
print("16-bit weights:", memory.format_bytes(states.params_bytes))
print("model states:  ", memory.format_bytes(states.total_bytes))
print("the same in GiB:", memory.format_bytes(states.total_bytes, "GiB"))

# %% [markdown]
# 24 of the 32 GB are used before a single activation is counted. (`nvidia-smi` prints MiB, and papers mostly
# count in GB. This course always writes which one it means.)
#
# ## 16 is a convention
#
# Other programs count differently. If gradients are kept in fp32, they take 4 bytes and the sum is 18. SGD
# with momentum keeps one number per parameter where Adam keeps two. So when you read "x GB", ask what was
# counted. In this package you choose by name:

# %%
for name, precision in memory.CONVENTIONS.items():
    total = memory.model_states(1, 1, 0, precision=name).total_bytes
    print(f"{name:>16}: {total:g} bytes.  {precision.meaning}")

# %% [markdown]
# ## Four GPUs do not help
#
# In data parallelism each of N ranks holds all 16Ψ bytes. The ranks average their gradients, so they all hold
# *the same* 16Ψ bytes: N identical copies of everything.
#
# ZeRO, the *Zero Redundancy Optimizer*, removes these copies. If N ranks hold the same tensor, each of them
# can keep 1/N of it, its **shard**. Each rank then updates its own shard of the parameters only. For that it
# needs only its shard of the optimizer state and of the averaged gradients. When it needs all parameters, it
# gets the other shards from the other ranks. A stage of ZeRO is defined by what is sharded:
#
# | | sharded over N ranks | bytes on each GPU, mixed precision with Adam |
# |---|---|---|
# | data parallel | nothing | 16Ψ |
# | stage 1 | optimizer state | 4Ψ + 12Ψ/N |
# | stage 2 | optimizer state and gradients | 2Ψ + 14Ψ/N |
# | stage 3 | optimizer state, gradients and parameters | 16Ψ/N |
#
# ## Exercise: 7 billion parameters on 8 GPUs
#
# **Predict first: in mixed precision at stage 1, how many GB of model states does each GPU hold?** Use pencil
# and paper.

# %%
my_guess = ...

# %%
held = memory.model_states(7e9, world_size=8, stage=1).total_bytes
predict(my_guess, held / 1e9, quiz.STAGE_1)

# %% [markdown]
# You may also meet 58.7. That is 4 + 4 + 8/8 = 9 bytes per parameter, in GiB. Nine bytes are right in fp32.
# In mixed precision they mean that the master weights, 4 of the 12 bytes, were not divided. And GiB were
# called GB.
#
# > **Difficulty 1 of 5 · importance 5 of 5 · 5 minutes.** Now for any stage: return the *bytes* of model
# > states on each GPU under mixed precision. `stage` is 0, 1, 2 or 3, and *stage 0* is data parallelism.
# > Write the formula yourself, without `memory.model_states`.


# %%
# Exercise
def bytes_per_gpu(psi, world_size, stage):
    # your code
    return None


check_bytes_per_gpu(bytes_per_gpu)

# %% [markdown]
# Stuck? `check_bytes_per_gpu.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_bytes_per_gpu.solution()` prints a solution.
#
# The package has the same function, with the conventions as arguments. (`_number`, `_whole` and
# `_conventions` check the arguments. `frozen_psi` counts weights that are not trained, and `own_share` is for
# lesson 10.)

# %%
show_source(memory.model_states, docstring=False)

# %% [markdown]
# ## Second exercise: frozen weights
#
# Fine-tuning often leaves the weights of a model as they are. They are *frozen*: they have
# `requires_grad=False`, and no optimizer updates them. A few new parameters are trained beside them. The
# best-known way is **LoRA**: beside a frozen matrix of 4096 × 4096 it trains two narrow ones, 4096 × 16 and
# 16 × 4096, and adds their product to the frozen matrix. That is 0.13 million parameters beside 16.8 million.
#
# > **Difficulty 2 of 5 · importance 3 of 5 · 6 minutes.** A model has `frozen` parameters, in bf16, and
# > `trained` further ones, which Adam trains in mixed precision. Return the bytes of model states on each
# > GPU. A stage that shards parameters shards the frozen ones too. Write the formula yourself, without
# > `memory.model_states`.


# %%
# Second exercise
def adapter_bytes(frozen, trained, world_size, stage):
    # your code
    return None


check_adapter_bytes(adapter_bytes)

# %% [markdown]
# Stuck? `check_adapter_bytes.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_adapter_bytes.solution()` prints a solution.
#
# With your function compare two ways to fine-tune a 7B model on one GPU. If all of it is trained, its model
# states take 112 GB. How many GB do they take if it is frozen, with 20 million trained parameters beside it?
# Then look at 8 GPUs, stage by stage: which stage saves enough to matter?
#
# <details><summary>Answer</summary>
#
# One GPU holds 14 + 0.32 = 14.32 GB. On 8 GPUs stage 1 leaves 14.11 GB, stage 2 14.08 GB, and stage 3 1.79
# GB. So use plain data parallelism for such fine-tuning if each GPU can hold 14 GB, and stage 3 if not.
# Stages 1 and 2 hardly help.
# </details>

# %% [markdown]
# ## The paper's Figure 1 and Table 1
#
# The paper's first figure has 7.5B parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB.

# %%
STAGES = ["data parallel", "stage 1", "stage 2", "stage 3"]


def bars(ax, rows):
    """A bar for each name in `rows`, made of the sizes of its categories; returns the totals."""
    total = np.zeros(len(rows))
    for category in next(iter(rows.values())):
        sizes = [sizes[category] for sizes in rows.values()]
        drawn = ax.barh(list(rows), sizes, left=total, color=COLOURS[category], label=category)
        total += sizes
    ax.invert_yaxis()
    ax.locator_params(axis="x", nbins=5)  # each tick takes time to draw
    return total, drawn


# %%
def stage_bars(fig, model_billions=7.5, gpus=64, gpu_memory_GB=32, precision="mixed"):
    held = [memory.model_states(model_billions * 1e9, gpus, stage, precision) for stage in range(4)]
    ax = fig.subplots()
    total, drawn = bars(ax, dict(zip(STAGES, map(by_category, held), strict=True)))
    ax.axvline(gpu_memory_GB, color=INK, linestyle="--")
    verdicts = ["fits" if size <= gpu_memory_GB else "does not fit" for size in total]
    said = [f"{memory.format_bytes(1e9 * t)}, {v}" for t, v in zip(total, verdicts, strict=True)]
    ax.bar_label(drawn, said, padding=7, size=9, backgroundcolor=PAPER)
    ax.margins(x=0.75)
    magnify(ax)
    ax.set(xlabel="GB on each GPU (1 GB = 10⁹ bytes)")
    title = f"{round(model_billions, 2):g}B on {gpus} GPUs of {gpu_memory_GB} GB (dashed)"
    ax.set_title(title)
    return f"{title}, precision {precision}. " + "; ".join(map(": ".join, zip(STAGES, said, strict=True)))


# %%
fig = figure(height=2.8)
show(fig, stage_bars(fig))

# %% [markdown]
# Its Table 1 has the GB per GPU at stages 1, 2 and 3, for three sizes of model. Compare ours with the
# paper's. (The paper rounds the 7.5B columns. In the other two it cuts off the decimals of numbers above 100:
# it prints 513.5 as 513.)

# %%
sizes = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
print("    " + "".join(f"{name + ':':>10} {'':16}" for name in sizes))
print("GPUs" + "".join(f"{f'stage {stage}':>9}" for _ in sizes for stage in (1, 2, 3)))
for gpus in (1, 4, 16, 64, 256, 1024):
    cells = [
        memory.model_states(s, gpus, stage).total_bytes / 1e9 for s in sizes.values() for stage in (1, 2, 3)
    ]
    print(f"{gpus:>4}" + "".join(f"{cell:>9,.5g}" for cell in cells))

# %% [markdown]
# Read one column from top to bottom. With more GPUs stage 1 shrinks, and then it stops shrinking: its 4Ψ are
# on every GPU for any N. Only stage 3 keeps shrinking.

# %%
fig, gpus = figure(height=3), [2**power for power in range(11)]
ax = fig.subplots()
for stage, name in enumerate(STAGES):
    GB = [memory.model_states(7.5e9, n, stage).total_bytes / 1e9 for n in gpus]
    ax.loglog(gpus, GB, label=name)
    ax.text(1250, GB[-1], f"{GB[-1]:.3g}", va="center")
ax.set(xlabel="number of GPUs", ylabel="GB on each GPU", xticks=gpus[::2], xticklabels=gpus[::2])
ax.set(yticks=[0.1, 1, 10, 100], yticklabels=["0.1", "1", "10", "100"])
ends = ", ".join(text.get_text() for text in ax.texts)
show(fig, f"GB on each of 1 to 1024 GPUs, for 7.5B parameters. On 1024, by stage: {ends}.")

# %% [markdown]
# ## Try it
#
# Find out with the sliders. You can type numbers, too. A bar that is too short to see is drawn again at the
# right, enlarged.
#
# - How many GPUs does a 7.5B model need to take less than 32 GB at stage 1?
# - Which is the smallest stage at which a 128B model takes 32 GB or less on 64 GPUs?
# - What do fp32 gradients (`mixed_fp32_grads`) cost the 128B model on 64 GPUs at stage 1, and what
#   at stage 2?
# - Which is the largest model that you can train at stage 3 on your own GPU alone? And on eight of them?

# %%
explore(
    stage_bars,
    model_billions=number(0.1, 2000, 7.5),
    gpus=choice([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], 64),
    gpu_memory_GB=choice([16, 24, 32, 40, 80, 141], 32),
    precision=choice(list(memory.CONVENTIONS), "mixed"),
)

# %% [markdown]
# <details><summary>Answers</summary>
#
# - At stage 1 every GPU holds 30 GB for any N. The rest falls below 2 GB beyond 45 GPUs: choose 64 on the
#   slider.
# - Only stage 3. It takes exactly 32 GB, so nothing is left for anything else.
# - fp32 gradients cost two more bytes per parameter: 256 GB more on every GPU at stage 1, and a 64th of that,
#   4 GB, at stage 2, which shards them.
# - Alone it is the GPU's memory divided by 16 bytes, and no stage helps: 1.5B for 24 GB. On eight GPUs it is
#   eight times as much, 12B. (Nothing is left for activations then.)
#
# </details>
#
# ## What else fills a GPU
#
# The model states of GPT-2 are 24 GB, and with 32 samples it still does not train in 32 GB. The rest are
# **activations**: the tensors that the forward pass keeps for the backward pass. They grow with the batch,
# and no stage of ZeRO shards them.
#
# The *hidden size* of a GPT is the width of the vectors that go from layer to layer. The paper estimates that
# a GPT layer keeps about 12 tensors of batch × sequence × hidden size. Queries, keys and values are three of
# them. The inner vectors of the MLP are four times as wide, so they count as four. The others are such things
# as the inputs of its linear layers and norms. (This is an estimate for planning. Lesson 07 measures 16.)
# **With batch 32, 1024 tokens, 48 layers of hidden size 1600, and 16 bits per number: how many GB are that?**

# %%
my_guess = ...

# %%
kept = memory.activations(layers=48, hidden=1600, batch=32, seq=1024)
predict(my_guess, kept / 1e9, quiz.ACTIVATIONS)

# %% [markdown]
# Data parallelism does not help here, and no stage of ZeRO does. Parameters are the same on every rank, so a
# rank can keep 1/N of them and get the rest from the others. Activations are made from the rank's own
# samples. No other rank has them, so there is no copy to remove. What helps is a smaller batch on each GPU,
# or activation checkpointing.
#
# With **activation checkpointing** the forward pass keeps one tensor for each group of layers. The backward
# pass computes the others again, group by group, which costs about a third more compute. With eight groups of
# six layers the activations of GPT-2 shrink to 8.4 GB at batch 32: the eight tensors that are kept, and 12
# per layer of the one group that is being computed again. Move the sliders below: which is the largest batch
# of the slider that fits without checkpointing, and which with it?


# %%
def one_gpu(fig, batch=32, checkpointing="off", gpu_memory_GB=32):
    kept = memory.activations(48, 1600, batch, 1024, checkpointing=checkpointing == "on")
    sizes = by_category(memory.model_states(1.5e9, 1, 0)) | {"activations": kept / 1e9}
    ax = fig.subplots()
    (total,), _ = bars(ax, {"GPT-2 1.5B": sizes})
    ax.axvline(gpu_memory_GB, color=INK, linestyle="--")
    ax.set(xlabel="GB on one GPU", xlim=(0, max(100, 1.02 * total)), yticks=[])
    verdict = "fits" if total <= gpu_memory_GB else "does not fit"
    title = f"GPT-2 1.5B, batch {batch} × 1024 tokens, checkpointing {checkpointing}:\n"
    title += f"{total:.3g} GB, {verdict} into {gpu_memory_GB} GB (dashed)"
    ax.set_title(title)
    return f"{title}. " + ", ".join(f"{name} {GB:.3g} GB" for name, GB in sizes.items())


# %%
batches, memories = choice([1, 2, 4, 8, 16, 32, 64], 32), choice([16, 24, 32, 40, 80, 141], 32)
explore(
    one_gpu, height=1.9, batch=batches, checkpointing=choice(["off", "on"], "off"), gpu_memory_GB=memories
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# The model states leave 8 GB. Without checkpointing batch 4 fits, and batch 8 does not. With it batch 16
# fits, and batch 32 needs 8.4 GB, which is 0.4 GB too much.
# </details>
#
# With checkpointing the *model states* are the largest part, 24 of 32 GB. ZeRO is about them.
#
# ## Third exercise: the largest batch
#
# In practice you rarely ask "how many bytes?". You ask "which batch can I run?". What the model states
# leave of a GPU, activations can take.
#
# > **Difficulty 2 of 5 · importance 4 of 5 · 8 minutes.** Write `largest_batch`: how many samples of 1024
# > tokens can each GPU take at once, without checkpointing? `gpu_bytes` is the memory of one GPU. The model
# > is GPT-2 with 1.5 billion parameters, in mixed precision. For activations count 12 tensors of 16 bits for
# > a layer, as above, and nothing else. A batch that fills the memory to the last byte fits. Return a whole
# > number, 0 if no sample fits.


# %%
# Third exercise
def largest_batch(gpu_bytes, world_size, stage):
    # your code: 48 layers, hidden size 1600
    return None


check_largest_batch(largest_batch)

# %% [markdown]
# Stuck? `check_largest_batch.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_largest_batch.solution()` prints a solution.
#
# So ZeRO can make training *faster*, too. The memory that a stage frees lets the batch of a GPU grow, and a
# GPU computes one large matrix product in less time than many small ones.
#
# ## One more thing
#
# Temporary buffers take memory, too. Some programs copy all gradients into one fp32 tensor, for example to
# compute their norm. For GPT-2 this tensor takes 6 GB. Lesson 03 sends the gradients in parts, so its
# temporary buffer is as large as one part.
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
# - Model states are 16 bytes per parameter: 2 + 2 + 12 in mixed precision, 4 + 4 + 8 in fp32. You measured
#   both.
# - The fp32 master weights are optimizer state, and stage 1 divides them, too. Two mistakes are frequent:
#   they are not divided, or GiB are called GB.
# - Data parallelism holds all 16Ψ on every rank. Stage 1 shards the optimizer state, stage 2 also the
#   gradients, stage 3 also the parameters.
# - GB is 10⁹ bytes, GiB is 2³⁰, and every such number follows a convention.
#
# **Next:** [02 · Collectives](02_collectives.ipynb): how the shards get to the ranks that need them.

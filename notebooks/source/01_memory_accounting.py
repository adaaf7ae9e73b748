# %% [markdown]
# # 01 · Where the memory goes
#
# > **30 minutes.** *You need:* PyTorch, Adam, and lesson 00's word "rank".
# >
# > *Afterwards you can* say from memory why a 1.5B-parameter model does not fit in 32 GB, compute the
# > bytes per GPU at each ZeRO stage, and spot the three usual mistakes in such a number.
# >
# > *Paper:* ZeRO, §3 and §5, Figure 1 and Table 1, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).

# %% [markdown]
# ## The question
#
# GPT-2 has 1.5 billion parameters. In 16-bit precision its weights take 3 GB. Yet training it on a GPU of
# 32 GB runs out of memory. Where do the other 29 GB go?
#
# We shall not look it up. We shall take a small model, train it for one step, and weigh every tensor.

# %%
import torch

import zerolab
from zerolab import memory
from zerolab.course import answer, choice, explore, predict, show, show_source
from zerolab.course.lessons.memory_accounting import check_bytes_per_gpu, figures, quiz
from zerolab.measure import storage_bytes

# %% [markdown]
# ## Weigh a model
#
# A tensor is a view of a *storage*, a run of bytes. Two tensors may share one, so bytes are counted by
# distinct storage. `storage_bytes` does that, and nothing else:

# %%
show_source(storage_bytes)

# %% [markdown]
# A small GPT, in plain fp32, and one step of Adam. How large are its parameters, its gradients and
# Adam's memory,
# **in bytes per parameter, all three together?**

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
for name, size in weights.items():
    print(f"{name:>14}: {size:>9,} bytes, {size / psi:6.3f} per parameter")
predict(my_guess, sum(weights.values()) / psi, quiz.BYTES_IN_FP32)

# %% [markdown]
# 4 + 4 + 8: the parameter, its gradient, and Adam's two moving averages, *m* (of the gradient) and *v*
# (of its square). The step counters, one small number for each *tensor*, weigh nothing beside them.
#
# These three, **parameters, gradients, optimizer state**, are what the paper calls *model states*. They
# depend on the model alone, whatever the batch.
#
# ## Weigh it in mixed precision
#
# Nobody trains large models in pure fp32: 16-bit matrix products run several times faster. So the
# weights that the forward and backward passes use become bf16, 2 bytes each. But a bf16 number has
# about 3 decimal digits, and an update is often smaller than the last of them. So the optimizer keeps
# its own fp32 copy, the **master weights**, updates *that*, and copies the result back.
#
# **Bytes per parameter, now?**

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
    master.grad = None  # a passing buffer: it can be made and freed one tensor at a time

# %%
half_params = list(half.parameters())
weights = weigh(half_params, [p.grad for p in half_params], adam)
weights["fp32 master weights"] = storage_bytes(masters)
for name, size in weights.items():
    print(f"{name:>20}: {size:>9,} bytes, {size / psi:6.3f} per parameter")
predict(my_guess, sum(weights.values()) / psi, quiz.BYTES_IN_MIXED_PRECISION)

# %% [markdown]
# 16 again! Halving the precision of weights and gradients saved 4 bytes, and the master weights cost 4.
# (Mixed precision is for speed, and for activations, to which we come below.)

# %%
show(figures.sixteen_bytes, height=1.7)

# %% [markdown]
# The paper writes Ψ for the number of parameters and **K = 12** for the optimizer's bytes per
# parameter. Model states take 2Ψ + 2Ψ + 12Ψ = **16Ψ bytes**. For GPT-2:

# %%
states = memory.model_states(1.5e9, world_size=1, stage=0)
print("16-bit weights:", memory.format_bytes(states.params_bytes))
print("model states:  ", memory.format_bytes(states.total_bytes))
print("the same in GiB:", memory.format_bytes(states.total_bytes, "GiB"))

# %% [markdown]
# 24 of the 32 GB are gone before the first sample. (1 GB is 10⁹ bytes, 1 GiB is 2³⁰. `nvidia-smi` prints MiB;
# papers mostly count GB. In this course each is called by its name.)
#
# ## 16 is a convention
#
# Other stacks count otherwise. Gradients that are accumulated in fp32 take 4 bytes and make it 18. SGD with
# momentum keeps one number, not two. When you read "x GB", ask which. The package makes you choose:

# %%
for name, precision in memory.PRECISIONS.items():
    total = memory.model_states(1, 1, 0, precision=name).total_bytes
    print(f"{name:>16}: {total:g} bytes.  {precision.meaning}")

# %% [markdown]
# ## Four GPUs do not help
#
# Lesson 00: ranks share nothing. In plain data parallelism each of N ranks holds all 16Ψ bytes. They
# hold *the same* 16Ψ bytes: after averaging, N identical copies of everything.
#
# That redundancy is ZeRO's whole subject, the *Zero Redundancy Optimizer*. If N ranks hold the same tensor,
# each can keep 1/N of it, its **shard**, and get the rest from the others when it needs it. What is sharded
# defines the stage:
#
# | | sharded over N ranks | bytes on each GPU |
# |---|---|---|
# | plain | nothing | 16Ψ |
# | stage 1 | optimizer state | 4Ψ + 12Ψ/N |
# | stage 2 | and gradients | 2Ψ + 14Ψ/N |
# | stage 3 | and parameters | 16Ψ/N |
#
# ## Exercise: 7 billion parameters on 8 GPUs
#
# **Predict first: at stage 1, how many GB of model states does each GPU hold?** Use pencil and paper.

# %%
my_guess = ...

# %%
held = memory.model_states(7e9, world_size=8, stage=1).total_bytes
predict(my_guess, held / 1e9, quiz.STAGE_1)

# %% [markdown]
# 58.7 is in many tutorials. It is two mistakes in one number: 4 + 4 + 8/8 bytes instead of 4 + 12/8, and GiB
# called GB.
#
# > **Difficulty 1 of 5 · 5 minutes.** Now for any stage: return the *bytes* of model states on each GPU
# > under mixed precision.


# %%
# Exercise
def bytes_per_gpu(psi, world_size, stage):
    # your code
    return None


check_bytes_per_gpu(bytes_per_gpu)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def bytes_per_gpu(psi, world_size, stage):
#     params = 2 * psi / (world_size if stage >= 3 else 1)
#     grads = 2 * psi / (world_size if stage >= 2 else 1)
#     optimizer = 12 * psi / (world_size if stage >= 1 else 1)
#     return params + grads + optimizer
# ```
# </details>
#
# The package's own says the same, with conventions as arguments:

# %%
show_source(memory.model_states, docstring=False)

# %% [markdown]
# ## The paper's Figure 1 and Table 1
#
# 7.5B parameters on 64 GPUs, as in the paper's first figure: 120, 31.4, 16.6 and 1.9 GB.

# %%
show(figures.stage_bars, height=2.8, model=7.5e9, gpus=64)

# %% [markdown]
# And its Table 1: GB per GPU at stages 1, 2 and 3, for three sizes of model. Hold it against the paper's.
# (There the 7.5B columns are rounded, and the decimals of the larger ones cut off: 513.5 is printed as 513.)

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
# Read one column from top to bottom. With more GPUs stage 1 shrinks, and then stops: its 4Ψ are on every GPU
# whatever N. Stage 3 alone has nothing that stays.

# %%
show(figures.per_gpu_curves, height=3.0, model=7.5e9)

# %% [markdown]
# ## Try it
#
# Find out: from how many GPUs on does a 7.5B model take less than 32 GB at stage 1? What is the
# smallest stage that gets 128B down to 32 GB on 64 GPUs? What do fp32 gradients (`mixed_fp32_grads`)
# cost there at stage 1, and what at stage 2?

# %%
explore(
    figures.stage_bars,
    height=2.8,
    model=choice([("1.5B", 1.5e9), ("7.5B", 7.5e9), ("13B", 13e9), ("128B", 128e9), ("1T", 1e12)], 7.5e9),
    gpus=choice([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], 64),
    stage=choice([0, 1, 2, 3], 1),
    precision=choice(list(memory.PRECISIONS), "mixed"),
)

# %% [markdown]
# <details><summary>Answers</summary>
#
# At stage 1, 30 GB stay on every GPU, and the rest falls below 2 GB beyond 45 GPUs: 64 on the slider.
# For 128B only stage 3 does it, with 32 GB to the byte, so that nothing is left for anything else. fp32
# gradients cost two more bytes each: 256 GB more on every GPU at stage 1, and a 64th of that, 4 GB, at
# stage 2, which shards them.
# </details>
#
# ## What else fills a GPU
#
# GPT-2's model states are 24 GB. It still does not train in 32. The rest are **activations**: what the
# forward pass keeps for the backward pass. They grow with the batch, and no stage of ZeRO shards them.
# A GPT layer keeps about 12 tensors of batch × sequence × hidden. **At batch 32 and 1024 tokens, with
# 48 layers of width 1600 in 16 bits: how many GB?**

# %%
my_guess = ...

# %%
kept = memory.activations(layers=48, hidden=1600, batch=32, seq=1024)
predict(my_guess, kept / 1e9, quiz.ACTIVATIONS)

# %% [markdown]
# **Checkpointing** keeps one tensor per block of layers, and computes the others again in the backward pass,
# for about a third more compute. Move the sliders: at which batch does GPT-2 fit, without and with it?

# %%
explore(
    figures.states_and_activations,
    height=1.9,
    batch=choice([1, 2, 4, 8, 16, 32, 64], 32),
    checkpointing=choice([("off", False), ("on", True)], False),
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# The model states leave 8 GB. Without checkpointing that is batch 4; with it, batch 16.
# </details>
#
# So activations have a remedy of their own, and after it *model states* are what is left: 24 of 32 GB,
# the part that ZeRO-DP takes on. (Temporary buffers come on top: one flat fp32 copy of all gradients is
# 6 GB here. Working in buckets avoids that; lesson 03.)
#
# ## Quiz
#
# A colleague plans 13B parameters on 16 GPUs of 32 GB at stage 2, and computes 2Ψ + 14Ψ/16 = 37.4 GB.
# "It will fit with SGD and momentum instead of Adam." Will it?
#
# - **a)** yes: K drops from 12 to 8
# - **b)** no: what stage 2 leaves whole is the problem
# - **c)** no: K stays the same

# %%
my_answer = ...
answer(my_answer, quiz.MOMENTUM_INSTEAD)

# %% [markdown]
# ## Summary
#
# - Model states are 16 bytes for each parameter: 2 + 2 + 12 in mixed precision, 4 + 4 + 8 in fp32. You
#   weighed both.
# - The fp32 master weights are optimizer state. Forgetting them is the commonest mistake in this arithmetic.
# - Plain data parallelism holds all 16Ψ on every rank. Stages 1, 2, 3 shard optimizer state, gradients,
#   parameters.
# - GB is 10⁹ bytes, GiB is 2³⁰, and a convention is part of every number.
#
# **Next:** [02 · Collectives](02_collectives.ipynb): how shards get to where they are needed.

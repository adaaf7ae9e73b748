# %% [markdown]
# # 08 · In the wild: DDP, FSDP2, DeepSpeed, and the cluster you have
#
# > **60 minutes, and 30 more for three exercises and the quiz.** *You need:* lessons 04 to 06, so that
# > "stage 2" tells you what a rank holds and sends.
# >
# > *Afterwards you can* say which stage an engine's settings mean and check it, choose stage, precision and
# > checkpointing for a cluster, say why 3Ψ between machines hurts and what helps, and read the log of a hang.
# >
# > *Paper:* ZeRO, §7 and §10, Figure 3, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).
# >
# > *Words:* the [glossary](../docs/glossary.md) explains the main ones.

# %% [markdown]
# ## The question
#
# You know what each stage shards. At work you meet other words: `fully_shard(model)`, `"stage": 2` in a JSON
# file, `fsdp_sharding_strategy: SHARD_GRAD_OP`. **Which stage is each of them? And does the engine
# do what that stage says?**
#
# Documentation says what an engine is meant to do. In this lesson you measure what it does. First eight
# engines train one model, side by side. Then you choose stage, precision and checkpointing for six
# clusters. Then a model that you trained sharded writes Python.

# %%
from functools import cache

import numpy as np
import torch
from torch.distributed import get_rank
from torch.distributed.fsdp import fully_shard  # noqa: F401, for the exercise

import zerolab
from zerolab import cost, data, models, simulation
from zerolab.bench.contestants import CONTESTANTS, UPDATES, absent, fully_sharded
from zerolab.bench.observe import Ledger, held_bytes, storage_bytes
from zerolab.course import answer, choice, explore, figure, number, predict, show, show_source, slider
from zerolab.course.lessons.in_the_wild import check_choices, check_json, check_shard, clusters, figures, quiz
from zerolab.course.look import COLOURS, INK, PALE, QUIET, magnify
from zerolab.parity.reference import reference

# %% [markdown]
# ## Eight engines, one model
#
# The model is a small GPT. All engines begin with the same weights, see the same text on four ranks, and use
# Adam in fp32 with the same settings. `zerolab.bench` has them ready, each written as its documentation says.
# This is all that `fully_shard` takes, PyTorch's engine of today, which is also called *FSDP2*:

# %%
show_source(fully_sharded)

# %% [markdown]
# Two things are measured, and neither asks the engine:
#
# - `held_bytes` looks at the live storages of parameters, gradients and optimizer state.
# - `Ledger` notes every collective that is called, with its bytes. It counts as the paper does: a
#   reduce-scatter, an all-gather or a broadcast of Ψ parameters is Ψ, and an all-reduce is 2Ψ.
#
# There is one exception. zerolab sends from a thread of its own, where the ledger sees nothing. So its rows
# come from its own census and trace, which lessons 04 to 06 compared with formulas.

# %%
RANKS, STEPS = 4, 3
DATA = data.NextByte(data.text(), context=32, batch_size=4)
KNOBS = {"kept": {"reshard_after_forward": False}, "hybrid": {"nodes": 2}}


def fresh_model():
    return models.GPT(width=64, depth=4, heads=4, context=32)


def batch(step, rank=None):
    parts = DATA.batch(step, get_rank() if rank is None else rank)
    return tuple(part.to(zerolab.device()) for part in parts)


# %%
def build(name):
    torch.manual_seed(0)
    engine = CONTESTANTS.get(name, fully_sharded)
    return engine(fresh_model().to(zerolab.device()), UPDATES["exact"], **KNOBS.get(name, {}))


def train(name):
    engine = build(name)
    for step in range(STEPS):
        with Ledger() as ledger:
            engine.backward(engine.loss(*batch(step)))
            engine.update()
        held = held_bytes(engine)  # gradients are still there
        engine.clear()
    return held, ledger.bytes_by(engine), engine.read()


# %% [markdown]
# ## Predict: ZeroRedundancyOptimizer
#
# PyTorch has had an optimizer of stage 1 for years: `ZeroRedundancyOptimizer`. You use it together with DDP,
# DistributedDataParallel. DDP all-reduces the gradients. Then each rank updates the parameters that are its
# own, and broadcasts them to the others.
#
# **On four ranks, in fp32 (4 + 4 + 8 bytes): how many bytes per parameter does a rank hold, on average?**

# %%
my_guess = ...

# %%
predict(my_guess, quiz.HELD, quiz.HELD_BY_REDUNDANCY_OPTIMIZER)

# %% [markdown]
# Lesson 04's stage 1 moves 2Ψ, not one byte more than data parallelism. **How many Ψ does this one move in a
# step, by the paper's count?**

# %%
my_guess = ...

# %%
predict(my_guess, quiz.MOVED, quiz.MOVED_BY_REDUNDANCY_OPTIMIZER)

# %% [markdown]
# <details><summary>Answer</summary>
#
# An all-reduce is 2Ψ already, and the broadcasts of all updated parameters are Ψ more. Lesson 04 said that 3Ψ
# is wrong for stage 1: the all-reduce gives every rank *all* sums, and a rank needs only its own. This
# optimizer comes from FairScale, whose page on it names the
# [additional communication](https://fairscale.readthedocs.io/en/latest/deep_dive/oss_sdp_fsdp.html).
# </details>
#
# One more. `fully_shard` frees the parameters of a unit after its forward, and gathers them again for
# backward: stage 3. With `reshard_after_forward=False` they stay until backward has used them, which saves
# the second gather. **How many bytes per parameter does a rank hold after the step, before the gradients
# are cleared?**

# %%
my_guess = ...

# %%
predict(my_guess, quiz.AT_REST, quiz.KEPT_AFTER_FORWARD)

# %% [markdown]
# It moves what stage 2 moves, 2Ψ. Between forward and backward it holds all parameters, as stage 2 does, and
# also its own shard. But zerolab's stage 2 gathers at the end of a step, and `fully_shard` gathers at the
# beginning of the next one. So between steps it holds only its shard.
#
# ## Run it
#
# Here are the predictions for all eight, in bytes per parameter, and in Ψ for the messages. The root unit
# stays whole from forward to backward, so stage 3 moves 3Ψ − Ψ_root (lesson 06). "ZeroRedundancy" stands for
# ZeroRedundancyOptimizer with DDP, and "kept" for `reshard_after_forward=False`.

# %%
with torch.device("meta"):
    blocks = sum(p.numel() for p in fresh_model().blocks.parameters())
    psi = sum(p.numel() for p in fresh_model().parameters())
three = 3 - (psi - blocks) / psi  # 3Ψ − Ψ_root, in Ψ
predicted = {  # engine: (its name in figures, parameters, gradients, optimizer state, Ψ moved)
    "ddp": ("DDP", 4, 4, 8, 2),
    "ddp+zero": ("ZeroRedundancy", 4, 4, 2, 3),
    "kept": ("fully_shard, kept", 1, 1, 2, 2),
    "fully_shard": ("fully_shard", 1, 1, 2, three),
    "zerolab-0": ("zerolab stage 0", 4, 4, 8, 2),
    "zerolab-1": ("zerolab stage 1", 4, 4, 2, 2),
    "zerolab-2": ("zerolab stage 2", 4, 1, 2, 2),
    "zerolab-3": ("zerolab stage 3", 1, 1, 2, three),
}


# %%
def train_all(names):
    adam = {"lr": 1e-4, **UPDATES["exact"]}
    alone, _ = reference(fresh_model, batch, RANKS, torch.optim.Adam, STEPS, **adam)
    found = {}
    for name in names:
        held, moved, weights = train(name)
        same = all(torch.equal(weights[each], alone[each]) for each in alone)
        far = max((weights[each] - alone[each]).abs().max().item() for each in alone)
        found[name] = (*(size / psi for size in held), moved / (4 * psi), same, far)
    return found


ranks = zerolab.launch(train_all, RANKS, list(predicted))

# %%
measured = {}
print(f"{'':19}{'p + g + o, bytes':16}{'Ψ moved':>9}{'as predicted':>14}")
for name, (label, *expected) in predicted.items():
    found = zip(*(rank[name][:4] for rank in ranks), strict=True)
    measured[name] = [sum(each) / RANKS for each in found]
    sizes = " + ".join(f"{size:g}" for size in measured[name][:3])
    right = np.allclose(measured[name], expected, rtol=1e-9)
    print(f"{label:19}{sizes:16}{measured[name][3]:>9.2f}{right!s:>14}")

# %% [markdown]
# All eight are as predicted: the means over the ranks, to the byte. (ZeroRedundancyOptimizer gives whole
# parameters to ranks, so its ranks differ a little.) In the figure the marks are the predictions.


# %%
fig = figure(height=3.3)
ax, start = fig.subplots(), np.zeros(len(measured))
names = [name for name, *_ in predicted.values()]
for place, category in enumerate(("parameters", "gradients", "optimizer state")):
    sizes = np.array([found[place] for found in measured.values()])
    bars = ax.barh(names, sizes, left=start, color=COLOURS[category], label=category)
    start += sizes
said = [f"{b:.3g}, moves {each[3]:.3g} Ψ" for b, each in zip(start, measured.values(), strict=True)]
ax.bar_label(bars, said, padding=7, size=9)
ax.plot([sum(sizes) for _, *sizes, _ in predicted.values()], names, "|", color=INK, markersize=16)
ax.set(xlabel="bytes per parameter on a rank", xlim=(0, 24), ylim=(len(names) - 0.5, -0.5))
rows = "; ".join(map(": ".join, zip(names, said, strict=True)))
show(fig, f"Bytes per parameter that a rank holds, and Ψ that it moves in a step. {rows}.")

# %% [markdown]
# Compare the first two rows: ZeroRedundancyOptimizer saves memory and sends more. Compare it with zerolab's
# stage 1: that saves as much and sends no more than DDP. FSDP2's `fully_shard` and zerolab's stage 3 are the
# same algorithm in two programs.
#
# ZeroRedundancyOptimizer assigns whole parameters to ranks, the largest first. So ranks hold different
# amounts. With one huge embedding they would differ more:

# %%
shares = [rank["ddp+zero"][2] for rank in ranks]
print("optimizer state, bytes per parameter of the model, by rank:", *(f"{share:.3f}" for share in shares))
print(f"most and least differ by {max(shares) / min(shares) - 1:.1%}")

# %% [markdown]
# ## Do they train the same model?
#
# The reference is one process with plain Adam, which adds up the ranks' gradients in rank order. zerolab adds
# in the same order. The others add in the order of their own algorithm, and a floating-point sum depends on
# its order. **How many of the eight end with exactly the bits of the single process?**

# %%
my_guess = ...

# %%
same = {name: all(rank[name][4] for rank in ranks) for name in predicted}
rows = [f"{label:18} same bits: {same[name]}" for name, (label, *_) in predicted.items()]
predict(my_guess, sum(same.values()), quiz.SAME_BITS, *rows)

# %% [markdown]
# Where bits differ, how far apart are the parameters? Each step of Adam moves a parameter by about the
# learning rate, 10⁻⁴, and the engines took three steps. Call two models close if no parameter differs by 10⁻⁵
# or more, a tenth of a step. **How many of the eight models are close to that of the single process?**

# %%
my_guess = ...

# %%
far = {name: max(rank[name][5] for rank in ranks) for name in predicted}
rows = [f"{label:18} less than 10⁻⁵ apart: {far[name] < 1e-5}" for name, (label, *_) in predicted.items()]
predict(my_guess, sum(each < 1e-5 for each in far.values()), quiz.CLOSE, *rows)

# %% [markdown]
# All train the same model, up to rounding. If you compare two engines and find that they are *not* this
# close, look for a lost remainder, a sum where a mean was meant, or a setting with a different default. The
# differences in bits are no error. They matter when you search for one: equal bits tell you at once that
# nothing changed.
#
# (These bits are gloo's. Over NCCL, with a GPU for each rank, the order of a sum is NCCL's, and with more
# than two ranks zerolab is close, too, not equal. Lessons 03 to 07 call `compute_deterministically()`. Then
# zerolab adds in the order of the ranks over NCCL as well.)
#
# ## What no storage in Python shows
#
# DDP copies gradients into *buckets* and all-reduces those. The buckets are in C++. A communication hook,
# which DDP offers to those who want to change what is sent, sees them. **How many bytes per parameter do
# DDP's gradients take, buckets included?**

# %%
my_guess = ...


# %%
def gradients_and_buckets(view):
    model, buckets = fresh_model().to(zerolab.device()), []
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)

    def look(_, bucket):
        buckets.append(bucket.buffer())
        result = torch.futures.Future()
        result.set_result(bucket.buffer())  # a real hook would all-reduce it
        return result

    wrapped.register_comm_hook(None, look)
    for step in range(2):  # DDP orders its buckets anew after the first
        buckets.clear()
        wrapped(*batch(step)).backward()
    return storage_bytes([*(p.grad for p in model.parameters()), *buckets]) / psi


# %%
plain, views = (zerolab.launch(gradients_and_buckets, 2, view)[0] for view in (False, True))
row = f"by default {plain:.2f} bytes per parameter, with gradient_as_bucket_view=True {views:.2f}"
predict(my_guess, plain, quiz.DDP_GRADIENTS, row)

# %% [markdown]
# One keyword saves 4Ψ bytes: of the 20Ψ that this rank held with Adam in fp32, 16Ψ remain. It makes each
# gradient a view of its bucket.
# [Its documentation](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html)
# says that it can save as much as the gradients' size, and it is off by default.
#
# ## DeepSpeed
#
# DeepSpeed is ZeRO by the authors of the paper, and the paper's stage 2 moves 2Ψ. **How many Ψ does
# DeepSpeed's stage 2 move in a step, if you set nothing but the stage?**

# %%
my_guess = ...

# %%
predict(my_guess, quiz.MOVED_BY_DEEPSPEED, quiz.DEEPSPEED_DEFAULT)

# %% [markdown]
# Where DeepSpeed is installed, the next cell measures it in the same way. (On its first run DeepSpeed
# compiles code for CPUs, which takes minutes.)

# %% tags=["nbval-ignore-output"]
if reason := absent("deepspeed-1"):
    print(f"DeepSpeed is {reason} here, so this cell measures nothing.")
else:
    theirs = zerolab.launch(train_all, RANKS, [f"deepspeed-{stage}" for stage in (1, 2, 3)])[0]
    for name, (params, _, state, moved, _, far) in theirs.items():
        held = f"parameters {params:.2f} and Adam's m and v {state:.2f} bytes per parameter"
        print(f"{name}: {held}, {moved:.2f}Ψ moved, {far:.0e} apart at most")

# %% [markdown]
# DeepSpeed 0.19.8 gave this on four CPU ranks (torch 2.13, gloo). Its settings are in
# `zerolab/bench/contestants.py`: they set the stage, and leave its messages at their defaults.
#
# | | parameters held | m and v held | Ψ moved |
# |---|---|---|---|
# | stage 1 | 4.00 | 2.00 | **3.00** |
# | stage 2 | 4.00 | 2.00 | **3.00** |
# | stage 3 | **4.00** | 2.00 | **2.00** |
#
# Every bold number differs from the paper's stage. No computation is wrong: each comes from a default, and
# another setting changes it:
#
# - `use_multi_rank_bucket_allreduce` is true: stages 1 and 2 *all-reduce* a bucket, which is 2Ψ, and
#   all-gather the parameters afterwards.
#   ([source](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/zero/config.py))
# - `stage3_param_persistence_threshold` is 10⁵: parameters with fewer elements are not sharded. All
#   parameters of our small model are below that. So stage 3 sharded no parameter at all, and moved what stage
#   2 should.
#   ([documentation](https://www.deepspeed.ai/docs/config-json/))
#
# Do not rely on an engine's name for a stage. Measure what it sends.
#
# ## The same things under other names
#
# A row has the words of one engine. A column has the words of all engines for one stage, so go down the
# column to translate.
#
# | | stage 1 | stage 2 | stage 3 |
# |---|---|---|---|
# | zerolab | `stage=1` | `stage=2` | `stage=3` |
# | [DeepSpeed's JSON][json], `"zero_optimization"` | `"stage": 1` | `"stage": 2` | `"stage": 3` |
# | PyTorch FSDP2, [`fully_shard`][fsdp2] | | `reshard_after_forward=False` | `=True` |
# | PyTorch FSDP1, [`ShardingStrategy`][fsdp1] | | `SHARD_GRAD_OP` | `FULL_SHARD` |
# | PyTorch, beside DDP | [`ZeroRedundancyOptimizer`][zro] | | |
# | [Accelerate's YAML][accelerate], DeepSpeed | `zero_stage: 1` | `zero_stage: 2` | `zero_stage: 3` |
# | the same, `fsdp_version: 2` | | `fsdp_reshard_after_forward: false` | `true` |
# | the same, `fsdp_version: 1` | | `fsdp_sharding_strategy: SHARD_GRAD_OP` | `FULL_SHARD` |
# | [FairScale][fairscale] | `OSS` | `OSS` + ShardedDDP | `FullyShardedDataParallel` |
# | [Ratex][ratex], on RAF | `zero_opt_level = 1` | `zero_opt_level = 2` | |
# | TensorFlow and XLA | [weight-update sharding][xla] | | |
#
# Stage 0 is DDP, `"stage": 0`, or `NO_SHARD`. FairScale's class for ShardedDDP is `ShardedDataParallel`.
# `reshard_after_forward=False` keeps the gathered parameters from forward to backward, as stage 2 does.
# Between two steps they are sharded all the same, as above. Ratex runs PyTorch programs on the compiler RAF.
# In TensorFlow and XLA the compiler shards the update. A setting of that name is in Huawei's [TF
# Adapter][npu]: `NPUDistributedOptimizer(..., is_weight_update_sharding=True)`.
#
# And the settings around the stage:
#
# | | zerolab | DeepSpeed's JSON | FSDP2 |
# |---|---|---|---|
# | bf16, fp32 masters | `precision="mixed"` | `"bf16": {"enabled": true}` | `MixedPrecisionPolicy` |
# | one message is | a unit, `units=` | `reduce_bucket_size` | a call of `fully_shard` |
# | gather ahead | `prefetch=` | `stage3_prefetch_bucket_size` | `set_modules_to_forward_prefetch` |
# | do not reduce | `no_sync()` | `gradient_accumulation_steps` | `set_requires_gradient_sync` |
# | shard within one machine | `shard_size=` | `zero_hpz_partition_size` | a mesh of two dimensions |
# | small ones stay whole | no setting | `stage3_param_persistence_threshold` | |
#
# (With `gradient_accumulation_steps` DeepSpeed reduces once a step at stages 0 and 1. At stages 2 and 3 it
# reduces every micro-batch, and its own `no_sync()` raises an error.)
#
# [json]: https://www.deepspeed.ai/docs/config-json/
# [fsdp2]: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
# [fsdp1]: https://docs.pytorch.org/docs/stable/fsdp.html
# [zro]: https://docs.pytorch.org/docs/stable/distributed.optim.html
# [accelerate]: https://huggingface.co/docs/accelerate/concept_guides/fsdp1_vs_fsdp2
# [fairscale]: https://fairscale.readthedocs.io/en/latest/deep_dive/oss_sdp_fsdp.html
# [ratex]: https://github.com/awslabs/ratex/blob/main/docs/zero_1.md
# [xla]: https://arxiv.org/abs/2004.13336
# [npu]: https://www.hiascend.com/document/detail/en/TensorFlowCommercial/850/API/tfadapter1x/tfmigr1_tfadapi_0056.html
#
# ## Exercise: stage 2 with `fully_shard`
#
# > **Difficulty 2 of 5 · importance 4 of 5 · 8 minutes.** Shard `model` in place so that a step moves 2Ψ,
# > that each block is gathered and reduced on its own, as one unit, and that every parameter is sharded
# > between two steps. The model is a GPT; its blocks are in `model.blocks`. Pass `mesh=mesh` to every call,
# > and change nothing else in the model.
# >
# > The check trains your model on two ranks and looks at its messages, its parameters and its gradients. It
# > demands the bytes and the units of stage 2, which give the peak too, so there are no targets.


# %%
# Exercise
def shard(model, mesh): ...  # with fully_shard(module, mesh=mesh, reshard_after_forward=...)


check_shard(shard)

# %% [markdown]
# Stuck? `check_shard.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and `check_shard.solution()`
# prints a solution.
#
# ## Second exercise: the same in DeepSpeed's JSON
#
# > **Difficulty 1 of 5 · importance 3 of 5 · 4 minutes.** Return the settings as a dictionary: ZeRO stage 2,
# > bf16, and a batch of 64 over 4 GPUs, so that each GPU takes its 16 samples as 2 micro-batches of 8. The
# > batch has three names: `train_batch_size` (of all GPUs), `train_micro_batch_size_per_gpu` and
# > `gradient_accumulation_steps`. Give at least two of them.
# > DeepSpeed need not be installed: the check reads the settings as DeepSpeed does.


# %%
# Second exercise
def deepspeed():
    return {}


check_json(deepspeed)

# %% [markdown]
# Stuck? `check_json.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and `check_json.solution()`
# prints a solution.
#
# ## Nodes
#
# So far all links had the same speed. In a cluster they do not. GPUs of one **node** (one machine) are
# joined by NVLink or PCIe. Nodes are joined by Ethernet or InfiniBand, which all GPUs of a node share. An
# H100 sends 450 GB/s over NVLink. A node with 100 Gbit/s Ethernet sends 12.5 GB/s, for eight GPUs together.
#
# A ring through all GPUs is as fast as its slowest link. `zerolab.cost` has the **α–β model** of it: α
# seconds for each message in a row, and β seconds for each byte, where 1/β is the bandwidth of the slowest
# link.

# %%
show_source(cost.collective_seconds, docstring=False)

# %% [markdown]
# So with one micro-batch stages 0 to 2 send 2Ψ over the Ethernet, and stage 3 sends 3Ψ. **Hybrid sharding**
# sends less there: shard within a node, and keep one copy in each node.

# %%
fig = figure(height=3)
show(fig, figures.topology(fig))

# %% [markdown]
# Stage 3's gathers and reduce-scatters stay inside a node. Then each GPU all-reduces the gradients of *its
# shard* with the GPUs of the other nodes that have the same shard. The price is memory: 16Ψ divided by the
# GPUs of a node, not by all GPUs.
#
# `fully_shard` does it if its mesh has two dimensions. Let our four ranks be two nodes of two. The ledger
# knows the ranks of each message. **How many Ψ does a rank move between nodes?**

# %%
my_guess = ...


# %%
def by_link(name):
    engine, gpus_per_node = build(name), RANKS // 2
    with Ledger() as ledger:
        engine.backward(engine.loss(*batch(0)))
        engine.update()
    moved = {"within nodes": 0.0, "between nodes": 0.0}
    for message in ledger.sent:
        nodes = {rank // gpus_per_node for rank in message.ranks}
        moved["between nodes" if len(nodes) > 1 else "within nodes"] += message.logical_bytes / (4 * psi)
    return moved, sum(held_bytes(engine)) / psi


# %%
found = {name: zerolab.launch(by_link, RANKS, name)[0] for name in ("fully_shard", "hybrid")}
rows = []
for name, (moved, held) in found.items():
    split = ", ".join(f"{size:.2f}Ψ {where}" for where, size in moved.items())
    rows.append(f"{name:12} {split}; {held:.1f} bytes per parameter")
predict(my_guess, found["hybrid"][0]["between nodes"], quiz.ACROSS_NODES, *rows)

# %% [markdown]
# The rows count what one rank sends. What leaves a *node*? Stage 3's ring goes through all four GPUs, and one
# of a node's two GPUs sends to the other node, so its 3Ψ leave the node once. With hybrid sharding each of
# the two GPUs all-reduces its half with the other node: 2 · 1Ψ = 2Ψ. With one micro-batch that is all it
# saves. With M micro-batches it is much more. FSDP2 can all-reduce between nodes after the last micro-batch
# only (`set_requires_all_reduce(False)` before the others). Then 2Ψ leave a node in a step. Without hybrid
# sharding stage 3 sends 3MΨ out of it.
#
# Move the sliders: eight nodes of eight A100 train 7B parameters. **Where do the lines cross, and what does
# accumulation do?**


# %%
def hybrid_seconds(cluster, micro_batches):
    layers, alpha = cluster.shape.layers, clusters.LATENCY_SECONDS
    payload, link = 2 * cluster.shape.psi / layers, (alpha, cluster.link_bytes_per_second)
    inside = ["all_gather", "all_gather", "reduce_scatter"]
    passes = [cost.collective_seconds(payload, cluster.gpus_per_node, name, *link) for name in inside]
    network = (alpha, cluster.network_bytes_per_second)
    across = cost.collective_seconds(payload, cluster.nodes, "all_reduce", *network)
    return layers * (micro_batches * sum(passes) + across)


def seconds_on(cluster, engine, micro_batches):
    if engine == "hybrid":
        return hybrid_seconds(cluster, micro_batches)
    return clusters.message_seconds(cluster, int(engine[-1]), "mixed", micro_batches)


# %%
def network_matters(fig, micro_batches, nodes):
    ax, Gbits = fig.subplots(), [10, 25, 50, 100, 200, 400, 800, 1600, 3200]
    rates = [Gbit * clusters.GBIT for Gbit in Gbits]
    wired = [clusters.Cluster("", "A100-40GB", nodes, 8, rate, "llama2-7b", 1) for rate in rates]
    lines = {}
    for engine in ("stage 1", "stage 2", "stage 3", "hybrid"):
        lines[engine] = [seconds_on(cluster, engine, micro_batches) for cluster in wired]
        ax.loglog(Gbits, lines[engine], label=engine)
    ax.set(xlabel="Gbit/s of a node's network", ylabel="seconds a step", ylim=(0.03, 1000))
    ax.set(xticks=Gbits[::2], xticklabels=Gbits[::2], yticks=[0.1, 1, 10, 100])
    ax.set(yticklabels=["0.1", "1", "10", "100"])  # as plain text, which is drawn faster than powers of ten
    said = ", ".join(f"{engine} {line[3]:.2g}" for engine, line in lines.items())
    many = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''} on {nodes} nodes"
    return f"Seconds of messages in a step of {many}, by the model. At 100 Gbit/s: {said}."


# %%
explore(network_matters, height=3, micro_batches=slider(1, 16, 1), nodes=choice([2, 4, 8, 16, 32], 8))

# %% [markdown]
# <details><summary>Answer</summary>
#
# With one micro-batch stages 1 and 2 and hybrid sharding lie almost on one line, and stage 3 is 1.5 times as
# high. On eight nodes the line of hybrid sharding crosses that of stages 1 and 2 between 200 and 400 Gbit/s.
# At the right, where a node's network is as fast as NVLink, it meets that of stage 3: there hybrid sharding
# only costs memory. With eight micro-batches stage 1 under `no_sync()` still moves 2Ψ between nodes, and so
# does hybrid sharding with one all-reduce at the end; stage 2 has 9Ψ, and stage 3 has 24Ψ. Then hybrid
# sharding is far below stage 3, and crosses stage 2 only beyond 800 Gbit/s.
# </details>
#
# DeepSpeed's `zero_hpz_partition_size` does a part of this: it keeps a second shard of the parameters in each
# node, so that the gather for backward stays inside. In zerolab hybrid sharding is `stage=3, shard_size=8`
# for nodes of eight GPUs.
#
# ## What overlap hides
#
# The α–β model counts messages only. An engine sends *while* it computes. If all of that went on side by
# side, a step would take as long as the longer of the two.
#
# `zerolab.simulate` says how near an engine comes to this. The engine runs the step of one rank on tensors
# without contents, and every operator and message is recorded. Then the recording is played on a cluster:
# each operator waits for the one before it and for the messages that it needs. `record` and `play` are the
# two halves, so a recording is made once and played at every rate. Here are four recordings, for 6.7 billion
# parameters on 64 GPUs:

# %%
SETTINGS = {"stage 1": (1, None), "stage 2": (2, None), "stage 3": (3, None), "hybrid": (3, 8)}


@cache
def recorded(engine):
    build = lambda: models.GPT(vocab=32_000, width=4096, depth=32, heads=32, context=4096)
    tokens = torch.zeros(1, 4096, dtype=torch.long, device="meta")
    stage, shard_size = SETTINGS[engine]
    options = {"precision": "mixed", "shard_size": shard_size, "inputs": lambda: (tokens, tokens)}
    return simulation.record(build, 64, stage, **options)


for engine in SETTINGS:
    print(f"{engine} is recorded, with {len(recorded(engine).messages)} messages")

# %% [markdown]
# On eight nodes of eight A100 with 100 Gbit/s, a step computes for 2.2 seconds: 0.9 in the forward pass and
# 1.3 in the backward pass. Stage 2's messages are under way for 2.2 seconds, too: 1.1 for the gathers, which
# the next forward pass needs one by one, and 1.1 for the reductions, which backward starts one by one. (The
# last reductions have no computation beside them. Allow 0.1 seconds for that.) **How many seconds of a step
# does stage 2 still wait for messages?** A guess within 15 % is right.

# %%
my_guess = ...


# %%
@cache
def simulated(engine, Gbit):
    eight_nodes = zerolab.Cluster(
        "8 nodes of 8 A100",
        flops_per_second=clusters.USE * clusters.PEAK_FLOPS["A100-40GB"],
        memory_bytes_per_second=1.5e12,
        gpus_per_node=8,
        inside_bytes_per_second=300e9,
        between_bytes_per_second=Gbit * clusters.GBIT,
    )
    return simulation.play(recorded(engine), eight_nodes, 64)


# %%
steps = {engine: simulated(engine, 100) for engine in SETTINGS}
waits = {engine: round(step.exposed_seconds, 2) for engine, step in steps.items()}
rows = [f"{engine:8} waits {waits[engine]:.2f} of {step.seconds:.2f} s" for engine, step in steps.items()]
predict(my_guess, waits["stage 2"], quiz.WAITS, *rows)

# %% [markdown]
# Stage 2's gathers take 1.1 seconds. They can only go on beside the next forward pass, which is shorter. Its
# reductions take another 1.1 seconds. They go on beside the backward pass, which is longer, and only the last
# of them are waited for.
#
# Hybrid sharding sends as many bytes between nodes, and waits longer. **Why?** The upper bars are the
# computation, and their gaps are the waits. The lower bars are the messages. Move the slider, too: from which
# rate on does the choice no longer matter?


# %%
def bars(ax, place, intervals, begin, **looks):
    joined = []  # what begins as the one before it ends is one bar
    for each in sorted(intervals, key=lambda each: each.start):
        if joined and each.start - joined[-1][1] < 1e-3:
            joined[-1][1] = max(joined[-1][1], each.stop)
        else:
            joined.append([each.start, each.stop])
    # One thick line with gaps (nan): matplotlib draws it faster than a rectangle for each interval.
    seconds = [end for start, stop in joined for end in (start - begin, stop - begin, np.nan)]
    ax.plot(seconds, [place] * len(seconds), linewidth=10, solid_capstyle="butt", marker="", **looks)


# %%
def overlap(fig, Gbit):
    ax, steps = fig.subplots(), {engine: simulated(engine, Gbit) for engine in SETTINGS}
    for row, step in enumerate(steps.values()):
        computing = [each for each in step.intervals if each.computes]
        sending = [each for each in step.intervals if not each.computes]
        begin, named = computing[0].start, row == 0
        bars(ax, row - 0.18, computing, begin, color=QUIET, label="computes" if named else None)
        bars(ax, row + 0.18, sending, begin, color=PALE, label="messages" if named else None)
        ax.text(1.02 * step.seconds, row, f"{step.seconds:.2f} s", va="center")
    ax.set(xlabel="seconds", xlim=(0, 1.2 * max(step.seconds for step in steps.values())))
    ax.locator_params(axis="x", nbins=5)
    ax.set(yticks=range(len(steps)), yticklabels=list(steps), ylim=(len(steps) - 0.5, -0.5))
    said = ", ".join(f"{engine} {step.exposed_seconds:.2f}" for engine, step in steps.items())
    return f"Seconds that a simulated step waits for messages at {Gbit} Gbit/s: {said}."


# %%
RATES = [25, 50, 100, 200, 400, 800]
for engine in SETTINGS:
    for Gbit in RATES:
        simulated(engine, Gbit)  # @cache keeps it: the slider then has nothing to simulate
explore(overlap, height=3, Gbit=choice(RATES, 100))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Hybrid sharding all-reduces gradients between nodes, and gradients come in the backward pass. So both halves
# of that all-reduce, 2Ψ, have to end with the backward pass. Stage 2 has the backward pass for one half, and
# the next forward pass for the other. From 200 Gbit/s on, each of the four waits less than a tenth of a
# second, and memory decides.
# </details>
#
# ## Six clusters
#
# Three tools judge a choice:
#
# - `./zero plan` computes model states and activations.
# - `rehearse` runs the engine, and also counts what it holds for a moment: whole units, and gradients that
#   are being reduced.
# - The α–β model gives the seconds of messages, here with α = 10 µs. For the computation we count 6
#   operations per parameter and token (8 with checkpointing), at 40 % of the GPU's peak. The peak is that
#   of 16-bit products, and fp32 counts as 8 times slower. Messages and computation do not overlap here.
#
# 10 µs and 40 % are examples. Use the seconds to compare choices, not to predict a run.

# %%
for name, c in clusters.CLUSTERS.items():
    network = f", {c.network_bytes_per_second / clusters.GBIT:,.0f} Gbit/s a node" if c.nodes > 1 else ""
    gpus = f"{c.nodes} × {c.gpus_per_node} {c.gpu}, {c.link_bytes_per_second / 1e9:g} GB/s inside{network}"
    print(f"{name:10}  {gpus}\n{'':10}  {c.model}, {c.batch} × {c.shape.seq} tokens on each GPU")

# %% [markdown]
# The next cell rehearses a step for each cluster, stage and precision, which takes about ten seconds. After
# that the sliders need not wait.

# %%
print(clusters.rehearse_every_choice(), "steps are rehearsed")

# %% [markdown]
# Try each cluster. Which is the smallest stage that fits, without checkpointing and with it? What do the
# seconds say? (Precision is `fp32`, `mixed`, which is bf16, or `mixed_fp16`, which is fp16 with a *loss
# scale*: a factor on the loss, so that small gradients do not become zero in fp16.)


# %%
def sizes_on(cluster, stage, precision, recompute):
    asked = clusters.question(cluster, precision, recompute)
    states = asked.states(stage)
    passing = clusters.passing_bytes(cluster.model, cluster.gpus, stage, asked.precision)
    sizes = (states.params_bytes, states.grads_bytes, states.optimizer_bytes, asked.activation_bytes, passing)
    return dict(zip((*COLOURS, "for a moment"), (size / 1e9 for size in sizes), strict=True))


# %%
def verdict_on(cluster, stage, precision, recompute, GB):
    fits = "fits" if clusters.fits(cluster, stage, precision, recompute) else "does not fit"
    memory = f"{cluster.name}, {cluster.model}: {GB:.1f} GB, {fits} into {cluster.memory_bytes / 1e9:.0f}"
    if precision == "mixed" and cluster.gpu in clusters.WITHOUT_BF16:
        return f"{memory}\nbut a {cluster.gpu} has no bf16: choose mixed_fp16"
    compute = clusters.compute_seconds(cluster, precision, recompute)
    messages = clusters.message_seconds(cluster, stage, precision)
    return f"{memory}\nby the model {compute:.2f} s compute + {messages:.2f} s messages"


# %%
def on_a_cluster(fig, cluster, stage, precision, checkpointing):
    chosen, ax, left = clusters.CLUSTERS[cluster], fig.subplots(), 0
    for name, size in sizes_on(chosen, stage, precision, checkpointing == "on").items():
        looks = {} if name in COLOURS else {"edgecolor": QUIET, "hatch": "//"}
        ax.barh(0, size, left=left, label=name, color=COLOURS.get(name, PALE), **looks)
        left += size
    room = clusters.ROOM * chosen.memory_bytes / 1e9
    ax.axvline(room, color=INK, linestyle="--")
    ax.set(yticks=[], xlabel="GB on each GPU (dashed: 95 % of its memory)", xlim=(0, 1.1 * max(left, room)))
    title = verdict_on(chosen, stage, precision, checkpointing == "on", left)
    ax.set_title(title)
    magnify(ax)
    return f"{title}. Stage {stage}, precision {precision}, checkpointing {checkpointing}."


# %%
explore(
    on_a_cluster,
    height=2.4,
    cluster=choice(list(clusters.CLUSTERS), "1,024 GPUs"),
    stage=slider(0, 3, 3),
    precision=choice(clusters.OFFERED_PRECISIONS, "mixed"),
    checkpointing=choice(["off", "on"], "off"),
)

# %% [markdown]
# The figure first shows the largest cluster. 175B parameters in 16Ψ/1,024 bytes are 2.7 GB. With 58 GB of
# activations the plan needs 60.7 of 80 GB. But a unit has 1.8 billion parameters. Two whole units and the
# gradients of two are 4 × 3.6 GB. The root and its gradient are 2 × 2.5 GB. The gradient of one matrix, which
# autograd has just stored, is 1.2 GB. Together these are 20.7 GB more, and the model does not fit. Only the
# rehearsal shows this.
#
# Which choice is the fastest that fits? You find out in the exercise.
#
# ## Third exercise: choose
#
# > **Difficulty 3 of 5 · importance 5 of 5 · 12 minutes.** Choose (stage, precision, checkpointing) for each
# > cluster. A choice must fit: states, activations and what is held for a moment take at most 95 % of the
# > GPU's memory. No other choice that fits may be faster by more than 1 % in the model. (The check computes
# > every choice for every cluster, which takes up to half a minute.) Precision is `"mixed"`, `"mixed_fp16"`
# > or `"fp32"`, and checkpointing is `True` or `False`. T4 and V100 have no bf16.


# %%
# Third exercise
def choose(cluster):
    return {
        "Colab": None,
        "Kaggle": None,
        "PCIe box": None,
        "NVLink box": None,
        "Ethernet": None,
        "1,024 GPUs": None,
    }[cluster]


check_choices(choose)

# %% [markdown]
# Stuck? `check_choices.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_choices.solution()` prints a solution.
#
# Compare the NVLink box with the Ethernet cluster. The box trains without checkpointing. On the Ethernet
# cluster stage 3 leaves room for that, too, and it still loses: checkpointing computes a third more, and that
# takes less time than Ψ more bytes at 6.25 GB/s.
#
# ## More than linear
#
# The ZeRO paper's Figure 3 shows 60B parameters on 64 to 400 GPUs, and the speed grows *more* than the number
# of GPUs. How can that be? Memory is the reason:
#
# 1. More GPUs, and each holds less: 2Ψ + 14Ψ/N at stage 2.
# 2. What becomes free takes a larger batch b.
# 3. A step takes c + b·τ seconds: c for messages, which does not depend on the batch, and τ for each
#    sequence.
# 4. So one sequence costs τ + c/b seconds of a GPU, and that *falls* as b grows.
#
# The speed-up from N₁ to N₂ GPUs is N₂/N₁ · (τ + c₁/b₁)/(τ + c₂/b₂).
#
# Take 13B parameters at stage 2 with checkpointing, on V100s of 32 GB, 16 in a node, 100 Gbit/s between
# nodes. By the model τ = 2.13 s. On 64 GPUs b = 4 and c = 4.2 s, on 400 GPUs b = 7 and c = 4.6 s. **How many
# times as fast are 400 GPUs as 64?** (Linear would be 6.25 times.)

# %%
my_guess = ...


# %%
@cache
def one_gpu(gpus, Gbit=100):
    cluster = clusters.Cluster("", "V100-32GB", gpus // 16, 16, Gbit * clusters.GBIT, "zero-13b", 1)
    batch = clusters.question(cluster, "mixed_fp16", True).largest_batch(stage=2)
    tau = clusters.compute_seconds(cluster, "mixed_fp16", True)
    return batch, tau, clusters.message_seconds(cluster, 2, "mixed_fp16")


def gpu_seconds(gpus, Gbit=100):
    batch, tau, messages = one_gpu(gpus, Gbit)
    return tau + messages / batch  # for one sequence


predict(my_guess, 400 / 64 * gpu_seconds(64) / gpu_seconds(400), quiz.speed_up(400 / 64))


# %%
def super_linear(fig, Gbit):
    gpus = np.array([64, 96, 128, 192, 256, 320, 400])
    faster = [n / 64 * gpu_seconds(64, Gbit) / gpu_seconds(n, Gbit) for n in gpus.tolist()]
    batches = [one_gpu(n)[0] for n in gpus.tolist()]
    ax = fig.subplots()
    ax.plot(gpus, faster, label="the model")
    ax.plot(gpus, gpus / 64, color=PALE, marker="", linewidth=5, zorder=0, label="linear")
    for n, speed, batch in zip(gpus, faster, batches, strict=True):
        ax.text(n, speed + 0.4, f"b={batch}", ha="center", size=9)
    ax.set(xlabel="GPUs", ylabel="times as fast as 64", xlim=(40, 425), ylim=(0, 9.5), xticks=gpus)
    ax.set_title(f"400 GPUs are {faster[-1]:.2f} times as fast at {Gbit} Gbit/s")
    return f"Speed-up over 64 GPUs. {ax.get_title('left')}; linear is 6.25. Batches: {batches}."


explore(super_linear, height=3, Gbit=choice([25, 50, 100, 200, 400, 800], 100))

# %% [markdown]
# The slower the network, the more a larger batch helps, because more samples share the same messages. This
# comes to an end: 2Ψ = 26 GB stay on every GPU at stage 2, so b stops growing. And with more GPUs a ring has
# more messages in a row. (The learning rate must suit a larger batch, too. The engine does not change it; you
# have to.)
#
# ## What an hour costs
#
# The bill is price × GPUs × hours. With the formula above, T tokens in sequences of s take
# T/s · (τ + c/b) GPU-seconds. The number of GPUs enters only through b and c. **The price below is an
# example, not an offer: put in your own.**


# %%
def bill(fig, price_per_GPU_hour, Gbit):
    gpus, ax = [64, 96, 128, 192, 256, 320, 400], fig.subplots()
    hours = [1e9 / 1024 * gpu_seconds(n, Gbit) / 3600 for n in gpus]  # of one GPU, for a billion tokens
    ax.plot(gpus, [price_per_GPU_hour * each for each in hours])
    first, last = (price_per_GPU_hour * each for each in (hours[0], hours[-1]))
    ax.set(xlabel="GPUs", xticks=gpus, ylabel="price, your currency", ylim=(0, 1.15 * first))
    title = f"10⁹ tokens: {first:,.0f} on 64 GPUs, {last:,.0f} on 400"
    ax.set_title(f"{title}\n{hours[0] / 64:.1f} hours on 64 GPUs, {hours[-1] / 400:.1f} on 400")
    return f"{title}, at {price_per_GPU_hour:g} for an hour of a GPU and {Gbit} Gbit/s."


explore(
    bill, height=2.8, price_per_GPU_hour=number(0.1, 20, 1), Gbit=choice([25, 50, 100, 200, 400, 800], 100)
)

# %% [markdown]
# ## Reading a hang
#
# Every engine of this lesson hangs in the same way: some ranks wait in a collective that another rank never
# calls. Three accidents, each in a few lines. zerolab's *launcher* watches the ranks and reports:


# %%
def accident(kind):
    engine, first = build("zerolab-3"), get_rank() == 0
    if kind == "another path" and not first:
        engine.model.blocks = engine.model.blocks[1:]  # rank 1 leaves out a block
    for _ in range(1 if kind == "one step less" and not first else 2):
        while kind == "busy elsewhere" and not first:
            pass  # for example a download, or a lock
        engine.step(batch(0))


# %% tags=["nbval-ignore-output"]
for kind in ("one step less", "another path", "busy elsewhere"):
    try:
        zerolab.launch(accident, 2, kind, timeout=8)
    except (zerolab.WorkerError, zerolab.LaunchTimeout) as error:
        said = str(error).splitlines()[0].split(" In its own words")[0].split(". Where at stage 3")[0]
        print(f"{kind}: {said.removesuffix('.')}.\n")

# %% [markdown]
# The first two end at once. The third waits for its deadline, 8 seconds here, and names the rank that was
# *not* waiting. Below these lines each report has the stack of that rank (lesson 00).
#
# PyTorch, too, watches NCCL's collectives, from a thread that it calls the *watchdog*. But each rank's
# watchdog logs the timeout of its own rank alone. A log of four ranks with FSDP2 looks like this. The form of
# the lines is
# [PyTorch's](https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp);
# we made up the numbers, shortened the prefixes, and left out the stacks.
#
# ```text
# [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=_ALLGATHER_BASE,
#     NumelIn=12496, NumelOut=49984, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.
# [Rank 0] failure detected by watchdog at work sequence id: 812 PG status: last enqueued work: 813,
#     last completed work: 811
# [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=_ALLGATHER_BASE,
#     NumelIn=12496, NumelOut=49984, Timeout(ms)=600000) ran for 600015 milliseconds before timing out.
# [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=_ALLGATHER_BASE,
#     NumelIn=12496, NumelOut=49984, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.
# ```
#
# Read it like this:
#
# - `SeqNum` counts the collectives of the group. These ranks wait in number 812, and 811 are done.
# - `OpType` and the two `Numel` say which collective. 12,496 numbers become 49,984: four ranks, and the unit
#   is a block of *this lesson's model*. So ranks wait for a block's parameters.
# - `Timeout(ms)` is how long a rank waits: ten minutes. What went wrong is ten minutes older than the log.
#
# **Of which rank do you want to see the stack?**

# %%
my_guess = ...

# %%
predict(my_guess, quiz.SILENT, quiz.MISSING_RANK)

# %% [markdown]
# The rank that logs nothing. If all ranks log a timeout, compare `SeqNum`, `OpType` and `NumelIn`: the one
# that differs took another path. PyTorch's flight recorder keeps the last 2,000 collectives of every rank,
# with their stacks, for just this comparison. `TORCH_FR_BUFFER_SIZE` changes how many. (In older versions it
# is called `TORCH_NCCL_TRACE_BUFFER_SIZE`, and it has to be set.)
#
# Now two logs of real jobs. These are the numbers that users posted (LlamaFactory's issues
# [6269](https://github.com/hiyouga/LlamaFactory/issues/6269) and
# [2902](https://github.com/hiyouga/LlamaFactory/issues/2902), the comment of 23 November 2024):
#
# | job | rank | SeqNum | OpType | NumelIn | NumelOut |
# |---|---|---|---|---|---|
# | first | 0, 3, 4 and more | 7753 | _REDUCE_SCATTER_BASE | 544,997,376 | 68,124,672 |
# | second | 0 | 1516 | ALLREDUCE | 25,427,968 | 25,427,968 |
# | second | 1 | 1517 | ALLREDUCE | 1 | 1 |
#
# **How many ranks has the first job, and which stages can it be? Which information do you need for the
# second?**
#
# <details><summary>Answer</summary>
#
# Eight: a reduce-scatter leaves each rank 1/N, and 544,997,376 / 68,124,672 = 8. Gradients are reduced to
# shards, as the paper's stages 1, 2 and 3 do it. (Which stage it is depends on the engine, too: DeepSpeed's
# stages 1 and 2 all-reduce by default, as measured above, and FSDP has no stage 1.) The ranks agree on the
# call, so look for a rank that is missing.
#
# In the second job two ranks wait in different calls. Rank 0 waits in number 1516, for 25 million gradients.
# Rank 1 is one call further, with a single number, as for a loss or a flag. Neither can go on. Ask for the
# list of the last calls of both ranks: did both make the same calls in the same order? A branch that one rank
# alone takes, for logging or for a batch that was too short, adds a call to its list.
# </details>
#
# ## It writes Python
#
# The rest of this lesson trains a GPT at stage 3 on two ranks, on a file of Python's own standard library,
# and lets it write. First the text is cut into pieces: the pair of pieces that occurs most often becomes a
# piece of its own, again and again, until there are 256. (That is byte-pair encoding.)


# %%
def learn_pieces(text):
    pieces = [bytes([byte]) for byte in sorted(set(text))]
    ids = np.array([pieces.index(bytes([byte])) for byte in text])
    while len(pieces) < 256:
        pairs = 256 * ids[:-1] + ids[1:]
        left, right = divmod(np.bincount(pairs).argmax(), 256)
        found = np.flatnonzero(pairs == 256 * left + right)
        found = found[np.diff(found, prepend=-2) > 1]  # where pairs overlap, as in "aaa", not the second
        ids[found] = len(pieces)
        ids = np.delete(ids, found + 1)
        pieces.append(pieces[left] + pieces[right])
    return pieces, ids.tolist()


# %% tags=["nbval-ignore-output"]
source = data.text()[240_000:300_000]
pieces, ids = learn_pieces(source)
code = data.NextByte(bytes(ids), context=64, batch_size=12)
print(f"{len(source):,} bytes are {len(ids):,} pieces, such as", *pieces[-4:])


# %%
def train_a_writer(steps=200):
    torch.manual_seed(0)
    model, losses = models.GPT(width=128, depth=2, heads=4, context=64).to(zerolab.device()), []
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=3, lr=6e-3)
    warm_up = lambda step: min(1, (step + 1) / 20) * (1 - step / steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    for step in range(steps):
        loss = model(*(part.to(zerolab.device()) for part in code.batch(step, get_rank())))
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses, write(model, optimizer)


# %%
def encode(text):
    found = []
    while text:  # the longest piece that the text begins with
        piece = max((each for each in pieces if text.startswith(each)), key=len)
        found.append(pieces.index(piece))
        text = text[len(piece) :]
    return found


def write(model, optimizer, prompt=b"\n\n    def ", length=160):
    generator = torch.Generator(zerolab.device()).manual_seed(0)
    start = torch.tensor([encode(prompt)], device=zerolab.device())
    with optimizer.full_params(), torch.no_grad():
        written = model.generate(start, length, temperature=0.5, generator=generator)
    return b"".join(pieces[piece] for piece in written[0].tolist()).decode(errors="replace")


# %% tags=["nbval-ignore-output"]
losses, text = zerolab.launch(train_a_writer, 2)[0]
print(text)

# %% [markdown]
# It is not a good programmer. But fewer than half a million parameters, none of which was whole on any rank
# while the optimizer ran, learned in seconds how lines are indented and how a method begins. It has memorized
# much of the text, because 60,000 bytes are little data.

# %% tags=["nbval-ignore-output"]
fig = figure(height=2.4)
ax = fig.subplots()
ax.plot(losses, label="stage 3 on two ranks", color=INK, marker="", linewidth=1.2)
ax.axhline(code.entropy(), color=QUIET, linestyle="--", label="the best guess without context")
ax.set(xlabel="step", ylabel="loss (nats per piece)", ylim=(0, None))
show(fig, f"Loss on this machine, from {losses[0]:.2f} to {losses[-1]:.2f} nats per piece.")

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
# - Do not rely on a stage's name. Measure what a rank holds, from its storages, and sends, from its
#   collectives. ZeroRedundancyOptimizer is stage 1 with 3Ψ; `fully_shard` is stage 3, or moves as stage 2
#   does with `reshard_after_forward=False`; DeepSpeed's defaults can make 3Ψ of stage 1.
# - Between nodes the network decides. Stage 3 moves 3MΨ there, hybrid sharding 2Ψ, for 16Ψ divided by the
#   GPUs of a node.
# - Plan, rehearse, then compare seconds: the smallest stage that fits without checkpointing is a good first
#   choice, and the Ethernet is the usual exception.
# - More GPUs leave more memory for the batch, so speed can grow more than their number, and the bill can
#   fall.
# - In a hang the ranks that log a timeout are waiting. Look at the one that logs nothing.
#
# **Next:** [09 · The incident room](09_incident_room.ipynb): twelve engines with a fault each, to find and to
# repair.

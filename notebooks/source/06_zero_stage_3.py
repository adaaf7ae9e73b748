# %% [markdown]
# # 06 · ZeRO stage 3: a parameter is whole only while its unit computes
#
# > **75 minutes.** *You need:* lesson 05, where a gradient is freed once it is reduced.
# >
# > *Afterwards you can* follow one parameter through a step, free a storage and fill it again, compute
# > traffic unit by unit and the peak when units are gathered ahead, and say which uses of a sharded parameter
# > raise an error and why.
# >
# > *Paper:* ZeRO, §5.3 and §7.2.2, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).
# >
# > *Words:* the [glossary](../docs/glossary.md) explains the main ones.

# %% [markdown]
# ## The question
#
# Stages 1 and 2 reduced the optimizer state and the gradients to 1/N. There are still 2Ψ bytes of parameters
# on every GPU, for any number of GPUs. For a model of 10¹² parameters that is 2,000 GB each.
#
# But which parameters does a GPU *use* at one moment? Those of the layer that it computes. Stage 3 keeps 1/N
# of every layer. It gathers the rest of a layer just before it is needed and frees it afterwards.

# %%
import copy

import torch
from torch import nn
from torch.distributed import get_rank

import zerolab
from zerolab import data, memory, ring
from zerolab.course import answer, explore, figure, predict, progress, show, show_diff, slider, timeline
from zerolab.course.gpus import verify_on_gpus
from zerolab.course.lessons.zero_stage_3 import check_peak, check_prefetch, check_sharded_pass, figures, quiz
from zerolab.course.look import INK, PALE
from zerolab.models import GPT
from zerolab.parity import compute_deterministically
from zerolab.stages import stage2, stage3

# %% [markdown]
# ## Predict: a trillion parameters
#
# Ψ = 10¹² parameters in mixed precision: 2 bytes for a parameter, 2 for its gradient, 12 for the optimizer.
# Now everything is sharded. **How many GPUs of 80 GB do you need at least to hold the model states?**

# %%
my_guess = ...

# %%
total = memory.model_states(1e12, world_size=1, stage=3).total_bytes
predict(my_guess, total / 80e9, quiz.TRILLION)

# %% [markdown]
# ## Run it
#
# A GPT of six blocks on four ranks, in fp32 (4 + 4 + 8 bytes). The bytes are counted from storages, after a
# step.

# %%
DATA = data.NextByte(data.text(), context=32, batch_size=4)


def fresh_model():
    compute_deterministically()
    torch.manual_seed(0)
    return GPT(width=64, depth=6, heads=4, context=32).to(zerolab.device())


def build(stage=3, **options):
    model = fresh_model()
    return model, zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=stage, lr=1e-3, **options)


# %%
def batch(step, rank=None):
    parts = DATA.batch(step, get_rank() if rank is None else rank)
    return [part.to(zerolab.device()) for part in parts]


# %%
def bytes_held(stage):
    model, optimizer = build(stage)
    model(*batch(0)).backward()
    optimizer.step()
    return optimizer.memory(), {unit.name: unit.numel for unit in optimizer.units}


for stage in (2, 3):
    measured, numels = zerolab.launch(bytes_held, 4, stage)[0]
    psi = sum(numels.values())
    formula = memory.model_states(psi, world_size=4, stage=stage, precision="fp32")
    for category in ("params_bytes", "grads_bytes", "optimizer_bytes"):
        held, expected = getattr(measured, category), getattr(formula, category)
        print(f"stage {stage}  {category:<16} {held:>11,.0f}   as the formula says: {held == expected}")

# %% [markdown]
# The parameters take a quarter, too. So everything is 1/N now: 16Ψ/N. Here is the code for it. (P_os+g+p is
# the paper's name for stage 3.)

# %%
show_diff(stage2, stage3)

# %% [markdown]
# Four methods changed, and one of them is shorter than before:
#
# - `setup` copies this rank's shard out of the flat buffer and frees the buffer.
# - `unshard` did nothing until now. It brings the buffer's storage back, all-gathers the shards into it, and
#   lets the model use the parameters again. `reshard` frees the buffer.
# - `update` does **not** all-gather any more. No rank needs whole parameters at the end of a step. Each unit
#   is gathered when it is needed next.
#
# ## The life of a parameter
#
# Let us watch one layer, the middle one of three, through one step. `unit.whole` says whether the
# unit's parameters are there. Hooks look at it in every layer, forward and backward. (`prefetch=0` means that
# no layer is gathered before it is needed.)


# %%
def life():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to(zerolab.device())
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=3, prefetch=0)
    unit, seen = optimizer.units[1], []

    def look(when):
        seen.append((when, unit.whole, unit.flat.untyped_storage().nbytes()))

    for index, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda *_, i=index: look(f"layer {i} forward"))
        layer.bias.register_hook(lambda _, i=index: look(f"layer {i} backward"))
    model(torch.ones(4, 8, device=zerolab.device())).sum().backward()
    optimizer.step()
    look("after step()")
    return seen


# %%
for when, whole, nbytes in zerolab.launch(life, 2)[0]:
    print(f"{when:<17} layer 1 is {'whole' if whole else 'freed'}, {nbytes} bytes")

# %% [markdown]
# The layer is whole twice and freed at all other times. (Its weight has 64 numbers and its bias 8. These 72
# numbers take 288 bytes, so each of the two ranks has 144 of them. Every shard is padded to a multiple of 64
# bytes, here 192, and two of them are 384.) It is gathered for forward, freed, and gathered **again** for
# backward: the gradient of the layer's input is the gradient of its output times the *weight*. Many people
# forget this second gather. You can make that mistake in the third exercise below.
#
# ## How is a parameter freed?
#
# Between forward and backward autograd holds the weight. So it does not help to put a small tensor into
# `parameter.data`:

# %%
linear = nn.Linear(1000, 1000, bias=False)
output = nn.functional.linear(torch.ones(1, 1000, requires_grad=True), linear.weight)
linear.weight.data = torch.empty(0)
remembered = output.grad_fn._saved_mat2  # what backward will multiply by: a view of the weight
print(f"the parameter shows {linear.weight.numel()} elements")
print(f"and autograd still holds {remembered.untyped_storage().nbytes():,} bytes")

# %% [markdown]
# So the tensor must stay, and its *storage* must be freed for all views at once: `storage.resize_(0)`. Later
# the storage gets its size back and is filled. Then every view, autograd's included, has its values again.

# %%
flat = torch.arange(4.0)
weight = flat.view(2, 2)  # what the model sees
flat.untyped_storage().resize_(0)
print("freed:", tuple(weight.shape), "and", flat.untyped_storage().nbytes(), "bytes behind it")
flat.untyped_storage().resize_(4 * flat.numel())
flat.copy_(torch.arange(4.0))
print("back: ", weight.tolist())

# %% [markdown]
# The engine does the same. In the diff above, `reshard` calls `unit.free()`, which calls `resize_(0)` on the
# storage of the unit's flat buffer. `unshard` gives the storage its full size, copies this rank's shard to
# its place, and all-gathers the rest. The code is in `zerolab/unit/unit.py`.

# %% [markdown]
# ## `Sharded`: the class of a freed parameter
#
# A parameter whose storage is freed is dangerous. PyTorch does not know that the storage is gone:
# `weight.sum()` reads freed memory and ends the process. `torch.save` raises no error, and writes a file
# without the values, which `torch.load` refuses. So the engine also changes the class of the parameter to
# `Sharded`. This class answers what can be answered without values, such as the shape, and raises an error
# for everything else.


# %%
def ask():
    model, optimizer = build()
    weight = model.blocks[0].mlp_in.weight
    answers = [repr(weight), f"shape {tuple(weight.shape)}, numel {weight.numel()}"]
    for use in (torch.sum, copy.deepcopy):
        try:
            use(weight)
        except RuntimeError as error:
            answers.append(str(error))
    with optimizer.full_params():  # collective: every rank enters
        answers.append(f"in full_params(): all {weight.numel()} values, finite: {weight.isfinite().all()}")
    return answers


print(*zerolab.launch(ask, 2)[0], sep="\n\n")

# %% [markdown]
# Inside `with optimizer.full_params():` all parameters are whole: to evaluate with code of your own, to
# export, or to change weights by hand. It takes the memory that stage 3 saves, and every rank must enter it.
#
# Gradients are protected, too. On this model `torch.nn.utils.clip_grad_norm_` would find no gradients and
# return a norm of 0 without an error. Now it raises one:


# %%
def clip():
    model, optimizer = build()
    model(*batch(0)).backward()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except RuntimeError as error:
        refused = str(error)
    return refused, optimizer.clip_grad_norm_(1.0).item() > 0


refused, found = zerolab.launch(clip, 2)[0]
print(refused)
print("optimizer.clip_grad_norm_ finds a norm:", found)

# %% [markdown]
# ## Traffic, unit by unit
#
# The paper counts 3Ψ for stage 3: an all-gather for forward, an all-gather for backward, and a reduce-scatter
# of the gradients. There is no all-gather after the update.
#
# Our GPT has six blocks and a `root` unit for the rest: embeddings, last norm and output head. The embeddings
# come first in forward and last in backward. The head is last in forward and first in backward. Both are in
# `root`, so it stays whole from the beginning of forward to the end of backward. **Each block has 49,984
# parameters, and root has 34,944. How many MB does one step move in fp32, by the paper's count?**

# %%
my_guess = ...


# %%
def one_step(prefetch=1):
    model, optimizer = build(prefetch=prefetch)
    for step in (0, 1):  # in step 0 the engine learns the order of the units
        optimizer.zero_grad()
        model(*batch(step)).backward()
        optimizer.step()
    return optimizer.trace.step(1), optimizer.trace.traffic(1)


# %%
events, traffic = zerolab.launch(one_step, 4)[0]
predict(my_guess, traffic.logical_bytes / 1e6, quiz.traffic(numels))

# %% [markdown]
# The trace shows it unit by unit. Predicted: 3 times its size for a block, 2 times for the root.

# %%
for name, numel in numels.items():
    mine = [event for event in events if event.unit == name and event.op != "update"]
    ops = ", ".join(f"{event.op} in {event.phase}" for event in mine)
    predicted = 4 * numel * (2 if name == "root" else 3)
    right = sum(event.logical_bytes for event in mine) == predicted
    print(f"{name}: {predicted:,} bytes predicted, measured the same: {right}\n    {ops}")

# %% [markdown]
# ## How many layers are whole at once?
#
# If block 3 is gathered only when it is needed, the GPU waits for the network at every block. So the engine
# gathers the next block while this one computes: `prefetch=1`. With a larger `prefetch` more blocks are
# gathered ahead, and more memory is used. Below we look at the storage of every unit whenever a block
# computes, forward and backward.


# %%
def watch_units(prefetch):
    model, optimizer = build(prefetch=prefetch)
    moments = []

    def look(label):
        states = [2 if u.whole else int(u.flat.untyped_storage().nbytes() > 0) for u in optimizer.units]
        nbytes = [u.flat.untyped_storage().nbytes() for u in optimizer.units]
        moments.append(figures.Moment(label, states, nbytes))

    model(*batch(0)).backward()  # the engine learns the order
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, i=index: look(f"forward {i}"))
        block.mlp_out.bias.register_post_accumulate_grad_hook(lambda _, i=index: look(f"backward {i}"))
    model(*batch(1)).backward()
    return moments


# %% [markdown]
# **With `prefetch=1`, how many blocks are whole or being gathered at the worst moment?**

# %%
my_guess = ...

# %%
moments = {prefetch: zerolab.launch(watch_units, 4, prefetch)[0] for prefetch in range(6)}
blocks = [sum(state > 0 for state in moment.states[:-1]) for moment in moments[1]]
predict(my_guess, max(blocks), quiz.BLOCKS_AT_ONCE)

# %% [markdown]
# Now move `prefetch` from 0 to 5. With 0 the engine gathers a unit only when it is needed. With 5 all six
# blocks are there: a rank holds all parameters, as at stage 2, beside its shards, and moves more.

# %%
names = ["root" if name == "root" else name.replace("blocks.", "block ") for name in numels]


def draw(fig, prefetch):
    return figures.residency(fig, moments, names, prefetch)


explore(draw, height=3.8, prefetch=slider(0, 5, 1))

# %% [markdown]
# Each column is a moment, and a dark cell is a unit that is whole. One block computes at each moment: first
# from block 0 to block 5, then back. The pale blue cells are the blocks that are gathered ahead, `prefetch`
# of them, in the order that the engine learned in the first step. `root` is whole all the time. So at most
# `root + (prefetch + 1) blocks` of parameters are whole, in addition to the shards:

# %%
for prefetch, run in moments.items():
    peak = max(sum(moment.nbytes) for moment in run)
    expected = 4 * (numels["root"] + (prefetch + 1) * numels["blocks.0"])
    print(f"prefetch={prefetch}: at most {peak:>9,} bytes whole, formula {expected:>9,}")

# %% [markdown]
# The results are the same at every setting, bit for bit. What changes is when messages are sent and how much
# memory is used. (The default is `prefetch=1`, and `reduces_in_flight=1` for the reductions of lesson 05.)


# %%
def weights_after_two_steps(prefetch):
    model, optimizer = build(prefetch=prefetch)
    for step in (0, 1):
        optimizer.zero_grad()
        model(*batch(step)).backward()
        optimizer.step()
    with optimizer.full_params():
        return [parameter.detach().clone() for parameter in model.parameters()]


first, *others = [zerolab.launch(weights_after_two_steps, 4, prefetch)[0] for prefetch in (0, 1, 5)]
print("the same bits at prefetch 0, 1 and 5:", all(all(map(torch.equal, first, each)) for each in others))

# %% [markdown]
# ## Exercise: the peak of unequal blocks
#
# > **Difficulty 1 of 5 · importance 3 of 5 · 5 minutes.** The blocks of many models differ in size. Return
# > the most parameters that are whole, or on their way, at any moment of a step.
# >
# > - `root` is the number of parameters of the root unit, which is whole all the time.
# > - `blocks` are those of the blocks, in the order in which they compute.
# > - While a block computes, it is whole, and so are the next `prefetch` blocks. Near the end there are
# >   fewer.


# %%
# Exercise
def most_whole(root, blocks, prefetch): ...  # your code


check_peak(most_whole)

# %% [markdown]
# Stuck? `check_peak.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and `check_peak.solution()`
# prints a solution.
#
# ## Second exercise: gather ahead, within a bound
#
# > **Difficulty 2 of 5 · importance 4 of 5 · 8 minutes.** Write the forward pass of an engine that gathers
# > `prefetch` layers ahead. Return the output of the last layer for the input `x`.
# >
# > - `layer.gather()` starts the messages and returns at once. From then on the layer takes memory.
# > - `layer.wait()` returns when the weight is there.
# > - `layer.forward(x)` returns the layer's output, the input of the next layer.
# > - `layer.free()` gives the memory back.
# > - `prefetch` may be 0, and it may be larger than the number of layers.
# >
# > *Bronze:* the output is right. *Silver:* each layer is gathered once, and while a layer computes, the
# > gathers of the next `prefetch` layers are under way. *Gold:* no more than `prefetch + 1` layers take
# > memory at any time, and none at the end.


# %%
# Second exercise
def forward_ahead(layers, x, prefetch): ...  # your code


check_prefetch(forward_ahead)

# %% [markdown]
# Stuck? `check_prefetch.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_prefetch.solution()` prints a solution.
#
# ## The peak of a step
#
# Parameters are one part of it. The optimizer's `meter` counts all buffers of the engine: parameters,
# gradients, optimizer state, and messages on their way. It notes the most that they held at once in each
# phase of a step.


# %%
def peaks(stage):
    model, optimizer = build(stage)
    for step in (0, 1):
        optimizer.zero_grad()
        optimizer.meter.reset_peak()
        loss = model(*batch(step))
        in_forward = optimizer.meter.peak_by_phase["forward"]  # the time after a step counts as forward, too
        loss.backward()
        optimizer.step()
    return optimizer.meter.peak_by_phase | {"forward": in_forward}


# %% tags=["nbval-ignore-output"]
fig = figure(height=2.8)
ax, said = fig.subplots(), []
for stage in range(4):
    by_phase = zerolab.launch(peaks, 4, stage)[0]
    MB = [by_phase[phase] / 1e6 for phase in ("forward", "backward", "step")]
    ax.plot(["forward", "backward", "step"], MB, label=f"stage {stage}: peak {max(MB):.2f} MB ▼")
    ax.plot(MB.index(max(MB)), max(MB) + 0.25, "v", color=INK)
    said.append(f"stage {stage} " + ", ".join(f"{size:.2f}" for size in MB))
ax.set(ylabel="most MB held at once", ylim=(0, 6.5))
show(
    fig, f"Most MB that rank 0 holds in forward, backward and step: {'; '.join(said)}. Backward is the peak."
)

# %% [markdown]
# At every stage the peak is in the backward pass, because the gradients need memory beside everything else.
# At stage 3 the forward pass takes memory too, because blocks are gathered, and the backward pass holds
# blocks *and* their whole gradients. (A rank also has a buffer for what the other ranks send, because it adds
# in the order of the ranks. Over NCCL it has one only after `compute_deterministically()`, which this lesson
# calls. Without it the backward pass takes less there.)
#
# ## A step in time
#
# The trace also knows *when*: `optimizer.trace.timeline()` returns each phase, update and message with its
# start and its duration. Below is the third step on two ranks, at stage 2 and at stage 3.


# %%
def record(stage):
    model, optimizer = build(stage)
    for step in range(3):
        model(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.trace.timeline()


# %% tags=["nbval-ignore-output"]
fig = figure(height=5)
for ax, stage in zip(fig.subplots(2, sharex=True), (2, 3), strict=True):
    timeline.draw(ax, zerolab.launch(record, 2, stage))
    ax.set_title(f"stage {stage}")
ax.set_xlabel("milliseconds since the step before ended")
show(fig, "One step on two ranks at stages 2 and 3: what they compute and send, in time.")

# %% [markdown]
# The upper lane of a rank is its own work, from forward to the updates. The lower lane has its messages, side
# by side where several are under way at once. At stage 2 a unit's gather starts when the unit has been
# updated, so all gathers come after backward. At stage 3 they are spread over forward and backward, and the
# step ends with the updates. Where a message is below forward or backward, the rank may compute meanwhile.
# (On a GPU these are the times at which the CPU queued the work. The file that the next command writes has
# the GPU's own times, too.)
#
# `./zero train --model gpt-tiny --stage 3 --trace trace.json` writes the timelines of all ranks
# into one file. Open it at [ui.perfetto.dev](https://ui.perfetto.dev): each rank is a process there, and a
# click on a bar shows its bytes, its slices, and the line of code that started it.
#
# ## Third exercise: write stage 3 yourself
#
# > **Difficulty 3 of 5 · importance 5 of 5 · 15 minutes.** You get four layers `y = x @ weight` whose
# > weights are freed, and one micro-batch `x` on each rank. Run forward, then backward from a gradient of
# > ones. Leave in every `layer.grad_shard` this rank's shard of the gradient, summed over the ranks.
# >
# > - `layer.flat` is the weight, P numbers in float64. Its storage has 0 bytes now. Bring that storage back
# >   and free it, and put no other tensor in its place: in training autograd would hold this one.
# > - `layer.owned`, a `slice`, is your range of `layer.flat`, and `layer.shard` holds its values. N need
# >   not divide P.
# > - `layer.forward(x)` returns the output. `layer.backward(grad)` returns the gradient of the input and
# >   leaves the gradient of the weight in `layer.grad`, P numbers. Both need the whole weight and raise an
# >   error without it.
# > - From lesson 02: `ring.all_gather(flat)` works in place. `ring.reduce_scatter(flat)` returns this
# >   rank's chunk, a view of `flat`. Do not use torch's own collectives.
# >
# > The check looks at the gradients, at how many weights and how many gradients are whole at once (one of
# > each), at what is left at the end (no whole weight, and None in `layer.grad`), and at the bytes that you
# > send: at most 3P for each layer, by the paper's count. The last layer may stay whole between forward and
# > backward, and then moves 2P. A view of a gradient keeps the whole gradient in memory, as in lesson 05. All
# > of this is demanded, so there are no targets.


# %%
# Third exercise
def unshard(layer):
    ...  # bring the storage back and put this rank's shard into its place
    ring.all_gather(layer.flat)


def reshard(layer): ...  # free the storage


def forward_backward(layers, x): ...  # through the layers, and back from torch.ones_like(output)


check_sharded_pass(forward_backward)

# %% [markdown]
# Stuck? `check_sharded_pass.hint(1)` prints a hint, `hint(2)` and `hint(3)` say more, and
# `check_sharded_pass.solution()` prints a solution.
#
# ## The proof: the same training, sharded
#
# Two ranks train at stage 3 for 30 steps. For comparison, one process trains the same model with plain Adam:
# it adds up the gradients of the two ranks in rank order and divides once. It is launched like a rank, which
# gives it a rank's device and threads: both decide the last bits.

# %%
STEPS, RANKS = 30, 2


def train(stage):
    model, optimizer = build(stage)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    held, traffic = optimizer.memory(), optimizer.trace.traffic(STEPS - 1)
    with optimizer.full_params():
        return seen, [parameter.detach().clone() for parameter in model.parameters()], held, traffic


# %%
def train_alone():
    model, seen = fresh_model(), []
    parameters = list(model.parameters())
    adam = torch.optim.Adam(parameters, lr=1e-3)
    for step in range(STEPS):
        parts = [model(*batch(step, rank)) for rank in range(RANKS)]
        gradients = [torch.autograd.grad(loss, parameters) for loss in parts]
        for parameter, *over_ranks in zip(parameters, *gradients, strict=True):
            parameter.grad = sum(over_ranks) / RANKS
        adam.step()
        seen.append(sum(loss.item() for loss in parts) / RANKS)
    return seen, [parameter.detach() for parameter in parameters]


# %%
ranks = zerolab.launch(train, RANKS, 3)
alone, parameters = zerolab.launch(train_alone, RANKS)[0]
sharded = [sum(pair) / RANKS for pair in zip(*(seen for seen, *_ in ranks), strict=True)]
pairs = [pair for _, weights, *_ in ranks for pair in zip(weights, parameters, strict=True)]
print("bit-identical:", all(torch.equal(ours, theirs) for ours, theirs in pairs) and sharded == alone)

# %%
_, _, measured, traffic = ranks[0]
formula = memory.model_states(psi, RANKS, stage=3, precision="fp32")
for category in ("params_bytes", "grads_bytes", "optimizer_bytes"):
    print(
        f"{category:<16} {getattr(measured, category):>9,.0f}   formula {getattr(formula, category):>9,.0f}"
    )
print(f"traffic a step   {traffic.logical_bytes:>9,}   formula {4 * (3 * psi - numels['root']):>9,}")

# %%
fig = figure(height=2.4)
ax = fig.subplots()
ax.plot(alone, label="one process, plain Adam", color=PALE, linewidth=8, marker="")
ax.plot(sharded, label="stage 3, sharded", color=INK, linewidth=1.2, marker="")
ax.set(xlabel="step", ylabel="loss (nats per byte)")
same = "lie exactly on top of each other" if sharded == alone else "part"
show(fig, f"Loss of each step at stage 3 and in one process with plain Adam: the two curves {same}.")

# %% [markdown]
# ## Run a trillion parameters
#
# The first prediction of this lesson was arithmetic. You do not have 1,024 GPUs or memory for a trillion
# parameters. A *rehearsal* needs neither. `rehearse` builds the model on torch's meta device, where tensors
# have shapes and no values. It joins a simulated group of 1,024 ranks as rank 0. Then the same hooks, the
# same stage and the same Adam take two steps. What rank 0 holds and sends is counted from its storages and
# messages, not computed by a formula. (Each of the three rehearsals takes ten seconds to half a minute. A
# line says how far it is.)


# %%
def trillion():
    return zerolab.models.GPT(vocab=50_257, width=25_600, depth=127, heads=200, context=1024)


# %% tags=["nbval-ignore-output"]
rehearsed = {}
for stage in (2, 3):
    counted = progress(f"stage {stage}", trillion)
    rehearsed[stage] = zerolab.rehearse(counted, world_size=1024, stage=stage)

# %%
print(f"{rehearsed[3].psi:,} parameters")
for stage, run in rehearsed.items():
    states, peak = run.memory.total_bytes, max(run.peak_by_phase.values())
    print(f"stage {stage}: {states / 1e9:7,.1f} GB of model states, {peak / 1e9:7,.1f} GB at the peak")

# %% [markdown]
# On 1,024 GPUs the model states are 16Ψ/1024, as in the paper's Table 1. But **look at the peak**. It is six
# times that, too much for a GPU of 80 GB. Each of the 127 blocks has 7.9 billion parameters, 15.7 GB in 16
# bits. At the worst moment of the backward pass two blocks are whole, and so are the gradients of two blocks:
# 4 × 15.7 GB. The root, which has the embeddings, is whole with its gradient: 2 × 5.2 GB. And autograd has
# just stored the gradient of one matrix of the MLP, 5.2 GB more, which the engine is about to copy into the
# block's gradient buffer. With the model states that is 94 GB.
#
# This lesson's options help. **How many GB does the peak fall to if the engine waits for every collective,
# with nothing gathered ahead and no reduction in flight?**

# %%
my_guess = ...

# %% tags=["nbval-ignore-output"]
counted = progress("stage 3, nothing ahead", trillion)
patient = zerolab.rehearse(counted, world_size=1024, stage=3, prefetch=0, reduces_in_flight=0)

# %%
predict(my_guess, max(patient.peak_by_phase.values()) / 1e9, quiz.PATIENT_PEAK)

# %% [markdown]
# This takes time: the engine computes nothing while it waits.
#
# Smaller units would help without waiting. `units=` takes a list of modules, and each of them is gathered as
# one unit. So a model that has attention and MLP in modules of their own can be cut there. Whether a model
# fits depends on its largest unit as much as on the number of ranks.
#
# ## On GPUs
#
# If this machine has a GPU for every rank, the cells above used them, over NCCL. On any other machine they
# used the CPU, over gloo. The next cell trains with stage 3 over NCCL, with one rank for each GPU, and
# compares the bits with one process on one GPU. If there is only one GPU, it runs two ranks, which share it.

# %% tags=["nbval-ignore-output"]
verify_on_gpus(stage=3)

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
# - At stage 3 a rank holds 16Ψ/N bytes and the units that compute. A unit is whole while it computes, once in
#   forward and once more in backward.
# - A parameter is freed by `storage.resize_(0)` under a tensor that stays. When the storage comes back,
#   autograd's views of it have their values again. A freed parameter is a `Sharded` and raises an error when
#   its values are used. `full_params()` makes all parameters whole.
# - A micro-batch moves 3Ψ − Ψ_root. With one micro-batch that is at most 1.5 times the 2Ψ of stage 2. With M
#   micro-batches stage 3 moves up to 3MΨ and stage 2 moves (M+1)Ψ: for M = 4 that is 12Ψ and 5Ψ, 2.4 times as
#   much.
# - At most the root and `prefetch + 1` other units have whole parameters. In backward some units have whole
#   gradients too. A larger `prefetch` saves time, takes memory, and changes no bit.
#
# Now all model states are divided by N. The rest of the memory is not.
#
# **Next:** [07 · Residual memory](07_residual_memory.ipynb): activations, buffers and free memory in pieces,
# and several GPUs for one copy of a model.

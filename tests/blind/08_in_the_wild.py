# %% check_shard | leaves reshard_after_forward at its default for the blocks | That is stage 3
def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


# %% check_shard | shards the model in one call, as a single unit | The whole model is one unit
def shard(model, mesh):
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


# %% check_shard | shards the blocks and nothing else | Call fully_shard(model, mesh=mesh) too, last
def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)


# %% check_shard | shards the root before the blocks | The model was sharded before its blocks
def shard(model, mesh):
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)


# %% check_shard | makes each linear layer of a block a unit of its own | are units of their own
def shard(model, mesh):
    for block in model.blocks:
        for module in block.modules():
            if isinstance(module, torch.nn.Linear):
                fully_shard(module, mesh=mesh, reshard_after_forward=False)
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


# %% check_shard | joins all blocks in one unit | blocks share a unit
def shard(model, mesh):
    fully_shard(list(model.blocks), mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


# %% check_shard | shards a copy and returns it | and not on a copy
def shard(model, mesh):
    from copy import deepcopy

    sharded = deepcopy(model)
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    return fully_shard(sharded, mesh=mesh, reshard_after_forward=False)


# %% check_shard | leaves the last block to the root | so it is gathered with the root
def shard(model, mesh):
    for block in model.blocks[:-1]:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


# %% check_shard | right: sets the option afterwards with a method |
def shard(model, mesh):
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh)
    model.set_reshard_after_forward(False, recurse=True)


# %% check_shard | right: the keyword arguments in a dictionary, and from the last block to the first |
def shard(model, mesh):
    options = {"mesh": mesh, "reshard_after_forward": False}
    blocks = list(model.blocks)
    while blocks:
        fully_shard(blocks.pop(), **options)
    return fully_shard(model, **options)


# %% check_json | train_batch_size is that of one GPU | and train_batch_size is 16
def deepspeed():
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }


# %% check_json | takes 8 micro-batches of 2 | That accumulates 8 micro-batches, and 2 were asked for
def deepspeed():
    return {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }


# %% check_json | bf16 is true and not a section | "bf16" needs a dictionary
def deepspeed():
    return {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "bf16": True,
        "zero_optimization": {"stage": 2},
    }


# %% check_json | the stage is not inside zero_optimization | belongs inside
def deepspeed():
    return {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "stage": 2,
    }


# %% check_json | turns fp16 on in addition | bf16 and fp16 are both enabled
def deepspeed():
    return {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }


# %% check_json | has names of the Trainer's, and micro-batches of 16 | is not a key that DeepSpeed reads
def deepspeed():
    return {
        "train_batch_size": 64,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size": 8,
        "train_micro_batch_size_per_gpu": 16,
    }


# %% check_json | returns JSON text and not a dictionary | The configuration is a str
def deepspeed():
    import json

    settings = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}
    settings |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    return json.dumps(settings)


# %% check_json | right: two of the three numbers of the batch, and DeepSpeed computes the third |
def deepspeed():
    settings = dict(train_batch_size=64, train_micro_batch_size_per_gpu=8)
    settings["bf16"] = dict(enabled=True)
    settings["zero_optimization"] = dict(stage=2, overlap_comm=True)
    return settings


# %% check_choices | bf16 on a T4 | a T4 has no bf16 units
def choose(cluster):
    return {
        "Colab": (0, "mixed", False),
        "Kaggle": (1, "mixed_fp16", False),
        "PCIe box": (3, "mixed", True),
        "NVLink box": (2, "mixed", False),
        "Ethernet": (1, "mixed", True),
        "1,024 GPUs": (3, "mixed", True),
    }[cluster]


# %% check_choices | stage 3 without checkpointing between nodes, because it fits | and a lower stage fits
def choose(cluster):
    return {
        "Colab": (0, "mixed_fp16", False),
        "Kaggle": (1, "mixed_fp16", False),
        "PCIe box": (3, "mixed", True),
        "NVLink box": (2, "mixed", False),
        "Ethernet": (3, "mixed", False),
        "1,024 GPUs": (3, "mixed", True),
    }[cluster]


# %% check_choices | trusts the plan on 1,024 GPUs and does not checkpoint | but the rehearsal adds
def choose(cluster):
    return {
        "Colab": (0, "mixed_fp16", False),
        "Kaggle": (1, "mixed_fp16", False),
        "PCIe box": (3, "mixed", True),
        "NVLink box": (2, "mixed", False),
        "Ethernet": (1, "mixed", True),
        "1,024 GPUs": (3, "mixed", False),
    }[cluster]


# %% check_choices | checkpoints everywhere, to be safe | It fits without checkpointing
def choose(cluster):
    return {
        "Colab": (0, "mixed_fp16", True),
        "Kaggle": (1, "mixed_fp16", True),
        "PCIe box": (3, "mixed", True),
        "NVLink box": (2, "mixed", True),
        "Ethernet": (1, "mixed", True),
        "1,024 GPUs": (3, "mixed", True),
    }[cluster]


# %% check_choices | stage 3 on NVLink, more than 1 % slower than stage 2 | and a lower stage fits
def choose(cluster):
    return {
        "Colab": (0, "mixed_fp16", False),
        "Kaggle": (1, "mixed_fp16", False),
        "PCIe box": (3, "mixed", True),
        "NVLink box": (3, "mixed", False),
        "Ethernet": (1, "mixed", True),
        "1,024 GPUs": (3, "mixed", True),
    }[cluster]


# %% check_choices | the order of a choice is (precision, stage, checkpointing) | the stage is 'mixed_fp16'
def choose(cluster):
    return {
        "Colab": ("mixed_fp16", 0, False),
        "Kaggle": ("mixed_fp16", 1, False),
        "PCIe box": ("mixed", 3, True),
        "NVLink box": ("mixed", 2, False),
        "Ethernet": ("mixed", 1, True),
        "1,024 GPUs": ("mixed", 3, True),
    }[cluster]


# %% check_choices | checkpointing is "on" or "off", as in the figure above | checkpointing is 'off'
def choose(cluster):
    return {
        "Colab": (0, "mixed_fp16", "off"),
        "Kaggle": (1, "mixed_fp16", "off"),
        "PCIe box": (3, "mixed", "on"),
        "NVLink box": (2, "mixed", "off"),
        "Ethernet": (1, "mixed", "on"),
        "1,024 GPUs": (3, "mixed", "on"),
    }[cluster]


# %% check_choices | right: tries every choice and takes the fastest that fits |
def choose(cluster):
    c, found = clusters.CLUSTERS[cluster], []
    precision = "mixed_fp16" if c.gpu in clusters.WITHOUT_BF16 else "mixed"
    for stage in range(4):
        for recompute in (False, True):
            if clusters.fits(c, stage, precision, recompute):
                seconds = clusters.compute_seconds(c, precision, recompute)
                seconds += clusters.message_seconds(c, stage, precision)
                found.append((seconds, stage, recompute))
    _, stage, recompute = min(found)
    return [stage, precision, recompute]

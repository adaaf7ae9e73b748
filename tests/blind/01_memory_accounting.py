# %% check_bytes_per_gpu | forgets the master weights, K is 8 | K is 12, not 8
def bytes_per_gpu(psi, world_size, stage):
    params, grads, optimizer = 2 * psi, 2 * psi, 8 * psi
    if stage >= 1:
        optimizer /= world_size
    if stage >= 2:
        grads /= world_size
    if stage >= 3:
        params /= world_size
    return params + grads + optimizer


# %% check_bytes_per_gpu | off by one in the stages, with > for >= | the stages are one too low
def bytes_per_gpu(psi, world_size, stage):
    params, grads, optimizer = 2 * psi, 2 * psi, 12 * psi
    if stage > 1:
        optimizer /= world_size
    if stage > 2:
        grads /= world_size
    if stage > 3:
        params /= world_size
    return params + grads + optimizer


# %% check_bytes_per_gpu | stage 2 keeps the optimizer state whole | the size of the optimizer state
def bytes_per_gpu(psi, world_size, stage):
    if stage == 0:
        return 16 * psi
    if stage == 1:
        return 4 * psi + 12 * psi / world_size
    if stage == 2:
        return 14 * psi + 2 * psi / world_size
    return 16 * psi / world_size


# %% check_bytes_per_gpu | returns GB, not bytes | that is GB
def bytes_per_gpu(psi, world_size, stage):
    table = [16, 4 + 12 / world_size, 2 + 14 / world_size, 16 / world_size]
    return table[stage] * psi / 1e9


# %% check_bytes_per_gpu | counts fp32: 4 + 4 + 8 | that is fp32 training
def bytes_per_gpu(psi, world_size, stage):
    params = 4 * psi / (world_size if stage == 3 else 1)
    grads = 4 * psi / (world_size if stage >= 2 else 1)
    optimizer = 8 * psi / (world_size if stage >= 1 else 1)
    return params + grads + optimizer


# %% check_bytes_per_gpu | has no branch for stage 0 and returns None there | returned None
def bytes_per_gpu(psi, world_size, stage):
    if stage == 1:
        return (4 + 12 / world_size) * psi
    if stage == 2:
        return (2 + 14 / world_size) * psi
    if stage == 3:
        return 16 / world_size * psi


# %% check_bytes_per_gpu | whole-number division of the bytes per parameter | // rounds down to whole bytes
def bytes_per_gpu(psi, world_size, stage):
    replicated = [16, 4, 2, 0][stage]
    sharded = 16 - replicated
    return psi * (replicated + sharded // world_size)


# %% check_bytes_per_gpu | right: sum over three pairs of bytes and first stage that shards them |
def bytes_per_gpu(psi, world_size, stage):
    kinds = ((2, 3), (2, 2), (12, 1))
    return sum(size * psi / world_size ** (stage >= first) for size, first in kinds)


# %% check_adapter_bytes | counts all the frozen parameters like trained ones | A frozen one has no gradient
def adapter_bytes(frozen, trained, world_size, stage):
    replicated = [16, 4, 2, 0][stage]
    return (frozen + trained) * (replicated + (16 - replicated) / world_size)


# %% check_adapter_bytes | never shards the frozen weights | frozen weights are counted whole
def adapter_bytes(frozen, trained, world_size, stage):
    replicated = [16, 4, 2, 0][stage]
    return 2 * frozen + trained * (replicated + (16 - replicated) / world_size)


# %% check_adapter_bytes | frozen weights have a gradient, too | are counted with gradients
def adapter_bytes(frozen, trained, world_size, stage):
    params = 2 * (frozen + trained)
    grads = 2 * (frozen + trained)
    state = 12 * trained
    if stage >= 1:
        state = state / world_size
    if stage >= 2:
        grads = grads / world_size
    if stage == 3:
        params = params / world_size
    return params + grads + state


# %% check_adapter_bytes | forgets the bf16 weights of the trained parameters | own 16-bit weights are missing
def adapter_bytes(frozen, trained, world_size, stage):
    weights, grads, state = 2 * frozen, 2 * trained, 12 * trained
    if stage >= 1:
        state /= world_size
    if stage >= 2:
        grads /= world_size
    if stage >= 3:
        weights /= world_size
    return weights + grads + state


# %% check_adapter_bytes | takes the trained ones as a part of the frozen number | do not subtract them
def adapter_bytes(frozen, trained, world_size, stage):
    replicated = [16, 4, 2, 0][stage]
    own = trained * (replicated + (16 - replicated) / world_size)
    return 2 * (frozen - trained) / (world_size if stage == 3 else 1) + own


# %% check_adapter_bytes | keeps an fp32 master weight of each frozen parameter | counted with master weights
def adapter_bytes(frozen, trained, world_size, stage):
    shards = [world_size if stage >= first else 1 for first in (1, 2, 3)]
    state = (4 * frozen + 12 * trained) / shards[0]
    return state + 2 * trained / shards[1] + 2 * (frozen + trained) / shards[2]


# %% check_adapter_bytes | shards the frozen weights from stage 1 on | counted as sharded at stage 1 already
def adapter_bytes(frozen, trained, world_size, stage):
    replicated = [16, 4, 2, 0][stage]
    own = trained * (replicated + (16 - replicated) / world_size)
    return own + 2 * frozen / (world_size if stage else 1)


# %% check_adapter_bytes | right: exact fractions |
def adapter_bytes(frozen, trained, world_size, stage):
    from fractions import Fraction

    part = Fraction(1, world_size)
    weights = 2 * (Fraction(frozen) + Fraction(trained)) * (part if stage > 2 else 1)
    grads = 2 * Fraction(trained) * (part if stage > 1 else 1)
    return float(weights + grads + 12 * Fraction(trained) * (part if stage > 0 else 1))


# %% check_largest_batch | rounds up instead of down | Round down
def largest_batch(gpu_bytes, world_size, stage):
    psi, sample = 1.5e9, 48 * 12 * 1024 * 1600 * 2
    replicated = [16, 4, 2, 0][stage]
    left = gpu_bytes - psi * (replicated + (16 - replicated) / world_size)
    return max(0, int(np.ceil(left / sample)))


# %% check_largest_batch | a negative batch where the model states alone do not fit | nothing negative
def largest_batch(gpu_bytes, world_size, stage):
    psi, sample = 1.5e9, 48 * 12 * 1024 * 1600 * 2
    replicated = [16, 4, 2, 0][stage]
    left = gpu_bytes - psi * (replicated + (16 - replicated) / world_size)
    return int(left // sample)


# %% check_largest_batch | forgets the two bytes of an activation | the activations count 1 byte each
def largest_batch(gpu_bytes, world_size, stage):
    psi, sample = 1.5e9, 48 * 12 * 1024 * 1600
    replicated = [16, 4, 2, 0][stage]
    left = gpu_bytes - psi * (replicated + (16 - replicated) / world_size)
    return max(0, int(left // sample))


# %% check_largest_batch | divides the activations by the number of GPUs, too | divided by the number of GPUs
def largest_batch(gpu_bytes, world_size, stage):
    psi, sample = 1.5e9, 48 * 12 * 1024 * 1600 * 2 / world_size
    replicated = [16, 4, 2, 0][stage]
    left = gpu_bytes - psi * (replicated + (16 - replicated) / world_size)
    return max(0, int(left // sample))


# %% check_largest_batch | rounds down to a power of two | largest power of two
def largest_batch(gpu_bytes, world_size, stage):
    sample = 48 * 12 * 1024 * 1600 * 2
    replicated = [16, 4, 2, 0][stage]
    left = gpu_bytes - 1.5e9 * (replicated + (16 - replicated) / world_size)
    batch = 1
    while 2 * batch * sample <= left:
        batch *= 2
    return batch if sample <= left else 0


# %% check_largest_batch | a batch that fills the memory exactly is refused | compare with <=
def largest_batch(gpu_bytes, world_size, stage):
    sample = 48 * 12 * 1024 * 1600 * 2
    replicated = [16, 4, 2, 0][stage]
    left = gpu_bytes - 1.5e9 * (replicated + (16 - replicated) / world_size)
    batch = 0
    while (batch + 1) * sample < left:
        batch += 1
    return batch


# %% check_largest_batch | takes the model states of stage 0 at every stage | those of plain data parallelism
def largest_batch(gpu_bytes, world_size, stage):
    left = gpu_bytes - memory.model_states(1.5e9, world_size, 0).total_bytes
    sample = memory.activations(layers=48, hidden=1600, batch=1, seq=1024)
    return max(0, int(left // sample))


# %% check_largest_batch | right: tries one batch after the other with the package's functions |
def largest_batch(gpu_bytes, world_size, stage):
    from itertools import count

    states = memory.model_states(1.5e9, world_size, stage).total_bytes
    too_large = (
        batch for batch in count(1) if states + memory.activations(48, 1600, batch, 1024) > gpu_bytes
    )
    return next(too_large) - 1


# %% check_bytes_per_gpu | the bytes of all GPUs together | sum over all GPUs
def bytes_per_gpu(psi, world_size, stage):
    replicated = [16, 4, 2, 0][stage]
    return psi * (replicated * world_size + 16 - replicated)


# %% check_bytes_per_gpu | stage 3 keeps the optimizer state whole | the size of the optimizer state
def bytes_per_gpu(psi, world_size, stage):
    params, grads, optimizer = 2 * psi, 2 * psi, 12 * psi
    if stage == 3:
        params /= world_size
        grads /= world_size
    elif stage == 2:
        grads /= world_size
        optimizer /= world_size
    elif stage == 1:
        optimizer /= world_size
    return params + grads + optimizer


# %% check_bytes_per_gpu | the master weight counts as a parameter | the size of the master weights
def bytes_per_gpu(psi, world_size, stage):
    params, grads, optimizer = 6 * psi, 2 * psi, 8 * psi
    if stage >= 1:
        optimizer /= world_size
    if stage >= 2:
        grads /= world_size
    if stage >= 3:
        params /= world_size
    return params + grads + optimizer


# %% check_bytes_per_gpu | GiB taken for GB, so the bytes are too few | that mixes GB and GiB
def bytes_per_gpu(psi, world_size, stage):
    table = [16, 4 + 12 / world_size, 2 + 14 / world_size, 16 / world_size]
    return table[stage] * psi / 2**30 * 1e9


# %% check_bytes_per_gpu | prints the bytes and returns nothing | prints something and returns None
def bytes_per_gpu(psi, world_size, stage):
    replicated = [16, 4, 2, 0][stage]
    print(psi * (replicated + (16 - replicated) / world_size))


# %% check_bytes_per_gpu | gradients in fp32, 18 bytes | the gradients have 2 bytes
def bytes_per_gpu(psi, world_size, stage):
    params, grads, optimizer = 2 * psi, 4 * psi, 12 * psi
    optimizer /= world_size if stage >= 1 else 1
    grads /= world_size if stage >= 2 else 1
    params /= world_size if stage >= 3 else 1
    return params + grads + optimizer


# %% check_adapter_bytes | the frozen weights are in fp32 | weights are counted in fp32
def adapter_bytes(frozen, trained, world_size, stage):
    replicated = [16, 4, 2, 0][stage]
    own = trained * (replicated + (16 - replicated) / world_size)
    return own + 4 * frozen / (world_size if stage == 3 else 1)


# %% check_adapter_bytes | stage 3 shards the frozen weights alone | of each trained parameter
def adapter_bytes(frozen, trained, world_size, stage):
    replicated = [16, 4, 2, 2][stage]
    own = trained * (replicated + (16 - replicated) / world_size)
    return own + 2 * frozen / (world_size if stage == 3 else 1)


# %% check_adapter_bytes | forgets the frozen weights altogether | the frozen weights are missing
def adapter_bytes(frozen, trained, world_size, stage):
    replicated = [16, 4, 2, 0][stage]
    return trained * (replicated + (16 - replicated) / world_size)


# %% check_adapter_bytes | frozen weights are sharded in proportion at every stage | of each frozen parameter
def adapter_bytes(frozen, trained, world_size, stage):
    replicated = [16, 4, 2, 0][stage]
    each = replicated + (16 - replicated) / world_size
    return trained * each + frozen * each / 8


# %% check_adapter_bytes | the frozen weights are sharded from stage 2 on | sharded at stage 2 already
def adapter_bytes(frozen, trained, world_size, stage):
    total = 2 * frozen / (world_size if stage in (2, 3) else 1)
    for size, first in ((12, 1), (2, 2), (2, 3)):
        total += size * trained / (world_size if stage >= first else 1)
    return total


# %% check_adapter_bytes | swaps frozen and trained | frozen and trained are swapped
def adapter_bytes(frozen, trained, world_size, stage):
    frozen, trained = trained, frozen
    replicated = [16, 4, 2, 0][stage]
    own = trained * (replicated + (16 - replicated) / world_size)
    return own + 2 * frozen / (world_size if stage == 3 else 1)


# %% check_largest_batch | rounds to the nearest whole number | rounded to the nearest
def largest_batch(gpu_bytes, world_size, stage):
    sample = 48 * 12 * 1024 * 1600 * 2
    replicated = [16, 4, 2, 0][stage]
    left = gpu_bytes - 1.5e9 * (replicated + (16 - replicated) / world_size)
    return max(0, round(left / sample))


# %% check_largest_batch | right: the whole number is a float, 4.0 |
def largest_batch(gpu_bytes, world_size, stage):
    sample = 48 * 12 * 1024 * 1600 * 2
    replicated = [16, 4, 2, 0][stage]
    left = gpu_bytes - 1.5e9 * (replicated + (16 - replicated) / world_size)
    return max(0.0, left // sample)


# %% check_largest_batch | the batch of all GPUs together | batch of all GPUs together
def largest_batch(gpu_bytes, world_size, stage):
    sample = 48 * 12 * 1024 * 1600 * 2
    replicated = [16, 4, 2, 0][stage]
    left = gpu_bytes - 1.5e9 * (replicated + (16 - replicated) / world_size)
    return world_size * max(0, int(left // sample))


# %% check_largest_batch | with checkpointing, which the exercise leaves out | with activation checkpointing
def largest_batch(gpu_bytes, world_size, stage):
    states = memory.model_states(1.5e9, world_size, stage).total_bytes
    sample = memory.activations(48, 1600, 1, 1024, checkpointing=True)
    return max(0, int((gpu_bytes - states) // sample))


# %% check_largest_batch | one layer alone, without the factor 48 | those of one layer
def largest_batch(gpu_bytes, world_size, stage):
    sample = 12 * 1024 * 1600 * 2
    replicated = [16, 4, 2, 0][stage]
    left = gpu_bytes - 1.5e9 * (replicated + (16 - replicated) / world_size)
    return max(0, int(left // sample))


# %% check_largest_batch | never less than 1, although no sample fits | Return 0, not 1
def largest_batch(gpu_bytes, world_size, stage):
    sample = 48 * 12 * 1024 * 1600 * 2
    replicated = [16, 4, 2, 0][stage]
    left = gpu_bytes - 1.5e9 * (replicated + (16 - replicated) / world_size)
    return max(1, int(left // sample))


# %% check_largest_batch | counts the weights alone and no other state | of model states for a parameter
def largest_batch(gpu_bytes, world_size, stage):
    weights = 3e9 / (world_size if stage == 3 else 1)
    return max(0, int((gpu_bytes - weights) // (48 * 12 * 1024 * 1600 * 2)))


# %% check_bytes_per_gpu | returns the three parts as a tuple | returned tuple
def bytes_per_gpu(psi, world_size, stage):
    return (
        2 * psi / (world_size if stage > 2 else 1),
        2 * psi / (world_size if stage > 1 else 1),
        12 * psi / (world_size if stage > 0 else 1),
    )


# %% check_bytes_per_gpu | divides by the stage as well | The sharded part is divided by
def bytes_per_gpu(psi, world_size, stage):
    replicated = [16, 4, 2, 0][stage]
    return psi * (replicated + (16 - replicated) / (world_size * max(stage, 1)))


# %% check_bytes_per_gpu | gathered parameters are added at stage 3 | come on top, on every GPU
def bytes_per_gpu(psi, world_size, stage):
    replicated = [16, 4, 2, 2][stage]
    return psi * (replicated + (16 - [16, 4, 2, 0][stage]) / world_size)


# %% check_adapter_bytes | every GPU trains parameters of its own, N times as many | once for each GPU
def adapter_bytes(frozen, trained, world_size, stage):
    trained *= world_size
    replicated = [16, 4, 2, 0][stage]
    own = trained * (replicated + (16 - replicated) / world_size)
    return own + 2 * frozen / (world_size if stage == 3 else 1)


# %% check_adapter_bytes | trained parameters in fp32: 4 + 4 + 8 | the size of the master weights
def adapter_bytes(frozen, trained, world_size, stage):
    weights = (2 * frozen + 4 * trained) / (world_size if stage >= 3 else 1)
    grads = 4 * trained / (world_size if stage >= 2 else 1)
    return weights + grads + 8 * trained / (world_size if stage >= 1 else 1)


# %% check_largest_batch | the activations are fp32, 4 bytes | They are 16-bit here
def largest_batch(gpu_bytes, world_size, stage):
    states = memory.model_states(1.5e9, world_size, stage).total_bytes
    return max(0, int((gpu_bytes - states) // (48 * 12 * 1024 * 1600 * 4)))


# %% check_largest_batch | takes GiB for GB | takes 1 GB for 2**30 bytes
def largest_batch(gpu_bytes, world_size, stage):
    states = memory.model_states(1.5e9, world_size, stage).total_bytes
    return max(0, int((gpu_bytes / 1e9 * 2**30 - states) // (48 * 12 * 1024 * 1600 * 2)))


# %% check_largest_batch | always keeps one sample free for safety | one sample too few
def largest_batch(gpu_bytes, world_size, stage):
    states = memory.model_states(1.5e9, world_size, stage).total_bytes
    return max(0, int((gpu_bytes - states) // (48 * 12 * 1024 * 1600 * 2)) - 1)


# %% check_largest_batch | divides by what one sample and the states take | count once for each sample
def largest_batch(gpu_bytes, world_size, stage):
    states = memory.model_states(1.5e9, world_size, stage).total_bytes
    return int(gpu_bytes // (states + 48 * 12 * 1024 * 1600 * 2))

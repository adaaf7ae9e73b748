"""Solutions of lesson 01's exercises."""


def bytes_per_gpu(psi, world_size, stage):
    params = 2 * psi / (world_size if stage >= 3 else 1)
    grads = 2 * psi / (world_size if stage >= 2 else 1)
    optimizer = 12 * psi / (world_size if stage >= 1 else 1)
    return params + grads + optimizer


def adapter_bytes(frozen, trained, world_size, stage):
    # Without an update there is nothing to keep for one: a frozen parameter is its 2-byte weight.
    frozen_weights = 2 * frozen / (world_size if stage >= 3 else 1)
    params = 2 * trained / (world_size if stage >= 3 else 1)
    grads = 2 * trained / (world_size if stage >= 2 else 1)
    optimizer = 12 * trained / (world_size if stage >= 1 else 1)
    return frozen_weights + params + grads + optimizer


def largest_batch(gpu_bytes, world_size, stage):
    psi = 1.5e9
    whole, divided = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}[stage]
    states = whole * psi + divided * psi / world_size
    sample = 12 * 48 * 1024 * 1600 * 2  # tensors, layers, tokens, hidden size, bytes
    return max(0, int((gpu_bytes - states) // sample))

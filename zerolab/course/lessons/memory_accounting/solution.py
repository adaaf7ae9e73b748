"""A solution of lesson 01's exercise."""


def bytes_per_gpu(psi, world_size, stage):
    params = 2 * psi / (world_size if stage >= 3 else 1)
    grads = 2 * psi / (world_size if stage >= 2 else 1)
    optimizer = 12 * psi / (world_size if stage >= 1 else 1)
    return params + grads + optimizer

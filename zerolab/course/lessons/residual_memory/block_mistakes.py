"""Lesson 07's exercise on tensor parallelism: what common mistakes make of an MLP that is cut."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import elu, gelu, layer_norm, leaky_relu, linear, silu, softplus

from zerolab.course.evidence import sum_of
from zerolab.course.lessons.residual_memory.mlp import HIDDEN, WIDTH, Parts, inputs, output_gradient


def of_many(parts: Parts, times: float) -> Sequence[Tensor]:
    """Return the ranks' products if x were so many times as large."""
    mlp = parts.mlp._replace(x=times * parts.mlp.x)
    return [mlp.part(rank, parts.size).product() for rank in range(parts.size)]


def by_inputs(parts: Parts) -> Tensor:
    """Return the sum of the ranks' outputs if the first layer is cut by its inputs."""
    mlp, size = parts.mlp, parts.size
    cut = zip(mlp.x.chunk(size, dim=-1), mlp.w1.chunk(size, dim=1), strict=True)
    return sum_of(mlp._replace(x=x, w1=w1).product() for x, w1 in cut)


def through_a_sum(parts: Parts) -> list[Tensor]:
    """Return what comes back to x through each rank, if the gradients of the hidden features are added up."""
    cut = [inputs().part(rank, parts.size) for rank in range(parts.size)]
    of_hidden = sum_of(output_gradient() @ mlp.w2.detach() for mlp in cut)
    hidden = [gelu(linear(mlp.x, mlp.w1, mlp.b1)) for mlp in cut]
    return [torch.autograd.grad(own, mlp.x, of_hidden)[0] for own, mlp in zip(hidden, cut, strict=True)]


def b1_last(parts: Parts) -> Tensor:
    """Return the whole product if gelu comes before b1."""
    mlp = parts.mlp
    return linear(gelu(linear(mlp.x, mlp.w1)) + mlp.b1, mlp.w2)


def with_activation(activation: Callable[[Tensor], Tensor], parts: Parts, rank: int) -> Tensor:
    """Return the output if another function than gelu stands between the layers, on each rank's part."""
    cut = [parts.mlp.part(each, parts.size) for each in range(parts.size)]
    hidden = [activation(linear(mlp.x, mlp.w1, mlp.b1)) for mlp in cut]
    return sum_of(linear(own, mlp.w2) for own, mlp in zip(hidden, cut, strict=True)) + parts.mlp.b2


Predicted = Callable[[Parts, int], Tensor]

# What may stand between the two layers instead of gelu.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu's approximation": partial(gelu, approximate="tanh"),
    "relu": torch.relu,
    "the square of relu": lambda hidden: hidden.relu().square(),
    "silu": silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky_relu": leaky_relu,
    "elu": elu,
    "softplus": softplus,
    "softmax over a rank's own features": lambda hidden: hidden.softmax(-1),
    "gelu of gelu": lambda hidden: gelu(gelu(hidden)),
}

# A sentence, and the output that rank r would have.
# fmt: off
OUTPUTS: dict[str, Predicted] = {
    "g is missing: each rank returns its own partial product. In the forward pass g adds up those of all "
    "ranks":
        lambda p, r: p.products[r] + p.mlp.b2,
    "g and b2 are missing: each rank returns its own partial product. Add up those of all ranks, and b2 then":
        lambda p, r: p.products[r],
    "b2 is missing: add it once, after g":
        lambda p, r: p.product,
    "every rank adds b2 before g adds up, so it counts N times: add it after g":
        lambda p, r: p.product + p.size * p.mlp.b2,
    "that is the mean of the partial products: a product of matrices is the sum of its parts":
        lambda p, r: p.product / p.size + p.mlp.b2,
    "that is the mean over the ranks, of b2 as well: add the products up, divide by nothing, and add b2 then":
        lambda p, r: (p.product + p.mlp.b2) / p.size,
    "f and g are exchanged in the forward pass: f returns x as it is, and g adds up":
        lambda p, r: of_many(p, p.size)[r] + p.mlp.b2,
    "f adds x up in the forward pass. Every rank has the same x, so it becomes N times as large: f returns "
    "x as it is, and adds up in the backward pass":
        lambda p, r: sum_of(of_many(p, p.size)) + p.mlp.b2,
    "the weights are not cut: every rank computes the whole product, and g adds up N of them":
        lambda p, r: p.size * p.product + p.mlp.b2,
    "every rank computes the whole block, b2 included, and g adds up N of them: cut w1, b1 and w2":
        lambda p, r: p.size * (p.product + p.mlp.b2),
    "every rank takes rank 0's parts of the weights":
        lambda p, r: p.size * p.products[0] + p.mlp.b2,
    "gelu is missing between the two layers":
        lambda p, r: linear(linear(p.mlp.x, p.mlp.w1, p.mlp.b1), p.mlp.w2, p.mlp.b2),
    **{
        f"in your block {name} stands where gelu should: call gelu(hidden)": partial(with_activation, act)
        for name, act in ACTIVATIONS.items()
    },
    "the input x is added to the output: this block is the two layers alone, without a residual connection":
        lambda p, r: p.product + p.mlp.b2 + p.mlp.x,
    "a layer norm stands before the first layer: this block is the two layers alone":
        lambda p, r: p.mlp._replace(x=layer_norm(p.mlp.x, (WIDTH,))).product() + p.mlp.b2,
    "the input x is divided by the number of ranks: every rank computes with the whole of x":
        lambda p, r: sum_of(of_many(p, 1 / p.size)) + p.mlp.b2,
    "gelu works on the output, too: it stands between the two layers alone":
        lambda p, r: gelu(p.product + p.mlp.b2),
    "gelu works on the output: it stands between the two layers":
        lambda p, r: gelu(linear(linear(p.mlp.x, p.mlp.w1, p.mlp.b1), p.mlp.w2, p.mlp.b2)),
    "every rank has rank 0's partial product: a broadcast sends one rank's numbers, and adds up nothing":
        lambda p, r: p.products[0] + p.mlp.b2,
    "b1 is added after gelu: the first layer adds it, linear(f(x), w1, b1), and gelu comes then":
        lambda p, r: b1_last(p) + p.mlp.b2,
    "b1 is missing":
        lambda p, r: p.mlp._replace(b1=torch.zeros(HIDDEN, dtype=torch.float64)).product() + p.mlp.b2,
    "w1 is cut by its inputs. Then a rank has a part of every sum of the first layer, and gelu of a sum is "
    "not the sum of gelus. Cut w1 and b1 by outputs: w1.chunk(N)[rank]":
        lambda p, r: by_inputs(p) + p.mlp.b2,
}

# The same for the gradient of x. The first ones are possible only where those of the weights are wrong, too.
BY_WEIGHTS: dict[str, Predicted] = {
    "x.grad is N times too large: f and g both add up in the backward pass. The output is the same on every "
    "rank and so is its gradient, so g's backward passes it on as it is":
        lambda p, r: p.size * p.whole("x"),
    "x.grad is N times what comes through this rank's own part: g adds up in the backward pass, and f does "
    "not. f's backward adds up, and g's passes the gradient on as it is":
        lambda p, r: p.size * p.gradients[r]["x"],
}
OF_X: dict[str, Predicted] = {
    "x.grad is what comes through this rank's own part: f is missing, or its backward does not add up. Every "
    "rank gets x, so its gradient is the sum of what comes back":
        lambda p, r: p.gradients[r]["x"],
    "x.grad is the mean over the ranks: f's backward adds up, without a division":
        lambda p, r: p.whole("x") / p.size,
    "x.grad is zeros":
        lambda p, r: torch.zeros_like(p.mlp.x),
    "f stands around the hidden features, too. Each rank has other features, and their gradients do not add "
    "up: f stands around x alone":
        lambda p, r: sum_of(through_a_sum(p)),
    "f stands around the hidden features, and not around x. Each rank has other features, and their "
    "gradients do not add up: put f around x":
        lambda p, r: through_a_sum(p)[r],
}
# fmt: on


def of_weight(name: str) -> dict[str, Predicted]:
    """The same for the gradient of w1, b1 or w2."""
    shifted = lambda p, rank: p.gradients[rank % p.size][name]
    return {
        f"{name}.grad is N times too large: the gradient was added up in g's backward, which passes it on as "
        "it is": lambda p, r: p.size * p.gradients[r][name],
        f"{name}.grad is 1/N of what it should be: g divides in the backward pass, and should pass the "
        "gradient on as it is": lambda p, r: p.gradients[r][name] / p.size,
        f"{name}.grad is that of the whole weight on every rank: a rank computes with its own part alone, "
        f"and nothing adds up {name}.grad": lambda p, r: p.whole(name),
        f"{name}.grad is in the next rank's part": lambda p, r: shifted(p, r + 1),
        f"{name}.grad is in the previous rank's part": lambda p, r: shifted(p, r - 1),
        f"{name}.grad is in rank 0's part on every rank": lambda p, r: shifted(p, 0),
        f"{name}.grad is in the part of rank N - 1 - r: rank r takes part r": lambda p, r: shifted(p, -r - 1),
        f"{name}.grad is the sum of those of all ranks' parts: f stands around {name}. Each rank has a part "
        "of its own, whose gradient is whole": lambda p, r: added_in_own_part(p, r, name),
        "the sums are right, but rank r has the hidden features r, r + N, r + 2N, …: here they are cut into "
        f"N chunks, {name}.chunk(N{', dim=1' if name == 'w2' else ''})[rank]": lambda p, r: strided(
            p, r, name
        ),
    }


def added_in_own_part(parts: Parts, rank: int, name: str) -> Tensor:
    """Return a weight's gradient if those of all ranks' parts are added up, as if they were one part."""
    dim = 1 if name == "w2" else 0
    cut = [each[name].chunk(parts.size, dim)[peer] for peer, each in enumerate(parts.gradients)]
    places = [sum_of(cut) if peer == rank else torch.zeros_like(cut[0]) for peer in range(parts.size)]
    return torch.cat(places, dim)


def strided(parts: Parts, rank: int, name: str) -> Tensor:
    """Return a weight's gradient if a rank has every N-th hidden feature."""
    whole, index = parts.whole(name), torch.arange(rank, HIDDEN, parts.size)
    dim = 1 if name == "w2" else 0
    return torch.zeros_like(whole).index_copy(dim, index, whole.index_select(dim, index))


# The same for the gradient of b2.
# fmt: off
OF_B2: dict[str, Predicted] = {
    "b2.grad is N times too large: every rank adds the whole of b2, so it has the whole gradient already":
        lambda p, r: p.size * p.whole("b2"),
    "b2.grad is 1/N of what it should be: b2 is divided by N before g adds it up. Add it whole, after g":
        lambda p, r: p.whole("b2") / p.size,
    "b2 is added on rank 0 alone, before g adds up. Then b2 has a gradient on rank 0 alone, and an update "
    "makes the ranks' copies of it differ. Add it on every rank, after g":
        lambda p, r: p.whole("b2") * (r == 0),
    "b2 is cut, and b2.grad is zeros outside a rank's part. Every rank adds the whole of b2, after g":
        lambda p, r: p.whole("b2") * torch.eye(p.size).repeat_interleave(WIDTH // p.size, dim=1)[r],
}
# fmt: on

MISTAKES = {"x": OF_X, "b2": OF_B2, **{name: of_weight(name) for name in ("w1", "b1", "w2")}}

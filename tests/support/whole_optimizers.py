"""Small optimizers that torch does not have, which look at whole parameters, or at several.

Those of the first kind update each parameter by itself. Those of the second look at other parameters, some of
them only now and then. Those of the third cannot be judged, or their state cannot be stored.
"""

import torch

from support import odd_optimizers as odd
from support.odd_optimizers import SignSGD


class TensorStep(SignSGD):
    """Divides by the norm of the parameter's gradient: what the others change is `also`."""

    def update(self, group: dict, p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / (gradient.norm() + 1e-6) * self.also(group, p, gradient)

    def also(self, group: dict, p: torch.Tensor, gradient: torch.Tensor) -> float:
        return 1.0

    def gradients(self) -> list[torch.Tensor]:
        every = [p.grad for group in self.param_groups for p in group["params"]]
        return [each for each in every if each is not None]

    def global_norm(self) -> float:
        return torch.stack([each.norm() for each in self.gradients()]).norm().item()


# By parameter.


class StepCountInSelf(TensorStep):
    """Counts its steps in an attribute."""

    steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        super().step()

    def also(self, group, p, gradient):
        return 1 / self.steps


class StepCountInGroup(TensorStep):
    """Counts its steps in its groups, whether or not their parameters are used."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step()

    def also(self, group, p, gradient):
        return 1 / group["steps"]


class CountsUsedGroups(TensorStep):
    """Counts its steps in the groups that have parameters, so a rank without any has another count."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in filter(lambda each: each["params"], self.param_groups):
            group["steps"] = group.get("steps", 0) + 1
        super().step()


class RowsAndColumns(SignSGD):
    """Keeps a mean for each row and each column of a matrix, in a dict, and one number for a vector."""

    def update(self, group, p, gradient):
        square = gradient.square()
        means = {0.5: square.mean(0), 0.9: square.mean(-1)} if p.dim() >= 2 else {0.5: square.mean().view(1)}
        self.state[p]["means"] = means
        return gradient / (1 + sum(each.sum() for each in means.values()))


class OnlyMatrices(TensorStep):
    """Refuses other parameters when it is built."""

    def __init__(self, params, lr: float = 0.1):
        super().__init__(params, lr)
        if any(p.dim() != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("only matrices")


class OnlyVectors(TensorStep):
    """Refuses other parameters when it is built, matrices too."""

    def __init__(self, params, lr: float = 0.1):
        super().__init__(params, lr)
        if any(p.dim() != 1 for group in self.param_groups for p in group["params"]):
            raise ValueError("only vectors")


class OnlyConvolutions(TensorStep):
    """Fails in its step with other parameters than those of a convolution."""

    def also(self, group, p, gradient):
        _out, _in, height, width = p.shape
        return height * width


class ReadsANumber(TensorStep):
    """Reads a number from a tensor, as Adafactor does, and keeps one number for each row."""

    def also(self, group, p, gradient):
        norm = gradient.norm().item()
        self.state[p]["rows"] = torch.zeros(p.shape[:1], device=p.device)
        return min(norm, 1.0)


class WaitsForANumber(TensorStep):
    """Has a loop that ends by the values of a tensor. No tensor without contents ends it."""

    def also(self, group, p, gradient):
        self.state[p]["kept"] = gradient.clone()
        scaled = gradient.clone()
        while 0.5 < scaled.abs().sum().item() < torch.inf:
            scaled /= 2
        return 1.0


class NeedsValues(TensorStep):
    """Reads all values, which the meta device does not have."""

    def also(self, group, p, gradient):
        self.state[p]["kept"] = torch.zeros(2 * p.numel())
        return 1 + min(gradient.flatten().tolist(), default=0.0) * 0


# Across parameters.


class MeetInOneGroup(TensorStep):
    """Looks at the group's gradients where it has two parameters or more."""

    def also(self, group, p, gradient):
        norms = [q.grad.norm() for q in group["params"] if q.grad is not None]
        return 1 / (1 + sum(norms)) if len(norms) > 1 else 1 / (1 + gradient.norm())


class MeetWithOneShape(TensorStep):
    """Looks at the gradients of all parameters of one shape, as a class that stacks them may do."""

    def also(self, group, p, gradient):
        return 1 / (1 + sum(each.norm() for each in self.gradients() if each.shape == gradient.shape))


class StacksMatrices(SignSGD):
    """Iterates as Muon does, on all matrices of one shape at once: one in a thousand differs, by a bit.

    Some processors add up in the same order for one matrix as for several. So the difference is made here.
    """

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            for shape in {p.shape for p in used if p.dim() == 2}:
                of_shape = [p for p in used if p.shape == shape]
                x = torch.stack([p.grad for p in of_shape]).bfloat16()
                x /= x.norm(dim=(1, 2), keepdim=True) + 1e-7
                for _ in range(5):
                    a = x @ x.mT
                    b = torch.baddbmm(a, a, a, beta=-4.775, alpha=2.0315)
                    x = torch.baddbmm(x, b, x, beta=3.4445)
                if len(of_shape) > 1:
                    bits = x.view(torch.int16)
                    bits += bits % 1000 == 0  # the next number, for one in a thousand
                for p, update in zip(of_shape, x, strict=True):
                    p -= group["lr"] * update


class LargeGlobalNorm(TensorStep):
    """Clips by the norm of all gradients where that is large."""

    most = 1e5

    def also(self, group, p, gradient):
        return min(1.0, self.most / (1 + self.global_norm()))


class HugeGlobalNorm(LargeGlobalNorm):
    """Clips where it is very large."""

    most = 1e10


class SkipsAll(TensorStep):
    """Skips the update of all parameters where one gradient is not finite."""

    def also(self, group, p, gradient):
        return float(all(each.isfinite().all() for each in self.gradients()))


class LeakingState(TensorStep):
    """Adds the momentum of the parameter before."""

    before = 0.0

    def also(self, group, p, gradient):
        state = self.state[p]
        state["m"] = 0.9 * state.get("m", 0.0) + gradient.norm().item()
        leaked, self.before = self.before, state["m"]
        return 1 / (1 + leaked)


class SharedState(TensorStep):
    """Keeps a number of the last parameter in the state of each, in a dict, and does not use it."""

    def also(self, group, p, gradient):
        for q in group["params"]:
            self.state[q]["last"] = {"norm": gradient.norm().item()}
        return 1.0


class PlaceInGroup(TensorStep):
    """Depends on the place of the parameter in its group."""

    def also(self, group, p, gradient):
        return 1 / (1 + [q is p for q in group["params"]].index(True))


class WhereSomeAreUnused(TensorStep):
    """Looks at the norm of all gradients where a parameter has none."""

    def also(self, group, p, gradient):
        unused = any(q.grad is None for each in self.param_groups for q in each["params"])
        return 1 / (1 + self.global_norm()) if unused else 1.0


class AFewParameters(TensorStep):
    """Looks at the norm of all gradients where it has a few parameters: neither one, nor a whole model."""

    def also(self, group, p, gradient):
        few = 2 <= sum(len(each["params"]) for each in self.param_groups) <= 6
        return 1 / (1 + self.global_norm()) if few else 1.0


class OneParameter(TensorStep):
    """Has another rate where it has one parameter, of many dimensions and with a large gradient."""

    def also(self, group, p, gradient):
        alone = sum(len(each["params"]) for each in self.param_groups) == 1
        return 0.5 if alone and p.dim() == 5 and 1e2 < gradient.norm() < 1e5 else 1.0


class ChangesPhase(TensorStep):
    """Changes the rate of a group where the step of one of its parameters changes no more."""

    def also(self, group, p, gradient):
        state = self.state[p]
        if 0 < gradient.norm().item() == state.get("norm"):
            group["lr"] = 1 / (1 + p.numel())
        state["norm"] = gradient.norm().item()
        return 1.0


class FailsAlone(TensorStep):
    """Fails where none of its parameters has a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        torch.stack([each.norm() for each in self.gradients()])
        super().step()


class OneStepSize(odd.SignSGD):
    """Takes one group and a closure, as LBFGS does, and looks at all gradients."""

    def __init__(self, params, lr: float = 0.1):
        super().__init__(params, lr)
        if len(self.param_groups) > 1:
            raise ValueError("no parameter groups")

    @torch.no_grad()
    def step(self, closure):
        closure()
        super().step()

    def update(self, group, p, gradient):
        return gradient / sum(1 + q.grad.abs().sum() for q in group["params"])


# Unsuitable.


class CountsCalls(TensorStep):
    """Counts the calls of step of all optimizers of the class."""

    calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        type(self).calls += 1
        super().step()

    def also(self, group, p, gradient):
        return 1 / self.calls


class RareNoise(TensorStep):
    """Draws a random number in each step, and uses one in a billion."""

    @torch.no_grad()
    def step(self, closure=None):
        self.factor = 2.0 if torch.rand(()) < 1e-9 else 1.0
        super().step()

    def also(self, group, p, gradient):
        return self.factor


class NeedsAClosure(TensorStep):
    """Looks at one parameter at a time, but has no step without a closure."""

    @torch.no_grad()
    def step(self, closure):
        closure()
        super().step()


class Object(TensorStep):
    """Keeps an object of a class of its own."""

    def also(self, group, p, gradient):
        self.state[p]["kept"] = object()
        return 1.0


class Growing(TensorStep):
    """Keeps every gradient."""

    def also(self, group, p, gradient):
        self.state[p]["history"] = [*self.state[p].get("history", []), gradient.clone()]
        return 1.0


class SizedByValues(TensorStep):
    """Keeps the positive elements of the first gradient."""

    def also(self, group, p, gradient):
        self.state[p].setdefault("positive", gradient[gradient > 0].clone())
        return 1.0


class NoUnused(TensorStep):
    """Cannot leave a parameter without a gradient alone."""

    @torch.no_grad()
    def step(self, closure=None):
        if any(p.grad is None for group in self.param_groups for p in group["params"]):
            raise RuntimeError("a gradient is missing")
        super().step()


BY_PARAMETER = [
    odd.TensorNorm, odd.Projection, odd.SpikeDetection, odd.LargeMatrices, odd.LastElements, odd.CounterOfOne,
    odd.LateCounterOfOne, odd.History, odd.SkipsEmpty, StepCountInSelf, StepCountInGroup, RowsAndColumns,
    OnlyMatrices, OnlyVectors, OnlyConvolutions, ReadsANumber, WaitsForANumber, NeedsValues,
]  # fmt: skip
ACROSS_PARAMETERS = [
    odd.GlobalNorm, odd.Estimate, odd.CountsParameters, odd.LargestRate, odd.CountsUse, MeetInOneGroup,
    MeetWithOneShape, StacksMatrices, LargeGlobalNorm, HugeGlobalNorm, SkipsAll, LeakingState, SharedState,
    PlaceInGroup, CountsUsedGroups, WhereSomeAreUnused, AFewParameters, OneParameter, ChangesPhase,
    FailsAlone, OneStepSize,
]  # fmt: skip
UNSUITABLE = [
    odd.Noise, odd.GlobalState, CountsCalls, RareNoise, NeedsAClosure, Object, Growing, SizedByValues,
    NoUnused,
]  # fmt: skip

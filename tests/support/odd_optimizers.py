"""Small optimizers that torch does not have, one for each thing that an update may depend on.

The elementwise ones keep a counter, a schedule or late state of their own. The others look at more than one
element, some of them only at gradients of a certain kind.
"""

import torch


class SignSGD(torch.optim.Optimizer):
    """Elementwise, without any state: what the others change is `update`."""

    def __init__(self, params, lr: float = 0.1, **others):
        super().__init__(params, {"lr": lr, **others})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p -= group["lr"] * self.update(group, p, p.grad)

    def update(self, group: dict, p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sign()


# Elementwise, with something of their own.


class CountingAdam(torch.optim.Optimizer):
    """Adam, whose one step counter is in one of the places that people use.

    Args: count: the tensor to count in, where that is "tensor in the group"; a new one by default.
    """

    def __init__(self, params, lr: float = 1e-2, where: str = "self", count: torch.Tensor | None = None):
        if count is None:
            count = torch.zeros(()) if where == "tensor in the group" else 0
        super().__init__(params, {"lr": lr, "where": where, "count": count})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            self._count(group)
            for p in (p for p in group["params"] if p.grad is not None):
                self._update(group, p)

    def _count(self, group: dict) -> None:
        match group["where"]:
            case "group":
                group["count"] += 1
            case "tensor in the group":
                group["count"].add_(1)
            case "group, made in step":
                group["made"] = group.get("made", 0) + 1

    def _update(self, group: dict, p: torch.Tensor) -> None:
        state = self.state[p]
        if not state:
            state |= {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "steps": 0}
        state["steps"] += 1
        t = {
            "self": self.count,
            "state": state["steps"],
            "group, made in step": group.get("made"),
        }.get(group["where"], float(group["count"]))
        state["m"].lerp_(p.grad, 0.1)
        state["v"].lerp_(p.grad.square(), 0.001)
        p -= group["lr"] * (state["m"] / (1 - 0.9**t)) / ((state["v"] / (1 - 0.999**t)).sqrt() + 1e-8)


class OwnSchedule(SignSGD):
    """Lowers its learning rate itself, in its groups."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["lr"] *= 0.75


class LateState(SignSGD):
    """Keeps nothing before its third step."""

    def update(self, group: dict, p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        state["steps"] = state.get("steps", 0) + 1
        if state["steps"] >= 3:
            state["late"] = self.late(p) + gradient
        return state.get("late", gradient)

    def late(self, p: torch.Tensor) -> torch.Tensor:
        return self.state[p].get("late", torch.zeros_like(p))


# Not elementwise.


class TensorNorm(SignSGD):
    """Divides by the norm of the parameter's gradient."""

    def update(self, group, p, gradient):
        return gradient / (gradient.norm() + 1e-6)


class GlobalNorm(SignSGD):
    """Divides by the norm of all gradients."""

    def update(self, group, p, gradient):
        every = [q.grad for each in self.param_groups for q in each["params"] if q.grad is not None]
        return gradient / (torch.stack([each.square().sum() for each in every]).sum() + 1e-6)


class Projection(SignSGD):
    """Takes away what is along the weights, where the gradient is nearly orthogonal to them."""

    def update(self, group, p, gradient):
        along = p / (p.norm() + 1e-12)
        if (along * gradient).sum().abs() < 1e-3 * gradient.norm():
            gradient = gradient - along * (along * gradient).sum()
        return gradient


class SpikeDetection(SignSGD):
    """Shrinks a gradient whose largest element is far above those before."""

    def update(self, group, p, gradient):
        state, largest = self.state[p], max(gradient.abs().flatten().tolist(), default=0.0)
        usual = state.get("usual", largest)
        state["usual"] = max(usual, largest)
        return gradient / 10 if largest > 100 * usual > 0 else gradient


class ElementwiseSpikeDetection(SignSGD):
    """Shrinks a gradient whose largest element is far above the last one's. Its state can be cut."""

    def update(self, group, p, gradient):
        before = self.state[p].get("before", gradient)
        self.state[p]["before"] = gradient.clone()
        last, now = (max(each.abs().flatten().tolist(), default=0.0) for each in (before, gradient))
        return gradient / 10 if now > 100 * last > 0 else gradient


class NormWhereLarge(SignSGD):
    """Divides a gradient by its norm where that is large."""

    def update(self, group, p, gradient):
        return gradient / gradient.norm() if gradient.norm() > 1000 else gradient


class Estimate(SignSGD):
    """Keeps an estimate in its group, made of all its gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            sizes = [p.grad.abs().sum().item() for p in group["params"] if p.grad is not None]
            group["distance"] = max(group.get("distance", 0.0), *sizes, 0.0)
        super().step()


class CountsParameters(SignSGD):
    """Counts its updates of parameters, and not its steps."""

    updates = 0

    def update(self, group, p, gradient):
        self.updates += 1
        return gradient / self.updates


class LargestRate(SignSGD):
    """Uses the largest learning rate of the groups that have parameters, for all of them."""

    def update(self, group, p, gradient):
        return gradient * max(each["lr"] for each in self.param_groups if each["params"])


class CountsUse(SignSGD):
    """Counts a step only where one of the group's parameters has a gradient."""

    def update(self, group, p, gradient):
        return gradient / group["uses"]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            used = any(p.grad is not None for p in group["params"])
            group["uses"] = group.get("uses", 0) + used
        super().step()


class Noise(SignSGD):
    """Adds noise."""

    def update(self, group, p, gradient):
        return gradient + torch.randn_like(gradient)


class LargeMatrices(SignSGD):
    """Divides by the rows' norms, of matrices with 64 rows or more."""

    def update(self, group, p, gradient):
        return gradient / gradient.norm(dim=1, keepdim=True) if p.dim() == 2 and len(p) >= 64 else gradient


class LastElements(SignSGD):
    """Sometimes rounds differently in a tensor's last elements, which do not fill a vector register.

    So do sigmoid and pow on a CPU, if not on every one; here it is done by hand.
    """

    def __init__(self, params, lr: float = 1e-3):
        super().__init__(params, lr)

    def update(self, group, p, gradient):
        update = gradient.sign() / (1 + gradient.abs())
        bits = update.flatten().view(torch.int32)
        last = bits[len(bits) // 16 * 16 :]
        last += last % 256 == 1
        return bits.view(torch.float32).view(p.shape)


# State that a checkpoint cannot store.


class CounterOfOne(LateState):
    """A counter that is a tensor of shape (1,), from the first step or from the third."""

    def update(self, group, p, gradient):
        self.state[p]["tensor_step"] = self.state[p].get("tensor_step", torch.zeros(1)) + 1
        return gradient


class LateCounterOfOne(LateState):
    """A tensor of shape (1,) from the third step on."""

    def late(self, p):
        self.state[p]["tensor_step"] = torch.ones(1)
        return super().late(p)


class History(SignSGD):
    """A list of the last gradients."""

    def update(self, group, p, gradient):
        self.state[p]["history"] = [*self.state[p].get("history", []), gradient.clone()][-3:]
        return sum(self.state[p]["history"])


class GlobalState(SignSGD):
    """State under a name, of no parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        self.state["everything"]["steps"] = self.state["everything"].get("steps", 0) + 1
        super().step()


class SkipsEmpty(SignSGD):
    """Keeps nothing for a parameter without elements."""

    def update(self, group, p, gradient):
        if p.numel():
            self.state[p]["m"] = gradient.clone()
        return gradient


ELEMENTWISE = [SignSGD, CountingAdam, OwnSchedule, LateState]
NOT_ELEMENTWISE = [
    TensorNorm, GlobalNorm, Projection, SpikeDetection, ElementwiseSpikeDetection, NormWhereLarge, Estimate,
    CountsParameters, LargestRate, CountsUse, Noise, LargeMatrices, LastElements,
]  # fmt: skip
NOT_STORABLE = [CounterOfOne, LateCounterOfOne, History, GlobalState, SkipsEmpty]

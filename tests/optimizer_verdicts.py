"""Which optimizers of a library can be sharded: python tests/optimizer_verdicts.py torch.optim timm.optim

For every optimizer class of the modules it prints the probe's refusal, or its kind and how training on two
ranks at stages 1 and 3 compares with training in one process with the class itself (support/references.py),
and also after a checkpoint half-way. A class that keeps something in its own attributes has other bits then,
as it has in one process: no state_dict has them.
An optimizer of whole parameters gets those of a number of dimensions that it takes, and SGD the others. Each
class is tried with its defaults and with weight decay, and with ``--keywords`` also with each boolean keyword
changed. The exit code is 1 if an optimizer was accepted and left other bits or took too long, and 2 if a
module is not installed.
"""

import argparse
import importlib
import inspect
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from support import subjects
from support.whole_updates import together
from torch import nn

import zerolab
from zerolab.optimizer.probe import Kind, verdict_of

STEPS, STAGES, SUBJECTS, WORLD_SIZE = 8, (1, 3), ("patchwork", "gpt"), 2
TIMEOUT_SECONDS = 900  # the probe of a class with loops of its own takes minutes on a slow machine
AFTER_A_CHECKPOINT = "after a checkpoint"


class Verdict(NamedTuple):
    """The result for one class: accepted, refused, wrong, too slow or own error; and why."""

    name: str
    keywords: dict
    result: str
    reason: str

    @property
    def kind(self) -> str:
        """What it is counted as: accepted optimizers by how they are sharded."""
        return f"accepted {self.reason.split(', ')[-1]}" if self.result == "accepted" else self.result

    def __str__(self) -> str:
        given = ", ".join(f"{key}={value}" for key, value in self.keywords.items())
        return f"{self.result:9} {self.name}({given})  {self.reason}"


def classes_of(module: str) -> list[type[torch.optim.Optimizer]]:
    """The optimizer classes in a module, by name."""
    found = vars(importlib.import_module(module)).values()
    kinds = {each for each in found if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)}
    return sorted(kinds - {torch.optim.Optimizer}, key=lambda kind: kind.__name__)


def keywords_of(kind: type, switches: bool) -> Iterator[dict]:
    """Keywords to try a class with: defaults, weight decay, and with ``switches`` each boolean changed."""
    known = inspect.signature(kind).parameters
    required = {"lr": 0.01} if "lr" in known and known["lr"].default is inspect.Parameter.empty else {}
    decay = {"weight_decay": 0.1} if "weight_decay" in known else {}
    yield required
    if decay:
        yield required | decay
    for key, each in known.items() if switches else ():
        if isinstance(each.default, bool) and key not in ("foreach", "fused", "capturable"):
            yield required | decay | {key: not each.default}


class LowerRate:
    """Lowers the learning rate of groups that have one, once, in the middle of the training."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            if self.steps == STEPS // 2 and "lr" in group:
                group["lr"] *= 0.3


def groups_for(dimensions: tuple[int, ...] | None) -> Callable[[nn.Module], list[dict]]:
    """Groups of the parameters with these numbers of dimensions, None for all of them, and of the others.

    Some classes fail with a parameter without elements, in one process too. It is among the others.
    """

    def groups(model: nn.Module) -> list[dict]:
        trainable = [p for p in model.parameters() if p.requires_grad]
        taken = [p for p in trainable if dimensions is None or (p.dim() in dimensions and p.numel())]
        others = [p for p in trainable if not any(p is each for each in taken)]
        by_sgd = {"params": others, "optimizer": torch.optim.SGD, "lr": 0.01}
        return [{"params": taken}, *([by_sgd] if others else [])]

    return groups


def differences(kind: type, keywords: dict, dimensions: tuple[int, ...] | None, folder: str) -> list[str]:
    """On one rank: where training with the engine leaves other parameters than training in one process."""
    found, groups = [], groups_for(dimensions)
    for subject in SUBJECTS:
        arguments = STEPS, groups, LowerRate
        both = partial(together, main=kind)
        whole = subjects.train_replicas(subject, WORLD_SIZE, both, *arguments, **keywords)[0].parameters
        for stage, resumes in product(STAGES, (False, True)):
            place = Path(folder, f"{subject}-{stage}") if resumes else None
            run, _ = subjects.train_sharded(subject, stage, kind, *arguments, resume=place, **keywords)
            pairs = [(run.parameters[name], value) for name, value in whole.items()]
            different = f"other parameters at stage {stage} of {subject}"
            same = all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in pairs)
            if not same and different not in found:
                found.append(f"{different}{f' {AFTER_A_CHECKPOINT}' * resumes}")
    return found


def verdict(kind: type, keywords: dict) -> Verdict:
    """Probe a class, and train with it if it is accepted."""
    judged = lambda *result: Verdict(f"{kind.__module__}.{kind.__qualname__}", keywords, *result)
    try:
        probed = verdict_of(kind, keywords)
    except Exception as error:
        return judged("own error", f"{type(error).__name__}: {error}")
    if probed.refusal:
        return judged("refused", probed.refusal)
    dimensions = tuple(probed.found.taken) if probed.found else None
    try:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (kind, keywords, dimensions, folder)
            found = zerolab.launch(differences, WORLD_SIZE, *arguments, timeout=TIMEOUT_SECONDS)
    except RuntimeError as error:
        return judged("wrong", f"training failed: {error}")
    except TimeoutError:
        return judged("too slow", f"not trained to its end in {TIMEOUT_SECONDS} s")
    different = sorted({*found[0], *found[1]})
    if any(not each.endswith(AFTER_A_CHECKPOINT) for each in different):
        return judged("wrong", ", ".join(different))
    how = "by parameter" if probed.kind is Kind.BY_PARAMETER else "elementwise"
    return judged("accepted", f"same bits{f', other ones {AFTER_A_CHECKPOINT}' * bool(different)}, {how}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="optimizer_verdicts.py", description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="+", help="modules that hold optimizer classes, such as torch.optim")
    parser.add_argument("--keywords", action="store_true", help="change each boolean keyword of a class, too")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        kinds = [kind for module in args.modules for kind in classes_of(module)]
    except ModuleNotFoundError as error:
        print(f"optimizer_verdicts.py: {error}: install its package, or check the name", file=sys.stderr)
        return 2
    count: Counter[str] = Counter()
    for kind in kinds:
        for keywords in keywords_of(kind, args.keywords):
            each = verdict(kind, keywords)
            count[each.kind] += 1
            print(each, flush=True)
    print(", ".join(f"{number} {result}" for result, number in sorted(count.items())))
    return int(count["wrong"] + count["too slow"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

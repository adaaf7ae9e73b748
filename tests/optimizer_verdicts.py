"""Which optimizers of a library can be sharded: python tests/optimizer_verdicts.py torch.optim timm.optim

For every optimizer class of the modules it prints the probe's refusal, or how training on two ranks at stages
1 and 3 compares with training in one process with the class itself (support/references.py). Each class is
tried with its defaults and with weight decay, and with ``--keywords`` also with each boolean keyword changed.
The exit code is 1 if an optimizer was accepted and left other bits, and 2 if a module is not installed.
"""

import argparse
import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from support import subjects

import zerolab
from zerolab.optimizer.probe import state_bytes_per_parameter

STEPS, STAGES, SUBJECTS, WORLD_SIZE = 8, (1, 3), ("patchwork", "gpt"), 2
TIMEOUT_SECONDS = 120


class Verdict(NamedTuple):
    """The result for one class with these keywords: accepted, refused, wrong or own error; and why."""

    name: str
    keywords: dict
    result: str
    reason: str

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


def lower_rate(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < STEPS // 2 else 0.3)


def differences(kind: type, keywords: dict) -> list[str]:
    """On one rank: where training with the engine leaves other parameters than training in one process."""
    found = []
    for subject in SUBJECTS:
        arguments = kind, STEPS, None, lower_rate
        whole = subjects.train_replicas(subject, WORLD_SIZE, *arguments, **keywords)[0].parameters
        for stage in STAGES:
            run, _ = subjects.train_sharded(subject, stage, *arguments, **keywords)
            pairs = [(run.parameters[name], value) for name, value in whole.items()]
            if not all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in pairs):
                found.append(f"other parameters at stage {stage} of {subject}")
    return found


def verdict(kind: type, keywords: dict) -> Verdict:
    """Probe a class, and train with it if it is accepted."""
    judged = lambda *result: Verdict(f"{kind.__module__}.{kind.__qualname__}", keywords, *result)
    try:
        state_bytes_per_parameter(kind, keywords)
    except Exception as error:
        refused = isinstance(error, ValueError) and "cannot be sharded" in str(error)
        return judged("refused" if refused else "own error", f"{type(error).__name__}: {error}")
    try:
        found = zerolab.launch(differences, WORLD_SIZE, kind, keywords, timeout=TIMEOUT_SECONDS)
    except RuntimeError as error:
        return judged("wrong", f"training failed: {error}")
    return judged(
        "wrong" if any(found) else "accepted", ", ".join(sorted({*found[0], *found[1]})) or "same bits"
    )


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
            count[each.result] += 1
            print(each, flush=True)
    print(", ".join(f"{number} {result}" for result, number in sorted(count.items())))
    return int(count["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

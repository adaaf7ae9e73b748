"""Of which kind the optimizers of some libraries are: python tests/optimizer_kinds.py torch.optim timm.optim

For every optimizer class of the modules it prints whether its parameters may be cut anywhere, only between
parameters, or nowhere, and why it is of no kind that may be cut in smaller pieces. For a class that keeps
parameters whole it prints the numbers of dimensions it takes, and the bytes of state of a 100 x 50 matrix.
The last lines have the count of each kind. A class is tried with its defaults, and where it asks for
``use_muon`` in its groups, with both values. Modules that are not installed are skipped.
"""

import argparse
import os
import sys
from collections import Counter

import torch
from optimizer_verdicts import classes_of, keywords_of

from zerolab.optimizer.probe import Kind, state_bytes_of, verdict_of

NOT_BUILT = "not built"
MATRIX = 100, 50


def judged(of_class: type[torch.optim.Optimizer], options: dict) -> tuple[str, str]:
    """The kind of a class and what more there is to say; or that it cannot be built, with its error."""
    keywords = next(keywords_of(of_class, switches=False))
    try:
        verdict = verdict_of(of_class, keywords, options)
    except Exception as error:
        return NOT_BUILT, f"{type(error).__name__}: {error}"
    kind, reason = verdict.kind.short, verdict.reason
    if verdict.found and not verdict.refusal_of(MATRIX):
        nbytes = state_bytes_of(of_class, keywords, options, MATRIX)
        reason = f"dimensions {', '.join(map(str, verdict.found.taken))}; {nbytes} bytes of state; {reason}"
    return kind, reason


def rows(modules: list[str]) -> list[tuple[str, str, str]]:
    """Print a row for each class, and return its module, its kind and its reason."""
    found = []
    for module in modules:
        try:
            classes = classes_of(module)
        except ModuleNotFoundError as error:
            print(f"{module} is skipped: {error}")
            continue
        for of_class in classes:
            given: list[dict] = [{}]
            if "use_muon" in judged(of_class, {})[1]:
                given = [{"use_muon": True}, {"use_muon": False}]
            for options in given:
                kind, reason = judged(of_class, options)
                shown = ", ".join(f"{key}={value}" for key, value in options.items())
                print(f"{kind:17} {module}.{of_class.__name__}({shown})  {reason}".rstrip(), flush=True)
                found.append((module, kind, reason))
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="optimizer_kinds.py", description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="+", help="modules that hold optimizer classes, such as torch.optim")
    args = parser.parse_args(argv)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    counts = Counter((module, kind) for module, kind, _ in rows(args.modules))
    for module in dict.fromkeys(module for module, _ in counts):
        of_kind = [(kind.short, counts[module, kind.short]) for kind in Kind]
        of_kind.append((NOT_BUILT, counts[module, NOT_BUILT]))
        print(f"{module}: " + ", ".join(f"{number} {kind}" for kind, number in of_kind if number))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

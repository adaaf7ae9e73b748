"""Run a reader's function where hash() of a text returns something else, as it does from process to process.

The ranks of a launch are forked from one process, and have its hash seed. Those of torchrun have one each. So
an order of a set of texts is the same on all ranks of a launch, and fails on real ones.
"""

import dis
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from zerolab.course.names import codes_of
from zerolab.launcher.payload import pickle_payload

SEEDS = ("6", "8")  # a set of two names of lesson 09 has another order under each of them
_NAMES = {"set", "frozenset", "hash"}
_OPERATIONS = {"BUILD_SET", "SET_ADD", "SET_UPDATE"}
_OF_SETS = {"&", "|", "^", "&=", "|=", "^="}


def may_depend(*functions: Any) -> bool:
    """Whether the code of functions, or of classes' methods, has a set or hash() in it.

    Only a run under two seeds proves anything: many such functions do not depend on the order.
    """
    return any(_has_a_set(code) for each in functions for code in codes_of(each))


def _has_a_set(code: CodeType) -> bool:
    if _NAMES.intersection(code.co_names):
        return True
    return any(
        each.opname in _OPERATIONS or (each.opname == "BINARY_OP" and each.argrepr in _OF_SETS)
        for each in dis.get_instructions(code)
    )


def under_each_seed(script: Path, fn: Callable, *args: Any) -> list[str]:
    """What a script prints, for each seed; nothing where it fails. It reads the call from standard input."""
    payload = pickle_payload(fn, args, {}).pickled
    started = [
        subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for seed in SEEDS
    ]
    said = [child.communicate(payload)[0].decode() for child in started]
    return [] if any(child.returncode for child in started) else said

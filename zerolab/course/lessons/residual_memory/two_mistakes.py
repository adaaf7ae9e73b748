"""Lesson 07's exercise on host memory: formulas that are wrong in two parts at once."""

from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any

from zerolab.course.lessons.memory_accounting.numbers import Answers, Formula, fits

_K, _ITEM = {"mixed": 12, "fp32": 8}, {"mixed": 2, "fp32": 4}
_OTHER = {"mixed": "fp32", "fp32": "mixed"}
# For each part of the formula: in words, and its value in a case (psi, n_d, kept, n_m, precision).
Part = dict[str, Callable[..., Any]]
PARTS: dict[str, Part] = {
    "states": {
        "the optimizer state is counted once: a step reads it and writes it": lambda p, d, e, m, x: 1,
        "the optimizer state is missing": lambda p, d, e, m, x: 0,
        "the optimizer state is counted 3 times": lambda p, d, e, m, x: 3,
        "the optimizer state is counted 4 times": lambda p, d, e, m, x: 4,
    },
    "inputs": {
        "the inputs are counted once: forward writes them, and backward reads them": lambda p, d, e, m, x: 1,
        "the inputs are missing": lambda p, d, e, m, x: 0,
        "the inputs are counted 3 times": lambda p, d, e, m, x: 3,
        "the inputs are counted 4 times": lambda p, d, e, m, x: 4,
    },
    "k": {
        "K is 12 in both precisions, and in fp32 it is 8": lambda p, d, e, m, x: 12,
        "K is 8 in both precisions, and in mixed precision it is 12": lambda p, d, e, m, x: 8,
        "K is 8 in mixed precision and 12 in fp32: it is the other way round": lambda p, d, e, m, x: _K[
            _OTHER[x]
        ],
        "K is 16: gradients and parameters stay on the device": lambda p, d, e, m, x: 16,
        "K is 4: m, v and in mixed precision the master weights have 4 bytes each": lambda p, d, e, m, x: 4,
    },
    "item": {
        "an element has 2 bytes in both precisions, and in fp32 it has 4": lambda p, d, e, m, x: 2,
        "an element has 4 bytes in both precisions, and in mixed precision it has 2": lambda p, d, e, m, x: 4,
        "an element has 4 bytes in mixed precision and 2 in fp32: it is the other way round": (
            lambda p, d, e, m, x: _ITEM[_OTHER[x]]
        ),
        "the elements are taken for bytes": lambda p, d, e, m, x: 1,
    },
    "of_states": {
        "/ n_d is missing": lambda p, d, e, m, x: 1,
        "the optimizer state is divided by n_m and not by n_d": lambda p, d, e, m, x: m,
        "the optimizer state is divided by n_m, too": lambda p, d, e, m, x: d * m,
    },
    "of_inputs": {
        "/ n_m is missing": lambda p, d, e, m, x: 1,
        "the inputs are divided by n_d and not by n_m": lambda p, d, e, m, x: d,
        "the inputs are divided by n_d, too": lambda p, d, e, m, x: d * m,
    },
}


def two_mistakes(answers: Answers) -> str | None:
    """The first two wrong parts that explain all answers together."""
    return next((why for why, formula in _formulas() if fits(formula, answers, answers)), None)


def _formulas() -> Iterator[tuple[str, Formula]]:
    for first, second in combinations(PARTS, 2):
        for one, two in product(PARTS[first], PARTS[second]):
            wrong = {first: PARTS[first][one], second: PARTS[second][two]}
            yield f"{one}; and {two}", _formula(wrong)


def _formula(wrong: Part) -> Formula:
    def moved(*case) -> float:
        psi, n_d, kept, n_m, precision = case
        right = dict(
            states=2, inputs=2, k=_K[precision], item=_ITEM[precision], of_states=n_d, of_inputs=n_m
        )  # fmt: skip
        of = right | {name: value(*case) for name, value in wrong.items()}
        return (
            of["states"] * of["k"] * psi / of["of_states"]
            + of["inputs"] * of["item"] * kept / of["of_inputs"]
        )

    return moved

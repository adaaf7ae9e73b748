"""Lesson 07's exercise on host memory: the bytes that a step moves there and back."""

from collections.abc import Callable
from itertools import product
from math import isclose

from zerolab.course.exercise import graded
from zerolab.course.lessons.memory_accounting.numbers import (
    Answers,
    Case,
    Question,
    fits,
    mistake_in,
    numbers,
    units_mistaken,
)
from zerolab.course.lessons.residual_memory.solution import moved_bytes
from zerolab.course.lessons.residual_memory.two_mistakes import two_mistakes

PSI, DATA, KEPT, TENSOR = (6e9, 1.5e9), (8, 1, 3), (4e8, 9e9), (4, 2, 16)
CASES = [
    (psi, n_d, kept, n_m, precision)
    for precision, psi, n_d, kept, n_m in product(("mixed", "fp32"), PSI, DATA, KEPT, TENSOR)
]
BOTH_WAYS = {"mixed": (24, 4), "fp32": (16, 8)}  # bytes for a parameter of the states, and for an element
OTHER = {"mixed": "fp32", "fp32": "mixed"}
HINTS = (
    "two things move, and each of them moves twice: the optimizer state is read before the update and "
    "written after it, and an input is written in forward and read in backward.",
    "of the optimizer state a rank has K * psi / n_d bytes, with K = 12 in mixed precision (master weights, "
    "m and v) and K = 8 in fp32 (m and v). Of the inputs it has kept / n_m elements.",
    "an element of an input has 2 bytes in mixed precision and 4 in fp32. Return 2 * (K * psi / n_d + "
    "element_bytes * kept / n_m).",
)


def moved(psi, n_d, kept, n_m, precision, *, k=None, item=None, states=2, inputs=2):
    """The formula, with a knob for each part of it; `states`, `inputs`: how often each moves."""
    k = {"mixed": 12, "fp32": 8}[precision] if k is None else k
    item = {"mixed": 2, "fp32": 4}[precision] if item is None else item
    return states * k * psi / n_d + inputs * item * kept / n_m


# A sentence, and the formula that the mistake leads to: p, d, e, m, x are the arguments of a case.
# fmt: off
MISTAKES: dict[str, Callable[..., float]] = {
    "each byte is counted once: the optimizer state is read and written in every step, and an input is "
    "written and read":
        lambda *case: moved(*case, states=1, inputs=1),
    "the optimizer state is counted once: a step reads all of it, and writes all of it back":
        lambda *case: moved(*case, states=1),
    "the inputs are counted once: forward writes them, and backward reads them":
        lambda *case: moved(*case, inputs=1),
    "/ n_d is missing: with ZeRO a rank has 1/N_d of the optimizer state, and moves no more":
        lambda p, d, e, m, x: moved(p, 1, e, m, x),
    "/ n_m is missing: with P_a a rank has 1/N_m of every input, and moves no more":
        lambda p, d, e, m, x: moved(p, d, e, 1, x),
    "/ n_d and / n_m are missing: a rank moves what it has, its parts":
        lambda p, d, e, m, x: moved(p, 1, e, 1, x),
    "n_d and n_m are exchanged: ZeRO divides the optimizer state by n_d, P_a the inputs by n_m":
        lambda p, d, e, m, x: moved(p, m, e, d, x),
    "both are divided by n_d * n_m: psi is this rank's part of the model already, and the data-parallel "
    "ranks have other inputs":
        lambda p, d, e, m, x: moved(p, d * m, e, d * m, x),
    "the optimizer state is divided by n_m, too: psi is this rank's part of the model already":
        lambda p, d, e, m, x: moved(p, d * m, e, m, x),
    "the inputs are divided by n_d, too: the data-parallel ranks have other samples, which no rank shares":
        lambda p, d, e, m, x: moved(p, d, e, d * m, x),
    "K is 12 in both precisions: in fp32 the parameters are their own master weights, so K is 8, for m and v":
        lambda *case: moved(*case, k=12),
    "K is 8 in both precisions: in mixed precision the master weights belong to it, so K is 12":
        lambda *case: moved(*case, k=8),
    "K is 8 in mixed precision and 12 in fp32: it is the other way round":
        lambda p, d, e, m, x: moved(p, d, e, m, x, k={"mixed": 8, "fp32": 12}[x]),
    "K is 16: gradients and parameters stay on the device, and the optimizer state alone is moved":
        lambda *case: moved(*case, k=16),
    "an element has 2 bytes in both precisions: in fp32 it has 4":
        lambda *case: moved(*case, item=2),
    "an element has 4 bytes in both precisions: in mixed precision it has 2":
        lambda *case: moved(*case, item=4),
    "an element has 4 bytes in mixed precision and 2 in fp32: it is the other way round":
        lambda p, d, e, m, x: moved(p, d, e, m, x, item={"mixed": 4, "fp32": 2}[x]),
    "the elements are taken for bytes: an element has 2 bytes in mixed precision, and 4 in fp32":
        lambda *case: moved(*case, item=1),
    "the inputs are missing: P_a+cpu writes and reads them":
        lambda *case: moved(*case, inputs=0),
    "the optimizer state is missing":
        lambda *case: moved(*case, states=0),
    "that is the sum over all data-parallel ranks: return the bytes of one rank":
        lambda *case: moved(*case) * case[1],
    "that is the sum over all tensor-parallel ranks: return the bytes of one rank":
        lambda *case: moved(*case) * case[3],
    "that is the sum over all n_d * n_m ranks: return the bytes of one rank":
        lambda *case: moved(*case) * case[1] * case[3],
    "both are divided by n_d: P_a divides the inputs by n_m":
        lambda p, d, e, m, x: moved(p, d, e, d, x),
    "both are divided by n_m: ZeRO divides the optimizer state by n_d":
        lambda p, d, e, m, x: moved(p, m, e, m, x),
}
# fmt: on


@graded(
    "Your formula gives the bytes that the engine counts: each rank moves its own parts, there and back.",
    call="moved_bytes(psi, n_d, kept, n_m, precision)",
    hints=HINTS,
    solution=[moved_bytes],
)
def check_bytes(fn: Callable) -> str | None:
    """Compare fn(psi, n_d, kept, n_m, precision), in bytes, with the formula, and name the wrong one."""
    return mistake_in(fn, QUESTION)


def _read(answers: Answers, first: Case) -> str | None:
    """Say what the answers of a precision are, or which two parts of the formula are wrong in all of them."""
    terms, precision = _terms(answers, first), first[4]
    other = BOTH_WAYS[OTHER[precision]]
    if terms and all(isclose(*pair) for pair in zip(terms, other, strict=True)):
        numbers_of = f"Yours are the numbers of {OTHER[precision]}: look at where you ask for the precision"
        return f"{_by_parts(terms, precision)}. {numbers_of}"
    if why := two_mistakes(answers):
        return why
    return f"{_by_parts(terms, precision)}{_too_many(*terms, BOTH_WAYS[precision])}" if terms else None


def _terms(answers: Answers, first: Case) -> tuple[float, float] | None:
    """Return the bytes of each parameter / n_d and each element / n_m, if they make a precision's answers."""
    precision, found = first[4], numbers({case: got for case, got in answers.items() if case[4] == first[4]})
    if not found:
        return None
    at = lambda psi, kept: found[psi, 8, kept, 4, precision]
    of_states = 8 * (at(PSI[0], KEPT[0]) - at(PSI[1], KEPT[0])) / (PSI[0] - PSI[1])
    of_inputs = 4 * (at(PSI[0], KEPT[1]) - at(PSI[0], KEPT[0])) / (KEPT[1] - KEPT[0])
    form = lambda psi, n_d, kept, n_m, _: of_states * psi / n_d + of_inputs * kept / n_m
    return (of_states, of_inputs) if fits(form, found, found) else None


def _by_parts(terms: tuple[float, float], precision: str) -> str:
    right = BOTH_WAYS[precision]
    return (
        f"in {precision} precision your formula moves {terms[0]:.4g} bytes for each of psi / n_d parameters, "
        f"and {terms[1]:.4g} for each of kept / n_m elements. Right are {right[0]} and {right[1]}, there and "
        "back together"
    )


def _too_many(of_states: float, of_inputs: float, right: tuple[int, int]) -> str:
    """What a number of bytes too many or too few means, where one of the two terms is right."""
    more, times = of_states - right[0], 2 * of_inputs / right[1]
    if isclose(of_inputs, right[1]):
        number = f"{abs(more):.4g} bytes {'more' if more > 0 else 'less'}"
        return (
            f". {number} for each parameter than K there and K back: all of the optimizer state moves, and "
            "neither parameters nor gradients"
        )
    if isclose(of_states, right[0]):
        return (
            f". An element counts {times:.4g} times: forward writes it to host memory once, and backward "
            "reads it once. Messages between the ranks do not count"
        )
    return ""


def _by_ranks(answers: Answers, first: Case) -> str | None:
    """Say what the answers of a precision have in common, or which of the two terms of the sum is wrong."""
    precision, found = first[4], numbers({case: got for case, got in answers.items() if case[4] == first[4]})
    if not found:
        return None
    if len(set(found.values())) == 1:
        return "your function returns the same number in every case: compute with its arguments"
    before = {case: sum(moved(*each) for each in CASES[: CASES.index(case)]) for case in found}
    if all(isclose(got, before[case] + moved(*case), rel_tol=1e-6) for case, got in found.items()):
        return "each answer has those of the earlier calls in it: begin from 0 in every call"
    at = lambda psi, kept: found[psi, first[1], kept, first[3], precision]
    of_states = (at(PSI[0], KEPT[0]) - at(PSI[1], KEPT[0])) / (PSI[0] - PSI[1])
    of_inputs = (at(PSI[0], KEPT[1]) - at(PSI[0], KEPT[0])) / (KEPT[1] - KEPT[0])
    if not isclose(at(PSI[0], KEPT[0]), of_states * PSI[0] + of_inputs * KEPT[0], rel_tol=1e-6):
        return (
            "your formula is no sum of two terms, one with psi and one with kept: the bytes of the optimizer "
            "state do not change with kept, nor those of the inputs with psi"
        )
    states, inputs = BOTH_WAYS[precision]
    terms = (
        ("parameter of psi", of_states, states, "n_d", first[1]),
        ("element of kept", of_inputs, inputs, "n_m", first[3]),
    )
    wrong = [
        f"{has:.4g} bytes for each {what}, and right are {want} / {ranks} = {want / number:.4g}"
        for what, has, want, ranks, number in terms
        if not isclose(has, want / number, rel_tol=1e-6)
    ]
    return f"your formula moves {'; and '.join(wrong)}" if wrong else None


QUESTION = Question(
    CASES,
    moved,
    MISTAKES | units_mistaken(moved),
    where=lambda case: (
        f"{case[4]} precision, {case[0] / 1e9:g}B parameters, n_d={case[1]}, {case[2] / 1e9:g}B elements "
        f"kept, n_m={case[3]}"
    ),
    unit="bytes",
    source="K, the bytes of an element, and who has which part",
    allowed=("optimizer_bytes_per_parameter",),
    read=_read,
    read_last=_by_ranks,
)

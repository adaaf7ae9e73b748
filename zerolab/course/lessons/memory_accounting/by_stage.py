"""Read the answers of lesson 01's first exercise as a formula of psi and N for each stage."""

from collections.abc import Mapping
from itertools import pairwise

from zerolab.course.lessons.memory_accounting.asked import Case
from zerolab.course.lessons.memory_accounting.numbers import Answers, numbers
from zerolab.course.lessons.memory_accounting.stage_parts import RIGHT, named
from zerolab.course.lessons.memory_accounting.terms import Terms, factors_of, in_words

WHOLE_AND_DIVIDED = ("psi", "psi / N")
TERMS: Terms = {
    "psi": lambda psi, n, stage: psi,
    "psi / N": lambda psi, n, stage: psi / n,
    "1": lambda psi, n, stage: 1,
    "1 / N": lambda psi, n, stage: 1 / n,
    "psi / N**2": lambda psi, n, stage: psi / n**2,
    "psi * N": lambda psi, n, stage: psi * n,
}
MOST_BYTES = 16  # of a parameter
NO_PSI = "a number of bytes is not multiplied by psi"
WRONG_TERMS = {
    "1": NO_PSI,
    "1 / N": NO_PSI,
    "psi / N**2": "what is sharded is divided by the number of GPUs once, and yours divides twice",
    "psi * N": "nothing is multiplied by the number of GPUs: these are the bytes of one",
}


def by_parts(answers: Answers, first: Case) -> str | None:
    """Read the answers as bytes per parameter: what each stage keeps whole, and what it divides by N."""
    stage = first[2]
    found = {each: formula for each in RIGHT if (formula := _formula_of(answers, each))}
    if stage not in found:
        return None
    if found[stage].keys() - WHOLE_AND_DIVIDED:
        return _other_terms(found[stage], stage)
    pairs = {
        each: tuple(round(formula.get(term, 0), 6) for term in WHOLE_AND_DIVIDED)
        for each, formula in found.items()
        if not formula.keys() - WHOLE_AND_DIVIDED
    }
    whole, divided = pairs[stage]
    if (whole, divided) == RIGHT[stage]:
        return None
    cause = named(whole, divided, stage)
    sizes = _by_category(pairs)
    if sizes and (sum(pairs[stage]) != 16 or not cause):
        return sizes
    said = (
        f"your formula keeps {whole:.4g} bytes per parameter on every GPU and divides {divided:.4g} by the "
        f"number of GPUs, and right at stage {stage} are {RIGHT[stage][0]} and {RIGHT[stage][1]}"
    )
    return f"{said}: {cause}" if cause else said


def _formula_of(answers: Answers, stage: int) -> dict[str, float] | None:
    """The formula behind a stage's answers, by terms, if they follow one."""
    found = numbers({case: value for case, value in answers.items() if case[2] == stage})
    return factors_of(found, TERMS) if found and any(found.values()) else None


def _other_terms(formula: Mapping[str, float], stage: int) -> str:
    """What a formula says that has other terms than psi and psi / N."""
    whole, divided = RIGHT[stage]
    right = {term: value for term, value in zip(WHOLE_AND_DIVIDED, (whole, divided), strict=True) if value}
    said = f"your formula is {in_words(formula)}, and right is {in_words(right)}"
    for term, why in WRONG_TERMS.items():
        if term in formula:
            few = why == NO_PSI and abs(formula[term]) <= MOST_BYTES
            return f"{said}: {why}{'. Is there a bracket missing?' if few else ''}"
    return said


def _by_category(pairs: Mapping[int, tuple[float, ...]]) -> str | None:
    """Read the answers of all stages as three sizes, of which each stage divides one more."""
    if len(pairs) < len(RIGHT) or len({sum(pair) for pair in pairs.values()}) > 1:
        return None
    by_stage = [pairs[each][1] for each in RIGHT]
    sizes = [after - before for before, after in pairwise(by_stage)]
    if by_stage[0] or min(sizes) <= 0 or pairs[3][0] or sizes == [12, 2, 2]:
        return None
    optimizer, grads, params = sizes
    return (
        f"your formula counts {params:.4g} bytes for a parameter, {grads:.4g} for its gradient and "
        f"{optimizer:.4g} for its optimizer state, and in mixed precision they are 2, 2 and 12"
        f"{_other_order(sizes)}"
    )


def _other_order(sizes: list[float]) -> str:
    """The other reading of sizes that are right, but divided in another order of stages."""
    if [round(size, 6) for size in sorted(sizes)] != [2, 2, 12]:
        return ""
    first = 1 + sizes.index(max(sizes))
    return (
        ", or the sizes are right but divided at the wrong stage: stage 1 divides the 12 bytes of optimizer "
        f"state, and yours divides them at stage {first}"
    )

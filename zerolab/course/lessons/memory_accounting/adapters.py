"""Lesson 01's second exercise: the bytes of frozen weights, and of the few that are trained beside them."""

from collections.abc import Callable
from itertools import product

from zerolab.course.exercise import graded
from zerolab.course.lessons.memory_accounting.asked import Case
from zerolab.course.lessons.memory_accounting.check import STAGES, states
from zerolab.course.lessons.memory_accounting.numbers import (
    UNITS,
    Answers,
    Question,
    mistake_in,
    numbers,
    units_mistaken,
)
from zerolab.course.lessons.memory_accounting.solution import adapter_bytes
from zerolab.course.lessons.memory_accounting.stage_parts import RIGHT, named
from zerolab.course.lessons.memory_accounting.terms import Terms, factors_of, in_words

FROZEN, TRAINED, GPUS = (7e9, 1.5e9), (2e8, 3e7), (8, 1, 3, 16)
CASES = [(f, t, n, stage) for stage, f, t, n in product(STAGES, FROZEN, TRAINED, GPUS)]
HINTS = (
    "which of weight, gradient, master weight, m and v does a parameter need that no update ever changes?",
    "a trained parameter takes what it took in the first exercise. A frozen one is a 2-byte weight.",
    "stages 1 and 2 find nothing to shard in the frozen part. Stage 3 shards parameters, whether they are "
    "trained or not: 2 * frozen / world_size.",
)


def together(f, t, n, stage, *, frozen=2, grads=0, optimizer=0, sharded_from=3):
    """Return the formula, with a knob for each of the bytes that a frozen parameter takes."""
    by = n if stage >= sharded_from else 1
    of_frozen = frozen * f / by + states(f, n, stage, params=0, grads=grads, optimizer=optimizer)
    return of_frozen + states(t, n, stage)


TERMS: Terms = {
    "frozen": lambda f, t, n, stage: f,
    "frozen / N": lambda f, t, n, stage: f / n,
    "trained": lambda f, t, n, stage: t,
    "trained / N": lambda f, t, n, stage: t / n,
    "frozen / N**2": lambda f, t, n, stage: f / n**2,
    "trained / N**2": lambda f, t, n, stage: t / n**2,
    "1": lambda f, t, n, stage: 1,
}

# A sentence, and the formula that the mistake leads to.
# fmt: off
MISTAKES: dict[str, Callable[..., float]] = {
    "that is 16 bytes for every parameter: a frozen one has no gradient and no optimizer state":
        lambda f, t, n, stage: states(f + t, n, stage),
    "the frozen parameters are counted with gradients: nothing asks for them, so autograd makes none":
        lambda *case: together(*case, grads=2),
    "the frozen parameters are counted with optimizer state: the optimizer never gets them":
        lambda *case: together(*case, optimizer=12),
    "the frozen parameters are counted with master weights: those are for updates, and they get none":
        lambda *case: together(*case, optimizer=4),
    "the frozen weights are counted in fp32: they are bf16, 2 bytes":
        lambda *case: together(*case, frozen=4),
    "the frozen weights are missing: forward and backward need them":
        lambda *case: together(*case, frozen=0),
    "the frozen weights count 1 byte each: bf16 has 2":
        lambda *case: together(*case, frozen=1),
    "the trained parameters are missing: they take 16 bytes each":
        lambda f, t, n, stage: together(f, 0, n, stage),
    "the trained parameters are counted once for each GPU: all GPUs train the same ones":
        lambda f, t, n, stage: together(f, t * n, n, stage),
    "the trained parameters' own 16-bit weights are missing":
        lambda *case: together(*case) - _trained_params(*case),
    "the trained parameters' gradients are missing":
        lambda *case: together(*case) - _trained_grads(*case),
    "the trained parameters' optimizer state is missing":
        lambda f, t, n, stage: together(f, t, n, stage) - _trained_optimizer(f, t, n, stage, 12),
    "4 bytes of each trained parameter are missing, the size of its master weight, of m or of v: K is 12, "
    "not 8":
        lambda f, t, n, stage: together(f, t, n, stage) - _trained_optimizer(f, t, n, stage, 4),
    "the frozen weights are counted whole at stage 3, too: it shards parameters, trained or not":
        lambda *case: together(*case, sharded_from=9),
    "the frozen weights are counted as sharded at stage 1 already: only stage 3 shards parameters":
        lambda *case: together(*case, sharded_from=1),
    "the frozen weights are counted as sharded at stage 2 already: only stage 3 shards parameters":
        lambda *case: together(*case, sharded_from=2),
    "the frozen weights are counted as sharded at every stage: only stage 3 shards parameters":
        lambda *case: together(*case, sharded_from=0),
    "frozen and trained are swapped: it is called with (frozen, trained, world_size, stage)":
        lambda f, t, n, stage: together(t, f, n, stage),
    "the trained parameters come on top of the frozen ones: do not subtract them":
        lambda f, t, n, stage: together(f - t, t, n, stage),
    "the trained parameters are counted twice, once as frozen: they are not among the frozen ones":
        lambda f, t, n, stage: together(f + t, t, n, stage),
    "the trained part is never sharded: stage 1 divides its optimizer state, stage 2 its gradients too":
        lambda f, t, n, stage: 2 * f / (n if stage == 3 else 1) + 16 * t,
    "no stage shards anything: that is the answer for plain data parallelism":
        lambda f, t, n, stage: 2 * f + 16 * t,
    "that divides everything by the number of GPUs: only what the stage shards shrinks":
        lambda f, t, n, stage: (2 * f + 16 * t) / n,
    "that is the sum over all GPUs: return the bytes of one":
        lambda *case: together(*case) * case[2],
    "the stages are one too high: stage 1 shards the optimizer state only":
        lambda f, t, n, stage: together(f, t, n, stage + 1),
    "the stages are one too low: stage 1 shards the optimizer state already":
        lambda f, t, n, stage: together(f, t, n, stage - 1),
}
# fmt: on


def _trained_params(f, t, n, stage):
    return 2 * t / (n if stage >= 3 else 1)


def _trained_grads(f, t, n, stage):
    return 2 * t / (n if stage >= 2 else 1)


def _trained_optimizer(f, t, n, stage, size):
    return size * t / (n if stage >= 1 else 1)


@graded(
    "Your formula is right at every stage. Only stage 3 saves much: nearly all bytes are frozen weights.",
    call="adapter_bytes(frozen, trained, world_size, stage)",
    hints=HINTS,
    solution=[adapter_bytes],
)
def check_adapter_bytes(fn: Callable) -> str | None:
    """Compare fn(frozen, trained, world_size, stage), in bytes, with the formula."""
    return mistake_in(fn, QUESTION)


def _by_parts(answers: Answers, first: Case) -> str | None:
    """Read a stage's answers as a formula of the frozen and of the trained parameters."""
    stage = first[3]
    found = numbers({case: value for case, value in answers.items() if case[3] == stage})
    formula = factors_of(found, TERMS, most=4) if found and any(found.values()) else None
    if not formula:
        return None
    for name, right in (("frozen", (0, 2) if stage == 3 else (2, 0)), ("trained", RIGHT[stage])):
        terms = (name, f"{name} / N", f"{name} / N**2")
        whole, divided, twice = (round(formula.get(term, 0), 4) + 0.0 for term in terms)
        if twice:
            divides = f"divides {twice:g} bytes of each {name} parameter by the number of GPUs twice"
            return f"your formula is {in_words(formula)}, so it {divides}: once is enough"
        if (whole, divided) != right:
            of_name = named(whole, divided, stage) if name == "trained" else _of_frozen(whole + divided)
            cause = f": {of_name}" if of_name else ""
            return (
                f"your formula keeps {whole:g} bytes of each {name} parameter on every GPU and divides "
                f"{divided:g} by the number of GPUs. At stage {stage} right are {right[0]} and "
                f"{right[1]}{cause}"
            )
    return f"your formula is {in_words(formula)}: some bytes come on top, for any number of parameters"


def _of_frozen(size: float) -> str | None:
    """What a frozen parameter does not need, if it has more bytes than its weight."""
    if size <= 2:
        return None
    return f"a frozen parameter has its 2-byte weight alone, and yours has {size:g} bytes in all"


def _where(case: Case) -> str:
    frozen, trained, gpus, stage = case
    on = f"on {gpus} GPU{'s' * (gpus > 1)}"
    return f"stage {stage}, {frozen / 1e9:g}B frozen and {trained / 1e6:g}M trained parameters {on}"


QUESTION = Question(
    CASES,
    together,
    MISTAKES | units_mistaken(together),
    where=_where,
    unit="bytes",
    source="2 bytes of a frozen parameter and 16 of a trained one",
    read_last=_by_parts,
    units=UNITS,
)

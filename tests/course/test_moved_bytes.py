"""Lesson 07's exercise on host memory: each wrong formula is named, and the right one is what is measured."""

import pytest
import torch
import torch.distributed as dist
from support.lessons import solutions_travel_by_value

import zerolab
from zerolab import memory
from zerolab.course.lessons.residual_memory import check_bytes
from zerolab.course.lessons.residual_memory.solution import moved_bytes

solutions_travel_by_value(__name__)
BYTES = {"mixed": (12, 2), "fp32": (8, 4)}


def by_lines(psi, n_d, kept, n_m, precision):
    """Right: one line for each thing that moves."""
    optimizer_bytes, element_bytes = BYTES[precision]
    read = written = optimizer_bytes * psi / n_d
    saved = loaded = element_bytes * kept / n_m
    return read + written + saved + loaded


def by_tensors(psi, n_d, kept, n_m, precision):
    """Right: m, v and the master weights one by one, in whole bytes."""
    states = ["m", "v", *(["master"] if precision == "mixed" else [])]
    each_way = sum(4 * psi // n_d for _ in states) + torch.tensor(0.0, dtype=torch.float64)
    return int(2 * each_way) + 2 * (2 if precision == "mixed" else 4) * kept // n_m


def by_memory(psi, n_d, kept, n_m, precision):
    """Right: the difference that ZeRO's first stage divides."""
    k = 12 if precision == "mixed" else 8
    return 2 * k * (psi / n_d) + (2 if precision == "mixed" else 4) * (kept / n_m) * 2


def wrong(k=None, item=None, states=2, inputs=2, scale=1, d=lambda d, m: d, m=lambda d, m: m):
    """The right formula where nothing is given, and a classic wrong one where something is."""

    def moved(psi, n_d, kept, n_m, precision):
        of_k, of_item = BYTES[precision]
        state_bytes = (of_k if k is None else k) * psi / d(n_d, n_m)
        return scale * (
            states * state_bytes + inputs * (of_item if item is None else item) * kept / m(n_d, n_m)
        )

    return moved


def from_the_package(psi, n_d, kept, n_m, precision):
    optimizer = memory.model_states(psi, n_d, 1, precision).optimizer_bytes
    return 2 * optimizer + 2 * BYTES[precision][1] * kept / n_m


def with_the_packages_k(psi, n_d, kept, n_m, precision):
    """Right: K is looked up."""
    of_item = memory.CONVENTIONS[precision].params_bytes
    return 2 * (memory.optimizer_bytes_per_parameter("adam", precision) * psi / n_d + of_item * kept / n_m)


def with_parameters(psi, n_d, kept, n_m, precision):
    return wrong()(psi, n_d, kept, n_m, precision) + BYTES[precision][1] * psi / n_d


def in_float32(*case):
    return torch.tensor(wrong()(*case))


EARLIER = []


def summed_over_the_calls(*case):
    EARLIER.append(wrong()(*case))
    return sum(EARLIER)


def of_the_other_precision(psi, n_d, kept, n_m, precision):
    return wrong()(psi, n_d, kept, n_m, "mixed" if precision == "fp16" else "fp32")


def of_pairs(psi, n_d, kept, n_m, precision):
    return wrong()(psi, n_d, kept, n_m, precision) / (n_d - n_d)


RIGHT = [moved_bytes, by_lines, by_tensors, by_memory, with_the_packages_k]
WRONG = [
    (
        wrong(states=1, m=lambda d, m: 1),
        "the optimizer state is counted once: a step reads it and writes it; and ",
    ),
    (wrong(k=16, item=4), "K is 16: gradients and parameters stay on the device; and an element has 4 bytes"),
    (with_parameters, "2 bytes more for each parameter than K there and K back: all of the optimizer state"),
    (wrong(inputs=3), "An element counts 3 times: forward writes it to host memory once, and backward reads"),
    (wrong(states=1.5), "6 bytes less for each parameter than K there and K back"),
    (lambda psi, n_d, kept, n_m, precision: None, "not written yet"),
    (
        lambda psi, n_d, kept, n_m, precision: "17",
        "your function returned str '17': return a number of bytes",
    ),
    (lambda psi, n_d, kept, n_m, precision: (1, 2), "your function returned tuple (1, 2)"),
    (lambda psi, n_d, kept, n_m, precision: float("nan"), "your function returned nan"),
    (wrong(states=1, inputs=1), "each byte is counted once"),
    (wrong(states=1), "the optimizer state is counted once: a step reads all of it"),
    (wrong(inputs=1), "the inputs are counted once"),
    (wrong(d=lambda d, m: 1), "/ n_d is missing"),
    (wrong(m=lambda d, m: 1), "/ n_m is missing"),
    (wrong(d=lambda d, m: 1, m=lambda d, m: 1), "/ n_d and / n_m are missing"),
    (wrong(d=lambda d, m: m, m=lambda d, m: d), "n_d and n_m are exchanged"),
    (wrong(d=lambda d, m: d * m), "psi is this rank's part of the model already"),
    (wrong(m=lambda d, m: d * m), "the data-parallel ranks have other samples"),
    (wrong(d=lambda d, m: d * m, m=lambda d, m: d * m), "both are divided by n_d * n_m"),
    (wrong(k=12), "K is 12 in both precisions: in fp32"),
    (wrong(k=8), "K is 8 in both precisions"),
    (wrong(k=16), "K is 16"),
    (wrong(item=2), "an element has 2 bytes in both precisions"),
    (wrong(item=4), "an element has 4 bytes in both precisions"),
    (wrong(item=1), "the elements are taken for bytes"),
    (wrong(inputs=0), "the inputs are missing"),
    (wrong(states=0), "the optimizer state is missing"),
    (lambda *case: wrong()(*case) * case[1], "the sum over all data-parallel ranks"),
    (wrong(scale=1e-9), "that is GB: return bytes"),
    (wrong(k=10, item=3), "moves 20 bytes for each of psi / n_d parameters, and 6 for each of kept / n_m"),
    (wrong(m=lambda d, m: d), "both are divided by n_d"),
    (wrong(d=lambda d, m: m), "both are divided by n_m"),
    (lambda *case: wrong()(*case) * case[1] * case[3], "the sum over all n_d * n_m ranks"),
    (wrong(d=lambda d, m: d + 1), "2.667 bytes for each parameter of psi, and right are 24 / n_d = 3"),
    (wrong(m=lambda d, m: d + m), "0.3333 bytes for each element of kept, and right are 4 / n_m = 1"),
    (lambda *case: wrong()(*case) * case[0], "is no sum of two terms"),
    (lambda *case: 2e10, "returns the same number in every case"),
    (summed_over_the_calls, "each answer has those of the earlier calls in it"),
    (in_float32, "right up to the rounding of float32, torch's default type"),
    (of_the_other_precision, "Yours are the numbers of fp32: look at where you ask for the precision"),
    (from_the_package, "that calls zerolab.memory.model_states, which has the formula"),
    (of_pairs, "ZeroDivisionError: float division by zero, with mixed precision, 6B parameters, n_d=8"),
]


@pytest.mark.parametrize("right", RIGHT)
def test_every_right_way_passes(right):
    assert check_bytes.diagnose(right) is None


@pytest.mark.parametrize(("answer", "words"), WRONG)
def test_the_check_names_the_mistake(answer, words):
    assert words in check_bytes.diagnose(answer)


def moved_inputs(dtype, shape, blocks):
    """What a rank moves with P_a+cpu, forward and backward, counted from the tensors."""
    parallel = zerolab.TensorParallel(dist.group.WORLD)
    checkpointing = zerolab.Checkpointing(partition=parallel, offload="cpu")
    stream = torch.ones(shape, dtype=dtype, requires_grad=True)
    for _ in range(blocks):
        stream = checkpointing(torch.tanh, stream)
    stream.sum().backward()
    return checkpointing.written_bytes + checkpointing.read_bytes


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, "mixed"), (torch.float32, "fp32")])
def test_the_formula_of_the_inputs_is_what_the_engine_moves(dtype, precision):
    shape, blocks = (2, 8, 16), 3
    measured = zerolab.launch(moved_inputs, 2, dtype, shape, blocks, timeout=60)
    assert measured == [moved_bytes(0, 1, blocks * 2 * 8 * 16, 2, precision)] * 2


def moved_states(precision):
    """What a rank's second step moves of the optimizer state, and the number of parameters."""
    model = torch.nn.Linear(32, 32, bias=False)  # 1,024 parameters: no padding on two ranks
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, stage=1, precision=precision, offload="cpu")
    moved = []
    for _ in range(2):
        model(torch.ones(1, 32)).float().sum().backward()
        optimizer.step()
        moved.append(optimizer.offload.tier.read_bytes + optimizer.offload.tier.written_bytes)
    return moved[1] - moved[0], model.weight.numel()


@pytest.mark.parametrize("precision", ["mixed", "fp32"])
def test_the_formula_of_the_states_is_what_the_engine_moves(precision):
    for moved, psi in zerolab.launch(moved_states, 2, precision, timeout=60):
        assert moved == moved_bytes(psi, 2, 0, 1, precision)

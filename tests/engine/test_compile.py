"""Promise: a sharded model may be compiled, and keeps the bits, bytes and messages of one that is not."""

import subprocess
import sys

import pytest
import torch
from support.long import long_where

import zerolab
from zerolab.parity.parity import random_tokens, small_gpt

BACKEND = "aot_eager"  # traces forward and backward as every backend gets them, and needs no C++ compiler


def compiled_gpt() -> torch.nn.Module:
    model = small_gpt()
    model.compile(backend=BACKEND)
    return model


def gpt_of_compiled_blocks() -> torch.nn.Module:
    model = small_gpt()
    for block in model.blocks:
        block.compile(backend=BACKEND)
    return model


@pytest.mark.parametrize(
    ("model_fn", "stage"),
    long_where(
        lambda case: case == (compiled_gpt, 0),
        "stages 2 and 3 compile the same model",
        [(compiled_gpt, 0), (compiled_gpt, 2), (compiled_gpt, 3), (gpt_of_compiled_blocks, 3)],
    ),
)
def test_bits_bytes_and_messages(model_fn, stage: int):
    report = zerolab.verify(stage, 2, model_fn, random_tokens, torch.optim.AdamW, lr=0.01)
    assert report.ok, report


def train(stage: int, compile_when: str) -> tuple[dict[str, torch.Tensor], int]:
    """Parameters after three steps, and how many graphs were compiled."""
    torch.manual_seed(0)
    model = small_gpt()
    if compile_when == "before":
        model = torch.compile(model, backend=BACKEND)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=0.01)
    called = torch.compile(model, backend=BACKEND) if compile_when == "after" else model
    for step in range(3):
        optimizer.zero_grad()
        called(*random_tokens(step, optimizer.rank)).backward()
        optimizer.step()
    with optimizer.full_params():
        values = {n.removeprefix("_orig_mod."): p.detach().clone() for n, p in model.named_parameters()}
    return values, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("compile_when", ["before", "after"])
def test_a_wrapped_model_too_and_no_graph_spans_two_units(compile_when: str):
    """Each unit's gather ends the graph before it: else all would have to be whole at once."""
    (expected, none), *_ = zerolab.launch(train, 2, 3, "never")
    for found, graphs in zerolab.launch(train, 2, 3, compile_when):
        assert none == 0 and graphs > len(small_gpt().blocks)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_compiler_is_not_imported_with_zerolab():
    """It takes as long as torch itself. An optimizer of torch imports it when it is built."""
    code = (
        "import sys, zerolab; [getattr(zerolab, name) for name in zerolab.__all__]; "
        "assert 'torch' in sys.modules and 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)

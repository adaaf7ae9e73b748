"""Lesson 05: its check names each mistake, its solution passes, and what it says of backward is true."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from support import ROOT

import zerolab
from zerolab import ring
from zerolab.course.checks.zero_stage_2 import check_reduce_and_keep, diagnose_reduce_and_keep
from zerolab.course.figures.losses import both_losses
from zerolab.course.figures.zero_stage_2 import WAYS, Cost, accumulation, gradients_over_time
from zerolab.course.look import paint
from zerolab.models import GPT

cloudpickle.register_pickle_by_value(sys.modules[__name__])
LESSON = ROOT / "notebooks" / "source" / "05_zero_stage_2.py"


def code_of(lesson: Path, pattern: str) -> SimpleNamespace:
    """The names defined by a block of the lesson, as a notebook would define them."""
    (block,) = re.findall(pattern, lesson.read_text(), re.DOTALL | re.MULTILINE)
    names = {"ring": ring, "torch": torch, "__name__": "__main__"}
    exec(re.sub(r"^# ?", "", block, flags=re.MULTILINE), names)
    return SimpleNamespace(**{name: names[name] for name in names if name != "__builtins__"})


def own_chunk(flat):
    return flat.chunk(dist.get_world_size())[dist.get_rank()]


def added(mine, kept):
    return mine if kept is None else kept + mine


def overwritten(flat, kept):
    return ring.reduce_scatter(flat).clone()


def a_view(flat, kept):
    mine = ring.reduce_scatter(flat)
    if kept is not None:
        mine += kept
    return mine


def all_reduced(flat, kept):
    ring.all_reduce(flat)
    return added(own_chunk(flat).clone(), kept)


def ready_made(flat, kept):
    dist.all_reduce(flat)
    return added(own_chunk(flat).clone(), kept)


def kept_whole(flat, kept):
    ring.all_reduce(flat)
    return added(flat, kept)


def not_reduced(flat, kept):
    return added(own_chunk(flat).clone(), kept)


def averaged(flat, kept):
    return added(ring.reduce_scatter(flat) / dist.get_world_size(), kept)


def reduced_again(flat, kept):
    if kept is not None:
        flat += kept.repeat(dist.get_world_size())
    return ring.reduce_scatter(flat).clone()


def neighbours(flat, kept):
    ring.all_reduce(flat)
    return added(flat.chunk(dist.get_world_size())[dist.get_rank() - 1].clone(), kept)


def none_at_first(flat, kept):
    return kept + ring.reduce_scatter(flat).clone()


def a_number(flat, kept):
    return ring.reduce_scatter(flat).sum().item()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (overwritten, "overwritten"),
        (a_view, "view"),
        (all_reduced, "second half"),
        (ready_made, "allreduce"),
        (kept_whole, "stage 1's memory"),
        (not_reduced, "own gradient only"),
        (averaged, "mean"),
        (reduced_again, "into a sum again"),
        (neighbours, "another rank's shard"),
        (none_at_first, "NoneType"),
        (a_number, "returned float"),
    ],
)
def test_the_check_names_the_mistake(wrong, words):
    assert words in diagnose_reduce_and_keep(wrong)


def test_the_stub_is_told_that_it_is_one_and_the_solution_passes(capsys):
    stub = code_of(LESSON, r"^# Exercise\n(.*?)^check_")
    assert "not written yet" in diagnose_reduce_and_keep(stub.reduce_and_keep)
    solution = code_of(LESSON, r"^# ```python\n(.*?)^# ```$")
    check_reduce_and_keep(solution.reduce_and_keep)
    assert capsys.readouterr().out.startswith("✓")


def gradient_peak(reduces_in_flight):
    torch.manual_seed(0)
    model = GPT(width=16, depth=6, heads=2, context=8)
    optimizer = zerolab.ZeroOptimizer(
        model, torch.optim.Adam, stage=2, reduces_in_flight=reduces_in_flight, lr=1e-3
    )
    held = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: held.append(optimizer.memory().grads_bytes))
    tokens = torch.arange(8).view(1, 8)
    model(tokens, tokens).backward()
    return max(held), {unit.name: 4 * unit.numel for unit in optimizer.units}


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_the_peak_is_the_root_the_unit_at_work_those_in_flight_and_the_shards_of_the_rest(in_flight):
    """It is false where the root, whose embeddings come last, has the first turn and holds up all others."""
    peak, unit_bytes = zerolab.launch(gradient_peak, 2, in_flight)[0]
    whole = 1 + in_flight
    assert peak == unit_bytes["root"] + (whole + (6 - whole) / 2) * unit_bytes["blocks.0"]


def test_the_drawings_say_in_words_what_they_show():
    stairs = [("head.weight", 4e6), ("blocks.0.a", 8e6), ("blocks.0.b", 8e6), ("embedding.weight", 8e6)]
    saw = {1: [("head.weight", 4e6), ("blocks.0.a", 7e6), ("blocks.0.b", 7e6), ("end", 2e6)]}
    _, alt = paint(gradients_over_time, 3, {"stage_1": stairs, "stage_2": saw})
    assert "8.00 MB" in alt and "never above 7.00 MB" in alt and "ends at 2.00 MB" in alt
    costs = {(way, m): Cost(4e6 * (m + 1), 4e6) for way in WAYS for m in (1, 2)}
    _, alt = paint(accumulation, 3, {"measured": costs, "psi": 1_000_000, "micro_batches": 2})
    assert "stage 2: 3.00 Ψ moved" in alt and "stage 2, no_sync: 1.00 Ψ held" in alt


def test_the_last_plot_says_whether_the_curves_part():
    same = {"sharded": [2.0, 1.0], "single": [2.0, 1.0], "stage": 2}
    assert "on top of each other" in paint(both_losses, 3, same)[1]
    assert "part" in paint(both_losses, 3, same | {"sharded": [2.0, 1.0 + 1e-7]})[1]

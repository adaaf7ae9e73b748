"""Numbers: what ranks on GPUs compute, against one process on the same GPU, and whatever the streams do."""

import functools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain

import torch
import torch.distributed as dist
from common import STAGES, launch, on_cuda
from support import training
from support.hostile import hostile_backend
from support.user_models import Block, Net
from torch import nn

import zerolab
from zerolab.collectives import native
from zerolab.collectives.names import all_gather_single, reduce_scatter_single
from zerolab.parity import parity as verified
from zerolab.parity.reference import compute_deterministically, reference

MEASURED_PRECISIONS = ("fp32", "mixed", "mixed_fp16")
STEPS = 3

# Ranks that share a GPU.


def _three_collectives() -> dict:
    size, rank = dist.get_world_size(), dist.get_rank()
    flat = torch.arange(size * 4, device=zerolab.device(), dtype=torch.float32) + rank
    reduced = flat.clone()
    dist.all_reduce(reduced)
    own, whole = flat.new_empty(4), torch.empty_like(flat)
    reduce_scatter_single(own, flat)
    all_gather_single(whole, own)
    return {"device": str(flat.device), "right": bool(torch.equal(whole, reduced))}


def collectives() -> dict[str, dict]:
    """Reduce-scatter, all-gather and all-reduce on 1, 2 and 4 ranks."""
    found = {}
    for size in (1, 2, 4):
        ranks = launch(_three_collectives, size)
        found[f"{size} ranks"] = {name: [rank[name] for rank in ranks] for name in ("device", "right")}
    return found


# Parity.


def train_cases(stages: Sequence[int], settings: dict) -> list[tuple]:
    """On a rank: of each stage its number, the sharded run, and what all of them are compared with.

    That is the reference: one process on the same device. Rank 0 trains it, once for all stages.
    """
    arguments = (verified.small_gpt, verified.random_tokens)
    runs = [verified._train_sharded(stage, *arguments, torch.optim.Adam, STEPS, settings) for stage in stages]
    plain = {name: value for name, value in settings.items() if not name.startswith("offload")}
    threads, expected = torch.get_num_threads(), None
    if dist.get_rank() == 0:
        expected = reference(*arguments, dist.get_world_size(), torch.optim.Adam, STEPS, threads, **plain)
    return [(stage, run, expected) for stage, run in zip(stages, runs, strict=True)]


def compared(stage: int, runs: list, expected: tuple) -> dict:
    """What `verify` reports of a case."""
    report = verified._compare(stage, runs, *expected)
    names = ("backend", "bit_identical", "max_abs_diff", "memory_matches", "traffic_matches")
    return {name: getattr(report, name) for name in names}


def _all_cases() -> list[tuple]:
    """On a rank: every stage in each precision. One launch, because a start takes long."""
    return [
        (precision, *case)
        for precision in MEASURED_PRECISIONS
        for case in train_cases(STAGES, {"precision": precision})
    ]


def parity() -> list[dict]:
    """Every stage on 1, 2 and 4 ranks in fp32, bf16 and fp16, against one process on the same device."""
    found = []
    for world_size in (1, 2, 4):
        for cases in zip(*launch(_all_cases, world_size), strict=True):
            precision, stage, _, expected = cases[0]
            told = compared(stage, [run for *_, run, _ in cases], expected)
            found.append({"stage": stage, "world_size": world_size, "precision": precision, **told})
    return found


def parity_missed(found: list[dict]) -> list[str]:
    """On two ranks a sum has no order, so its bits are the reference's. Bytes are the formula's always."""
    missed = []
    for case in found:
        what = f"stage {case['stage']}, {case['world_size']} ranks, {case['precision']}"
        if case["world_size"] <= 2 and case["precision"] == "fp32" and not case["bit_identical"]:
            missed.append(f"{what}: off by {case['max_abs_diff']:.1e}")
        if not case["max_abs_diff"] < 1e-2:
            missed.append(f"{what}: off by {case['max_abs_diff']:.1e}")
        missed += [
            f"{what}: {name} is no" for name in ("memory_matches", "traffic_matches") if not case[name]
        ]
    return missed


# Streams.


class Aside(Block):
    """Its second layer computes on a stream of its own, and so in backward do its gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not on_cuda():
            return super().forward(x)
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        inner = torch.tanh(self.first(x))
        side.wait_stream(main)
        with torch.cuda.stream(side):
            out = self.second(inner)
        main.wait_stream(side)
        return x + out


def _two_losses(model: nn.Module, x: torch.Tensor, step: int):
    for part in x.to(zerolab.device()).chunk(2):
        yield model(part).square().mean()


def _delay(chance: random.Random) -> None:
    """Nothing, or up to about a millisecond of it, on the current stream; on a CPU in the calling thread."""
    if chance.random() < 0.5:
        if on_cuda():
            torch.cuda._sleep(int(chance.random() * 2e6))  # clock cycles
        else:
            time.sleep(chance.random() * 1e-3)


def _delayed(function: Callable, chance: random.Random) -> Callable:
    """A collective that the device comes to late: its own stream waits for the one that issues it."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        _delay(chance)
        work = function(*args, **kwargs)
        _delay(chance)
        return work

    return call


def _train(stage: int, settings: dict, seed: int | None) -> dict[str, torch.Tensor]:
    """The parameters after training, with delays of chance around every collective and in every block."""
    build = lambda: Net(Aside).to(zerolab.device())
    if seed is None:
        return training.train_sharded(build, _two_losses, stage, **settings)
    chance = random.Random(1000 * seed + dist.get_rank())

    def jittery() -> nn.Module:
        model = build()
        for block in model.blocks:
            block.register_forward_hook(lambda *_: _delay(chance))
            block.register_full_backward_hook(lambda *_: _delay(chance))
        return model

    places = (native, "reduce_scatter_single"), (native, "all_gather_single"), (native.dist, "all_reduce")
    before = [(module, name, getattr(module, name)) for module, name in places]
    try:
        for module, name, function in before:
            setattr(module, name, _delayed(function, chance))
        return training.train_sharded(jittery, _two_losses, stage, **settings)
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def _bits_under_jitter() -> dict[str, dict]:
    compute_deterministically()
    torch.use_deterministic_algorithms(False)  # the native reductions, and not those in rank order
    found = {}
    plain = training.train_plain(lambda: Net(Aside).to(zerolab.device()), _two_losses, dist.get_world_size())
    for stage in STAGES:
        for overlap in (0, 2):
            settings = {"prefetch": overlap, "reduces_in_flight": overlap}
            with nullcontext() if on_cuda() else hostile_backend():
                calm = _train(stage, settings, None)
                moved = [training.differing(_train(stage, settings, seed), calm) for seed in range(3)]
            off = max((calm[name] - plain[name]).abs().max().item() for name in plain)
            found[f"stage {stage}, overlap {overlap}"] = {
                "moved": list(chain.from_iterable(moved)),
                "off_plain": off,
            }
    return found


def jitter() -> dict[str, dict]:
    """Bits under delays of chance on the computing and the communicating streams, on two ranks."""
    return launch(_bits_under_jitter, 2)[0]


def jitter_missed(found: dict[str, dict]) -> list[str]:
    """The bits stay. Sums of NCCL's own order may differ from plain training's in the last places."""
    missed = []
    for case, each in found.items():
        if each["moved"]:
            missed.append(f"{case}: {', '.join(each['moved'])} changed")
        if not each["off_plain"] < 1e-5:
            missed.append(f"{case}: off by {each['off_plain']:.1e}")
    return missed

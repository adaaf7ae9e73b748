"""What an engine costs the CPU in each step: python benchmarks/host_time.py --out benchmarks/results

288 parameters of a few elements in 24 units, on one rank: nothing is sent and computing takes no time, so the
time over the plain loop's is the engine's own. A GPU's step that is shorter than this waits for the CPU.
On a CPU the time is the processor time of the main thread, and computing is in it. With --backend nccl the
model is on a GPU, and the time is how long the CPU takes to issue a step. All contestants take turns in one
process, so their ratios hold on a busy machine too.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import zerolab
from zerolab.bench.contestants import CONTESTANTS, FLOOR, UPDATES, Contestant
from zerolab.bench.machine import describe, in_words, publish
from zerolab.flags import at_least, folder

UNITS, LINEARS, WIDTH = 24, 6, 8
WARM_UP_STEPS, MEASURED_STEPS = 5, 10  # in a turn; after another's turn the caches hold nothing of use
NAMES = (FLOOR, "ddp", "fully_shard", *(f"zerolab-{stage}" for stage in range(4)))


class SmallBlocks(nn.Module):
    """24 blocks of six small linear layers: 288 parameters."""

    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LINEARS)))
        self.blocks = nn.Sequential(*(block() for _ in range(UNITS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).float().square().mean()


def mixed(stage: int) -> Contestant:
    """zerolab with bf16 parameters and fp32 masters."""
    model = SmallBlocks().to(zerolab.device())
    optimizer = zerolab.ZeroOptimizer(
        model, torch.optim.Adam, stage=stage, precision="mixed", **UPDATES["fused"]
    )
    return Contestant(model, optimizer.step, optimizer.zero_grad, dict, model, optimizer)


def contestants() -> dict[str, Callable[[], Contestant]]:
    """By name, how each is built; all begin with the same parameters."""
    build = lambda name: CONTESTANTS[name](SmallBlocks().to(zerolab.device()), UPDATES["fused"])
    found: dict[str, Callable[[], Contestant]] = {name: partial(build, name) for name in NAMES}
    return found | {f"zerolab-{stage}, mixed": partial(mixed, stage) for stage in (0, 2, 3)}


def measure(rounds: int) -> dict[str, float]:
    """On one rank: milliseconds of each contestant's step, the median."""
    torch.set_num_threads(1)
    on_gpu = zerolab.device().type == "cuda"
    clock = time.perf_counter if on_gpu else time.thread_time  # backward has a thread of its own on a GPU
    batch = (torch.ones(2, WIDTH, device=zerolab.device()),)
    built = {name: build() for name, build in contestants().items()}
    times: dict[str, list[float]] = {name: [] for name in built}
    for _ in range(rounds):
        for name, contestant in built.items():
            for step in range(WARM_UP_STEPS + MEASURED_STEPS):
                begin = clock()
                contestant.step(batch)
                took = clock() - begin
                if on_gpu:
                    torch.cuda.synchronize()
                if step >= WARM_UP_STEPS:
                    times[name].append(1e3 * took)
    return {name: statistics.median(each) for name, each in times.items()}


def table(ms: dict[str, float]) -> str:
    """A line for each contestant: its time, what it adds to the plain loop, and that as a share of theirs."""
    over = {name: each - ms[FLOOR] for name, each in ms.items()}
    lines = [f"{'':18}{'ms a step':>10}{'over plain':>12}{'of ddp':>9}{'of fully_shard':>16}"]
    for name, each in ms.items():
        ratios = (
            ""
            if name == FLOOR
            else f"{over[name] / over['ddp']:9.2f}{over[name] / over['fully_shard']:16.2f}"
        )
        lines.append(f"{name:18}{each:10.2f}{over[name]:+12.2f}{ratios}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=10, help="turns of each contestant")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="nccl: on a GPU")
    parser.add_argument("--out", type=folder, help="a folder for host_time.txt, made if it is not there")
    arguments = parser.parse_args()
    steps = arguments.rounds * MEASURED_STEPS
    what = {"gloo": "processor time of the main thread", "nccl": "time to issue a step to the GPU"}
    title = f"{what[arguments.backend]}, fused Adam, medians of {steps} steps"
    (found,) = zerolab.launch(measure, 1, arguments.rounds, backend=arguments.backend, timeout=600)
    text = f"{in_words(describe())}\n\n{title}\n{table(found)}\n"
    publish(text, arguments.out, "host_time.txt")


if __name__ == "__main__":
    main()

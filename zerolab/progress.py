"""What a training run reports: a bar and a line per epoch as it goes; memory, traffic and loss at its end."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from zerolab.optimizer import ZeroOptimizer

TRACED_STEPS = 2


def mean_over_ranks(losses: list[Tensor]) -> list[float]:
    """Each loss averaged over the ranks, in fp64, so that all ranks print the very same number."""
    means = torch.stack(losses).double().cpu()
    dist.all_reduce(means)
    return (means / dist.get_world_size()).tolist()


class Progress:
    """What a run reports while it goes: a bar on rank 0, a line per epoch on every rank.

    Args: done: the mean losses of the steps that were taken before, in the run that this one goes on with.
    """

    def __init__(self, epochs: int, epoch_steps: int, optimizer: ZeroOptimizer, done: list[float]):
        self.epoch_steps, self.total, self.optimizer = epoch_steps, epochs * epoch_steps, optimizer
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.bar = tqdm(total=self.total, initial=len(done), disable=self.rank != 0, unit="step", leave=False)
        self.pending: list[Tensor] = []  # this rank's losses of the last steps
        self.losses = list(done)  # the ranks' means of those before
        self.first = len(done)
        self.tokens = 0
        self.started = time.perf_counter()

    def step(self, loss: Tensor, tokens: int) -> None:
        """Count one step. Called before zero_grad(), while gradients too are in memory."""
        self.pending.append(loss)
        self.tokens += tokens * self.world_size
        self.tokens_per_second = self.tokens / (time.perf_counter() - self.started)
        done = len(self.losses) + len(self.pending)
        if done - self.first == min(TRACED_STEPS, self.total - self.first):
            self.memory = self.optimizer.memory()
            self.traffic = self.optimizer.trace.traffic()
            self.trace = self.optimizer.trace.text()
        if done % 10 == 0:
            self.bar.set_postfix_str(f"loss {loss:.3f}, {self.tokens_per_second:,.0f} tokens/s", False)
        self.bar.update()

    def means(self) -> list[float]:
        """The mean loss over the ranks of every step so far. Collective."""
        if self.pending:
            self.losses, self.pending = self.losses + mean_over_ranks(self.pending), []
        return self.losses

    def epoch(self) -> None:
        """Print the epoch's loss on every rank."""
        means = self.means()[-self.epoch_steps :]
        epoch = len(self.losses) // self.epoch_steps
        self.bar.write(f"rank {self.rank}  epoch {epoch:2}  loss {sum(means) / len(means):.4f}")

    def finish(self, held_out_loss: float, entropy: float, sample: str) -> None:
        """Print how it went, on rank 0."""
        self.bar.close()
        if self.rank != 0:
            return
        categories = ("params", "grads", "optimizer", "padding", "counters", "total")
        memory = ", ".join(f"{name} {getattr(self.memory, f'{name}_bytes'):,.0f}" for name in categories)
        by_op = ", ".join(f"{op} {part.wire_bytes:,}" for op, part in self.traffic.by_op.items())
        verdict = "below" if held_out_loss < entropy else "not below"
        if sample:
            print(f"sample:\n{sample}\n")
        print(f"memory of rank 0, bytes: {memory}")
        print(
            f"traffic of rank 0, bytes a step: {self.traffic.logical_bytes:,} in the paper's count, "
            f"{self.traffic.wire_bytes:,} sent ({by_op}), {self.traffic.control_bytes:,} of control"
        )
        print(f"speed: {self.tokens_per_second:,.0f} tokens/s over all ranks")
        print(f"held-out loss {held_out_loss:.4f}, {verdict} the unigram entropy {entropy:.4f}", flush=True)


TRACE_HEADING = """\
What each rank did in the setup and in the first two steps; the later ones are like the second.
A line: the phase, the operation and the unit; dtype and shape of the tensor it was called with; the payload
as the paper counts it (logical) and the bytes this rank sent (wire); how long it took; the line of code that
asked for it. Below it, which slices of which parameters it touched. Control messages carry no tensor of the
model.
"""


def write_trace(path: Path, text: str) -> None:
    """Write the traces of all ranks, which only together show the partition, to one file: all or nothing."""
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    if dist.get_rank() != 0:
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        ranks = "\n".join(f"rank {rank}\n{part}" for rank, part in enumerate(texts))
        partial.write_text(f"{TRACE_HEADING}\n{ranks}")
        os.replace(partial, path)  # atomic: a reader finds the old file or the new one, never half of one
    finally:
        partial.unlink(missing_ok=True)

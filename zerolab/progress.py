"""Report a training run: a bar and a line per epoch; memory, traffic and loss at its end.

With ``--log`` and ``--tensorboard`` it also logs each step: as a line of JSON, and for TensorBoard.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from zerolab.optimizer import ZeroOptimizer
from zerolab.trace import save_timelines

TRACED_STEPS = 2
LOGGED_STEPS = 10
"""So many steps are logged at once, because the mean of their losses over the ranks takes a message."""


def mean_over_ranks(losses: list[Tensor]) -> list[float]:
    """Return each loss averaged over the ranks, in fp64, so that all ranks print the same number."""
    means = torch.stack(losses).double().cpu()
    dist.all_reduce(means)
    return (means / dist.get_world_size()).tolist()


class JsonLines:
    """A file with one JSON object a line. Lines of steps after `done` are dropped: they are taken again."""

    def __init__(self, path: Path, done: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        length = _length_up_to(path, done) if done and path.exists() else 0
        self.file = path.open("a", encoding="utf-8")
        self.file.truncate(length)

    def write(self, record: dict[str, float]) -> None:
        """Add a line at once, so that a run that dies leaves the lines of its steps."""
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _length_up_to(path: Path, step: int) -> int:
    """The bytes of the lines up to that step; half a line, which a killed run may leave, is not one of them.

    Raises: ValueError where a line is not one that `JsonLines` writes.
    """
    length = 0
    with path.open("rb") as file:
        for line in file:
            try:
                later = not line.endswith(b"\n") or json.loads(line)["step"] > step
            except (ValueError, TypeError, KeyError):
                raise ValueError(
                    f"{path} is not the log of a run: {line[:60]!r}. Pass another file"
                ) from None
            if later:
                break
            length += len(line)
    return length


class TensorBoard:
    """The same records as scalars in a folder that TensorBoard reads, written by torch's SummaryWriter."""

    def __init__(self, folder: Path, done: int):
        from torch.utils.tensorboard import SummaryWriter  # needs a package that is optional

        self.writer = SummaryWriter(folder, purge_step=done + 1 if done else None)

    def write(self, record: dict[str, float]) -> None:
        """Add a point to each curve."""
        for name in record.keys() - {"step"}:
            self.writer.add_scalar(name, record[name], record["step"])

    def close(self) -> None:
        self.writer.close()


class Progress:
    """What a run reports while it goes: a bar on rank 0, a line per epoch on every rank.

    Args:
        done: the mean losses of the steps that were taken before, in the run that this one goes on with.
        log: a file for one JSON object a step.
        tensorboard: a folder for the same as TensorBoard's curves.
    """

    def __init__(
        self,
        epochs: int,
        epoch_steps: int,
        optimizer: ZeroOptimizer,
        done: list[float],
        log: Path | None = None,
        tensorboard: Path | None = None,
    ):
        self.epoch_steps, self.total, self.optimizer = epoch_steps, epochs * epoch_steps, optimizer
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.bar = tqdm(total=self.total, initial=len(done), disable=self.rank != 0, unit="step", leave=False)
        self.pending: list[Tensor] = []  # this rank's losses of the last steps
        self.losses = list(done)  # the ranks' means of those before
        self.first = len(done)
        self.tokens = 0
        self.started = self.last = time.perf_counter()
        self.logging = log is not None or tensorboard is not None
        self.records: list[dict[str, float]] = []  # of the last steps, without their losses
        writers = ((JsonLines, log), (TensorBoard, tensorboard)) if self.rank == 0 else ()
        self.logs = [writer(path, len(done)) for writer, path in writers if path is not None]

    def step(self, loss: Tensor, tokens: int) -> None:
        """Count one step. Called before zero_grad(), while gradients too are in memory."""
        self.pending.append(loss)
        self.tokens += tokens * self.world_size
        self.tokens_per_second = self.tokens / (time.perf_counter() - self.started)
        done = len(self.losses) + len(self.pending)
        if done - self.first == min(TRACED_STEPS, self.total - self.first):
            self.memory = self.optimizer.memory()
            self.traffic = self.optimizer.trace.traffic()
            self.trace, self.timeline = self.optimizer.trace.text(), self.optimizer.trace.timeline()
        if self.logging:
            self._record(done, tokens)
        if done % 10 == 0:
            self.bar.set_postfix_str(f"loss {loss:.3f}, {self.tokens_per_second:,.0f} tokens/s", False)
        self.bar.update()

    def _record(self, step: int, tokens: int) -> None:
        """Note what the step did; every few steps, write it down. Collective then."""
        now = time.perf_counter()
        speed = tokens * self.world_size / (now - self.last)
        memory, traffic = self.optimizer.memory(), self.optimizer.trace.traffic()
        self.last = now
        self.records.append(
            {
                "step": step,
                "tokens_per_second": round(speed, 1),
                "memory_bytes": round(memory.total_bytes),
                "sent_bytes": traffic.wire_bytes,
            }
        )
        if step % LOGGED_STEPS == 0 or step == self.total:
            self.means()

    def means(self) -> list[float]:
        """Return the mean loss over the ranks of every step so far. Collective."""
        if self.pending:
            means = mean_over_ranks(self.pending)
            for record, loss in zip(self.records, means, strict=self.logging):
                for log in self.logs:
                    log.write(record | {"loss": loss})
            self.losses, self.pending, self.records = self.losses + means, [], []
        return self.losses

    def epoch(self) -> None:
        """Print the epoch's loss on every rank."""
        means = self.means()[-self.epoch_steps :]
        epoch = len(self.losses) // self.epoch_steps
        self.bar.write(f"rank {self.rank}  epoch {epoch:2}  loss {sum(means) / len(means):.4f}")

    def finish(self, held_out_loss: float, entropy: float, sample: str) -> None:
        """Print how it went, on rank 0."""
        self.bar.close()
        for log in self.logs:
            log.close()
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


def write_trace(path: Path, text: str, timeline: list[dict]) -> None:
    """Write the traces of all ranks, which only together show the partition, to one file: all or nothing.

    A path that ends in .json gets their timelines, for Perfetto; any other gets the text.
    """
    parts: list[tuple[str, list[dict]]] = [("", [])] * dist.get_world_size()
    dist.all_gather_object(parts, (text, timeline))
    if dist.get_rank() != 0:
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.suffix == ".json":
            save_timelines(partial, [each for _, each in parts])
        else:
            ranks = "\n".join(f"rank {rank}\n{each}" for rank, (each, _) in enumerate(parts))
            partial.write_text(f"{TRACE_HEADING}\n{ranks}")
        os.replace(partial, path)  # atomic: a reader finds the old file or the new one, never half of one
    finally:
        partial.unlink(missing_ok=True)

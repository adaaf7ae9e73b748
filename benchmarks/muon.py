"""Muon's step by each engine, beside one process: python benchmarks/muon.py --ranks 2 --out FOLDER

A GPT whose hidden matrices are trained by torch.optim.Muon, and everything else by AdamW. Under DDP every
rank updates every matrix. zerolab's ranks share the matrices out. All contestants take turns in one process
group, with the same data. One process trains on the batches of all ranks, too, and the table says how far
each contestant's parameters are from its own at the end, as a share of the way that these went.

The second table compares ways to bring a matrix's gradient to the rank that updates it.
"""

import argparse
import importlib.util
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolab
from zerolab import data
from zerolab.bench.contestants import Contestant
from zerolab.bench.machine import describe, in_words, publish
from zerolab.bench.observe import Ledger
from zerolab.bench.ratios import slowest
from zerolab.flags import at_least, folder
from zerolab.models import GPT
from zerolab.optimizer.owners import choose_owners
from zerolab.parity.reference import reference

MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
ADAMW = {"lr": 3e-4, "weight_decay": 0.0}
groups_of = zerolab.matrices_by(torch.optim.Muon, **MUON)
WARM_UP_STEPS, BATCH, ALONE = 2, 2, "no messages"


class Together(torch.optim.Optimizer):
    """Two stock optimizers, stepped one after the other, as one who trains in one process has them."""

    def __init__(self, model: nn.Module):
        others, matrices = (dict(group) for group in groups_of(model))
        muon = matrices.pop("optimizer")
        self.each = [torch.optim.AdamW([others], **ADAMW), muon([matrices])]
        super().__init__([group for each in self.each for group in each.param_groups], {})

    def step(self, closure: Callable | None = None) -> None:
        for each in self.each:
            each.step()


def replicated(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> Contestant:
    """The whole update on every rank."""
    optimizer, wrapped = Together(model), wrap(model)
    return Contestant(wrapped, optimizer.step, optimizer.zero_grad, partial(copied, model), model, optimizer)


def sharded(model: nn.Module, stage: int) -> Contestant:
    """zerolab: each matrix is updated by the rank that owns it."""
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, params=groups_of, **ADAMW)

    def read() -> dict[str, Tensor]:
        with optimizer.full_params():
            return copied(model)

    parts = (model, optimizer.step, optimizer.zero_grad, read, model, optimizer)
    return Contestant(*parts, zero=optimizer, stage=stage)


def deepspeed(model: nn.Module, stage: int) -> Contestant:
    """DeepSpeed with its own Muon, which takes the parameters that are marked with use_muon."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    import deepspeed as library
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    others, matrices = (list(group["params"]) for group in groups_of(model))
    for parameter in model.parameters():
        parameter.use_muon = any(parameter is each for each in matrices)
    of_adam = {"params": others, "use_muon": False, "betas": (0.9, 0.999), "eps": 1e-8} | ADAMW
    optimizer = MuonWithAuxAdam([of_adam, {"params": matrices, "use_muon": True} | MUON])
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config)
    read = partial(copied, model)
    return Contestant(engine, engine.step, lambda: None, read, model, engine.optimizer, engine.backward)


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def contestants() -> dict[str, Callable[[nn.Module], Contestant]]:
    """By name, how each is built."""
    found: dict[str, Callable[[nn.Module], Contestant]] = {
        ALONE: partial(replicated, wrap=lambda model: model),
        "ddp": partial(replicated, wrap=nn.parallel.DistributedDataParallel),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        found |= {f"deepspeed-{stage}": partial(deepspeed, stage=stage) for stage in (1, 2)}
    return found | {f"zerolab-{stage}": partial(sharded, stage=stage) for stage in range(4)}


class Row(NamedTuple):
    """One contestant on one rank: milliseconds of each step and of the update in it, bytes, and distance.

    ``update``: processor time of the thread that updates, so that waiting for messages does not count.
    """

    step: list[float]
    update: list[float]
    sent: int
    distance: float


def measure(model: str, rounds: int, reference_file: str) -> dict[str, Row]:
    """On one rank: all contestants take turns, in an order that is shuffled for each round."""
    torch.set_num_threads(1)
    batches, built, rows = batches_of(model), {}, {}
    for name, build in contestants().items():
        torch.manual_seed(0)
        built[name] = build(zerolab.models.make(model))
        rows[name] = Row([], [], 0, 0.0)
    start = built[ALONE].read()
    for number in range(WARM_UP_STEPS + rounds):
        batch = batches(number, dist.get_rank())
        for name in random.Random(number).sample(list(built), len(built)):
            step, update, sent = timed(built[name], batch)
            if number >= WARM_UP_STEPS:
                rows[name].step.append(step)
                rows[name].update.append(update)
            rows[name] = rows[name]._replace(sent=sent)
    ours = torch.load(reference_file)
    way = distance(ours, start)
    off = {name: distance(each.read(), ours) / way for name, each in built.items()}
    return {name: row._replace(distance=off[name]) for name, row in rows.items()}


def timed(contestant: Contestant, batch: tuple[Tensor, ...]) -> tuple[float, float, int]:
    """One step: wall milliseconds, the update's processor time, and bytes in the paper's count."""
    dist.barrier()
    begin = time.perf_counter()
    with Ledger() as ledger:
        contestant.backward(contestant.loss(*batch))
        update = time.thread_time()
        contestant.update()
        update = time.thread_time() - update
        contestant.clear()
        if contestant.zero is not None:
            contestant.zero.engine.finish_gathers()
    return 1e3 * (time.perf_counter() - begin), 1e3 * update, ledger.bytes_by(contestant)


def batches_of(model: str) -> Callable[[int, int], tuple[Tensor, ...]]:
    """Real text, by step and rank."""
    with torch.device("meta"):
        context = cast(GPT, zerolab.models.make(model)).context
    return data.training_and_held_out(context, BATCH, seed=0)[0].batch


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Euclidean, over all parameters."""
    return sum((ours[name].double() - theirs[name].double()).square().sum().item() for name in theirs) ** 0.5


class Matrix(NamedTuple):
    """A matrix's gradient, and the rank that updates it."""

    gradient: Tensor
    owner: int

    def update(self) -> Tensor:
        """What torch.optim.Muon makes of a gradient, which is what all ranks need."""
        weight = nn.Parameter(torch.zeros_like(self.gradient))
        weight.grad = self.gradient
        torch.optim.Muon([weight], **MUON).step()
        return weight.detach()


class Messages:
    """Sends and receives tensors, all at once, and counts what this rank sends."""

    def __init__(self):
        self.sent = 0

    def exchange(self, to: Iterable[tuple[int, Tensor]], of: Iterable[tuple[int, Tensor]]) -> None:
        sends, receives = list(to), list(of)
        self.sent += sum(tensor.nbytes for _, tensor in sends)
        operations = [dist.P2POp(dist.isend, tensor, peer) for peer, tensor in sends if tensor.numel()]
        operations += [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in receives if tensor.numel()]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


def others() -> list[int]:
    return [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]


def to_the_owner(matrices: list[Matrix], messages: Messages) -> None:
    """Each rank sends a matrix's gradient to its owner, who adds up, updates, and sends the update to all."""
    own = [matrix for matrix in matrices if matrix.owner == dist.get_rank()]
    theirs = [matrix for matrix in matrices if matrix.owner != dist.get_rank()]
    landing = {id(matrix): [(rank, torch.empty_like(matrix.gradient)) for rank in others()] for matrix in own}
    messages.exchange(
        [(matrix.owner, matrix.gradient) for matrix in theirs],
        [each for landed in landing.values() for each in landed],
    )
    updates = []
    for matrix in own:
        for _, arrived in landing[id(matrix)]:
            matrix.gradient.add_(arrived)
        updates.append(matrix.update())
    messages.exchange(
        [(rank, update) for update in updates for rank in others()],
        [(matrix.owner, torch.empty_like(matrix.gradient)) for matrix in theirs],
    )


def by_equal_shards(matrices: list[Matrix], messages: Messages, dtype: torch.dtype) -> None:
    """Each rank reduces an equal slice of all matrices; one exchange brings slices to owners, and one back.

    ``dtype``: of the slices on the way to the owners.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    cut = [matrix.gradient.flatten().tensor_split(size) for matrix in matrices]
    landing = [(peer, torch.empty_like(slices[rank])) for peer in others() for slices in cut]
    messages.exchange([(peer, slices[peer]) for peer in others() for slices in cut], landing)
    for index, (_, arrived) in enumerate(landing):
        cut[index % len(cut)][rank].add_(arrived)
    reduced = [slices[rank].to(dtype) for slices in cut]
    own = [index for index, matrix in enumerate(matrices) if matrix.owner == rank]
    theirs = [index for index in range(len(matrices)) if index not in own]
    parts = {
        (index, peer): torch.empty_like(cut[index][peer], dtype=dtype) for index in own for peer in others()
    }
    messages.exchange(
        [(matrices[index].owner, reduced[index]) for index in theirs],
        [(peer, part) for (_, peer), part in parts.items()],
    )
    updates = {}
    for index in own:
        for peer in others():
            cut[index][peer].copy_(parts[index, peer])
        matrices[index].gradient.copy_(torch.cat(cut[index]).view_as(matrices[index].gradient))
        updates[index] = matrices[index].update().flatten().tensor_split(size)
    back = {index: torch.empty_like(cut[index][rank]) for index in theirs}
    messages.exchange(
        [(peer, updates[index][peer]) for index in own for peer in others()],
        [(matrices[index].owner, part) for index, part in back.items()],
    )
    mine = [back[index] if index in back else updates[index][rank] for index in range(len(matrices))]
    messages.exchange(
        [(peer, part) for part in mine for peer in others()],
        [(peer, torch.empty_like(slices[peer])) for slices in cut for peer in others()],
    )


WAYS = {
    "to the owner": to_the_owner,
    "equal shards and an exchange": partial(by_equal_shards, dtype=torch.float32),
    "the same in bf16 (other bits)": partial(by_equal_shards, dtype=torch.bfloat16),
}


def measure_ways(model: str, rounds: int) -> dict[str, tuple[list[float], int]]:
    """On one rank: milliseconds of each way in turns, and the bytes that the rank sends."""
    torch.set_num_threads(1)
    found: dict[str, tuple[list[float], int]] = {name: ([], 0) for name in WAYS}
    for number in range(WARM_UP_STEPS + rounds):
        for name in random.Random(number).sample(list(WAYS), len(WAYS)):
            units, messages = list(matrices_of(model)), Messages()
            dist.barrier()
            begin = time.perf_counter()
            for matrices in units:
                WAYS[name](matrices, messages)
            dist.barrier()
            if number >= WARM_UP_STEPS:
                found[name][0].append(1e3 * (time.perf_counter() - begin))
            found[name] = found[name][0], messages.sent
    return found


def matrices_of(model: str) -> Iterator[list[Matrix]]:
    """The hidden matrices of each block, with random gradients, and owners that the engine would choose."""
    module = zerolab.models.make(model)
    blocks = [[p for p in block.parameters() if p.dim() == 2] for block in cast(GPT, module).blocks]
    owners = choose_owners(blocks, dist.get_world_size())
    for block in blocks:
        yield [Matrix(torch.randn_like(p), owners[id(p)]) for p in block]


def table(ranks: list[dict[str, Row]]) -> str:
    """A line for each contestant: medians of the slowest rank's times, ratios to DDP's of the same rounds."""
    times = {
        name: (slowest([rank[name].step for rank in ranks]), slowest([rank[name].update for rank in ranks]))
        for name in ranks[0]
    }
    lines = [
        f"{'':14}{'ms a step':>10}{'of ddp':>8}{'its update':>12}{'of ddp':>8}{'MB sent':>9}{'distance':>10}"
    ]
    for name, (steps, updates) in times.items():
        ratios = [
            statistics.median(mine / ddp for mine, ddp in zip(own, theirs, strict=True))
            for own, theirs in zip((steps, updates), times["ddp"], strict=True)
        ]
        sent = statistics.mean(rank[name].sent for rank in ranks) / 1e6
        off = max(rank[name].distance for rank in ranks)
        lines.append(
            f"{name:14}{statistics.median(steps):10.1f}{ratios[0]:8.2f}{statistics.median(updates):12.1f}"
            f"{ratios[1]:8.2f}{sent:9.2f}{off:10.1e}"
        )
    return "\n".join(lines)


def table_of_ways(ranks: list[dict[str, tuple[list[float], int]]]) -> str:
    """A line for each way: the median of the slowest rank's times, its ratio to the first's, and bytes."""
    times = {name: slowest([rank[name][0] for rank in ranks]) for name in WAYS}
    first = times[next(iter(WAYS))]
    lines = [f"{'':32}{'ms':>8}{'of the first':>14}{'MB sent, mean':>15}{'largest':>9}"]
    for name, own in times.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(own, first, strict=True))
        sent = [rank[name][1] / 1e6 for rank in ranks]
        median = statistics.median(own)
        lines.append(f"{name:32}{median:8.1f}{ratio:14.2f}{statistics.mean(sent):15.2f}{max(sent):9.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="gpt-11m", help="a preset of zerolab.models")
    parser.add_argument("--ranks", type=at_least(1), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=20, help="steps of each contestant")
    parser.add_argument("--out", type=folder, help="a folder for muon.txt, made if it is not there")
    arguments = parser.parse_args()
    os.environ |= {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    model, ranks, rounds = arguments.model, arguments.ranks, arguments.rounds
    with tempfile.TemporaryDirectory() as place:
        steps, build = WARM_UP_STEPS + rounds, partial(zerolab.models.make, model)
        ours, _ = reference(
            build, batches_of(model), ranks, torch.optim.AdamW, steps, 1, params=groups_of, **ADAMW
        )
        torch.save(ours, file := f"{place}/reference.pt")
        launched = partial(zerolab.launch, backend="gloo", timeout=3600)
        found = launched(measure, ranks, model, rounds, file)
    ways = launched(measure_ways, ranks, model, rounds)
    title = f"{model}, {ranks} ranks, {rounds} steps of each, matrices by Muon and the rest by AdamW, fp32"
    text = f"{in_words(describe())}\n\n{title}\n{table(found)}\n\nUpdates of the matrices alone\n"
    text += f"{table_of_ways(ways)}\n"
    publish(text, arguments.out, f"muon-{ranks}-ranks.txt")


if __name__ == "__main__":
    main()

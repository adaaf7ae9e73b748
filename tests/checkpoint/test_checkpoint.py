"""Promise: a run that is saved goes on at any size, stage and layout, to the bit, as if it never stopped."""

import itertools
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import resizing
from support.resizing import Part
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import zerolab

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

SIZES = ((2, 1), (1, 3), (4, 2), (3, 4), (2, 2))
OPTIMIZERS = (
    ("Adam", {"lr": 0.01}),
    ("SGD", {"lr": 0.05, "momentum": 0.9}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.1}),  # keeps two numbers beside its tensors
    ("AdamW", {"lr": 0.01, "amsgrad": True}),
    ("SGD", {"lr": 0.05}),  # keeps nothing
)
CHANGES = (
    ("fp32", "fp32"),
    ("mixed", "mixed"),
    ("fp32", "fp32"),
    ("fp32", "mixed"),
    ("mixed", "fp32"),
)
# Every stage to every stage; sizes, optimizers, precisions and layouts go round at their own pace.
CASES = [
    (
        *OPTIMIZERS[(place + place // 4) % 5],
        Part(SIZES[place % 5][0], before, CHANGES[place // 3 % 5][0], place % 3 == 0),
        Part(SIZES[place % 5][1], after, CHANGES[place // 3 % 5][1], place % 2 == 0),
    )
    for place, (before, after) in enumerate(itertools.product(range(4), repeat=2))
]


def name_of(case: tuple) -> str:
    name, defaults, before, after = case
    parts = [f"{p.world_size}ranks-stage{p.stage}-{p.precision}" for p in (before, after)]
    return "-".join([name, *list(defaults)[1:], *parts])


def on_one_thread(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with pytest.MonkeyPatch.context() as patch:
        on_one_thread(patch)
        yield


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """By case: losses of the first part, results of the second, by rank; and the reference's."""
    folder = tmp_path_factory.mktemp("checkpoints")
    jobs = [
        (name, defaults, before, after, folder / str(i))
        for i, (name, defaults, before, after) in enumerate(CASES)
    ]

    def run_all(function, chosen: list) -> list:
        return [function(*arguments) for arguments in chosen]

    def by_size(function, arguments: list) -> list:
        """One launch for all jobs of a size: starting processes is what takes the time."""
        found = [None] * len(arguments)
        for world_size in sorted({part.world_size for part, *_ in arguments}):
            mine = [i for i, (part, *_) in enumerate(arguments) if part.world_size == world_size]
            ranks = zerolab.launch(run_all, world_size, function, [arguments[i] for i in mine])
            for i, by_rank in zip(mine, zip(*ranks, strict=True), strict=True):
                found[i] = by_rank
        return found

    firsts = by_size(resizing.first_part, [(before, n, d, f) for n, d, before, _, f in jobs])
    seconds = by_size(resizing.second_part, [(after, n, d, f) for n, d, _, after, f in jobs])
    (plain,) = zerolab.launch(run_all, 1, resizing.reference, [([b, a], n, d) for n, d, b, a, _ in jobs])
    return {"firsts": firsts, "seconds": seconds, "plain": plain, "folder": folder}


def assert_values(by_rank: list, expected: resizing.Values, copies: int) -> None:
    """What the ranks hold is, bit for bit, the reference's, each element ``copies`` times."""
    counts = dict.fromkeys(expected, 0)
    for key, start, values in itertools.chain.from_iterable(by_rank):
        whole = expected[key]
        assert torch.equal(values, whole if whole.dim() == 0 else whole[start : start + len(values)]), key
        counts[key] += values.numel()
    scalar_copies = len(by_rank)
    assert counts == {k: w.numel() * (copies if w.dim() else scalar_copies) for k, w in expected.items()}


@pytest.mark.parametrize("case", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_a_run_goes_on_where_it_stopped(case: int, results: dict):
    *_, before, after = CASES[case]
    copies = after.world_size if after.stage == 0 else 1
    (at_switch, first_losses), (at_end, second_losses) = results["plain"][case]
    assert results["firsts"][case][0] == first_losses
    loaded, ended, losses, extras = zip(*results["seconds"][case], strict=True)
    assert_values(loaded, at_switch, copies)
    assert_values(ended, at_end, copies)
    assert losses[0] == second_losses
    same_size = before.world_size == after.world_size
    assert list(extras) == [rank if same_size else 0 for rank in range(after.world_size)]


@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_writes_its_share_and_nobody_writes_padding(results: dict, stage: int):
    """At stage 0 too, where every rank holds everything."""
    case = next(i for i, (*_, b, _) in enumerate(CASES) if (b.world_size, b.stage) == (4, stage))
    metadata = dcp.FileSystemReader(results["folder"] / str(case) / "generation-000001").read_metadata()
    (at_switch, _), _ = results["plain"][case]
    tensors = {key: m for key, m in metadata.state_dict_metadata.items() if hasattr(m, "chunks")}
    assert {k: (m.size.numel(), sum(c.sizes.numel() for c in m.chunks)) for k, m in tensors.items()} == {
        ("model." + name if key == "value" else f"optimizer.{name}.{key}"): (whole.numel(),) * 2
        for (name, key), whole in at_switch.items()
        if whole.dim() and whole.numel()
    }
    by_rank = [0] * 4
    for index, place in metadata.storage_data.items():
        if index.fqn in tensors:
            chunk = next(c for c in tensors[index.fqn].chunks if c.offsets == index.offset)
            by_rank[int(place.relative_path.split("_")[2])] += chunk.sizes.numel()
    assert max(by_rank) < 1.5 * sum(by_rank) / 4, by_rank
    assert len(tensors["model.blocks.0.bias"].chunks) == 1 < len(tensors["model.frozen.weight"].chunks)


def test_torchs_own_tools_read_the_files(results: dict, tmp_path: Path):
    dcp_to_torch_save(results["folder"] / "0" / "generation-000001", tmp_path / "all.pt")
    stored = torch.load(tmp_path / "all.pt", weights_only=False)
    (at_switch, _), _ = results["plain"][0]
    assert torch.equal(stored["model.blocks.1.weight"], at_switch["blocks.1.weight", "value"])


# Hyperparameters and schedulers.


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)


def rates(folder: Path, saving: bool) -> list[list[float]]:
    optimizer = resizing.optimizer_of(Part(dist.get_world_size(), 2), "Adam", {"lr": 0.01})
    scheduler = schedule(optimizer)
    if not saving:
        scheduler.load_state_dict(zerolab.load(optimizer, folder))
    found = []
    for step in range(4):
        resizing.train(optimizer, step, steps=1)
        scheduler.step()
        found.append([group["lr"] for group in optimizer.local.optimizers[0].param_groups])
    if saving:
        zerolab.save(optimizer, folder, extra=scheduler.state_dict())
    return found


def test_a_scheduler_goes_on_through_extra(tmp_path: Path):
    plain = torch.optim.Adam(resizing.groups_of(resizing.Subject()), lr=0.01)
    scheduler, expected = schedule(plain), []
    for _ in range(8):
        expected.append([group["lr"] for group in plain.param_groups])
        plain.step()
        scheduler.step()
    first, *_ = zerolab.launch(rates, 2, tmp_path, True)
    second, *_ = zerolab.launch(rates, 3, tmp_path, False)
    assert first + second == expected


def break_off_backward(optimizer: zerolab.ZeroOptimizer) -> None:
    handle = optimizer.model.first.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.model(resizing.micro_batch(5, 0)).backward()
    handle.remove()


def state_addresses(optimizer: zerolab.ZeroOptimizer) -> set[int]:
    return {tensor.data_ptr() for tensor in optimizer.local.state_tensors() if tensor.dim()}


def roll_back(folder: Path) -> tuple[bool, bool]:
    """Load into a run that went on: with its state, its gradients and, at stage 3, a root that is whole."""
    optimizer = resizing.optimizer_of(Part(2, 3), "Adam", {"lr": 0.01})
    resizing.train(optimizer, 0)
    zerolab.save(optimizer, folder)
    before = resizing.held(optimizer)
    resizing.train(optimizer, 5)
    break_off_backward(optimizer)
    with pytest.raises(RuntimeError, match=r"load in the middle of .* call optimizer.zero_grad\(\) first"):
        zerolab.load(optimizer, folder)
    optimizer.zero_grad()
    optimizer.model(resizing.micro_batch(6, 0)).backward()
    optimizer.model(resizing.micro_batch(7, 0))  # never taken backward
    addresses = state_addresses(optimizer)
    zerolab.load(optimizer, folder)
    assert state_addresses(optimizer) == addresses, "no second copy of the state"

    def rolled_back() -> bool:
        now = resizing.held(optimizer)
        return all(torch.equal(mine, saved) for (*_, mine), (*_, saved) in zip(now, before, strict=True))

    with optimizer.full_params():  # writes back what is whole: it has to be the loaded one
        pass
    after_load = rolled_back()
    optimizer.step()  # no gradients are left to step by
    return after_load, rolled_back()


def test_loading_rolls_a_run_back(tmp_path: Path):
    assert zerolab.launch(roll_back, 2, tmp_path) == [(True, True)] * 2


def of_a_subgroup(folder: Path) -> bool | None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    torch.manual_seed(0)
    model = torch.nn.Linear(9, 9)
    optimizer = zerolab.ZeroOptimizer(model, torch.optim.Adam, process_group=group)
    zerolab.save(optimizer, folder)
    with optimizer.full_params(), torch.no_grad():
        saved = model.weight.clone()
        model.weight.zero_()
    zerolab.load(optimizer, folder)
    return torch.equal(model.weight, saved)


def test_ranks_that_train_apart_save_apart(tmp_path: Path):
    assert zerolab.launch(of_a_subgroup, 3, tmp_path) == [None, True, True]

"""Promise: what an engine holds and sends is counted from its tensors, in the paper's count."""

import sys

import cloudpickle
import torch
import torch.distributed as dist
from support.contestants import tiny

import zerolab
from zerolab.bench import contestants
from zerolab.bench.contestants import UPDATES, enter, fully_sharded
from zerolab.bench.observe import Ledger, held_bytes

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def collectives() -> list[tuple]:
    """Each of torch's collectives on 32 numbers in all, and one among ranks 0 and 2."""
    whole, part = torch.zeros(32), torch.zeros(8)
    pair = dist.new_group([0, 2])
    with Ledger() as ledger:
        dist.all_reduce(whole)
        dist.broadcast(whole, src=0)
        dist.reduce(whole, dst=1)
        dist.all_gather_into_tensor(whole, part)
        dist.all_gather(list(whole.chunk(4)), part)
        dist.reduce_scatter_tensor(part, whole)
        dist.reduce_scatter(part, list(whole.chunk(4)))
        dist.barrier()
        if dist.get_rank() in (0, 2):
            dist.all_reduce(part, group=pair)
    return [tuple(each) for each in ledger.sent]


def test_a_collective_counts_as_the_paper_has_it():
    ranks = zerolab.launch(collectives, 4)
    every = (0, 1, 2, 3)
    payloads = [("allreduce", 256), ("broadcast", 128), ("reduce", 128), ("_allgather_base", 128)]
    payloads += [("allgather", 128), ("_reduce_scatter_base", 128), ("reduce_scatter", 128)]
    expected = [(*payload, every) for payload in payloads]
    assert ranks[1] == ranks[3] == expected
    assert ranks[0] == ranks[2] == [*expected, ("allreduce", 64, (0, 2))]


def observed() -> dict[str, tuple]:
    """Bytes per parameter held, and Ψ moved, of each engine in its third step."""
    psi = sum(parameter.numel() for parameter in tiny().parameters())
    engines = {name: enter(name, tiny, "exact") for name in ("ddp", "ddp+zero", "fully_shard", "zerolab-2")}
    kept = {"reshard_after_forward": False}
    engines["kept"] = fully_sharded(tiny(), UPDATES["exact"], **kept)
    engines["hybrid"] = fully_sharded(tiny(), UPDATES["exact"], nodes=2)
    tokens, found = torch.arange(64).view(2, 32), {}
    for name, engine in engines.items():
        for _ in range(3):  # DDP tells its buckets in the second
            with Ledger() as ledger:
                engine.backward(engine.loss(tokens, tokens))
                engine.update()
            held = held_bytes(engine)
            engine.clear()
        cleared = held_bytes(engine).grads_bytes
        found[name] = (*(size / psi for size in held), ledger.bytes_by(engine) / (4 * psi), cleared)
    return found


def test_engines_hold_and_send_what_their_stage_says():
    ranks = zerolab.launch(observed, 4)
    mean = {
        name: tuple(sum(each) / 4 for each in zip(*(r[name] for r in ranks), strict=True))
        for name in ranks[0]
    }
    assert mean["ddp"] == (4, 4, 8, 2, 0)
    assert mean["ddp+zero"] == (4, 4, 2, 3, 0)
    assert mean["zerolab-2"] == (4, 1, 2, 2, 0)
    assert mean["kept"] == (1, 1, 2, 2, 0)
    assert mean["fully_shard"][:3] == (1, 1, 2) and 2 < mean["fully_shard"][3] < 3
    assert mean["hybrid"][:3] == (2, 2, 4) and mean["hybrid"][3] == mean["fully_shard"][3] + 1


def test_the_contestants_take_no_options_that_were_not_asked_for():
    assert "kept" not in contestants.CONTESTANTS and "hybrid" not in contestants.CONTESTANTS

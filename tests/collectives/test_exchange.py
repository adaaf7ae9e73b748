"""Promise: small control messages reach every rank in log2 N rounds, and are counted as they are sent."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

import zerolab
from zerolab.collectives import connect
from zerolab.collectives.collective_check import DIGEST_BYTES, MESSAGE_BYTES, _shortened
from zerolab.storages import MemoryMeter
from zerolab.trace import Trace

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares the ranks the import of pytest

ROUNDS = {1: 0, 2: 1, 3: 2, 4: 2, 5: 3, 6: 3, 7: 3, 8: 3, 9: 4}


def exchanged() -> tuple:
    """What a rank gets of an exchange and of a maximum, and of each the bytes sent and the trace's count."""
    sent: list[int] = []
    send = dist.ProcessGroup.send

    def counted(group, tensors, *place):
        sent.append(sum(tensor.nbytes for tensor in tensors))
        return send(group, tensors, *place)

    trace, rank = Trace(), dist.get_rank()
    comm = connect(None, torch.device("cpu"), trace, MemoryMeter())
    dist.ProcessGroup.send = counted
    try:
        rows = comm.exchange(torch.tensor([rank, 10 * rank]), "rows").tolist()
        in_exchange, sent[:] = list(sent), []
        own = torch.zeros(comm.world_size, dtype=torch.uint8)
        own[rank] = 200 - rank
        maxima = comm.maximum(own, "bytes").tolist()
    finally:
        dist.ProcessGroup.send = send
    assert own.tolist() == [200 - rank if each == rank else 0 for each in range(comm.world_size)]
    return rows, maxima, in_exchange, sent, [event.wire_bytes for event in trace.events]


@pytest.mark.parametrize("world_size", ROUNDS)
def test_every_rank_hears_of_every_other_in_a_few_rounds(world_size: int):
    for rows, maxima, in_exchange, in_maximum, traced in zerolab.launch(exchanged, world_size):
        assert rows == [[rank, 10 * rank] for rank in range(world_size)]
        assert maxima == [200 - rank for rank in range(world_size)]
        checks = [MESSAGE_BYTES] if world_size > 1 else []
        assert len(in_exchange) == len(in_maximum) == ROUNDS[world_size] + len(checks)
        assert sum(in_exchange) == 16 * (world_size - 1) + sum(checks)
        assert sum(in_maximum) == ROUNDS[world_size] * world_size + sum(checks)
        assert traced == [sum(in_exchange), sum(in_maximum)]


def test_a_long_name_in_a_message_keeps_its_beginning_and_its_end():
    name = b"all_gather of " + b"encoder.layers." * 9 + b"attention.projection"
    shortened = _shortened(name)
    assert shortened == name[:20] + b"..." + name[-33:]
    assert len(shortened) == MESSAGE_BYTES - DIGEST_BYTES

"""Promise: the checksum of a flat buffer changes with every bit of it, whatever the buffer's length."""

import pytest
import torch

from zerolab.storages import COLUMNS, checksum


@pytest.mark.parametrize("numel", [8, COLUMNS, COLUMNS + 8, 5 * COLUMNS, 5 * COLUMNS + 8])
def test_one_bit_more_or_less_is_seen(numel: int):
    words = torch.arange(numel, dtype=torch.int64) * 0x0123456789ABCDEF
    expected = checksum(words)
    for place in range(numel):
        for bit in range(64):
            changed = words.clone()
            changed[place] ^= 1 << bit if bit < 63 else -(1 << 63)
            assert checksum(changed) != expected, (place, bit)
    assert checksum(words.clone()) == expected


def test_elements_that_change_places_are_seen():
    words = torch.arange(3 * COLUMNS + 8)
    expected = checksum(words)
    for place in range(len(words) - 1):
        swapped = words.clone()
        swapped[[place, place + 1]] = words[[place + 1, place]]
        assert checksum(swapped) != expected, place

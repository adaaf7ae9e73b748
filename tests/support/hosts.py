"""Two hosts on one machine (zerolab/bench/hosts.py), or a skip that says what is missing."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerolab.bench.hosts import INTERFACE, Host, Unavailable, hosts

__all__ = ["ADDRESSES", "INTERFACE", "Host", "two_hosts"]
ADDRESSES = ("10.77.0.1", "10.77.0.2")


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[list[Host]]:
    """Two hosts, gone at the end with every process on them. Skips the test where they may not be made."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(hosts(2, folder))
        except Unavailable as error:
            pytest.skip(str(error))
        yield made

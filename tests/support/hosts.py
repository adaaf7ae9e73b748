"""Hosts on one machine (zerolab/bench/hosts.py), or a skip that says what is missing."""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from zerolab.bench.hosts import INTERFACE, Host, Unavailable, hosts

__all__ = ["ADDRESSES", "INTERFACE", "Host", "hosts_or_skip", "two_hosts"]
ADDRESSES = ("10.77.0.1", "10.77.0.2")


@contextlib.contextmanager
def hosts_or_skip(count: int, folder: Path) -> Iterator[list[Host]]:
    """So many hosts, gone at the end with every process on them. Skips where they cannot be made."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(hosts(count, folder))
        except Unavailable as error:
            pytest.skip(str(error))
        yield made


two_hosts = partial(hosts_or_skip, 2)

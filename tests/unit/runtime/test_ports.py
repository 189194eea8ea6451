"""Free ports: outside the kernel's range, never the same port twice, and a bounded search."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path

import pytest

from magnetar.runtime.errors import NoFreePort
from magnetar.runtime.listener import bind_port
from magnetar.runtime.ports import free_ports


def test_no_port_is_given_twice() -> None:
    found = free_ports(20) + free_ports(20)
    assert len(set(found)) == 40


def test_free_ports_are_below_the_range_of_the_kernel() -> None:
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert max(free_ports(20)) < int(first)


@pytest.mark.parametrize("first", [0, 1])  # the beginning of the search
def test_a_port_that_is_taken_is_passed_over(first: int) -> None:
    low, high = sorted(free_ports(2))
    search = partial(free_ports, among=range(low, high + 1, high - low), steps=count(first))
    listener = bind_port("127.0.0.1", low)
    try:
        assert search(0) == []
        assert search(1) == [high]
        with pytest.raises(NoFreePort, match=f"no 2 free ports between {low} and {high}"):
            search(2)
    finally:
        listener.close()

"""Ports for servers that this process is about to start and whose ports must stay the same.

Prefer port 0 where a server can tell its port: only that is free of races. These are free a moment
ago, below the range from which the kernel takes ports for connections (a client that keeps trying
to reach a dead server must not be given the server's own port), and never given twice by one
process; two processes rarely meet.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Final

from magnetar.runtime.errors import NoFreePort

if TYPE_CHECKING:
    from collections.abc import Iterator

_PORTS: Final = range(12_000, 32_000)
_steps = count(os.getpid() * 7_919)  # processes that start together search far apart


def free_ports(number: int, *, among: range = _PORTS, steps: Iterator[int] = _steps) -> list[int]:
    """So many on loopback, searched `among` these in the order of `steps`. Raises NoFreePort."""
    found: list[int] = []
    for _ in among:
        if len(found) == number:
            break
        port = among[next(steps) % len(among)]
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    if len(found) < number:
        raise NoFreePort(number, among.start, among.stop - 1)
    return found

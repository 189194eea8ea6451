"""Free ports for servers whose ports are chosen before they start.

Use port 0 where a server can report its port: only port 0 has no race. A port from this module was
free a moment ago, and another process may take it. All ports are below the range from which the
kernel takes ports for outgoing connections: otherwise a client that retries a dead server could get
the server's port. A process tries all other ports before it gets a port again, and two processes
rarely get the same port.
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
    """Return `number` free ports on loopback, searched in `among` in the order of `steps`. Raises
    NoFreePort."""
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

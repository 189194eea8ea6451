"""Free ports for servers whose ports are chosen before they start.

Port 0 is better where a server can report its port: only port 0 has no race. A port of this module
was free a moment ago. It is below the range from which the kernel takes ports for outgoing
connections: a client that retries a dead server could otherwise get the server's port. One process
never gets a port twice, and two processes rarely get the same one.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from itertools import count
from typing import Final

from magnetar.runtime.errors import NoFreePort

_PORTS: Final = range(12_000, 32_000)
_steps = count(os.getpid() * 37)


def free_ports(number: int) -> list[int]:
    """That many free ports on loopback. Raises NoFreePort."""
    found: list[int] = []
    for _ in _PORTS:
        if len(found) == number:
            break
        port = _PORTS[next(_steps) % len(_PORTS)]
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    if len(found) < number:
        raise NoFreePort(number, _PORTS.start, _PORTS.stop - 1)
    return found

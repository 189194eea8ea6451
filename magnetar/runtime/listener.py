"""Listening sockets, made before anything is opened, so that a taken port is the first error.

They listen at once: a port that is bound alone can still be taken by another process, whose victim
learns of it only when it begins to serve. Who connects early waits until the server is open.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Final

from magnetar.runtime.errors import AddressUnusable, PortInUse

# Who serves on the socket may raise it.
_BACKLOG: Final = 128


def bind_port(host: str, port: int) -> socket.socket:
    """A listening TCP socket, for `serve_http` or `asyncio.start_server(sock=...)`; port 0 takes
    any.

    Raises PortInUse, AddressUnusable.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise AddressUnusable(host, port, error.strerror or str(error)) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(host, port) from error
        raise AddressUnusable(host, port, error.strerror or str(error)) from error
    return listener


def port_of(listener: socket.socket) -> int:
    """The port that a socket is bound to."""
    port: int = listener.getsockname()[1]
    return port


def authority(host: str, port: int) -> str:
    """`host:port` as URLs and gRPC write it: IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a listener on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether `host` is every address of this machine, and so none that others could be told."""
    return host in ("", "0.0.0.0", "::", "*")

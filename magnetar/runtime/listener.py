"""Listening sockets. A server makes them first, so that a port in use makes its start fail early.

`bind_port` returns a socket that already listens. If the socket were only bound, another process
could take its port, and the server would notice this only when it begins to serve. A client that
connects early waits for the server.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Final

from magnetar.runtime.errors import AddressUnusable, PortInUse

# The server that uses the socket may set a larger backlog.
_BACKLOG: Final = 128


def bind_port(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket. Port 0: any free port.

    The socket is for `serve_http` or for the `sock` of asyncio's `create_server`.

    Raises PortInUse, AddressUnusable.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise AddressUnusable(host, port, error.strerror or str(error)) from error
    except UnicodeError as error:  # a label of the host is empty or longer than 63 characters
        raise AddressUnusable(host, port, f"not a host name: {error}") from error
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
    """Return the port that a socket is bound to."""
    port: int = listener.getsockname()[1]
    return port


def authority(host: str, port: int) -> str:
    """Return `host:port` as URLs and gRPC write it: IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a listener on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Return whether `host` means every address of this machine. It cannot be advertised then."""
    return host in ("", "0.0.0.0", "::", "*")

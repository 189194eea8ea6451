"""The operating errors of this package.

`definite` is True if the failed operation certainly had no effect.
"""

from __future__ import annotations

from typing import ClassVar


class StreamClosed(Exception):
    """A frame stream has ended.

    `clean` is True if one of the two ends closed the stream on purpose. It is False if the stream
    broke, for example because the connection was lost, the peer's handler failed, a frame was
    malformed, or a `send` was cancelled. Frames that were sent may or may not have arrived.
    """

    definite: ClassVar[bool] = False

    def __init__(self, reason: str, *, clean: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.clean = clean


class CallFailed(Exception):
    """A call (not a stream) ended without an answer. The peer may have executed the call."""

    definite: ClassVar[bool] = False

    def __init__(self, method: str, reason: str) -> None:
        super().__init__(f"{method}: {reason}")
        self.method = method
        self.reason = reason


class PortInUse(Exception):
    """Another process listens on the requested port."""

    definite: ClassVar[bool] = True

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"port {port} on {host} is in use by another process")
        self.host = host
        self.port = port


class NoFreePort(Exception):
    """Fewer ports are free than were requested."""

    definite: ClassVar[bool] = True

    def __init__(self, wanted: int, first: int, last: int) -> None:
        super().__init__(f"no {wanted} free ports between {first} and {last}")
        self.wanted = wanted


class AddressUnusable(Exception):
    """The process cannot listen on the requested host: the host is unknown, or not an address of
    this machine."""

    definite: ClassVar[bool] = True

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(
            f"cannot listen on host {host}, port {port}: {reason}; host must be an address of this"
            " machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
        )
        self.host = host
        self.port = port
        self.reason = reason


class ConfigError(Exception):
    """The settings are invalid. Each problem names the key and the place where it is set."""

    definite: ClassVar[bool] = True

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)

"""The services and the limits that the producers and consumers of a client share."""

from __future__ import annotations

import random as chance
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from magnetar.client.session.attachment import Attachable, Attachment
from magnetar.client.session.backoff import ReconnectDelay
from magnetar.client.session.connection import KEEPALIVE_S
from magnetar.client.session.reachability import is_reachable
from magnetar.client.session.silence import ASK_AFTER_S, PING_AFTER_S
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    import asyncio
    import random
    from collections.abc import Awaitable, Callable, Iterator

    from magnetar.client.errors import PulsarException
    from magnetar.client.scope import Scope
    from magnetar.client.session.lookup import Lookup
    from magnetar.client.session.pool import Dialer, Pool, Purpose
    from magnetar.runtime.clock import Clock


PENDING_BYTES_MAX: Final = 64 << 20
"""The maximum size in bytes of one producer's messages that wait for their receipts. The limit on
the number of messages does not suffice: 1,000 messages of 5 MiB are 5 GB. Apache's Java client has
a limit of bytes for a whole client."""


PARTITIONS_UPDATE_S: Final = 60.0
"""The time in seconds between two checks for new partitions of a topic, as in Apache's client."""


class Core(Protocol):
    """The core of a producer, consumer or reader. A client closes its cores when it is closed."""

    @property
    def topic(self) -> str: ...
    async def close(self) -> None: ...
    def shut_down(self, error: PulsarException) -> None: ...


@dataclass(frozen=True, slots=True)
class Environment:
    """The network, the clock, the random source and the loop of a client."""

    dialer: Callable[[], Dialer] | None = None  # None: the transport that the service URL names
    clock: Clock = field(default_factory=SystemClock)
    random: random.Random = field(default_factory=chance.Random)
    # Returns whether a cluster accepts connections (Probe in clusters.py).
    probe: Callable[[str, float], Awaitable[bool]] = is_reachable
    keepalive_s: float = KEEPALIVE_S
    ping_after_s: float = PING_AFTER_S  # the silence of a broker before a PING
    ask_after_s: float = ASK_AFTER_S  # the silence of a broker before a question to another one
    pending_bytes_max: int = PENDING_BYTES_MAX  # the limit of one producer
    partitions_update_s: float = PARTITIONS_UPDATE_S
    # The loop of a synchronous client's thread. None: uvloop's.
    new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one client that its producers and consumers use."""

    scope: Scope
    pool: Pool
    lookup: Lookup
    clock: Clock
    random: random.Random
    timeout_s: float  # the limit of one operation
    silence_s: float  # a broker's silence before the client asks another broker about it
    pending_bytes_max: int  # the limit of one producer
    partitions_update_s: float
    ids: Iterator[int]  # producer and consumer ids; each attachment takes a new one
    live: set[Core]  # cores that are opened and not closed

    def attachment(self, what: Attachable, purpose: Purpose) -> Attachment:
        return Attachment(
            what,
            purpose,
            lookup=self.lookup,
            pool=self.pool,
            delay=ReconnectDelay(self.random),
            timeout_s=self.timeout_s,
            silence_s=self.silence_s,
        )

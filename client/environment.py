"""What the producers and consumers of a client share, and what the client takes from outside."""

from __future__ import annotations

import random as chance
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from magnetar.client.producing.outgoing import PENDING_BYTES_MAX
from magnetar.client.session.attachment import Attachable, Attachment
from magnetar.client.session.backoff import ReconnectDelay
from magnetar.client.session.connection import KEEPALIVE_S
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from magnetar.client.errors import PulsarException
    from magnetar.client.scope import Scope
    from magnetar.client.session.lookup import Lookup
    from magnetar.client.session.pool import Dialer, Pool, Purpose
    from magnetar.runtime.clock import Clock


class Core(Protocol):
    """What a client ends with itself: the core of a producer, consumer or reader."""

    async def close(self) -> None: ...
    def shut_down(self, error: PulsarException) -> None: ...


def _grpc_dialer() -> Dialer:
    """Loads grpc."""
    from magnetar.client.session.dialer import GrpcDialer

    return GrpcDialer()


@dataclass(frozen=True, slots=True)
class Environment:
    """The network, the clock and the chance that a client is given."""

    dialer: Callable[[], Dialer] = _grpc_dialer
    clock: Clock = field(default_factory=SystemClock)
    random: random.Random = field(default_factory=chance.Random)
    keepalive_s: float = KEEPALIVE_S
    pending_bytes_max: int = PENDING_BYTES_MAX  # of a producer


@dataclass(frozen=True, slots=True)
class Parts:
    """One client's means."""

    scope: Scope
    pool: Pool
    lookup: Lookup
    clock: Clock
    random: random.Random
    timeout_s: float  # of an operation
    pending_bytes_max: int  # of a producer
    ids: Iterator[int]  # of producers and consumers: a new one for each attachment
    live: set[Core]  # opened and not closed

    def attachment(self, what: Attachable, purpose: Purpose) -> Attachment:
        return Attachment(
            what,
            purpose,
            lookup=self.lookup,
            pool=self.pool,
            delay=ReconnectDelay(self.random),
            timeout_s=self.timeout_s,
        )

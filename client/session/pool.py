"""The connections of a client: at most one for each broker and purpose, opened when needed."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

from magnetar.client.authentication import NoCredentials
from magnetar.client.session.connection import KEEPALIVE_S, Connection
from magnetar.client.session.silence import ASK_AFTER_S, PING_AFTER_S
from magnetar.client.together import together
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from magnetar.client.authentication import Credentials
    from magnetar.client.scope import Scope
    from magnetar.client.session.connection import OtherBrokers
    from magnetar.runtime.frames import FrameStream

log = get_logger(__name__)


class Purpose(Enum):
    """The purpose of a session. Each purpose has its own session, so that deliveries do not delay
    receipts."""

    PUBLISH = "publish"  # publishes and lookups
    CONSUME = "consume"


class Dialer(Protocol):
    """Opens streams over one transport."""

    def open(self, broker: str, purpose: Purpose) -> FrameStream:
        """Begin a stream to a broker's URL. If no broker answers there, the stream ends."""

    async def close(self) -> None:
        """Release the resources that the streams share. Called after all streams have ended. Takes
        a bounded time. Called again if the call was cancelled."""


class MovableDialer:
    """A Dialer that passes all calls on to another Dialer, which `move` replaces."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer

    def open(self, broker: str, purpose: Purpose) -> FrameStream:
        return self._dialer.open(broker, purpose)

    async def close(self) -> None:
        await self._dialer.close()

    def move(self, dialer: Dialer) -> Dialer:
        """Use another dialer from now on. Returns the former one; the caller closes it."""
        former, self._dialer = self._dialer, dialer
        return former


class Pool:
    """Returns open connections. Callers share a connection that is being opened."""

    def __init__(
        self,
        scope: Scope,
        dialer: Dialer,
        *,
        open_timeout_s: float,
        keepalive_s: float = KEEPALIVE_S,
        ping_after_s: float = PING_AFTER_S,
        ask_after_s: float = ASK_AFTER_S,
        credentials: Credentials | None = None,  # None: the client presents no credentials
    ) -> None:
        self.others: OtherBrokers | None = None  # asked about silent brokers; None: ask no broker
        self._ping_after_s = ping_after_s
        self._ask_after_s = ask_after_s
        self._credentials = credentials or NoCredentials()
        self._scope = scope
        self._dialer = dialer
        self._open_timeout_s = open_timeout_s
        self._keepalive_s = keepalive_s
        self._connections: dict[tuple[str, Purpose], Connection] = {}

    async def connection(
        self, broker: str, purpose: Purpose, *, through: str | None = None
    ) -> Connection:
        """Return an open session with `broker`. Raises ConnectError, or the broker's refusal.

        `through`: the URL of the proxy to connect to; None: connect to the broker itself.
        """
        connection = self._connections.get((broker, purpose))
        if connection is None or connection.error is not None:
            connection = self._begin(broker, purpose, through)
        await connection.wait_opened()
        return connection

    async def close(self) -> None:
        """Send all outboxes, then end all sessions. Raises the first error."""
        await together(connection.close() for connection in self._connections.values())

    def move(self, credentials: Credentials | None, reason: str) -> None:
        """End all sessions, because the client moves to another cluster. New sessions use
        `credentials`."""
        self._credentials = credentials or NoCredentials()
        for connection in list(self._connections.values()):
            connection.give_up(reason)

    def _begin(self, broker: str, purpose: Purpose, through: str | None) -> Connection:
        self._scope.check_open()
        connection = Connection(
            self._dialer.open(through or broker, purpose),
            broker,
            credentials=self._credentials,
            is_proxied=through is not None,
            open_timeout_s=self._open_timeout_s,
            keepalive_s=self._keepalive_s,
            ping_after_s=self._ping_after_s,
            ask_after_s=self._ask_after_s,
            others=self.others,
        )
        name = f"{purpose.value} session, {broker}"
        task = self._scope.start(self._live(connection, purpose), name)
        # If the task is cancelled before it begins, it does not end the session itself.
        task.add_done_callback(lambda _: connection.give_up("the client was closed"))
        self._connections[broker, purpose] = connection
        return connection

    async def _live(self, connection: Connection, purpose: Purpose) -> None:
        key = connection.broker, purpose
        try:
            await connection.run()
        finally:
            if self._connections.get(key) is connection:
                del self._connections[key]
        log.info("session ended", broker=connection.broker, reason=str(connection.error))

"""The state of one connection that the handlers of its commands, and events.py, use.

The context holds the open producers, consumers and watchers of the connection, and the functions
that send to the client. It has no task and never waits: the connection (connection.py) reads,
writes and runs the timers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import ConsumerNotFound, NotAuthorized
from magnetar.broker.topic.contract import ClientInfo

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from magnetar.broker.broker import Broker
    from magnetar.broker.session.access import Permission, Resource
    from magnetar.broker.session.answers import Answers
    from magnetar.broker.session.session import Session
    from magnetar.broker.topic.consumer import ConsumerHandle
    from magnetar.broker.topic.protocol import Producer
    from magnetar.metadata.model import BrokerRegistration
    from magnetar.protos.names import TopicName
    from magnetar.runtime.frames import Outbox

DELIVERY_BYTES_MAX: Final = 1 << 20
"""The bytes in a connection's outbox at which subscriptions stop delivering to the connection. Four
full frames keep a stream busy."""

SCHEMAS_MAX: Final = 4
"""The limit of requests of one connection that parse, compare or read schemas at the same time;
further requests wait. Connections take turns (schemas/registry.py)."""

DELETED_MAX: Final = 1_000
"""The limit of remembered producers and consumers of one connection whose topic was deleted. Beyond
the limit, the broker forgets the oldest: most clients do not open such producers and consumers
again."""


class Transport(StrEnum):
    """The client's transport. A lookup answers with the owner's address for this transport."""

    GRPC = "grpc"
    PULSAR = "pulsar"


class Context:
    """Each connection has one."""

    def __init__(
        self,
        broker: Broker,
        session: Session,
        outbox: Outbox,
        *,
        transport: Transport,
        peer: str,
        end: Callable[[str], None],
        probe: Callable[[], Awaitable[bool]],
        answers: Answers,
    ) -> None:
        self.broker = broker
        self.answers = answers  # the answers that all connections share
        self.session = session
        self.producers: dict[int, Producer] = {}  # the open producers
        self.consumers: dict[int, ConsumerHandle] = {}
        self.watchers: dict[int, Callable[[], None]] = {}  # the call that ends each watcher
        self.published: set[int] = set()  # producers that published in the frame being read
        self.over = False  # True: the connection ends, and carries out nothing more
        self.put = outbox.put  # sends a message
        self.put_control = outbox.put_control  # sends a command, before messages
        self.end = end  # closes the connection; takes the reason
        self.probe = probe  # returns True if the client answers a PING
        self.schemas = asyncio.Semaphore(SCHEMAS_MAX)
        self.lacking_room = asyncio.Event()  # set when a consumer was refused room
        self._refused_room: set[int] = set()
        self._deleted: dict[tuple[str, int], TopicName] = {}  # see `remember_deleted`
        self._closing: deque[Callable[[], None]] = deque()  # the calls that `close_one` makes next
        self._outbox = outbox
        self._transport = transport
        self._peer = peer

    @property
    def client(self) -> ClientInfo:
        return ClientInfo(
            address=self._peer,
            version=self.session.client_version,
            supports_partial_producer=self.session.supports_partial_producer,
        )

    # ---- permissions -----------------------------------------------------------------------------

    def require(self, permission: Permission, resource: Resource) -> None:
        """Raise NotAuthorized if the client lacks the permission."""
        grants = self.session.grants
        assert grants is not None, "a request before the client is authenticated"
        if not grants.allow(permission, resource):
            raise NotAuthorized(self.session.role, permission.value, str(resource))

    # ---- producers and consumers -----------------------------------------------------------------

    def add_producer(self, producer_id: int, handle: Producer) -> bool:
        """Add a producer that the topic has opened. Returns False if the client has left or has
        closed the id meanwhile; then the producer is closed."""
        if self.over or not self.session.on_producer_opened(producer_id):
            handle.close_nowait()
            return False
        self.producers[producer_id] = handle
        return True

    def add_consumer(self, consumer_id: int, handle: ConsumerHandle) -> bool:
        """Like `add_producer`, for a consumer."""
        if self.over or not self.session.on_consumer_opened(consumer_id):
            handle.close_nowait()
            return False
        self.consumers[consumer_id] = handle
        return True

    def consumer(self, consumer_id: int) -> ConsumerHandle:
        """Return the open consumer. Raises ConsumerNotFound if the subscription closed the consumer
        after the request was admitted."""
        try:
            return self.consumers[consumer_id]
        except KeyError:
            raise ConsumerNotFound(consumer_id) from None

    def remove_producer(self, producer_id: int, handle: Producer | None) -> None:
        """Remove a closed producer. No effect if its id is free or in use again."""
        if handle is not None and self.producers.get(producer_id) is handle:
            del self.producers[producer_id]
            self.session.on_producer_closed(producer_id)

    def remove_consumer(self, consumer_id: int, handle: ConsumerHandle | None) -> None:
        """Remove a closed consumer. No effect if its id is free or in use again."""
        if handle is not None and self.consumers.get(consumer_id) is handle:
            del self.consumers[consumer_id]
            self._refused_room.discard(consumer_id)
            self.session.on_consumer_closed(consumer_id)

    def remember_deleted(self, kind: str, number: int, topic: TopicName) -> None:
        """Remember that the topic of this producer or consumer was deleted. When the client opens
        the producer or consumer again, the broker does not create the topic."""
        while len(self._deleted) >= DELETED_MAX:
            del self._deleted[next(iter(self._deleted))]
        self._deleted[kind, number] = topic

    def returns_to_deleted(self, kind: str, number: int, topic: TopicName) -> bool:
        """Return True if the topic was deleted while this producer or consumer was open on it."""
        return self._deleted.get((kind, number)) == topic

    def leave(self) -> bool:
        """Hand everything that is open over to `close_one`, because the connection is gone. Returns
        True if something was open. Idempotent."""
        self.over = True
        open_before = len(self._closing)
        self._closing += [producer.close_nowait for producer in self.producers.values()]
        self._closing += [consumer.close_nowait for consumer in self.consumers.values()]
        self._closing += self.watchers.values()
        self.producers.clear()
        self.consumers.clear()
        self.watchers.clear()
        return len(self._closing) > open_before

    def close_one(self) -> bool:
        """Close one producer, consumer or watcher of a connection that is gone. Returns True if
        there are more to close."""
        if self._closing:
            try:
                self._closing.popleft()()
            except Exception as error:  # broker/guard.py: the others are closed anyway
                self.broker.failures.note("leave", self._peer, error)
        return bool(self._closing)

    # ---- room for messages -----------------------------------------------------------------------

    def writable(self, consumer_id: int) -> bool:
        """Return True if the consumer's subscription may deliver. After False, the connection
        calls the subscription when there is room and the broker has verified its ownership."""
        if self.over:
            return False  # the consumer is about to be closed
        if self._outbox.pending_bytes < DELIVERY_BYTES_MAX and self.broker.standstill.sure:
            return True
        self._refused_room.add(consumer_id)
        self.lacking_room.set()
        return False

    def take_refused(self) -> list[ConsumerHandle]:
        """Return one consumer of each subscription that was refused room. The caller must call
        `on_writable` when the connection is writable again. One call is enough for a subscription,
        of which 50,000 consumers may have been refused."""
        refused, self._refused_room = self._refused_room, set()
        handles = map(self.consumers.get, refused)
        return list({it.subscription: it for it in handles if it is not None}.values())

    # ---- addresses -------------------------------------------------------------------------------

    def url(self, broker: BrokerRegistration) -> str:
        """Return the broker's address for the transport of this client."""
        return broker.grpc_url if self._transport is Transport.GRPC else broker.pulsar_url

    def next_owner_url(self, topic: TopicName) -> str:
        """Return the address of the broker that takes the topic over; "": no broker is chosen."""
        next_owner = self.broker.next_owner_of(topic)
        return self.url(next_owner) if next_owner is not None else ""

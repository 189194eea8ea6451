"""The asyncio client: the one implementation, which the synchronous one (sync.py) wraps."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Self

from magnetar.client.consumer import Consumer, LoopQueue, subscription_of
from magnetar.client.consuming.subscriber import Subscriber
from magnetar.client.environment import Core, Environment, Parts
from magnetar.client.errors import (
    AlreadyClosed,
    Interrupted,
    InvalidTopicName,
    NotAllowedError,
    PulsarException,
    Timeout,
)
from magnetar.client.options import (
    ClientOptions,
    ConsumerBatchReceivePolicy,
    ConsumerOptions,
    ProducerOptions,
    ReaderOptions,
)
from magnetar.client.producer import Producer
from magnetar.client.producing.publisher import Publisher
from magnetar.client.reader import Reader, begin_at_latest, reader_subscription
from magnetar.client.scope import Scope
from magnetar.client.session.lookup import Lookup
from magnetar.client.session.pool import Pool
from magnetar.client.signature import taking
from magnetar.protos.errors import InvalidTopicName as InvalidName
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from magnetar.client.consuming.subscription import Subscription
    from magnetar.client.message_queue import MessageQueue

__all__ = ["Client", "Consumer", "Producer", "Reader"]


class Client:
    """Makes producers, consumers and readers, and holds the connections that they share.

    Belongs to the loop on which it is first used. Connects when something is made. The parameters
    are those of ClientOptions.
    """

    _failure: PulsarException | None  # None: it is open
    _parts: Parts

    @taking(ClientOptions)
    def __init__(self, options: ClientOptions) -> None:
        self._set_up(options, Environment())

    @classmethod
    def in_world(cls, options: ClientOptions, world: Environment) -> Self:
        """A client with another network, clock and chance: for tests and simulations."""
        client = cls.__new__(cls)
        client._set_up(options, world)
        return client

    @taking(ProducerOptions)
    async def create_producer(self, options: ProducerOptions) -> Producer:
        """A producer on a topic. The parameters are those of ProducerOptions.

        Raises ProducerBusy, InvalidTopicName, NotAllowedError, ..., and ConnectError or Timeout
        when no broker took it within the operation's time.
        """
        publisher = self.publisher(options)
        producer = Producer(publisher, options, self._parts.clock)
        await self.opened(publisher)
        return producer

    @taking(ConsumerOptions)
    async def subscribe(self, options: ConsumerOptions) -> Consumer:
        """A consumer of a subscription, which is made unless it exists. The parameters are those of
        ConsumerOptions.

        Raises ConsumerBusy, InvalidTopicName, NotAllowedError, ..., and ConnectError or Timeout
        when no broker took it within the operation's time.
        """
        if options.message_listener is not None:
            raise NotAllowedError("message_listener: here, receive in a task of your own")
        queue = LoopQueue()
        subscriber = self.subscriber(options.topic, subscription_of(options), queue)
        await self.opened(subscriber)
        policy = options.batch_receive_policy or ConsumerBatchReceivePolicy()
        return Consumer(subscriber, queue, policy)

    @taking(ReaderOptions)
    async def create_reader(self, options: ReaderOptions) -> Reader:
        """A reader of a topic from a place in it. The parameters are those of ReaderOptions.

        Raises as `subscribe`.
        """
        if options.reader_listener is not None:
            raise NotAllowedError("reader_listener: here, read in a task of your own")
        queue = LoopQueue()
        subscription = reader_subscription(options, self._parts.random)
        subscriber = self.subscriber(options.topic, subscription, queue)
        await self.opened(subscriber)
        await begin_at_latest(subscriber)
        return Reader(subscriber, queue)

    async def get_topic_partitions(self, topic: str) -> list[str]:
        """The names of the topic's partitions; its own name if it has none."""
        self._check_open()
        name = _topic_name(topic)
        await self._parts.scope.open()
        self._check_open()
        try:
            async with asyncio.timeout(self._parts.timeout_s):
                count = await self._parts.lookup.partitions(str(name))
        except TimeoutError:
            raise Timeout("no answer: partitions", topic=str(name)) from None
        return [str(name.with_partition(index)) for index in range(count)] or [str(name)]

    async def close(self) -> None:
        """Close all producers and consumers as their `close` does, then the connections.

        Raises the first error of those; everything is closed all the same.
        """
        if self._failure is not None:
            return
        self._failure = AlreadyClosed("the client was closed")
        errors: list[PulsarException] = []
        try:
            async with asyncio.TaskGroup() as group:
                for core in list(self._parts.live):
                    group.create_task(_close(core, errors))
            await self._parts.pool.close()
            await self._parts.scope.close()
        except asyncio.CancelledError:  # whoever closes waits no longer
            self.shutdown()
            raise
        if errors:
            raise errors[0]

    def shutdown(self) -> None:
        """End everything at once. What has no receipt is told Interrupted, and acknowledgements
        that were not answered may be lost."""
        self._shut_down(AlreadyClosed("the client was shut down"))
        self._parts.scope.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # For the faces

    @property
    def parts(self) -> Parts:
        return self._parts

    def publisher(self, options: ProducerOptions) -> Publisher:
        """The core of a producer, not opened yet."""
        self._check_open()
        return Publisher(str(_topic_name(options.topic)), options, self._parts)

    def subscriber(self, topic: str, subscription: Subscription, queue: MessageQueue) -> Subscriber:
        """The core of a consumer or reader, not opened yet."""
        self._check_open()
        return Subscriber(str(_topic_name(topic)), subscription, queue, self._parts)

    async def opened(self, core: Publisher | Subscriber) -> None:
        """Open a core; from then on it is closed with the client."""
        await self._parts.scope.open()
        self._check_open()  # it may have been closed meanwhile
        await core.open()

    # Mechanics

    def _set_up(self, options: ClientOptions, world: Environment) -> None:
        dialer = world.dialer()
        scope = Scope(on_failure=self._on_failure, at_end=dialer.close)
        pool = Pool(
            scope,
            dialer,
            open_timeout_s=options.connection_timeout_ms / 1000,
            keepalive_s=world.keepalive_s,
        )
        self._failure = None
        timeout_s = float(options.operation_timeout_seconds)
        self._parts = Parts(
            scope=scope,
            pool=pool,
            lookup=Lookup(options.service_url, pool, timeout_s=timeout_s),
            clock=world.clock,
            random=world.random,
            timeout_s=timeout_s,
            pending_bytes_max=world.pending_bytes_max,
            ids=itertools.count(1),
            live=set(),
        )

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _shut_down(self, error: PulsarException) -> None:
        self._failure = self._failure or error
        for core in list(self._parts.live):
            core.shut_down(error)

    def _on_failure(self, error: BaseException) -> None:
        self._shut_down(Interrupted(f"the client failed: {error!r}"))


async def _close(core: Core, errors: list[PulsarException]) -> None:
    try:
        await core.close()
    except PulsarException as error:
        errors.append(error)


def _topic_name(text: str) -> TopicName:
    try:
        return TopicName.parse(text)
    except InvalidName as error:
        raise InvalidTopicName(str(error)) from None

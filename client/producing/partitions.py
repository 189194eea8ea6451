"""The core of a producer on a partitioned topic: one publisher for each partition.

It has the methods of a Publisher that producers call. A router (routing.py) chooses the partition
of each message.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from magnetar.client.errors import AlreadyClosed, PulsarException
from magnetar.client.guard import guarded
from magnetar.client.options import ProducerAccessMode
from magnetar.client.producing.outgoing import outgoing_message
from magnetar.client.producing.publisher import Publisher
from magnetar.client.producing.routing import router_of
from magnetar.client.producing.statistics import ProducerStatistics, statistics_of
from magnetar.client.together import together
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from magnetar.client.environment import Parts
    from magnetar.client.options import ProducerOptions
    from magnetar.client.producing.batching import Done
    from magnetar.client.producing.publisher import FlushError, OwningProducer
    from magnetar.protos import pulsar_pb2 as pb
    from magnetar.protos.message import OutgoingMessage
    from magnetar.protos.names import TopicName

log = get_logger(__name__)


class PartitionedPublisher:
    """The core of one producer on a topic with partitions. `open` attaches its publishers.

    With `lazy_start_partitioned_producers` and the access mode Shared, `open` attaches only one.
    The publisher of another partition begins with the first message for the partition.
    """

    def __init__(
        self, topic: TopicName, partitions: int, options: ProducerOptions, parts: Parts
    ) -> None:
        self.topic = str(topic)
        self.producer: OwningProducer  # set once by the producer that wraps this object
        self.pending_bytes_max = parts.pending_bytes_max
        self.pending_messages_max = options.pending_messages_max(partitions)
        self._name = topic
        self._options = options
        self._parts = parts
        self._now = asyncio.get_running_loop().time
        self._clock = parts.clock
        self._router = router_of(options, self.topic, parts.random)
        self._lazy = (
            options.lazy_start_partitioned_producers
            and options.access_mode == ProducerAccessMode.Shared
        )
        self._publishers: list[Publisher | None] = [None] * partitions  # None: not begun
        self._growth: asyncio.Task[None] | None = None  # None: not opened
        self._failure: PulsarException | None = None  # None: the producer accepts messages
        self._over = asyncio.Event()

    async def open(self) -> None:
        """Attach for the first time. If that fails, close the producer and raise the reason."""
        name = f"growth of {self.topic}"
        self._growth = self._parts.scope.start(guarded(self, self._follow_growth), name)
        self._parts.live.add(self)
        try:
            if self._lazy:  # open one, so that the caller gets a refusal at once
                await self._opened([self._first_partition()])
            elif self._options.access_mode == ProducerAccessMode.Shared:
                await self._opened(range(len(self._publishers)))
            else:  # open them in order, so that two waiting producers do not block each other
                for index in range(len(self._publishers)):
                    await self._opened([index])
        except BaseException:
            self.shut_down(AlreadyClosed("the producer was not created", topic=self.topic))
            raise

    def submit(self, message: OutgoingMessage, message_bytes: int, done: Done) -> None:
        """Accept a message that the limits allow, and call `done` once with its outcome."""
        if self._failure is not None:
            self._refuse(message_bytes, done, self._failure)
            return
        count = len(self._publishers)
        try:
            index = self._router.partition(message, message_bytes, count, self._now())
        except PulsarException as error:
            self._refuse(message_bytes, done, error)
            return
        publisher = self._publishers[index]
        if publisher is None or (self._lazy and publisher.never_opened):
            former = publisher
            publisher = self._publishers[index] = self._publisher(index)
            if former is not None:  # its messages count, too
                publisher.counter = former.counter
            publisher.begin()
        publisher.submit(message, message_bytes, done)

    def seal(self) -> None:
        """Send the open batches of all partitions now."""
        for publisher in self._begun():
            publisher.seal()

    async def flush(self) -> None:
        """Return when every message submitted so far is stored. Raises the first error."""
        errors: list[tuple[Publisher, FlushError]] = []

        async def flush(publisher: Publisher) -> None:
            error = await publisher.flushed()
            if error is not None:
                errors.append((publisher, error))
                raise error.error

        raised = True
        try:
            await together(flush(publisher) for publisher in self._begun())
        except asyncio.CancelledError:
            raised = False
            raise
        finally:
            for publisher, error in errors:
                publisher.leave(error, raised=raised)

    async def schema_version_of(self, schema: pb.Schema) -> bytes:
        """Return the version of a schema on the topic. The partitions share their versions."""
        return await self._begun()[0].schema_version_of(schema)

    async def close(self) -> None:
        """Accept no more messages, wait for the pending receipts, and close all publishers.

        Raises Timeout if receipts or a broker's answer are missing after
        `operation_timeout_seconds`.
        """
        if self._failure is not None:
            await self._over.wait()  # another task is closing the producer
            return
        self._failure = AlreadyClosed("the producer was closed", topic=self.topic)
        try:
            await together(publisher.close() for publisher in self._begun())
        finally:
            self.shut_down(self._failure)

    def shut_down(self, error: PulsarException) -> None:
        """Close the producer at once. Messages without a receipt fail with Interrupted."""
        self._parts.live.discard(self)
        self._failure = self._failure or error
        if self._growth is not None:
            self._growth.cancel()
        for publisher in self._begun():
            publisher.shut_down(error)
        self._over.set()

    def statistics(self) -> ProducerStatistics:
        """Return what the publishers have counted, without rates."""
        return statistics_of([publisher.counter for publisher in self._begun()])

    @property
    def name(self) -> str:
        """The name given in `producer_name`, or the name that the first broker chose."""
        return next((publisher.name for publisher in self._begun()), "")

    @property
    def is_attached(self) -> bool:
        return all(publisher.is_attached for publisher in self._begun())

    @property
    def last_sequence_id(self) -> int:
        """The highest `last_sequence_id` of the begun publishers. -1: none has one."""
        return max((publisher.last_sequence_id for publisher in self._begun()), default=-1)

    # Called by the publishers

    def on_released(self, messages: int, message_bytes: int) -> None:
        self.producer.on_released(messages, message_bytes)

    def on_burst_end(self) -> None:
        self.producer.on_burst_end()

    # Mechanics

    def _begun(self) -> list[Publisher]:
        return [publisher for publisher in self._publishers if publisher is not None]

    def _publisher(self, index: int) -> Publisher:
        name = self._name.with_partition(index)
        publisher = Publisher(str(name), self._options, self._parts)
        publisher.producer = self
        return publisher

    def _first_partition(self) -> int:
        """Return the partition of a message without a key; 0 if the user's router decides."""
        if self._options.message_router is not None:
            return 0
        message, size = outgoing_message(self._clock, b"")
        return self._router.partition(message, size, len(self._publishers), self._now())

    async def _opened(self, indexes: Iterable[int]) -> None:
        publishers = {index: self._publisher(index) for index in indexes}
        for index, publisher in publishers.items():
            self._publishers[index] = publisher
        await together(publisher.open() for publisher in publishers.values())

    def _refuse(self, message_bytes: int, done: Done, error: PulsarException) -> None:
        self.producer.on_released(1, message_bytes)
        done(error, None)
        self.producer.on_burst_end()

    async def _follow_growth(self) -> None:
        """Find partitions that were added to the topic, and use them."""
        while True:
            await asyncio.sleep(self._parts.partitions_update_s)
            try:
                count = await self._parts.lookup.partitions(self.topic, creates=False)
                if count > len(self._publishers):
                    await self._grow(count)
            except PulsarException as error:  # the next look may succeed
                log.info("partitions not read", topic=self.topic, reason=str(error))

    async def _grow(self, count: int) -> None:
        new = [self._publisher(index) for index in range(len(self._publishers), count)]
        if self._lazy:
            self._publishers += [None] * len(new)
            return
        try:
            await together(publisher.open() for publisher in new)
        except BaseException:
            for publisher in new:
                publisher.shut_down(AlreadyClosed("not all partitions opened", topic=self.topic))
            raise
        self._publishers += new
        log.info("partitions added", topic=self.topic, partitions=count)


ProducerCore = Publisher | PartitionedPublisher
"""The core of a producer on a topic, without or with partitions."""

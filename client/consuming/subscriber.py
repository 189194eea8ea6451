"""The core of a consumer or reader: it handles deliveries, and sends acknowledgements and permits.

The core stays usable when another broker takes over the topic. The asyncio and the synchronous
classes (consumer.py, reader.py, sync.py) wrap the core and call its methods on the event loop only.
The core puts messages into a MessageQueue that belongs to the wrapper, because users of the
synchronous client take messages in their own threads.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, cast

from magnetar.client.cipher import PayloadOpener, context_of
from magnetar.client.consuming.acknowledger import Acknowledger
from magnetar.client.consuming.acks import AckTracker
from magnetar.client.consuming.chunks import ChunkBuffer, GivenUp, Late, Returned
from magnetar.client.consuming.dead_letters import DeadLetters
from magnetar.client.consuming.delivery import (
    corrupt_message,
    incomplete_message,
    messages_of,
    permits_of,
    validation_error,
)
from magnetar.client.consuming.nack_order import NackOrder, entries_of
from magnetar.client.consuming.permits import Permits
from magnetar.client.consuming.redelivery import REDELIVERY_IDS_MAX, Redeliveries
from magnetar.client.consuming.start import Start
from magnetar.client.consuming.statistics import ConsumerStatistics
from magnetar.client.consuming.subscription import Subscription, subscribe_command
from magnetar.client.errors import (
    AlreadyClosed,
    ConnectError,
    CryptoError,
    OperationNotSupported,
    PulsarException,
    ServiceUnitNotReady,
    Timeout,
    TopicNotFound,
    is_retriable,
    without_frames,
)
from magnetar.client.guard import guarded, guarding
from magnetar.client.ids import bits_of, id_data, key_of, message_id_of, partition_of
from magnetar.client.message import ChunkedMessageId, Delivery, Message, MessageId
from magnetar.client.message_queue import MessageQueue, of_generation
from magnetar.client.options import ConsumerCryptoFailureAction
from magnetar.client.session.backoff import RETRY_DELAY_S_FIRST
from magnetar.client.session.pool import Purpose
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.compression import UNCOMPRESSED_BYTES_MAX, UNCOMPRESSED_FACTOR
from magnetar.protos.entry import open_plain
from magnetar.protos.errors import EntryError
from magnetar.protos.message import (
    ReceivedEntry,
    decode_messages,
    open_messages,
    plain_message,
    read_entry,
    undecoded_message,
)
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from google.protobuf.message import Message as Body

    from magnetar.client.consuming.acknowledger import Part
    from magnetar.client.consuming.letter_producer import LetterProducer
    from magnetar.client.consuming.steps import Run
    from magnetar.client.encryption import EncryptionContext
    from magnetar.client.environment import Parts
    from magnetar.client.ids import Key
    from magnetar.client.session.connection import Connection
    from magnetar.protos.batch import Batch, ReceivedMessage
    from magnetar.protos.entry import Chunk

log = get_logger(__name__)

Answer = TypeVar("Answer", bound="Body")

CHUNKED_UNACKED_MAX: Final = 10_000
"""The number of chunked messages whose chunks the client remembers until the acknowledgement.
Beyond this limit, the client forgets the chunks of the oldest message. The acknowledgement of that
message then covers its last chunk only. The broker redelivers the other chunks after a
reconnection, and the client acknowledges them when they expire."""


class Subscriber:
    """The core of one consumer or reader. `open` attaches it to a broker."""

    def __init__(
        self,
        topic: str,
        subscription: Subscription,
        queue: MessageQueue,
        parts: Parts,
        dead_letter_producer: LetterProducer | None = None,  # None: no dead-letter policy
    ) -> None:
        self.topic = topic
        self._partition = partition_of(topic)
        self.subscription = subscription
        self._queue = queue
        self._parts = parts
        self._loop = asyncio.get_running_loop()
        self._attachment = parts.attachment(self, Purpose.CONSUME)
        self._task: asyncio.Task[None] | None = None  # None: not opened
        self._connection: Connection | None = None  # None: not attached
        self._consumer_id = 0
        self._answered = asyncio.Event()  # not set: a request to subscribe has no answer yet
        self._answered.set()
        self._opener = PayloadOpener(subscription.key_reader)
        self._permits = Permits(subscription.queue_messages_max)
        tracker = AckTracker(batch_indexes=subscription.batch_indexes)
        self._acks = Acknowledger(self, tracker, self._grant)
        self._acknowledged = tracker.acknowledged
        backoff = subscription.nack_backoff
        nack_delay_s = 0.0 if backoff is not None else subscription.nack_delay_s
        self._nacks = Redeliveries(nack_delay_s, backoff=backoff)
        self._order = NackOrder() if subscription.orders_negative_acks else None
        self._unacked: Redeliveries | None = None  # None: no time limit
        if subscription.unacked_timeout_s is not None:
            self._unacked = Redeliveries(
                subscription.unacked_timeout_s,
                backoff=subscription.unacked_backoff,
                period_s=subscription.unacked_tick_s,
            )
        self._chunks = ChunkBuffer(
            messages_max=subscription.chunked_max,
            expire_s=subscription.chunked_expire_s,
            acknowledge_oldest=subscription.acknowledge_oldest_chunked,
        )
        # Key of an unacknowledged message's last chunk -> keys of its other chunks.
        self._chunked: dict[Key, tuple[Key, ...]] = {}
        self._dead_letters: DeadLetters | None = None  # None: no dead-letter policy
        if dead_letter_producer is not None and subscription.dead_letters is not None:
            times = subscription.dead_letters.max_redeliver_count
            self._dead_letters = DeadLetters(times, dead_letter_producer, self, parts)
        self._dead_letter_producer = dead_letter_producer
        # The limit of an uncompressed entry. Each connection sets it from the broker's limit.
        self._uncompressed_bytes_max = UNCOMPRESSED_BYTES_MAX
        self._paused = False
        self.stats = ConsumerStatistics()
        self._start: Start | None = None  # None: the broker knows where to begin
        if subscription.start is not None:
            self._start = Start(subscription.start, subscription.inclusive)
        # The generation of the queue. `on_taken` and `on_returned` ignore messages of an older one.
        self._generation = queue.generation
        self._epoch = 0  # counts requests to redeliver everything; older deliveries are stale
        self._seek_turn = asyncio.Lock()  # held by the seek that is in progress
        self._outcome_unknown = False  # of the seek that is in progress
        self._seeking = False  # the seek was sent; the broker has not closed the consumer yet
        self._active: bool | None = None  # None: the broker has not reported this yet
        # The highest key of the entries that the client dropped since the queue was cleared. The
        # user gets no message of a dropped entry.
        self._dropped: Key = (-1, -1)
        self._waiting = False  # the user waits for a message
        self._burst: list[Message] = []  # messages of the frame that is being read
        # The permits, messages and bytes that `_permits` has not counted yet.
        self._uncounted = 0, 0, 0
        self._failure: PulsarException | None = None  # None: neither closed nor failed
        self.is_closing = False  # `close` was called
        self._over = asyncio.Event()
        # `_say_goodbye` waits for it. Set: the request to close was answered, or the consumer is
        # detached.
        self._gone = asyncio.Event()
        # The time when the timer is due, and its handle. uvloop returns a handle without a time for
        # a timer that is due within half a millisecond.
        self._timer: tuple[float, asyncio.Handle] | None = None

    async def open(self) -> None:
        """Attach for the first time. If this fails, close the consumer and raise the reason."""
        self.begin()
        try:
            await self._attachment.wait_first()
        except BaseException:
            self.shut_down(AlreadyClosed("the consumer was not created", topic=self.topic))
            raise

    def begin(self) -> None:
        """Start a task that attaches. If the attachment fails, the queue fails with the reason."""
        name = f"consumer of {self.topic}, {self.subscription.name}"
        self._task = self._parts.scope.start(guarded(self, self._attachment.run), name)
        self._parts.live.add(self)

    @property
    def cores(self) -> Sequence[Subscriber]:
        """The consumers of single topics: this consumer is the only one."""
        return (self,)

    @property
    def is_attached(self) -> bool:
        return self._connection is not None

    @property
    def is_active(self) -> bool:
        """Return whether the broker delivers to this consumer."""
        if self._connection is None:
            return False
        return self._active is True if self.subscription.is_ordered else True

    @property
    def is_over(self) -> bool:
        """Return whether the consumer is closed and detached: no call has an effect any more."""
        return self._failure is not None and self._connection is None

    def check_open(self) -> None:
        """Raise AlreadyClosed if the consumer is closed, or the error that ended it."""
        if self._failure is not None:
            raise without_frames(self._failure)

    # Messages taken and acknowledged by the user

    def on_taken(self, runs: Sequence[Run]) -> None:
        """Count messages that the user took out of the queue."""
        messages = size = 0
        last: Delivery | None = None  # the delivery whose last message was taken
        now, unacked = self._loop.time(), self._unacked
        for delivery, first, end in runs:
            if delivery.generation != self._generation:
                continue
            messages += end - first
            size += delivery.bytes_of(first, end)
            if end == delivery.batch_size:
                last = delivery
            if unacked is not None and delivery.key is not None:
                unacked.add(delivery.key, now, delivery.redelivery_count)
        if not messages:
            return
        self.stats.messages_received += messages
        self.stats.bytes_received += size
        if self._permits.on_taken(messages, size):
            self._grant()
        if unacked is not None:
            self._arm()
        if last is not None and not self.subscription.is_durable:
            self._forget_through(last)

    def on_returned(self, messages: Sequence[Message]) -> None:
        """Count messages that the user took and put back into the queue."""
        for message in of_generation(self._generation, messages):
            self._permits.on_returned(message.payload_bytes)
            if self._unacked is not None:
                self._unacked.discard([_key_of(message.message_id())])

    def check_id(self, message_id: MessageId) -> None:
        """Accept every id that the user wants to acknowledge: all ids belong to the one topic."""

    @property
    def cluster(self) -> int:
        """How often the client has moved to another cluster. A move makes earlier message ids
        invalid."""
        return self._parts.lookup.cluster

    def limit_queue(self, messages_max: int, bytes_max: int) -> None:
        """Set this consumer's part of a queue that consumers of several topics share."""
        self._permits.resize(messages_max, bytes_max)

    def on_waiting(self, _: object = None) -> None:
        """Note that the user waits for a message. This matters only with a queue size of 0."""
        self._waiting = True
        self._grant()

    def acknowledge(self, message_id: MessageId) -> None:
        """Acknowledge a message. AckTracker decides when the client sends the acknowledgement."""
        index, size = message_id.batch_index(), message_id.batch_size()
        self._acknowledge([(_key_of(message_id), index, size, 1)])

    def on_acknowledged(self, runs: Sequence[Run]) -> None:
        """Acknowledge delivered messages, except those that another cluster delivered."""
        cluster = self.cluster
        self._acknowledge(
            [
                (delivery.key, first, delivery.batch_size, end - first)
                for delivery, first, end in runs
                if delivery.cluster == cluster and delivery.key is not None
            ]
        )

    def _acknowledge(self, parts: Sequence[Part]) -> None:
        for key, _, _, count in parts:
            self.stats.acknowledged += count
            if self._chunked:
                self._acks.acknowledge_entries(self._chunked.pop(key, ()))
        done = self._acks.acknowledge(parts)
        self._nacks.discard(done)
        if self._unacked is not None:
            self._unacked.discard(done)
        if self._dead_letters is not None:
            self._dead_letters.on_acknowledged(done)

    def acknowledge_cumulative(self, message_id: MessageId) -> None:
        """Acknowledge a message and all earlier messages. AckTracker decides when the client sends
        the acknowledgement."""
        key = _key_of(message_id)
        index, size = message_id.batch_index(), message_id.batch_size()
        self.stats.acknowledged += 1
        self._acks.acknowledge_cumulative(key, index, size)
        self._forget_chunks(key)
        done = key if index in (-1, size - 1) else (key[0], key[1] - 1)
        self._nacks.discard_through(done)
        if self._unacked is not None:
            self._unacked.discard_through(done)

    def negative_acknowledge(self, message: Message | MessageId) -> None:
        """Request the message and the rest of its batch again after the delay.

        With a backoff, the delay grows with the number of redeliveries. A message id does not have
        this number: the client then uses the first delay.
        """
        count = 0
        given = message if isinstance(message, Message) else None
        if isinstance(message, Message):
            count, message = message.redelivery_count(), message.message_id()
        key = _key_of(message)
        if self._order is not None and given is not None:
            self._withhold(given)
        self.stats.negatively_acknowledged += 1
        self._nacks.add(key, self._loop.time(), count)
        if self._unacked is not None:
            self._unacked.discard([key])
        self._arm()

    def redeliver_unacknowledged(self, _: object = None) -> None:
        """Ask the broker to redeliver all unacknowledged messages of this consumer."""
        self._acks.send()
        self._forget_redeliveries()
        if self._connection is None:
            return  # the next broker redelivers everything anyway
        self._epoch += 1
        self._clear_queue()
        self._chunks.clear()
        self._permits.on_dropped()
        self._connection.send_control(
            pb.CommandRedeliverUnacknowledgedMessages(
                consumer_id=self._consumer_id, consumer_epoch=self._epoch
            )
        )
        self._grant()

    async def statistics(self) -> ConsumerStatistics:
        """Return a copy of the counts."""
        return replace(self.stats)

    def pause(self, _: object = None) -> None:
        """Request no more messages from the broker. Messages requested before still arrive."""
        self._paused = True

    def resume(self, _: object = None) -> None:
        """Request messages again."""
        self._paused = False
        self._grant()

    # Requests

    async def seek(self, target: MessageId | int) -> None:
        """Move the subscription to a message id, or to a publish time in milliseconds since 1970.

        The broker closes the consumer before or after it answers. The consumer attaches again and
        begins at the new place. It drops messages from the old place. After a failed seek, a reader
        returns to its place. For a durable subscription, the broker then decides the place.
        """
        command = pb.CommandSeek()
        if isinstance(target, MessageId):
            if target.first_chunk is not None and self.subscription.inclusive:
                target = target.first_chunk
            command.message_id.CopyFrom(id_data(_key_of(target)))
            start = Start(target, self.subscription.inclusive)
        else:
            command.message_publish_time = target
            start = None
        async with self._seek_turn:
            self._outcome_unknown = True
            self._acks.on_seek()
            taken, place = self._queue.last_taken, self._start
            if taken is not None and not self.subscription.is_durable:
                place = self._start_after(taken)
            told: set[int] = set()  # consumer ids with which the seek was sent
            moved = False

            def begin() -> None:
                told.add(self._consumer_id)
                self._start = start
                self._seeking = True

            try:
                await self._request(command, pb.CommandSuccess, about="seek", begin=begin)
                moved = True
            finally:
                self._outcome_unknown = False
                self._acks.on_seek_end(moved=moved)
                if told and not moved:
                    self._stay(place, was_detached=not self._seeking or len(told) > 1)
            if self._seeking:  # not closed by the broker yet: drop messages of the old place
                self.on_closed_by_broker(None)
            if start is None and not self.subscription.is_durable:
                # Keep the turn: after a later seek, this call would overwrite the newer place.
                await self.pin_start()

    def _stay(self, place: Start | None, *, was_detached: bool) -> None:
        """Return to the old place after a seek that failed or whose outcome is unknown.

        `was_detached`: the consumer was detached after the seek began.
        """
        self._seeking = False
        if was_detached and self.subscription.is_durable:
            self._start = None  # the broker knows where the subscription is
        elif was_detached and self._connection is not None:  # attached at the target of the seek
            _let_go(self._connection, self._consumer_id)
            self._clear_queue()
            self._start = place  # `_clear_queue` may have set a place after the target
            self.on_disconnected(
                ConnectError("the seek failed; the reader returns to its place", topic=self.topic)
            )
        else:
            self._start = place

    async def pin_start(self) -> None:
        """Ask the broker for the place of a reader that began at a time or at the topic's end.

        Otherwise the next broker would choose another place for the same time or end.
        """
        start = self._start
        _, done = await self.last_message_id()
        # The answer is too late if the user took a message meanwhile, or if `_start` was replaced
        # by a detachment, which resets `last_taken`, or by a move to another cluster.
        if self._queue.last_taken is None and self._start is start:
            self._start = Start(MessageId(-1, *_key_of(done)), inclusive=False)

    async def last_message_id(self) -> tuple[MessageId, MessageId]:
        """Return the id of the topic's last message, and the mark-delete position."""
        answer = await self._request(
            pb.CommandGetLastMessageId(),
            pb.CommandGetLastMessageIdResponse,
            about="last message id",
        )
        return (
            message_id_of(answer.last_message_id, self.topic),
            message_id_of(answer.consumer_mark_delete_position),
        )

    async def last_message_ids(self) -> list[MessageId]:
        """Return the id of the topic's last message, as a list of one id."""
        last, _ = await self.last_message_id()
        return [last]

    async def has_message_available(self) -> bool:
        """Return whether there is a message after the last one that the user took.

        A message in an entry that the client dropped does not count.
        """
        if len(self._queue):
            return True
        taken = self._queue.last_taken
        place = self._start if taken is None else Start(taken, inclusive=False)
        last, done = await self.last_message_id()
        if len(self._queue):
            return True  # the messages came before the answer
        if last.entry_id() < 0:
            return False  # the topic is empty
        if _key_of(last) <= self._dropped:
            return False
        if place is None or place.message_id == MessageId.latest:
            return _key_of(last) > _key_of(done)
        return place.is_before(last)

    def has_passed(self, last: MessageId) -> bool:
        """Return whether the user gets no more messages up to the message `last`.

        True if the user has taken `last` or a later message, or begins after `last`. Also true if
        the client has dropped the entry of `last` or a later entry and the queue is empty, and for
        the id of an empty topic.
        """
        if last.entry_id() < 0:
            return True
        if _key_of(last) <= self._dropped and not len(self._queue):
            return True
        taken = self._queue.last_taken
        place = self._start if taken is None else Start(taken, inclusive=False)
        return place is not None and not place.is_sentinel and not place.is_before(last)

    async def unsubscribe(self) -> None:
        """Delete the subscription and close the consumer."""
        try:
            async with asyncio.timeout(self._parts.timeout_s):
                await self._delete_subscription()
        except TimeoutError:
            raise Timeout("the broker did not answer: unsubscribe", topic=self.topic) from None
        self._acks.on_unsubscribed()
        error = AlreadyClosed("the consumer was unsubscribed", topic=self.topic)
        self._detach(error)
        self.shut_down(error)

    async def _delete_subscription(self) -> None:
        """Delete the subscription. If the consumer attached again before the answer, delete it
        again: the broker may have created it anew for the attachment."""
        command = pb.CommandUnsubscribe()
        while True:
            await self._request(command, pb.CommandSuccess, about="unsubscribe", again=False)
            while not self._answered.is_set():  # the consumer is attaching again
                await self._answered.wait()
                self.check_open()
            if self._connection is None or self._consumer_id == command.consumer_id:
                return

    async def drain(self) -> None:
        """Ask the broker to send no more messages, and wait until the user has acknowledged all
        delivered messages. Return early if there is no connection, or if it breaks.

        Raises Timeout if this takes longer than the operation timeout. Raises OperationNotSupported
        if the broker is not one of Magnetar. In both cases the consumer stays open.
        """
        connection = self._connection
        if self._failure is not None or connection is None:
            return
        if not connection.drains_consumers:
            raise OperationNotSupported(
                f"close(drain=True) needs a broker of Magnetar, not {connection.server_version!r}",
                topic=self.topic,
            )
        command = pb.CommandDrainConsumer(consumer_id=self._consumer_id)
        try:
            async with asyncio.timeout(self._parts.timeout_s):
                with suppress(PulsarException):  # closed or disconnected meanwhile
                    await self._drained(connection, command)
        except TimeoutError:
            reason = "the user has not acknowledged all delivered messages"
            raise Timeout(reason, topic=self.topic, subscription=self.subscription.name) from None

    async def _drained(self, connection: Connection, command: pb.CommandDrainConsumer) -> None:
        """Repeat the request until the user has acknowledged all messages. The broker answers
        ServiceNotReady when the time limit of one request has passed."""
        while self._connection is connection:
            try:
                await connection.request(command, pb.CommandSuccess)
            except ServiceUnitNotReady:
                await asyncio.sleep(RETRY_DELAY_S_FIRST)
            else:
                return

    async def close(self) -> None:
        """Wait until all earlier acknowledgements are durable, and close the consumer.

        Raises Timeout if this takes longer than the operation timeout: the broker does not confirm
        the acknowledgements, or does not answer the request to close, or the producer of dead
        letters does not close. Raises the broker's error if the broker refused acknowledgements;
        the broker may redeliver their messages. The consumer is closed in every case.
        """
        if self._failure is not None:
            await self._over.wait()  # another task is closing the consumer
            return
        self._failure = AlreadyClosed("the consumer was closed", topic=self.topic)
        self.is_closing = True
        self._queue.fail(self._failure)
        if self._dead_letters is not None:
            self._dead_letters.shut_down()
        try:
            async with asyncio.timeout(self._parts.timeout_s):
                refusal = await self._settle()
                await self._say_goodbye()
                if self._dead_letter_producer is not None:
                    await self._dead_letter_producer.close()
        except TimeoutError:
            reason = "the broker did not answer the request to close the consumer"
            if self.subscription.is_durable and not self._acks.is_settled:
                reason = "the broker did not confirm all acknowledgements"
            elif self._connection is None:
                reason = "the producer of dead letters did not close"
            raise Timeout(reason, topic=self.topic, subscription=self.subscription.name) from None
        finally:
            self.shut_down(self._failure)
        if refusal is not None:
            raise refusal

    async def _settle(self) -> PulsarException | None:
        """Wait for the acknowledgements. Returns the broker's refusal; None: all are durable."""
        if self.subscription.is_durable:
            try:
                await self._acks.settle()
            except PulsarException as refusal:
                return refusal
        return None

    def shut_down(self, error: PulsarException) -> None:
        """Close at once. Acknowledgements that the broker has not confirmed may be lost."""
        self._parts.live.discard(self)
        self._failure = self._failure or error
        self._attachment.close(error)
        if self._task is not None:
            self._task.cancel()
        self._queue.fail(self._failure)
        if self._connection is not None:  # the broker redelivers to other consumers
            _let_go(self._connection, self._consumer_id)
        self._detach(error)
        self._acks.close(error)
        if self._timer is not None:
            self._timer[1].cancel()
        if self._dead_letters is not None:
            self._dead_letters.shut_down()
        if self._dead_letter_producer is not None:
            self._dead_letter_producer.shut_down(error)
        self._over.set()

    # The attachment

    async def attach(self, connection: Connection) -> None:
        if self._order is not None and not connection.orders_negative_acks:
            server = connection.server_version
            raise OperationNotSupported(
                f"ordered_negative_acks needs a broker of Magnetar, not {server!r}",
                topic=self.topic,
            )
        consumer_id, start = next(self._parts.ids), self._start
        self._active = None
        self._uncompressed_bytes_max = connection.uncompressed_bytes_max
        connection.add_consumer(consumer_id, self)
        self._answered.clear()
        try:
            await connection.request(
                self._subscribe_command(connection, consumer_id), pb.CommandSuccess
            )
            connection.check_holds(consumer_id)
        except asyncio.CancelledError:  # the broker may still create the consumer
            _let_go(connection, consumer_id)
            raise
        except PulsarException as error:
            connection.remove_consumer(consumer_id)
            if isinstance(error, TopicNotFound) and self.subscription.decoder is not None:
                self.subscription.decoder.forget(self.topic)
            raise
        finally:
            self._answered.set()
        if self._start is not start and not self.subscription.is_durable:
            _let_go(connection, consumer_id)
            reason = "the seek failed while the reader attached; the reader returns to its place"
            raise ConnectError(reason, topic=self.topic)
        self._connection, self._consumer_id = connection, consumer_id
        if self.subscription.decoder is not None:
            self.subscription.decoder.doubt(self.topic)
        self._permits.on_attached()
        # Send the acknowledgements before the permits: the broker then delivers no acknowledged
        # message. In the other order, the broker could confirm an acknowledgement and deliver the
        # message afterwards. By then the client has forgotten the acknowledgement.
        self._acks.on_attached(connection, consumer_id)
        self._grant()

    def is_final(self, _: PulsarException) -> bool:
        return False  # every error may be temporary

    def on_failed(self, error: PulsarException) -> None:
        self._failure = self._failure or error
        self._queue.fail(error)
        self._over.set()

    # The connection

    def on_message(self, command: pb.CommandMessage, entry: memoryview) -> None:
        key = key_of(command.message_id)
        try:
            plain = open_plain(entry)
        except EntryError as error:
            self._refuse_corrupt([key], error, permits_of(entry, command.ack_set))
            return
        if plain is None:
            self._on_entry(key, command, entry)
            return
        sent, wanted = self._wanted(key, 1, command.ack_set, is_batch=False)
        delivery = Delivery(
            self.topic,
            self._partition,
            plain.producer_name,
            plain.publish_time_ms,
            b"",
            command.redelivery_count,
            plain.index,
            self._generation,
            decoder=self.subscription.decoder,
            cluster=self.cluster,
            key=key,
            payload_bytes=len(plain.payload),
        )
        shown: list[Message] = []
        if wanted and not self._is_stale(command):
            shown.append(Message(plain_message(plain), None, delivery))
        self._show(key, command, sent, shown)

    def _on_entry(self, key: Key, command: pb.CommandMessage, entry: memoryview) -> None:
        """Handle an entry of any kind."""
        # The entry is a batch, a single message, or a chunk.
        batch: Batch | None = None
        single: ReceivedMessage | None = None
        try:
            received = read_entry(entry, encrypted_too=True)
            encryption = None
            if received.is_encrypted:
                received, encryption = self._decrypted(received)
            if encryption is not None and encryption.is_decryption_failed():
                single = undecoded_message(received)
            elif received.is_batch:
                batch = open_messages(received, bytes_max=self._uncompressed_bytes_max)
            elif received.chunk is None:
                (single,) = decode_messages(received, bytes_max=self._uncompressed_bytes_max)
        except CryptoError as error:
            self._refuse_undecryptable(key, error, permits_of(entry, command.ack_set))
            return
        except EntryError as error:
            self._refuse_corrupt([key], error, permits_of(entry, command.ack_set))
            return
        size, is_batch = received.num_messages, received.is_batch
        sent, wanted = self._wanted(key, size, command.ack_set, is_batch=is_batch)
        if self._is_stale(command):
            wanted = 0
        delivery = self._delivery(key, received, command.redelivery_count, encryption, batch)
        if batch is not None:
            shown = messages_of(delivery, wanted)
        elif not wanted:
            shown = []
            if received.chunk is not None and self._is_awaited(key, received.chunk):
                self._assembled(key, received, delivery)
        elif single is not None:
            delivery.payload_bytes = len(single.payload)
            shown = [Message(single, None, delivery)]
        else:
            shown = self._assembled(key, received, delivery)
        self._show(key, command, sent, shown)

    def _show(self, key: Key, command: pb.CommandMessage, sent: int, shown: list[Message]) -> None:
        """Give messages of an entry to the user at the end of the frame. `sent`: the bits of the
        messages that the broker delivered."""
        if self._dead_letters is not None and not self._dead_letters.on_delivered(
            key, command.redelivery_count, shown
        ):
            shown = []
        count, size = len(shown), 0
        if count:
            delivery = shown[0].delivery
            if count == (delivery.batch_size or 1):
                size = delivery.bytes_of(0, count)
            else:
                size = sum([message.payload_bytes for message in shown])
            self._burst += shown
        used, messages, message_bytes = self._uncounted
        self._uncounted = used + sent.bit_count(), messages + count, message_bytes + size
        if self._order and self._connection is not None:  # some keys are guarded
            late = [one for one in shown if self._order.withholds(one)]
            if late:
                self._burst = [one for one in self._burst if not self._order.withholds(one)]
                self._give_back((), late)

    def _decrypted(self, received: ReceivedEntry) -> tuple[ReceivedEntry, EncryptionContext]:
        """Return an encrypted entry with its payload decrypted.

        If the decryption fails, raise CryptoError. With the failure action CONSUME, return the
        entry unchanged instead.
        """
        try:
            payload = self._opener.open(received)
        except CryptoError as error:
            if self.subscription.crypto_failure is not ConsumerCryptoFailureAction.CONSUME:
                raise
            log.warning("encrypted message delivered", topic=self.topic, error=str(error))
            self.stats.undecryptable += 1
            return received, context_of(received, failed=True)
        return replace(received, body=payload, payload_at=0), context_of(received, failed=False)

    def _refuse_undecryptable(self, key: Key, error: CryptoError, permits: int) -> None:
        """Handle an entry that cannot be decrypted. With the failure action DISCARD, acknowledge
        the entry. Otherwise leave it unacknowledged, and give the user the error."""
        self.stats.undecryptable += 1
        self._permits.on_delivered(permits, 0, 0)
        discards = self.subscription.crypto_failure is ConsumerCryptoFailureAction.DISCARD
        log.error(
            "undecryptable entry",
            topic=self.topic,
            ledger=key[0],
            entry=key[1],
            error=str(error),
            then="acknowledged" if discards else "left unacknowledged",
        )
        if discards:
            self._dropped = max(self._dropped, key)
            self._acks.acknowledge_entries([key])
        else:
            if self._unacked is not None:
                self._unacked.add(key, self._loop.time())
                self._arm()
            reason = f"message ({key[0]},{key[1]}) cannot be decrypted: {error.reason}"
            self._queue.put_error(CryptoError(reason, topic=self.topic))

    def _delivery(
        self,
        key: Key,
        received: ReceivedEntry,
        redelivery_count: int,
        encryption: EncryptionContext | None,
        batch: Batch | None,
    ) -> Delivery:
        return Delivery(
            self.topic,
            self._partition,
            received.producer_name,
            received.publish_time_ms,
            received.schema_version or b"",
            redelivery_count,
            None if received.broker is None else received.broker.index,
            self._generation,
            encryption,
            decoder=self.subscription.decoder,
            cluster=self.cluster,
            key=key,
            batch=batch,
        )

    def on_active_changed(self, *, active: bool) -> None:
        self._active = active

    def on_frame_end(self) -> None:
        self._count_delivered()
        if self._burst:
            burst, self._burst = self._burst, []
            self._waiting = False
            self._queue.put(burst)
        self._grant()

    def on_closed_by_broker(self, assigned_url: str | None) -> None:
        error = ConnectError("the broker closed the consumer", topic=self.topic)
        self._detach(error)
        self._attachment.lost(error, assigned_url)

    def on_moved(self) -> None:
        """Forget the acknowledgements that are not durable, because the client moves to another
        cluster. There, message ids name other messages, and schema versions name other schemas. A
        reader begins at the earliest message."""
        self._acks.on_unsubscribed()
        self._chunked.clear()
        if self.subscription.decoder is not None:
            self.subscription.decoder.forget()
        if not self.subscription.is_durable:
            self._clear_queue()
            self._start = Start(MessageId.earliest, inclusive=True)

    def on_disconnected(self, error: PulsarException) -> None:
        self._detach(error)
        self._attachment.lost(error)

    # Deliveries

    def _is_stale(self, command: pb.CommandMessage) -> bool:
        """Return whether the delivery is from before the last request to redeliver everything.

        Magnetar's brokers put the epoch of the request into every later delivery. Apache Pulsar's
        brokers put an epoch into deliveries of Exclusive and Failover subscriptions only.
        """
        if not self._epoch:
            return False
        if command.HasField("consumer_epoch"):
            return command.consumer_epoch < self._epoch
        return self._connection is not None and self._connection.drains_consumers

    def _wanted(
        self, key: Key, size: int, ack_set: Sequence[int], *, is_batch: bool
    ) -> tuple[int, int]:
        """Return two bit sets: the messages that the broker delivers, and the messages that the
        user gets."""
        sent = (1 << size) - 1
        if ack_set:
            sent &= bits_of(ack_set)
        wanted = sent & ~self._acknowledged(key, size)
        start = self._start
        if start is None or self._outcome_unknown:  # no place, or an unknown place
            return sent, wanted
        if not self.subscription.is_durable:
            return sent, wanted & ~start.skipped(key, size)
        if key != start.key:
            self._start = None  # past the start, or another consumer moved the subscription
            return sent, wanted
        skipped = start.skipped(key, size) & wanted
        for index in range(size):
            # Acknowledge a message before the start, so that the broker does not redeliver it.
            if skipped >> index & 1:
                self._acks.acknowledge([(key, index if is_batch else -1, size, 1)])
        return sent, wanted & ~skipped

    def _refuse_corrupt(self, keys: Sequence[Key], error: EntryError, permits: int) -> None:
        """Report a corrupt message to the broker. The broker acknowledges its entries `keys`,
        because a redelivery cannot help.

        If the user wants corrupt entries to fail, the entries stay unacknowledged, and the user
        gets the error.
        """
        key = keys[-1]
        log.error("corrupt entry", topic=self.topic, ledger=key[0], entry=key[1], error=str(error))
        self.stats.corrupt += 1
        self._permits.on_delivered(permits, 0, 0)
        if self.subscription.fails_on_corrupt:
            self._queue.put_error(corrupt_message(key, error, self.topic))
            return
        self._dropped = max(self._dropped, key)
        if self._connection is not None:
            for first in range(0, len(keys), REDELIVERY_IDS_MAX):
                some = keys[first : first + REDELIVERY_IDS_MAX]
                self._connection.send_control(
                    pb.CommandAck(
                        consumer_id=self._consumer_id,
                        ack_type=pb.CommandAck.Individual,
                        message_id=[id_data(key) for key in some],
                        validation_error=validation_error(error),
                    )
                )

    # Chunks

    def _assembled(self, key: Key, received: ReceivedEntry, delivery: Delivery) -> list[Message]:
        """Add a chunk. Returns the message that this chunk completes; []: it completes none."""
        assert received.chunk is not None
        messages: list[Message] = []
        now = self._loop.time()
        for outcome in self._chunks.on_chunk(key, received.chunk, received.payload, now):
            if isinstance(outcome, Returned):
                self._nacks.add(outcome.key, self._loop.time())
                continue
            if isinstance(outcome, GivenUp):
                self._on_given_up(outcome)
                continue
            if isinstance(outcome, Late):
                if not self.subscription.fails_on_corrupt:  # see _on_given_up
                    self._dropped = max(self._dropped, outcome.key)
                    self._acks.acknowledge_entries((outcome.key,))
                continue
            limit = max(self._uncompressed_bytes_max, UNCOMPRESSED_FACTOR * len(outcome.payload))
            try:
                whole = decode_messages(received, outcome.payload, bytes_max=limit)
            except EntryError as error:
                self._refuse_corrupt(outcome.keys, error, 0)
                continue
            last = self._message_id(key)
            message_id = ChunkedMessageId(self._message_id(outcome.first), last)
            delivery.payload_bytes = len(whole[0].payload)
            self._chunked.pop(key, None)
            self._chunked[key] = outcome.keys[:-1]
            if len(self._chunked) > CHUNKED_UNACKED_MAX:
                del self._chunked[next(iter(self._chunked))]
            messages.append(Message(whole[0], message_id, delivery))
        self._arm()
        return messages

    def _is_awaited(self, key: Key, chunk: Chunk) -> bool:
        """Return whether a chunk before the start may belong to a message that ends after the
        start."""
        start = self._start
        return (
            start is not None
            and start.admits_chunk(key)
            and (chunk.index == 0 or chunk.uuid in self._chunks)
        )

    def _forget_chunks(self, key: Key) -> None:
        """Forget the chunks of the messages up to `key`, which are acknowledged."""
        for known in [known for known in self._chunked if known <= key]:
            del self._chunked[known]

    def _message_id(self, key: Key) -> MessageId:
        return MessageId(self._partition, *key, -1, 0, self.topic)

    def _on_given_up(self, lost: GivenUp) -> None:
        """Acknowledge the chunks of a message that will not be complete, or request them later.

        If the user wants corrupt entries to fail, the client does not acknowledge the chunks. The
        user then gets an error.
        """
        fails = lost.acknowledge and self.subscription.fails_on_corrupt
        done = "left unacknowledged" if fails else "acknowledged"
        log.warning(
            "a chunked message was given up",
            topic=self.topic,
            uuid=lost.uuid,
            chunks=len(lost.keys),
            reason=lost.reason,
            then=done if lost.acknowledge else "requested again later",
        )
        self.stats.chunked_given_up += 1
        if fails:
            self._queue.put_error(incomplete_message(lost.keys[-1], lost.reason, self.topic))
            return
        if lost.acknowledge:
            self._dropped = max(self._dropped, *lost.keys)
            self._acks.acknowledge_entries(lost.keys)
            return
        now = self._loop.time()
        for key in lost.keys:
            self._nacks.add(key, now)

    # Dead letters

    def on_dead_lettered(self, messages: Sequence[Message]) -> None:
        self.stats.dead_lettered += len(messages)
        for message in messages:
            if message.is_of(self.cluster):
                self.acknowledge(message.message_id())

    def on_dead_letter_failed(self, key: Key) -> None:
        self._nacks.add(key, self._loop.time())
        self._arm()

    def unacknowledged(self, messages: Sequence[Message]) -> list[Message]:
        message_id = messages[0].message_id()
        size = max(1, message_id.batch_size())
        done = self._acknowledged(_key_of(message_id), size)
        return [one for one in messages if not done >> max(0, one.message_id().batch_index()) & 1]

    def _grant(self) -> None:
        if self._connection is not None and not self._paused and not self._acks.is_behind:
            permits = self._permits.grant(waiting=self._waiting)
            if permits:
                self._connection.send_control(
                    pb.CommandFlow(consumer_id=self._consumer_id, messagePermits=permits)
                )

    # Negative acknowledgements in the order of keys

    def _withhold(self, message: Message) -> None:
        """Negatively acknowledge a message at once. Also give the later messages of its key back to
        the broker, if the user has not taken them."""
        order, connection = self._order, self._connection
        if order is None or connection is None or not order.has_key(message):
            return
        guard = order.guard(message)
        late = self._queue.remove(order.withholds)
        late += [one for one in self._burst if order.withholds(one)]
        self._burst = [one for one in self._burst if not order.withholds(one)]
        self._give_back((_key_of(message.message_id()),), late, lambda: order.release(guard))

    def _give_back(
        self, nacked: Sequence[Key], late: Sequence[Message], done: Callable[[], None] | None = None
    ) -> None:
        """Give the messages `late` back to the broker: the user has not seen them. `nacked`:
        entries that the client requests again later. `done` is called when the broker has answered;
        from then on the broker withholds the later messages of the key."""
        self._count_delivered()
        for message in late:
            self._permits.on_taken(1, message.payload_bytes)
        whole, rest = entries_of(late)
        now = self._loop.time()
        for key in rest:  # the user has seen a part of the batch
            if key not in nacked:
                self._nacks.add(key, now)
        assert self._connection is not None
        ids = [(id_data(key), False) for key in (*nacked, *rest)]
        ids += [(id_data(key), True) for key in whole if key not in nacked]
        for first in range(0, len(ids), REDELIVERY_IDS_MAX):
            some = ids[first : first + REDELIVERY_IDS_MAX]
            is_last = first + REDELIVERY_IDS_MAX >= len(ids)
            self._connection.ask(
                pb.CommandNegativeAck(
                    consumer_id=self._consumer_id,
                    message_ids=[one for one, is_returned in some if not is_returned],
                    returned=[one for one, is_returned in some if is_returned],
                ),
                partial(_on_answer, done if is_last else None),
            )
        self._arm()
        self._grant()

    # Redelivery

    def _arm(self) -> None:
        """Schedule `_on_timer` for the next redelivery or the next expiry of a chunked message,
        whichever comes first."""
        times = [self._nacks.timer_at(), self._chunks.timer_at()]
        if self._unacked is not None:
            times.append(self._unacked.timer_at())
        due_at = min((at for at in times if at is not None), default=None)
        if due_at is not None and (self._timer is None or due_at < self._timer[0]):
            if self._timer is not None:
                self._timer[1].cancel()
            self._timer = due_at, self._loop.call_at(due_at, guarding(self, self._on_timer))

    def _on_timer(self) -> None:
        self._timer = None
        now = self._loop.time()
        for lost in self._chunks.expire(now):
            self._on_given_up(lost)
        keys = self._nacks.due(now)
        if self._unacked is not None:
            keys += self._unacked.due(now)
        if self._dead_letters is not None:
            keys = [key for key in keys if not self._dead_letters.maybe_move(key)]
        for key in tuple(keys):
            keys += self._chunked.get(key, ())
        if keys and self.subscription.is_ordered:
            self.redeliver_unacknowledged()
        elif self._connection is not None:
            for first in range(0, len(keys), REDELIVERY_IDS_MAX):
                ids = [id_data(key) for key in keys[first : first + REDELIVERY_IDS_MAX]]
                self._connection.send_control(
                    pb.CommandRedeliverUnacknowledgedMessages(
                        consumer_id=self._consumer_id, message_ids=ids
                    )
                )
        self._arm()

    def _forget_redeliveries(self) -> None:
        self._nacks.clear()
        if self._unacked is not None:
            self._unacked.clear()

    def _forget_through(self, delivery: Delivery) -> None:
        """Acknowledge the messages that a reader has read, so that the broker can forget them."""
        assert delivery.key is not None
        size = delivery.batch_size
        self._acks.acknowledge_cumulative(delivery.key, size - 1, size)
        self._forget_chunks(delivery.key)

    # Attaching

    def _subscribe_command(self, connection: Connection, consumer_id: int) -> pb.CommandSubscribe:
        command = subscribe_command(self.topic, self.subscription, connection.protocol_version)
        command.consumer_id = consumer_id
        # Apache Pulsar's brokers get epoch 0, too: they then mark the deliveries before the first
        # request to redeliver everything. Magnetar's brokers need not mark these (`_is_stale`).
        if self._epoch or not connection.drains_consumers:
            command.consumer_epoch = self._epoch
        if not self.subscription.is_durable and self._start is not None:
            command.start_message_id.CopyFrom(id_data(self._start.broker_key))
        return command

    def _detach(self, error: PulsarException) -> None:
        if self._connection is None:
            return
        log.info("consumer detached", topic=self.topic, reason=str(error))
        self._connection.remove_consumer(self._consumer_id)
        self._connection = None
        self._gone.set()
        self._clear_queue()
        if self.subscription.is_durable and not self._seeking:
            self._start = None  # the broker knows where the subscription is
        self._seeking = False
        if self._order is not None:
            self._order.clear()
        self._acks.on_detached()
        if not self.subscription.is_durable:  # the next broker creates another subscription
            self._acks.on_unsubscribed()
        self._chunks.clear()
        if self._dead_letters is not None:
            self._dead_letters.on_detached()
        self._forget_redeliveries()  # the next broker redelivers all unacknowledged messages

    def _count_delivered(self) -> None:
        used, messages, message_bytes = self._uncounted
        if used:
            self._uncounted = 0, 0, 0
            self._permits.on_delivered(used, messages, message_bytes)

    def _clear_queue(self) -> None:
        self._count_delivered()
        self._burst.clear()
        self._dropped = (-1, -1)  # the broker may deliver dropped entries again
        taken = self._queue.clear()
        self._generation = self._queue.generation
        if taken is not None and not self.subscription.is_durable and not self._seeking:
            self._start = self._start_after(taken)

    def _start_after(self, taken: MessageId) -> Start:
        """Return the place where a reader continues after the message `taken`. If a later message
        has chunks before this place, the broker must begin at the first of these chunks."""
        place = _key_of(taken)
        firsts = self._chunks.firsts
        firsts += [keys[0] for last, keys in self._chunked.items() if last > place and keys]
        first = min(firsts, default=place)
        return Start(taken, inclusive=False, chunks_from=first if first < place else None)

    async def _request(
        self,
        command: Body,
        answer: type[Answer],
        *,
        about: str,
        again: bool = True,
        begin: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Send a request for this consumer when it is attached, and wait for the answer.

        `again`: repeat the request after a retriable error. `begin` is called right before each
        attempt.
        """
        try:
            async with asyncio.timeout(self._parts.timeout_s):
                while True:
                    connection = await self._wait_attached()
                    cast("pb.CommandSeek", command).consumer_id = self._consumer_id
                    begin()
                    try:
                        return await connection.request(command, answer)
                    except PulsarException as error:
                        if not again or not is_retriable(error):
                            raise
                    await asyncio.sleep(RETRY_DELAY_S_FIRST)
        except TimeoutError:
            raise Timeout(f"the broker did not answer: {about}", topic=self.topic) from None

    async def _wait_attached(self) -> Connection:
        while True:
            self.check_open()
            if self._connection is not None:
                return self._connection
            await self._attachment.wait_attached()

    async def _say_goodbye(self) -> None:
        if self._task is not None:
            self._task.cancel()  # the consumer must not attach again during the wait
        if self._connection is None:
            return
        self._gone.clear()
        command = pb.CommandCloseConsumer(consumer_id=self._consumer_id)
        # An error, too, ends the wait: the broker is gone, or no longer knows the consumer.
        self._connection.ask(command, lambda _: self._gone.set())
        await self._gone.wait()
        self._detach(AlreadyClosed("the consumer was closed", topic=self.topic))


def _let_go(connection: Connection, consumer_id: int) -> None:
    """Close a consumer at the broker without waiting for the answer."""
    connection.remove_consumer(consumer_id)
    connection.ask(pb.CommandCloseConsumer(consumer_id=consumer_id), lambda _: None)


def _on_answer(done: Callable[[], None] | None, _: object) -> None:
    if done is not None:
        done()


def _key_of(message_id: MessageId) -> Key:
    return message_id.ledger_id(), message_id.entry_id()

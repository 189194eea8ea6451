"""Sends a topic's events to the producers and consumers of one connection, as Pulsar's commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from magnetar.broker.refusal import code_of
from magnetar.broker.session import reply
from magnetar.broker.topic.contract import CloseReason
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.receipts import send_receipt_frames
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from magnetar.broker.dispatch.dispatcher import EntryDetail
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.session.context import Context
    from magnetar.broker.topic.consumer import ConsumerHandle
    from magnetar.broker.topic.contract import ReadyProducer
    from magnetar.protos.names import TopicName

END_OF_TOPIC_SINCE: Final = 9
"""The Pulsar protocol version that introduced REACHED_END_OF_TOPIC. Older clients do not know the
command."""

CPP_CLIENT: Final = "Pulsar-CPP"
"""The prefix of the client version of Apache's C++ client, which other languages' clients wrap.

The C++ client closes the connection when it receives REACHED_END_OF_TOPIC, reconnects, and receives
the command again. After SEND_ERROR with ChecksumError its producer logs the text, drops the message
and continues. After SEND_ERROR with another code the client closes the connection, and sends the
message again after each reconnect. Version 4.2.0 aborts its process at the send timeout."""

log = get_logger(__name__)


class SessionProducerEvents:
    """A topic's events for one producer of this connection."""

    def __init__(
        self, context: Context, producer_id: int, topic: TopicName, schema_version: bytes
    ) -> None:
        self.schema_version = schema_version  # b"": no schema
        self.waiting_request: int | None = None  # the id of a waiting PRODUCER; None: none waits
        self._context = context
        self._topic = topic
        self._producer_id = producer_id

    def ready(self, producer: ReadyProducer) -> None:
        assert self.waiting_request is not None, "the producer was ready already"
        request_id, self.waiting_request = self.waiting_request, None
        self._context.put_control(
            reply.producer_success(
                request_id,
                producer.name,
                producer.last_sequence_id,
                producer.topic_epoch,
                schema_version=self.schema_version,
            )
        )

    def refused(self, error: Exception) -> None:
        context, producer_id = self._context, self._producer_id
        context.remove_producer(producer_id, context.producers.get(producer_id))
        assert self.waiting_request is not None, "the producer was ready already"
        context.put_control(reply.error(self.waiting_request, code_of(error), str(error)))

    def receipts(self, ledger: int, receipts: Iterable[tuple[int, int, int]]) -> None:
        self._context.put_control(
            send_receipt_frames(producer_id=self._producer_id, ledger_id=ledger, receipts=receipts)
        )

    def send_error(self, sequence_id: int, error: Exception) -> None:
        code = code_of(error)
        if code == pb.NotAllowedError and self._context.client.version.startswith(CPP_CLIENT):
            code = pb.ChecksumError
        self._context.put_control(
            reply.send_error(self._producer_id, sequence_id, code, str(error))
        )

    def closed(self, reason: CloseReason) -> None:
        """Tell the client that the topic closed the producer. The client looks the topic up
        again."""
        context, producer_id = self._context, self._producer_id
        context.remove_producer(producer_id, context.producers.get(producer_id))
        if reason is CloseReason.DELETED:
            context.remember_deleted("producer", producer_id, self._topic)
        log.info("producer closed", topic=str(self._topic), reason=reason.value)
        if self.waiting_request is not None:
            # Apache's C++ client does not know the producer before it is ready.
            text = f"{reason.value}; look the topic up again"
            context.put_control(reply.error(self.waiting_request, pb.ServiceNotReady, text))
            return
        context.put_control(reply.close_producer(producer_id, context.next_owner_url(self._topic)))

    async def probe(self) -> bool:
        return await self._context.probe()


class SessionConsumerEvents:
    """A subscription's events for one consumer of this connection."""

    def __init__(self, context: Context, consumer_id: int, topic: TopicName) -> None:
        self.handle: ConsumerHandle | None = None  # None: SUBSCRIBE is not answered yet
        self._context = context
        self._topic = topic
        self._consumer_id = consumer_id
        self._partition = -1 if topic.partition is None else topic.partition
        self._active: bytes = b""  # sent after the answer to SUBSCRIBE; b"": nothing to send

    def writable(self) -> bool:
        return self._context.writable(self._consumer_id)

    def deliver(self, entries: Sequence[StoredEntry], details: Mapping[int, EntryDetail]) -> None:
        """Send entries as messages. Each message carries the consumer's epoch, so that the client
        drops messages from before its last request for redelivery."""
        epoch = self.handle.epoch if self.handle is not None else None
        put, consumer_id = self._context.put, self._consumer_id
        wants_broker_metadata = self._context.session.wants_broker_metadata
        for number, entry in enumerate(entries):
            data = entry.data
            broker_metadata = entry.broker_metadata if wants_broker_metadata else b""
            ledger_id, entry_id = entry.position
            detail = details.get(number)
            header = framing.message_header(
                consumer_id=consumer_id,
                ledger_id=ledger_id,
                entry_id=entry_id,
                partition=self._partition,
                redelivery_count=detail.redelivery_count if detail is not None else 0,
                ack_set=detail.ack_set if detail is not None else (),
                consumer_epoch=epoch,
                entry_size=len(broker_metadata) + len(data),
            )
            put(header + broker_metadata, data)

    def active_changed(self, active: bool) -> None:
        change = reply.active_consumer_change(self._consumer_id, is_active=active)
        if self.handle is None:
            self._active = change
        else:
            self._context.put_control(change)

    def reached_end(self) -> None:
        session = self._context.session
        is_known = not session.client_version.startswith(CPP_CLIENT)
        if is_known and session.protocol_version >= END_OF_TOPIC_SINCE:
            self._context.put_control(reply.reached_end_of_topic(self._consumer_id))

    def take_active(self) -> bytes:
        """Return the command that tells the client whether it is active; b"": nothing to send."""
        active, self._active = self._active, b""
        return active

    def closed(self, reason: CloseReason) -> None:
        """Tell the client that the subscription closed the consumer. The client looks the topic up
        again."""
        context, consumer_id = self._context, self._consumer_id
        context.remove_consumer(consumer_id, context.consumers.get(consumer_id))
        if reason is CloseReason.DELETED:
            context.remember_deleted("consumer", consumer_id, self._topic)
        log.info("consumer closed", topic=str(self._topic), reason=reason.value)
        context.put_control(reply.close_consumer(consumer_id, context.next_owner_url(self._topic)))

    async def probe(self) -> bool:
        return await self._context.probe()

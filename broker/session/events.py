"""What a topic tells a producer or consumer of one connection, written as Pulsar's commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.broker.session import reply
from magnetar.broker.session.refusal import code_of
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.receipts import send_receipt_frames

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from magnetar.broker.dispatch.dispatcher import Mark
    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.session.connection import Connection
    from magnetar.broker.topic.consumer import ConsumerHandle
    from magnetar.broker.topic.contract import CloseReason
    from magnetar.protos.names import TopicName


class ProducerEvents:
    """What a topic tells one producer of this connection."""

    def __init__(self, connection: Connection, producer_id: int, topic: TopicName) -> None:
        self._connection = connection
        self._topic = topic
        self._producer_id = producer_id

    def receipts(self, ledger: int, receipts: Iterable[tuple[int, int, int]]) -> None:
        self._connection.put_control(
            send_receipt_frames(producer_id=self._producer_id, ledger_id=ledger, receipts=receipts)
        )

    def send_error(self, sequence_id: int, error: Exception) -> None:
        self._connection.put_control(
            reply.send_error(self._producer_id, sequence_id, code_of(error), str(error))
        )

    def closed(self, reason: CloseReason) -> None:
        self._connection.producer_closed(self._producer_id, self._topic, reason)

    async def probe(self) -> bool:
        return await self._connection.probe()


class ConsumerEvents:
    """What a subscription tells one consumer of this connection."""

    def __init__(self, connection: Connection, consumer_id: int, topic: TopicName) -> None:
        self.handle: ConsumerHandle | None = None  # None: SUBSCRIBE is not answered yet
        self._connection = connection
        self._topic = topic
        self._consumer_id = consumer_id
        self._active: bytes = b""  # to follow the answer to SUBSCRIBE

    def writable(self) -> bool:
        return self._connection.writable(self._consumer_id)

    def deliver(self, entries: Sequence[StoredEntry], marks: Mapping[int, Mark]) -> None:
        epoch = self.handle.epoch if self.handle is not None else None
        if epoch is not None:
            self._deliver_stamped(entries, marks, epoch)
            return
        put, consumer_id = self._connection.put, self._consumer_id
        wants_broker_metadata = self._connection.wants_broker_metadata
        for number, entry in enumerate(entries):
            data = entry.data
            broker_metadata = entry.broker_metadata if wants_broker_metadata else b""
            ledger_id, entry_id = entry.position
            mark = marks.get(number)
            header = framing.message_header(
                consumer_id=consumer_id,
                ledger_id=ledger_id,
                entry_id=entry_id,
                redelivery_count=mark.redelivery_count if mark is not None else 0,
                ack_set=mark.ack_set if mark is not None else (),
                entry_size=len(broker_metadata) + len(data),
            )
            put(header + broker_metadata, data)

    def _deliver_stamped(
        self, entries: Sequence[StoredEntry], marks: Mapping[int, Mark], epoch: int
    ) -> None:
        """With the consumer's epoch, so that it can drop what it has asked to get anew."""
        for number, entry in enumerate(entries):
            body = pb.CommandMessage(
                consumer_id=self._consumer_id,
                message_id=reply.message_id(*entry.position),
                consumer_epoch=epoch,
            )
            mark = marks.get(number)
            if mark is not None:
                body.redelivery_count = mark.redelivery_count
                body.ack_set.extend(mark.ack_set)
            wants_broker_metadata = self._connection.wants_broker_metadata
            broker_metadata = entry.broker_metadata if wants_broker_metadata else b""
            parts = framing.encode_payload_command(body, [broker_metadata, entry.data])
            self._connection.put(*parts)

    def active_changed(self, active: bool) -> None:
        change = reply.active_consumer_change(self._consumer_id, is_active=active)
        if self.handle is None:
            self._active = change
        else:
            self._connection.put_control(change)

    def take_active(self) -> bytes:
        active, self._active = self._active, b""
        return active

    def closed(self, reason: CloseReason) -> None:
        self._connection.consumer_closed(self._consumer_id, self._topic, reason)

    async def probe(self) -> bool:
        return await self._connection.probe()

"""Dead letters, chunks and corrupt entries of a consumer among fake brokers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from fakes.client_world import (
    EARLIEST,
    TOPIC,
    A,
    B,
    client_among,
    expect_none,
    publish,
    receive,
    subscription,
)
from support import settle

from magnetar.client.consuming import chunks
from magnetar.client.consuming.dead_letters import MOVING_BYTES_MAX, MOVING_MAX, DeadLetters
from magnetar.client.consuming.letter_producer import LetterProducer
from magnetar.client.consuming.letter_schemas import LetterSchemas
from magnetar.client.consuming.subscriber import Subscriber
from magnetar.client.errors import AlreadyClosed, ChecksumError, InvalidMessage, Timeout
from magnetar.client.message import Delivery, Message, MessageId
from magnetar.client.options import ConsumerDecodeFailureAction, ConsumerType, ProducerOptions
from magnetar.client.policies import ConsumerDeadLetterPolicy
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.batch import ReceivedMessage
from magnetar.protos.errors import DecompressionError
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_chunks, read_entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.client.errors import PulsarException

SHARED = ConsumerType.Shared
DEAD = f"{TOPIC}-s-DLQ"
ONCE = ConsumerDeadLetterPolicy(1)


@pytest.mark.parametrize(
    "error", [pb.NotAllowedError, pb.ProducerFenced, pb.TopicTerminatedError], ids=str
)
async def test_a_message_stays_until_the_dead_letter_topic_accepts_it(
    error: pb.ServerError.ValueType,
) -> None:
    """Two of the errors end the producer of the letters. The next letter creates another
    producer."""
    async with client_among() as (client, cluster):
        consumer = await client.subscribe(
            "t",
            "s",
            SHARED,
            initial_position=EARLIEST,
            negative_ack_redelivery_delay_ms=100,
            dead_letter_policy=ONCE,
        )
        await publish(client, 1)
        dead = cluster.topic(DEAD)
        dead.send_errors.append(error)
        for _ in range(2):
            await consumer.negative_acknowledge((await receive(consumer, 1))[0])
        await asyncio.sleep(0.15)
        assert not dead.entries
        assert subscription(cluster).unacked
        await asyncio.sleep(0.5)
        assert len(dead.entries) == 1
        assert not subscription(cluster).unacked
        await consumer.close()


async def test_an_acknowledged_message_is_no_dead_letter() -> None:
    async with client_among() as (client, cluster):
        consumer = await client.subscribe(
            "t",
            "s",
            SHARED,
            initial_position=EARLIEST,
            negative_ack_redelivery_delay_ms=100,
            dead_letter_policy=ONCE,
        )
        await publish(client, 1)
        await consumer.negative_acknowledge((await receive(consumer, 1))[0])
        (last,) = await receive(consumer, 1)
        await consumer.negative_acknowledge(last)
        await consumer.acknowledge(last)
        await asyncio.sleep(1)
        assert not cluster.topic(DEAD).entries


async def test_messages_of_a_batch_that_are_moved_are_not_moved_again_after_a_failure() -> None:
    async with client_among() as (client, cluster):
        consumer = await client.subscribe(
            "t",
            "s",
            SHARED,
            negative_ack_redelivery_delay_ms=100,
            dead_letter_policy=ConsumerDeadLetterPolicy(1),
        )
        await publish(client, 3, batch=3)
        dead = cluster.topic(DEAD)

        def refuse_the_third(_: object, body: pb.CommandSend) -> None:
            if body.sequence_id < 1:
                cluster.afterwards[pb.CommandSend] = refuse_the_third
            else:
                dead.send_errors.extend([pb.NotAllowedError] * 2)

        cluster.afterwards[pb.CommandSend] = refuse_the_third
        for _ in range(2):
            for message in await receive(consumer, 3):
                await consumer.negative_acknowledge(message)
        await asyncio.sleep(20)
        assert [read_entry(entry).payload for entry in dead.entries.values()] == [b"0", b"1", b"2"]
        assert not subscription(cluster).unacked
        assert consumer.get_stats().dead_lettered == 3


class Owner:
    """A consumer that notes the requests of its dead letters."""

    topic = TOPIC

    def __init__(self) -> None:
        self.moved: list[Message] = []
        self.again: list[tuple[int, int]] = []

    def on_dead_lettered(self, messages: Sequence[Message]) -> None:
        self.moved += messages

    def on_dead_letter_failed(self, key: tuple[int, int]) -> None:
        self.again.append(key)

    def unacknowledged(self, messages: Sequence[Message]) -> list[Message]:
        return list(messages)

    def shut_down(self, error: PulsarException) -> None:
        raise error


@pytest.mark.parametrize(("count", "size"), [(MOVING_MAX, 0), (MOVING_BYTES_MAX >> 20, 1 << 20)])
async def test_entries_that_wait_for_their_publication_are_bounded(count: int, size: int) -> None:
    """The client drops an entry beyond the limit, and requests its redelivery."""
    payload, opened, owner = bytes(size), asyncio.Event(), Owner()

    class Sender:
        async def forward(self, _: object) -> MessageId:
            return MessageId()

        async def schema_version_of(self, _: object) -> bytes:
            raise AssertionError("the letter has no schema")

    async def open_producer(_: object) -> Any:
        await opened.wait()
        return Sender()

    async def options() -> ProducerOptions:
        return ProducerOptions("t")

    async with client_among() as (client, _):
        await client.create_producer("t")
        letters = LetterProducer("t", options, open_producer, LetterSchemas(client.parts, None))
        dead = DeadLetters(1, letters, owner, client.parts)
        for number in range(count + 2):
            delivery = Delivery(TOPIC, -1, "p", 0, b"", 2, None, 0)
            received = ReceivedMessage(payload, {}, None, False, None, 0, 0, False, -1)
            message = Message(received, MessageId(-1, 1, number), delivery)
            assert not dead.on_delivered((1, number), 2, [message])
        assert owner.again == [(1, count), (1, count + 1)]
        opened.set()
        await asyncio.sleep(1)
        assert len(owner.moved) == count
        assert not dead.on_delivered((1, count), 2, [message])  # the limit has room now
        await asyncio.sleep(1)
        assert len(owner.moved) == count + 1


async def test_closing_leaves_no_task_of_dead_letters() -> None:
    async with client_among() as (client, cluster):
        consumer = await client.subscribe(
            "t",
            "s",
            SHARED,
            initial_position=EARLIEST,
            negative_ack_redelivery_delay_ms=10,
            dead_letter_policy=ONCE,
        )
        await publish(client, 1)
        cluster.topic(DEAD).hold_receipts = True
        for _ in range(2):
            await consumer.negative_acknowledge((await receive(consumer, 1))[0])
        await asyncio.sleep(0.1)
        assert any(task.get_name() == "dead letters" for task in asyncio.all_tasks())
        client.shutdown()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not any(task.get_name() == "dead letters" for task in asyncio.all_tasks())


async def test_chunks_are_joined_after_a_takeover() -> None:
    async with client_among() as (client, cluster):
        consumer = await client.subscribe("t", "s", SHARED, initial_position=EARLIEST)
        producer = await client.create_producer("t", chunking_enabled=True)
        await producer.send(bytes(6 << 20))
        (message,) = await receive(consumer, 1)
        cluster.take_over(B)
        cluster.brokers[A].kill()
        (again,) = await receive(consumer, 1)
        assert again.data() == message.data()
        await consumer.acknowledge(again)
        await asyncio.sleep(0.5)
        assert not subscription(cluster).unacked
        await expect_none(consumer)


async def test_a_corrupt_entry_fails_a_receive_if_asked() -> None:
    async with client_among() as (client, cluster):
        consumer = await client.subscribe(
            "t",
            "s",
            SHARED,
            initial_position=EARLIEST,
            decode_failure_action=ConsumerDecodeFailureAction.FAIL,
        )
        cluster.damage = lambda entry: entry[:-1] + b"?"
        await publish(client, 1)
        with pytest.raises(ChecksumError, match="cannot be read"):
            await consumer.receive(5000)
        assert consumer.get_stats().corrupt == 1
        assert subscription(cluster).unacked
        cluster.damage = lambda entry: entry
        consumer.redeliver_unacknowledged_messages()
        assert (await consumer.receive(5000)).data() == b"0"


@pytest.mark.parametrize("action", ConsumerDecodeFailureAction)
async def test_an_incomplete_chunked_message_is_acknowledged_or_fails_a_receive(
    action: ConsumerDecodeFailureAction,
) -> None:
    header, message = EntryHeader("p", 1), OutgoingMessage(b"12345678", 1)
    first, _ = encode_chunks(message, header, uuid="u", chunk_bytes_max=4)
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC).append(b"".join(first))
        consumer = await client.subscribe(
            "t", "s", SHARED, initial_position=EARLIEST, decode_failure_action=action
        )
        fails = action is ConsumerDecodeFailureAction.FAIL
        with pytest.raises(InvalidMessage if fails else Timeout, match=r"no (chunk|message)"):
            await consumer.receive(61_000)
        assert consumer.get_stats().chunked_given_up == 1
        await consumer.close()
        assert bool(subscription(cluster).unacked) is fails


@pytest.mark.parametrize("action", ConsumerDecodeFailureAction)
async def test_a_chunked_message_that_is_too_large_is_given_up_once(
    monkeypatch: pytest.MonkeyPatch, action: ConsumerDecodeFailureAction
) -> None:
    monkeypatch.setattr(chunks, "CHUNKED_MESSAGE_BYTES_MAX", 8)
    header, message = EntryHeader("p", 1), OutgoingMessage(b"123456789", 1)
    async with client_among() as (client, cluster):
        for parts in encode_chunks(message, header, uuid="u", chunk_bytes_max=3):
            cluster.topic(TOPIC).append(b"".join(parts))
        consumer = await client.subscribe(
            "t", "s", SHARED, initial_position=EARLIEST, decode_failure_action=action
        )
        fails = action is ConsumerDecodeFailureAction.FAIL
        if fails:
            with pytest.raises(InvalidMessage, match="too large"):
                await consumer.receive(5000)
        await expect_none(consumer)
        assert consumer.get_stats().chunked_given_up == 1
        await consumer.close()
        assert len(subscription(cluster).unacked) == (3 if fails else 0)


async def test_a_corrupt_message_of_many_chunks_is_reported_in_commands_within_the_limit() -> None:
    async with client_among() as (client, cluster):
        await client.subscribe("t", "s", SHARED)
        (core,) = (one for one in client.parts.live if isinstance(one, Subscriber))
        keys = [(2**40, entry) for entry in range(50_000)]
        core._refuse_corrupt(keys, DecompressionError("LZ4", "x"), 0)
        await settle()
        acks = subscription(cluster).acks
        assert sum(len(ack.message_id) for ack in acks) == len(keys)
        assert max(ack.ByteSize() for ack in acks) < 250 * 1024


async def test_a_letter_producer_that_opens_after_its_end_is_closed() -> None:
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[None] = loop.create_future()

    class Sender:
        closed = False

        async def forward(self, _: object) -> MessageId:
            raise AssertionError("a letter was sent")

        async def schema_version_of(self, _: object) -> bytes:
            raise AssertionError("the letter has no schema")

        async def close(self) -> None: ...

        def shut_down(self, _: object) -> None:
            self.closed = True

    async def options() -> ProducerOptions:
        return ProducerOptions("t")

    sender = Sender()

    async def open_producer(_: object) -> Sender:
        await opened
        return sender

    original = Message(
        ReceivedMessage(b"", {}, None, False, None, 0, 0, False, -1),
        MessageId(),
        Delivery("t", -1, "p", 0, b"", 0, None, 0),
    )
    async with client_among() as (client, _):
        letters = LetterProducer("t", options, open_producer, LetterSchemas(client.parts, None))
    sending = loop.create_task(letters.send(OutgoingMessage(b"", -1), original))
    await settle()
    letters.shut_down(AlreadyClosed("x"))
    opened.set_result(None)
    with pytest.raises(AlreadyClosed):
        await sending
    assert sender.closed

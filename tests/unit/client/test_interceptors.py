"""Interceptors of producers and consumers, with both faces of the client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from fakes.client_world import EARLIEST, client_among

import magnetar
from magnetar.client.errors import (
    Interrupted,
    InvalidConfiguration,
    MessageTooBig,
    ProducerQueueIsFull,
)
from magnetar.client.interceptors import (
    ConsumerHooks,
    ConsumerInterceptor,
    MessageToSend,
    ProducerHooks,
    ProducerInterceptor,
)

if TYPE_CHECKING:
    from magnetar.client.errors import PulsarException
    from magnetar.client.message import Message, MessageId

TOO_LARGE = bytes(5 * 1024 * 1024 + 1)


class Tracer(ProducerInterceptor):
    def __init__(self, name: str = "trace") -> None:
        self.name = name
        self.told: list[Any] = []

    def before_send(self, producer: Any, message: MessageToSend) -> MessageToSend:
        before = (message.properties or {}).get("path", "")
        message.properties = {**(message.properties or {}), "path": before + self.name}
        return message

    def on_send_acknowledgement(
        self,
        producer: Any,
        message: MessageToSend,
        message_id: MessageId | None,
        error: PulsarException | None,
    ) -> None:
        self.told.append((message.content, message_id, type(error)))

    def close(self) -> None:
        self.told.append("closed")


class Auditor(ConsumerInterceptor):
    def __init__(self) -> None:
        self.told: list[Any] = []

    def before_consume(self, consumer: Any, message: Message) -> Message:
        self.told.append(("consume", message.data()))
        return message

    def on_acknowledge(self, consumer: Any, message_id: MessageId) -> None:
        self.told.append(("ack", message_id))

    def on_acknowledge_cumulative(self, consumer: Any, message_id: MessageId) -> None:
        self.told.append(("cumulative", message_id))

    def on_negative_acknowledge(self, consumer: Any, message_id: MessageId) -> None:
        self.told.append(("nack", message_id))

    def close(self) -> None:
        self.told.append("closed")


class Broken(ProducerInterceptor, ConsumerInterceptor):
    def before_send(self, producer: Any, message: MessageToSend) -> MessageToSend:
        raise RuntimeError("the user's")

    def on_send_acknowledgement(self, *_: Any) -> None:
        raise RuntimeError("the user's")

    def before_consume(self, consumer: Any, message: Message) -> Message:
        raise RuntimeError("the user's")

    def on_acknowledge(self, consumer: Any, message_id: MessageId) -> None:
        raise RuntimeError("the user's")


async def test_producers_interceptors_change_messages_and_learn_outcomes() -> None:
    async with client_among() as (client, _):
        first, second = Tracer("a"), Tracer("b")
        consumer = await client.subscribe("t", "s")
        producer = await client.create_producer("t", interceptors=[first, Broken(), second])
        message_id = await producer.send(b"x", {"k": "v"})
        outcomes: list[Any] = []
        producer.send_async(b"y", lambda *outcome: outcomes.append(outcome), partition_key="key")
        await producer.flush()
        with pytest.raises(MessageTooBig):
            await producer.send(TOO_LARGE)
        await producer.close()
        assert first.told == second.told
        assert first.told[0] == (b"x", message_id, type(None))
        assert first.told[1] == (b"y", outcomes[0][1], type(None))
        assert first.told[2][1:] == (None, MessageTooBig)
        assert first.told[3:] == ["closed"]
        received = [await consumer.receive(1000) for _ in range(2)]
        assert received[0].properties() == {"k": "v", "path": "ab"}
        assert received[1].properties() == {"path": "ab"}
        assert received[1].partition_key() == "key"


async def test_interceptors_are_called_for_a_refused_send() -> None:
    async with client_among() as (client, cluster):
        tracer = Tracer()
        producer = await client.create_producer("t", max_pending_messages=1, interceptors=[tracer])
        cluster.topic("persistent://public/default/t").hold_receipts = True
        producer.send_async(b"0", None)
        with pytest.raises(ProducerQueueIsFull):
            await producer.send(b"1")
        producer.send_async(b"2", None)
        assert tracer.told == [
            (b"1", None, ProducerQueueIsFull),
            (b"2", None, ProducerQueueIsFull),
        ]


async def test_consumers_interceptors_see_messages_and_acknowledgements() -> None:
    async with client_among() as (client, _):
        auditor = Auditor()
        producer = await client.create_producer("t")
        consumer = await client.subscribe(
            "t",
            "s",
            initial_position=EARLIEST,
            interceptors=[Broken(), auditor],
            batch_receive_policy=magnetar.ConsumerBatchReceivePolicy(2, -1, 1000),
        )
        for number in range(4):
            await producer.send(b"%d" % number)
        messages = [await consumer.receive(1000), *await consumer.batch_receive()]
        await consumer.acknowledge(messages[0])
        await consumer.acknowledge([messages[0], messages[0].message_id()])
        await consumer.negative_acknowledge(messages[1])
        await consumer.acknowledge_cumulative(messages[2].message_id())
        await consumer.close()
        ids = [message.message_id() for message in messages]
        assert auditor.told == [
            *[("consume", b"%d" % number) for number in range(3)],
            *[("ack", ids[0])] * 3,
            ("nack", ids[1]),
            ("cumulative", ids[2]),
            "closed",
        ]


async def test_an_object_that_is_no_interceptor_is_refused() -> None:
    async with client_among() as (client, _):
        for wrong in (5, [5], [ConsumerInterceptor()]):
            given: Any = wrong
            with pytest.raises(InvalidConfiguration, match="interceptors"):
                await client.create_producer("t", interceptors=given)


def test_interceptors_that_override_nothing_do_nothing() -> None:
    message = MessageToSend(b"x")
    outcomes: list[Any] = []
    hooks = ProducerHooks([ProducerInterceptor()])
    assert hooks.before_send(None, message) is message
    hooks.around(None, message, lambda *outcome: outcomes.append(outcome))(None, None)
    assert outcomes == [(None, None)]
    hooks.close()
    consumer = ConsumerHooks([ConsumerInterceptor()])
    message_id = magnetar.MessageId()
    consumer.on_acknowledge(None, message_id)
    consumer.on_acknowledge_cumulative(None, message_id)
    consumer.on_negative_acknowledge(None, message_id)
    consumer.close()


class Forgetful(ProducerInterceptor, ConsumerInterceptor):
    """An interceptor whose hooks return nothing."""

    def before_send(self, producer: Any, message: MessageToSend) -> MessageToSend:
        return None  # type: ignore[return-value]

    def before_consume(self, consumer: Any, message: Message) -> Message:
        return None  # type: ignore[return-value]


async def test_a_hook_that_returns_nothing_changes_nothing() -> None:
    async with client_among() as (client, _):
        hooks: Any = [Forgetful()]
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST, interceptors=hooks)
        producer = await client.create_producer("t", interceptors=hooks)
        await producer.send(b"x")
        assert (await consumer.receive(1000)).data() == b"x"


async def test_interceptors_are_called_for_a_cancelled_send_that_waited() -> None:
    async with client_among() as (client, cluster):
        tracer = Tracer()
        producer = await client.create_producer(
            "t", max_pending_messages=1, block_if_queue_full=True, interceptors=[tracer]
        )
        cluster.topic("persistent://public/default/t").hold_receipts = True
        producer.send_async(b"0", None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await producer.send(b"1")
        assert tracer.told == [(b"1", None, Interrupted)]

"""Operations on subscriptions: initial position, reset, skip, expiry and peek."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from fakes.admin import admin_of
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.entries import entry_of
from fakes.wire import wire_to

from magnetar.broker.errors import SubscriptionExists, SubscriptionNotFound
from magnetar.broker.log.position import EARLIEST, LATEST, Position
from magnetar.broker.operations import subscriptions
from magnetar.broker.operations.errors import MessageNotFound, PositionNotFound
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_chunks, encode_message
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fakes.broker import RunningBroker
    from fakes.wire import WireClient

    from magnetar.broker.broker import Broker
    from magnetar.broker.topic.subscription import Subscription

pytestmark = pytest.mark.real_loop

TOPIC = TopicName.parse("t")
HOUR_MS = 3_600_000


@dataclass
class Scene:
    """A topic with a subscription from its beginning, and a client that publishes to it."""

    running: RunningBroker
    client: WireClient
    subscription: Subscription

    @property
    def broker(self) -> Broker:
        return self.running.broker

    async def publish(self, *entries: bytes) -> list[Position]:
        positions = []
        for entry in entries:
            await self.client.publish(entry=entry)
            receipt = await self.client.expect(pb.CommandSendReceipt)
            positions.append(Position(receipt.message_id.ledgerId, receipt.message_id.entryId))
        return positions

    async def texts(self, number: int = 1, name: str = "s") -> list[str]:
        found = await subscriptions.peek(self.broker, TOPIC, name, number)
        return [b64decode(message.payload or "").decode() for message in found]


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    async with running_broker(ClusterState()) as broker, wire_to(broker, "pulsar") as client:
        await client.produce("t")
        await subscriptions.create_subscription(broker.broker, TOPIC, "s", EARLIEST)
        topic = await broker.broker.topic(TOPIC)
        yield Scene(broker, client, topic.subscriptions["s"])


def plain(text: str, *, publish_time_ms: int = 1_700_000_000_000) -> bytes:
    return bytes(entry_of(text, publish_time_ms=publish_time_ms).data)


async def test_a_subscription_begins_at_the_requested_position() -> None:
    async with scene() as it:
        _, second = await it.publish(plain("a"), plain("b"))
        for name, start in (("from-b", second), ("latest", LATEST)):
            await subscriptions.create_subscription(it.broker, TOPIC, name, start)
        await it.publish(plain("c"))
        assert await it.texts() == ["a"]
        assert await it.texts(name="from-b") == ["b"]
        assert await it.texts(name="latest") == ["c"]
        with pytest.raises(SubscriptionExists):
            await subscriptions.create_subscription(it.broker, TOPIC, "s", LATEST)


async def test_peek_skips_acknowledged_messages_and_changes_nothing() -> None:
    async with scene() as it:
        _, second, _ = await it.publish(plain("a"), plain("b"), plain("c"))
        it.subscription.cursor.acknowledge([second])
        assert [await it.texts(number) for number in (1, 2, 1)] == [["a"], ["c"], ["a"]]
        with pytest.raises(MessageNotFound, match="at position 3; entries in its backlog: 2"):
            await it.texts(3)
        with pytest.raises(SubscriptionNotFound):
            await it.texts(1, "other")


async def test_peek_shows_the_messages_of_a_batch_that_are_not_acknowledged() -> None:
    async with scene() as it:
        words = [str(number) for number in range(70)]  # more than one word of bits
        [position] = await it.publish(bytes(entry_of(*words).data))
        assert await it.texts() == words
        it.subscription.cursor.acknowledge_batch(position, [1 << 63 | 1 << 3, 0b100])
        found = await subscriptions.peek(it.broker, TOPIC, "s", 1)
        assert [message.message_id for message in found] == [
            f"{position}:{index}" for index in (3, 63, 66)
        ]
        it.subscription.cursor.acknowledge_batch(position, [1 << 3])
        assert await it.texts() == ["3"]


async def test_peek_shows_key_properties_and_times() -> None:
    header = EntryHeader("me", publish_time_ms=1_000)
    message = OutgoingMessage(
        b"\xff", 7, properties={"a": "b"}, partition_key="k", event_time_ms=2_000
    )
    async with scene() as it:
        [position] = await it.publish(b"".join(encode_message(message, header)))
        [found] = await subscriptions.peek(it.broker, TOPIC, "s", 1)
    assert found.model_dump(by_alias=True) == {
        "messageId": str(position),
        "producerName": "me",
        "sequenceId": 7,
        "publishTime": 1_000,
        "eventTime": 2_000,
        "key": "k",
        "keyIsBase64": False,
        "properties": {"a": "b"},
        "payload": "/w==",
        "problem": None,
    }


async def test_peek_names_the_problem_of_a_payload_that_it_cannot_show() -> None:
    message = OutgoingMessage(bytes(100), 0)
    header = EntryHeader("me", publish_time_ms=1_000)
    chunk = b"".join(next(encode_chunks(message, header, uuid="u", chunk_bytes_max=60)))
    async with scene() as it:
        [position] = await it.publish(chunk)
        [found] = await subscriptions.peek(it.broker, TOPIC, "s", 1)
    assert (found.message_id, found.payload) == (str(position), None)
    assert found.problem == "it is part 1 of 2 of a large message"


async def test_reset_to_a_message_a_time_and_both_ends() -> None:
    async with scene() as it:
        first, second, third = await it.publish(
            *(plain(text, publish_time_ms=hour * HOUR_MS) for hour, text in enumerate("abc"))
        )
        reset = subscriptions.reset_to_message
        await reset(it.broker, TOPIC, "s", second)
        assert await it.texts() == ["b"]
        await reset(it.broker, TOPIC, "s", second, excluded=True)
        assert await it.texts() == ["c"]
        await reset(it.broker, TOPIC, "s", EARLIEST)
        assert await it.texts() == ["a"]
        await reset(it.broker, TOPIC, "s", LATEST, excluded=True)
        assert it.subscription.cursor.backlog_entries == 0
        await subscriptions.reset_to_time(it.broker, TOPIC, "s", HOUR_MS // 2)
        assert await it.texts() == ["b"]
        await reset(it.broker, TOPIC, "s", third)
        assert it.subscription.cursor.mark_delete == second
        assert first < second


async def test_reset_behind_the_end_is_refused_because_it_would_drop_the_backlog() -> None:
    async with scene() as it:
        [position] = await it.publish(plain("a"))
        behind = Position(position.ledger, position.entry + 1)
        with pytest.raises(PositionNotFound, match=f"has no message {behind}"):
            await subscriptions.reset_to_message(it.broker, TOPIC, "s", behind)
        with pytest.raises(PositionNotFound):
            await subscriptions.create_subscription(it.broker, TOPIC, "new", behind)
        assert await it.texts() == ["a"]


async def test_skip_clear_and_expire_over_http() -> None:
    async with running_broker(ClusterState()) as broker, wire_to(broker, "pulsar") as client:
        await client.produce("t")
        async with admin_of(broker) as admin:
            for name in ("s", "a/b"):
                body = {"ledgerId": -1, "entryId": -1}
                found = await admin.put(f"public/default/t/subscription/{name}", json=body)
                assert found.status_code == 204

            async def post(path: str, status: int = 204, **options: Any) -> None:
                found = await admin.post(f"public/default/t/{path}", **options)
                assert found.status_code == status, found.text

            topic = await broker.broker.topic(TOPIC)
            for number in range(10):
                await client.publish(sequence_id=number)
                receipt = await client.expect(pb.CommandSendReceipt)
            cursors = [topic.subscriptions[name].cursor for name in ("s", "a/b")]
            await post("subscription/s/skip/3")
            await post("subscription/a%2Fb/skip/1")
            assert [cursor.backlog_entries for cursor in cursors] == [7, 9]
            await post("all_subscription/expireMessages/3600")
            await post("subscription/s/expireMessages/3600")
            assert [cursor.backlog_entries for cursor in cursors] == [7, 9], (
                "the messages are younger than an hour"
            )
            last = receipt.message_id
            body = {"ledgerId": last.ledgerId, "entryId": last.entryId}
            await post("subscription/s/expireMessages", json={**body, "isExcluded": True})
            assert [cursor.backlog_entries for cursor in cursors] == [1, 9]
            await post("subscription/a%2Fb/skip_all")
            assert [cursor.backlog_entries for cursor in cursors] == [1, 0]
            await post("subscription/s/skip/0", 400)
            await post("subscription/s/expireMessages/0", 400)
            await post("subscription/none/skip_all", 404)
            await post("subscription/s/expireMessages", 412, json={**body, "entryId": 10_000})


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ({}, ["1", "2", "3"]),
        ({"excluded": True}, ["z"]),
        ({"isExcluded": True}, ["z"]),
        ({"batchIndex": 0}, ["1", "2", "3"]),
        ({"batchIndex": 1}, ["2", "3"]),
        ({"batchIndex": 1, "excluded": True}, ["3"]),
        ({"batchIndex": 2, "excluded": True}, ["z"]),
        ({"batchIndex": -1, "partitionIndex": -1, "properties": None}, ["1", "2", "3"]),
    ],
)
async def test_a_new_subscription_begins_at_the_message_of_a_batch(
    start: dict[str, Any], expected: list[str]
) -> None:
    async with scene() as it, admin_of(it.running) as admin:
        batch, _ = await it.publish(bytes(entry_of("1", "2", "3").data), plain("z"))
        body = {"ledgerId": batch.ledger, "entryId": batch.entry, **start}
        made = await admin.put("public/default/t/subscription/new", json=body)
        assert made.status_code == 204, made.text
        assert await it.texts(name="new") == expected
        await it.subscription.skip_all()
        moved = await admin.post("public/default/t/subscription/s/resetcursor", json=body)
        assert moved.status_code == 204, moved.text
        assert await it.texts() == expected


async def test_a_new_subscription_has_the_properties_of_the_request() -> None:
    async with scene() as it, admin_of(it.running) as admin:
        await it.publish(plain("a"))
        body = {"ledgerId": -1, "entryId": -1, "properties": {"team": "blue", "é": ""}}
        await admin.put("public/default/p/partitions", json=2)
        for topic, served in (("t", "t"), ("p", "p-partition-1")):
            made = await admin.put(f"public/default/{topic}/subscription/new", json=body)
            assert made.status_code == 204, made.text
            stats = (await admin.get(f"public/default/{served}/stats")).json()
            assert stats["subscriptions"]["new"]["subscriptionProperties"] == body["properties"]


@pytest.mark.parametrize(("word", "expected"), [("earliest", ["a"]), ("latest", ["b"])])
async def test_a_word_names_an_end_of_the_topic(word: str, expected: list[str]) -> None:
    async with scene() as it, admin_of(it.running) as admin:
        await it.publish(plain("a"))
        await admin.put("public/default/p/partitions", json=2)
        for topic in "tp":
            one = f"public/default/{topic}/subscription/new"
            assert (await admin.put(one, json=word)).status_code == 204
            assert (await admin.post(f"{one}/resetcursor", json=word)).status_code == 204
            refused = await admin.post(f"{one}/resetcursor", json="middle")
            assert refused.status_code == (400 if topic == "t" else 405)
        await it.publish(plain("b"))
        assert await it.texts(name="new") == expected


@pytest.mark.parametrize(
    ("last", "left"),
    [
        ({}, ["z"]),
        ({"excluded": True}, ["1", "2", "3"]),
        ({"batchIndex": 1}, ["1", "2", "3"]),
        ({"batchIndex": 2}, ["z"]),
        ({"batchIndex": 2, "excluded": True}, ["1", "2", "3"]),
    ],
)
async def test_expiry_up_to_a_message_keeps_a_batch_with_later_messages(
    last: dict[str, Any], left: list[str]
) -> None:
    async with scene() as it, admin_of(it.running) as admin:
        _, batch, _ = await it.publish(plain("a"), bytes(entry_of("1", "2", "3").data), plain("z"))
        body = {"ledgerId": batch.ledger, "entryId": batch.entry, **last}
        done = await admin.post("public/default/t/subscription/s/expireMessages", json=body)
        assert done.status_code == 204, done.text
        assert await it.texts() == left


async def test_expire_counts_subscriptions_of_the_same_name_separately() -> None:
    async with scene() as it:
        await it.publish(plain("a"), plain("b"), plain("c"))
        await it.subscription.skip(1)
        await it.client.subscribe("t", "s", durable=False)
        await asyncio.sleep(0.01)  # the entries must be older than 0 s
        expired = await subscriptions.expire(it.broker, TOPIC, "s", 0)
        assert expired == 2, "the name means the durable subscription"
        assert await subscriptions.expire(it.broker, TOPIC, None, 0) == 3

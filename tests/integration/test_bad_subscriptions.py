"""Bad input at a subscription over both transports: the broker answers with the protocol's error,
and the other messages and consumers continue."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fakes.broker import RunningBroker, running_broker
from fakes.cluster_state import ClusterState
from fakes.entries import entry_of
from fakes.wire import TRANSPORTS, wire_to

from magnetar.broker.dispatch.sticky_ranges import RANGES_MAX
from magnetar.broker.topic.consumer import PERMITS_MAX
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_message
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fakes.wire import WireClient

pytestmark = [pytest.mark.parametrize("transport", TRANSPORTS), pytest.mark.real_loop]

TOPIC = "persistent://public/default/t"
TOPIC_NAME = TopicName.parse(TOPIC)
EXCLUSIVE, SHARED = pb.CommandSubscribe.Exclusive, pb.CommandSubscribe.Shared
FAILOVER, KEY_SHARED = pb.CommandSubscribe.Failover, pb.CommandSubscribe.Key_Shared


class World:
    """`one` has the topic's producer and consumer 1; `other` is a second client."""

    def __init__(self, one: WireClient, other: WireClient, broker: RunningBroker) -> None:
        self.one = one
        self.other = other
        self.broker = broker
        self._sent = 0

    async def send(self, entry: bytes = b"") -> None:
        entry = entry or bytes(entry_of(f"m{self._sent}").data)
        await self.one.publish(entry=entry, sequence_id=self._sent)
        self._sent += 1

    async def take(self, kind: Any, client: WireClient | None = None) -> Any:
        """Receive the next command of this kind, and drop the commands before it."""
        while True:
            body = (await (client or self.one).receive()).body
            if isinstance(body, kind):
                return body

    async def goes_on(self, client: WireClient | None = None) -> None:
        """Check that a new message arrives and that the broker accepts its acknowledgement."""
        await self.send()
        client = client or self.one
        message = await self.take(pb.CommandMessage, client)
        answer = await self.ack(message.message_id, client=client)
        assert not answer.HasField("error")

    async def ack(
        self, at: pb.MessageIdData, *, kind: Any = 0, client: WireClient | None = None
    ) -> Any:
        client = client or self.one
        ack = pb.CommandAck(consumer_id=1, ack_type=kind, message_id=[at], request_id=7)
        await client.send(ack)
        return await self.take(pb.CommandAckResponse, client)


@asynccontextmanager
async def world(transport: str) -> AsyncIterator[World]:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, transport) as one,
        wire_to(broker, transport) as other,
    ):
        await one.produce(TOPIC)
        yield World(one, other, broker)


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED])
async def test_cumulative_ack_is_refused_and_acknowledges_nothing(
    transport: str, kind: Any
) -> None:
    async with world(transport) as it:
        await it.one.subscribe(TOPIC, subType=kind)
        await it.one.flow(10)
        await it.send()
        message = await it.take(pb.CommandMessage)
        answer = await it.ack(message.message_id, kind=pb.CommandAck.Cumulative)
        assert answer.error == pb.NotAllowedError
        assert "cumulative" in answer.message
        stats = await it.one.ask(pb.CommandConsumerStats(consumer_id=1, request_id=0))
        assert (stats.unackedMessages, stats.msgBacklog) == (1, 1)
        await it.goes_on()


def sticky(*ranges: tuple[int, int]) -> pb.KeySharedMeta:
    spans = [pb.IntRange(start=start, end=end) for start, end in ranges]
    return pb.KeySharedMeta(keySharedMode=pb.STICKY, hashRanges=spans)


BAD_RANGES = {
    "none": (),
    "reversed": ((200, 100),),
    "negative": ((-5, 100),),
    "beyond the hash space": ((100, 65_536),),
    "overlapping themselves": ((40_000, 50_000), (45_000, 60_000)),
    "overlapping another consumer's": ((32_767, 40_000),),
    "too many": tuple((40_000 + 2 * n, 40_000 + 2 * n) for n in range(RANGES_MAX + 1)),
}


@pytest.mark.parametrize("what", BAD_RANGES)
async def test_bad_sticky_ranges_are_refused(transport: str, what: str) -> None:
    async with world(transport) as it:
        await it.one.subscribe(TOPIC, subType=KEY_SHARED, keySharedMeta=sticky((0, 32_767)))
        meta = sticky(*BAD_RANGES[what])
        probed = asyncio.get_running_loop().create_task(it.one.receive())  # answers PINGs
        answer = await it.other.subscribe(TOPIC, subType=KEY_SHARED, keySharedMeta=meta)
        await it.one.send(pb.CommandPing())  # the answer to this PING ends the task
        await probed
        assert answer.error == pb.ConsumerAssignError
        assert answer.message
        rest = sticky((32_768, 65_535))
        answer = await it.other.subscribe(TOPIC, subType=KEY_SHARED, keySharedMeta=rest)
        assert isinstance(answer, pb.CommandSuccess)
        await it.one.flow(10)
        await it.other.flow(10)
        for key in ("key-1", "a"):  # slots 5536 and 27058
            message = OutgoingMessage(b"x", 0, partition_key=key)
            await it.send(b"".join(encode_message(message, EntryHeader("p", 1))))
            await it.take(pb.CommandMessage)


async def test_keys_without_a_sticky_range_wait_and_other_keys_are_delivered(
    transport: str,
) -> None:
    async with world(transport) as it:
        await it.one.subscribe(TOPIC, subType=KEY_SHARED, keySharedMeta=sticky((0, 10_000)))
        await it.one.flow(10)
        for key in ("a", "key-1"):  # slots 27058 and 5536
            message = OutgoingMessage(b"x", 0, partition_key=key)
            await it.send(b"".join(encode_message(message, EntryHeader("p", 1))))
        message = await it.take(pb.CommandMessage)
        assert message.message_id.entryId == 1
        await it.other.subscribe(TOPIC, subType=KEY_SHARED, keySharedMeta=sticky((10_001, 65_535)))
        await it.other.flow(10)
        message = await it.take(pb.CommandMessage, it.other)
        assert message.message_id.entryId == 0


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED])
async def test_another_type_than_the_connected_consumers_is_refused(
    transport: str, kind: Any
) -> None:
    async with world(transport) as it:
        await it.one.subscribe(TOPIC, subType=kind)
        await it.one.flow(10)
        for other in {EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED} - {kind}:
            answer = await it.other.subscribe(TOPIC, subType=other)
            assert answer.error == pb.ConsumerBusy
        await it.goes_on()


POLICIES = {
    "ordered": pb.KeySharedMeta(keySharedMode=pb.AUTO_SPLIT),
    "ordered nacks": pb.KeySharedMeta(keySharedMode=pb.AUTO_SPLIT, ordered_negative_acks=True),
    "sticky": sticky((0, 65_535)),
}


@pytest.mark.parametrize("first", POLICIES)
async def test_another_key_shared_policy_is_refused_until_the_others_have_left(
    transport: str, first: str
) -> None:
    async with world(transport) as it:
        await it.one.subscribe(TOPIC, subType=KEY_SHARED, keySharedMeta=POLICIES[first])
        await it.one.flow(10)
        others = [policy for name, policy in POLICIES.items() if name != first]
        for policy in others:
            answer = await it.other.subscribe(TOPIC, subType=KEY_SHARED, keySharedMeta=policy)
            assert answer.error == pb.ConsumerBusy
            assert "Key_Shared policy" in answer.message
        await it.goes_on()
        await it.send()
        held = await it.take(pb.CommandMessage)
        await it.one.send(pb.CommandCloseConsumer(consumer_id=1, request_id=9))
        await it.take(pb.CommandSuccess)
        for policy in others:
            answer = await it.other.subscribe(TOPIC, subType=KEY_SHARED, keySharedMeta=policy)
            assert isinstance(answer, pb.CommandSuccess)
            await it.other.flow(10)
            again = await it.take(pb.CommandMessage, it.other)
            assert again.message_id.entryId == held.message_id.entryId
            await it.other.send(pb.CommandCloseConsumer(consumer_id=1, request_id=9))
            await it.take(pb.CommandSuccess, it.other)


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED])
async def test_ack_of_another_consumers_message_counts_at_that_consumer(
    transport: str, kind: Any
) -> None:
    async with world(transport) as it:
        await it.one.subscribe(TOPIC, subType=kind)
        await it.one.flow(10)
        for _ in range(2):
            await it.send()
        messages = [await it.take(pb.CommandMessage) for _ in range(2)]
        await it.other.subscribe(TOPIC, subType=kind)
        for ledger, entry in ((999_999, 5), (1, 999_999), (1, 2**64 - 5)):
            at = pb.MessageIdData(ledgerId=ledger, entryId=entry)
            await it.ack(at, client=it.other)
        answer = await it.ack(messages[0].message_id, client=it.other)
        assert not answer.HasField("error")
        await it.one.send(pb.CommandConsumerStats(consumer_id=1, request_id=3))
        stats = await it.take(pb.CommandConsumerStatsResponse)
        assert (stats.unackedMessages, stats.msgBacklog) == (1, 1)
        await it.one.send(pb.CommandCloseConsumer(consumer_id=1, request_id=9))
        await it.take(pb.CommandSuccess)
        await it.other.flow(10)
        again = await it.take(pb.CommandMessage, it.other)
        assert again.message_id.entryId == messages[1].message_id.entryId


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED])
async def test_permits_are_bounded(transport: str, kind: Any) -> None:
    async with world(transport) as it:
        await it.one.subscribe(TOPIC, subType=kind)
        for _ in range(3):
            await it.one.flow(2**32 - 1)
        await it.one.flow(0)
        await it.one.send(pb.CommandConsumerStats(consumer_id=1, request_id=3))
        stats = await it.take(pb.CommandConsumerStatsResponse)
        assert stats.availablePermits == PERMITS_MAX
        await it.goes_on()


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED])
async def test_any_delivery_time_is_accepted_or_refused_and_other_messages_are_delivered(
    transport: str, kind: Any
) -> None:
    async with world(transport) as it:
        await it.one.subscribe(TOPIC, subType=kind)
        await it.one.flow(100)
        past = (-(2**63), -1, 0, 1, 1_000)
        for time_ms in past:
            message = OutgoingMessage(b"x", 0, deliver_at_ms=time_ms)
            await it.send(b"".join(encode_message(message, EntryHeader("p", 1))))
            await it.take(pb.CommandMessage)
        for time_ms in (2**63 - 1, 2**62, 253_402_300_800_000):
            message = OutgoingMessage(b"x", 0, deliver_at_ms=time_ms)
            await it.send(b"".join(encode_message(message, EntryHeader("p", 1))))
            if kind in (EXCLUSIVE, FAILOVER):
                await it.take(pb.CommandMessage)
        await it.goes_on()
        if kind in (SHARED, KEY_SHARED):
            topic = await it.broker.broker.stored_topic(TOPIC_NAME)
            [delayed] = [one for one in topic.explain("s") if one.why == "delayed"]
            assert "3 entries are delayed" in delayed.detail

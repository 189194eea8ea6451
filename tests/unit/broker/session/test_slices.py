"""The broker executes every frame in short steps: no step takes 50 ms of CPU."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from fakes.entries import entry_of
from fakes.place import place
from support import wait_until

from magnetar.broker.session.connection import SLICE_COMMANDS, UNIT_CONSUMERS
from magnetar.broker.session.limits import HANDSHAKE_BYTES_MAX
from magnetar.broker.topic.consumer import NEGATIVE_ACKS_MAX
from magnetar.broker.topic.subscription import Subscription
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.runtime.steps import STEP_CPU_S_MAX

if TYPE_CHECKING:
    from fakes.place import Place
    from fakes.wire import WireClient

TOPIC = "persistent://public/default/t"
PING = framing.encode_command(pb.CommandPing())

pytestmark = pytest.mark.usefixtures("no_collection")


def check_steps(here: Place) -> None:
    kinds = here.broker.steps.kinds
    assert kinds["commands"].cpu.counts, "no step was measured"
    for kind, figures in kinds.items():
        assert figures.cpu.most < STEP_CPU_S_MAX, (kind, figures.cpu.most)


async def drain(client: WireClient, until: type) -> pb.CommandAckResponse:
    """Read until this command arrives, and return it."""
    while True:
        command = await client.receive()
        if isinstance(command.body, until):
            return command.body


async def test_a_frame_of_thirty_thousand_pings_stops_no_other_client() -> None:
    async with place() as here:
        client, other = await here.client(), await here.client()
        number = 30_000
        await client.wire.send(PING * number)
        served = 0
        for _ in range(10):
            await other.send(pb.CommandPing())
            await other.expect(pb.CommandPong)
            served += 1
        answered = 0
        assert served == 10
        while answered < number:
            await client.expect(pb.CommandPong)
            answered += 1
        check_steps(here)


async def test_a_connection_closes_its_many_consumers_in_slices() -> None:
    """The close of one consumer takes 0.5 ms here."""
    async with place() as here:
        client, number = await here.client(), 300
        for consumer_id in range(number):
            await client.subscribe(
                TOPIC, consumer_id=consumer_id, subType=pb.CommandSubscribe.Key_Shared
            )
        await client.produce(TOPIC)
        await client.flow(1, consumer_id=7)
        subscription = here.topic.subscriptions["s"]
        assert len(subscription.consumers) == number
        await client.wire.break_off()
        left: list[int] = []
        while subscription.consumers:
            left.append(len(subscription.consumers))
            await asyncio.sleep(0)
        assert len(set(left) - {number}) > 5, "the loop has turns in between"
        await here.serving[0]
        assert here.topic.producers == {}
        check_steps(here)


async def test_consumers_that_are_about_to_be_closed_get_no_entries() -> None:
    async with place() as here:
        client, other, number = await here.client(), await here.client(), 300
        await other.produce(TOPIC)
        for consumer_id in range(number):
            await client.subscribe(
                TOPIC, consumer_id=consumer_id, subType=pb.CommandSubscribe.Key_Shared
            )
            await client.flow(1, consumer_id=consumer_id)
        subscription = here.topic.subscriptions["s"]
        await client.wire.break_off()
        await wait_until(lambda: len(subscription.consumers) < number)
        for sequence_id in range(20):
            await other.publish("text", sequence_id=sequence_id)
        for _ in range(20):
            await other.expect(pb.CommandSendReceipt)
        await here.serving[0]
        assert subscription.delivered.messages == 0
        assert not subscription.cursor.redeliveries


async def test_a_cancelled_connection_closes_all_its_consumers() -> None:
    async with place() as here:
        client, number = await here.client(), 100
        for consumer_id in range(number):
            await client.subscribe(
                TOPIC, consumer_id=consumer_id, subType=pb.CommandSubscribe.Key_Shared
            )
        here.serving[0].cancel()
        await asyncio.wait({here.serving[0]})
        assert here.topic.subscriptions["s"].consumers == {}


class Shares:
    """Subscriptions with consumers of one connection, and the number of calls of `advance` in each
    turn of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_turn: list[int] = []
        self._calls = 0
        original = Subscription.advance

        def advance(subscription: Subscription) -> None:
            self._calls += 1
            original(subscription)

        monkeypatch.setattr(Subscription, "advance", advance)

    async def count(self, turns: int) -> None:
        self.in_turn.clear()
        for _ in range(turns):
            self._calls = 0
            await asyncio.sleep(0)
            self.in_turn.append(self._calls)


async def test_room_is_offered_once_to_a_subscription_of_many_consumers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with place() as here:
        client, number = await here.client(), 300
        for consumer_id in range(number):
            await client.subscribe(
                TOPIC, consumer_id=consumer_id, subType=pb.CommandSubscribe.Shared
            )
            await client.flow(1, consumer_id=consumer_id)
        [connection] = here.connections
        context, shares = connection._context, Shares(monkeypatch)
        context._refused_room.update(range(number))
        context.lacking_room.set()
        await shares.count(50)
        assert sum(shares.in_turn) == 1


async def test_room_is_offered_to_many_subscriptions_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with place() as here:
        client, number = await here.client(), 3 * SLICE_COMMANDS
        for consumer_id in range(number):
            await client.subscribe(TOPIC, f"s{consumer_id}", consumer_id=consumer_id)
        [connection] = here.connections
        context, shares = connection._context, Shares(monkeypatch)
        context._refused_room.update(range(number))
        context.lacking_room.set()
        await shares.count(50)
        assert sum(shares.in_turn) == number
        assert max(shares.in_turn) == SLICE_COMMANDS


async def test_commands_for_a_subscription_of_many_consumers_end_a_slice_earlier() -> None:
    async with place() as here:
        client, number = await here.client(), 10 * UNIT_CONSUMERS
        for consumer_id in range(number):
            await client.subscribe(
                TOPIC, consumer_id=consumer_id, subType=pb.CommandSubscribe.Shared
            )
        [first, *_] = here.topic.subscriptions["s"].consumers
        flow = framing.encode_command(pb.CommandFlow(consumer_id=0, messagePermits=1))
        await client.wire.send(flow * 100)
        seen = [0]
        while first.permits < 100:
            await asyncio.sleep(0)
            seen.append(first.permits)
        assert max(after - before for before, after in pairwise(seen)) == 10  # each counts 11


async def test_a_frame_of_small_sends_is_published_in_runs() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        number = 5_000
        entry = bytes(entry_of("").data)
        frame = b"".join(
            b"".join(
                framing.encode_payload_command(
                    pb.CommandSend(producer_id=1, sequence_id=place), [entry]
                )
            )
            for place in range(number)
        )
        await client.wire.send(frame)
        for place_ in range(number):
            assert (await client.expect(pb.CommandSendReceipt)).sequence_id == place_
        check_steps(here)


async def test_a_frame_of_sends_with_much_metadata_is_published_in_short_steps() -> None:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
    metadata.replicate_to.extend([""] * 50_000)
    encoded = metadata.SerializeToString()
    entry = len(encoded).to_bytes(4, "big") + encoded + b"x"
    number = 40
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        sends = [pb.CommandSend(producer_id=1, sequence_id=place) for place in range(number)]
        frames = [b"".join(framing.encode_payload_command(send, [entry])) for send in sends]
        await client.wire.send(b"".join(frames))
        for _ in range(number):
            await drain(client, pb.CommandSendReceipt)
        check_steps(here)


def ids(number: int) -> list[pb.MessageIdData]:
    return [pb.MessageIdData(ledgerId=1, entryId=entry) for entry in range(number)]


async def test_an_ack_of_very_many_ids_is_carried_out_in_pieces() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        await client.subscribe(TOPIC)
        await client.publish()
        await client.expect(pb.CommandSendReceipt)
        await client.flow(1)
        message, _ = await client.message()
        ack = pb.CommandAck(consumer_id=1, ack_type=pb.CommandAck.Individual, request_id=9)
        ledger = message.message_id.ledgerId
        ack.message_id.extend(
            [pb.MessageIdData(ledgerId=ledger, entryId=entry) for entry in range(150_000)]
        )
        await client.wire.send(framing.encode_command(ack))
        response = await drain(client, pb.CommandAckResponse)
        assert response.request_id == 9
        assert not response.HasField("error")
        assert here.topic.subscriptions["s"].cursor.mark_delete == (ledger, 0)
        assert here.broker.steps.kinds["long list"].cpu.counts
        check_steps(here)


async def test_a_long_ack_with_an_impossible_id_is_answered_with_its_error() -> None:
    async with place() as here:
        client = await here.client()
        await client.subscribe(TOPIC)
        ack = pb.CommandAck(consumer_id=1, ack_type=pb.CommandAck.Individual, request_id=9)
        ack.message_id.extend(
            [pb.MessageIdData(ledgerId=(1 << 64) - 5, entryId=entry) for entry in range(5_000)]
        )
        await client.wire.send(framing.encode_command(ack))
        response = await client.expect(pb.CommandAckResponse)
        assert (response.request_id, response.error) == (9, pb.NotAllowedError)


async def test_a_long_request_for_redelivery_is_carried_out_in_pieces() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        await client.subscribe(TOPIC, subType=pb.CommandSubscribe.Shared)
        await client.publish()
        await client.expect(pb.CommandSendReceipt)
        await client.flow(10)
        message, _ = await client.message()
        body = pb.CommandRedeliverUnacknowledgedMessages(consumer_id=1)
        body.message_ids.extend(ids(50_000))
        body.message_ids.append(message.message_id)
        await client.wire.send(framing.encode_command(body))
        again, _ = await client.message()
        assert again.message_id == message.message_id
        assert again.redelivery_count == 1
        check_steps(here)


async def test_long_negative_acks_of_one_frame_are_carried_out_in_steps_of_their_own() -> None:
    """Two of them took 60 ms together."""
    async with place() as here:
        client = await here.client()
        policy = pb.KeySharedMeta(keySharedMode=pb.AUTO_SPLIT, ordered_negative_acks=True)
        await client.subscribe(TOPIC, subType=pb.CommandSubscribe.Key_Shared, keySharedMeta=policy)
        body = pb.CommandNegativeAck(consumer_id=1, request_id=5)
        body.message_ids.extend(ids(NEGATIVE_ACKS_MAX // 2))
        body.returned.extend(ids(NEGATIVE_ACKS_MAX // 2))
        before = sum(here.broker.steps.kinds["commands"].cpu.counts)
        await client.wire.send(framing.encode_command(body) * 2)
        for _ in range(2):
            await client.expect(pb.CommandSuccess)
        assert sum(here.broker.steps.kinds["commands"].cpu.counts) == before + 2
        check_steps(here)


async def test_a_cumulative_ack_of_many_ids_is_refused() -> None:
    async with place() as here:
        client = await here.client()
        await client.subscribe(TOPIC)
        ack = pb.CommandAck(consumer_id=1, ack_type=pb.CommandAck.Cumulative, request_id=9)
        ack.message_id.extend(ids(50_000))
        await client.wire.send(framing.encode_command(ack))
        response = await client.expect(pb.CommandAckResponse)
        assert (response.request_id, response.error) == (9, pb.NotAllowedError)


@pytest.mark.parametrize("size", [300_000, 5_000_000])
async def test_a_command_that_no_client_sends_ends_the_connection(size: int) -> None:
    async with place() as here:
        client = await here.client()
        body = pb.CommandSubscribe(
            topic=TOPIC,
            subscription="x" * size,
            subType=pb.CommandSubscribe.Shared,
            consumer_id=1,
            request_id=1,
        )
        await client.wire.send(framing.encode_command(body))
        assert await client.ended() == []
        check_steps(here)


async def test_at_most_64_kb_are_read_before_connect() -> None:
    async with place() as here:
        client = await here.client(connected=False)
        body = pb.CommandConnect(client_version="x" * HANDSHAKE_BYTES_MAX)
        await client.wire.send(framing.encode_command(body))
        assert await client.ended() == []


async def test_the_broker_stops_reading_from_a_client_that_does_not_read() -> None:
    """Each PING is answered: the answers are bounded."""
    async with place() as here:
        client = await here.client()
        connection = here.connections[0]
        await client.wire.send(PING * 200_000)
        await wait_until(lambda: connection._draining, deadline_s=60)
        assert connection._outbox.pending_bytes < 20 << 20

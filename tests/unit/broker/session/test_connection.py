"""A connection's shell: signs of life, back-pressure both ways, and clients that vanish.

The broker is whole, except for its ports. The tests run on a loop with a virtual clock."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from fakes.entries import entry_of, texts_of
from fakes.place import PENDING_BYTES_MAX, Place, place
from fakes.virtual_loop import stand_still
from support import settle, wait_until

from magnetar.broker.dispatch.permits import Limits
from magnetar.broker.errors import NotOwner
from magnetar.broker.log.owned_record import topic_path
from magnetar.broker.ownership.bundle import bundle_in
from magnetar.broker.session.connection import PROBE_TIMEOUT_S, REQUEST_TIMEOUT_S, STALL_BYTES
from magnetar.broker.session.context import DELIVERY_BYTES_MAX
from magnetar.broker.session.session import KEEPALIVE_S
from magnetar.metadata import codec, paths
from magnetar.metadata.model import BrokerId, NamespaceBundles, Ownership, TopicRecord
from magnetar.metadata.store import ABSENT, Versioned
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import strip_broker_metadata
from magnetar.protos.names import Domain, TopicName
from magnetar.runtime.errors import StreamClosed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fakes.wire import WireClient

TOPIC = "persistent://public/default/t"


async def answer_pings(client: WireClient, for_s: float) -> None:
    """Answer PINGs, and send nothing else."""
    asyncio.get_running_loop().call_later(for_s, asyncio.current_task().cancel)
    try:
        await client.ended()
    except asyncio.CancelledError:
        asyncio.current_task().uncancel()


def passed_s(since: float = 0.0) -> float:
    return asyncio.get_running_loop().time() - since


# ---- signs of life ----------------------------------------------------------------------------


async def test_a_silent_client_is_pinged_and_then_disconnected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        async with place() as here:
            client = await here.client()
            await client.produce(TOPIC, producer_name="me")
            await here.serving[0]  # the client never reads, so it never answers
            assert passed_s() == pytest.approx(2 * KEEPALIVE_S, abs=1)
            assert here.topic.producers == {}
    assert "nothing heard for 60 s" in caplog.text


async def test_a_client_that_answers_pings_stays_connected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        await answer_pings(client, 20 * KEEPALIVE_S)
        assert not here.serving[0].done()
        assert len(here.topic.producers) == 1


async def test_the_connection_of_a_silent_client_is_closed() -> None:
    async with place() as here:
        client = await here.client(connected=False)
        await here.serving[0]
        assert passed_s() == pytest.approx(KEEPALIVE_S, abs=1)
        assert await client.wire.receive() == b""


async def test_a_dead_holder_of_a_name_or_subscription_is_evicted() -> None:
    async with place() as here:
        dead = await here.client()
        await dead.produce(TOPIC, producer_name="me")
        await dead.subscribe(TOPIC)
        began = passed_s()
        alive = await here.client()
        assert isinstance(await alive.produce(TOPIC, producer_name="me"), pb.CommandProducerSuccess)
        assert isinstance(await alive.subscribe(TOPIC), pb.CommandSuccess)
        assert passed_s(began) == pytest.approx(PROBE_TIMEOUT_S, abs=0.5)
        await here.serving[0]


async def test_a_living_holder_keeps_its_place() -> None:
    async with place() as here:
        holder = await here.client()
        await holder.produce(TOPIC, producer_name="me")
        await holder.subscribe(TOPIC)
        other = await here.client()

        async def answer_pings() -> None:
            await holder.ended()

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(answer_pings())
            refused = await other.produce(TOPIC, producer_name="me")
            assert refused.error == pb.ProducerBusy
            refused = await other.subscribe(TOPIC)
            assert refused.error == pb.ConsumerBusy
            assert passed_s() < 1
            reading.cancel()


@pytest.mark.parametrize("before_s", [5.0, 29.0, 40.0, 59.0])
async def test_a_stall_of_the_broker_is_not_the_silence_of_its_clients(before_s: float) -> None:
    """The broker's process is stopped for longer than the keep-alive. The client has answered in
    time, and its answer waits in the socket."""
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        await asyncio.sleep(before_s)
        stand_still(3 * KEEPALIVE_S)
        await answer_pings(client, KEEPALIVE_S)
        assert not here.serving[0].done()
        await here.serving[0]  # the connection of a client that stays silent is closed
        assert passed_s() < before_s + 8 * KEEPALIVE_S


# ---- back-pressure ----------------------------------------------------------------------------


async def test_a_producer_of_a_full_topic_waits_and_counts_as_alive() -> None:
    """The broker does not read from the producer while the bookies are away. The broker must not
    count this as silence of the producer."""

    async with place() as here:
        client, other = await here.client(), await here.client()
        await client.produce(TOPIC, producer_name="me")
        here.ledgers.bookies = False
        text = "x" * 1_000
        count = 100

        async def publish() -> None:
            for number in range(count):
                await client.publish(text, sequence_id=number)

        async with asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(publish())
            await wait_until(lambda: here.connections[0]._paused, deadline_s=60)
            assert here.topic.log.describe()["queued"] * len(text) < 2 * PENDING_BYTES_MAX
            assert not publishing.done(), "the broker does not read the connection"
            refused = await other.produce(TOPIC, producer_name="me")
            assert refused.error == pb.ProducerBusy
            asked = tasks.create_task(other.ended())  # keeps the other one alive
            await asyncio.sleep(5 * KEEPALIVE_S)
            assert not here.serving[0].done()
            here.ledgers.bookies = True
            async with asyncio.timeout(60):
                for number in range(count):
                    assert (await client.expect(pb.CommandSendReceipt)).sequence_id == number
            asked.cancel()


@pytest.mark.parametrize("kind", [pb.CommandSubscribe.Exclusive, pb.CommandSubscribe.Shared])
async def test_frames_for_a_consumer_that_does_not_read_are_bounded(kind: int) -> None:
    async with place() as here:
        writer, reader = await here.client(), await here.client()
        await writer.produce(TOPIC)
        await reader.subscribe(TOPIC, subType=kind)
        await reader.flow(1_000_000)
        text = "x" * 100_000
        count = 300
        most = 0
        for number in range(count):
            await writer.publish(text, sequence_id=number)
            await writer.expect(pb.CommandSendReceipt)
            most = max(most, here.connections[1]._outbox.pending_bytes)
        await settle()
        step = Limits().read_bytes + len(text)
        assert DELIVERY_BYTES_MAX <= most < DELIVERY_BYTES_MAX + step
        for _ in range(count):  # when the consumer reads, it gets all messages
            _, texts = await reader.message()
            assert texts == [text]


async def make_topics(here: Place) -> None:
    """Create enough topics that the list of their names has 230 KB."""
    store = here.broker._store
    for number in range(1_000):
        name = f"{number:04}" + "n" * 200
        path = paths.topic("public", "default", Domain.PERSISTENT, name)
        await store.put(path, codec.encode_topic(TopicRecord(epoch=0)), expected=ABSENT)


async def ask_for_topics(client: WireClient, count: int) -> None:
    for number in range(count):
        await client.send(
            pb.CommandGetTopicsOfNamespace(namespace="public/default", request_id=number)
        )


async def test_a_client_on_a_slow_link_stays_while_it_reads_its_answers() -> None:
    """In the meantime, the broker reads no command of the client."""

    async def ask(client: WireClient) -> None:
        with suppress(StreamClosed):
            await ask_for_topics(client, 90)

    async with place() as here:
        await make_topics(here)
        holder, other = await here.client(), await here.client()
        await holder.produce(TOPIC, producer_name="me")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask(holder))
            await wait_until(lambda: here.connections[0]._draining)
            refused = await other.produce(TOPIC, producer_name="me")
            assert refused.error == pb.ProducerBusy
            began = passed_s()
            seen: set[int] = set()
            for _ in range(60):
                await asyncio.sleep(KEEPALIVE_S / 6)
                answer = await holder.expect(pb.CommandGetTopicsOfNamespaceResponse)
                seen.add(answer.request_id)
            assert len(seen) == 60
            assert passed_s(began) > 4 * KEEPALIVE_S
            assert not here.serving[0].done()
            await here.serving[0]  # the client reads no more
            assert passed_s(began) == pytest.approx(12 * KEEPALIVE_S, abs=KEEPALIVE_S / 2)


async def test_answers_for_a_client_that_does_not_read_are_bounded() -> None:
    async with place() as here:
        await make_topics(here)
        client = await here.client()
        answer_bytes = 1_000 * 230
        count = 2 * STALL_BYTES // answer_bytes

        async def ask() -> None:
            await ask_for_topics(client, count)

        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(ask())
            await asyncio.sleep(5)
            assert not asking.done(), "the broker reads the connection no more"
            pending = here.connections[0]._outbox.pending_bytes
            assert STALL_BYTES < pending < STALL_BYTES + 8 * answer_bytes
            numbers = [
                (await client.expect(pb.CommandGetTopicsOfNamespaceResponse)).request_id
                for _ in range(count)
            ]
        assert sorted(numbers) == list(range(count))


# ---- clients that vanish ----------------------------------------------------------------------


async def idle(here: Place, client: WireClient) -> None:
    """The client is connected, and does no more."""


async def opening(here: Place, client: WireClient) -> None:
    here.ledgers.bookies = False
    await client.send(pb.CommandProducer(topic=TOPIC, producer_id=9, request_id=9))
    await client.send(
        pb.CommandSubscribe(
            topic=TOPIC,
            subscription="opening",
            subType=pb.CommandSubscribe.Shared,
            consumer_id=9,
            request_id=10,
        )
    )


async def publishing(here: Place, client: WireClient) -> None:
    await client.produce(TOPIC, producer_id=9)
    here.ledgers.hold()
    for number in range(5):
        await client.publish(producer_id=9, sequence_id=number)


async def publishing_too_much(here: Place, client: WireClient) -> None:
    await client.produce(TOPIC, producer_id=9)
    here.ledgers.bookies = False
    await client.publish("x" * 2 * PENDING_BYTES_MAX, producer_id=9)


async def receiving(here: Place, client: WireClient) -> None:
    await client.produce(TOPIC, producer_id=9)
    await client.subscribe(TOPIC, subType=pb.CommandSubscribe.Shared)
    for number in range(5):
        await client.publish("x" * 5_000, producer_id=9, sequence_id=number)
        await client.expect(pb.CommandSendReceipt)
    await client.flow(1_000)


async def acknowledging(here: Place, client: WireClient) -> None:
    await client.subscribe(TOPIC)
    await client.produce(TOPIC, producer_id=9)
    await client.publish(producer_id=9)
    receipt = await client.expect(pb.CommandSendReceipt)
    here.ledgers.hold()
    await client.send(
        pb.CommandAck(
            consumer_id=1,
            ack_type=pb.CommandAck.Individual,
            message_id=[receipt.message_id],
            request_id=9,
        )
    )


async def seeking(here: Place, client: WireClient) -> None:
    await acknowledging(here, client)
    position = pb.MessageIdData(ledgerId=2**64 - 1, entryId=2**64 - 1)
    await client.send(pb.CommandSeek(consumer_id=1, request_id=10, message_id=position))


async def unsubscribing(here: Place, client: WireClient) -> None:
    await acknowledging(here, client)
    await client.send(pb.CommandUnsubscribe(consumer_id=1, request_id=10))


async def taking_anothers_place(here: Place, client: WireClient) -> None:
    holder = await here.client()
    await holder.produce(TOPIC, producer_name="me")
    await client.send(
        pb.CommandProducer(topic=TOPIC, producer_id=9, request_id=9, producer_name="me")
    )


async def half_a_command(here: Place, client: WireClient) -> None:
    await client.produce(TOPIC, producer_id=9)
    await client.wire.send(framing.encode_command(pb.CommandPing())[:-1])


@pytest.mark.parametrize(
    "stage",
    [
        idle,
        opening,
        publishing,
        publishing_too_much,
        receiving,
        acknowledging,
        seeking,
        unsubscribing,
        taking_anothers_place,
        half_a_command,
    ],
    ids=lambda stage: stage.__name__,
)
@pytest.mark.parametrize("healed", [True, False], ids=["healed", "away"])
async def test_a_client_that_vanishes_leaves_no_task_and_no_state(
    stage: Callable[[Place, WireClient], Awaitable[None]], healed: bool
) -> None:
    def names(tasks: set[asyncio.Task[Any]]) -> list[str]:
        return [str(task) for task in tasks if not task.done()]

    async with place() as here:
        witness = await here.client()
        await witness.produce(TOPIC, producer_name="witness")
        await settle(100)
        before = asyncio.all_tasks()
        client = await here.client()
        await stage(here, client)
        await settle(100)
        await client.wire.break_off()
        if healed:
            here.ledgers.bookies = True
            here.ledgers.release()
        await asyncio.wait([here.serving[1]], timeout=2 * REQUEST_TIMEOUT_S)
        assert here.serving[1].done(), "the connection is still served"
        here.ledgers.bookies = True
        here.ledgers.release()
        await wait_until(
            lambda: names(asyncio.all_tasks() - before) == [], what="that no task is left"
        )
        producers = set(here.topic.producers) - {"witness", "me"}
        assert producers == set()
        for subscription in here.topic.subscriptions.values():
            assert subscription.consumers == {}


async def test_the_entry_of_a_frame_does_not_pin_it() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        await client.publish("small")
        await client.expect(pb.CommandSendReceipt)
        [entry] = await here.topic.log.read(here.topic.log.first, entries_max=1, bytes_max=1_000)
        owner = entry.data.obj if isinstance(entry.data, memoryview) else entry.data
        assert len(owner) < len(entry_of("small").data) + 100


async def test_good_and_bad_sends_of_one_frame_are_answered_in_order() -> None:
    def send(producer_id: int, sequence_id: int, entry: bytes) -> bytes:
        head = framing.send_header(
            producer_id=producer_id, sequence_id=sequence_id, entry_size=len(entry)
        )
        return head + entry

    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC, producer_id=1)
        await client.produce(TOPIC, producer_id=2)
        await client.subscribe(TOPIC)
        await client.flow(100)
        plain = [bytes(entry_of(f"m{number}").data) for number in range(5)]
        # entry_of numbers its only message 0: with other numbers its SEND is not plain.
        sends = [send(1, 0, entry) for entry in plain[:3]]
        sends += [send(1, 0, plain[3][:-1] + b"!"), send(1, 7, plain[3])]
        sends += [send(1, 1, bytes(entry_of("a", "b").data)), send(2, 0, plain[4])]
        await client.wire.send(b"".join(sends))
        receipts, texts = [], []
        while len(receipts) + len(texts) < 7 + 7:
            command = await client.receive()
            match command.body:
                case pb.CommandSendReceipt() as body:
                    receipts.append((body.producer_id, body.sequence_id))
                case pb.CommandSendError() as body:
                    assert body.error == pb.ChecksumError
                    receipts.append((body.producer_id, "error"))
                case pb.CommandMessage():
                    assert command.entry is not None
                    texts += texts_of(command.entry)
        ours = [number for producer, number in receipts if producer == 1]
        assert ours == [0, 0, 0, "error", 7, 1]
        assert texts == ["m0", "m1", "m2", "m3", "a", "b", "m4"]


async def test_a_client_that_asks_gets_broker_entry_metadata_before_each_entry() -> None:
    async with place() as here:
        client = await here.client(connected=False)
        flags = pb.FeatureFlags(supports_broker_entry_metadata=True)
        await client.send(
            pb.CommandConnect(client_version="w", protocol_version=20, feature_flags=flags)
        )
        await client.expect(pb.CommandConnected)
        await client.produce(TOPIC)
        for texts in (["a"], ["b", "c"], ["d"]):
            entry = bytes(entry_of(*texts).data)
            await client.publish(entry=entry)
            await client.expect(pb.CommandSendReceipt)
        await client.subscribe(TOPIC)
        await client.flow(100)
        found = []
        for _ in range(3):
            command = await client.receive()
            assert command.entry is not None
            broker, entry_sent = strip_broker_metadata(command.entry)
            assert broker is not None
            found.append((broker.index, texts_of(entry_sent)))
        assert found == [(0, ["a"]), (2, ["b", "c"]), (3, ["d"])]


async def test_a_consumer_whose_close_failed_can_be_opened_again() -> None:
    async with place() as here:
        client = await here.client()
        await client.produce(TOPIC)
        await client.publish("a")
        await client.expect(pb.CommandSendReceipt)
        await client.subscribe(TOPIC)
        await client.flow(10)
        message = await client.expect(pb.CommandMessage)
        here.ledgers.hold()
        ack = pb.CommandAck(consumer_id=1, ack_type=pb.CommandAck.Individual)
        ack.message_id.append(message.message_id)
        await client.send(ack)
        close = pb.CommandCloseConsumer(consumer_id=1, request_id=0)
        failed = await client.ask(close)  # the acknowledgement cannot be made durable
        assert isinstance(failed, pb.CommandError)
        again = await client.subscribe(TOPIC)
        assert isinstance(again, pb.CommandSuccess)
        assert len(here.topic.subscriptions["s"].consumers) == 1
        here.ledgers.release()


async def test_a_topic_whose_bundle_moves_during_the_open_is_not_opened() -> None:
    """If the broker opened the topic, it would fence the new owner."""

    async def refused(here: Place, name: TopicName) -> None:
        with pytest.raises(NotOwner):
            await here.broker.topic(name, create=False)

    async with place() as here:
        name, store = TopicName.parse(TOPIC), here.store
        await here.broker.locate(name, authoritative=True)
        bundle = here.broker.policies.bundle_of(name)
        record = codec.encode_topic(TopicRecord(epoch=3))
        await store.put(topic_path(name), record, expected=ABSENT)
        look = ("get", topic_path(name))
        gone = store.gates[look] = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(refused(here, name))
            await wait_until(lambda: store.held == [look])
            path = paths.ownership(bundle.tenant, bundle.namespace, bundle.range)
            other = Ownership(BrokerId("other"), "1" * 32, 7)
            await store.put(path, codec.encode_ownership(other), expected=0)
            await wait_until(lambda: not here.broker._owners.holds(bundle))
            gone.set()
        assert await store.get(topic_path(name)) == Versioned(record, 0), (
            "the topic's epoch was raised"
        )


@pytest.mark.parametrize("opening", [False, True])
async def test_a_consumer_that_reuses_the_id_of_an_unsubscribed_one_stays(opening: bool) -> None:
    """While the deletion waits, the client closes the consumer and reuses the consumer's id."""
    other = TOPIC[:-1] + "u"

    async with place() as here:
        client = await here.client()
        await client.produce(other)
        await client.publish("a")
        await client.expect(pb.CommandSendReceipt)
        await client.subscribe(TOPIC)
        delete, create = (("put", topic_path(TopicName.parse(each))) for each in (TOPIC, other))
        deletes = here.store.gates[delete] = asyncio.Event()
        creates = here.store.gates[create] = asyncio.Event()
        await client.send(pb.CommandUnsubscribe(consumer_id=1, request_id=100))
        await wait_until(lambda: here.store.held == [delete])
        await client.ask(pb.CommandCloseConsumer(consumer_id=1, request_id=0))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.send(subscribing(other, 101)))
            await wait_until(lambda: here.store.held == [delete, create])
            for event in (deletes, creates) if opening else (creates, deletes):
                event.set()
                await settle()
        numbers = [(await client.expect(pb.CommandSuccess)).request_id for _ in range(2)]
        assert numbers == ([100, 101] if opening else [101, 100])
        await client.flow(10)
        _, texts = await client.message()
        assert texts == ["a"]


def subscribing(topic: str, request_id: int) -> pb.CommandSubscribe:
    return pb.CommandSubscribe(
        topic=topic,
        subscription="s",
        consumer_id=1,
        request_id=request_id,
        subType=pb.CommandSubscribe.Shared,
        initialPosition=pb.CommandSubscribe.Earliest,
    )


async def test_a_request_whose_work_was_cancelled_is_answered() -> None:
    async with place() as here:
        client = await here.client()
        bundle = bundle_in(TopicName.parse(TOPIC), NamespaceBundles())
        path = paths.ownership(bundle.tenant, bundle.namespace, bundle.range)
        here.store.strays.add(("get", path))
        refused = await client.produce(TOPIC)
        assert refused.error == pb.ServiceNotReady
        assert here.connections[0]._session.requests == 0
        assert isinstance(await client.produce(TOPIC), pb.CommandProducerSuccess)


async def test_drain_is_refused_after_the_time_of_a_request_and_answered_when_asked_again() -> None:
    async with place() as here:
        client, loop = await here.client(), asyncio.get_running_loop()
        await client.subscribe("t", subType=pb.CommandSubscribe.Shared)
        await client.produce("t")
        await client.flow(1)
        await client.publish()
        got = [(await client.receive()) for _ in range(2)]  # the receipt, and the message
        [message] = [it.body for it in got if isinstance(it.body, pb.CommandMessage)]
        drain = pb.CommandDrainConsumer(consumer_id=1, request_id=0)
        began = loop.time()
        refused = await client.ask(drain)
        assert isinstance(refused, pb.CommandError)
        assert refused.error == pb.ServiceNotReady
        assert loop.time() - began >= REQUEST_TIMEOUT_S
        ack = pb.CommandAck(consumer_id=1, ack_type=pb.CommandAck.Individual)
        ack.message_id.append(message.message_id)
        await client.send(ack)
        assert isinstance(await client.ask(drain), pb.CommandSuccess)

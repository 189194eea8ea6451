"""A producer with fake brokers that answer, delay, refuse and die."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from fakes.client_world import TOPIC, A, B, client_among
from fakes.session_broker import UNASKED
from support import settle, wait_until

from magnetar.client.errors import (
    AlreadyClosed,
    ConnectError,
    Interrupted,
    InvalidTopicName,
    MessageTooBig,
    NotAllowedError,
    ProducerBusy,
    ProducerFenced,
    ProducerQueueIsFull,
    PulsarException,
    Result,
    Timeout,
)
from magnetar.client.message import MessageId
from magnetar.client.options import BatchingType, CompressionType, ProducerAccessMode
from magnetar.client.producer import _Waiting
from magnetar.client.producing.publisher import Publisher
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import MESSAGE_BYTES_MAX, parse_entry
from magnetar.protos.message import decode_messages, read_entry

if TYPE_CHECKING:
    from fakes.session_broker import Topic

    from magnetar.client.asyncio import Producer


def contents(topic: Topic) -> list[list[bytes]]:
    """The messages of each entry."""
    return [[m.payload for m in decode_messages(read_entry(e))] for e in topic.entries.values()]


class Outcomes:
    """A callback that stores its arguments."""

    def __init__(self) -> None:
        self.told: list[tuple[Result, MessageId | None]] = []

    def __call__(self, result: Result, message_id: MessageId | None) -> None:
        self.told.append((result, message_id))

    @property
    def results(self) -> list[Result]:
        return [result for result, _ in self.told]


async def test_single_message_is_an_unbatched_entry() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t")
        assert await producer.send(b"one") == MessageId(-1, 1, 0)
        assert await producer.send(b"two") == MessageId(-1, 1, 1)
        assert contents(cluster.topic(TOPIC)) == [[b"one"], [b"two"]]
        assert not cluster.topic(TOPIC).messages_of((1, 0))[1]
        assert producer.topic() == TOPIC
        assert producer.producer_name() == "fake-1"
        assert producer.last_sequence_id() == 1
        assert producer.is_connected()


async def test_sends_of_one_turn_share_a_batch_without_waiting_for_the_timer() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t", batching_max_publish_delay_ms=1000)
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            sends = [group.create_task(producer.send(b"%d" % i)) for i in range(3)]
        assert asyncio.get_running_loop().time() - began < 0.1
        assert contents(cluster.topic(TOPIC)) == [[b"0", b"1", b"2"]]
        assert [send.result() for send in sends] == [MessageId(-1, 1, 0, i) for i in range(3)]
        assert sends[0].result().batch_size() == 3


async def test_send_async_waits_for_the_limits_or_the_delay() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer(
            "t", batching_max_messages=3, batching_max_publish_delay_ms=10
        )
        told = Outcomes()
        for number in range(4):
            producer.send_async(b"%d" % number, told)
        await settle()
        assert contents(cluster.topic(TOPIC)) == [[b"0", b"1", b"2"]]
        await asyncio.sleep(0.02)
        assert contents(cluster.topic(TOPIC))[1:] == [[b"3"]]
        assert told.results == [Result.Ok] * 4
        await producer.flush()


async def test_without_batching_every_message_is_an_entry() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t", batching_enabled=False)
        for number in range(3):
            producer.send_async(b"%d" % number, None)
        await producer.flush()
        assert contents(cluster.topic(TOPIC)) == [[b"0"], [b"1"], [b"2"]]


async def test_a_delayed_message_travels_alone_and_keeps_its_place() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t")
        producer.send_async(b"0", None)
        producer.send_async(b"1", None)
        producer.send_async(b"2", None, deliver_after=timedelta(seconds=5))
        producer.send_async(b"3", None)
        producer.send_async(b"4", None)
        await producer.flush()
        assert contents(cluster.topic(TOPIC)) == [[b"0", b"1"], [b"2"], [b"3", b"4"]]


async def test_key_based_batches_hold_one_key_each() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t", batching_type=BatchingType.KeyBased)
        told = Outcomes()
        for number, key in enumerate("abab"):
            producer.send_async(b"%d" % number, told, partition_key=key)
        await producer.flush()
        assert contents(cluster.topic(TOPIC)) == [[b"0", b"2"], [b"1", b"3"]]
        assert told.results == [Result.Ok] * 4


async def test_sequence_ids_of_key_based_batches_do_not_interleave() -> None:
    """If they interleaved, deduplication would treat the second batch as stored."""
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t", batching_type=BatchingType.KeyBased)
        for number, key in enumerate("abab"):
            producer.send_async(b"%d" % number, None, partition_key=key)
        producer.send_async(b"4", None, partition_key="a", sequence_id=10)
        await producer.flush()
        assert contents(cluster.topic(TOPIC)) == [[b"0", b"2"], [b"1", b"3"], [b"4"]]
        entries = [parse_entry(entry) for entry in cluster.topic(TOPIC).entries.values()]
        ids = [(entry.sequence_id, entry.highest_sequence_id) for entry in entries]
        assert ids[:2] == [(0, 1), (2, 3)]
        assert ids[2][0] == 10


@pytest.mark.parametrize("compression", list(CompressionType))
async def test_every_part_of_a_message_arrives(compression: CompressionType) -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer(
            "t", compression_type=compression, producer_name="me", properties={"role": "x"}
        )
        given: dict[str, Any] = {
            "properties": {"a": "1"},
            "partition_key": "k",
            "ordering_key": "o",
            "event_timestamp": 77,
            "sequence_id": 5,
        }
        async with asyncio.TaskGroup() as group:
            group.create_task(producer.send(b"x" * 1000, **given))
            group.create_task(producer.send(None))
        (entry,) = cluster.topic(TOPIC).entries.values()
        assert (len(entry) > 1000) == (compression == CompressionType.NONE)
        first, second = decode_messages(read_entry(entry))
        assert (first.payload, first.properties) == (b"x" * 1000, {"a": "1"})
        assert (first.partition_key, first.ordering_key) == ("k", b"o")
        assert (first.event_time_ms, first.sequence_id) == (77, 5)
        assert second.null_value
        assert read_entry(entry).producer_name == "me"
        (created,) = cluster.brokers[A].commands(pb.CommandProducer)
        assert created.user_provided_producer_name
        assert [(p.key, p.value) for p in created.metadata] == [("role", "x")]


async def test_pending_messages_are_sent_again_in_order_after_the_owners_death() -> None:
    async with client_among() as (client, cluster):
        topic = cluster.topic(TOPIC)
        producer = await client.create_producer("t", batching_enabled=False)
        await producer.send(b"stored")
        topic.hold_receipts = True
        told = Outcomes()
        for number in range(5):
            producer.send_async(b"%d" % number, told)
        await settle()
        cluster.sends.clear()
        cluster.brokers[A].kill()
        producer.send_async(b"5", told)
        cluster.take_over(B)
        await producer.flush()
        assert [sequence for sequence, _ in cluster.sends] == [1, 2, 3, 4, 5, 6]
        assert told.results == [Result.Ok] * 6
        assert [one for _, one in told.told] == [MessageId(-1, 2, i) for i in range(6)]
        (created,) = cluster.brokers[B].commands(pb.CommandProducer)
        assert created.producer_name == "fake-1"
        assert not created.user_provided_producer_name
        assert created.epoch >= 1


async def test_a_dead_owner_is_left_within_a_second_of_its_takeover() -> None:
    async with client_among() as (client, cluster):
        loop = asyncio.get_running_loop()
        producer = await client.create_producer("t")
        cluster.brokers[A].kill()
        sending = loop.create_task(producer.send(b"x"))
        await asyncio.sleep(3.0)  # lookups still name the dead broker
        assert not producer.is_connected()
        cluster.take_over(B)
        began = loop.time()
        await sending
        assert loop.time() - began < 1.1


async def test_a_message_times_out_and_the_next_does_not() -> None:
    async with client_among() as (client, cluster):
        topic = cluster.topic(TOPIC)
        producer = await client.create_producer(
            "t", send_timeout_millis=1000, batching_enabled=False
        )
        topic.hold_receipts = True
        told = Outcomes()
        producer.send_async(b"0", told)
        await asyncio.sleep(0.5)
        producer.send_async(b"1", told)
        await asyncio.sleep(0.6)
        assert told.results == [Result.Timeout]
        topic.hold_receipts = False
        cluster.brokers[A].kill()  # the next broker gets only messages that have not timed out
        cluster.sends.clear()
        cluster.take_over(B)
        await producer.flush()
        assert told.results == [Result.Timeout, Result.Ok]
        assert [sequence for sequence, _ in cluster.sends] == [1]
        assert not Timeout.definite


async def test_messages_time_out_while_no_broker_answers() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t", send_timeout_millis=2000)
        for broker in cluster.brokers.values():
            broker.kill()
        began = asyncio.get_running_loop().time()
        with pytest.raises(Timeout):
            await producer.send(b"x")
        assert asyncio.get_running_loop().time() - began == pytest.approx(2.0, abs=0.01)


async def test_only_the_refused_message_fails() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC).send_errors.append(pb.NotAllowedError)
        producer = await client.create_producer("t", batching_enabled=False)
        told = Outcomes()
        producer.send_async(b"0", told)
        producer.send_async(b"1", told)
        with pytest.raises(NotAllowedError, match="scripted"):
            await producer.flush()
        assert told.results == [Result.NotAllowedError, Result.Ok]
        assert len(cluster.brokers[A].commands(pb.CommandProducer)) == 1


async def test_message_with_a_refused_chunk_is_counted_as_failed() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC).send_errors.append(pb.NotAllowedError)
        producer = await client.create_producer("t", batching_enabled=False, chunking_enabled=True)
        with pytest.raises(NotAllowedError, match="scripted"):
            await producer.send(bytes(MESSAGE_BYTES_MAX + 1))
        await producer.send(bytes(MESSAGE_BYTES_MAX + 1))
        stats = producer.get_stats()
        counts = stats.messages_sent, stats.messages_stored, stats.messages_failed
        assert counts == (2, 1, 1)
        assert stats.entries_sent == 4


async def test_flush_does_not_wait_for_a_refused_message() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC).send_errors.append(pb.NotAllowedError)
        producer = await client.create_producer("t", batching_enabled=False)
        producer.send_async(b"0", None)
        async with asyncio.timeout(5):
            with pytest.raises(NotAllowedError, match="scripted"):
                await producer.flush()


async def test_batch_that_is_too_large_when_it_is_encoded_is_divided() -> None:
    """Each message takes 3 bytes more than the builder counts, because it has an event time."""
    count = MESSAGE_BYTES_MAX // 5017
    async with client_among() as (client, cluster):
        producer = await client.create_producer(
            "t",
            batching_max_messages=2 * count,
            batching_max_allowed_size_in_bytes=2 * MESSAGE_BYTES_MAX,
            max_pending_messages=2 * count,
        )
        told: list[tuple[Result, MessageId]] = []
        for _ in range(count):
            producer.send_async(
                bytes(5000),
                lambda *outcome: told.append(outcome),
                partition_key="k",
                event_timestamp=1_700_000_000_000,
            )
        await producer.flush()
        assert {result for result, _ in told} == {Result.Ok}
        places = [(message_id.entry_id(), message_id.batch_index()) for _, message_id in told]
        half = count // 2
        assert places == [(0, at) for at in range(half)] + [(1, at) for at in range(count - half)]
        assert producer.get_stats().messages_sent == count
        assert [len(entry) < MESSAGE_BYTES_MAX for _, entry in cluster.sends] == [True, True]


class CountedWaiting(_Waiting):
    """A waiting send that counts its comparisons with other objects."""

    compared: ClassVar[int] = 0
    __hash__ = _Waiting.__hash__

    def __eq__(self, other: object) -> bool:
        CountedWaiting.compared += 1
        return self is other


async def test_cost_of_cancelled_sends_does_not_grow_with_the_waiting_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with client_among() as (client, cluster), asyncio.TaskGroup() as group:
        producer = await client.create_producer(
            "t", max_pending_messages=1, block_if_queue_full=True
        )
        cluster.topic(TOPIC).hold_receipts = True
        monkeypatch.setattr("magnetar.client.producer._Waiting", CountedWaiting)
        sends = [group.create_task(producer.send(b"%d" % number)) for number in range(500)]
        await settle()
        for send in reversed(sends[1:]):  # a TaskGroup, too, cancels its tasks in any order
            send.cancel()
        await asyncio.wait(sends[1:])
        assert CountedWaiting.compared < 500
        cluster.topic(TOPIC).hold_receipts = False
        cluster.brokers[A].sessions[0].stream.abort("connection lost")  # type: ignore[attr-defined]
        await sends[0]
        assert (await producer.send(b"next")).entry_id() > 0


async def test_refused_message_releases_the_limit_for_a_waiting_send() -> None:
    async def expect_too_big(producer: Producer, properties: dict[str, str]) -> None:
        with pytest.raises(MessageTooBig):
            await producer.send(bytes(3_000_000), properties)

    async with client_among() as (client, _):
        producer = await client.create_producer(
            "t",
            max_pending_messages=1,
            block_if_queue_full=True,
            batching_max_allowed_size_in_bytes=5_242_880,
        )
        wide = {"name": "\N{EURO SIGN}" * 1_500_000}  # three bytes each
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            first = group.create_task(expect_too_big(producer, wide))
            second = group.create_task(producer.send(b"x"))
        assert first.done()
        assert second.result() == MessageId(-1, 1, 0)


async def test_flush_reports_errors_of_earlier_messages_only() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC).hold_receipts = True
        producer = await client.create_producer("t", batching_enabled=False)
        (created,) = cluster.brokers[A].commands(pb.CommandProducer)
        told = Outcomes()
        producer.send_async(b"0", told)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(producer.flush())
            await settle()
            producer.send_async(b"1", told)
            await settle()
            stored = pb.MessageIdData(ledgerId=1, entryId=0)
            ids = {"producer_id": created.producer_id}
            session = cluster.brokers[A].sessions[0]
            session.send(pb.CommandSendReceipt(**ids, sequence_id=0, message_id=stored))
            error = pb.NotAllowedError
            session.send(pb.CommandSendError(**ids, sequence_id=1, error=error, message="no"))
        await first
        assert told.results == [Result.Ok, Result.NotAllowedError]


@pytest.mark.parametrize("batched", [False, True])
async def test_flush_reports_once_a_message_that_became_no_entry(batched: bool) -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t", batching_enabled=batched)
        producer.send_async(b"0", None)
        producer.send_async(bytes(5_242_881), None)
        producer.send_async(b"1", None)
        with pytest.raises(MessageTooBig):
            await producer.flush()
        await producer.flush()
        assert contents(cluster.topic(TOPIC)) == [[b"0"], [b"1"]]
        cluster.topic(TOPIC).send_errors.append(pb.ProducerFenced)
        with pytest.raises(ProducerFenced):
            await producer.send(b"2")
        producer.send_async(b"3", None)
        with pytest.raises(ProducerFenced):
            await producer.flush()


async def test_the_error_of_a_cancelled_flush_is_raised_by_the_next_one() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC).hold_receipts = True
        producer = await client.create_producer("t", batching_enabled=False)
        producer.send_async(bytes(MESSAGE_BYTES_MAX + 1), None)
        producer.send_async(b"0", None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await producer.flush()
        cluster.topic(TOPIC).hold_receipts = False
        producer.send_async(b"1", None)
        cluster.brokers[A].kill()
        cluster.take_over(B)
        with pytest.raises(MessageTooBig):
            await producer.flush()
        await producer.flush()


async def error_of_flush(producer: Producer) -> PulsarException | None:
    try:
        await producer.flush()
    except PulsarException as error:
        return error
    return None


@pytest.mark.parametrize("other", ["has raised", "waits", "is settled", "is cancelled, too"])
async def test_a_cancelled_flush_keeps_no_error_that_another_one_raises(other: str) -> None:
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC).hold_receipts = True
        producer = await client.create_producer("t", batching_enabled=False)
        (created,) = cluster.brokers[A].commands(pb.CommandProducer)
        ids = {"producer_id": created.producer_id}
        session = cluster.brokers[A].sessions[0]
        stored = pb.MessageIdData(ledgerId=1, entryId=1)
        receipt = pb.CommandSendReceipt(**ids, sequence_id=1, message_id=stored)
        error = pb.NotAllowedError
        refusal = pb.CommandSendError(**ids, sequence_id=0, error=error, message="no")
        producer.send_async(b"0", None)
        async with asyncio.TaskGroup() as group:
            if other == "has raised":
                first = group.create_task(error_of_flush(producer))
                await settle()
                producer.send_async(b"1", None)
            else:
                producer.send_async(b"1", None)
                first = group.create_task(error_of_flush(producer))
            cancelled = group.create_task(error_of_flush(producer))
            await settle()
            session.send(refusal)
            await settle()
            assert first.done() == (other == "has raised")
            if other == "is settled":
                publisher = producer._publisher
                assert isinstance(publisher, Publisher)
                publisher.on_receipts([1], 1, [1])
                publisher.on_frame_end()  # both calls are settled, and none has continued
            elif other == "is cancelled, too":
                first.cancel()
            cancelled.cancel()
            if other != "is settled":
                await settle()
                session.send(receipt)
        assert cancelled.cancelled()
        if other == "is cancelled, too":
            with pytest.raises(NotAllowedError):
                await producer.flush()
        else:
            assert isinstance(first.result(), NotAllowedError)
        await producer.flush()


async def test_a_cancelled_flush_of_partitions_keeps_the_error_of_one() -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        cluster.topic(f"{TOPIC}-partition-1").hold_receipts = True
        producer = await client.create_producer(
            "t", batching_enabled=False, message_router=lambda message, _: len(message.data()) == 1
        )
        producer.send_async(bytes(MESSAGE_BYTES_MAX + 1), None)
        producer.send_async(b"0", None)
        for _ in range(2):  # the error is kept each time
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await producer.flush()
        cluster.topic(f"{TOPIC}-partition-1").hold_receipts = False
        cluster.brokers[A].kill()
        cluster.take_over(B)
        with pytest.raises(MessageTooBig):
            await producer.flush()
        await producer.flush()


@pytest.mark.parametrize("other", ["raises", "is cancelled later"])
async def test_cancelled_flushes_of_partitions_report_an_error_once(other: str) -> None:
    """Two calls get the error of partition 0, and wait for partition 1. A cancelled call leaves the
    error to the other call."""
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = 2
        waits = cluster.topic(f"{TOPIC}-partition-1")
        waits.hold_receipts = True
        cluster.topic(f"{TOPIC}-partition-0").send_errors.append(pb.NotAllowedError)
        producer = await client.create_producer(
            "t", batching_enabled=False, message_router=lambda message, _: int(message.data())
        )
        producer.send_async(b"0", None)
        producer.send_async(b"1", None)
        async with asyncio.TaskGroup() as group:
            flushes = [group.create_task(error_of_flush(producer)) for _ in range(2)]
            await settle()
            flushes[0].cancel()
            await settle()
            flushes.append(group.create_task(error_of_flush(producer)))
            await settle()
            if other == "is cancelled later":
                flushes[1].cancel()
                await settle()
            assert not flushes[2].done()
            waits.hold_receipts = False
            cluster.brokers[A].kill()
            cluster.take_over(B)
        errors = [it.result() for it in flushes if not it.cancelled()]
        errors += [await error_of_flush(producer) for _ in range(2)]
        assert [type(it) for it in errors if it is not None] == [NotAllowedError]


async def test_persistence_error_attaches_again_and_resends() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC).send_errors += [pb.PersistenceError, pb.PersistenceError]
        producer = await client.create_producer("t", batching_enabled=False, producer_name="me")
        told = Outcomes()
        producer.send_async(b"0", told)
        producer.send_async(b"1", told)
        await producer.flush()
        assert told.results == [Result.Ok] * 2
        assert contents(cluster.topic(TOPIC)) == [[b"0"], [b"1"]]
        broker = cluster.brokers[A]
        assert [one.epoch for one in broker.commands(pb.CommandProducer)] == [0, 1]
        assert len(broker.commands(pb.CommandCloseProducer)) == 1


async def test_a_fenced_producer_refuses_further_sends() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC).send_errors.append(pb.ProducerFenced)
        producer = await client.create_producer("t")
        with pytest.raises(ProducerFenced):
            await producer.send(b"0")
        with pytest.raises(ProducerFenced):
            await producer.send(b"1")
        assert not producer.is_connected()


async def test_receipt_out_of_order_attaches_again() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t", batching_enabled=False)
        await producer.send(b"0")
        (created,) = cluster.brokers[A].commands(pb.CommandProducer)
        stray = pb.CommandSendReceipt(producer_id=created.producer_id, sequence_id=99)
        cluster.brokers[A].sessions[0].send(stray)
        await settle()
        assert not producer.is_connected()
        await producer.send(b"1")
        assert len(cluster.brokers[A].commands(pb.CommandProducer)) == 2


async def test_a_full_queue_refuses_or_waits() -> None:
    async with client_among() as (client, cluster):
        cluster.topic(TOPIC).hold_receipts = True
        refusing = await client.create_producer("t", max_pending_messages=2)
        told = Outcomes()
        for _ in range(3):
            refusing.send_async(b"x", told)
        assert told.results == [Result.ProducerQueueIsFull]
        with pytest.raises(ProducerQueueIsFull):
            await refusing.send(b"x")
        waiting = await client.create_producer(
            "u", max_pending_messages=2, block_if_queue_full=True
        )
        async with asyncio.TaskGroup() as group:
            sends = [group.create_task(waiting.send(b"%d" % i)) for i in range(7)]
        assert [send.result().batch_index() for send in sends] == [0, 1, 0, 1, 0, 1, -1]
        assert sum(map(len, contents(cluster.topic(TOPIC.replace("/t", "/u"))))) == 7


async def test_the_largest_message_is_sent_and_a_larger_one_refused() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t")
        await producer.send(bytes(5_242_880))
        with pytest.raises(MessageTooBig) as caught:
            await producer.send(bytes(5_242_881))
        assert (caught.value.size_bytes, caught.value.limit_bytes) == (5_242_881, 5_242_880)
        packed = await client.create_producer("t", compression_type=CompressionType.ZSTD)
        await packed.send(bytes(5_242_881))
        assert [len(one) for (one,) in contents(cluster.topic(TOPIC))] == [5_242_880, 5_242_881]


async def test_close_waits_for_receipts() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t")
        told = Outcomes()
        producer.send_async(b"x", told)
        await producer.close()
        assert told.results == [Result.Ok]
        assert len(cluster.brokers[A].commands(pb.CommandCloseProducer)) == 1
        producer.send_async(b"y", told)
        assert told.results == [Result.Ok, Result.AlreadyClosed]
        with pytest.raises(AlreadyClosed):
            await producer.send(b"z")
        with pytest.raises(AlreadyClosed):
            await producer.close()


async def test_closing_producer_that_the_broker_has_closed_does_not_attach_again() -> None:
    """A broker that hands the topic over closes the producers, and may answer late."""
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t")
        broker = cluster.brokers[A]
        broker.script(pb.CommandCloseProducer, None)
        async with asyncio.TaskGroup() as group:
            closing = group.create_task(producer.close())
            await settle()
            (asked,) = broker.commands(pb.CommandCloseProducer)
            session = broker.sessions[0]
            cluster.take_over(B)
            session.send(pb.CommandCloseProducer(producer_id=asked.producer_id, request_id=UNASKED))
            await asyncio.sleep(5)
            assert not closing.done()
            session.send(pb.CommandSuccess(request_id=asked.request_id))
        await settle()
        assert not cluster.brokers[B].commands(pb.CommandProducer)


async def test_close_of_a_producer_with_all_receipts_names_the_missing_answer() -> None:
    async with client_among(operation_timeout_seconds=2) as (client, cluster):
        producer = await client.create_producer("t")
        await producer.send(b"x")
        cluster.brokers[A].script(pb.CommandCloseProducer, None)
        with pytest.raises(
            Timeout, match="the answer to the request to close is missing after 2 s"
        ):
            await producer.close()


async def test_close_raises_timeout_after_the_operations_time() -> None:
    async with client_among(operation_timeout_seconds=3) as (client, cluster):
        producer = await client.create_producer("t")
        cluster.topic(TOPIC).hold_receipts = True
        told = Outcomes()
        producer.send_async(b"x", told)
        began = asyncio.get_running_loop().time()
        with pytest.raises(Timeout):
            await producer.close()
        assert asyncio.get_running_loop().time() - began == pytest.approx(3, abs=0.01)
        assert told.results == [Result.Interrupted]
        assert not Interrupted.definite


async def test_a_producer_attaches_to_the_broker_that_its_owner_names() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t")
        (created,) = cluster.brokers[A].commands(pb.CommandProducer)
        lookups = len(cluster.brokers[A].commands(pb.CommandLookupTopic))
        cluster.take_over(B)
        cluster.brokers[A].sessions[0].send(
            pb.CommandCloseProducer(
                producer_id=created.producer_id,
                request_id=2**64 - 1,
                assignedBrokerServiceUrl=B,
            )
        )
        await settle()
        began = asyncio.get_running_loop().time()
        await producer.send(b"x")
        assert asyncio.get_running_loop().time() - began < 0.1
        assert len(cluster.brokers[A].commands(pb.CommandLookupTopic)) == lookups
        assert len(cluster.brokers[B].commands(pb.CommandProducer)) == 1


def refusal(number: int) -> pb.CommandError:
    error = pb.CommandError(request_id=0, message="scripted")
    error.error = number  # type: ignore[assignment]
    return error


@pytest.mark.parametrize(
    ("number", "kind"),
    [(pb.ProducerBusy, ProducerBusy), (pb.NotAllowedError, NotAllowedError)],
)
async def test_creation_fails_with_a_final_error(number: int, kind: type[PulsarException]) -> None:
    async with client_among() as (client, cluster):
        cluster.brokers[A].script(pb.CommandProducer, refusal(number))
        with pytest.raises(kind, match="scripted"):
            await client.create_producer("t")
        await (await client.create_producer("t")).send(b"x")


async def test_creation_continues_after_temporary_errors() -> None:
    async with client_among() as (client, cluster):
        passing = [refusal(pb.ServiceNotReady), refusal(pb.MetadataError)]
        cluster.brokers[A].script(pb.CommandProducer, *passing)
        await (await client.create_producer("t")).send(b"x")


async def test_after_creation_only_fencing_is_final() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t", producer_name="me")
        cluster.brokers[A].kill()
        busy = [refusal(pb.ProducerBusy), refusal(pb.TopicNotFound), refusal(pb.ProducerFenced)]
        cluster.brokers[B].script(pb.CommandProducer, *busy)
        cluster.take_over(B)
        with pytest.raises(ProducerFenced):
            await producer.send(b"x")


async def test_creation_raises_timeout_after_the_operations_time() -> None:
    async with client_among(operation_timeout_seconds=3) as (client, cluster):
        cluster.brokers[A].script(pb.CommandProducer, None)
        began = asyncio.get_running_loop().time()
        with pytest.raises(Timeout, match=r"the broker did not answer within 3 s"):
            await client.create_producer("t")
        assert asyncio.get_running_loop().time() - began == pytest.approx(3, abs=0.01)
        await settle()
        # The broker may still create the producer, so the client closes it.
        assert len(cluster.brokers[A].commands(pb.CommandCloseProducer)) == 1
        for broker in cluster.brokers.values():
            broker.kill()
        with pytest.raises(ConnectError, match=r"[ab]:6660: connection .*[ab]:6660: connection"):
            await client.create_producer("t")


@pytest.mark.parametrize("partitions", [0, 2])
async def test_flush_of_a_producer_that_has_ended_raises_the_reason(partitions: int) -> None:
    async with client_among() as (client, cluster):
        cluster.partitions[TOPIC] = partitions
        producer = await client.create_producer("t", message_router=lambda *_: 1)
        topic = cluster.topic(f"{TOPIC}-partition-1" if partitions else TOPIC)
        topic.send_errors.append(pb.ProducerFenced)
        told: list[Result] = []
        producer.send_async(b"x", lambda result, _: told.append(result))
        await wait_until(lambda: told)
        assert told == [Result.ProducerFenced]
        with pytest.raises(ProducerFenced):
            await producer.flush()
        await producer.close()
        with pytest.raises(AlreadyClosed if partitions else ProducerFenced):
            await producer.flush()


async def test_queued_producer_waits_on_after_an_attempt_without_an_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with client_among() as (client, cluster), asyncio.TaskGroup() as group:
        queued = pb.CommandProducerSuccess(producer_name="p", producer_ready=False)
        cluster.brokers[A].script(pb.CommandProducer, queued, None)
        creating = group.create_task(
            client.create_producer("t", access_mode=ProducerAccessMode.WaitForExclusive)
        )
        await asyncio.sleep(100)
        assert not caplog.records, "a broker has answered"
        cluster.brokers[A].sessions[0].stream.abort("connection lost")  # type: ignore[attr-defined]
        producer = await creating
        assert len(cluster.brokers[A].commands(pb.CommandProducer)) == 3
        assert (await producer.send(b"x")).entry_id() == 0


async def test_invalid_producers_are_refused() -> None:
    async with client_among() as (client, cluster):
        with pytest.raises(InvalidTopicName):
            await client.create_producer("a/b")
        cluster.partitions[TOPIC] = 3
        assert await client.get_topic_partitions("t") == [
            f"{TOPIC}-partition-{number}" for number in range(3)
        ]
        assert await client.get_topic_partitions("u") == [TOPIC.replace("/t", "/u")]


async def test_sequence_ids_continue_after_the_given_ones() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t", initial_sequence_id=41)
        assert producer.last_sequence_id() == 41
        await producer.send(b"x")
        assert producer.last_sequence_id() == 42
        created = pb.CommandProducerSuccess(request_id=0, producer_name="me", last_sequence_id=9)
        cluster.brokers[A].script(pb.CommandProducer, created)
        again = await client.create_producer("t", producer_name="me")
        assert again.last_sequence_id() == 9


async def test_failed_callback_is_logged_and_does_not_disturb_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with client_among() as (client, _):
        producer = await client.create_producer("t")

        def fail(_: Result, __: MessageId | None) -> None:
            raise RuntimeError("the user's")

        told = Outcomes()
        producer.send_async(b"0", fail)
        producer.send_async(b"1", told)
        await producer.flush()
        assert told.results == [Result.Ok]
    assert "the user's" in caplog.text


async def test_a_cancelled_send_does_not_disturb_the_others() -> None:
    async with client_among() as (client, cluster):
        producer: Producer = await client.create_producer("t")
        first = asyncio.get_running_loop().create_task(producer.send(b"0"))
        await asyncio.sleep(0)
        first.cancel()
        await producer.send(b"1")
        assert [one for entry in contents(cluster.topic(TOPIC)) for one in entry] == [
            b"0",
            b"1",
        ]


async def test_a_backlog_limit_leaves_the_outcome_of_what_was_sent_before_unknown() -> None:
    async with client_among() as (client, cluster):
        producer = await client.create_producer("t", batching_enabled=False)
        cluster.topic(TOPIC).hold_receipts = True
        loop = asyncio.get_running_loop()
        sent = loop.create_task(producer.send(b"sent"))
        await settle()
        cluster.brokers[A].script(
            pb.CommandProducer,
            pb.CommandError(error=pb.ProducerBlockedQuotaExceededException, message="full"),
        )
        for session in cluster.brokers[A].sessions:
            session.stream.abort("lost")  # type: ignore[attr-defined]
        await settle()
        waiting = loop.create_task(producer.send(b"waiting"))
        for task, definite in ((sent, False), (waiting, True)):
            with pytest.raises(PulsarException) as caught:
                await task
            assert caught.value.definite is definite


async def test_a_callback_that_looks_cancelled_ends_neither_the_session_nor_other_sends() -> None:
    def fail(*_: object) -> None:
        raise asyncio.CancelledError

    async with client_among() as (client, cluster):
        producer = await client.create_producer("t", batching_max_publish_delay_ms=1000)
        producer.send_async(b"0", fail)
        assert await producer.send(b"1") == MessageId(-1, 1, 0, 1)
        assert await producer.send(b"2") == MessageId(-1, 1, 1)
        assert len(cluster.brokers[A].sessions) == 1

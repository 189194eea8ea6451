"""The promises of a client to producers and consumers: one function for each promise.

`tests/integration/test_cluster_features.py` tests each with our synchronous and our asyncio client.
Where Apache's client promises the same, one of the two publishes and the other consumes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from fakes.wire import WireClient, pulsar_wire
from support import wait_for

import magnetar
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import checksums_of
from magnetar.protos.message import EntryHeader, OutgoingMessage, encode_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TIMEOUT_MS = 30_000
QUIET_MS = 300
LONG_MS = 20_000  # a batching delay that no test waits for


@dataclass
class Pair:
    """A client that publishes, one that consumes, each with its module, and a topic for them."""

    senders: Any
    sender: Any
    module: Any
    client: Any
    topic: str
    admin: Callable[..., Any]
    owner_url: Callable[[str], str]  # the owner of a topic, for Pulsar's TCP protocol

    @property
    def is_ours(self) -> bool:
        return self.senders is magnetar and self.module is magnetar

    @property
    def path(self) -> str:
        return self.topic.replace("://", "/")

    def producer(self, topic: str | None = None, **options: Any) -> Any:
        options.setdefault("batching_enabled", False)
        return self.sender.create_producer(topic or self.topic, **options)

    def subscribe(
        self, name: str = "s", kind: str = "Exclusive", topic: Any = None, **options: Any
    ) -> Any:
        options.setdefault("initial_position", self.module.InitialPosition.Earliest)
        options["consumer_type"] = getattr(self.module.ConsumerType, kind)
        return self.client.subscribe(topic or self.topic, name, **options)

    def take(self, consumer: Any, count: int) -> list[Any]:
        return [consumer.receive(timeout_millis=TIMEOUT_MS) for _ in range(count)]

    def expect_none(self, consumer: Any) -> None:
        with pytest.raises(self.module.Timeout):
            consumer.receive(timeout_millis=QUIET_MS)

    def send_batch(self, *values: bytes, **options: Any) -> list[Any]:
        """Publish values in one entry, if `options` do not limit it. Returns their ids."""
        ids: list[Any] = []
        options = {"batching_max_publish_delay_ms": LONG_MS, "batching_max_messages": 100} | options
        producer = self.producer(batching_enabled=True, **options)
        for value in values:
            producer.send_async(value, lambda _, message_id: ids.append(message_id))
        producer.flush()
        producer.close()
        return ids

    def backlog(self, name: str = "s") -> int:
        stats = self.admin("GET", f"{self.path}/stats")
        return int(stats["subscriptions"][name]["msgBacklog"])


def data(messages: Sequence[Any]) -> list[bytes]:
    return [message.data() for message in messages]


def entries(ids: Sequence[Any]) -> list[int]:
    """The number of messages of each entry, in order."""
    return list(Counter((one.ledger_id(), one.entry_id()) for one in ids).values())


# Publishing


def a_full_queue_of_pending_messages_fails_a_send(pair: Pair) -> None:
    results: list[Any] = []
    producer = pair.producer(
        batching_enabled=True,
        batching_max_publish_delay_ms=LONG_MS,
        batching_max_messages=100,
        max_pending_messages=3,
    )
    for number in range(4):
        producer.send_async(b"%d" % number, lambda result, _: results.append(result))
    wait_for(lambda: results)
    assert [str(one) for one in results] == [str(pair.senders.Result.ProducerQueueIsFull)]
    producer.flush()
    wait_for(lambda: len(results) == 4)
    assert sorted(map(str, results))[:3] == [str(pair.senders.Result.Ok)] * 3
    producer.close()


def a_full_queue_of_pending_messages_blocks_if_asked_to(pair: Pair) -> None:
    producer = pair.producer(max_pending_messages=2, block_if_queue_full=True)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(producer.send, [b"%d" % number for number in range(40)]))
    got = pair.take(pair.subscribe(), 40)
    assert sorted(data(got)) == sorted(b"%d" % number for number in range(40))


def a_batch_ends_at_its_limits_and_counts_as_one_in_the_backlog(pair: Pair) -> None:
    consumer = pair.subscribe()
    values = [b"%d" % number for number in range(7)]
    assert entries(pair.send_batch(*values, batching_max_messages=3)) == [3, 3, 1]
    wait_for(lambda: pair.backlog() == 3)
    assert data(pair.take(consumer, 7)) == values
    large = [bytes(400)] * 6
    ids = pair.send_batch(*large, batching_max_allowed_size_in_bytes=1000)
    assert len(entries(ids)) >= 2
    pair.take(consumer, 6)
    consumer.close()


def a_batch_is_sent_when_its_delay_has_passed(pair: Pair) -> None:
    ids: list[Any] = []
    producer = pair.producer(
        batching_enabled=True, batching_max_publish_delay_ms=1_000, batching_max_messages=100
    )
    began = time.monotonic()
    for value in (b"1", b"2", b"3"):
        producer.send_async(value, lambda _, message_id: ids.append(message_id))
    wait_for(lambda: len(ids) == 3)
    assert time.monotonic() - began >= 0.9
    assert entries(ids) == [3]
    producer.close()


def a_synchronous_send_does_not_wait_for_the_batching_delay(pair: Pair) -> None:
    producer = pair.producer(batching_enabled=True, batching_max_publish_delay_ms=LONG_MS)
    began = time.monotonic()
    producer.send(b"x")
    assert time.monotonic() - began < LONG_MS / 2000
    producer.close()


def a_delayed_message_travels_alone(pair: Pair) -> None:
    ids: dict[bytes, Any] = {}
    producer = pair.producer(batching_enabled=True, batching_max_publish_delay_ms=100)
    for value, delay in ((b"a", None), (b"b", timedelta(milliseconds=50)), (b"c", None)):
        producer.send_async(
            value,
            lambda _, message_id, value=value: ids.update({value: message_id}),
            deliver_after=delay,
        )
    producer.flush()
    producer.close()
    assert ids[b"b"].batch_index() == -1
    assert ids[b"b"].entry_id() not in (ids[b"a"].entry_id(), ids[b"c"].entry_id())
    consumer = pair.subscribe(kind="Shared")
    assert sorted(data(pair.take(consumer, 3))) == [b"a", b"b", b"c"]


def sequence_ids_are_the_programs_or_counted(pair: Pair) -> None:
    """A sequence id that the program sets does not change the client's own count."""
    producer = pair.producer(producer_name="p")
    last = [producer.last_sequence_id()]
    for given in (7, None, None, 20, None):
        options = {} if given is None else {"sequence_id": given}
        producer.send(b"x", **options)
        last.append(producer.last_sequence_id())
    assert last == [-1, 7, 0, 1, 20, 2]
    producer.close()


def a_schemas_version_travels_with_the_message(pair: Pair) -> None:
    producer = pair.producer(schema=pair.senders.schema.StringSchema())
    producer.send("text")
    producer.close()
    consumer = pair.subscribe(schema=pair.module.schema.StringSchema())
    (message,) = pair.take(consumer, 1)
    assert message.value() == "text"
    assert message.schema_version()


# Routing


def keyless_messages_go_round_by_batches(pair: Pair) -> None:
    pair.admin("PUT", f"{pair.path}/partitions", 3)
    ids = pair.send_batch(*[b"x"] * 12, batching_max_messages=4)
    places = Counter(one.partition() for one in ids)
    assert sorted(places.values()) == [4, 4, 4]


def single_routing_chooses_one_partition(pair: Pair) -> None:
    pair.admin("PUT", f"{pair.path}/partitions", 3)
    mode = pair.senders.PartitionsRoutingMode.UseSinglePartition
    producer = pair.producer(message_routing_mode=mode)
    ids = [producer.send(b"%d" % number) for number in range(10)]
    assert len({one.partition() for one in ids}) == 1
    assert data(pair.take(pair.subscribe(), 10)) == [b"%d" % number for number in range(10)]


def a_custom_router_chooses_the_partition(pair: Pair) -> None:
    pair.admin("PUT", f"{pair.path}/partitions", 3)
    mode = pair.senders.PartitionsRoutingMode.CustomPartition
    producer = pair.producer(
        message_routing_mode=mode,
        message_router=lambda message, count: int(message.data()) % count,
    )
    ids = [producer.send(b"%d" % number) for number in range(6)]
    assert [one.partition() for one in ids] == [0, 1, 2, 0, 1, 2]


def a_key_has_one_partition_by_each_hash(pair: Pair) -> None:
    """The numbers are those of Java's String.hashCode and of Murmur3: index modulo 5."""
    pair.admin("PUT", f"{pair.path}/partitions", 5)
    for scheme, expected in (("JavaStringHash", [1, 2, 3]), ("Murmur3_32Hash", None)):
        producer = pair.producer(hashing_scheme=getattr(magnetar.HashingScheme, scheme))
        keys = ["Order-3459134", "hello", "key-1"]
        places = [producer.send(b"x", partition_key=key).partition() for key in keys]
        assert [producer.send(b"x", partition_key=key).partition() for key in keys] == places
        assert places == (expected or [2, 1, 2])


def messages_arrive_in_the_order_that_their_routing_promises(pair: Pair) -> None:
    """The messages of a key are in order in each mode. Messages without a key are in order if the
    producer uses one partition. Otherwise only the messages of each partition are in order."""
    pair.admin("PUT", f"{pair.path}/partitions", 3)
    consumer = pair.subscribe()
    modes = pair.senders.PartitionsRoutingMode
    for mode in (modes.UseSinglePartition, modes.RoundRobinDistribution):
        for keys in ([f"k{number}" for number in range(6)], [""]):
            _publish_keyed(pair, keys, message_routing_mode=mode)
            got = pair.take(consumer, 60)
            numbers: dict[str, list[int]] = {}
            places: dict[str, set[str]] = {}
            for message in got:
                consumer.acknowledge(message)
                ordered = mode == modes.UseSinglePartition or keys != [""]
                group = message.partition_key() if ordered else message.topic_name()
                numbers.setdefault(group, []).append(int(message.data()))
                places.setdefault(group, set()).add(message.topic_name())
            assert all(each == sorted(each) for each in numbers.values())
            assert {len(each) for each in places.values()} == {1}
            used = set().union(*places.values())
            assert (len(used) == 1) is (mode == modes.UseSinglePartition and keys == [""])
            assert sorted(chain(*numbers.values())) == list(range(60))


def _publish_keyed(pair: Pair, keys: Sequence[str], **options: Any) -> None:
    """Publish numbers whose keys take turns, in batches."""
    producer = pair.producer(batching_enabled=True, batching_max_messages=5, **options)
    for number in range(60):
        key = keys[number % len(keys)]
        producer.send_async(b"%d" % number, None, partition_key=key or None)
    producer.flush()
    producer.close()


# Receiving


def a_queue_size_bounds_what_one_consumer_gets(pair: Pair) -> None:
    small = pair.subscribe(kind="Shared", receiver_queue_size=2)
    producer = pair.producer()
    producer.send(b"0")
    (first,) = pair.take(small, 1)  # the consumer has its permits
    other = pair.subscribe(kind="Shared")
    for number in range(1, 10):
        producer.send(b"%d" % number)
    for message in pair.take(other, 7):  # the small queue holds two at most
        other.acknowledge(message)
    small.acknowledge(first)
    small.close()
    pair.take(other, 2)
    pair.expect_none(other)


def a_batch_receive_ends_at_its_limits(pair: Pair) -> None:
    """The limits are a number of messages, and a time if fewer messages came."""
    policy = pair.module.ConsumerBatchReceivePolicy
    producer = pair.producer()
    for number in range(5):
        producer.send(b"%d" % number)
    for limits, expected in (((3, -1, LONG_MS), [b"0", b"1", b"2"]), ((100, -1, 500), None)):
        consumer = pair.subscribe(f"of-{limits[0]}", batch_receive_policy=policy(*limits))
        got = data(consumer.batch_receive())
        while expected is None and len(got) < 5:  # the time passed before all had come
            got += data(consumer.batch_receive())
        assert got == (expected or [b"0", b"1", b"2", b"3", b"4"])
        consumer.close()


def cumulative_acknowledgement_covers_all_before_and_needs_one_consumer(pair: Pair) -> None:
    producer = pair.producer()
    for number in range(5):
        producer.send(b"%d" % number)
    for kind in ("Exclusive", "Failover"):
        consumer = pair.subscribe(kind, kind)
        consumer.acknowledge_cumulative(pair.take(consumer, 5)[2])
        consumer.close()
        again = pair.subscribe(kind, kind)
        assert data(pair.take(again, 2)) == [b"3", b"4"]
    for kind in ("Shared", "KeyShared"):
        consumer = pair.subscribe(kind, kind)
        with pytest.raises(Exception, match=r"(?i)cumulative"):
            consumer.acknowledge_cumulative(pair.take(consumer, 1)[0])


def each_subscription_keeps_a_message_until_it_acknowledges_it(pair: Pair) -> None:
    one, two = pair.subscribe("one"), pair.subscribe("two")
    pair.producer().send(b"x")
    one.acknowledge(pair.take(one, 1)[0])
    one.close()
    two.close()
    again = pair.subscribe("one")
    pair.expect_none(again)
    assert data(pair.take(pair.subscribe("two"), 1)) == [b"x"]


def a_negative_acknowledgement_redelivers_by_type(pair: Pair) -> None:
    """Exclusive and Failover begin again with the first unacknowledged message. The other types
    redeliver only the requested message."""
    producer = pair.producer()
    for number in range(3):
        producer.send(b"%d" % number, partition_key="k")
    for kind in ("Exclusive", "Failover", "Shared", "KeyShared"):
        consumer = pair.subscribe(kind, kind, negative_ack_redelivery_delay_ms=100)
        first, second, third = pair.take(consumer, 3)
        consumer.acknowledge(first)
        consumer.negative_acknowledge(second)
        again = [b"1", b"2"] if kind in ("Exclusive", "Failover") else [b"1"]
        assert data(pair.take(consumer, len(again))) == again
        pair.expect_none(consumer)
        consumer.acknowledge(third)
        consumer.close()


def a_batch_comes_again_as_a_whole_without_acknowledgements_of_its_parts(pair: Pair) -> None:
    pair.send_batch(b"1", b"2", b"3")
    options: dict[str, Any] = {
        "batch_index_ack_enabled": False,
        "negative_ack_redelivery_delay_ms": 100,
    }
    consumer = pair.subscribe(kind="Shared", **options)
    first, second, third = pair.take(consumer, 3)
    consumer.negative_acknowledge(second)
    again = pair.take(consumer, 3)
    assert data(again) == [b"1", b"2", b"3"]
    consumer.acknowledge(again[0])
    consumer.close()
    consumer = pair.subscribe(kind="Shared", **options)
    again = pair.take(consumer, 3)
    for message in again:
        consumer.acknowledge(message)
    consumer.close()
    wait_for(lambda: pair.backlog() == 0)
    assert {first.data(), third.data()} == {b"1", b"3"}


def a_part_of_a_batch_is_acknowledged(pair: Pair) -> None:
    pair.send_batch(b"1", b"2", b"3")
    consumer = pair.subscribe(kind="Shared", batch_index_ack_enabled=True)
    consumer.acknowledge(pair.take(consumer, 3)[1])
    consumer.close()
    consumer = pair.subscribe(kind="Shared", batch_index_ack_enabled=True)
    assert data(pair.take(consumer, 2)) == [b"1", b"3"]
    pair.expect_none(consumer)


def a_negatively_acknowledged_message_comes_after_the_delay(pair: Pair) -> None:
    pair.producer().send(b"x")
    for delay_ms in (300, 900):
        name = f"after-{delay_ms}"
        consumer = pair.subscribe(name, "Shared", negative_ack_redelivery_delay_ms=delay_ms)
        (message,) = pair.take(consumer, 1)
        began = time.monotonic()
        consumer.negative_acknowledge(message)
        (again,) = pair.take(consumer, 1)
        assert time.monotonic() - began >= delay_ms / 1000 * 0.8  # ours: at most 50 ms early
        assert again.message_id() == message.message_id()
        consumer.close()


def the_delay_of_negative_acknowledgements_grows(pair: Pair) -> None:
    backoff = magnetar.MultiplierRedeliveryBackoff(100, 400, 2)
    consumer = pair.subscribe(kind="Shared", negative_ack_redelivery_backoff=backoff)
    pair.producer().send(b"x")
    for delay_s in (0.1, 0.2, 0.4, 0.4):
        (message,) = pair.take(consumer, 1)
        began = time.monotonic()
        consumer.negative_acknowledge(message)
        (again,) = pair.take(consumer, 1)
        assert time.monotonic() - began >= delay_s * 0.9
        assert again.redelivery_count() == message.redelivery_count() + 1
        consumer.redeliver_unacknowledged_messages()


def unacknowledged_messages_come_again_after_the_ack_timeout(pair: Pair) -> None:
    """The order also holds with a growing delay, and before messages become dead letters. A
    negative acknowledgement ends the ack timeout. Its default delay is a minute."""
    options: dict[str, Any] = {"unacked_messages_timeout_ms": 10_000}
    plain = pair.subscribe("plain", "Shared", **options)
    returning = pair.subscribe("returning", "Shared", **options)
    policy = pair.module.ConsumerDeadLetterPolicy(1, initial_subscription_name="keep")
    dying = pair.subscribe("dying", "Shared", dead_letter_policy=policy, **options)
    without = pair.subscribe("without", "Shared", dead_letter_policy=policy)
    growing: Any = None  # Apache's client has no such backoff
    if pair.module is magnetar:
        backoff = magnetar.MultiplierRedeliveryBackoff(1_000, 60_000)
        growing = pair.subscribe(
            "growing",
            "Shared",
            ack_timeout_redelivery_backoff=backoff,
            ack_timeout_tick_ms=100,
            **options,
        )
    pair.producer().send(b"x")
    began = time.monotonic()
    for consumer in filter(None, (plain, dying, without, growing)):
        pair.take(consumer, 1)
    returning.negative_acknowledge(pair.take(returning, 1)[0])
    (again,) = pair.take(plain, 1)
    assert again.redelivery_count() == 1
    assert time.monotonic() - began >= 9.0  # the topic is checked every second
    plain.acknowledge(again)
    (last,) = pair.take(dying, 1)
    assert last.redelivery_count() == 1
    if growing is not None:
        pair.take(growing, 1)
        assert time.monotonic() - began >= 10.8
    pair.expect_none(without)  # a dead-letter policy does not set an ack timeout
    pair.expect_none(returning)


def a_pattern_receives_the_first_message_of_new_topics(pair: Pair) -> None:
    """Only topics of the pattern's namespace match."""
    consumer = pair.subscribe(topic=re.compile(f"{pair.topic}-.*"), pattern_auto_discovery_period=1)
    name = pair.topic.rpartition("/")[2]
    pair.producer(f"persistent://public/default/{name}-a").send(b"of another namespace")
    for letter in "ab":
        pair.producer(f"{pair.topic}-{letter}").send(b"first")
        (message,) = pair.take(consumer, 1)
        assert (message.data(), message.topic_name()) == (b"first", f"{pair.topic}-{letter}")
        consumer.acknowledge(message)
    pair.expect_none(consumer)
    consumer.close()


# Chunks


def incomplete_chunked_messages_are_bounded_and_expire(pair: Pair) -> None:
    """Three messages never get their last chunk: the oldest one exceeds the limit of two."""
    options: dict[str, Any] = {
        "max_pending_chunked_message": 2,
        "auto_ack_oldest_chunked_message_on_queue_full": True,
        "expire_time_of_incomplete_chunked_message_ms": 1_000,
    }
    consumer = pair.subscribe(**options)
    asyncio.run(publish_first_chunks(pair.owner_url(pair.topic), pair.topic, 3))
    pair.producer().send(b"whole")
    (message,) = pair.take(consumer, 1)
    assert message.data() == b"whole"
    wait_for(lambda: consumer.get_stats().chunked_given_up == 3)
    consumer.acknowledge(message)
    consumer.close()
    wait_for(lambda: pair.backlog() == 0)


def incomplete_chunked_messages_beyond_the_limit_stay_unacknowledged(pair: Pair) -> None:
    """The option `auto_ack_oldest_chunked_message_on_queue_full` is off."""
    consumer = pair.subscribe(max_pending_chunked_message=1)
    asyncio.run(publish_first_chunks(pair.owner_url(pair.topic), pair.topic, 2))
    pair.producer().send(b"whole")
    (message,) = pair.take(consumer, 1)
    assert message.data() == b"whole"
    consumer.acknowledge(message)
    wait_for(lambda: pair.backlog() == 2)
    consumer.close()
    assert pair.backlog() == 2


async def publish_first_chunks(url: str, topic: str, count: int) -> None:
    """Publish the first of two chunks of `count` messages, like a producer that dies."""
    async with pulsar_wire(urlsplit(url).netloc) as wire:
        await wire.produce(topic, producer_name="dies")
        for number in range(count):
            await _send_chunk(wire, number)


async def _send_chunk(wire: WireClient, number: int) -> None:
    header = EntryHeader("dies", 1_700_000_000_000)
    message = OutgoingMessage(b"12345678", number)
    first, _ = encode_chunks(message, header, uuid=f"u{number}", chunk_bytes_max=4)
    entry = b"".join(first)
    body = pb.CommandSend(producer_id=1, sequence_id=number, is_chunk=True)
    await wire.wire.send(b"".join(framing.encode_payload_command(body, [entry])))
    await wire.expect(pb.CommandSendReceipt)


def chunks_need_single_messages(pair: Pair) -> None:
    with pytest.raises(Exception, match=r"(?i)batch|chunk"):
        pair.producer(batching_enabled=True, chunking_enabled=True)


def chunks_need_a_persistent_topic(pair: Pair) -> None:
    producer = pair.producer(
        pair.topic.replace("persistent://", "non-persistent://", 1), chunking_enabled=True
    )
    with pytest.raises(pair.senders.MessageTooBig):
        producer.send(bytes(6 << 20))
    producer.close()


# What cannot be read


def a_corrupt_message_is_left_out_and_the_next_one_arrives(pair: Pair) -> None:
    """The client reports the message to the broker, which acknowledges it. Our client also counts
    it."""
    consumer = pair.subscribe()
    asyncio.run(_publish_corrupt(pair.owner_url(pair.topic), pair.topic))
    pair.producer().send(b"whole")
    (message,) = pair.take(consumer, 1)
    assert message.data() == b"whole"
    if pair.module is magnetar:
        assert consumer.get_stats().corrupt == 1
    consumer.acknowledge(message)
    wait_for(lambda: pair.backlog() == 0)
    consumer.close()


def a_corrupt_message_fails_a_receive_if_asked_to(pair: Pair) -> None:
    consumer = pair.subscribe(decode_failure_action=magnetar.ConsumerDecodeFailureAction.FAIL)
    asyncio.run(_publish_corrupt(pair.owner_url(pair.topic), pair.topic))
    with pytest.raises(magnetar.InvalidMessage, match="LZ4"):
        consumer.receive(timeout_millis=TIMEOUT_MS)
    pair.producer().send(b"whole")
    (message,) = pair.take(consumer, 1)
    assert message.data() == b"whole"
    consumer.acknowledge(message)
    consumer.close()
    assert pair.backlog() == 1


async def _publish_corrupt(url: str, topic: str) -> None:
    """Publish a message with wrong metadata, which the broker cannot detect."""
    async with pulsar_wire(urlsplit(url).netloc) as wire:
        await wire.produce(topic, producer_name="lies")
        metadata = pb.MessageMetadata(
            producer_name="lies",
            sequence_id=0,
            publish_time=1_700_000_000_000,
            compression=pb.LZ4,
            uncompressed_size=20,
        ).SerializeToString()
        body = len(metadata).to_bytes(4) + metadata + b"this is no LZ4 block"
        entry = b"\x0e\x01" + checksums_of([bytes(6) + body])[0].to_bytes(4) + body
        command = pb.CommandSend(producer_id=1, sequence_id=0)
        await wire.wire.send(b"".join(framing.encode_payload_command(command, [entry])))
        await wire.expect(pb.CommandSendReceipt)


def payloads_are_encrypted_and_a_failure_follows_its_action(pair: Pair) -> None:
    actions = pair.module.ConsumerCryptoFailureAction
    discards = pair.subscribe("discards", crypto_failure_action=actions.DISCARD)
    consumes = pair.subscribe("consumes", crypto_failure_action=actions.CONSUME)
    with TemporaryDirectory() as directory:
        paths = _written_keys(Path(directory))
        reads = pair.subscribe(crypto_key_reader=pair.module.CryptoKeyReader(*paths))
        reader = pair.senders.CryptoKeyReader(*paths)
        producer = pair.producer(encryption_key="k", crypto_key_reader=reader)
        producer.send(b"secret")
        (message,) = pair.take(reads, 1)
    assert message.data() == b"secret"
    pair.producer().send(b"in the clear")
    assert data(pair.take(discards, 1)) == [b"in the clear"]
    first, second = pair.take(consumes, 2)
    assert first.encryption_context().is_decryption_failed()
    assert (b"secret" in first.data(), second.data()) == (False, b"in the clear")
    wait_for(lambda: pair.backlog("discards") == 1)
    if pair.module is magnetar:
        fails = pair.subscribe("fails")
        with pytest.raises(magnetar.CryptoError):
            fails.receive(timeout_millis=TIMEOUT_MS)
        fails.close()
        assert pair.backlog("fails") == 2


def _written_keys(directory: Path) -> tuple[str, str]:
    """The files of a public and a private key."""
    key = rsa.generate_private_key(65537, 2048)
    public, private = directory / "public.pem", directory / "private.pem"
    public.write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return str(public), str(private)


# Dead letters and retries


def a_dead_letter_keeps_what_its_message_had(pair: Pair) -> None:
    """The promise holds for both types. The producer's name, and the topic and id of the message,
    are as in Apache's Java client."""
    sent = pair.producer().send(
        b"x", {"a": "1"}, partition_key="k", ordering_key="o", event_timestamp=5
    )
    origin = f"{sent.ledger_id()}:{sent.entry_id()}:-1"
    for kind in ("Shared", "KeyShared"):
        policy = pair.module.ConsumerDeadLetterPolicy(1, initial_subscription_name="keep")
        consumer = pair.subscribe(
            kind,
            kind,
            consumer_name="c",
            dead_letter_policy=policy,
            negative_ack_redelivery_delay_ms=100,
        )
        for count in range(2):
            (message,) = pair.take(consumer, 1)
            assert message.redelivery_count() == count
            consumer.negative_acknowledge(message)
        dead = pair.subscribe("keep", topic=f"{pair.topic}-{kind}-DLQ")
        (letter,) = pair.take(dead, 1)
        assert (letter.data(), letter.partition_key()) == (b"x", "k")
        properties = letter.properties()
        assert properties["a"] == "1"
        assert properties["REAL_TOPIC"] == pair.topic
        assert "ORIGIN_MESSAGE_ID" in properties
        if pair.module is magnetar:  # Apache's Java client does the same
            assert properties["ORIGIN_MESSAGE_ID"] == origin
            assert (letter.ordering_key(), letter.event_timestamp()) == ("o", 5)
            name = letter.producer_name()
            assert name.startswith(f"{pair.topic}-{kind}-c-")
            assert name.endswith("-DLQ")
        pair.expect_none(consumer)
        consumer.close()
        wait_for(lambda: pair.backlog(kind) == 0)  # noqa: B023 - called in this turn


def letter_topics_with_the_old_names_are_used_if_they_exist(pair: Pair) -> None:
    namespace, _, name = pair.topic.rpartition("/")
    subscription = f"old-{name}"
    retry, dead = (f"{namespace}/{subscription}-{end}" for end in ("RETRY", "DLQ"))
    for topic in (retry, dead):
        pair.producer(topic).close()
    consumer = pair.subscribe(
        subscription,
        "Shared",
        enable_retry=True,
        dead_letter_policy=magnetar.ConsumerDeadLetterPolicy(1),
    )
    inspecting = pair.subscribe("inspect", topic=dead)
    pair.producer().send(b"x", ordering_key="o")
    consumer.reconsume_later(pair.take(consumer, 1)[0], timedelta(0), {"b": "2"})
    (copy,) = pair.take(consumer, 1)
    assert copy.topic_name() == retry
    consumer.reconsume_later(copy, timedelta(0))
    (letter,) = pair.take(inspecting, 1)
    assert (letter.ordering_key(), letter.properties()["b"]) == ("o", "2")


def letter_topics_may_be_named(pair: Pair) -> None:
    policy = magnetar.ConsumerDeadLetterPolicy(
        1, f"{pair.topic}-dead", "keep", retry_letter_topic=f"{pair.topic}-again"
    )
    consumer = pair.subscribe(kind="Shared", enable_retry=True, dead_letter_policy=policy)
    pair.producer().send(b"x")
    consumer.reconsume_later(pair.take(consumer, 1)[0], timedelta(0))
    (copy,) = pair.take(consumer, 1)
    assert copy.topic_name() == f"{pair.topic}-again"
    consumer.reconsume_later(copy, timedelta(0))
    assert data(pair.take(pair.subscribe("keep", topic=f"{pair.topic}-dead"), 1)) == [b"x"]


def a_postponed_message_outlives_its_consumer(pair: Pair) -> None:
    """The delay is stored. The delay of a negative acknowledgement, in contrast, ends with its
    consumer."""
    consumer = pair.subscribe(kind="Shared", enable_retry=True)
    pair.producer().send(b"x")
    (message,) = pair.take(consumer, 1)
    began = time.monotonic()
    consumer.reconsume_later(message, timedelta(seconds=2))
    consumer.close()
    again = pair.subscribe(kind="Shared", enable_retry=True)
    (copy,) = pair.take(again, 1)
    assert time.monotonic() - began >= 0.9  # brokers deliver up to a second early
    assert copy.properties()["RECONSUMETIMES"] == "1"
    assert copy.properties()["DELAY_TIME"] == "2000"
    again.acknowledge(copy)


def a_dead_letter_topic_without_permission_for_subscriptions_keeps_the_message(pair: Pair) -> None:
    """`initial_subscription_name` is set, but the namespace forbids clients to create
    subscriptions: the producer of the letters fails, and the message stays."""
    policy = pair.module.ConsumerDeadLetterPolicy(1, initial_subscription_name="keep")
    consumer = pair.subscribe(
        kind="Shared", dead_letter_policy=policy, negative_ack_redelivery_delay_ms=100
    )
    namespace = "namespaces/" + pair.path.removeprefix("persistent/").rpartition("/")[0]
    no = {"allowAutoSubscriptionCreation": False}
    pair.admin("POST", f"{namespace}/autoSubscriptionCreation", no)
    try:
        pair.producer().send(b"x")
        for _ in range(2):
            consumer.negative_acknowledge(pair.take(consumer, 1)[0])
        with suppress(pair.module.Timeout):  # Apache's client delivers it again
            consumer.receive(timeout_millis=QUIET_MS)
        assert pair.backlog() == 1
    finally:
        pair.admin("DELETE", f"{namespace}/autoSubscriptionCreation")
    consumer.close()


PROMISES = [
    a_full_queue_of_pending_messages_fails_a_send,
    a_full_queue_of_pending_messages_blocks_if_asked_to,
    a_batch_ends_at_its_limits_and_counts_as_one_in_the_backlog,
    a_batch_is_sent_when_its_delay_has_passed,
    a_delayed_message_travels_alone,
    sequence_ids_are_the_programs_or_counted,
    a_schemas_version_travels_with_the_message,
    keyless_messages_go_round_by_batches,
    single_routing_chooses_one_partition,
    a_custom_router_chooses_the_partition,
    messages_arrive_in_the_order_that_their_routing_promises,
    a_queue_size_bounds_what_one_consumer_gets,
    a_batch_receive_ends_at_its_limits,
    cumulative_acknowledgement_covers_all_before_and_needs_one_consumer,
    each_subscription_keeps_a_message_until_it_acknowledges_it,
    a_negative_acknowledgement_redelivers_by_type,
    a_negatively_acknowledged_message_comes_after_the_delay,
    a_batch_comes_again_as_a_whole_without_acknowledgements_of_its_parts,
    a_part_of_a_batch_is_acknowledged,
    incomplete_chunked_messages_beyond_the_limit_stay_unacknowledged,
    chunks_need_single_messages,
    chunks_need_a_persistent_topic,
    a_corrupt_message_is_left_out_and_the_next_one_arrives,
    payloads_are_encrypted_and_a_failure_follows_its_action,
    a_dead_letter_keeps_what_its_message_had,
    a_dead_letter_topic_without_permission_for_subscriptions_keeps_the_message,
]

OUR_PROMISES = [
    a_synchronous_send_does_not_wait_for_the_batching_delay,
    a_key_has_one_partition_by_each_hash,
    the_delay_of_negative_acknowledgements_grows,
    a_pattern_receives_the_first_message_of_new_topics,
    incomplete_chunked_messages_are_bounded_and_expire,
    a_corrupt_message_fails_a_receive_if_asked_to,
    letter_topics_with_the_old_names_are_used_if_they_exist,
    letter_topics_may_be_named,
    a_postponed_message_outlives_its_consumer,
]
"""Apache's Python client has these features under other names, with other times or not at all."""

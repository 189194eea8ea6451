"""The uses of our client that must succeed with any broker, over any transport: one function for
each.

`tests/integration/test_transports.py` runs them against Magnetar, with the synchronous and the
asyncio client over both transports. `tests/apache` runs them against a real Apache Pulsar. Each
function gets its own topic.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import magnetar
import magnetar.asyncio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

RECEIVE_MS = 30_000
QUIET_MS = 300
EARLIEST = magnetar.InitialPosition.Earliest
SHARED = magnetar.ConsumerType.Shared


@dataclass
class Place:
    """A broker, a client of it, and a topic that nothing else uses."""

    client: magnetar.Client
    service_url: str
    topic: str
    make_partitioned: Callable[[str, int], None]


def sent(
    client: magnetar.Client, topic: str, values: Iterable[bytes], **options: Any
) -> list[magnetar.MessageId]:
    """Publish `values`, batched if `options` do not say otherwise. Returns the ids."""
    ids: list[magnetar.MessageId] = []

    def note(result: magnetar.Result, message_id: magnetar.MessageId | None) -> None:
        assert message_id is not None, result
        ids.append(message_id)

    with client.create_producer(topic, **options) as producer:
        for value in values:
            producer.send_async(value, note)
        producer.flush()
    return ids


def take(source: Any, count: int) -> list[magnetar.Message]:
    receive = source.receive if hasattr(source, "receive") else source.read_next
    return [receive(RECEIVE_MS) for _ in range(count)]


def data(messages: Iterable[magnetar.Message]) -> list[bytes]:
    return [message.data() for message in messages]


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def expect_none(consumer: magnetar.Consumer) -> None:
    with pytest.raises(magnetar.Timeout):
        consumer.receive(QUIET_MS)


def fields_of_a_message(place: Place) -> None:
    consumer = place.client.subscribe(place.topic, "s", initial_position=EARLIEST)
    with place.client.create_producer(place.topic, producer_name="p") as producer:
        message_id = producer.send(
            b"x", {"a": "1"}, partition_key="k", ordering_key="o", event_timestamp=7
        )
    message = consumer.receive(RECEIVE_MS)
    assert message.message_id() == message_id
    assert message.data() == b"x"
    assert message.properties() == {"a": "1"}
    assert (message.partition_key(), message.ordering_key()) == ("k", "o")
    assert message.event_timestamp() == 7
    assert message.producer_name() == "p"
    assert message.redelivery_count() == 0
    consumer.acknowledge(message)
    consumer.close()


def exclusive_keeps_order_and_resumes(place: Place) -> None:
    consumer = place.client.subscribe(place.topic, "s", initial_position=EARLIEST)
    with pytest.raises(magnetar.ConsumerBusy):
        place.client.subscribe(place.topic, "s")
    sent(place.client, place.topic, numbers(100), batching_max_messages=7)
    messages = take(consumer, 60)
    assert data(messages) == numbers(100)[:60]
    consumer.acknowledge_cumulative(messages[48])  # message 49 ends a batch
    consumer.close()
    consumer = place.client.subscribe(place.topic, "s")
    assert data(take(consumer, 51)) == numbers(100)[49:]
    expect_none(consumer)
    consumer.unsubscribe()


def shared_divides_and_redelivers(place: Place) -> None:
    options: dict[str, Any] = {"consumer_type": SHARED, "negative_ack_redelivery_delay_ms": 100}
    one, two = (place.client.subscribe(place.topic, "s", **options) for _ in range(2))
    sent(place.client, place.topic, numbers(40), batching_enabled=False)
    got: list[bytes] = []
    first = take(one, 1)[0]
    for consumer in (two, one):  # brokers divide in different ways
        while len(got) < 39:
            try:
                message = consumer.receive(QUIET_MS if consumer is two else RECEIVE_MS)
            except magnetar.Timeout:
                break
            consumer.acknowledge(message)
            got.append(message.data())
    assert sorted([first.data(), *got]) == sorted(numbers(40))
    two.close()
    one.negative_acknowledge(first)
    again = one.receive(RECEIVE_MS)
    assert again.data() == first.data()
    assert again.redelivery_count() == 1
    one.acknowledge(again)
    one.close()


def failover_continues_after_the_acknowledged(place: Place) -> None:
    def joined(name: str) -> magnetar.Consumer:
        return place.client.subscribe(
            place.topic,
            "s",
            consumer_type=magnetar.ConsumerType.Failover,
            consumer_name=name,
            initial_position=EARLIEST,
        )

    consumers = [joined("a"), joined("b")]
    sent(place.client, place.topic, numbers(20), batching_enabled=False)
    first, other = sorted(consumers, key=lambda each: not _has_message(each))
    messages = take(first, 10)
    assert data(messages) == numbers(20)[:10]
    first.acknowledge_cumulative(messages[4])
    first.close()
    assert data(take(other, 15)) == numbers(20)[5:]
    other.close()


def _has_message(consumer: magnetar.Consumer) -> bool:
    """Return whether this consumer is the active one, and check that the other one gets nothing."""
    try:
        message = consumer.receive(QUIET_MS)
    except magnetar.Timeout:
        return False
    consumer.negative_acknowledge(message)
    consumer.redeliver_unacknowledged_messages()
    return True


def key_shared_keeps_a_key_at_one_consumer(place: Place) -> None:
    key_shared = magnetar.ConsumerType.KeyShared
    consumers = [
        place.client.subscribe(place.topic, "s", key_shared, consumer_name=name) for name in "ab"
    ]
    with place.client.create_producer(
        place.topic, batching_type=magnetar.BatchingType.KeyBased
    ) as producer:
        for number in range(60):
            producer.send_async(b"%d" % number, None, partition_key=f"k{number % 20}")
        producer.flush()
    owners: dict[str, set[str]] = {}
    got: list[bytes] = []
    for consumer in consumers:
        while len(got) < 60:
            try:
                message = consumer.receive(RECEIVE_MS if consumer is consumers[1] else QUIET_MS)
            except magnetar.Timeout:
                break
            owners.setdefault(message.partition_key(), set()).add(consumer.consumer_name())
            got.append(message.data())
            consumer.acknowledge(message)
    assert sorted(got) == sorted(numbers(60))
    assert Counter(map(len, owners.values())) == {1: 20}
    assert {name for names in owners.values() for name in names} == {"a", "b"}


def readers_begin_where_asked(place: Place) -> None:
    ids = sent(place.client, place.topic, numbers(30), batching_max_messages=10)
    with place.client.create_reader(place.topic, magnetar.MessageId.earliest) as reader:
        assert reader.has_message_available()
        assert data(take(reader, 30)) == numbers(30)
        assert not reader.has_message_available()
    inside = ids[14]
    with place.client.create_reader(place.topic, inside) as reader:
        assert data(take(reader, 15)) == numbers(30)[15:]
    with place.client.create_reader(place.topic, inside, start_message_id_inclusive=True) as reader:
        assert data(take(reader, 16)) == numbers(30)[14:]
    with place.client.create_reader(place.topic, magnetar.MessageId.latest) as reader:
        assert not reader.has_message_available()
        sent(place.client, place.topic, [b"new"])
        assert data(take(reader, 1)) == [b"new"]


def seek_by_id_and_by_time(place: Place) -> None:
    consumer = place.client.subscribe(place.topic, "s", initial_position=EARLIEST)
    ids = sent(place.client, place.topic, numbers(20), batching_max_messages=5)
    messages = take(consumer, 20)
    consumer.acknowledge_cumulative(messages[-1])
    consumer.seek(ids[12])
    assert data(take(consumer, 7)) == numbers(20)[13:]
    consumer.seek(magnetar.MessageId.earliest)
    assert data(take(consumer, 20)) == numbers(20)
    time.sleep(0.005)
    between_ms = time.time_ns() // 1_000_000
    time.sleep(0.005)
    sent(place.client, place.topic, [b"later"])
    assert data(take(consumer, 1)) == [b"later"]
    consumer.seek(between_ms)
    assert data(take(consumer, 1)) == [b"later"]
    last = consumer.get_last_message_id()
    assert (last.ledger_id(), last.entry_id()) >= (ids[-1].ledger_id(), ids[-1].entry_id())
    consumer.close()


def partitions(place: Place) -> None:
    place.make_partitioned(place.topic, 3)
    assert len(place.client.get_topic_partitions(place.topic)) == 3
    consumer = place.client.subscribe(place.topic, "s", initial_position=EARLIEST)
    with place.client.create_producer(place.topic) as producer:
        for number in range(60):
            producer.send_async(b"%d" % number, None, partition_key=f"k{number % 10}")
        producer.flush()
    messages = take(consumer, 60)
    assert sorted(data(messages)) == sorted(numbers(60))
    places = {(message.partition_key(), message.topic_name()) for message in messages}
    assert len(places) == 10, "a key has one partition"
    assert len({name for _, name in places}) > 1
    for message in messages:
        consumer.acknowledge(message)
    consumer.close()
    with place.client.create_reader(place.topic, magnetar.MessageId.earliest) as reader:
        assert sorted(data(take(reader, 60))) == sorted(numbers(60))


def dead_letters(place: Place) -> None:
    policy = magnetar.ConsumerDeadLetterPolicy(2, initial_subscription_name="kept")
    consumer = place.client.subscribe(
        place.topic,
        "s",
        SHARED,
        dead_letter_policy=policy,
        negative_ack_redelivery_delay_ms=50,
        initial_position=EARLIEST,
    )
    sent(place.client, place.topic, [b"bad"])
    for count in range(3):
        message = consumer.receive(RECEIVE_MS)
        assert message.redelivery_count() == count
        consumer.negative_acknowledge(message)
    dead = place.client.subscribe(f"{place.topic}-s-DLQ", "kept")
    letter = dead.receive(RECEIVE_MS)
    assert letter.data() == b"bad"
    assert letter.properties()["REAL_TOPIC"].endswith(place.topic)
    expect_none(consumer)
    consumer.close()
    dead.close()


def retry_letters(place: Place) -> None:
    policy = magnetar.ConsumerDeadLetterPolicy(1, initial_subscription_name="kept")
    consumer = place.client.subscribe(
        place.topic,
        "s",
        SHARED,
        dead_letter_policy=policy,
        enable_retry=True,
        initial_position=EARLIEST,
    )
    sent(place.client, place.topic, [b"again"])
    message = consumer.receive(RECEIVE_MS)
    consumer.reconsume_later(message, timedelta(milliseconds=10), {"why": "test"})
    retried = consumer.receive(RECEIVE_MS)
    assert retried.data() == b"again"
    assert retried.properties()["RECONSUMETIMES"] == "1"
    assert retried.properties()["why"] == "test"
    consumer.reconsume_later(retried, timedelta(milliseconds=10))
    with place.client.subscribe(f"{place.topic}-s-DLQ", "kept") as dead:
        assert dead.receive(RECEIVE_MS).data() == b"again"
    consumer.close()


def retries_of_partitions(place: Place) -> None:
    place.make_partitioned(place.topic, 2)
    _retry_each(place, place.topic, place.topic, letters=f"{place.topic}-s")


def retries_of_a_list(place: Place) -> None:
    names = [f"{place.topic}-{letter}" for letter in "ba"]
    _retry_each(place, names, names[0], names[1], letters=f"{place.topic}-a-s")


def retries_of_a_pattern(place: Place) -> None:
    """The retry topic and the dead-letter topic match the pattern, too."""
    names = [f"{place.topic}-{letter}" for letter in "ab"]
    for name in names:
        sent(place.client, name, [])
    subscription = f"{place.topic}-s"
    pattern = re.compile(f"persistent://public/default/{place.topic}-.*")
    _retry_each(place, pattern, *names, letters=subscription, subscription=subscription)


def _retry_each(
    place: Place, topics: Any, *published: str, letters: str, subscription: str = "s"
) -> None:
    """Two messages pass the retry topic once and then go to the dead-letter topic."""
    policy = magnetar.ConsumerDeadLetterPolicy(1, initial_subscription_name="kept")
    consumer = place.client.subscribe(
        topics,
        subscription,
        SHARED,
        dead_letter_policy=policy,
        enable_retry=True,
        initial_position=EARLIEST,
    )
    origins = {}
    for number in range(2):
        topic = published[number % len(published)]
        with place.client.create_producer(topic, batching_enabled=False) as producer:
            value = b"%d" % number
            message_id = producer.send(value, partition_key="k", ordering_key="o")
        at = message_id.ledger_id(), message_id.entry_id(), message_id.partition()
        origins[value] = f"persistent://public/default/{topic}", ":".join(map(str, at))
    for message in take(consumer, 2):
        consumer.reconsume_later(message, timedelta(milliseconds=10), {"why": "test"})
    for copy in take(consumer, 2):
        assert copy.topic_name().endswith(f"{letters}-RETRY")
        _check_letter(copy, origins, times="1")
        consumer.reconsume_later(copy, timedelta(milliseconds=10))
    with place.client.subscribe(f"{letters}-DLQ", "kept") as dead:
        for copy in take(dead, 2):
            _check_letter(copy, origins, times="2")
    expect_none(consumer)
    consumer.close()


def _check_letter(copy: Any, origins: dict[bytes, tuple[str, str]], times: str) -> None:
    properties = copy.properties()
    at = properties["REAL_TOPIC"], properties["ORIGIN_MESSAGE_ID"]
    assert at == origins[copy.data()]
    assert (properties["RECONSUMETIMES"], properties["DELAY_TIME"]) == (times, "10")
    assert properties["why"] == "test"
    assert (copy.partition_key(), copy.ordering_key()) == ("k", "o")


def chunks(place: Place) -> None:
    large = bytes(range(256)) * (12 << 12)  # 12 MiB: three chunks
    consumer = place.client.subscribe(place.topic, "s", initial_position=EARLIEST)
    with place.client.create_producer(place.topic, chunking_enabled=True) as producer:
        producer.send(large)
        producer.send(b"small")
    first, second = take(consumer, 2)
    assert first.data() == large
    assert second.data() == b"small"
    consumer.acknowledge(first)
    consumer.acknowledge(second)
    consumer.close()
    with place.client.create_producer(place.topic) as whole, pytest.raises(magnetar.MessageTooBig):
        whole.send(large)


def all_compressions(place: Place) -> None:
    consumer = place.client.subscribe(place.topic, "s", initial_position=EARLIEST)
    for kind in magnetar.CompressionType:
        sent(place.client, place.topic, [kind.name.encode() * 100] * 3, compression_type=kind)
    expected = [kind.name.encode() * 100 for kind in magnetar.CompressionType for _ in range(3)]
    assert data(take(consumer, len(expected))) == expected
    consumer.close()


def parts_of_a_batch(place: Place) -> None:
    """A part of a batch is acknowledged: the rest is redelivered."""
    consumer = place.client.subscribe(place.topic, "s", SHARED, initial_position=EARLIEST)
    sent(place.client, place.topic, numbers(10), batching_max_publish_delay_ms=1000)
    messages = take(consumer, 10)
    for message in messages[:9]:
        consumer.acknowledge(message)
    consumer.close()
    consumer = place.client.subscribe(place.topic, "s", SHARED)
    rest = data(take(consumer, 1))
    while rest[-1] != b"9":  # a broker without acknowledgements of parts delivers the whole batch
        rest += data(take(consumer, 1))
    assert rest in ([b"9"], numbers(10))
    consumer.close()


def patterns_and_lists(place: Place) -> None:
    names = [f"{place.topic}-{letter}" for letter in "ab"]
    consumer = place.client.subscribe(names, "list", initial_position=EARLIEST)
    for name in names:
        sent(place.client, name, [name.encode()])
    assert sorted(data(take(consumer, 2))) == sorted(name.encode() for name in names)
    consumer.close()
    pattern = re.compile(f"persistent://public/default/{place.topic}-.*")
    consumer = place.client.subscribe(
        pattern, "pattern", initial_position=EARLIEST, pattern_auto_discovery_period=1
    )
    assert sorted(data(take(consumer, 2))) == sorted(name.encode() for name in names)
    sent(place.client, f"{place.topic}-c", [b"c"])  # announced, or found by the next poll
    assert data(take(consumer, 1)) == [b"c"]
    consumer.close()


def table_view(place: Place) -> None:
    with place.client.create_producer(place.topic) as producer:
        for number in range(6):
            producer.send(b"%d" % number, partition_key=f"k{number % 3}")
    with place.client.create_table_view(place.topic) as table:
        assert {key: table.get(key) for key in ("k0", "k1", "k2")} == {
            "k0": b"3",
            "k1": b"4",
            "k2": b"5",
        }


class Reading(magnetar.schema.Record):
    station = magnetar.schema.String()
    degrees = magnetar.schema.Integer()


def schemas(place: Place) -> None:
    schema = magnetar.schema.JsonSchema(Reading)
    consumer = place.client.subscribe(place.topic, "s", schema=schema, initial_position=EARLIEST)
    with place.client.create_producer(place.topic, schema=schema) as producer:
        reading: Any = Reading(station="north", degrees=7)
        producer.send(reading)
    message = consumer.receive(RECEIVE_MS)
    assert (message.value().station, message.value().degrees) == ("north", 7)
    assert message.schema_version()
    consumer.close()
    with pytest.raises(magnetar.IncompatibleSchema):
        place.client.create_producer(place.topic, schema=magnetar.schema.StringSchema())


def every_schema(place: Place) -> None:
    """A consumer that knows no schema follows the versions; so do keys and values."""
    schema = magnetar.schema

    class Reading(schema.Record):
        station = schema.String(required=True)

    class LaterReading(schema.Record):
        station = schema.String(required=True)
        degrees = schema.Integer(default=3, required=True, required_default=True)

    LaterReading.__name__ = "Reading"
    consumer = place.client.subscribe(
        place.topic, "s", schema=schema.AutoConsumeSchema(), initial_position=EARLIEST
    )
    kinds: list[tuple[type, dict[str, Any]]] = [
        (Reading, {"station": "north"}),
        (LaterReading, {"station": "south", "degrees": 5}),
    ]
    for kind, values in kinds:
        with place.client.create_producer(place.topic, schema=schema.AvroSchema(kind)) as producer:
            producer.send(kind(**values))
        message = consumer.receive(RECEIVE_MS)
        assert message.value() == values
        consumer.acknowledge(message)
    consumer.close()
    for encoding in schema.KeyValueEncodingType:
        topic = f"{place.topic}-{encoding.name}"
        pairs = schema.KeyValueSchema(schema.StringSchema(), schema.AvroSchema(Reading), encoding)
        pair = schema.KeyValue("k", Reading(station="north"))
        typed = place.client.subscribe(topic, "typed", schema=pairs)
        untyped = place.client.subscribe(topic, "any", schema=schema.AutoConsumeSchema())
        with place.client.create_producer(topic, schema=pairs) as producer:
            pairs_sent: list[Any] = [pair, schema.KeyValue("k", None)]
            for one in pairs_sent:
                producer.send_async(one, None)
        messages = take(typed, 2)
        assert [it.value() for it in messages] == [pair, schema.KeyValue("k", None)]
        separated = encoding is schema.KeyValueEncodingType.SEPARATED
        assert messages[0].partition_key() == ("aw==" if separated else "")
        found = untyped.receive(RECEIVE_MS).value()
        assert (found.key, found.value["station"]) == ("k", "north")
        with pytest.raises(magnetar.IncompatibleSchema):
            place.client.create_producer(topic, schema=schema.StringSchema())


def letters_have_the_schema_of_their_originals(place: Place) -> None:
    text = magnetar.schema.StringSchema()
    consumer = place.client.subscribe(
        place.topic,
        "s",
        SHARED,
        schema=text,
        enable_retry=True,
        dead_letter_policy=magnetar.ConsumerDeadLetterPolicy(1, initial_subscription_name="keep"),
    )
    with place.client.create_producer(place.topic, schema=text) as producer:
        bad: Any = "bad"
        producer.send(bad)
    for _ in range(2):
        message = consumer.receive(RECEIVE_MS)
        assert (message.value(), bool(message.schema_version())) == ("bad", True)
        consumer.reconsume_later(message, timedelta(0))
    dead = place.client.subscribe(
        f"{place.topic}-s-DLQ", "keep", schema=magnetar.schema.AutoConsumeSchema()
    )
    assert dead.receive(RECEIVE_MS).value() == "bad"


def survive_a_restart(place: Place, *, kill: Callable[[], None], start: Callable[[], None]) -> None:
    producer = place.client.create_producer(
        place.topic, send_timeout_millis=0, block_if_queue_full=True
    )
    results: list[magnetar.Result] = []
    for number in range(3000):
        if number == 1000:
            kill()
            start()
        producer.send_async(b"%d" % number, lambda result, _: results.append(result))
    while True:
        try:
            producer.flush()
            break
        except magnetar.Timeout:
            continue
    assert results == [magnetar.Result.Ok] * 3000
    seen: list[int] = []
    with place.client.create_reader(place.topic, magnetar.MessageId.earliest) as reader:
        while not seen or seen[-1] != 2999:
            seen.append(int(reader.read_next(30_000).data()))
    assert list(dict.fromkeys(seen)) == list(range(3000)), "each one, the first time in order"


async def asyncio_face(place: Place) -> None:
    async with magnetar.asyncio.Client(place.service_url) as client:
        consumer = await client.subscribe(place.topic, "s", initial_position=EARLIEST)
        producer = await client.create_producer(place.topic)
        for value in numbers(50):
            await producer.send(value)
        for value in numbers(50):
            message = await consumer.receive(RECEIVE_MS)
            assert message.data() == value
            await consumer.acknowledge(message)


USES = [
    fields_of_a_message,
    exclusive_keeps_order_and_resumes,
    shared_divides_and_redelivers,
    failover_continues_after_the_acknowledged,
    key_shared_keeps_a_key_at_one_consumer,
    readers_begin_where_asked,
    seek_by_id_and_by_time,
    partitions,
    dead_letters,
    retry_letters,
    retries_of_partitions,
    retries_of_a_list,
    retries_of_a_pattern,
    chunks,
    all_compressions,
    parts_of_a_batch,
    patterns_and_lists,
    table_view,
    schemas,
    every_schema,
    letters_have_the_schema_of_their_originals,
]

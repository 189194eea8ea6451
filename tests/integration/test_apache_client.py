"""An unmodified Apache Pulsar client (`pip install pulsar-client`) against three kinds of servers.

The servers are a standalone server, two brokers in this process, and `magnetar local-cluster` with
two brokers. The client gets the URL of one broker, and reaches the topics of the other broker by
redirects.
"""

from __future__ import annotations

import itertools
import queue
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pulsar
import pytest
from fakes.namespaces import SPREAD
from fakes.services import Service, brokers_in_thread, local_cluster, standalone_process
from support import skip_without_zookeeper, wait_for

import magnetar
from magnetar.protos.names import TopicName
from magnetar.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_MS = 30_000
QUIET_MS = 300  # a consumer without a message for so long is considered quiet
MESSAGE_BYTES_MAX = 5 * 1024 * 1024
CLOCK = SystemClock()
CODECS = ("NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY")

EARLIEST = pulsar.InitialPosition.Earliest
EXCLUSIVE, SHARED = pulsar.ConsumerType.Exclusive, pulsar.ConsumerType.Shared


@pytest.fixture(
    scope="module",
    params=["standalone", "two brokers", pytest.param("cluster", marks=pytest.mark.cluster)],
)
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    match request.param:
        case "standalone":
            running = standalone_process(tmp_path_factory.mktemp("standalone"))
        case "two brokers":
            running = brokers_in_thread(2)
        case _:
            skip_without_zookeeper()
            running = local_cluster(tmp_path_factory.mktemp("cluster"))
    with running as service:
        yield service


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[pulsar.Client]:
    client = apache(service)
    yield client
    client.close()


@pytest.fixture(scope="module")
def ours(service: Service) -> Iterator[magnetar.Client]:
    with magnetar.Client(service.grpc_url, operation_timeout_seconds=30) as client:
        yield client


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return unique(request.node.originalname)


def apache(service: Service) -> pulsar.Client:
    return pulsar.Client(
        service.pulsar_url,
        operation_timeout_seconds=30,
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )


_numbers = itertools.count()


def unique(stem: str) -> str:
    return f"persistent://public/default/{stem}-{next(_numbers)}"


def numbered(client: Any, topic: str, count: int, **options: Any) -> list[Any]:
    """Publish b"0", b"1", …; returns their ids."""
    producer = client.create_producer(topic, **options)
    told: dict[int, Any] = {}
    for number in range(count):
        producer.send_async(b"%d" % number, lambda *it, at=number: told.update({at: it}))
    producer.flush()
    producer.close()
    assert [told[number][0] for number in range(count)] == [pulsar.Result.Ok] * count
    return [told[number][1] for number in range(count)]


def take(source: Any, count: int) -> list[Any]:
    receive = source.receive if hasattr(source, "receive") else source.read_next
    return [receive(timeout_millis=TIMEOUT_MS) for _ in range(count)]


def values(messages: list[Any]) -> list[int]:
    return [int(message.data()) for message in messages]


def is_quiet(consumer: pulsar.Consumer) -> bool:
    try:
        consumer.receive(timeout_millis=QUIET_MS)
    except pulsar.Timeout:
        return True
    return False


def wait_until_later() -> None:
    begin_ms = CLOCK.now_ms()
    wait_for(lambda: CLOCK.now_ms() > begin_ms + 1)


# ---- every part of a message, every way it can be packed -----------------------------------------


@dataclass(frozen=True)
class Parts:
    """All attributes that an application can give a message."""

    content: bytes
    partition_key: str = ""
    ordering_key: str = ""
    properties: tuple[tuple[str, str], ...] = ()
    event_timestamp: int = 0

    def options(self) -> dict[str, Any]:
        """The arguments for `send`. Absent fields are not passed."""
        given = {
            "partition_key": self.partition_key or None,
            "ordering_key": self.ordering_key or None,
            "properties": dict(self.properties) or None,
            "event_timestamp": self.event_timestamp or None,
        }
        return {name: value for name, value in given.items() if value is not None}

    @classmethod
    def of(cls, message: Any) -> Parts:
        return cls(
            message.data(),
            message.partition_key(),
            message.ordering_key(),
            tuple(sorted(message.properties().items())),
            message.event_timestamp(),
        )


PARTS = (
    Parts(b"plain"),
    Parts(b""),
    Parts(bytes(range(256)) * 400),
    Parts(b"key", partition_key="AA"),
    Parts(b"keys", partition_key="schlüssel", ordering_key="order"),
    Parts(b"properties", properties=(("carrier", "AA"), ("empty", ""), ("größe", "ß€𝄞"))),
    Parts(b"time", event_timestamp=1_357_034_400_000),
    Parts(b"all", "k", "o", (("a", "1"), ("b", "2")), 1),
)


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("way", ["apache to apache", "apache to ours", "ours to apache"])
def test_each_part_of_a_message_arrives(
    client: pulsar.Client,
    ours: magnetar.Client,
    topic: str,
    way: str,
    codec: str,
    batched: bool,
) -> None:
    # Apache's client compresses an empty payload with ZLIB, and then fails to decompress it.
    unreadable = (way, codec, batched) == ("apache to apache", "ZLib", False)
    sent = [parts for parts in PARTS if parts.content or not unreadable]
    writes, reads = ({"apache": client, "ours": ours}[it] for it in way.split(" to "))
    module: Any = pulsar if writes is client else magnetar
    producer = writes.create_producer(
        topic,
        producer_name="writer",
        compression_type=getattr(module.CompressionType, codec),
        batching_enabled=batched,
        batching_max_publish_delay_ms=10_000,
    )
    results: list[tuple[Any, Any]] = []
    before = CLOCK.now_ms()
    for parts in sent:
        producer.send_async(parts.content, lambda *it: results.append(it), **parts.options())
    producer.flush()
    # The flush of Apache's client returns at the last receipt, whose callback may still run.
    wait_for(lambda: len(results) == len(sent))
    assert [result for result, _ in results] == [module.Result.Ok] * len(sent)

    first = (pulsar if reads is client else magnetar).MessageId.earliest
    reader = reads.create_reader(topic, first)
    messages = take(reader, len(sent))
    assert [Parts.of(message) for message in messages] == list(sent)
    sent_ids = [place(message_id) for _, message_id in results]
    assert [place(message.message_id()) for message in messages] == sent_ids
    assert [place_in_batch for _, _, place_in_batch in sent_ids] == (
        list(range(len(sent))) if batched else [-1] * len(sent)
    )
    for message in messages:
        assert message.topic_name() == topic
        assert message.producer_name() == "writer"
        assert before <= message.publish_timestamp() <= CLOCK.now_ms()
        assert message.redelivery_count() == 0
    assert not reader.has_message_available()
    reader.close()
    producer.close()


def place(message_id: Any) -> tuple[int, int, int]:
    return message_id.ledger_id(), message_id.entry_id(), message_id.batch_index()


def test_an_id_written_by_one_client_is_understood_by_the_other(
    client: pulsar.Client, ours: magnetar.Client, topic: str
) -> None:
    ids = numbered(client, topic, 10, batching_enabled=True, batching_max_messages=5)
    for number in (0, 4, 5, 8):
        theirs = magnetar.MessageId.deserialize(ids[number].serialize())
        reader = ours.create_reader(topic, theirs)
        assert values(take(reader, 1)) == [number + 1]
        reader.close()
        again = client.create_reader(topic, pulsar.MessageId.deserialize(theirs.serialize()))
        assert values(take(again, 1)) == [number + 1]
        again.close()


# ---- sizes ---------------------------------------------------------------------------------------


def test_the_largest_message_passes_and_one_byte_more_does_not(
    client: pulsar.Client, ours: magnetar.Client, topic: str
) -> None:
    largest = bytes(MESSAGE_BYTES_MAX)
    producer = client.create_producer(topic)
    with pytest.raises(pulsar.MessageTooBig):
        producer.send(largest + b"!")
    # Apache's client compares payload and metadata together with the limit.
    near = largest[: MESSAGE_BYTES_MAX - 1024]
    producer.send(near)
    ours_producer = ours.create_producer(topic, batching_enabled=False)
    with pytest.raises(magnetar.MessageTooBig):
        ours_producer.send(largest + b"!")
    ours_producer.send(largest)
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    assert [message.data() for message in take(reader, 2)] == [near, largest]
    producer.send(b"still there")
    assert take(reader, 1)[0].data() == b"still there"


# ---- subscriptions -------------------------------------------------------------------------------


def test_a_durable_subscription_continues_at_its_position(
    client: pulsar.Client, topic: str
) -> None:
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    numbered(client, topic, 10)
    first = take(consumer, 10)
    assert values(first) == list(range(10))
    for message in first[:4]:
        consumer.acknowledge(message)
    consumer.acknowledge(first[7])
    consumer.close()
    again = client.subscribe(topic, "s", initial_position=EARLIEST)
    assert values(take(again, 5)) == [4, 5, 6, 8, 9]
    again.close()


def test_latest_begins_after_the_stored_messages(client: pulsar.Client, topic: str) -> None:
    numbered(client, topic, 3)
    consumer = client.subscribe(topic, "s")
    assert is_quiet(consumer)
    client.create_producer(topic).send(b"3")
    assert values(take(consumer, 1)) == [3]


def test_cumulative_acknowledgement_covers_all_earlier_messages(
    client: pulsar.Client, topic: str
) -> None:
    numbered(client, topic, 10)
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    messages = take(consumer, 10)
    consumer.acknowledge_cumulative(messages[6])
    consumer.close()
    again = client.subscribe(topic, "s")
    assert values(take(again, 3)) == [7, 8, 9]
    assert is_quiet(again)


def test_redelivery_returns_all_unacknowledged_messages_in_order(
    client: pulsar.Client, topic: str
) -> None:
    numbered(client, topic, 10)
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    messages = take(consumer, 10)
    consumer.acknowledge(messages[2])
    consumer.redeliver_unacknowledged_messages()
    again = values(take(consumer, 9))
    if 2 in again:  # Apache's client keeps acknowledgements back for 0.1 s, and sent this one late
        again.remove(2)
        again += values(take(consumer, 1))
    assert again == [0, 1, 3, 4, 5, 6, 7, 8, 9]


def test_a_negatively_acknowledged_message_is_redelivered_with_its_count(
    client: pulsar.Client, topic: str
) -> None:
    numbered(client, topic, 5)
    consumer = client.subscribe(
        topic,
        "s",
        consumer_type=SHARED,
        initial_position=EARLIEST,
        negative_ack_redelivery_delay_ms=100,
    )
    for message in take(consumer, 5):
        if message.data() == b"2":
            consumer.negative_acknowledge(message)
        else:
            consumer.acknowledge(message)
    for count in (1, 2, 3):
        [again] = take(consumer, 1)
        assert (again.data(), again.redelivery_count()) == (b"2", count)
        consumer.negative_acknowledge(again)
    [last] = take(consumer, 1)
    consumer.acknowledge(last)
    assert is_quiet(consumer)


def test_shared_consumers_divide_the_messages(client: pulsar.Client, topic: str) -> None:
    consumers = [
        client.subscribe(topic, "s", consumer_type=SHARED, initial_position=EARLIEST)
        for _ in range(3)
    ]
    numbered(client, topic, 60)
    taken: list[list[int]] = [[] for _ in consumers]
    while sum(map(len, taken)) < 60:
        for consumer, got in zip(consumers, taken, strict=True):
            try:
                message = consumer.receive(timeout_millis=10)
            except pulsar.Timeout:
                continue
            got.append(int(message.data()))
            consumer.acknowledge(message)
    assert sorted(itertools.chain(*taken)) == list(range(60))
    assert all(taken)
    assert all(got == sorted(got) for got in taken)


@pytest.mark.parametrize("how", ["close", "vanish"])
def test_messages_of_a_closed_shared_consumer_are_redelivered_with_a_count(
    service: Service, client: pulsar.Client, topic: str, how: str
) -> None:
    numbered(client, topic, 10)
    leaving = apache(service)
    one = leaving.subscribe(topic, "s", consumer_type=SHARED, initial_position=EARLIEST)
    messages = take(one, 10)
    left = list(range(10))
    if how == "close":  # the close sends the earlier acknowledgements
        for message in messages[::2]:
            one.acknowledge(message)
        one.close()
        left = left[1::2]
    else:
        leaving.shutdown()
    other = client.subscribe(topic, "s", consumer_type=SHARED)
    got = sorted((int(it.data()), it.redelivery_count()) for it in take(other, len(left)))
    assert got == [(number, 1) for number in left]
    assert is_quiet(other)
    other.close()
    leaving.close()


def test_a_second_consumer_is_refused_until_the_exclusive_one_closes(
    client: pulsar.Client, topic: str
) -> None:
    first = client.subscribe(topic, "s")
    with pytest.raises(pulsar.ConsumerBusy):
        client.subscribe(topic, "s")
    with pytest.raises(pulsar.ConsumerBusy):
        client.subscribe(topic, "s", consumer_type=SHARED)
    first.close()
    client.subscribe(topic, "s", consumer_type=SHARED).close()


def test_unsubscribe_deletes_the_subscription(client: pulsar.Client, topic: str) -> None:
    numbered(client, topic, 3)
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    consumer.acknowledge_cumulative(take(consumer, 3)[-1])
    consumer.unsubscribe()
    again = client.subscribe(topic, "s", initial_position=EARLIEST)
    assert values(take(again, 3)) == [0, 1, 2]


def test_unsubscribe_is_refused_while_another_consumer_is_connected(
    client: pulsar.Client, topic: str
) -> None:
    one = client.subscribe(topic, "s", consumer_type=SHARED)
    other = client.subscribe(topic, "s", consumer_type=SHARED)
    with pytest.raises(pulsar.PulsarException):
        one.unsubscribe()
    client.create_producer(topic).send(b"0")
    other.close()
    assert values(take(one, 1)) == [0]
    one.unsubscribe()


def test_acknowledged_messages_of_a_batch_are_not_redelivered(
    client: pulsar.Client, topic: str
) -> None:
    numbered(client, topic, 10, batching_enabled=True, batching_max_publish_delay_ms=10_000)
    consumer = client.subscribe(
        topic, "s", SHARED, initial_position=EARLIEST, batch_index_ack_enabled=True
    )
    messages = take(consumer, 10)
    assert len({message.message_id().entry_id() for message in messages}) == 1
    for number in (0, 3, 9):
        consumer.acknowledge(messages[number])
    consumer.close()
    again = client.subscribe(topic, "s", SHARED, batch_index_ack_enabled=True)
    rest = take(again, 7)
    assert values(rest) == [1, 2, 4, 5, 6, 7, 8]
    for message in rest:
        again.acknowledge(message)
    again.close()
    last = client.subscribe(topic, "s", SHARED)
    assert is_quiet(last)


def test_a_batch_without_batch_index_acks_is_redelivered_whole(
    client: pulsar.Client, topic: str
) -> None:
    numbered(client, topic, 4, batching_enabled=True, batching_max_publish_delay_ms=10_000)
    consumer = client.subscribe(topic, "s", SHARED, initial_position=EARLIEST)
    for message in take(consumer, 4)[:3]:
        consumer.acknowledge(message)
    consumer.close()
    again = client.subscribe(topic, "s", SHARED)
    assert values(take(again, 4)) == [0, 1, 2, 3]


def test_a_reader_with_a_small_queue_gets_all_messages(client: pulsar.Client, topic: str) -> None:
    numbered(client, topic, 200, batching_enabled=True, batching_max_messages=30)
    for size in (1, 7):
        reader = client.create_reader(topic, pulsar.MessageId.earliest, receiver_queue_size=size)
        assert values(take(reader, 200)) == list(range(200))
        reader.close()


def test_a_consumer_with_queue_size_zero_gets_all_messages_in_order(
    client: pulsar.Client, topic: str
) -> None:
    numbered(client, topic, 10)
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST, receiver_queue_size=0)
    got = []
    for _ in range(10):
        message = consumer.receive()
        got.append(int(message.data()))
        consumer.acknowledge(message)
    assert got == list(range(10))


# ---- readers and seeking -------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
def test_a_reader_begins_at_its_start_id(client: pulsar.Client, topic: str, batched: bool) -> None:
    options = {"batching_enabled": True, "batching_max_messages": 4} if batched else {}
    ids = numbered(client, topic, 12, **options)
    for number in (0, 3, 4, 6, 11):
        for inclusive in (False, True):
            reader = client.create_reader(topic, ids[number], start_message_id_inclusive=inclusive)
            expected = list(range(number + (not inclusive), 12))
            assert reader.has_message_available() == bool(expected)
            assert values(take(reader, len(expected))) == expected
            assert not reader.has_message_available()
            reader.close()


def test_a_reader_at_latest_reads_later_messages(client: pulsar.Client, topic: str) -> None:
    numbered(client, topic, 5)
    reader = client.create_reader(topic, pulsar.MessageId.latest)
    assert not reader.has_message_available()
    client.create_producer(topic).send(b"5")
    assert reader.has_message_available()
    assert values(take(reader, 1)) == [5]
    last = client.create_reader(topic, pulsar.MessageId.latest, start_message_id_inclusive=True)
    assert last.has_message_available()
    assert values(take(last, 1)) == [5]


def test_a_reader_of_an_empty_topic_has_no_message_available(
    client: pulsar.Client, topic: str
) -> None:
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    assert not reader.has_message_available()
    client.create_producer(topic).send(b"0")
    assert reader.has_message_available()
    assert values(take(reader, 1)) == [0]


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
def test_a_seek_to_an_id_delivers_from_that_message(
    client: pulsar.Client, topic: str, batched: bool
) -> None:
    options = {"batching_enabled": True, "batching_max_messages": 4} if batched else {}
    ids = numbered(client, topic, 12, **options)
    consumer = client.subscribe(
        topic, "s", initial_position=EARLIEST, start_message_id_inclusive=True
    )
    consumer.acknowledge_cumulative(take(consumer, 12)[-1])
    for number in (5, 11, 0):
        consumer.seek(ids[number])
        assert values(take(consumer, 12 - number)) == list(range(number, 12))
    consumer.seek(pulsar.MessageId.latest)
    assert is_quiet(consumer)
    consumer.seek(pulsar.MessageId.earliest)
    assert values(take(consumer, 12)) == list(range(12))


def test_a_seek_to_a_time_delivers_from_that_time(client: pulsar.Client, topic: str) -> None:
    producer = client.create_producer(topic)
    for number in range(6):
        producer.send(b"%d" % number)
        wait_until_later()  # each message gets a time of its own
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    messages = take(consumer, 6)
    for number in (3, 5, 0):
        consumer.seek(messages[number].publish_timestamp())
        assert values(take(consumer, 6 - number)) == list(range(number, 6))
    consumer.seek(messages[-1].publish_timestamp() + 1)
    assert is_quiet(consumer)


def test_a_reader_reads_from_the_target_of_a_seek(client: pulsar.Client, topic: str) -> None:
    ids = numbered(client, topic, 10)
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    take(reader, 10)
    reader.seek(ids[4])
    assert reader.has_message_available()
    assert values(take(reader, 1))[0] in (4, 5)  # Apache's client decides by its own inclusiveness
    reader.seek(pulsar.MessageId.earliest)
    assert values(take(reader, 10)) == list(range(10))


def test_get_last_message_id_returns_the_id_of_the_last_message(
    client: pulsar.Client, topic: str
) -> None:
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    empty = consumer.get_last_message_id()
    assert (empty.ledger_id(), empty.entry_id()) == (-1, -1)
    ids = numbered(client, topic, 7)
    assert place(consumer.get_last_message_id()) == place(ids[-1])
    ids = numbered(client, topic, 7, batching_enabled=True, batching_max_publish_delay_ms=10_000)
    assert place(consumer.get_last_message_id()) == place(ids[-1])
    assert ids[-1].batch_index() == 6


def test_a_listener_gets_each_message(client: pulsar.Client, topic: str) -> None:
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen(consumer: Any, message: Any) -> None:
        consumer.acknowledge(message)
        got.put(message.data())

    consumer = client.subscribe(topic, "s", initial_position=EARLIEST, message_listener=listen)
    numbered(client, topic, 20)
    assert [int(got.get(timeout=30)) for _ in range(20)] == list(range(20))
    consumer.close()


def test_consumers_by_list_and_by_pattern_receive_from_all_their_topics(
    client: pulsar.Client,
) -> None:
    stem = unique("many")
    topics = [f"{stem}-{letter}" for letter in "abcd"]
    for topic in topics:
        client.create_producer(topic).send(topic.encode())
    listed = client.subscribe(topics, "list", initial_position=EARLIEST)
    assert {message.data().decode() for message in take(listed, 4)} == set(topics)
    matching = client.subscribe(re.compile(f"{stem}-[abc]"), "re", initial_position=EARLIEST)
    assert {message.data().decode() for message in take(matching, 3)} == set(topics[:3])
    assert is_quiet(matching)
    for consumer in listed, matching:
        consumer.close()


def test_producers_created_at_once_have_different_names(client: pulsar.Client, topic: str) -> None:
    with ThreadPoolExecutor(50) as threads:
        made = threads.map(lambda it: client.create_producer(f"{topic}-{it % 20}"), range(200))
        producers = list(made)
    assert len({producer.producer_name() for producer in producers}) == 200
    for producer in producers:
        producer.close()


# ---- producers -----------------------------------------------------------------------------------


def test_a_second_producer_of_a_name_is_refused(
    service: Service, client: pulsar.Client, topic: str
) -> None:
    first = client.create_producer(topic, producer_name="me")
    other = apache(service)
    for someone in (client, other):
        with pytest.raises(pulsar.ProducerBusy):
            someone.create_producer(topic, producer_name="me")
    first.send(b"0")
    first.close()
    other.create_producer(topic, producer_name="me").send(b"1")
    other.close()


def test_the_broker_names_producers_without_a_name(client: pulsar.Client, topic: str) -> None:
    producers = [client.create_producer(topic) for _ in range(3)]
    assert len({producer.producer_name() for producer in producers}) == 3


def test_an_exclusive_producer_excludes_other_producers(client: pulsar.Client, topic: str) -> None:
    alone = client.create_producer(topic, access_mode=pulsar.ProducerAccessMode.Exclusive)
    with pytest.raises(pulsar.ProducerBusy):
        client.create_producer(topic)
    with pytest.raises(pulsar.ProducerFenced):
        client.create_producer(topic, access_mode=pulsar.ProducerAccessMode.Exclusive)
    alone.close()
    client.create_producer(topic).send(b"0")


def test_messages_of_one_producer_keep_their_order(client: pulsar.Client, topic: str) -> None:
    ids = numbered(client, topic, 2_000, block_if_queue_full=True)
    assert [place(it) for it in ids] == sorted(map(place, ids))
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    assert values(take(reader, 2_000)) == list(range(2_000))


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["persistent://a/b", "nothing://public/default/t", "a/b", ""])
def test_an_impossible_name_is_refused(client: pulsar.Client, name: str) -> None:
    with pytest.raises((pulsar.InvalidTopicName, ValueError)):
        client.create_producer(name)


def test_short_names_are_of_the_default_namespace(client: pulsar.Client, topic: str) -> None:
    short = topic.rpartition("/")[2]
    client.create_producer(short).send(b"0")
    [message] = take(client.create_reader(topic, pulsar.MessageId.earliest), 1)
    assert (message.data(), message.topic_name()) == (b"0", topic)


def test_an_unknown_namespace_is_refused(client: pulsar.Client) -> None:
    topic = unique("any").replace("public/default", "acme/flights")
    with pytest.raises(pulsar.TopicNotFound):
        client.create_producer(topic)
    with pytest.raises(pulsar.TopicNotFound):
        client.subscribe(topic, "s")


def test_a_topic_name_with_unusual_letters_is_accepted(client: pulsar.Client) -> None:
    topic = unique("vögel & %2F größer") + "="
    client.create_producer(topic).send(b"0")
    assert values(take(client.create_reader(topic, pulsar.MessageId.earliest), 1)) == [0]


def test_partitions_of_a_plain_topic_are_the_topic_itself(
    client: pulsar.Client, topic: str
) -> None:
    assert client.get_topic_partitions(topic) == [topic]


# ---- two brokers ---------------------------------------------------------------------------------


def test_a_topic_of_the_other_broker_is_reached_by_a_redirect(
    service: Service, client: pulsar.Client
) -> None:
    if service.brokers_count == 1:
        return
    owners = set()
    for namespace in SPREAD:
        topic = unique("spread").replace("public/default", namespace)
        name = TopicName.parse(topic)
        producer = client.create_producer(topic)
        producer.send(b"0")
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
        assert values(take(consumer, 1)) == [0]
        owning = service.owners(name)
        assert len(owning) == 1, name
        owners.update(owning)
        producer.close()
        consumer.close()
    assert len(owners) == 2

"""The driver's side of a streaming query against two real brokers, without Spark."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from fakes.services import Service, brokers_in_thread
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, In, LessThan
from pyspark.sql.types import BinaryType, MapType, StringType, StructType
from support import free_port, wait_for

import magnetar
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import TopicName
from magnetar.runtime.clock import SystemClock
from magnetar.schema import (
    AvroSchema,
    Double,
    Integer,
    JsonSchema,
    KeyValue,
    KeyValueEncodingType,
    KeyValueSchema,
    ProtobufNativeSchema,
    Record,
    Schema,
    SchemaType,
    String,
    StringSchema,
)
from magnetar.spark.access import ANONYMOUS
from magnetar.spark.errors import (
    BadRecord,
    DataLost,
    InvalidOption,
    InvalidSchema,
    QueryFenced,
    ReadStalled,
    TopicNotFound,
    WriteRefused,
)
from magnetar.spark.offsets import parse_offsets
from magnetar.spark.range_client import BrokerLost
from magnetar.spark.source.datasource import MagnetarDataSource, TopicScan
from magnetar.spark.source.driver import StreamDriver, plan_frame
from magnetar.spark.source.filters import pushed
from magnetar.spark.source.look_back import LookBack
from magnetar.spark.source.options import ReadOptions, parse_options
from magnetar.spark.source.partition_reader import TopicReader
from magnetar.spark.source.position_watch import PositionWatch
from magnetar.spark.source.schema import schema_of
from magnetar.spark.source.task_reader import read_task
from magnetar.spark.source.topic_watch import TopicWatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from magnetar.broker.broker import Broker
    from magnetar.broker.topic.topic import PersistentTopic
    from magnetar.spark.source.tasks import Task

pytestmark = pytest.mark.real_loop

Json = dict[str, Any]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with brokers_in_thread(2) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[magnetar.Client]:
    with magnetar.Client(service.grpc_url) as client:
        yield client


_numbers = itertools.count()


@pytest.fixture
def topic() -> str:
    return f"persistent://public/default/driven-{next(_numbers)}"


_starts_ms = itertools.count(1_000)


class Query:
    """A query: its driver, and the offsets in its checkpoint."""

    def __init__(self, service: Service, **given: str) -> None:
        every = {"service.url": service.grpc_url, "pollIntervalMs": "1", "discoveryIntervalMs": "1"}
        self.options = parse_options(every | given, streaming=True)
        self.driver = self._new_driver()
        self.at: Json = self.driver.initial()
        self.committed = self.at

    def _new_driver(self) -> StreamDriver:
        started_ms = next(_starts_ms)
        # The driver polls: what was published is known at once. tests/integration/
        # test_pushed_positions.py has the pushes.
        return StreamDriver(
            self.options,
            now_ms=started_ms,
            query=f"query-{started_ms}",
            watch=PositionWatch(streams_max=0),
            topics=TopicWatch(ANONYMOUS, self.options.brokers, [], lambda topic: True),
        )

    def restart(self) -> None:
        self.driver = self._new_driver()

    def plan(self, **limits: int | None) -> list[Task]:
        """The tasks of the next batch, whose end goes to the checkpoint; [] if there is none."""
        none: dict[str, int | None] = {"rows_max": None, "bytes_max": None}
        start, self.at = self.at, self.driver.latest(self.at, **(none | limits))
        return [] if start == self.at else self.driver.tasks(start, self.at)

    def indexes(self, **limits: int | None) -> dict[str, tuple[int, int]]:
        """The last part of each topic of the next batch, with the indexes that it reads."""
        found = {}
        for task in self.plan(**limits):
            for name, (first, end) in task.indexes.items():
                assert end is not None
                found[name.rpartition("/")[2]] = first, end
        return found

    @property
    def bytes(self) -> int:
        offsets = parse_offsets(self.at)
        assert offsets is not None
        return sum(place.bytes for place in offsets.places.values())


def short(topic: str) -> str:
    return topic.rpartition("/")[2]


def publish(client: magnetar.Client, topic: str, count: int, *, batch: int = 1) -> None:
    producer = client.create_producer(
        topic, batching_enabled=batch > 1, batching_max_messages=batch, block_if_queue_full=True
    )
    for number in range(count):
        producer.send_async(b"%d" % number, lambda *_: None)
    producer.flush()
    producer.close()


def owner(service: Service, topic: str) -> Broker:
    name = TopicName.parse(topic)
    for running in service.brokers:
        if name in {it.name for it in running.broker.topics}:
            return running.broker
    raise AssertionError(topic)


def opened(service: Service, topic: str) -> PersistentTopic:
    return next(it for it in owner(service, topic).topics if str(it.name) == topic)


def truncate(service: Service, topic: str) -> None:
    service.call(opened(service, topic).truncate())


def test_earliest_is_read_at_once_and_later_batches_read_new_messages(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 20, batch=5)
    query = Query(service, topic=topic, startingOffsets="earliest")
    assert query.indexes() == {short(topic): (0, 20)}
    before = query.at
    assert query.indexes() == {}
    assert query.at is before
    publish(client, topic, 3)
    assert query.indexes() == {short(topic): (20, 23)}


def test_latest_is_resolved_once(service: Service, client: magnetar.Client, topic: str) -> None:
    publish(client, topic, 5)
    query = Query(service, topic=topic)
    assert query.at == query.driver.initial()  # a constant, however often Spark asks for it
    assert query.plan() == []
    publish(client, topic, 2)
    query.restart()
    assert query.indexes() == {short(topic): (5, 7)}


def test_a_batch_is_repeated_from_the_checkpoint_alone(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 50, batch=10)
    query = Query(service, topic=topic, startingOffsets="earliest", targetBytesPerTask="100")
    start = query.at
    tasks = query.plan(rows_max=20)
    publish(client, topic, 50)
    query.restart()
    repeated = query.driver.tasks(start, query.at)
    assert [(task.spans, task.indexes) for task in repeated] == [
        (task.spans, task.indexes) for task in tasks
    ]
    assert len(tasks) > 1


@pytest.mark.parametrize("limit", ["rows_max", "bytes_max"])
def test_batches_keep_to_the_limit_and_read_everything_once(
    service: Service, client: magnetar.Client, topic: str, limit: str
) -> None:
    topics = [f"{topic}-{number}" for number in range(3)]
    for number, name in enumerate(topics):
        publish(client, name, 40 * number + 7, batch=4)
    query = Query(service, topics=",".join(topics), startingOffsets="earliest")
    reached = dict.fromkeys(map(short, topics), 0)
    batches, before = 0, 0
    while part := query.indexes(**{limit: 40 if limit == "rows_max" else 900}):
        batches += 1
        for name, (first, end) in part.items():
            assert first == reached[name]
            reached[name] = end
        if limit == "rows_max":
            assert sum(end - first for first, end in part.values()) <= 40
        else:
            assert query.bytes - before <= 1_500  # about; an entry has 70 to 100 bytes
        before = query.bytes
    assert list(reached.values()) == [7, 47, 87]
    assert batches >= 4


def test_an_entry_larger_than_the_limit_is_read_whole(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 20, batch=10)
    query = Query(service, topic=topic, startingOffsets="earliest")
    assert query.indexes(rows_max=3) == {short(topic): (0, 10)}
    assert query.indexes(rows_max=3) == {short(topic): (10, 20)}
    assert query.indexes(rows_max=3) == {}


def test_available_now_ends_where_the_topics_ended(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 10)
    query = Query(service, topicsPattern=f"{short(topic)}.*", startingOffsets="earliest")
    query.driver.freeze()
    publish(client, topic, 10)
    publish(client, f"{topic}-later", 10)
    assert query.indexes(rows_max=6) == {short(topic): (0, 6)}
    assert query.indexes(rows_max=6) == {short(topic): (6, 10)}
    assert query.indexes() == {}
    query.restart()
    query.driver.freeze()
    assert query.indexes() == {short(topic): (10, 20), f"{short(topic)}-later": (0, 10)}


def test_a_topic_that_was_deleted_before_available_now_is_a_loss(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, f"{topic}-a", 2)
    publish(client, f"{topic}-b", 2)
    query = Query(service, topicsPattern=f"{short(topic)}-.", startingOffsets="earliest")
    query.plan(rows_max=2)
    deleted = f"{topic}-b"
    service.call(owner(service, deleted).delete_topic(TopicName.parse(deleted), force=True))
    query.restart()
    query.driver.freeze()
    with pytest.raises(DataLost, match=f"{short(topic)}-b: the topic was deleted"):
        query.plan()


@pytest.mark.parametrize("again", [0, 4, 30])
def test_a_topic_that_is_deleted_during_available_now_is_a_loss(
    service: Service, client: magnetar.Client, topic: str, again: int
) -> None:
    """`again`: the messages of a new topic of the same name."""
    publish(client, topic, 12)
    strict = Query(service, topic=topic, startingOffsets="earliest")
    lax = Query(service, topic=topic, startingOffsets="earliest", failOnDataLoss="false")
    for query in (strict, lax):
        query.driver.freeze()
        assert query.indexes(rows_max=5) == {short(topic): (0, 5)}
    service.call(owner(service, topic).delete_topic(TopicName.parse(topic), force=True))
    if again:
        publish(client, topic, again)
    for query in (strict, lax):
        tasks = query.plan(rows_max=5)
        assert {name: it for task in tasks for name, it in task.indexes.items()} == {topic: (5, 12)}
        read = [read_task(query.options, schema_of(query.options), task) for task in tasks]
        if query is strict:
            with pytest.raises(DataLost, match=short(topic)):
                list(itertools.chain.from_iterable(read))
        else:
            assert list(itertools.chain.from_iterable(read)) == []
            assert query.plan(rows_max=5) == []


def test_the_report_says_how_far_the_query_is_behind(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 20)
    query = Query(service, topic=topic, startingOffsets="earliest")
    assert query.driver.report() is None
    query.plan(rows_max=5)
    report, at = parse_offsets(query.driver.report() or {}), parse_offsets(query.at)
    assert report is not None
    assert at is not None
    assert report.places[topic].index - at.places[topic].index == 15
    assert 15 * 20 < report.places[topic].bytes - at.places[topic].bytes < 15 * 200


def test_new_partitions_and_topics_are_read_from_their_first_message(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    broker, name = service.brokers[0].broker, TopicName.parse(topic)
    service.call(broker.create_partitioned_topic(name, 2, {}))
    query = Query(service, topicsPattern=f"public/default/{short(topic)}(-new)?")
    assert query.plan() == []  # latest
    publish(client, f"{topic}-partition-0", 3)
    assert query.indexes() == {f"{short(topic)}-partition-0": (0, 3)}
    service.call(broker.catalog.partitioned.grow(name, 3))
    publish(client, f"{topic}-partition-2", 4)
    publish(client, f"{topic}-new", 5)
    publish(client, f"{topic}-other", 5)
    found = query.indexes()
    while more := query.indexes():
        found |= more
    assert found == {f"{short(topic)}-partition-2": (0, 4), f"{short(topic)}-new": (0, 5)}


def test_partitions_that_were_added_while_a_query_was_down_are_read_and_held(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    broker, name = service.brokers[0].broker, TopicName.parse(topic)
    service.call(broker.create_partitioned_topic(name, 2, {}))
    query = Query(service, topic=topic, startingOffsets="earliest", subscription="held")
    publish(client, f"{topic}-partition-1", 3)
    assert query.indexes() == {f"{short(topic)}-partition-1": (0, 3)}
    service.call(broker.catalog.partitioned.grow(name, 3))
    for partition in range(3):
        publish(client, f"{topic}-partition-{partition}", 2)
    query.restart()
    found = {}
    while more := query.indexes():
        found |= more
    assert found == {
        f"{short(topic)}-partition-{partition}": (first, first + 2)
        for partition, first in enumerate((0, 3, 0))
    }
    for partition in range(3):
        held = opened(service, f"{topic}-partition-{partition}").subscriptions["held"].cursor
        assert held.backlog_entries == 0


def test_a_new_topic_is_read_when_the_subscription_exists(
    service: Service, client: magnetar.Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of the new topic does not answer at first."""
    publish(client, f"{topic}-a", 2)
    given = {"topicsPattern": f"{short(topic)}-.", "startingOffsets": "earliest"}
    query = Query(service, **given, subscription="held")
    assert query.indexes() == {f"{short(topic)}-a": (0, 2)}
    publish(client, f"{topic}-b", 3)
    with monkeypatch.context() as patch:
        patch.setattr(
            query.driver._view,
            "hold_once",
            lambda _, places: dict.fromkeys(places, BrokerLost("the broker restarts")),
        )
        for _ in range(20):
            assert query.indexes() == {}
            time.sleep(0.005)
    found: dict[str, tuple[int, int]] = {}
    wait_for(lambda: found.update(query.indexes()) or found)
    assert found == {f"{short(topic)}-b": (0, 3)}
    assert opened(service, f"{topic}-b").subscriptions["held"].cursor.backlog_entries == 3


def test_a_query_without_a_subscription_creates_none(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 3)
    query = Query(service, topic=topic, startingOffsets="earliest")
    query.plan()
    query.driver.commit(query.at)
    query.restart()
    assert query.plan() == []
    assert not opened(service, topic).subscriptions


def test_a_query_that_restarts_with_a_newer_schema_reads_old_and_new_payloads(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    def read(query: Query) -> list[Any]:
        schema = schema_of(query.options)
        batches = [it for task in query.plan() for it in read_task(query.options, schema, task)]
        return [row["value"] for batch in batches for row in batch.to_pylist()]

    given = {"topic": topic, "startingOffsets": "earliest", "valueFormat": "json"}
    before = Query(service, **given, valueSchema="id int, old string")
    with client.create_producer(topic) as producer:
        producer.send(b'{"id":1,"old":"a"}')
        producer.send(b'{"id":2,"old":"b","price":5.5}')
        assert read(before) == [{"id": 1, "old": "a"}, {"id": 2, "old": "b"}]
        after = Query(service, **given, valueSchema="id bigint, price double")
        after.at = before.at  # the checkpoint
        producer.send(b'{"id":3,"old":"c"}')
        producer.send(b'{"id":9999999999,"price":7}')
    assert read(after) == [{"id": 3, "price": None}, {"id": 9_999_999_999, "price": 7.0}]


def test_a_query_from_the_middle_of_a_batch_reads_the_rest_of_it(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 20, batch=10)
    ledger = opened(service, topic).log.first.ledger
    start = json.dumps({topic: f"{ledger}:1:4"})
    query = Query(service, topic=topic, startingOffsets=start)
    assert query.indexes() == {short(topic): (14, 20)}
    options = {"service.url": service.grpc_url, "topic": topic}
    end = {"endingOffsets": json.dumps({topic: f"{ledger}:0:7"})}
    [task] = plan_frame(parse_options(options | end))
    assert task.indexes == {topic: (0, 7)}
    assert [(span.first, span.last) for span in task.spans] == [(0, 0)]


def test_a_read_by_time_begins_at_the_first_message_of_that_time(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 5)
    reader = client.create_reader(topic, magnetar.MessageId.earliest)
    times = [reader.read_next(10_000).publish_timestamp() for _ in range(5)]
    later = str(max(times) + 1)
    given = {"service.url": service.grpc_url, "topic": topic}
    assert plan_frame(parse_options(given | {"startingTime": later})) == []
    [task] = plan_frame(parse_options(given | {"startingTime": str(times[0])}))
    assert task.indexes == {topic: (0, 5)}


def test_a_read_by_time_ends_before_the_first_message_of_that_time(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    """pulsar-spark#96."""
    with client.create_producer(topic, batching_enabled=False) as producer:
        for _ in range(3):
            producer.send(b"before")
    reader = client.create_reader(topic, magnetar.MessageId.earliest)
    last_ms = [reader.read_next(10_000).publish_timestamp() for _ in range(3)][-1]
    wait_for(lambda: SystemClock().now_ms() > last_ms)
    with client.create_producer(topic, batching_enabled=False) as producer:
        producer.send(b"after")
    end = str(reader.read_next(10_000).publish_timestamp())
    assert [it["value"] for it in rows_of(service, topic, endingTime=end)] == [b"before"] * 3
    everything = [b"before"] * 3 + [b"after"]
    later = str(int(end) + 1)
    assert [it["value"] for it in rows_of(service, topic, endingTime=later)] == everything
    assert [it["value"] for it in rows_of(service, topic, startingTime=end)] == [b"after"]
    assert rows_of(service, topic, startingTime=end, endingTime=end) == []


def test_lost_messages_are_named_or_passed_over(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 10)
    strict = Query(service, topic=topic, startingOffsets="earliest")
    lax = Query(service, topic=topic, startingOffsets="earliest", failOnDataLoss="false")
    for query in (strict, lax):
        assert query.indexes(rows_max=4) == {short(topic): (0, 4)}
    truncate(service, topic)
    publish(client, topic, 3)
    with pytest.raises(DataLost, match=f"{short(topic)}: messages 4 to 9 were deleted"):
        strict.plan()
    strict.restart()
    with pytest.raises(DataLost, match="messages 4 to 9"):
        strict.plan()
    assert lax.indexes() == {short(topic): (10, 13)}
    assert lax.indexes() == {}


def test_a_restart_after_trimming_continues_or_names_the_messages_of_the_trimmed_ledger(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 5)
    holds = Query(service, topic=topic, startingOffsets="earliest", subscription="holds")
    other = Query(service, topic=topic, startingOffsets="earliest")
    assert holds.indexes() == {short(topic): (0, 5)}
    assert other.indexes(rows_max=2) == {short(topic): (0, 2)}
    service.call(opened(service, topic).log.roll())
    publish(client, topic, 5)
    holds.driver.commit(holds.at)  # nothing else keeps the first ledger
    wait_for(lambda: opened(service, topic).log.chain.first_index == 5)
    for query in (holds, other):
        query.restart()
    assert holds.indexes() == {short(topic): (5, 10)}
    with pytest.raises(DataLost, match=f"{short(topic)}: messages 2 to 4 were deleted"):
        other.plan()


def test_a_repeated_batch_fails_if_its_messages_were_deleted(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 10)
    query = Query(service, topic=topic, startingOffsets="earliest")
    start = query.at
    query.plan()
    truncate(service, topic)
    query.restart()
    with pytest.raises(DataLost, match="messages 0 to 9 were deleted"):
        query.driver.tasks(start, query.at)


def test_a_topic_that_was_deleted_and_created_again_is_a_loss(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 10)
    strict = Query(service, topic=topic, startingOffsets="earliest")
    lax = Query(service, topic=topic, startingOffsets="earliest", failOnDataLoss="false")
    for query in (strict, lax):
        query.plan()
    service.call(owner(service, topic).delete_topic(TopicName.parse(topic), force=True))
    with pytest.raises(DataLost, match="deleted"):
        strict.plan()
    lax.plan()
    publish(client, topic, 12)
    with pytest.raises(DataLost, match="created again"):
        strict.plan()
    assert lax.indexes() == {short(topic): (0, 12)}


def test_a_subscription_holds_unread_messages_and_its_backlog_becomes_zero(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 10)
    query = Query(service, topic=topic, startingOffsets="earliest", subscription="held")
    query.plan()
    held = opened(service, topic).subscriptions["held"].cursor
    assert held.backlog_entries == 10  # the batch is not committed
    publish(client, topic, 5)
    query.driver.commit(query.at)
    assert held.backlog_entries == 5
    query.plan()
    assert held.backlog_entries == 5
    assert query.plan() == []  # Spark has committed the offset at which this batch begins
    assert held.backlog_entries == 0


def test_a_query_with_a_subscription_continues_without_a_deleted_topic(
    service: Service, client: magnetar.Client, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        publish(client, f"{topic}-{name}", 3)
    query = Query(
        service,
        topicsPattern=f"{short(topic)}-.",
        startingOffsets="earliest",
        subscription="held",
        failOnDataLoss="false",
    )
    query.plan()
    deleted = f"{topic}-a"
    service.call(owner(service, deleted).delete_topic(TopicName.parse(deleted), force=True))
    publish(client, f"{topic}-b", 2)
    held = opened(service, f"{topic}-b").subscriptions["held"].cursor
    assert query.indexes() == {f"{short(topic)}-b": (3, 5)}
    assert query.indexes() == {}
    assert held.backlog_entries == 0  # an error of one topic does not hold the other topics up
    assert caplog.text.count("the subscription did not move on 1 topics") == 1


def test_a_query_of_named_topics_restarts_without_a_deleted_one_only_if_losses_are_allowed(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    deleted, kept = f"{topic}-a", f"{topic}-b"
    for name in (deleted, kept):
        publish(client, name, 3)
    given = {"topics": f"{deleted},{kept}", "startingOffsets": "earliest"}
    strict = Query(service, **given)
    lenient = Query(service, **given, failOnDataLoss="false")
    strict.plan()
    lenient.plan()
    service.call(owner(service, deleted).delete_topic(TopicName.parse(deleted), force=True))
    publish(client, kept, 2)
    strict.restart()
    with pytest.raises(TopicNotFound, match=short(deleted)):
        strict.plan()
    for expected in ({short(kept): (3, 5)}, {}):
        lenient.restart()
        assert lenient.indexes() == expected


def test_a_query_whose_only_topic_is_deleted_continues_if_losses_are_allowed(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 3)
    query = Query(service, topic=topic, startingOffsets="earliest", failOnDataLoss="false")
    assert query.indexes() == {short(topic): (0, 3)}
    service.call(owner(service, topic).delete_topic(TopicName.parse(topic), force=True))
    until_s = time.monotonic() + 0.2
    while time.monotonic() < until_s:
        assert query.indexes() == {}
    publish(client, topic, 2)
    found: dict[str, tuple[int, int]] = {}
    wait_for(lambda: found.update(query.indexes()) or found)
    assert found == {short(topic): (0, 2)}


def test_a_newer_query_fences_the_older_one(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 10)
    old = Query(service, topic=topic, startingOffsets="earliest", subscription="fenced")
    old.plan()
    new = Query(service, topic=topic, startingOffsets="earliest", subscription="fenced")
    new.plan()
    with pytest.raises(QueryFenced, match="'fenced' is held by the newer query"):
        old.driver.commit(old.at)
    new.driver.commit(new.at)


def test_a_topic_that_does_not_exist_is_named(service: Service, topic: str) -> None:
    with pytest.raises(TopicNotFound, match=topic):
        Query(service, topic=topic).plan()
    broker = service.brokers[0].broker
    service.call(broker.create_partitioned_topic(TopicName.parse(topic), 2, {}))
    with pytest.raises(TopicNotFound, match=f"{topic}-partition-2"):
        Query(service, topic=f"{topic}-partition-2").plan()


def test_a_query_continues_while_its_broker_is_away_and_fails_after_the_timeout(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 1)
    nowhere = f"grpc://127.0.0.1:{free_port()}"
    given = {"service.url": nowhere, "topic": topic, "readTimeoutMs": "1"}
    driver = StreamDriver(
        parse_options(given, streaming=True),
        now_ms=1,
        query="q",
        watch=PositionWatch(streams_max=0),
    )
    with pytest.raises(ReadStalled, match="no data for"):
        driver.latest(driver.initial(), rows_max=None, bytes_max=None)


def rows_of(service: Service, topic: str, columns: str = "", **given: str) -> list[Any]:
    """All rows of a topic, from a batch read."""
    options = parse_options({"service.url": service.grpc_url, "topic": topic} | given)
    schema = schema_of(options)
    if columns:
        schema = StructType([schema[name] for name in columns.split()])
    return [
        row
        for task in plan_frame(options)
        for batch in read_task(options, schema, task)
        for row in batch.to_pylist()
    ]


BAD = b'{"id":1}{"id":2}'


@pytest.fixture
def flights(client: magnetar.Client, topic: str) -> str:
    producer = client.create_producer(topic, batching_max_messages=4)
    for payload in (b'{"id":1}', b'{"id":2}', BAD, b'{"id":4}', b'{"id":5}'):
        key = "third" if payload is BAD else None
        producer.send_async(payload, lambda *_: None, partition_key=key)
    producer.flush()
    producer.close()
    return topic


JSON = {"valueFormat": "json", "valueSchema": "id long"}


def test_bad_records_fail_the_query_and_are_named(service: Service, flights: str) -> None:
    with pytest.raises(BadRecord, match=f"{flights}, entry .*:0: message 2 of the entry: JSON"):
        rows_of(service, flights, **JSON)


def test_a_bad_record_outside_of_a_batch_is_message_0_of_its_entry(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    client.create_producer(topic, batching_enabled=False).send(BAD)
    with pytest.raises(BadRecord, match="message 0 of the entry: JSON"):
        rows_of(service, topic, **JSON)


def test_bad_records_are_null_and_say_why(service: Service, flights: str) -> None:
    rows = rows_of(service, flights, "value __corrupt __error", mode="permissive", **JSON)
    assert [row["value"] and row["value"]["id"] for row in rows] == [1, 2, None, 4, 5]
    assert [row["__corrupt"] for row in rows] == [None, None, BAD, None, None]
    assert "JSON" in rows[2]["__error"]
    only = rows_of(service, flights, "__error", mode="permissive", **JSON)
    assert [bool(row["__error"]) for row in only] == [False, False, True, False, False]


def test_bad_records_are_dropped_and_counted(
    service: Service, flights: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(service, flights, "__index value", mode="DropMalformed", **JSON)
    assert [(row["__index"], row["value"]["id"]) for row in rows] == [
        (0, 1),
        (1, 2),
        (3, 4),
        (4, 5),
    ]
    assert "1 of 5 records dropped" in caplog.text


def test_bad_records_go_to_the_dead_letter_topic(
    service: Service, client: magnetar.Client, flights: str
) -> None:
    letters = f"{flights}-letters"
    given = {"mode": "dlq", "deadLetterTopic": letters, **JSON}
    rows = rows_of(service, flights, "__index value", **given)
    assert [(row["__index"], row["value"]["id"]) for row in rows] == [
        (0, 1),
        (1, 2),
        (3, 4),
        (4, 5),
    ]
    reader = client.create_reader(letters, magnetar.MessageId.earliest)
    letter = reader.read_next(10_000)
    assert letter.data() == BAD
    assert letter.partition_key() == "third"
    properties = letter.properties()
    assert properties["REAL_TOPIC"] == flights
    assert properties["ORIGIN_MESSAGE_ID"].endswith(":0:-1:2")
    assert properties["ERROR"] == "JSON: the payload is not one object"
    assert not reader.has_message_available()
    assert rows_of(service, flights, "__index", **given)[2]["__index"] == 2  # nothing is decoded
    assert not reader.has_message_available()
    single = client.create_producer(flights, batching_enabled=False).send(BAD)
    rows_of(service, flights, "value", **given)
    reader.read_next(10_000)  # the letter of the first bad record again
    origin = reader.read_next(10_000).properties()["ORIGIN_MESSAGE_ID"]
    assert origin == f"{single.ledger_id()}:{single.entry_id()}:-1"
    nowhere = given | {"deadLetterTopic": "public/missing/letters"}
    with pytest.raises(WriteRefused, match="public/missing"):
        rows_of(service, flights, **nowhere)


def test_a_bad_record_that_was_sent_in_chunks_becomes_a_letter_in_chunks(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    payload = b"?" * (6 << 20)  # more than a message without chunks can have
    with client.create_producer(topic, chunking_enabled=True) as producer:
        producer.send(payload, partition_key="large")
    letters = f"{topic}-letters"
    assert rows_of(service, topic, mode="dlq", deadLetterTopic=letters, **JSON) == []
    reader = client.create_reader(letters, magnetar.MessageId.earliest)
    letter = reader.read_next(10_000)
    assert (letter.data() == payload, letter.partition_key()) == (True, "large")


def test_payloads_are_not_decoded_without_the_column(service: Service, flights: str) -> None:
    assert [row["__index"] for row in rows_of(service, flights, "__index", **JSON)] == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_payloads_are_read_as_text_and_bad_avro_is_named(service: Service, flights: str) -> None:
    rows = rows_of(service, flights, "value", valueFormat="string")
    assert rows[2]["value"] == BAD.decode()
    schema = '{"type":"array","items":"boolean"}'
    avro = {"valueFormat": "avro", "valueSchema": schema, "mode": "permissive"}
    assert all(row["__error"] for row in rows_of(service, flights, "__error", **avro))


def test_filters_leave_topics_entries_and_rows_out(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    topics = [f"{topic}-a", f"{topic}-b"]
    for name in topics:
        publish(client, name, 100, batch=10)
    given = {"service.url": service.grpc_url, "topics": ",".join(topics), "valueFormat": "json"}
    options = parse_options(given | {"valueSchema": "a int"})  # no payload is JSON of this schema
    schema = schema_of(options)
    one, some = EqualTo(("__topic",), topics[1]), In(("__index",), (25, 31, 32))
    within = LessThan(("__index",), 32)

    def read(*filters: Filter) -> list[Task]:
        nonlocal narrowed
        narrowed = replace(options, pushed=pushed(filters))
        return plan_frame(narrowed)

    narrowed = options
    tasks = read(one, some, within)
    assert [span.topic for task in tasks for span in task.spans] == [topics[1]]
    assert sum(span.entries for task in tasks for span in task.spans) == 2
    with pytest.raises(BadRecord, match="message 5 of the entry"):
        list(read_task(narrowed, schema, tasks[0]))
    nothing = GreaterThan(("__publishTime",), datetime(9000, 1, 1, tzinfo=UTC))
    for filters in ([one, nothing], [one, EqualTo(("__key",), b"k")]):
        [task] = read(*filters)
        assert sum(batch.num_rows for batch in read_task(narrowed, schema, task)) == 0
    assert read(GreaterThan(("__index",), 99)) == []
    assert read(LessThan(("__index",), 0)) == []
    assert read(EqualTo(("__partition",), 0)) == []


@pytest.fixture
def closed(service: Service, client: magnetar.Client, topic: str) -> list[str]:
    """Sixty topics with one message each and a topic without messages. No broker has them open."""
    names = [f"{topic}-many-{number}" for number in range(61)]
    for name in names:
        publish(client, name, 0 if name == names[60] else 1)
        service.call(owner(service, name).unload_topic(TopicName.parse(name)))
    return names


def opened_of(service: Service, names: list[str]) -> set[str]:
    opened = {str(it.name) for running in service.brokers for it in running.broker.topics}
    return opened & set(names)


def read_of(options: ReadOptions, tasks: list[Task]) -> list[bytes]:
    batches = [it for task in tasks for it in read_task(options, schema_of(options), task)]
    return [row["value"] for batch in batches for row in batch.to_pylist()]


def test_a_batch_read_opens_only_the_topics_that_it_reads(
    service: Service, topic: str, closed: list[str]
) -> None:
    given = {"service.url": service.grpc_url, "topicsPattern": f"{short(topic)}-many-.*"}
    empty = parse_options(given | {"startingOffsets": "latest"})
    assert plan_frame(empty) == []
    late = parse_options(given | {"topicsPattern": f"{short(topic)}-many-60", "startingTime": "1"})
    assert plan_frame(late) == []
    assert opened_of(service, closed) == set()
    options = parse_options(given | {"filterPushdown": "true", "readFromBookies": "false"})
    wanted: list[Filter] = [In(("__topic",), (closed[7], closed[41]))]
    tasks = plan_frame(replace(options, pushed=pushed(wanted)))
    assert opened_of(service, closed) == set()
    assert read_of(options, tasks) == [b"0", b"0"]
    assert opened_of(service, closed) == {closed[7], closed[41]}


def test_a_stream_opens_only_the_topics_that_have_new_messages(
    service: Service, client: magnetar.Client, topic: str, closed: list[str]
) -> None:
    given = {"service.url": service.grpc_url, "topicsPattern": f"{short(topic)}-many-.*"}
    options = parse_options(given | {"pollIntervalMs": "1"}, streaming=True)
    driver = StreamDriver(options, now_ms=1, query="q")  # reads from the latest messages on
    at = driver.latest(driver.initial(), rows_max=None, bytes_max=None)

    def is_watched() -> bool:
        assert driver.latest(at, rows_max=None, bytes_max=None) is at
        return set(driver._pushed) == set(closed)

    wait_for(is_watched)
    assert opened_of(service, closed) == set()
    for name in (closed[3], closed[60]):
        publish(client, name, 2)
    wait_for(lambda: driver.latest(at, rows_max=None, bytes_max=None) != at)
    total = 0
    while total < 4:
        end = driver.latest(at, rows_max=None, bytes_max=None)
        total += len(read_of(options, driver.tasks(at, end)))
        at = end
    assert total == 4
    assert opened_of(service, closed) == {closed[3], closed[60]}
    driver.close()


def test_a_chunked_message_is_a_row_of_the_batch_with_its_last_chunk(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    """Each task, and later each batch, has one entry."""
    payloads = [b"a" * (11 << 20), b"b", b"c" * (6 << 20)]
    producer = client.create_producer(topic, chunking_enabled=True)
    for payload in payloads:
        producer.send(payload)
    producer.close()
    rows = rows_of(service, topic, targetBytesPerTask="1", maxPartitions="100")
    assert [row["value"] for row in rows] == payloads
    assert [row["__index"] for row in rows] == [2, 3, 5]
    query = Query(service, topic=topic, startingOffsets="earliest")
    schema = schema_of(parse_options({"service.url": service.grpc_url, "topic": topic}))
    read = []
    for _ in range(6):
        batches = [
            batch
            for task in query.plan(rows_max=1)
            for batch in read_task(query.options, schema, task)
        ]
        read.append([row["value"] for batch in batches for row in batch.to_pylist()])
    assert read == [[], [], payloads[:1], payloads[1:2], [], payloads[2:]]


def test_a_chunked_message_that_was_deleted_in_part_is_lost(
    service: Service, client: magnetar.Client, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = parse_options({"service.url": service.grpc_url, "topic": topic})
    publish(client, topic, 1)
    earlier = LookBack(options, topic, owner=None)
    entries = [(ledger, entry) for ledger, entry, _ in earlier.before(1 << 40, 0)]
    assert [entry for _, entry in entries] == [0]
    assert list(earlier.before(entries[0][0], 0)) == []
    with pytest.raises(DataLost, match="entry 7:5 is the last chunk of a message: 2 of 3 chunks"):
        earlier.on_lost(7, 5, "2 of 3 chunks are missing")
    allowed = replace(options, fail_on_data_loss=False)
    LookBack(allowed, topic, owner=None).on_lost(7, 5, "2 of 3 chunks are missing")
    assert "entry 7:5 is the last chunk" in caplog.text


class Price(Record):
    currency = String(required=True)


@pytest.mark.parametrize("encoding", KeyValueEncodingType)
def test_keys_and_values_of_the_clients_schema_are_decoded(
    service: Service, client: magnetar.Client, topic: str, encoding: KeyValueEncodingType
) -> None:
    schema = KeyValueSchema(ProtobufNativeSchema(pb.KeyValue), JsonSchema(Price), encoding)
    producer = client.create_producer(topic, schema=schema)
    key = pb.KeyValue(key="lens", value="5")
    producer.send(KeyValue(key, Price(currency="EUR")))
    producer.send(KeyValue(key, None))
    producer.send(KeyValue(None, Price(currency="USD")))
    producer.close()
    given = {
        "keyFormat": "protobuf",
        "keySchema": schema.key_schema.schema_info().schema(),
        "keyValueEncoding": encoding.name.lower(),
        "valueFormat": "json",
        "valueSchema": "currency string",
    }
    shown = {"key": "lens", "value": "5"}
    assert [(row["key"], row["value"]) for row in rows_of(service, topic, **given)] == [
        (shown, {"currency": "EUR"}),
        (shown, None),
        (None, {"currency": "USD"}),
    ]
    assert [row["key"] for row in rows_of(service, topic, "key", **given)] == [shown, shown, None]


def publish_two_versions(client: magnetar.Client, topic: str, kind: Any) -> None:
    class Flight(Record):
        id = Integer(required=True)
        old = String(required_default=True)

    first = Flight

    class Flight(Record):  # type: ignore[no-redef]
        id = Integer(required=True)
        price = Double(required_default=True)

    for record in (first(id=1, old="a"), Flight(id=2, price=5.5), first(id=3, old="b")):
        with client.create_producer(topic, schema=kind(type(record))) as producer:
            producer.send(record)


@pytest.mark.parametrize("kind", [AvroSchema, JsonSchema])
def test_messages_are_decoded_with_the_version_of_the_schema_that_wrote_them(
    service: Service, client: magnetar.Client, topic: str, kind: Any
) -> None:
    """pulsar-spark#25."""
    publish_two_versions(client, topic, kind)
    options = parse_options(
        {"service.url": service.grpc_url, "topic": topic, "valueFormat": "auto"}
    )
    assert schema_of(options)["value"].dataType.simpleString() == "struct<id:int,price:double>"
    newest = [{"id": 1, "price": None}, {"id": 2, "price": 5.5}, {"id": 3, "price": None}]
    assert [it["value"] for it in rows_of(service, topic, valueFormat="auto")] == newest
    wrong = StructType().add("value", MapType(StringType(), BinaryType()))
    with pytest.raises(BadRecord):
        list(read_task(options, wrong, plan_frame(options)[0]))
    # A query that began before the second version keeps the type with which it began.
    before = StructType().add("value", StructType().add("id", "long").add("old", "string"))
    assert schema_of(options, before)["value"].dataType == before["value"].dataType
    batches = [it for task in plan_frame(options) for it in read_task(options, before, task)]
    assert [row["value"] for it in batches for row in it.to_pylist()] == [
        {"id": 1, "old": "a"},
        {"id": 2, "old": None},
        {"id": 3, "old": "b"},
    ]


class Number(Schema):
    """The schema INT32 of Apache's Java client."""

    def __init__(self) -> None:
        super().__init__(int, SchemaType.INT32, None, "INT32")

    def encode(self, obj: Any) -> bytes:
        return int(obj).to_bytes(4, "big", signed=True)


def test_versions_of_a_topic_that_was_created_again_are_new(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    """Spark reuses the processes of its executors for the next query."""

    class First(Record):
        number = Integer(required=True)

    class Second(Record):
        text = String(required=True)

    def read() -> list[Any]:
        given = {"service.url": service.grpc_url, "topic": topic, "valueFormat": "auto"}
        source = MagnetarDataSource(given)
        reader = source.reader(source.schema())
        assert isinstance(reader, TopicScan)
        batches = [it for task in reader.partitions() for it in reader.read(task)]
        return [row["value"] for it in batches for row in it.to_pylist()]

    publish_records(client, topic, First(number=7))
    assert read() == [{"number": 7}]
    service.call(owner(service, topic).delete_topic(TopicName.parse(topic), force=True))
    publish_records(client, topic, Second(text="x"))
    assert read() == [{"text": "x"}]


def test_versions_of_a_topic_that_is_created_again_during_a_query_are_new(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    class First(Record):
        number = Integer(required=True)

    class Second(Record):
        text = String(required=True)
        number = Integer(required=True)

    def read() -> list[Any]:
        batches = [it for task in query.plan() for it in read_task(query.options, schema, task)]
        return [row["value"] for batch in batches for row in batch.to_pylist()]

    publish_records(client, topic, First(number=7))
    given = {"topic": topic, "startingOffsets": "earliest", "failOnDataLoss": "false"}
    query = Query(service, **given, valueFormat="auto")
    schema = schema_of(query.options)
    assert read() == [{"number": 7}]
    service.call(owner(service, topic).delete_topic(TopicName.parse(topic), force=True))
    publish_records(client, topic, Second(text="x", number=8))
    found: list[Any] = []
    wait_for(lambda: found.extend(read()) or found)
    assert found == [{"number": 8}]


def publish_records(client: magnetar.Client, topic: str, *records: Record) -> None:
    with client.create_producer(topic, schema=AvroSchema(type(records[0]))) as producer:
        for record in records:
            producer.send(record)


def test_primitive_values_are_decoded_by_the_topics_schema(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    with client.create_producer(topic) as plain:
        plain.send(b"no schema")
    with client.create_producer(topic, schema=Number()) as producer:
        producer.send(-7)
        producer.send(1 << 30)
    with pytest.raises(BadRecord, match="written without a schema"):
        rows_of(service, topic, valueFormat="auto")
    rows = rows_of(service, topic, valueFormat="auto", mode="permissive")
    assert [row["value"] for row in rows] == [None, -7, 1 << 30]
    assert [row["__corrupt"] for row in rows] == [b"no schema", None, None]
    only = StructType().add("__error", "string")
    given = {"service.url": service.grpc_url, "valueFormat": "auto", "mode": "permissive"}
    with pytest.raises(InvalidSchema, match="'__error': needs the column value"):
        schema_of(parse_options(given | {"topic": topic}), only)
    other = f"{topic}-text"
    with client.create_producer(other, schema=StringSchema()) as producer:
        producer.send("é")
    assert [it["value"] for it in rows_of(service, other, valueFormat="auto")] == ["é"]
    with pytest.raises(InvalidOption, match=r"different schemas: .* has int, .*-text has string"):
        schema_of(parse_options(given | {"topics": f"{topic},{other}"}))


def test_a_topic_without_a_schema_has_bytes(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 2)
    assert [it["value"] for it in rows_of(service, topic, valueFormat="auto")] == [b"0", b"1"]


def test_a_bad_key_is_named_and_makes_its_row_null(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    producer = client.create_producer(topic)
    producer.send(b'{"id":1}', partition_key="{}")
    producer.send(b'{"id":2}', partition_key="no JSON")
    producer.close()
    given = {"keyFormat": "json", "keySchema": "a int", "keyValueEncoding": "separated"} | JSON
    rows = rows_of(service, topic, mode="permissive", **given)
    assert [(row["key"], row["value"]) for row in rows] == [({"a": None}, {"id": 1}), (None, None)]
    assert rows[1]["__error"].startswith("key: JSON")
    assert rows[1]["__corrupt"] == b'{"id":2}'
    with pytest.raises(BadRecord, match="message 0 of the entry: key: JSON"):
        rows_of(service, topic, **given)
    inline = {"keyFormat": "bytes", "mode": "dropmalformed"}
    assert rows_of(service, topic, **inline) == []


def test_planned_ranges_are_read_from_the_owner(
    service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 6)
    [task] = Query(service, topic=topic, startingOffsets="earliest").plan()
    options = parse_options({"service.url": service.grpc_url, "topic": topic})
    reader = TopicReader(options, topic, owner=task.owners[topic])
    assert [stored.entry for stored in reader.read(task.spans)] == list(range(6))

"""The sink and the pipelines on Spark with executor processes, against a standalone server."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fakes.range_server import RangeServer, Topic, serving
from fakes.services import standalone_with_deduplication

import magnetar

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from magnetar.local_process import LocalProcess
    from magnetar.spark.pipelines.incremental import Archived

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

BORN_MS = 1_356_998_400_000  # 2013-01-01


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalProcess]:
    with standalone_with_deduplication(tmp_path_factory.mktemp("standalone")) as server:
        yield server


@pytest.fixture(scope="module")
def url(server: LocalProcess) -> str:
    return f"grpc://127.0.0.1:{server.ports['grpc']}"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[magnetar.Client]:
    with magnetar.Client(url) as client:
        yield client


_numbers = itertools.count()


@pytest.fixture
def topic() -> str:
    return f"written-{next(_numbers)}"


@pytest.fixture
def exact() -> str:
    return f"persistent://public/exact/written-{next(_numbers)}"


def write(frame: DataFrame, url: str, topic: str | None, **options: str) -> None:
    writer = frame.write.format("magnetar").mode("append").option("service.url", url)
    if topic is not None:
        writer = writer.option("topic", topic)
    for name, value in options.items():
        writer = writer.option(name, value)
    writer.save()


def read(spark: SparkSession, url: str, topic: str) -> list[Any]:
    reader = spark.read.format("magnetar").option("service.url", url).option("topic", topic)
    return reader.load().orderBy("__index").collect()


# -- Batch -------------------------------------------------------------------------------------


def test_every_part_of_a_row_is_in_its_message(
    spark: SparkSession, url: str, client: magnetar.Client, topic: str
) -> None:
    rows = spark.range(50).selectExpr(
        "cast(concat('value ', id) as binary) as value",
        "concat('k', id % 3) as __key",
        "'o' as __orderingKey",
        f"timestamp_millis({BORN_MS} + id) as __eventTime",
        "map('row', cast(id as string)) as __messageProperties",
    )
    consumer = client.subscribe(topic, "s")
    write(rows.coalesce(1), url, topic)
    for number in range(50):
        message = consumer.receive(30_000)
        assert message.data() == b"value %d" % number
        assert message.partition_key() == f"k{number % 3}"
        assert message.ordering_key() == "o"
        assert message.event_timestamp() == BORN_MS + number
        assert message.properties() == {"row": str(number)}


def test_a_topic_is_copied_with_all_that_its_messages_have(
    spark: SparkSession, url: str, client: magnetar.Client, topic: str
) -> None:
    producer = client.create_producer(topic)
    producer.send(None, partition_key="deleted")
    producer.send(b"", properties={"a": "b"}, event_timestamp=5)
    reader = spark.read.format("magnetar").option("service.url", url).option("topic", topic)
    rows = spark.createDataFrame([(b"\xff\xfe", b"binary key")], "__key binary, value binary")
    write(rows, url, topic)
    write(reader.load().coalesce(1), url, f"{topic}-copy")
    kept = ("value", "__key", "__eventTime", "__messageProperties")
    theirs, ours = read(spark, url, topic), read(spark, url, f"{topic}-copy")
    assert [[row[name] for name in kept] for row in ours] == [
        [row[name] for name in kept] for row in theirs
    ]
    assert len(ours) == 3
    assert ours[0]["value"] is None
    assert bytes(ours[2]["__key"]) == b"\xff\xfe"


def test_rows_choose_their_topics_and_partitions(
    spark: SparkSession, server: LocalProcess, url: str, client: magnetar.Client, topic: str
) -> None:
    admin = f"http://127.0.0.1:{server.ports['http']}/admin/v2/persistent/public/default"
    httpx.put(f"{admin}/{topic}/partitions", json=3, timeout=60).raise_for_status()
    rows = spark.range(40).selectExpr(
        "cast(id as string) as value",
        f"if(id < 10, '{topic}-other', '{topic}') as __topic",
        "if(id < 25, 'key', null) as __key",
    )
    write(rows, url, None)
    assert len(read(spark, url, f"{topic}-other")) == 10
    parts = [read(spark, url, f"{topic}-partition-{number}") for number in range(3)]
    assert sorted(int(row["value"]) for part in parts for row in part) == list(range(10, 40))
    with_key = [sum(row["__key"] is not None for row in part) for part in parts]
    assert sorted(with_key) == [0, 0, 15]  # all rows of a key go to one partition
    assert all(len(part) - keyed >= 4 for part, keyed in zip(parts, with_key, strict=True))


def test_columns_become_a_json_object(spark: SparkSession, url: str, topic: str) -> None:
    rows = spark.sql(
        "select 7 as number, 'é' as text, cast(null as double) as nothing, array(1, 2) as many,"
        " named_struct('a', timestamp'2013-01-01 00:00:00') as deep, map('k', 1.5d) as pairs,"
        " 'key' as __key"
    )
    write(rows, url, topic)
    write(rows.selectExpr("struct(number, text) as value"), url, topic)
    found = [json.loads(row["value"]) for row in read(spark, url, topic)]
    assert found[0] == {
        "number": 7,
        "text": "é",
        "nothing": None,
        "many": [1, 2],
        "deep": {"a": "2013-01-01T00:00:00+00:00"},
        "pairs": {"k": 1.5},
    }
    assert found[1] == {"number": 7, "text": "é"}


@pytest.mark.parametrize(
    ("row", "options", "named"),
    [
        ("'v' as value", {"topik": "t"}, "option 'topik': is unknown"),
        ("'v' as value", {"deliveryGuarantee": "dedup"}, "needs deduplication, which is off"),
        ("repeat('x', 6000000) as value", {}, "row 0 of partition 0.*MessageTooBig"),
        ("double('NaN') as number", {}, "row 0 of partition 0.*not JSON"),
    ],
)
def test_a_wrong_option_or_row_of_a_write_is_named(
    spark: SparkSession, url: str, topic: str, row: str, options: dict[str, str], named: str
) -> None:
    with pytest.raises(Exception, match=f"(?s){named}"):
        write(spark.sql(f"select {row}"), url, topic, **options)


def test_a_batch_job_that_is_run_again_stores_nothing_twice(
    spark: SparkSession, url: str, exact: str
) -> None:
    rows = spark.range(5_000).selectExpr("cast(id as string) as value")
    for _ in range(2):
        write(rows, url, exact, deliveryGuarantee="dedup", jobId="nightly")
    found = [int(row["value"]) for row in read(spark, url, exact)]
    assert sorted(found) == list(range(5_000))


def test_the_mode_overwrite_is_refused(spark: SparkSession, url: str, topic: str) -> None:
    rows = spark.sql("select 'v' as value")
    options = {"service.url": url, "topic": topic}
    with pytest.raises(Exception, match="a topic is never emptied"):
        rows.write.format("magnetar").mode("overwrite").options(**options).save()


# -- Exactly once ------------------------------------------------------------------------------


@pytest.mark.night
def test_a_task_whose_worker_dies_stores_each_row_once(
    spark: SparkSession, url: str, client: magnetar.Client, exact: str
) -> None:
    def dies_once(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        for number, batch in enumerate(batches):
            if number == 2 and context.attemptNumber() == 0:
                # Wait until the sink has stored rows: it takes rows before it has the receipts.
                with magnetar.Client(url) as client:
                    reader = client.create_reader(exact, magnetar.MessageId.earliest)
                    reader.read_next(60_000)
                os._exit(1)
            yield batch

    rows = spark.range(0, 40_000, 1, 1).selectExpr("cast(id as string) as value")
    write(rows.mapInArrow(dies_once, "value string"), url, exact, deliveryGuarantee="dedup")
    assert [int(row["value"]) for row in read(spark, url, exact)] == list(range(40_000))


def start(
    frame: DataFrame, url: str, topic: str, folder: Path, *, name: str = "", **options: str
) -> Any:
    stream = frame.writeStream.format("magnetar").option("service.url", url)
    stream = stream.option("topic", topic).option("checkpointLocation", str(folder / "checkpoint"))
    stream = stream.queryName(name) if name else stream
    return stream.options(**options).trigger(availableNow=True).start()


def files_of(spark: SparkSession, folder: Path, files: int, rows: int) -> DataFrame:
    """A stream of numbers from 0 on: one batch for each file. Spark takes files in the order of
    their times of modification."""
    (folder / "in").mkdir()
    first_s = datetime.now(UTC).timestamp() - files
    for number in range(files):
        file = folder / "in" / f"{number}.txt"
        file.write_text("".join(f"{number * rows + row}\n" for row in range(rows)))
        os.utime(file, (first_s + number, first_s + number))
    return spark.readStream.option("maxFilesPerTrigger", "1").text(str(folder / "in"))


def test_a_batch_that_is_repeated_is_stored_once(
    spark: SparkSession, url: str, exact: str, topic: str, tmp_path: Path
) -> None:
    """The driver was killed after the batch and before Spark noted the batch."""
    frame = files_of(spark, tmp_path, 3, 1_500)
    options = {"deliveryGuarantee": "dedup", "name": "numbers"}
    start(frame, url, exact, tmp_path, **options).awaitTermination(120)
    commits = tmp_path / "checkpoint" / "commits"
    assert sorted(file.name for file in commits.iterdir() if file.name.isdigit()) == ["0", "1", "2"]
    for left in ("2", ".2.crc"):
        (commits / left).unlink(missing_ok=True)
    start(frame, url, exact, tmp_path, **options).awaitTermination(120)
    assert (commits / "2").exists()
    found = [int(row["value"]) for row in read(spark, url, exact)]
    assert sorted(found) == list(range(4_500))
    # A lost checkpoint: the query's name tells that its rows are stored.
    shutil.rmtree(tmp_path / "checkpoint")
    query = start(frame, url, exact, tmp_path, **options)
    with pytest.raises(Exception, match="holds batch 2 of the query 'numbers' with another"):
        query.awaitTermination(120)
    # Without deduplication, a repeated batch is stored twice.
    shutil.rmtree(tmp_path / "checkpoint")
    start(frame, url, topic, tmp_path).awaitTermination(120)
    (commits / "2").unlink()
    (commits / ".2.crc").unlink(missing_ok=True)
    start(frame, url, topic, tmp_path).awaitTermination(120)
    assert len(read(spark, url, topic)) == 4_500 + 1_500


def test_a_query_continues_after_kills_of_the_server_and_stores_each_row_once(
    spark: SparkSession, server: LocalProcess, url: str, exact: str, tmp_path: Path
) -> None:
    frame = files_of(spark, tmp_path, 6, 4_000)
    options = {"deliveryGuarantee": "dedup", "batching": "key", "sendTimeoutMs": "120000"}
    rows = frame.selectExpr("value", "right(value, 1) as __key")
    query = start(rows, url, exact, tmp_path, **options)
    for kills in range(2):
        while (
            query.isActive
            and len(list((tmp_path / "checkpoint").glob("commits/[0-9]"))) < 1 + 2 * kills
        ):
            time.sleep(0.02)
        server.kill()
        server.start()
    assert query.awaitTermination(240)
    found = read(spark, url, exact)
    assert sorted(int(row["value"]) for row in found) == list(range(24_000))
    for digit in "07":  # the rows of a key are in order
        of_key = [int(row["value"]) for row in found if bytes(row["__key"]).decode() == digit]
        assert of_key == sorted(of_key)


def test_dedup_is_refused_where_the_broker_does_not_deduplicate(
    spark: SparkSession, url: str, topic: str, tmp_path: Path
) -> None:
    frame = files_of(spark, tmp_path, 1, 10)
    query = start(frame, url, topic, tmp_path, deliveryGuarantee="dedup")
    with pytest.raises(Exception, match=f"{topic}: .*needs deduplication, which is off"):
        query.awaitTermination(120)
    assert not (tmp_path / "checkpoint" / "commits" / "0").exists()


# -- Pipelines ---------------------------------------------------------------------------------


def publish(client: magnetar.Client, topic: str, count: int, *, first: int = 0) -> None:
    producer = client.create_producer(topic, block_if_queue_full=True)
    for number in range(first, first + count):
        producer.send_async(
            b"value %d" % number,
            lambda result, _: None,
            properties={"row": str(number)},
            partition_key=f"k{number % 7}",
            event_timestamp=BORN_MS + number,
        )
    producer.flush()
    producer.close()


def archive_new_messages(
    spark: SparkSession, url: str, topics: list[str], path: Path, **options: Any
) -> Archived:
    """One run of an incremental archive."""
    from magnetar.spark.pipelines.incremental import archive_new

    connection = {"service.url": url}
    return archive_new(spark, connection=connection, topics=topics, path=path, **options)


def test_an_archive_is_replayed_and_compacted_and_counted(
    spark: SparkSession, url: str, client: magnetar.Client, topic: str, exact: str, tmp_path: Path
) -> None:
    from magnetar.spark.pipelines.archive import PartitionBy, archive
    from magnetar.spark.pipelines.compact import compact
    from magnetar.spark.pipelines.replay import replay
    from magnetar.spark.pipelines.stats import picture, statistics

    publish(client, topic, 700)
    producer = client.create_producer(topic)
    producer.send(None, partition_key="k3")  # deletes the key
    producer.send(b"no key")
    producer.send(b"null", partition_key="__HIVE_DEFAULT_PARTITION__")
    path = tmp_path / "archive"
    compared = archive(
        spark, connection={"service.url": url}, topic=topic, path=path, partition_by=PartitionBy.KEY
    )
    assert all(part.equal for part in compared)
    assert (compared[0].partition, compared[0].in_archive) == ("key=(none)", 2)
    for _ in range(2):  # the second run stores nothing
        done = replay(spark, connection={"service.url": url}, path=path, topic=exact)
        assert (done.rows, done.files) == (703, 8)
    kept = ("value", "__key", "__eventTime", "__messageProperties")
    theirs, ours = read(spark, url, topic), read(spark, url, exact)
    assert sorted(str([row[name] for name in kept]) for row in ours) == sorted(
        str([row[name] for name in kept]) for row in theirs
    )
    of_key = [row["__messageProperties"].get("row") for row in ours if row["__key"] == b"k5"]
    assert of_key == [str(number) for number in range(700) if number % 7 == 5]
    into = f"{exact}-compacted"
    for _ in range(2):
        compacted = compact(spark, connection={"service.url": url}, topic=exact, into=into)
        numbers = (compacted.messages, compacted.without_key, compacted.keys, compacted.deleted)
        assert numbers == (703, 1, 8, 1)
    newest = {bytes(row["__key"]).decode(): bytes(row["value"]) for row in read(spark, url, into)}
    last = {f"k{number % 7}": b"value %d" % number for number in range(700) if number % 7 != 3}
    assert newest == last | {"__HIVE_DEFAULT_PARTITION__": b"null"}
    found = statistics(spark, connection={"service.url": url}, topics=[topic, into])
    by_topic = {one.topic: (one.messages, one.bytes) for one in found.topics}
    assert by_topic[topic] == (703, sum(len(row["value"] or b"") for row in theirs))
    assert by_topic[into][0] == 7
    assert found.keys_count == {topic: 8, into: 7}
    assert [(one.key, one.messages) for one in found.keys[:2]] == [("k3", 101), ("k0", 100)]
    assert sum(count for _, count in found.over_time[topic]) == 703
    pytest.importorskip("matplotlib")
    picture(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_statistics_read_each_message_once_and_divide_the_time_into_60_intervals(
    spark: SparkSession,
) -> None:
    from magnetar.spark.pipelines.stats import statistics

    stored = Topic()
    for second in (0, 60):
        stored.publish_ms = BORN_MS + 1_000 * second
        stored.add_batch(4, b"value")
    with serving(RangeServer(stored)) as server:
        found = statistics(spark, connection={"service.url": server.url}, topics=["t"])
    assert found.over_time == {"t": [(BORN_MS / 1_000, 1), (BORN_MS / 1_000 + 59, 1)]}
    assert server.reads == [(4, 0, 1)]


def test_the_newest_message_of_a_key_is_the_last_one_whatever_the_clocks_say(
    spark: SparkSession,
) -> None:
    from magnetar.spark.pipelines.compact import newest_of

    rows = [
        ("a", 0, 7, 900, "by a producer whose clock is ahead"),
        ("a", 0, 8, 100, "newest"),
        ("b", 1, 50, 100, "before a partition was added"),
        ("b", 2, 0, 300, "newest"),
    ]
    columns = "__key string, __partition int, __index bigint, __publishTime bigint, value string"
    found = newest_of(spark.createDataFrame(rows, columns)).select("__key", "value").collect()
    assert {row[0]: row[1] for row in found} == {"a": "newest", "b": "newest"}


def test_the_messages_of_a_job_stay_the_same_while_others_are_published(
    spark: SparkSession, server: LocalProcess, url: str, client: magnetar.Client, topic: str
) -> None:
    from magnetar.spark.pipelines.reading import extents, messages, within

    admin = f"http://127.0.0.1:{server.ports['http']}/admin/v2/persistent/public/default/{topic}"
    httpx.put(f"{admin}/partitions", json=2, timeout=60).raise_for_status()
    publish(client, f"{topic}-partition-0", 10)
    publish(client, f"{topic}-partition-1", 3)
    stored = extents(spark, {"service.url": url}, [topic])
    name = f"persistent://public/default/{topic}-partition-"
    found = {of: (extent.first, extent.last) for of, extent in stored.items()}
    assert found == {(f"{name}0", 0): (0, 9), (f"{name}1", 1): (0, 2)}
    publish(client, f"{topic}-partition-1", 4)
    assert within(messages(spark, {"service.url": url}, [topic]), stored).count() == 13


def test_messages_deleted_between_two_runs_fail_an_archive_unless_they_are_to_be_skipped(
    spark: SparkSession, server: LocalProcess, url: str, client: magnetar.Client, topic: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    run = partial(
        archive_new_messages, spark, url, [topic], tmp_path / "archive", subscription="archive"
    )
    publish(client, topic, 10)
    assert run().new == 10
    publish(client, topic, 5)
    admin = f"http://127.0.0.1:{server.ports['http']}/admin/v2/persistent/public/default/{topic}"
    stats = httpx.get(f"{admin}/stats", timeout=60).json()
    assert stats["subscriptions"]["archive"]["msgBacklog"] == 1  # an entry of five messages
    httpx.delete(f"{admin}/subscription/archive", timeout=60).raise_for_status()
    httpx.delete(f"{admin}/truncate", timeout=60).raise_for_status()
    publish(client, topic, 3)
    with pytest.raises(Exception, match="messages 10 to 14 were deleted"):
        run()
    done = run(skip_lost=True)
    assert (done.new, [part.equal for part in done.compared]) == (3, [True])


@pytest.mark.night
def test_the_archive_of_a_topic_that_was_created_again_is_compared_with_the_new_topic(
    spark: SparkSession, server: LocalProcess, url: str, client: magnetar.Client, topic: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    run = partial(archive_new_messages, spark, url, [topic], tmp_path / "archive")
    name = f"persistent://public/default/{topic}"
    publish(client, topic, 10)
    assert run().earlier == {}
    admin = f"http://127.0.0.1:{server.ports['http']}/admin/v2/persistent/public/default/{topic}"
    httpx.delete(admin, timeout=60).raise_for_status()
    publish(client, topic, 3, first=100)
    with pytest.raises(Exception, match="the topic was deleted and created again"):
        run()
    done = run(skip_lost=True)
    [part] = done.compared
    assert (done.new, part.in_topic, part.in_archive, part.equal) == (3, 3, 3, True)
    assert done.earlier == {name: 10}
    publish(client, topic, 9, first=200)
    done = run()
    [part] = done.compared
    assert (done.new, part.in_topic, part.in_archive, part.equal) == (9, 12, 12, True)
    assert done.earlier == {name: 10}


def test_a_topic_that_was_created_again_is_compacted_again(
    spark: SparkSession, server: LocalProcess, url: str, client: magnetar.Client, topic: str,
    exact: str,
) -> None:  # fmt: skip
    from magnetar.spark.pipelines.compact import compact

    admin = f"http://127.0.0.1:{server.ports['http']}/admin/v2/persistent/public/default/{topic}"
    for first in (0, 100):  # as many messages as before
        publish(client, topic, 7, first=first)
        compact(spark, connection={"service.url": url}, topic=topic, into=exact)
        httpx.delete(admin, params={"force": "true"}, timeout=60).raise_for_status()
    assert len(read(spark, url, exact)) == 14


def test_a_replay_of_an_archive_of_two_topics_of_one_name_begins_with_the_earlier_topic(
    spark: SparkSession, url: str, exact: str, tmp_path: Path
) -> None:
    from magnetar.protos.pulsar_pb2 import MessageIdData
    from magnetar.spark.pipelines.replay import replay

    ledgers = [(7, 0), (300, 0), (7, 1), (300, 1)]
    rows = [
        (b"%d:%d" % (ledger, index), b"k", MessageIdData(ledgerId=ledger, entryId=0), index)
        for ledger, index in ledgers
    ]
    columns = "value binary, __key binary, __messageId binary, __index bigint"
    written = [(value, key, id_.SerializeToString(), index) for value, key, id_, index in rows]
    path = tmp_path / "archive"
    spark.createDataFrame(written, columns).coalesce(1).write.parquet(str(path))
    replay(spark, connection={"service.url": url}, path=path, topic=exact)
    found = [bytes(row["value"]) for row in read(spark, url, exact)]
    assert found == [b"7:0", b"7:1", b"300:0", b"300:1"]


def test_the_ledger_of_a_message_is_found_in_its_id(spark: SparkSession) -> None:
    from pyspark.sql import functions as F

    from magnetar.protos.pulsar_pb2 import MessageIdData
    from magnetar.spark.pipelines.reading import ledger_column

    ledgers = [0, 1, 127, 128, 300, 2**14, 2**35 + 7, 2**62 + 5, 2**63 - 1]
    ids = [(MessageIdData(ledgerId=it, entryId=it % 999).SerializeToString(),) for it in ledgers]
    rows = spark.createDataFrame(ids, "__messageId binary")
    assert [row[0] for row in rows.select(ledger_column()).collect()] == ledgers
    assert rows.agg(F.min(ledger_column())).first() == (0,)


def test_an_incremental_archive_holds_each_message_of_its_topics_once(
    spark: SparkSession, url: str, client: magnetar.Client, topic: str, tmp_path: Path
) -> None:
    from magnetar.spark.errors import TargetForeign

    topics = [topic, f"{topic}-lost"]
    path = tmp_path / "archive"
    run = partial(archive_new_messages, spark, url, topics, path)
    for name in topics:
        client.subscribe(name, "s").close()
    for _ in range(2):  # topics without messages
        done = run()
        assert (done.new, done.compared) == (0, [])
    publish(client, topics[0], 100)
    publish(client, topics[1], 50)
    done = run()
    assert done.new == 150
    assert [(part.in_archive, part.equal) for part in done.compared] == [(100, True), (50, True)]
    # A run that was killed after its files were written and before Spark noted the batch.
    commits = path / "_checkpoint" / "commits"
    last = max(int(it.name) for it in commits.iterdir() if it.name.isdigit())
    for left in (commits / str(last), commits / f".{last}.crc"):
        left.unlink()
    done = run()
    assert done.new == 0
    assert [(part.in_archive, part.equal) for part in done.compared] == [(100, True), (50, True)]
    # An archive without one of its topics, although the checkpoint contains the topic.
    listed = path / "_spark_metadata"
    for left in listed.glob(".*.crc"):
        left.unlink()
    for batch in listed.iterdir():
        lines = batch.read_text().splitlines()
        batch.write_text("\n".join(line for line in lines if f"{topic}-lost" not in line))
    publish(client, topic, 2, first=100)
    found = [(part.in_topic, part.in_archive, part.equal) for part in run().compared]
    assert found == [(102, 102, True), (50, 0, False)]
    (tmp_path / "file").touch()
    with pytest.raises(TargetForeign, match="not an incremental archive"):
        archive_new_messages(spark, url, topics, tmp_path)

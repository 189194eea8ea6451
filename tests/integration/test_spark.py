"""Spark, its executors being processes of their own, against a standalone server."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import pulsar
import pyarrow.parquet as pq
import pytest
from fakes.range_server import RangeServer, Topic, serving
from fakes.services import Service, brokers_in_thread, standalone_process
from fakes.standalone_process import StandaloneProcess
from typer.testing import CliRunner

import magnetar
from magnetar.broker.session.access import Accepted, AllowAll, Credentials, Outcome, Refused
from magnetar.cli import spark_job
from magnetar.cli.main import make_app
from magnetar.schema import AvroSchema, Integer, Record, String
from magnetar.spark.errors import TargetBusy, TargetNotEmpty
from magnetar.spark.source.options import parse_options
from magnetar.spark.source.partition_reader import TopicReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from click.testing import Result
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

BORN_MS = 1_356_998_400_000  # 2013-01-01
TOKEN = b"eyJhbGciOi"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with standalone_process(tmp_path_factory.mktemp("standalone")) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[magnetar.Client]:
    with magnetar.Client(service.grpc_url) as client:
        yield client


_numbers = itertools.count()


@pytest.fixture
def topic() -> str:
    return f"flights-{next(_numbers)}"


def reader(spark: SparkSession, url: str, topic: str) -> DataFrameReader:
    return spark.read.format("magnetar").option("service.url", url).option("topic", topic)


def publish(client: magnetar.Client, topic: str, count: int) -> None:
    """Two days of messages with every part, in batches."""
    producer = client.create_producer(topic, block_if_queue_full=True)
    for number in range(count):
        producer.send_async(
            b"value %d" % number,
            lambda result, _: None,
            properties={"row": str(number), "even": str(number % 2 == 0)},
            partition_key=("AA", "UA", "é")[number % 3],
            event_timestamp=BORN_MS + number * 86_400_000 // (count // 2),
        )
    producer.flush()
    producer.close()


def values(frame: DataFrame) -> list[bytes]:
    return [bytes(row["value"]) for row in frame.orderBy("__index").collect()]


def test_every_part_of_a_message_is_what_a_reader_gets(
    spark: SparkSession, service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 50)
    one = client.create_producer(topic, batching_enabled=False)
    one.send(b"", properties={})
    rows = reader(spark, service.grpc_url, topic).load().orderBy("__index").collect()
    assert len(rows) == 51
    with_client = client.create_reader(topic, magnetar.MessageId.earliest)
    for index, row in enumerate(rows):
        message = with_client.read_next(30_000)
        assert bytes(row["value"]) == message.data()
        assert row["__messageProperties"] == message.properties()
        key = row["__key"]
        assert (key.decode() if key else "") == message.partition_key()
        assert bytes(row["__messageId"]) == message.message_id().serialize()
        assert row["__index"] == index
        assert row["__partition"] == -1
        assert row["__topic"] == f"persistent://public/default/{topic}"
        assert _ms(row["__publishTime"]) == message.publish_timestamp()
        assert _ms(row["__eventTime"]) == message.event_timestamp()


def _ms(moment: datetime | None) -> int:
    """Milliseconds of a time from Spark, which is local and has no zone."""
    return 0 if moment is None else round(moment.timestamp() * 1_000)


@pytest.mark.parametrize("codec", ["NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY"])
@pytest.mark.parametrize("batched", [True, False])
def test_spark_reads_messages_of_apaches_client(
    spark: SparkSession, service: Service, topic: str, codec: str, batched: bool
) -> None:
    apache = pulsar.Client(
        service.pulsar_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    )
    producer = apache.create_producer(
        topic, batching_enabled=batched, compression_type=getattr(pulsar.CompressionType, codec)
    )
    sent = [b"", *(b"%d " % number * number for number in range(1, 30))]
    for number, value in enumerate(sent):
        producer.send_async(value, lambda *_: None, partition_key=f"k{number % 2}")
    producer.flush()
    apache.close()
    frame = reader(spark, service.grpc_url, topic).schema(
        "value binary, __key binary, __index bigint"
    )
    rows = frame.load().orderBy("__index").collect()
    assert sorted(bytes(row["value"]) for row in rows) == sorted(sent)
    assert {bytes(row["__key"]) for row in rows if len(sent[2]) and row["value"] == sent[2]} == {
        b"k0"
    }


def test_a_large_topic_is_read_by_many_tasks(
    spark: SparkSession, service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 20_000)
    frame = (
        reader(spark, service.grpc_url, topic)
        .option("targetBytesPerTask", "100000")
        .option("maxPartitions", "7")
        .schema("__index bigint, value binary")
        .load()
    )
    assert frame.rdd.getNumPartitions() == 7
    assert values(frame) == [b"value %d" % number for number in range(20_000)]


def test_actions_of_a_frame_read_the_same_whatever_is_published_meanwhile(
    spark: SparkSession, service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 10)
    frame = reader(spark, service.grpc_url, topic).load()
    assert frame.count() == 10
    publish(client, topic, 10)
    assert (frame.count(), len(frame.collect()), frame.where("__index > 4").count()) == (10, 10, 5)
    assert reader(spark, service.grpc_url, topic).load().count() == 20


PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def test_filters_that_are_pushed_down_save_reading(
    spark: SparkSession, service: Service, client: magnetar.Client, topic: str
) -> None:
    publish(client, topic, 3_000)
    source = reader(spark, service.grpc_url, topic).option("filterPushdown", "true")
    source = source.option("maxPartitions", "100").option("targetBytesPerTask", "1")
    with pytest.raises(Exception, match="filterPushdown"):  # Spark's own setting is off
        source.load().count()
    spark.conf.set(PUSHDOWN, "true")
    try:
        frame = source.load().where(
            "__index between 990 and 1019 and __eventTime < timestamp'2013-01-02'"
            " and __publishTime > timestamp'2013-01-02' and __key = X'5541' and __partition in (-1)"
            " and cast(value as string) < 'value 994'"  # no filter that the source can use
        )
        found = values(frame)
        tasks = frame.rdd.getNumPartitions()
    finally:
        spark.conf.unset(PUSHDOWN)
    assert found == [b"value 991"] + [b"value %d" % it for it in range(1_000, 1_020, 3)]
    assert tasks < 10


def test_a_topic_that_was_only_subscribed_is_empty(
    spark: SparkSession, service: Service, client: magnetar.Client, topic: str
) -> None:
    client.subscribe(topic, "s").close()
    assert reader(spark, service.grpc_url, topic).load().collect() == []


def test_the_topics_schema_gives_the_columns(
    spark: SparkSession, service: Service, client: magnetar.Client, topic: str
) -> None:
    class Flight(Record):
        carrier = String(required=True)
        delay = Integer()

    with client.create_producer(topic, schema=AvroSchema(Flight)) as producer:
        producer.send(Flight(carrier="UA", delay=4))
        producer.send(Flight(carrier="AA", delay=None))
    given = reader(spark, service.grpc_url, topic).option("valueFormat", "auto")
    assert (
        given.load().schema["value"].dataType.simpleString() == "struct<carrier:string,delay:int>"
    )
    rows = given.load().select("value.*").orderBy("carrier").collect()
    assert [tuple(row) for row in rows] == [("AA", None), ("UA", 4)]


def test_spark_shows_no_token_in_its_plans_and_errors(
    spark: SparkSession, service: Service, topic: str
) -> None:
    given = {
        "service.url": service.grpc_url,
        "topic": topic,
        "pulsar.client.authPluginClassName": "token",
        "pulsar.client.authParams": "token:eyJhbGciOi",
    }
    frame = spark.read.format("magnetar").options(**given).load()
    stream = spark.readStream.format("magnetar").options(**given).load()
    shown = [it._jdf.queryExecution().toString() for it in (frame, stream)]
    assert "*********(redacted)" in shown[1]  # a plan of a stream has the options
    with pytest.raises(Exception, match="does not exist") as caught:
        frame.collect()
    for text in (*shown, str(caught.value)):
        assert "eyJhbGciOi" not in text


@pytest.mark.parametrize(
    ("options", "schema", "named"),
    [
        ({"topic": "never-written"}, None, "topic .*never-written does not exist"),
        ({"startingOffset": "latest"}, None, "option 'startingoffset': is unknown"),
        ({"topic": "a/b"}, None, "option 'topic'"),
        ({}, "carrier string", "column 'carrier': is unknown; a topic has the columns"),
        ({}, "value string", "column 'value': has the type binary, not string"),
        ({"service.url": "pulsar://localhost:6650"}, None, "option 'service.url'"),
        ({"service.url": "grpc://localhost:1", "readTimeoutMs": "200"}, None, "no data for"),
    ],
)
def test_a_wrong_option_or_column_of_a_read_is_named(
    spark: SparkSession, service: Service, options: dict[str, str], schema: str | None, named: str
) -> None:
    given = reader(spark, service.grpc_url, "t").options(**options)
    given = given.schema(schema) if schema else given
    with pytest.raises(Exception, match=named):
        given.load().collect()


def test_a_read_continues_at_the_next_owner(spark: SparkSession) -> None:
    """The owner dies in the middle of each task's range. Another broker then serves the topic."""
    topic = Topic()
    for number in range(40):
        topic.add_batch(4 + number // 20, b"%d" % number, b"%d second" % number)
    with serving(RangeServer(topic)) as new, serving(RangeServer(topic)) as old:

        def die(sent: int, call: grpc.ServicerContext, frame: bytes) -> bytes:
            if sent == 2:
                old.owner = new.url
                call.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            return frame

        old.before_frame = die
        frame = reader(spark, old.url, "t").option("targetBytesPerTask", "1000").load()
        rows = frame.select("__index", "value").orderBy("__index").collect()
        assert [row["__index"] for row in rows] == list(range(80))
        assert [bytes(row["value"]) for row in rows[::2]] == [b"%d" % n for n in range(40)]
        assert old.reads
        assert any(first > 0 for _, first, _ in new.reads)


def test_a_read_survives_kill_9_of_the_server(tmp_path: Path) -> None:
    server = StandaloneProcess(tmp_path)
    server.start()
    try:
        url = f"grpc://127.0.0.1:{server.grpc_port}"
        with magnetar.Client(url) as client:
            producer = client.create_producer("t", block_if_queue_full=True)
            for number in range(200):
                producer.send_async(number.to_bytes(4, "big") * 25_000, lambda *_: None)
            producer.flush()
        topic = TopicReader(
            parse_options({"service.url": url, "topic": "t"}), "persistent://public/default/t"
        )
        spans = topic.plan()
        assert sum(span.bytes for span in spans) > 20_000_000  # frames have 2 MiB, 2 are read ahead
        reading = topic.read(spans)
        before = [next(reading) for _ in range(3)]
        server.kill()
        server.start()
        entries = [read.entry for read in (*before, *reading)]
        assert entries == list(range(spans[0].last + 1))
    finally:
        server.end()


# -- The archive -------------------------------------------------------------------------------


class Lent:
    """The session of the tests, which a command must not stop."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def stop(self) -> None:
        pass


Commands: TypeAlias = "Callable[..., Result]"


@pytest.fixture
def commands(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Runs commands in this process with the session of the tests: a start of Java costs more CPU
    than a job."""
    monkeypatch.setattr(spark_job, "spark_session", lambda *_, **settings: Lent(spark))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(make_app(arguments), list(arguments))

    return run


def archived(spark: SparkSession, url: str, topic: str, path: Path, **options: Any) -> list[Any]:
    from magnetar.spark.pipelines.archive import archive

    return archive(spark, connection={"service.url": url}, topic=topic, path=path, **options)


@pytest.mark.parametrize(
    ("partition_by", "partitions"),
    [
        ("publish-hour", None),
        ("event-date", ["event_date=2013-01-01", "event_date=2013-01-02"]),
        ("key", ["key=AA", "key=UA", "key=é"]),
        ("none", [""]),
    ],
)
def test_an_archive_is_all_of_the_topic(
    spark: SparkSession,
    service: Service,
    client: magnetar.Client,
    topic: str,
    tmp_path: Path,
    partition_by: str,
    partitions: list[str] | None,
) -> None:
    from magnetar.spark.pipelines.archive import PartitionBy

    publish(client, topic, 600)
    path = tmp_path / "deep" / "archive"
    compared = archived(
        spark, service.grpc_url, topic, path, partition_by=PartitionBy(partition_by)
    )
    assert all(part.equal for part in compared)
    assert sum(part.in_archive for part in compared) == 600
    if partitions is not None:
        assert [part.partition for part in compared] == partitions
    table = pq.read_table(path, columns=["__index", "value"]).sort_by("__index")
    assert table["value"].to_pylist() == [b"value %d" % number for number in range(600)]
    assert [child.name for child in path.parent.iterdir()] == ["archive"]


def test_a_key_that_cannot_name_a_directory_is_archived_with_messages_without_a_key(
    spark: SparkSession, service: Service, client: magnetar.Client, topic: str, tmp_path: Path
) -> None:
    from magnetar.spark.pipelines.archive import PartitionBy

    longest = "\"#%'*/:=?\\{[]^\x01\x1f\x7f" + "=" * 66 + "ab"  # 251 bytes when escaped
    producer = client.create_producer(topic)
    for key in ("k", longest, f"{longest}c", "é" * 125 + "e", "é" * 126, "a\x00b", "\x00"):
        producer.send(key.encode(), partition_key=key)
    producer.close()
    path = tmp_path / "archive"
    compared = archived(spark, service.grpc_url, topic, path, partition_by=PartitionBy.KEY)
    assert all(part.equal for part in compared)
    assert {part.partition: part.in_archive for part in compared} == {
        "key=(none)": 4,
        "key=k": 1,
        f"key={longest}": 1,
        f"key={'é' * 125}e": 1,
    }
    names = [len(child.name.encode()) for child in path.iterdir() if child.is_dir()]
    assert sorted(names) == [5, 30, 255, 255]


def test_an_archive_is_replaced_only_with_the_option_for_it(
    spark: SparkSession, service: Service, client: magnetar.Client, topic: str, tmp_path: Path
) -> None:
    path = tmp_path / "archive"
    publish(client, topic, 10)
    archived(spark, service.grpc_url, topic, path)
    publish(client, topic, 10)
    with pytest.raises(TargetNotEmpty, match="archive"):
        archived(spark, service.grpc_url, topic, path)
    assert pq.read_table(path).num_rows == 10
    archived(spark, service.grpc_url, topic, path, overwrite=True)
    assert pq.read_table(path).num_rows == 20


def test_dates_of_an_archive_are_utc_in_any_session_time_zone(
    spark: SparkSession, service: Service, client: magnetar.Client, topic: str, tmp_path: Path
) -> None:
    from magnetar.spark.pipelines.archive import PartitionBy

    publish(client, topic, 10)
    elsewhere = spark.newSession()
    elsewhere.conf.set("spark.sql.session.timeZone", "Pacific/Auckland")
    path = tmp_path / "archive"
    compared = archived(
        elsewhere, service.grpc_url, topic, path, partition_by=PartitionBy.EVENT_DATE
    )
    assert [(part.partition, part.in_archive) for part in compared] == [
        ("event_date=2013-01-01", 5),
        ("event_date=2013-01-02", 5),
    ]
    assert elsewhere.conf.get("spark.sql.session.timeZone") == "Pacific/Auckland"


def test_two_runs_never_write_the_same_archive(
    spark: SparkSession, service: Service, client: magnetar.Client, topic: str, tmp_path: Path
) -> None:
    from magnetar.spark.pipelines.target import staged

    publish(client, topic, 10)
    path = tmp_path / "archive"
    with staged(path) as new:
        new.mkdir()
        with pytest.raises(TargetBusy, match="another run"):
            archived(spark, service.grpc_url, topic, path)
        assert new.exists()
    archived(spark, service.grpc_url, topic, path)
    assert pq.read_table(path).num_rows == 10


@pytest.mark.parametrize(
    "damage",
    [
        "__index <> 7",  # a row is missing
        "true union all select * from topic where __index = 7",  # a row is there twice
        "swapped",
    ],
)
def test_an_archive_that_differs_is_noticed(
    spark: SparkSession, service: Service, client: magnetar.Client, topic: str, damage: str
) -> None:
    from magnetar.spark.pipelines.archive import compare

    publish(client, topic, 20)
    frame = reader(spark, service.grpc_url, topic).load()
    frame.createOrReplaceTempView("topic")
    if damage == "swapped":  # two rows have swapped their values
        other = spark.sql(
            "select case __index when 3 then cast('value 4' as binary) when 4 then"
            " cast('value 3' as binary) else value end as value, * except (value) from topic"
        )
    else:
        other = spark.sql(f"select * from topic where {damage}")
    [part] = compare(frame, other, [])
    assert not part.equal
    assert part.in_topic == 20
    [same] = compare(frame, spark.sql("select * from topic order by value"), [])
    assert same.equal


def test_the_archive_command_reports_what_it_did(
    commands: Commands, service: Service, client: magnetar.Client, topic: str, tmp_path: Path
) -> None:
    day = datetime.now(UTC).date()  # the day of the partition, also if the test runs past midnight
    publish(client, topic, 30)
    path = tmp_path / "archive"
    (tmp_path / "token").write_bytes(TOKEN)
    where = ["--service-url", service.grpc_url, "--auth-plugin", "token"]
    where += ["--auth-params", f"file://{tmp_path / 'token'}"]
    archive = ["spark", "archive", *where, "--topic", topic, "--path", str(path)]
    done = _run([sys.executable, "-m", "magnetar.cli.main", *archive])
    assert TOKEN.decode() not in done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    assert f"publish_date={day}" in done.stdout or "2 partitions" in done.stdout
    assert "30" in done.stdout
    assert done.stdout.endswith(f"To read the archive: spark.read.parquet({str(path)!r})\n")
    assert pq.read_table(path).num_rows == 30
    again = commands(*archive)
    assert again.exit_code == 1
    assert "--overwrite" in again.stderr
    archive[-4:] = ["--topic", "never-written", "--path", str(tmp_path / "other")]
    nowhere = commands(*archive)
    assert nowhere.exit_code == 1
    assert "topic persistent://public/default/never-written does not exist" in nowhere.stderr


def test_the_command_names_what_it_failed_of(commands: Commands, tmp_path: Path) -> None:
    topic = Topic()
    topic.add_batch(4, b"value")
    with serving(RangeServer(topic)) as server:
        archive = ("spark", "archive", "--topic", "t", "--service-url", server.url, "--path")
        (tmp_path / "file").touch()
        unusable = commands(*archive, str(tmp_path / "file" / "archive"))
        assert unusable.exit_code == 1
        assert re.fullmatch(r"Error: .*/file/.*: Not a directory\n", unusable.stderr)
        [damaged] = topic.ledgers[4]
        topic.ledgers[4] = [damaged[:-1] + b"?"]
        failed = commands(*archive, str(tmp_path / "archive"))
    assert failed.exit_code == 1
    told = "Error: UnreadableEntry: persistent://public/default/t, entry 4:0: "
    assert failed.stderr.splitlines()[-1].startswith(told), failed.stderr
    assert [child.name for child in tmp_path.iterdir()] == ["file"]


class OneToken:
    """Accepts one token."""

    def authenticate(self, credentials: Credentials) -> Outcome:
        if credentials.data == TOKEN:
            return Accepted("job", AllowAll())
        return Refused("the token is not valid")


@pytest.fixture
def java_log(spark: SparkSession) -> Iterator[Callable[[], str]]:
    """What Java logs during a test. The stderr of the tests' Java is open since its start, so a
    test cannot capture it."""
    log4j = spark._jvm.org.apache.logging.log4j
    log = spark._jvm.java.io.StringWriter()
    layout = log4j.core.layout.PatternLayout.newBuilder().withPattern("%p %c: %m%n%ex").build()
    appender = log4j.core.appender.WriterAppender.createAppender(
        layout, None, log, "test", False, False
    )
    appender.start()
    root = log4j.LogManager.getRootLogger()
    root.addAppender(appender)
    yield log.toString
    root.removeAppender(appender)
    appender.stop()


def test_a_command_reads_and_writes_with_credentials(
    commands: Commands, java_log: Callable[[], str], tmp_path: Path
) -> None:
    held, wrong = tmp_path / "token", tmp_path / "wrong"
    held.write_bytes(TOKEN)
    wrong.write_bytes(b"another")
    token = magnetar.AuthenticationToken(TOKEN.decode())
    with brokers_in_thread(2, OneToken) as service:
        with magnetar.Client(service.grpc_url, authentication=token) as client:
            publish(client, "in", 30)
        where = ["--service-url", service.grpc_url, "--auth-plugin", "token"]
        copies = (
            *("spark", "compact", "--topic", "in", "--into", "out", "--delivery", "at-least-once"),
            *(*where, "--auth-params", f"file://{held}"),
        )
        done = commands(*copies)
        assert done.exit_code == 0, done.stderr
        with magnetar.Client(service.grpc_url, authentication=token) as client:
            reader = client.create_reader("out", magnetar.MessageId.earliest)
            keys = {reader.read_next(30_000).partition_key() for _ in range(3)}
        reads = ("spark", "archive", "--topic", "in", "--path", str(tmp_path / "a"))
        refused = commands(*reads, *where, "--auth-params", f"file://{wrong}")
    assert keys == {"AA", "UA", "é"}
    assert refused.exit_code == 1
    assert "NotAuthenticated: " in refused.stderr
    assert TOKEN.decode() not in done.stdout + done.stderr + refused.stdout + refused.stderr
    assert TOKEN.decode() not in java_log()


def test_ctrl_c_while_java_starts_ends_java_too(
    spark: SparkSession, service: Service, client: magnetar.Client, topic: str, tmp_path: Path
) -> None:
    client.create_producer(topic).send(b"value")
    command = [sys.executable, "-m", "magnetar.cli.main", "spark", "archive"]
    command += ["--service-url", service.grpc_url, "--topic", topic]
    command += ["--path", str(tmp_path / "archive")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            # Wait for the exec, and until the process sleeps: Python ignores the exception of a
            # signal during its fork hooks.
            while not (started := children_of(running.pid)) or not sleeps(running.pid):
                assert running.poll() is None, running.stderr
                time.sleep(0.01)
            running.send_signal(signal.SIGINT)
            _, said = running.communicate(timeout=60)  # ends only when Java has closed stderr, too
        finally:
            running.kill()
    assert running.returncode == 130
    assert "Exception" not in said
    assert not any(Path(f"/proc/{pid}/fd/2").exists() for pid in started)
    assert not list(tmp_path.iterdir())


def sleeps(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("S")


def children_of(process: int) -> list[int]:
    """The child processes that run Spark's script or, later, Java."""
    started = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in started}
    programs = b"bin/spark-submit", b"bin/spark-class", b"org.apache.spark"
    return [pid for pid, command in commands.items() if any(it in command for it in programs)]


@pytest.mark.night
def test_under_spark_submit_its_settings_win(spark: SparkSession, tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "from magnetar.spark.session import spark_session\n"
        "spark = spark_session('job', master='local[7]', spark_task_maxFailures='3')\n"
        "names = ('spark.sql.shuffle.partitions', 'spark.ui.enabled', 'spark.master')\n"
        "print('told', *(spark.conf.get(name) for name in names))\n"
        "spark.stop()\n"
    )
    submit = [str(Path(sys.executable).with_name("spark-submit")), "--master", "local[1]"]
    done = _run([*submit, "--conf", "spark.sql.shuffle.partitions=9", str(job)])
    assert "told 9 false local[1]" in done.stdout, done.stderr


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if "SPARK" not in name}
    environment["PYSPARK_DRIVER_PYTHON"] = sys.executable  # the Python of spark-submit's driver
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=environment, check=False
    )

"""Schemas with our client and Apache's, in both directions, against one server.

The judge is Apache's client: both make the same definition of a class, share the versions in the
registry, and read each other's messages, also those of another version.
"""

from __future__ import annotations

import itertools
import json
import queue
import re
import urllib.request
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pulsar
import pulsar.schema as theirs
import pytest
from fakes.standalone_process import StandaloneProcess
from pydantic import BaseModel

import magnetar
import magnetar.asyncio
import magnetar.schema as ours
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.real_loop]

EARLIEST = magnetar.InitialPosition.Earliest
TIMEOUT_MS = 20_000
names = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(tmp_path_factory.mktemp("server"))
    process.start()
    yield process
    process.end()


@pytest.fixture(scope="module", params=["grpc", "pulsar"])
def client(server: StandaloneProcess, request: Any) -> Iterator[magnetar.Client]:
    url = server.service_url if request.param == "grpc" else server.pulsar_url
    client = magnetar.Client(url)
    yield client
    client.shutdown()


@pytest.fixture(scope="module")
def apache(server: StandaloneProcess) -> Iterator[pulsar.Client]:
    logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    client = pulsar.Client(server.pulsar_url, logger=logger)
    yield client
    client.close()


@pytest.fixture
def topic() -> str:
    return f"t{next(names)}"


class Color(Enum):
    RED = 1
    GREEN = 2


def classes(module: Any, *, newer: bool = False) -> Any:
    """The same record classes, built with one of the two modules."""

    class Part(module.Record):
        name = module.String(required=True)

    body: dict[str, Any] = {
        "text": module.String(),
        "number": module.Integer(),
        "large": module.Long(),
        "ratio": module.Double(),
        "flag": module.Boolean(),
        "raw": module.Bytes(),
        "color": module.CustomEnum(Color),
        "part": Part(),
        "parts": module.Array(Part()),
        "counts": module.Map(module.Integer()),
    }
    if newer:
        body["note"] = module.String(default="none", required_default=True)
    return type("Order", (module.Record,), body), Part


def order(module: Any, *, raw: Any = b"\x01\xff", **more: Any) -> Any:
    made, part = classes(module, newer="note" in more)
    return made, made(
        text="a",
        number=1,
        large=1 << 40,
        ratio=0.5,
        flag=True,
        raw=raw,
        color=Color.GREEN,
        part=part(name="p"),
        parts=[part(name="q")],
        counts={"k": 3},
        **more,
    )


def check(found: Any) -> None:
    assert (found.text, found.number, found.large) == ("a", 1, 1 << 40)
    assert (found.ratio, found.flag) == (0.5, True)
    assert found.color is Color.GREEN
    assert (found.part.name, found.parts[0].name, found.counts) == ("p", "q", {"k": 3})


@pytest.mark.parametrize("kind", ["AvroSchema", "JsonSchema"])
def test_records_travel_in_both_directions(
    client: magnetar.Client, apache: pulsar.Client, topic: str, kind: str
) -> None:
    raw = b"\x01\xff" if kind == "AvroSchema" else b"text"
    my_class, mine = order(ours, raw=raw)
    their_class, their = order(theirs, raw=raw)
    my_schema, their_schema = getattr(ours, kind)(my_class), getattr(theirs, kind)(their_class)
    consumer = client.subscribe(topic, "mine", schema=my_schema)
    their_consumer = apache.subscribe(topic, "theirs", schema=their_schema)
    producer = client.create_producer(topic, schema=my_schema)
    their_producer = apache.create_producer(topic, schema=their_schema)
    producer.send(mine)
    their_producer.send(their)
    for _ in range(2):
        message = consumer.receive(TIMEOUT_MS)
        assert message.schema_version().encode("latin-1") == bytes(8), (
            "both clients share one schema version"
        )
        check(message.value())
        assert message.value().raw == raw
        check(their_consumer.receive(TIMEOUT_MS).value())


def test_text_and_bytes_travel_in_both_directions(
    client: magnetar.Client, apache: pulsar.Client, topic: str
) -> None:
    consumer = client.subscribe(topic, "mine", schema=ours.StringSchema())
    their_consumer = apache.subscribe(topic, "theirs", schema=theirs.StringSchema())
    client.create_producer(topic, schema=ours.StringSchema()).send("größer")
    apache.create_producer(topic, schema=theirs.StringSchema()).send("größer")
    for _ in range(2):
        assert consumer.receive(TIMEOUT_MS).value() == "größer"
        assert their_consumer.receive(TIMEOUT_MS).value() == "größer"
    raw = client.create_producer(f"{topic}-bytes", schema=ours.BytesSchema())
    reader = client.create_reader(
        f"{topic}-bytes", magnetar.MessageId.earliest, schema=ours.BytesSchema()
    )
    raw.send(b"\xff")
    message = reader.read_next(TIMEOUT_MS)
    assert (message.value(), message.schema_version()) == (b"\xff", "")


def test_protobuf_messages_travel_in_both_directions(
    client: magnetar.Client, apache: pulsar.Client, topic: str
) -> None:
    my_schema = ours.ProtobufNativeSchema(pb.MessageIdData)
    their_schema = theirs.ProtobufNativeSchema(pb.MessageIdData)
    consumer = client.subscribe(topic, "mine", schema=my_schema)
    their_consumer = apache.subscribe(topic, "theirs", schema=their_schema)
    value = pb.MessageIdData(ledgerId=7, entryId=8, ack_set=[1, 2])
    client.create_producer(topic, schema=my_schema).send(value)
    apache.create_producer(topic, schema=their_schema).send(value)
    for _ in range(2):
        message = consumer.receive(TIMEOUT_MS)
        assert message.value() == value
        assert message.schema_version().encode("latin-1") == bytes(8)
        assert their_consumer.receive(TIMEOUT_MS).value() == value


def test_a_newer_version_and_an_older_one_read_each_other(
    client: magnetar.Client, apache: pulsar.Client, topic: str
) -> None:
    """The producers change their schema in turn: ours first, then Apache's."""
    for writer, write, reader, read in (
        (client, ours, apache, theirs),
        (apache, theirs, client, ours),
    ):
        name = f"{topic}-{write.__name__}"
        old_class, old = order(write)
        new_class, new = order(write, note="new")
        first = reader.subscribe(name, "old", schema=read.AvroSchema(classes(read)[0]))
        writer.create_producer(name, schema=write.AvroSchema(old_class)).send(old)
        writer.create_producer(name, schema=write.AvroSchema(new_class)).send(new)
        reads_new = read.AvroSchema(classes(read, newer=True)[0])
        second = reader.subscribe(
            name,
            "new",
            schema=reads_new,
            initial_position=pulsar.InitialPosition.Earliest if reader is apache else EARLIEST,
        )
        for expected in ("none", "new"):
            found = first.receive(TIMEOUT_MS).value()
            check(found)
            assert not hasattr(found, "note")
            newer = second.receive(TIMEOUT_MS).value()
            check(newer)
            assert newer.note == expected


def test_an_incompatible_schema_is_refused(
    client: magnetar.Client, apache: pulsar.Client, topic: str
) -> None:
    class Mine(ours.Record):
        a = ours.Integer(required=True)

    class Theirs(theirs.Record):
        a = theirs.Integer(required=True)

    keep = client.create_producer(topic, schema=ours.AvroSchema(classes(ours)[0]))
    with pytest.raises(magnetar.IncompatibleSchema):
        client.create_producer(topic, schema=ours.AvroSchema(Mine))
    with pytest.raises(magnetar.IncompatibleSchema):
        client.subscribe(topic, "s", schema=ours.JsonSchema(classes(ours)[0]))
    with pytest.raises(pulsar.IncompatibleSchema):
        apache.create_producer(topic, schema=theirs.AvroSchema(Theirs))
    with pytest.raises(pulsar.IncompatibleSchema):
        apache.subscribe(topic, "s", schema=theirs.AvroSchema(Theirs))
    assert keep.is_connected()


@dataclass
class Item:
    name: str
    price: float = 0.5
    tags: list[str] = field(default_factory=list)
    color: Color | None = None


class Model(BaseModel):
    name: str
    price: float = 0.5
    tags: list[str] = []


@pytest.mark.parametrize("kind", [ours.JsonSchema, ours.AvroSchema])
@pytest.mark.parametrize("value", [Item("x", 2.0, ["t"], Color.RED), Model(name="x", tags=["t"])])
def test_dataclasses_and_models_are_schemas(
    client: magnetar.Client, topic: str, kind: Any, value: Any
) -> None:
    schema = kind(type(value))
    with client.subscribe(topic, "s", schema=schema) as consumer:
        client.create_producer(topic, schema=schema).send(value)
        assert consumer.receive(TIMEOUT_MS).value() == value


def test_a_schema_is_made_of_a_definition_instead_of_a_class(
    client: magnetar.Client, topic: str
) -> None:
    definition = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]}
    schema = ours.AvroSchema(None, schema_definition=definition)
    reader = client.create_reader(topic, magnetar.MessageId.earliest, schema=schema)
    producer = client.create_producer(topic, schema=schema)
    producer.send({"a": 5})
    assert reader.read_next(TIMEOUT_MS).value() == {"a": 5}
    for wrong in ({"a": "x"}, {}, b"bytes"):
        with pytest.raises((ValueError, TypeError)):
            producer.send(wrong)


def test_values_of_another_type_are_refused_before_they_are_sent(
    client: magnetar.Client, topic: str
) -> None:
    producer = client.create_producer(topic, schema=ours.StringSchema())
    for wrong in (b"bytes", 5):
        with pytest.raises(TypeError, match="Invalid record obj"):
            producer.send(wrong)
        with pytest.raises(TypeError, match="Invalid record obj"):
            producer.send_async(wrong, None)
    with pytest.raises(TypeError, match="schema must be Schema"):
        client.create_producer(topic, schema=str)
    assert producer.last_sequence_id() == -1


def test_a_listener_and_a_table_view_get_values(client: magnetar.Client, topic: str) -> None:
    made, value = order(ours)
    schema = ours.AvroSchema(made)
    got: queue.Queue[Any] = queue.Queue()
    consumer = client.subscribe(
        topic, "s", schema=schema, message_listener=lambda _, it: got.put(it.value())
    )
    producer = client.create_producer(topic, schema=schema)
    producer.send(value, partition_key="k")
    view = client.create_table_view(topic, schema=schema)
    check(view.get("k"))
    check(got.get(timeout=TIMEOUT_MS / 1000))
    consumer.close()


async def test_the_asyncio_client_reads_newer_versions(
    server: StandaloneProcess, topic: str
) -> None:
    newer, first = order(ours, note="x")
    async with magnetar.asyncio.Client(server.service_url) as client:
        consumer = await client.subscribe(
            topic, "s", schema=ours.AvroSchema(classes(ours)[0]), initial_position=EARLIEST
        )
        async with await client.create_producer(topic, schema=ours.AvroSchema(newer)) as producer:
            await producer.send(first)
            await producer.send(first)
        for _ in range(2):
            check((await consumer.receive(TIMEOUT_MS)).value())


@pytest.mark.parametrize("kind", ["AvroSchema", "JsonSchema"])
def test_a_consumer_of_any_schema_follows_new_versions(
    client: magnetar.Client, topic: str, kind: str
) -> None:
    consumer = client.subscribe(topic, "s", schema=ours.AutoConsumeSchema())
    reader = client.create_reader(
        topic, magnetar.MessageId.earliest, schema=ours.AutoConsumeSchema()
    )
    raw = client.create_producer(topic, batching_enabled=False)
    for newer in ({}, {"note": "x"}):
        cls, value = order(ours, raw="text", **newer)
        client.create_producer(topic, schema=getattr(ours, kind)(cls)).send(value)
        for message in (consumer.receive(TIMEOUT_MS), reader.read_next(TIMEOUT_MS)):
            found = message.value()
            assert (found["part"], found["counts"]) == ({"name": "p"}, {"k": 3})
            assert found.get("note") == newer.get("note")
            assert found.schema_info().schema_type().name in kind.upper()
    raw.send(b"no schema")
    assert consumer.receive(TIMEOUT_MS).value() == b"no schema"
    raw.send(None)
    assert consumer.receive(TIMEOUT_MS).value() is None


def test_a_version_that_the_broker_does_not_have_is_named_and_its_message_is_kept(
    client: magnetar.Client, server: StandaloneProcess, topic: str
) -> None:
    cls, value = order(ours)
    client.create_producer(topic, schema=ours.AvroSchema(cls)).send(value)
    delete_versions(server, topic)
    consumer = client.subscribe(
        topic, "s", schema=ours.AutoConsumeSchema(), initial_position=EARLIEST
    )
    message = consumer.receive(TIMEOUT_MS)
    for _ in range(2):
        with pytest.raises(magnetar.InvalidMessage, match="schema version 0"):
            message.value()
    assert message.data() == ours.AvroSchema(cls).encode(value)
    consumer.close()
    again = client.subscribe(topic, "s")
    assert again.receive(TIMEOUT_MS).data() == message.data()


def test_a_consumer_of_any_schema_leaves_the_first_schema_to_others(
    client: magnetar.Client, topic: str
) -> None:
    first = client.subscribe(topic, "any", schema=ours.AutoConsumeSchema())
    typed = client.subscribe(topic, "typed", schema=ours.StringSchema())
    client.create_producer(topic, schema=ours.StringSchema()).send("x")
    assert first.receive(TIMEOUT_MS).value() == typed.receive(TIMEOUT_MS).value() == "x"


async def test_key_values_and_any_schema_over_asyncio(
    server: StandaloneProcess, topic: str
) -> None:
    cls, first = order(ours)
    schema = ours.KeyValueSchema(
        ours.StringSchema(), ours.AvroSchema(cls), ours.KeyValueEncodingType.SEPARATED
    )
    value = ours.KeyValue("k", first)
    async with magnetar.asyncio.Client(server.service_url) as client:
        typed = await client.subscribe(topic, "typed", schema=schema)
        untyped = await client.subscribe(topic, "any", schema=ours.AutoConsumeSchema())
        producer = await client.create_producer(topic, schema=schema)
        await producer.send(value)
        await producer.send(ours.KeyValue("k", None))
        with pytest.raises(magnetar.InvalidMessage, match="partition_key"):
            await producer.send(value, partition_key="other")
        found = (await typed.receive(TIMEOUT_MS)).value()
        check(found.value)
        assert (await typed.receive(TIMEOUT_MS)).value() == ours.KeyValue("k", None)
        any_value = (await untyped.receive(TIMEOUT_MS)).value()
        assert (any_value.key, any_value.value["number"]) == ("k", 1)
        assert (await untyped.receive(TIMEOUT_MS)).value() == ours.KeyValue("k", None)


def test_the_definitions_are_those_of_apaches_client() -> None:
    for newer in (False, True):
        mine, their = classes(ours, newer=newer)[0], classes(theirs, newer=newer)[0]
        assert mine.schema() == their.schema()
        for kind in ("AvroSchema", "JsonSchema"):
            my_info = getattr(ours, kind)(mine).schema_info()
            their_info = getattr(theirs, kind)(their).schema_info()
            assert my_info.schema() == their_info.schema()
            assert my_info.name() == their_info.name()
            assert int(my_info.schema_type()) == int(their_info.schema_type())
    assert json.loads(ours.ProtobufNativeSchema(pb.Schema).schema_info().schema()) == json.loads(
        theirs.ProtobufNativeSchema(pb.Schema).schema_info().schema()
    )


def delete_versions(server: StandaloneProcess, topic: str) -> None:
    url = f"http://127.0.0.1:{server.http_port}/admin/v2/schemas/public/default/{topic}/schema"
    request = urllib.request.Request(f"{url}?force=true", method="DELETE")
    with urllib.request.urlopen(request, timeout=20):
        pass


GUIDE = Path(__file__).parents[2] / "docs" / "schemas.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda it: re.findall(r"\w+Schema", it)[-1])
def test_the_examples_of_the_guide_run(server: StandaloneProcess, program: str) -> None:
    exec(program.replace("grpc://localhost:6660", server.service_url), {})


def test_the_guide_has_examples() -> None:
    assert len(PROGRAMS) == 5

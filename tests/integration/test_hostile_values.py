"""Values that no honest client sends, in commands that can be read, over both transports.

The broker refuses each with an error that names it, or ignores it. It keeps no state of it, and
other clients are not affected."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.entries import entry_of
from fakes.wire import TRANSPORTS, wire_to

from magnetar.broker.session.refusals import DELAY_S_FIRST, FREE
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import checksums_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fakes.broker import RunningBroker
    from fakes.wire import WireClient

TOPIC = "persistent://public/default/t"
SHARED = pb.CommandSubscribe.Shared

pytestmark = [pytest.mark.parametrize("transport", TRANSPORTS), pytest.mark.real_loop]


@asynccontextmanager
async def world(transport: str, **settings: Any) -> AsyncIterator[tuple[WireClient, RunningBroker]]:
    async with (
        running_broker(ClusterState(), **settings) as broker,
        wire_to(broker, transport) as client,
    ):
        yield client, broker


def entry_with(payload: bytes = b"payload", **fields: Any) -> bytes:
    metadata = pb.MessageMetadata(
        **({"producer_name": "p", "sequence_id": 5, "publish_time": 1} | fields)
    )
    encoded = metadata.SerializeToString()
    body = len(encoded).to_bytes(4) + encoded + payload
    return b"\x0e\x01" + checksums_of([bytes(6) + body])[0].to_bytes(4) + body


async def send(client: WireClient, entry: bytes, **fields: Any) -> Any:
    """The answer to this SEND."""
    body = pb.CommandSend(**({"producer_id": 1, "sequence_id": 5} | fields))
    await client.wire.send(b"".join(framing.encode_payload_command(body, [entry])))
    return (await client.receive()).body


async def ack(client: WireClient, *ids: pb.MessageIdData, kind: int = 0) -> Any:
    await client.send(
        pb.CommandAck(
            consumer_id=1,
            ack_type=pb.CommandAck.AckType.ValueType(kind),
            message_id=ids,
            request_id=7,
        )
    )
    return await client.expect(pb.CommandAckResponse)


# ---- ack sets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pb.CommandAck.Individual, pb.CommandAck.Cumulative])
async def test_ack_set_longer_than_its_batch_is_refused(transport: str, kind: int) -> None:
    async with world(transport) as (client, broker):
        await client.subscribe(TOPIC)
        await client.produce(TOPIC)
        await client.publish(entry=bytes(entry_of("a", "b").data))
        receipt = await client.expect(pb.CommandSendReceipt)
        await client.flow(10)
        assert (await client.message())[1] == ["a", "b"]
        message_id = pb.MessageIdData()
        message_id.CopyFrom(receipt.message_id)
        message_id.ack_set.extend([-1] * 40_000)
        answer = await ack(client, message_id, kind=kind)
        assert answer.error == pb.NotAllowedError
        assert "40000 words; its batch of 2 messages has 1" in answer.message
        del message_id.ack_set[:]
        message_id.ack_set.extend([-3])  # the set has bits that the batch does not have
        assert not (await ack(client, message_id, kind=kind)).HasField("error")
        async with wire_to(broker, transport) as other:
            await client.ask(pb.CommandCloseConsumer(consumer_id=1, request_id=0))
            await other.subscribe(TOPIC)
            await other.flow(10)
            message, _ = await other.message()
            assert list(message.ack_set) == [0b01]


async def test_ack_set_moves_no_permits_or_unacked_messages(transport: str) -> None:
    async with world(transport) as (client, _):
        await client.subscribe(TOPIC, subType=SHARED)
        await client.produce(TOPIC)
        await client.flow(10)
        for number, texts in enumerate((["a", "b"], ["single"])):
            await client.publish(entry=bytes(entry_of(*texts).data), sequence_id=number)
            bodies = {type(it.body): it for it in [await client.receive() for _ in range(2)]}
            message_id = pb.MessageIdData()
            message_id.CopyFrom(bodies[pb.CommandSendReceipt].body.message_id)
            message_id.ack_set.extend([-1] * 313)
            await ack(client, message_id)
        stats = await client.ask(pb.CommandConsumerStats(consumer_id=1, request_id=0))
        assert (stats.unackedMessages, stats.availablePermits) == (3, 7)


# ---- entries -------------------------------------------------------------------------------------

LIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "4 GiB of messages": (
        {},
        {
            "num_messages_in_batch": 715_827_882,
            "uncompressed_size": 2**32 - 1,
            "compression": pb.ZSTD,
        },
        "a batch of 715827882 messages",
    ),
    "more than its payload": ({}, {"num_messages_in_batch": 2}, "2 messages cannot be"),
    "a negative count": ({}, {"num_messages_in_batch": -7}, "-7 messages cannot be"),
    "too large a size": (
        {},
        {"uncompressed_size": 80_000_000, "compression": pb.ZSTD},
        "the limit is 16777216 bytes",
    ),
    "an impossible compression": (
        {},
        {"uncompressed_size": 100_000, "compression": pb.LZ4},
        "compressed with LZ4 cannot expand to 100000 bytes",
    ),
    "a low highest sequence id": ({"highest_sequence_id": 4}, {"partition_key": "k"}, "is below"),
    "no sequence id": ({"sequence_id": 2**64 - 1}, {"partition_key": "k"}, "not below 2^63"),
    "a negative chunk": (
        {},
        {"uuid": "u", "num_chunks_from_msg": 2, "chunk_id": -1, "total_chunk_msg_size": 9},
        "chunk -1 of 2",
    ),
    "a transaction": ({"txnid_least_bits": 1, "txnid_most_bits": 2}, {}, "a transaction id"),
    "a stored transaction": ({}, {"txnid_least_bits": 1, "txnid_most_bits": 2}, "a transaction id"),
    "a marker": ({"marker": True}, {}, "a marker"),
    "a stored marker": ({}, {"marker_type": 21}, "a marker"),
}


async def test_apache_cpp_clients_get_the_error_that_they_do_not_repeat(transport: str) -> None:
    async with (
        running_broker(ClusterState()) as broker,
        wire_to(broker, transport, connected=False) as client,
    ):
        await client.send(
            pb.CommandConnect(client_version="Pulsar-CPP-v4.2.0", protocol_version=20)
        )
        await client.expect(pb.CommandConnected)
        await client.produce(TOPIC)
        error = await send(client, entry_with(marker_type=21))
        assert error.error == pb.ChecksumError
        assert "a marker" in error.message


@pytest.mark.parametrize("what", LIES)
async def test_impossible_or_unsupported_send_is_refused_by_name(transport: str, what: str) -> None:
    command, metadata, text = LIES[what]
    async with world(transport, message_bytes_max=1 << 20) as (client, _):
        await client.produce(TOPIC)
        payload = bytes(2_000) if "size" in what else b"payload"
        error = await send(client, entry_with(payload, **metadata), **command)
        assert isinstance(error, pb.CommandSendError), error
        assert error.error == pb.NotAllowedError
        assert text in error.message
        await client.publish("after", sequence_id=6)
        assert (await client.expect(pb.CommandSendReceipt)).message_id.entryId == 0
        await client.subscribe(TOPIC)
        last = await client.ask(pb.CommandGetLastMessageId(consumer_id=1, request_id=0))
        assert last.last_message_id.entryId == 0


KEYS = [pb.EncryptionKeys(key="k", value=b"wrapped", metadata=[pb.KeyValue(key="a", value="b")])]
KEPT: dict[str, dict[str, Any]] = {
    "encrypted": {"encryption_keys": KEYS, "encryption_algo": "AES", "encryption_param": b"iv"},
    "encrypted batch": {"encryption_keys": KEYS, "num_messages_in_batch": 1},
    "encrypted and compressed": {
        "encryption_keys": KEYS,
        "compression": pb.LZ4,
        "uncompressed_size": 100,
    },
    "chunk": {
        "uuid": "u",
        "num_chunks_from_msg": 3,
        "chunk_id": 1,
        "total_chunk_msg_size": 20,
        "uncompressed_size": 20,
    },
}


@pytest.mark.parametrize("what", KEPT)
async def test_encrypted_entries_and_chunks_are_delivered_as_they_were_sent(
    transport: str, what: str
) -> None:
    entry = entry_with(**KEPT[what])
    async with world(transport) as (client, _):
        await client.produce(TOPIC)
        assert isinstance(
            await send(client, entry, is_chunk="chunk" in what), pb.CommandSendReceipt
        )
        await client.subscribe(TOPIC, subType=SHARED)
        await client.flow(1)
        message = await client.receive()
        assert message.entry is not None
        assert bytes(message.entry) == entry


# ---- the maximum message size --------------------------------------------------------------------


async def test_maximum_message_size_is_announced_and_enforced(transport: str) -> None:
    limit = 1 << 20
    async with world(transport, message_bytes_max=limit) as (client, broker):
        async with wire_to(broker, transport, connected=False) as other:
            assert (await other.connect()).max_message_size == limit
        await client.produce(TOPIC)
        assert isinstance(await send(client, entry_with(bytes(limit))), pb.CommandSendReceipt)
        error = await send(client, entry_with(bytes(limit + 1)))
        assert error.error == pb.NotAllowedError
        assert "payload of 1048577 bytes exceeds the limit of 1048576" in error.message
        await client.wire.send((limit + 300_000).to_bytes(4) + bytes(100))  # above every limit
        assert await client.ended() == []


# ---- names, properties, schemas ------------------------------------------------------------------


async def test_large_names_and_properties_are_refused_with_the_limit(transport: str) -> None:
    large = [pb.KeyValue(key="k", value="v" * 65_536)]
    async with world(transport) as (client, broker):
        for answer, text in (
            (await client.produce(TOPIC, producer_name="p" * 1_025), "producer name"),
            (await client.produce(TOPIC, metadata=large), "producer metadata"),
            (await client.produce("t" * 1_100), "the full name has 1128 bytes"),
            (await client.subscribe(TOPIC, "s" * 1_025), "subscription name"),
            (await client.subscribe(TOPIC, consumer_name="c" * 1_025), "consumer name"),
            (await client.subscribe(TOPIC, metadata=large), "consumer metadata"),
            (
                await client.subscribe(TOPIC, subscription_properties=large),
                "subscription properties",
            ),
        ):
            assert answer.error in (pb.NotAllowedError, pb.InvalidTopicName)
            assert text in answer.message
            assert "1024" in answer.message or "65536" in answer.message
        assert broker.broker.topics == []


def schema(kind: pb.Schema.Type.ValueType) -> pb.Schema:
    return pb.Schema(name="s", schema_data=b"{}", type=kind)


async def test_bytes_are_a_schema_without_a_version(transport: str) -> None:
    async with world(transport) as (client, _):
        asked = pb.CommandGetOrCreateSchema(
            topic=TOPIC, request_id=0, schema=schema(pb.Schema.Bytes)
        )
        assert (await client.ask(asked)).error_code == pb.TopicNotFound
        opened = await client.produce(TOPIC, schema=schema(pb.Schema.Bytes))
        assert opened.schema_version == b""
        answer = await client.ask(asked)
        assert isinstance(answer, pb.CommandGetOrCreateSchemaResponse)
        assert not answer.HasField("error_code")
        assert answer.schema_version == b""
        answer = await client.ask(pb.CommandGetSchema(topic=TOPIC, request_id=0))
        assert isinstance(answer, pb.CommandGetSchemaResponse)
        assert answer.error_code == pb.TopicNotFound
        assert "has no schema" in answer.error_message
        answer = await client.subscribe(TOPIC, schema=schema(pb.Schema.Bytes))
        assert isinstance(answer, pb.CommandSuccess)


@pytest.mark.parametrize(
    ("kind", "data", "why"),
    [
        (pb.Schema.Avro, b"{}", "not a valid AVRO schema"),
        (pb.Schema.Json, b"[" * 10_000, "not a valid JSON schema"),
        (pb.Schema.ProtobufNative, b"5", "not a valid PROTOBUF_NATIVE schema"),
        (pb.Schema.KeyValue, b"\x7f\xff\xff\xff", "ends early"),
        (pb.Schema.External, b"", "EXTERNAL cannot be stored"),
        (pb.Schema.String, bytes(200_000), "the limit is"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_invalid_schemas_are_refused_by_name(
    transport: str, kind: pb.Schema.Type.ValueType, data: bytes, why: str
) -> None:
    async with world(transport) as (client, _):
        await client.produce(TOPIC, producer_id=9)
        wrong = pb.Schema(name="s", schema_data=data, type=kind)
        answer = await client.ask(
            pb.CommandGetOrCreateSchema(topic=TOPIC, request_id=0, schema=wrong)
        )
        assert answer.error_code == pb.IncompatibleSchema
        assert why in answer.error_message
        for answer in (
            await client.produce(TOPIC, schema=wrong),
            await client.subscribe(TOPIC, schema=wrong),
        ):
            assert answer.error == pb.IncompatibleSchema
            assert why in answer.message
        answer = await client.ask(
            pb.CommandGetSchema(topic=TOPIC, request_id=0, schema_version=b"1")
        )
        assert answer.error_code == pb.NotAllowedError
        assert "1 bytes" in answer.error_message


# ---- floods --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        pb.CommandGetOrCreateSchema(topic=TOPIC, request_id=0, schema=schema(pb.Schema.External)),
        pb.CommandNewTxn(request_id=0),
        pb.CommandUnsubscribe(consumer_id=77, request_id=0),
    ],
    ids=["refused by its handler", "unsupported", "refused by the session"],
)
async def test_refused_requests_are_slowed_down_and_logged_once(
    transport: str, body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    with caplog.at_level(logging.INFO):
        async with world(transport) as (client, _):
            for _ in range(FREE):
                await client.ask(body)
            began_s = loop.time()
            for _ in range(5):
                await client.ask(body)
            assert loop.time() - began_s >= 31 * DELAY_S_FIRST
            assert isinstance(await client.produce(TOPIC), pb.CommandProducerSuccess)
    assert caplog.text.count("request refused") == 1
    assert "requests refused" in caplog.text
    assert f"count={FREE + 5}" in caplog.text


async def test_pipelined_flood_is_answered_and_bounded(transport: str) -> None:
    count = 3_000
    async with world(transport) as (client, _broker):
        flood = [framing.encode_command(pb.CommandNewTxn(request_id=n)) for n in range(count)]
        await client.wire.send(b"".join(flood))
        answers = [await client.expect(pb.CommandError) for _ in range(count)]
        assert {it.request_id for it in answers} == set(range(count))
        assert {it.error for it in answers} == {pb.NotAllowedError}

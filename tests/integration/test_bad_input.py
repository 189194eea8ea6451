"""Invalid input of clients, over both transports. The sender gets an error that names the invalid
thing, or the broker closes its connection and logs a line. Other clients notice nothing."""

from __future__ import annotations

import logging
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import google_crc32c
import pytest
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.entries import entry_of
from fakes.grpc_reply import read_frames
from fakes.wire import TRANSPORTS, WireClient, wire_to
from support import settle, wait_until

from magnetar.broker.session.grpc import SERVICE
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.broker_pb2 import ReadRangeRequest
from magnetar.protos.entry import ENTRY_SENT_BYTES_MAX, MESSAGE_BYTES_MAX
from magnetar.protos.framing import COMMAND_FRAME_BYTES_MAX
from magnetar.runtime.errors import CallFailed, StreamClosed
from magnetar.runtime.grpc_frames import call_unary, open_channel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOPIC = "persistent://public/default/t"
Kind = pb.BaseCommand

pytestmark = [pytest.mark.parametrize("transport", TRANSPORTS), pytest.mark.real_loop]


@asynccontextmanager
async def worlds(transport: str, *, connected: bool = True) -> AsyncIterator[tuple[Any, Any]]:
    """A client that misbehaves, and a broker.

    A second client with a producer and a consumer is connected all the time. Its messages must
    arrive before, during and after the misbehaviour.
    """
    async with running_broker(ClusterState()) as broker, wire_to(broker, "pulsar") as witness:
        await witness.produce("witness", producer_name="witness")
        await witness.subscribe("witness")
        await witness.flow(1_000)
        await check(witness, 0)
        async with wire_to(broker, transport, connected=connected) as client:
            yield client, broker
            await check(witness, 1)
        await check(witness, 2)


async def check(witness: WireClient, number: int) -> None:
    await witness.publish(f"witness {number}", sequence_id=number)
    bodies: list[Any] = [await witness.receive(), await witness.receive()]
    receipt, message = sorted(bodies, key=lambda it: it.type)
    assert receipt.body.sequence_id == number
    assert bytes(message.entry) == bytes(entry_of(f"witness {number}").data)


def raw(body: bytes, *, size: int | None = None, total: int | None = None) -> bytes:
    """A frame around a BaseCommand's bytes, with sizes that may lie."""
    size = len(body) if size is None else size
    total = 4 + len(body) if total is None else total
    return struct.pack(">II", total, size) + body


def command_of(kind: int, field: bytes = b"") -> bytes:
    """A BaseCommand of any type, with the bytes of its field."""
    tag = framing.varint(kind << 3 | 2)
    return b"\x08" + framing.varint(kind) + tag + framing.varint(len(field)) + field


CONNECT = framing.encode_command(pb.CommandConnect(client_version="c", protocol_version=20))
PING = framing.encode_command(pb.CommandPing())

# Bytes that end a connection at any time.
UNREADABLE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "total too small": struct.pack(">I", 3) + b"\0\0\0",
    "total zero": struct.pack(">I", 0),
    "total too large": struct.pack(">I", COMMAND_FRAME_BYTES_MAX - 3) + b"\0" * 100,
    "total of 4 GiB": struct.pack(">I", 2**32 - 1) + b"\0" * 100,
    "size beyond the total": raw(command_of(Kind.PING), size=1_000),
    "size of 4 GiB": raw(command_of(Kind.PING), size=2**32 - 1),
    "size within the command": raw(command_of(Kind.PING, b"\x0a\x03abc"), size=2),
    "an empty command": raw(b""),
    "not protobuf": raw(b"\xff" * 30),
    "no type": raw(b"\x12\x00"),
    "an unknown type": raw(command_of(99)),
    "another type's field": raw(b"\x08\x12" + b"\x92\x01\x00"[1:]),
    "an entry behind a PING": raw(PING[8:], total=4 + len(PING[8:]) + 5) + b"entry",
    "a SEND without an entry": framing.encode_command(pb.CommandSend(producer_id=1, sequence_id=0)),
    "a command of the broker's": framing.encode_command(pb.CommandSuccess(request_id=1)),
    "a MESSAGE": b"".join(
        framing.encode_payload_command(
            pb.CommandMessage(consumer_id=1, message_id=pb.MessageIdData(ledgerId=1, entryId=1)),
            [b"entry"],
        )
    ),
    "a SEND of no producer": b"".join(
        framing.encode_payload_command(
            pb.CommandSend(producer_id=77, sequence_id=0), [bytes(entry_of("x").data)]
        )
    ),
}


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "first"])
@pytest.mark.parametrize("what", UNREADABLE)
async def test_unreadable_bytes_end_the_connection(
    transport: str, what: str, connected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with worlds(transport, connected=connected) as (client, _):
            await client.wire.send(UNREADABLE[what])
            assert await client.ended() == []
    assert "closing a connection" in caplog.text


async def test_commands_before_a_broken_one_are_executed(transport: str) -> None:
    async with worlds(transport) as (client, broker):
        await client.produce(TOPIC)
        sends = b"".join(
            b"".join(
                framing.encode_payload_command(
                    pb.CommandSend(producer_id=1, sequence_id=number),
                    [bytes(entry_of(str(number)).data)],
                )
            )
            for number in range(3)
        )
        await client.wire.send(sends + raw(b"\xff" * 30))
        await client.ended()
        async with wire_to(broker, transport) as other:
            await other.subscribe(TOPIC)
            await other.flow(10)
            assert [(await other.message())[1] for _ in range(3)] == [["0"], ["1"], ["2"]]


async def test_a_client_that_ends_inside_a_frame_causes_no_error(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with worlds(transport) as (client, _):
            await client.wire.send(struct.pack(">I", 1_000) + b"\0" * 500)
            await client.wire.break_off()
            # The broker notices the end later. An earlier stop of the broker would hide the error.
            await wait_until(
                lambda: "connection lost" in caplog.text or "closing a connection" in caplog.text,
                what="the broker's log line about the lost connection",
            )


async def test_a_frame_may_come_in_single_bytes(transport: str) -> None:
    async with worlds(transport, connected=False) as (client, _):
        for data in CONNECT, PING:
            if transport == "grpc":  # frames over gRPC are whole commands
                await client.wire.send(data)
            else:
                for number in range(len(data)):
                    await client.wire.send(data[number : number + 1])
                    await settle(2)
        await client.expect(pb.CommandConnected)
        await client.expect(pb.CommandPong)


@pytest.mark.parametrize(
    "command",
    [
        pb.CommandLookupTopic(topic="t", request_id=5),
        pb.CommandProducer(topic="t", producer_id=1, request_id=5),
        pb.CommandConnected(server_version="s"),
    ],
    ids=lambda it: type(it).__name__,
)
async def test_nothing_is_served_before_connect(transport: str, command: Any) -> None:
    async with worlds(transport, connected=False) as (client, broker):
        await client.send(command)
        assert await client.ended() == []
        assert [str(topic.name) for topic in broker.broker.topics] == [
            "persistent://public/default/witness"
        ]


async def test_ping_is_answered_before_connect(transport: str) -> None:
    """Another broker checks in this way whether this broker runs."""
    async with worlds(transport, connected=False) as (client, _):
        for _ in range(2):
            await client.send(pb.CommandPing())
            await client.expect(pb.CommandPong)


# ---- commands that can be read, but not carried out ----------------------------------------------


def without(body: Any, field: str) -> bytes:
    """A frame whose command lacks a required field."""
    body.ClearField(field)
    [(number, _)] = [
        (it.number, it.name) for it in Kind.DESCRIPTOR.fields if it.message_type is body.DESCRIPTOR
    ]
    return raw(command_of(number, body.SerializePartialToString()))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (pb.CommandProducer(producer_id=1, request_id=9), "topic"),
        (pb.CommandProducer(topic="t", request_id=9), "producer_id"),
        (pb.CommandLookupTopic(request_id=9), "topic"),
        (
            pb.CommandSubscribe(topic="t", subscription="s", consumer_id=1, request_id=9),
            "subType",
        ),
        (pb.CommandSeek(request_id=9), "consumer_id"),
    ],
    ids=lambda it: it if isinstance(it, str) else type(it).__name__,
)
async def test_a_missing_field_is_named(transport: str, body: Any, field: str) -> None:
    async with worlds(transport) as (client, _):
        await client.wire.send(without(body, field))
        error = await client.expect(pb.CommandError)
        assert (error.request_id, error.error) == (9, pb.NotAllowedError)
        assert field in error.message
        await client.produce(TOPIC)  # the connection is still good


async def test_a_missing_request_id_ends_the_connection(transport: str) -> None:
    async with worlds(transport) as (client, _):
        await client.wire.send(
            without(pb.CommandProducer(topic="t", producer_id=1, request_id=9), "request_id")
        )
        assert await client.ended() == []


async def test_text_that_is_not_utf8_is_refused(transport: str) -> None:
    async with worlds(transport) as (client, _):
        body = pb.CommandProducer(topic="XXXX", producer_id=1, request_id=9)
        field = body.SerializeToString().replace(b"XXXX", b"a\xff\xfeb")
        await client.wire.send(raw(command_of(Kind.PRODUCER, field)))
        error = await client.expect(pb.CommandError)
        assert error.request_id == 9
        assert "UTF-8" in error.message
        assert isinstance(await client.produce(TOPIC), pb.CommandProducerSuccess)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a/b",
        "persistent://",
        "persistent://public/default/",
        "other://public/default/t",
        "persistent://public//t",
        "//public/default/t",
    ],
)
async def test_an_impossible_topic_is_refused_wherever_it_is_named(
    transport: str, name: str
) -> None:
    async with worlds(transport) as (client, _):
        for body in (
            pb.CommandLookupTopic(topic=name, request_id=0),
            pb.CommandPartitionedTopicMetadata(topic=name, request_id=0),
            pb.CommandProducer(topic=name, producer_id=1, request_id=0),
            pb.CommandSubscribe(
                topic=name,
                subscription="s",
                subType=pb.CommandSubscribe.Shared,
                consumer_id=1,
                request_id=0,
            ),
        ):
            answer = await client.ask(body)
            assert answer.error == pb.InvalidTopicName, body
            assert "topic name" in answer.message


async def test_an_unknown_listener_is_refused_at_once_and_costs_nothing_else(
    transport: str,
) -> None:
    """With Pulsar's error ServiceNotReady, Apache's client would close the connection repeatedly
    until its operation times out."""

    async with worlds(transport) as (client, _):
        await client.produce(TOPIC)
        body = pb.CommandLookupTopic(topic=TOPIC, request_id=0, advertised_listener_name="external")
        answer = await client.ask(body)
        assert answer.response == pb.CommandLookupTopicResponse.Failed
        assert answer.error == pb.NotAllowedError
        assert "the broker do not have external listener" in answer.message
        body.advertised_listener_name = ""  # Apache's C++ client always sends this
        answer = await client.ask(body)
        assert answer.response == pb.CommandLookupTopicResponse.Connect


async def test_a_subscription_without_a_name_is_refused(transport: str) -> None:
    async with worlds(transport) as (client, _):
        answer = await client.subscribe(TOPIC, "")
        assert isinstance(answer, pb.CommandError), answer
        assert answer.error == pb.NotAllowedError


NOT_SERVED: list[tuple[Any, str]] = [
    (pb.CommandNewTxn(request_id=0), "NEW_TXN"),
    (pb.CommandTcClientConnectRequest(request_id=0, tc_id=0), "TC_CLIENT_CONNECT_REQUEST"),
]


async def test_a_refusal_names_the_unsupported_feature(transport: str) -> None:
    async with worlds(transport) as (client, _):
        for body, name in NOT_SERVED:
            answer = await client.ask(body)
            code = getattr(answer, "error_code", None) or answer.error
            assert code == pb.NotAllowedError
            text = getattr(answer, "error_message", "") or answer.message
            assert name in text


# ---- entries -------------------------------------------------------------------------------------


def damaged() -> bytes:
    data = bytearray(entry_of("damaged").data)
    data[-1] ^= 1
    return bytes(data)


def with_crc(data: bytes) -> bytes:
    return struct.pack(">HI", 0x0E01, google_crc32c.value(data)) + data


def padded(payload_bytes: int) -> bytes:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
    encoded = metadata.SerializeToString()
    return with_crc(struct.pack(">I", len(encoded)) + encoded + bytes(payload_bytes))


BAD_ENTRIES = {
    "a wrong checksum": (damaged(), pb.ChecksumError, "checksum"),
    "one byte": (b"x", pb.NotAllowedError, "truncated"),
    "metadata beyond the end": (
        with_crc(struct.pack(">I", 1_000) + b"abcdef"),
        pb.NotAllowedError,
        "truncated",
    ),
    "metadata of 4 GiB": (
        with_crc(struct.pack(">I", 2**32 - 1) + b"abcdef"),
        pb.NotAllowedError,
        "truncated",
    ),
    "metadata without its fields": (
        with_crc(struct.pack(">I", 2) + b"\x10\x01" + b"abcdef"),
        pb.NotAllowedError,
        "lacks",
    ),
    "metadata that is not protobuf": (
        with_crc(struct.pack(">I", 8) + b"\xff" * 8),
        pb.NotAllowedError,
        "parsed",
    ),
    "the broker's own metadata": (
        b"\x0e\x02\0\0\0\x04\x08\x01\x10\x01" + bytes(entry_of("x").data),
        pb.NotAllowedError,
        "broker entry metadata",
    ),
    "a payload over the limit": (padded(MESSAGE_BYTES_MAX + 1), pb.NotAllowedError, "5242880"),
}


@pytest.mark.parametrize("what", BAD_ENTRIES)
async def test_a_bad_entry_is_refused_and_its_neighbours_are_stored(
    transport: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    entry, code, text = BAD_ENTRIES[what]

    with caplog.at_level(logging.WARNING):
        async with worlds(transport) as (client, _):
            await client.produce(TOPIC)
            await client.publish("before", sequence_id=1)
            await client.publish(sequence_id=2, entry=entry)
            await client.publish("behind", sequence_id=3)
            assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 1
            error = await client.expect(pb.CommandSendError)
            assert (error.producer_id, error.sequence_id, error.error) == (1, 2, code)
            assert text in error.message
            assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 3
            await client.subscribe(TOPIC)
            await client.flow(10)
            assert [(await client.message())[1] for _ in range(2)] == [["before"], ["behind"]]
    assert "entry refused" in caplog.text


async def test_the_largest_payload_passes(transport: str) -> None:
    async with worlds(transport) as (client, _):
        await client.produce(TOPIC)
        await client.publish(sequence_id=1, entry=padded(MESSAGE_BYTES_MAX))
        assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 1
        await client.subscribe(TOPIC)
        await client.flow(1)
        message = await client.receive()
        assert bytes(message.entry) == padded(MESSAGE_BYTES_MAX)


async def test_an_entry_over_its_limit_is_refused_by_name(transport: str) -> None:
    async with worlds(transport) as (client, _):
        await client.produce(TOPIC)
        await client.publish(sequence_id=1, entry=bytes(ENTRY_SENT_BYTES_MAX + 1))
        error = await client.expect(pb.CommandSendError)
        assert error.error == pb.NotAllowedError
        assert str(ENTRY_SENT_BYTES_MAX) in error.message


# ---- consumers -----------------------------------------------------------------------------------


def message_id(ledger: int, entry: int, **fields: Any) -> pb.MessageIdData:
    return pb.MessageIdData(ledgerId=ledger, entryId=entry, **fields)


STRANGE_IDS = {
    "earliest": message_id(2**64 - 1, 2**64 - 1),
    "latest": message_id(2**63 - 1, 2**63 - 1),
    "a ledger that is not there": message_id(999_999, 5),
    "an entry that is not there": message_id(1, 999_999),
    "a negative entry": message_id(1, 2**64 - 5),
    "a negative ledger": message_id(2**64 - 7, 3),
    "bits of no batch": message_id(1, 0, ack_set=[0x7F] * 100),
}


@pytest.mark.parametrize("kind", ["Individual", "Cumulative"])
@pytest.mark.parametrize("what", STRANGE_IDS)
async def test_an_acknowledgement_of_an_unknown_id_loses_no_message(
    transport: str, what: str, kind: str
) -> None:
    async with worlds(transport) as (client, broker):
        await client.subscribe(TOPIC)
        await client.flow(10)
        await client.send(
            pb.CommandAck(
                consumer_id=1,
                ack_type=pb.CommandAck.AckType.Value(kind),
                message_id=[STRANGE_IDS[what]],
                request_id=7,
            )
        )
        answer = await client.expect(pb.CommandAckResponse)
        assert (answer.consumer_id, answer.request_id) == (1, 7)
        await client.produce(TOPIC, producer_id=2)
        await client.publish("after", producer_id=2)
        bodies = {type(it.body): it for it in [await client.receive() for _ in range(2)]}
        assert bytes(bodies[pb.CommandMessage].entry) == bytes(entry_of("after").data)
        await client.ask(pb.CommandCloseConsumer(consumer_id=1, request_id=0))
        async with wire_to(broker, transport) as other:
            await other.subscribe(TOPIC)
            await other.flow(10)
            assert (await other.message())[1] == ["after"]


async def test_an_acknowledgement_without_ids_is_answered(transport: str) -> None:
    async with worlds(transport) as (client, _):
        await client.subscribe(TOPIC)
        for kind, failed in (
            (pb.CommandAck.Individual, False),
            (pb.CommandAck.Cumulative, True),
        ):
            await client.send(
                pb.CommandAck(consumer_id=1, ack_type=kind, message_id=[], request_id=7)
            )
            answer = await client.expect(pb.CommandAckResponse)
            assert answer.request_id == 7
            assert answer.HasField("error") == failed


async def test_a_transactional_acknowledgement_is_refused(transport: str) -> None:
    async with worlds(transport) as (client, _):
        await client.subscribe(TOPIC)
        await client.send(
            pb.CommandAck(
                consumer_id=1,
                ack_type=pb.CommandAck.Individual,
                message_id=[message_id(1, 0)],
                txnid_most_bits=1,
                request_id=3,
            )
        )
        answer = await client.expect(pb.CommandAckResponse)
        assert (answer.request_id, answer.error) == (3, pb.NotAllowedError)


@pytest.mark.parametrize("what", STRANGE_IDS)
async def test_a_seek_to_a_strange_id_is_answered(transport: str, what: str) -> None:
    async with worlds(transport) as (client, _):
        await client.subscribe(TOPIC)
        await client.send(pb.CommandSeek(consumer_id=1, request_id=7, message_id=STRANGE_IDS[what]))
        kinds = {type((await client.receive()).body) for _ in range(2)}
        assert kinds == {pb.CommandCloseConsumer, pb.CommandSuccess}
        assert isinstance(await client.subscribe(TOPIC), pb.CommandSuccess)


async def test_no_permits_and_unknown_consumers_are_ignored(transport: str) -> None:
    async with worlds(transport) as (client, _):
        await client.subscribe(TOPIC)
        await client.flow(0)
        await client.flow(10, consumer_id=99)
        await client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=99))
        answer = await client.ask(pb.CommandUnsubscribe(consumer_id=99, request_id=0))
        assert answer.error == pb.ConsumerNotFound
        answer = await client.ask(pb.CommandSeek(consumer_id=1, request_id=0))
        assert answer.error == pb.NotAllowedError
        await client.flow(2**32 - 1)
        await client.produce(TOPIC)
        await client.publish()
        kinds = {type((await client.receive()).body) for _ in range(2)}
        assert kinds == {pb.CommandSendReceipt, pb.CommandMessage}


async def test_thousands_of_requests_at_once_are_all_answered(transport: str) -> None:
    async with worlds(transport) as (client, _):
        count = 3_000
        await client.wire.send(
            b"".join(
                framing.encode_command(pb.CommandLookupTopic(topic=f"t{number}", request_id=number))
                for number in range(count)
            )
        )
        answers = [await client.expect(pb.CommandLookupTopicResponse) for _ in range(count)]
        assert {it.request_id for it in answers} == set(range(count))
        assert {it.response for it in answers} == {pb.CommandLookupTopicResponse.Connect}


# ---- range reads ------------------------------------------------------------------------------


async def frames_of(channel: Any, request: bytes) -> list[bytes]:
    method = f"/{SERVICE}/ReadRange"
    return [bytes(frame) async for frame in read_frames(channel, method, request)]


@pytest.mark.parametrize(
    ("request_bytes", "text"),
    [
        (b"\xff" * 10, "MalformedCommand"),
        (b"\x0a\x02\xff\xfe", "MalformedCommand"),  # text that is not UTF-8
        (b"\x0a\x03a/b", "InvalidTopicName"),
        (b"", "InvalidTopicName"),
    ],
    ids=["not protobuf", "not UTF-8", "an impossible name", "nothing"],
)
async def test_a_range_that_cannot_be_read_is_refused(
    transport: str, request_bytes: bytes, text: str
) -> None:
    async with worlds(transport) as (_, broker):
        channel = open_channel(broker.grpc_url.removeprefix("grpc://"))
        with pytest.raises(CallFailed, match=text):
            await call_unary(channel, f"/{SERVICE}/PlanRange", request_bytes)
        with pytest.raises(StreamClosed, match=text):
            await frames_of(channel, request_bytes)
        await channel.close()


@pytest.mark.parametrize(
    ("topic", "ledger", "last", "text"),
    [
        ("unknown", 1, 0, "TopicNotFound"),
        ("witness", 1, 999, "RangeNotConfirmed"),
        ("witness", 999, 0, "RangeNotConfirmed"),
        ("witness", -1, 0, "RangeNotConfirmed"),
    ],
)
async def test_a_range_that_does_not_exist_is_refused(
    transport: str, topic: str, ledger: int, last: int, text: str
) -> None:
    async with worlds(transport) as (_, broker):
        channel = open_channel(broker.grpc_url.removeprefix("grpc://"))
        request = ReadRangeRequest(topic=topic, ledger=ledger, first_entry=0, last_entry=last)
        with pytest.raises(StreamClosed, match=text):
            await frames_of(channel, request.SerializeToString())
        await channel.close()

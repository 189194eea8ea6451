"""Apache's own client reads the output of our codecs: the other half of test_recorded.py."""

import asyncio
from typing import Any

import pulsar
import pytest
from support import run

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.compression import Compression
from magnetar.protos.entry import MESSAGE_BYTES_MAX
from magnetar.protos.framing import FrameDecoder, encode_command, message_header, parse_command
from magnetar.protos.message import (
    EntryHeader,
    OutgoingMessage,
    encode_batch,
    encode_chunks,
    encode_message,
)

TEXT = " ".join(f"{n} kites over {n * n} roofs" for n in range(200)).encode()
RICH = OutgoingMessage(
    TEXT,
    5,
    properties={"colour": "blau", "größe": "7"},
    partition_key="key-1",
    ordering_key=b"order-1",
    event_time_ms=1_700_000_000_001,
)


class Deliverer(asyncio.Protocol):
    """A broker for one consumer: it sends `entries` when it gets permits."""

    def __init__(self, entries: list[bytes]) -> None:
        self._entries = entries
        self._decoder = FrameDecoder()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._url = "pulsar://{}:{}".format(*transport.get_extra_info("sockname"))

    def data_received(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            body = parse_command(frame).body
            if (answer := self._answer(body)) is not None:
                self._transport.write(encode_command(answer))
            if isinstance(body, pb.CommandFlow):
                self._deliver(body.consumer_id)

    def _deliver(self, consumer_id: int) -> None:
        for number, entry in enumerate(self._entries):
            header = message_header(
                consumer_id=consumer_id, ledger_id=3, entry_id=number, entry_size=len(entry)
            )
            self._transport.writelines([header, entry])
        self._entries = []

    def _answer(self, body: Any) -> Any:
        match body:
            case pb.CommandConnect():
                return pb.CommandConnected(
                    server_version="test", protocol_version=20, max_message_size=MESSAGE_BYTES_MAX
                )
            case pb.CommandPartitionedTopicMetadata():
                return pb.CommandPartitionedTopicMetadataResponse(
                    request_id=body.request_id,
                    partitions=0,
                    response=pb.CommandPartitionedTopicMetadataResponse.Success,
                )
            case pb.CommandLookupTopic():
                return pb.CommandLookupTopicResponse(
                    request_id=body.request_id,
                    response=pb.CommandLookupTopicResponse.Connect,
                    brokerServiceUrl=self._url,
                )
            case pb.CommandSubscribe() | pb.CommandCloseConsumer():
                return pb.CommandSuccess(request_id=body.request_id)
        return None


def received(entries: list[bytes], count: int) -> list[pulsar.Message]:
    """The messages that a consumer of Apache's client reads from these entries."""

    def consume(port: int) -> list[pulsar.Message]:
        logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        client = pulsar.Client(f"pulsar://127.0.0.1:{port}", logger=logger)
        try:
            consumer = client.subscribe("topic", "subscription")
            return [consumer.receive(timeout_millis=30_000) for _ in range(count)]
        finally:
            client.close()

    async def main() -> list[pulsar.Message]:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Deliverer(entries), "127.0.0.1", 0)
        async with server:
            return await asyncio.to_thread(consume, server.sockets[0].getsockname()[1])

    return run(main())


def check(found: pulsar.Message, given: OutgoingMessage, batch_index: int) -> None:
    assert found.data() == given.payload
    assert found.properties() == dict(given.properties)
    assert found.partition_key() == (given.partition_key or "")
    assert found.ordering_key() == (given.ordering_key or b"").decode()
    assert found.event_timestamp() == given.event_time_ms
    assert found.publish_timestamp() == 1_700_000_000_000
    assert found.message_id().batch_index() == batch_index


@pytest.mark.parametrize("codec", list(Compression), ids=lambda codec: codec.name)
def test_apache_reads_what_we_write(codec: Compression) -> None:
    header = EntryHeader("ours", 1_700_000_000_000, codec)
    plain = OutgoingMessage(b"plain", 6)
    empty = OutgoingMessage(b"", 7, properties={"a": ""})
    entries = [
        b"".join(encode_message(RICH, header)),
        b"".join(encode_message(empty, header)),
        b"".join(encode_batch([plain, RICH, empty], header)),
        b"".join(encode_batch([plain], header)),
        *map(b"".join, encode_chunks(RICH, header, uuid="ours-5", chunk_bytes_max=400)),
    ]
    assert len(entries) > 5
    found = received(entries, 7)
    given = [(RICH, -1), (empty, -1), (plain, 0), (RICH, 1), (empty, 2), (plain, 0), (RICH, -1)]
    for message, (sent, batch_index) in zip(found, given, strict=True):
        check(message, sent, batch_index)

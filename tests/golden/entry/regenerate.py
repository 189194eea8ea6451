"""Record what Apache's own client sends: `python tests/golden/entry/regenerate.py`.

The C++ engine inside `pulsar-client` talks to a broker of thirty lines on loopback, which keeps its
SEND frames. Each scenario becomes one JSON file beside this script: the messages as they were given
to the client, and the frames as they arrived, in hexadecimal. The files are committed; a new
recording differs in its publish times only, unless Apache's client changed.
"""

import asyncio
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import _pulsar
import pulsar

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.framing import FrameDecoder, encode_command, parse_command

# Small, so that a message of 10 KB is cut into chunks. The engine keeps it for the whole process.
MAX_MESSAGE_BYTES = 4096
TEXT = "".join(f"{n} kites over {n * n} roofs; " for n in range(30))


@dataclass
class Given:
    """A message as handed to Apache's client. Parts that the client did not get are empty."""

    text: str
    properties: dict[str, str] = field(default_factory=dict)
    partition_key: str = ""
    ordering_key: str = ""
    event_timestamp: int = 0
    sequence_id: int = -1
    deliver_at: int = 0

    def send(self, producer: pulsar.Producer, done: Callable[..., None]) -> None:
        producer.send_async(
            self.text.encode(),
            done,
            properties=self.properties or None,
            partition_key=self.partition_key or None,
            ordering_key=self.ordering_key or None,
            event_timestamp=self.event_timestamp or None,
            sequence_id=None if self.sequence_id < 0 else self.sequence_id,
            deliver_at=self.deliver_at or None,
        )


RICH = [
    Given("first", {"colour": "blau", "größe": "7"}, "key-1", "", 1_700_000_000_001),
    Given("", {}, "key-2", "order-2"),
    Given("third, of sequence id 77", sequence_id=77),
]


def scenarios() -> dict[str, tuple[dict[str, Any], list[Given]]]:
    """Producer settings and messages by name of the file."""
    found: dict[str, tuple[dict[str, Any], list[Given]]] = {}
    for codec in ("NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY"):
        compression = {"compression_type": getattr(_pulsar.CompressionType, codec)}
        single = {**compression, "batching_enabled": False}
        batch = {
            **compression,
            "batching_enabled": True,
            "batching_max_messages": 3,
            "batching_max_publish_delay_ms": 10_000,
        }
        found[f"{codec.lower()}-single"] = (single, [Given(TEXT), *RICH])
        found[f"{codec.lower()}-batch"] = (batch, [Given(TEXT), Given("b"), Given(""), *RICH])
        chunked = {**single, "chunking_enabled": True}
        big = "".join(f"{n * 7919 % 10007:x}" for n in range(2600))
        found[f"{codec.lower()}-chunks"] = (chunked, [Given(big, {"a": "b"}, "key-1")])
    keys = [Given(f"message {n}", partition_key=f"key-{n % 2}") for n in range(6)]
    by_key = {**batch, "batching_type": _pulsar.BatchingType.KeyBased, "batching_max_messages": 6}
    found["key-based-batch"] = (by_key, keys)
    found["delayed"] = (single, [Given("later", deliver_at=1_900_000_000_000)])
    return found


class Recorder(asyncio.Protocol):
    """One connection of the client. It answers the producer's requests and keeps its SEND
    frames."""

    def __init__(self, port: int, sent: list[bytes]) -> None:
        self._url = f"pulsar://127.0.0.1:{port}"
        self._sent = sent
        self._decoder = FrameDecoder()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            command = parse_command(frame)
            if isinstance(command.body, pb.CommandSend):
                self._sent.append(len(frame).to_bytes(4, "big") + bytes(frame))
            if (answer := self._answer(command.body)) is not None:
                self._transport.write(encode_command(answer))

    def _answer(self, body: Any) -> Any:
        match body:
            case pb.CommandConnect():
                return pb.CommandConnected(
                    server_version="recorder",
                    protocol_version=20,
                    max_message_size=MAX_MESSAGE_BYTES,
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
                    authoritative=True,
                )
            case pb.CommandProducer():
                return pb.CommandProducerSuccess(
                    request_id=body.request_id, producer_name="recorder-0-1"
                )
            case pb.CommandSend():
                message_id = pb.MessageIdData(ledgerId=1, entryId=len(self._sent))
                return pb.CommandSendReceipt(
                    producer_id=body.producer_id,
                    sequence_id=body.sequence_id,
                    message_id=message_id,
                )
            case pb.CommandCloseProducer():
                return pb.CommandSuccess(request_id=body.request_id)
            case pb.CommandPing():
                return pb.CommandPong()
        return None


def publish(url: str, settings: dict[str, Any], messages: list[Given]) -> None:
    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Warn))
    producer = client.create_producer("golden", **settings)
    results: list[Any] = []
    for message in messages:
        message.send(producer, lambda result, _: results.append(result))
    producer.flush()
    client.close()
    assert results == [_pulsar.Result.Ok] * len(messages), results


async def main() -> None:
    loop = asyncio.get_running_loop()
    sent: list[bytes] = []
    port = 0
    server = await loop.create_server(lambda: Recorder(port, sent), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = f"pulsar-client {importlib.metadata.version('pulsar-client')}"
    for name, (settings, messages) in scenarios().items():
        sent.clear()
        await asyncio.to_thread(publish, f"pulsar://127.0.0.1:{port}", settings, messages)
        record = {
            "client": client,
            "messages": [asdict(message) for message in messages],
            "frames": [frame.hex() for frame in sent],
        }
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        Path(__file__).with_name(f"{name}.json").write_text(text, encoding="utf-8")
        print(f"{name}: {len(sent)} frames")
    server.close()


if __name__ == "__main__":
    asyncio.run(main())

"""Hostile programs against single features: partitions, watchers, non-persistent topics,
deduplication, access modes, chunks, seeks, and the administration over HTTP."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fakes.entries import entry_of
from siege.programs import (
    CONNECT,
    GONE,
    Target,
    ids_of,
    number_of,
    read_beside,
    topic_of,
)

from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Iterable

    from fakes.wire import WireClient

DEDUPLICATED = "public/siege"
"""A namespace with deduplication."""

PATTERNS = [
    ".*",
    "persistent://public/default/hostile-.*",
    "persistent://public/default/h[0-9",
    "(a+)+$",
    "(.*)*(.*)*(.*)*x",
    "x" * 5_000,
    "",
    "\\",
    "persistent://public/default/(hostile|churn|part)-[0-9]{1,1000}",
]

BODIES = [b"", b"4", b"-1", b"1e9", b"null", b"{}", b"[]", b'{"a":', b'"' + b"x" * 70_000 + b'"']


@asynccontextmanager
async def connected(target: Target, transport: str) -> AsyncIterator[WireClient]:
    async with target.wire(transport) as client, read_beside(client):
        with suppress(*GONE):
            await client.wire.send(CONNECT)
            yield client


async def shoot(
    target: Target, program: str, client: WireClient, bodies: Iterable[Any], pause_s: float = 0.005
) -> None:
    """Send these commands at once."""
    frames = [framing.encode_command(body) for body in bodies]
    target.count(program, len(frames))
    await client.wire.send(b"".join(frames))
    await asyncio.sleep(pause_s)


def producer(topic: str, number: int, **fields: Any) -> pb.CommandProducer:
    return pb.CommandProducer(topic=topic, producer_id=number, request_id=number + 1, **fields)


def consumer(topic: str, number: int, **fields: Any) -> pb.CommandSubscribe:
    fields.setdefault("subType", pb.CommandSubscribe.Shared)
    fields.setdefault("subscription", "s")
    return pb.CommandSubscribe(topic=topic, consumer_id=number, request_id=number + 1, **fields)


def send_frame(entry: bytes, sequence_id: int, **fields: Any) -> bytes:
    body = pb.CommandSend(**({"producer_id": 0, "sequence_id": sequence_id} | fields))
    return b"".join(framing.encode_payload_command(body, [entry]))


def entry_with(payload: bytes = b"payload", **fields: Any) -> bytes:
    """An entry with random metadata."""
    known: dict[str, Any] = {"producer_name": "p", "sequence_id": 5, "publish_time": 1} | fields
    metadata = pb.MessageMetadata(**known).SerializeToString()
    return len(metadata).to_bytes(4, "big") + metadata + payload


async def partitions(target: Target, transport: str, rng: random.Random) -> None:
    """Topic names of partitions: existing ones, missing ones, too large numbers, reserved names."""
    async with connected(target, transport) as client:
        for _ in range(10):
            base = f"persistent://public/default/part-{rng.randrange(4)}"
            suffix = rng.choice(["", "-partition-", "-partition-0", "-partition-3", "-partition-1"])
            topic = base + suffix + rng.choice(["", "", "", "9" * 30, "-DLQ"])
            bodies: list[Any] = [
                pb.CommandPartitionedTopicMetadata(
                    topic=topic,
                    request_id=1,
                    metadata_auto_creation_enabled=rng.random() < 0.5,
                ),
                pb.CommandLookupTopic(topic=topic, request_id=2, authoritative=rng.random() < 0.5),
                producer(topic, 3),
                consumer(topic, 4),
                pb.CommandGetTopicsOfNamespace(
                    namespace=rng.choice(["public/default", "public", "a/b/c", "public/none"]),
                    request_id=6,
                    mode=rng.choice([0, 1, 2]),  # type: ignore[arg-type]
                    topics_pattern=rng.choice(PATTERNS),
                    topics_hash=rng.choice(["", "0", "x" * 1_000]),
                ),
            ]
            await shoot(target, "partitions", client, rng.sample(bodies, len(bodies)))


async def watchers(target: Target, transport: str, rng: random.Random) -> None:
    """More watchers than one connection may have, with patterns that take long."""
    async with connected(target, transport) as client:
        for number in range(rng.choice([5, 120])):
            bodies: list[Any] = [
                pb.CommandWatchTopicList(
                    request_id=number,
                    watcher_id=rng.choice([number, 1]),
                    namespace=rng.choice(["public/default", "public/default", "public/none"]),
                    topics_pattern=rng.choice(PATTERNS),
                    topics_hash=rng.choice(["", "abc"]),
                )
            ]
            if rng.random() < 0.3:
                bodies.append(
                    pb.CommandWatchTopicListClose(request_id=1, watcher_id=number_of(rng))
                )
            await shoot(target, "watchers", client, bodies, 0.001)
        await asyncio.sleep(rng.random())


async def non_persistent(target: Target, transport: str, rng: random.Random) -> None:
    """Publishes to a non-persistent topic with a consumer that reads nothing."""
    topic = f"non-persistent://public/default/np-{rng.randrange(3)}"
    async with connected(target, transport) as client, target.wire(transport) as silent:
        await silent.wire.send(CONNECT)
        few = [consumer(topic, 1, subType=rng.choice([0, 1, 2, 3]))]
        await shoot(
            target,
            "non-persistent",
            silent,
            [*few, pb.CommandFlow(consumer_id=1, messagePermits=number_of(rng) & 0xFFFFFFFF)],
        )
        await shoot(target, "non-persistent", client, [producer(topic, 0)], 0.1)
        entry = bytes(entry_of("x" * rng.choice([1, 1_000, 100_000])).data)
        for number in range(20):
            frames = [send_frame(entry, 10 * number + each) for each in range(10)]
            target.count("non-persistent", len(frames))
            await client.wire.send(b"".join(frames))
            bodies = [
                pb.CommandSeek(consumer_id=1, request_id=3, message_publish_time=1),
                pb.CommandAck(consumer_id=1, ack_type=0, message_id=ids_of(rng), request_id=4),  # type: ignore[arg-type]
                pb.CommandGetLastMessageId(consumer_id=1, request_id=5),
            ]
            await shoot(target, "non-persistent", client, rng.sample(bodies, 1))


async def deduplication(target: Target, transport: str, rng: random.Random) -> None:
    """Sequence ids that jump, repeat, and end before they begin; and ever new producer names."""
    topic = f"persistent://{DEDUPLICATED}/dedup-{rng.randrange(3)}"
    async with connected(target, transport) as client:
        name = rng.choice(["same", f"new-{rng.randrange(10**9)}"])
        named = producer(topic, 0, producer_name=name, user_provided_producer_name=True)
        await shoot(target, "deduplication", client, [named], 0.1)
        for _ in range(20):
            frames = []
            for _ in range(10):
                first = rng.choice([rng.randrange(50), number_of(rng)])
                fields: dict[str, Any] = {}
                if rng.random() < 0.2:
                    fields["highest_sequence_id"] = number_of(rng)
                entry = entry_with(producer_name=name, sequence_id=first, **fields)
                frames.append(send_frame(entry, first, **fields))
            target.count("deduplication", len(frames))
            await client.wire.send(b"".join(frames))
            await asyncio.sleep(0.005)


async def access_modes(target: Target, transport: str, rng: random.Random) -> None:
    """Producers that wait for exclusive access, take it from others, and disconnect."""
    topic = f"persistent://public/default/modes-{rng.randrange(3)}"
    async with connected(target, transport) as client:
        for _ in range(5):
            bodies: list[Any] = [
                producer(
                    topic,
                    number,
                    producer_access_mode=rng.choice([0, 1, 2, 2, 3]),
                    producer_name=rng.choice(["", "a", f"n{number}"]),
                    topic_epoch=rng.choice([0, 1, number_of(rng)]),
                    initial_subscription_name=rng.choice(["", "", "first", "x" * 2_000]),
                )
                for number in range(rng.randrange(1, 15))
            ]
            bodies += [
                pb.CommandCloseProducer(producer_id=number, request_id=100 + number)
                for number in range(rng.randrange(5))
            ]
            await shoot(target, "access modes", client, bodies, 0.05 * rng.random())


async def chunks(target: Target, transport: str, rng: random.Random) -> None:
    """Chunks of messages that never become complete, out of order, and with false sizes."""
    topic = f"persistent://public/default/chunks-{rng.randrange(3)}"
    async with connected(target, transport) as client:
        few: list[Any] = [
            producer(topic, 0),
            consumer(topic, 1),
            consumer(topic, 2, subType=pb.CommandSubscribe.Key_Shared, subscription="k"),
            *(pb.CommandFlow(consumer_id=each, messagePermits=1_000) for each in (1, 2)),
        ]
        await shoot(target, "chunks", client, few, 0.1)
        for number in range(20):
            frames = []
            for _ in range(10):
                count = rng.choice([1, 2, 3, 1_000, 2**31 - 1, -1])
                entry = entry_with(
                    b"x" * rng.choice([1, 1_000]),
                    uuid=f"u{rng.choice([1, 2, rng.randrange(10**9)])}",
                    num_chunks_from_msg=count,
                    chunk_id=rng.choice([0, 1, 2, count - 1 if count > 1 else 0, -1]),
                    total_chunk_msg_size=rng.choice([0, 1_000, 10_000, 2**31 - 1]),
                )
                frames.append(send_frame(entry, number, is_chunk=True))
            target.count("chunks", len(frames))
            await client.wire.send(b"".join(frames))
            await asyncio.sleep(0.005)


async def seeks(target: Target, transport: str, rng: random.Random) -> None:
    """Seeks without a pause, during deliveries and acks."""
    topic = topic_of(rng)
    async with connected(target, transport) as client:
        kind = rng.choice([0, 1, 2, 3])
        few: list[Any] = [
            consumer(
                topic, 1, subType=kind, subscription=f"seek-{kind}", durable=rng.random() < 0.7
            ),
            pb.CommandFlow(consumer_id=1, messagePermits=1_000),
        ]
        await shoot(target, "seeks", client, few, 0.1)
        for number in range(20):
            bodies: list[Any] = [
                pb.CommandSeek(
                    consumer_id=1, request_id=number, message_publish_time=number_of(rng)
                )
                if rng.random() < 0.5
                else pb.CommandSeek(
                    consumer_id=1,
                    request_id=number,
                    message_id=(ids_of(rng) or [pb.MessageIdData(ledgerId=1, entryId=0)])[0],
                ),
                pb.CommandAck(consumer_id=1, ack_type=rng.choice([0, 1]), message_id=ids_of(rng)),  # type: ignore[arg-type]
                pb.CommandFlow(consumer_id=1, messagePermits=10),
            ]
            await shoot(target, "seeks", client, bodies, 0.02 * rng.random())


async def administration(target: Target, _transport: str, rng: random.Random) -> None:
    """HTTP requests: junk, incomplete ones, and ones that create and delete topics of other
    programs."""
    url = urlsplit(target.urls["http"])
    for _ in range(10):
        with suppress(*GONE):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            try:
                target.count("administration")
                writer.write(_http_request(rng))
                await writer.drain()
                async with asyncio.timeout(2):
                    await reader.read(1 << 20)
            finally:
                writer.transport.abort()


def _http_request(rng: random.Random) -> bytes:
    topic = rng.choice(["hostile-1", "part-1", "part-2", "modes-1", "none", "%00", "x" * 2_000])
    path = f"persistent/public/default/{topic}"
    number = rng.choice(["0", "-1", "3", "99999999999999999999", "x", "1:2"])
    paths = [
        path,
        f"{path}/partitions",
        f"{path}/stats",
        f"{path}/internalStats",
        f"{path}/partitioned-stats",
        f"{path}/terminate",
        f"{path}/truncate",
        f"{path}/unload",
        f"{path}/subscription/s/skip/{number}",
        f"{path}/subscription/s/skip_all",
        f"{path}/subscription/s/expireMessages/{number}",
        f"{path}/subscription/s/resetcursor/{number}",
        f"{path}/subscription/s/position/{number}",
        "persistent/public/default",
        "non-persistent/public/default/np-1/stats",
        "namespaces/public/default/topics",
        "namespaces/public/default/backlogQuota",
        "namespaces/public/siege/deduplication",
        "brokers/health",
        "\x00\xff",
        "../" * 50,
    ]
    method = rng.choice(["GET", "GET", "GET", "PUT", "POST", "DELETE", "PATCH", "BREW"])
    if method == "POST" and rng.random() < 0.5:  # most of these wait for data that never arrives
        return b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"
    body = rng.choice(BODIES)
    length = rng.choice([len(body), len(body), len(body), 10**12, -1])
    head = (
        f"{method} /admin/v2/{rng.choice(paths)} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n"
        f"x: {'x' * rng.choice([1, 1, 70_000])}\r\n\r\n"
    )
    request = head.encode("latin-1") + body
    return request[: rng.randrange(1, len(request))] if rng.random() < 0.1 else request


def prepare_requests() -> list[tuple[str, str, Any]]:
    """The administrator's requests before the siege: method, path, body."""
    return [
        ("PUT", f"namespaces/{DEDUPLICATED}", None),
        ("POST", f"namespaces/{DEDUPLICATED}/deduplication", True),
        *(("PUT", f"persistent/public/default/part-{index}/partitions", 4) for index in range(2)),
    ]


async def prepare(target: Target) -> None:
    """Raises OSError, AssertionError."""
    url = urlsplit(target.urls["http"])
    for method, path, body in prepare_requests():
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} /admin/v2/{path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(head.encode() + content)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 2"), (method, path, answer)


FEATURES = [
    partitions,
    watchers,
    non_persistent,
    deduplication,
    access_modes,
    chunks,
    seeks,
    administration,
]

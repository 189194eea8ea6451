"""Hostile programs against the gRPC calls other than sessions, against greetings, and against texts
that the broker parses for clients: schemas and patterns."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from grpc import aio
from siege.features import connected, consumer, producer, shoot
from siege.programs import CONNECT, GONE, PING, Target, number_of, topic_of

from magnetar.broker.session.grpc import SERVICE
from magnetar.protos import broker_pb2, framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.runtime.grpc_frames import CHANNEL_OPTIONS, GREETING_KEY, encode_frame

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable

    Greeting = tuple[tuple[str, bytes], ...]

CALL_S = 1.0  # a call without an answer is cancelled

ENDED = (*GONE, aio.AioRpcError, asyncio.InvalidStateError, aio.UsageError)
"""The allowed errors of a call: the broker refuses it or has ended it."""

FIELDS = [b"\x0a\x00", b"\x22\x00", b"\x08\x01", b"\x0b", b"\x0a\x04\x0a\x02a/"]
"""The fields that a program repeats up to the limit of a request: topics without names, a number,
groups, short names."""


@asynccontextmanager
async def channel_to(target: Target) -> AsyncIterator[aio.Channel]:
    """A channel with a connection of its own."""
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    async with aio.insecure_channel(urlsplit(target.urls["grpc"]).netloc, options=options) as made:
        yield made


def _topics_of(rng: random.Random) -> list[str]:
    names = [topic_of(rng), f"{topic_of(rng)}-none", "", "a/b", "non-persistent://public/default/n"]
    return [rng.choice(names) for _ in range(rng.choice([0, 1, 5, 1_000, 1_001]))]


def request_of(rng: random.Random) -> tuple[str, bytes]:
    """A method, and a request with random content."""
    topics, signed = _topics_of(rng), number_of(rng) & (2**63 - 1)
    topic = topics[0] if topics else ""
    name = rng.choice(["", "s", "two words", "x" * 300, "\n"])
    place = broker_pb2.EntryPlace(ledger=signed, entry=rng.choice([0, -1, signed]))
    asks = [
        broker_pb2.TopicAsk(topic=it, from_ledger=signed, copies_of=[signed] * rng.choice([0, 2]))
        for it in topics
    ]
    digests = [
        broker_pb2.TopicDigest(topic=it, digest=rng.choice(["d", "", name])) for it in topics
    ]
    places = [broker_pb2.TopicPlace(topic=it, place=place) for it in topics]
    requests: list[tuple[str, Callable[[], Any]]] = [
        ("PlanRange", lambda: broker_pb2.PlanRangeRequest(topic=topic)),
        (
            "ReadRange",
            lambda: broker_pb2.ReadRangeRequest(
                topic=topic, ledger=rng.choice([1, 2, signed]), first_entry=-1, last_entry=signed
            ),
        ),
        (
            "FindTopics",
            lambda: broker_pb2.FindTopicsRequest(
                topics=topics, namespaces=["public/default", name][: rng.randrange(3)]
            ),
        ),
        (
            "WatchTopics",
            lambda: broker_pb2.FindTopicsRequest(
                topics=topics[: rng.choice([0, 9])], namespaces=["public/default"]
            ),
        ),
        ("PlanTopics", lambda: broker_pb2.PlanTopicsRequest(topics=asks)),
        ("WatchPositions", lambda: broker_pb2.WatchPositionsRequest(topics=asks)),
        ("FindEntry", lambda: broker_pb2.FindEntryRequest(topic=topic, index=signed)),
        ("FindEntry", lambda: broker_pb2.FindEntryRequest(topic=topic, place=place)),
        (
            "HoldTopics",
            lambda: broker_pb2.HoldTopicsRequest(
                subscription=name, query_start_ms=signed, query=name, topics=places
            ),
        ),
        ("TopicPolicies", lambda: broker_pb2.TopicPoliciesRequest(topic=topic, sink=name)),
        (
            "NoteBatches",
            lambda: broker_pb2.NoteBatchesRequest(
                sink=name, query=rng.choice(["q", name]), batch=signed, topics=digests
            ),
        ),
    ]
    method, make = rng.choice(requests)
    data = make().SerializeToString()
    match rng.randrange(4):
        case 0:  # a damaged request
            damaged = bytearray(data or b"\x00")
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            data = bytes(damaged)
        case 1:
            field = rng.choice(FIELDS)
            data = field * (rng.choice([5_000, 2 << 20]) // len(field))
    return method, data


def greeting_of(rng: random.Random) -> Greeting:
    greetings: list[Greeting] = [
        (),
        ((GREETING_KEY, CONNECT),),
        ((GREETING_KEY, b""),),
        ((GREETING_KEY, PING),),
        ((GREETING_KEY, CONNECT[: rng.randrange(len(CONNECT))]),),
        ((GREETING_KEY, CONNECT * 500),),
        ((GREETING_KEY, rng.randbytes(rng.choice([3, 60_000, 90_000]))),),
        ((GREETING_KEY, CONNECT), (GREETING_KEY, b"\xff")),
    ]
    return rng.choice([(), *greetings])


def _ask(channel: aio.Channel, method: str, data: bytes, greeting: Greeting = ()) -> Any:
    """A call with this request."""
    ask: Any = channel.unary_stream(f"/{SERVICE}/{method}")
    return ask(data, metadata=greeting)


async def calls(target: Target, _transport: str, rng: random.Random) -> None:
    """Requests with false values, and with fields and bytes up to the limits."""
    async with channel_to(target) as channel:
        for _ in range(10):
            method, data = request_of(rng)
            target.count("calls")
            call = _ask(channel, method, data, greeting_of(rng))
            with suppress(*ENDED):
                async with asyncio.timeout(rng.random() * CALL_S):
                    async for _ in call:
                        pass
            call.cancel()


async def deaf_calls(target: Target, _transport: str, rng: random.Random) -> None:
    """Many concurrent calls that never read their answers, and end at any time."""
    async with channel_to(target) as channel:
        begun = []
        for _ in range(rng.choice([5, 150])):
            method, data = request_of(rng)
            target.count("deaf calls")
            begun.append(_ask(channel, method, data[: 1 << 16]))
        await asyncio.sleep(rng.random())
        for call in begun:
            call.cancel()


async def half_calls(target: Target, _transport: str, rng: random.Random) -> None:
    """Calls and sessions that begin and never send, or send more than one request."""
    async with channel_to(target) as channel:
        begun: list[Any] = []
        for _ in range(rng.choice([5, 120])):
            method = rng.choice(
                ["Session", "PlanRange", "ReadRange", "WatchPositions", "WatchTopics", "None"]
            )
            call: Any = channel.stream_stream(f"/{SERVICE}/{method}")(metadata=greeting_of(rng))
            target.count("half calls")
            begun.append(call)
            if rng.random() < 0.2:
                data = rng.choice([b"", b"\x0a", bytes(1 << 20), encode_frame([PING] * 1_000)])
                with suppress(*ENDED):
                    async with asyncio.timeout(0.1):
                        await call.write(data)
                        await call.write(data)
        await asyncio.sleep(rng.random())
        for call in begun:
            call.cancel()


def _schemas(rng: random.Random) -> list[tuple[int, bytes]]:
    """Types and definitions that take long to parse, or have the maximal size."""
    large = 130_000
    names = [{"name": f"f{each}", "type": "n"} for each in range(3_700)]
    unions = [
        "null",
        *({"type": "record", "name": f"r{each}", "fields": []} for each in range(2_000)),
    ]
    empty = base64.b64encode(b"\x0a\x00" * 48_000).decode()
    nested = b'{"type":"array","items":' * rng.choice([50, 70, 300, 5_000])
    texts: list[tuple[int, Any]] = [
        (4, {"type": "record", "name": "n", "namespace": "x" * 500, "fields": names}),
        (4, {"type": "record", "name": "n", "fields": [{"name": "f", "type": unions}]}),
        (4, {"type": "enum", "name": "e", "symbols": [f"s{each}" for each in range(10_000)]}),
        (20, {"fileDescriptorSet": empty, "rootMessageTypeName": "a"}),
    ]
    return [
        *((kind, json.dumps(tree, separators=(",", ":")).encode()) for kind, tree in texts),
        (2, b"[" * large),
        (4, nested + b'"int"' + b"}" * (len(nested) // 24)),
        (4, b'{"type":"fixed","name":"a","size":1,"x":[' + b",".join([b"1e308"] * 20_000) + b"]}"),
        (15, rng.randbytes(100)),
        (15, (2**31 - 1).to_bytes(4) + b"x"),
        (rng.choice([-3, 21, 23, 10**6]), b""),
        (4, b"x" * (200 << 10)),
    ]


async def schema_bombs(target: Target, transport: str, rng: random.Random) -> None:
    """Definitions that are large, nested, repeated or invalid."""
    async with connected(target, transport) as client:
        for _ in range(5):
            topic = f"persistent://public/default/schema-{rng.randrange(4)}"
            kind, data = rng.choice(_schemas(rng))
            if kind == 4 and rng.random() < 0.5:
                # Another version, which the broker compares with the first one.
                data = data.replace(b"f1", b"g1", 1)
            properties = [
                pb.KeyValue(key=f"p{each}", value="x") for each in range(rng.choice([0, 3, 400]))
            ]
            number = rng.randrange(5)
            # The constructor of protobuf would refuse an unknown number of the enum.
            schema = pb.Schema(name="n" * rng.choice([1, 2_000]), schema_data=data, type=0)  # type: ignore[arg-type]
            schema.properties.extend(properties)
            with suppress(ValueError):
                schema.type = kind  # type: ignore[assignment]
            bodies: list[Any] = [
                producer(topic, number, schema=schema),
                consumer(topic, number, schema=schema),
                pb.CommandGetOrCreateSchema(request_id=7, topic=topic, schema=schema),
                pb.CommandGetSchema(
                    request_id=8, topic=topic, schema_version=rng.randbytes(rng.choice([0, 8, 9]))
                ),
            ]
            await shoot(target, "schema bombs", client, rng.sample(bodies, 2), 0.05)
        await asyncio.sleep(rng.random())


PATTERNS = [
    "((((a?){30}){30}){30})",
    "(a|aa)+" * 100 + "b",
    "(" * 500 + "a" + ")" * 500,
    ".{250}",
    ".{0,480}x",
    "[" + "a-z" * 300 + "]*" + ".*" * 100,
    "|".join(f"hostile-{each}.*" for each in range(80)),
    "(.*.*.*.*.*.*.*.*)x{9999}",
    "\\Q" + "(" * 1_000,
    "[^" + "\\d" * 400 + "]+",
    ".*" * 480,
]


async def pattern_bombs(target: Target, transport: str, rng: random.Random) -> None:
    """Patterns that a backtracking matcher would never finish, in lists and watches."""
    async with connected(target, transport) as client:
        for number in range(10):
            pattern = rng.choice(PATTERNS)
            bodies: list[Any] = [
                pb.CommandGetTopicsOfNamespace(
                    namespace="public/default", request_id=number, topics_pattern=pattern
                ),
                pb.CommandWatchTopicList(
                    request_id=number,
                    watcher_id=number,
                    namespace="public/default",
                    topics_pattern=pattern,
                ),
            ]
            await shoot(target, "pattern bombs", client, bodies, 0.01)
        await asyncio.sleep(rng.random())


async def greedy_greetings(target: Target, _transport: str, rng: random.Random) -> None:
    """Greetings of the largest size, of calls that are cancelled at once; and a session that sends
    CONNECT twice."""
    async with channel_to(target) as channel:
        large = framing.encode_command(
            pb.CommandConnect(client_version="v" * 60_000, auth_data=rng.randbytes(1_000))
        )
        for _ in range(20):
            target.count("greedy greetings")
            metadata = ((GREETING_KEY, rng.choice([large, large[:-1], CONNECT + CONNECT])),)
            method = rng.choice(["Session", "PlanRange", "WatchPositions"])
            call: Any = channel.stream_stream(f"/{SERVICE}/{method}")(metadata=metadata)
            with suppress(*ENDED):
                async with asyncio.timeout(0.05):
                    await call.read()
            call.cancel()


CALLS = [
    calls,
    deaf_calls,
    half_calls,
    schema_bombs,
    pattern_bombs,
    greedy_greetings,
]

"""The hostile programs. Each makes one connection or several, and counts the commands that it sent.

A frame that is cut, a name of 300 KB and a frame of 10,000 PINGs count as one command each.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fakes.entries import entry_of
from fakes.wire import StreamWire, WireClient, _Tcp
from grpc import aio

from magnetar.broker.session.grpc import SERVICE
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.grpc_frames import CHANNEL_OPTIONS, open_frame_stream

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable

U64 = 2**64 - 1
GONE = (OSError, EOFError, StreamClosed, TimeoutError, AssertionError)
"""The allowed error of a hostile program: the broker has closed its connection."""

CONNECT = framing.encode_command(pb.CommandConnect(client_version="hostile", protocol_version=20))
PING = framing.encode_command(pb.CommandPing())


@dataclass
class Target:
    """The server, and what was sent to it."""

    urls: dict[str, str]
    sent: dict[str, int] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)  # programs that were ended

    @asynccontextmanager
    async def wire(self, transport: str, *, greets: bool = True) -> AsyncIterator[WireClient]:
        """`greets`: over gRPC, the first frame is in the call's metadata."""
        url = urlsplit(self.urls[transport])
        if transport == "pulsar":
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            wire: Any = _Tcp(reader, writer)
        else:
            # Channels of one process share a connection by default. A program that reads nothing
            # would then stop the others, so this channel gets a connection of its own.
            options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
            channel = aio.insecure_channel(url.netloc, options=options)
            stream = open_frame_stream(
                channel, f"/{SERVICE}/Session", peer="the broker", greets=greets
            )
            wire = StreamWire(stream, channel.close)
        try:
            yield WireClient(wire)
        finally:
            with suppress(*GONE):
                await wire.break_off()

    def count(self, program: str, number: int = 1) -> None:
        self.sent[program] = self.sent.get(program, 0) + number

    @property
    def commands(self) -> int:
        return sum(self.sent.values())


Program = "Callable[[Target, str, random.Random], Awaitable[None]]"


async def sink(client: WireClient) -> None:
    """Read and drop everything, until the connection ends."""
    with suppress(*GONE):
        while await client.wire.receive():
            pass


@asynccontextmanager
async def read_beside(client: WireClient) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(sink(client))
        try:
            yield
        finally:
            reading.cancel()


def number_of(rng: random.Random) -> int:
    return rng.choice([0, 1, 2, 3, 5, 77, 2**31 - 1, 2**32, 2**63 - 1, 2**63, U64])


def topic_of(rng: random.Random) -> str:
    return f"persistent://public/default/hostile-{rng.randrange(8)}"


def ids_of(rng: random.Random) -> list[pb.MessageIdData]:
    return [
        pb.MessageIdData(
            ledgerId=rng.choice([0, 1, 2, 3, 4, U64, number_of(rng)]),
            entryId=rng.choice([0, 1, 2, 3, U64, number_of(rng)]),
            ack_set=[rng.randrange(-(2**63), 2**63) for _ in range(rng.choice([0, 0, 1, 3]))],
        )
        for _ in range(rng.choice([0, 1, 1, 2, 10]))
    ]


def command_of(rng: random.Random) -> bytes:
    """A command with random content."""
    small = rng.randrange(4)
    request = rng.randrange(1, 1000)
    topic = topic_of(rng)
    bodies: list[Callable[[], Any]] = [
        lambda: pb.CommandProducer(
            topic=topic,
            producer_id=small,
            request_id=request,
            producer_name=rng.choice(["", "a", "b"]),
            epoch=number_of(rng) & (2**63 - 1),
            user_provided_producer_name=rng.random() < 0.5,
        ),
        lambda: pb.CommandSubscribe(
            topic=topic,
            subscription=rng.choice(["s", "t", ""]),
            subType=rng.choice([0, 1, 2, 3]),  # type: ignore[arg-type]
            consumer_id=small,
            request_id=request,
            durable=rng.random() < 0.8,
            initialPosition=rng.choice([0, 1]),  # type: ignore[arg-type]
        ),
        lambda: pb.CommandFlow(consumer_id=small, messagePermits=number_of(rng) & 0xFFFFFFFF),
        lambda: pb.CommandAck(
            consumer_id=small,
            ack_type=rng.choice([0, 1]),  # type: ignore[arg-type]
            message_id=ids_of(rng),
            request_id=request,
        ),
        lambda: pb.CommandRedeliverUnacknowledgedMessages(
            consumer_id=small, message_ids=ids_of(rng)
        ),
        lambda: pb.CommandSeek(
            consumer_id=small,
            request_id=request,
            message_publish_time=number_of(rng),
        ),
        lambda: pb.CommandUnsubscribe(consumer_id=small, request_id=request),
        lambda: pb.CommandCloseProducer(producer_id=small, request_id=request),
        lambda: pb.CommandCloseConsumer(consumer_id=small, request_id=request),
        lambda: pb.CommandLookupTopic(topic=topic, request_id=request),
        lambda: pb.CommandPartitionedTopicMetadata(topic=topic, request_id=request),
        lambda: pb.CommandGetTopicsOfNamespace(namespace="public/default", request_id=request),
        lambda: pb.CommandGetLastMessageId(consumer_id=small, request_id=request),
        lambda: pb.CommandConsumerStats(consumer_id=small, request_id=request),
        lambda: pb.CommandGetSchema(topic=topic, request_id=request),
        lambda: pb.CommandNewTxn(request_id=request),
        pb.CommandPing,
        pb.CommandPong,
    ]
    return framing.encode_command(rng.choice(bodies)())


def send_of(rng: random.Random, sequence_id: int) -> bytes:
    """A SEND: sound, or with a damaged entry."""
    entry = bytearray(entry_of("x" * rng.choice([0, 10, 1_000])).data)
    if rng.random() < 0.3:
        entry[rng.randrange(len(entry))] ^= 1 << rng.randrange(8)
    body = pb.CommandSend(producer_id=rng.randrange(2), sequence_id=sequence_id)
    if rng.random() < 0.1:
        body.num_messages = rng.choice([2, 1_000_000, 2**31 - 1])
    return b"".join(framing.encode_payload_command(body, [bytes(entry)]))


# ---- the programs --------------------------------------------------------------------------------


async def random_commands(target: Target, transport: str, rng: random.Random) -> None:
    async with target.wire(transport) as client, read_beside(client):
        with suppress(*GONE):
            await client.wire.send(CONNECT)
            for _ in range(20):
                batch = [command_of(rng) for _ in range(rng.randrange(1, 40))]
                await client.wire.send(b"".join(batch))
                target.count("random commands", len(batch))
                await asyncio.sleep(0.005)


async def liars(target: Target, transport: str, rng: random.Random) -> None:
    """A producer with false sizes and entries."""
    async with target.wire(transport) as client, read_beside(client):
        with suppress(*GONE):
            producers = [
                pb.CommandProducer(topic=topic_of(rng), producer_id=each, request_id=each)
                for each in range(2)
            ]
            await client.wire.send(CONNECT)
            await client.wire.send(b"".join(map(framing.encode_command, producers)))
            await asyncio.sleep(0.1)
            for number in range(20):
                batch = [send_of(rng, 10 * number + each) for each in range(10)]
                await client.wire.send(b"".join(batch))
                target.count("liars", len(batch))
                await asyncio.sleep(0.005)
            total = rng.choice([0, 3, 2**31, 2**32 - 1])
            await client.wire.send(struct.pack(">II", total, number_of(rng) & 0xFFFFFFFF))
            target.count("liars")


async def slow_readers(target: Target, transport: str, rng: random.Random) -> None:
    """Requests much and reads nothing."""
    async with target.wire(transport) as client:
        with suppress(*GONE):
            await client.wire.send(CONNECT)
            async with asyncio.timeout(2):
                for number in range(30):
                    asks = [
                        framing.encode_command(
                            pb.CommandGetTopicsOfNamespace(
                                namespace="public/default", request_id=each
                            )
                        )
                        for each in range(10)
                    ]
                    await client.wire.send(b"".join(asks) + PING * rng.randrange(2_000))
                    target.count("slow readers", len(asks) + 1)
                    await asyncio.sleep(0.01 * number / 30)


async def slow_writers(target: Target, transport: str, rng: random.Random) -> None:
    """Sends a byte at a time; over gRPC, which has frames, a command at a time."""
    async with target.wire(transport) as client, read_beside(client):
        with suppress(*GONE):
            for data in [CONNECT, *(command_of(rng) for _ in range(10))]:
                pieces = [data[at : at + 1] for at in range(len(data))]
                for piece in [data] if transport == "grpc" else pieces:
                    await client.wire.send(piece)
                    await asyncio.sleep(0.001)
                target.count("slow writers")


async def half_open(target: Target, transport: str, rng: random.Random) -> None:
    """Connections that send nothing, or half of a command."""
    async with target.wire(transport, greets=False) as client:
        with suppress(*GONE):
            if rng.random() < 0.5 and transport == "pulsar":
                await client.wire.send(CONNECT[: rng.randrange(1, len(CONNECT))])
            target.count("half-open")
            await asyncio.sleep(rng.random())


async def strangers(target: Target, transport: str, rng: random.Random) -> None:
    """Sends megabytes before the CONNECT."""
    async with target.wire(transport, greets=False) as client:
        with suppress(*GONE):
            for _ in range(4):
                body = pb.CommandLookupTopic(
                    topic="x" * rng.choice([100_000, 5_000_000]), request_id=1
                )
                target.count("strangers")
                await client.wire.send(framing.encode_command(body))


async def huge_names(target: Target, transport: str, rng: random.Random) -> None:
    async with target.wire(transport) as client, read_beside(client):
        with suppress(*GONE):
            await client.wire.send(CONNECT)
            for _ in range(10):
                name = rng.choice(["x", "ü", "%"]) * rng.choice([300, 1_025, 70_000, 200_000])
                bodies: list[Any] = [
                    pb.CommandLookupTopic(topic=name, request_id=1),
                    pb.CommandProducer(
                        topic=topic_of(rng), producer_id=9, request_id=2, producer_name=name
                    ),
                    pb.CommandSubscribe(
                        topic=topic_of(rng),
                        subscription=name,
                        subType=pb.CommandSubscribe.Shared,
                        consumer_id=9,
                        request_id=3,
                    ),
                ]
                await client.wire.send(framing.encode_command(rng.choice(bodies)))
                target.count("huge names")
                await asyncio.sleep(0.005)


async def churn(target: Target, transport: str, rng: random.Random) -> None:
    """Connects, opens a producer and a consumer, and disconnects in between."""
    for _ in range(5):
        async with target.wire(transport) as client:
            with suppress(*GONE):
                topic = topic_of(rng)
                bodies: list[Any] = [
                    pb.CommandProducer(topic=topic, producer_id=1, request_id=1),
                    pb.CommandSubscribe(
                        topic=topic,
                        subscription="churn",
                        subType=pb.CommandSubscribe.Shared,
                        consumer_id=1,
                        request_id=2,
                    ),
                    pb.CommandFlow(consumer_id=1, messagePermits=1_000),
                    pb.CommandCloseProducer(producer_id=1, request_id=3),
                    pb.CommandUnsubscribe(consumer_id=1, request_id=4),
                ]
                few = bodies[: rng.randrange(1, len(bodies) + 1)]
                await client.wire.send(CONNECT)
                await client.wire.send(b"".join(map(framing.encode_command, few)))
                target.count("churn", 1 + len(few))
                await asyncio.sleep(rng.random() * 0.05)


async def cut_frames(target: Target, transport: str, rng: random.Random) -> None:
    """Sound frames that are cut or damaged at random places."""
    async with target.wire(transport) as client, read_beside(client):
        with suppress(*GONE):
            await client.wire.send(CONNECT)
            data = bytearray(b"".join(command_of(rng) for _ in range(20)))
            if rng.random() < 0.5:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            await client.wire.send(bytes(data[: rng.randrange(1, len(data))]))
            target.count("cut frames", 20)
            await asyncio.sleep(0.01)


async def long_lists(target: Target, transport: str, rng: random.Random) -> None:
    """Frames that cost the broker much: PINGs, and lists of very many ids."""
    async with target.wire(transport) as client, read_beside(client):
        with suppress(*GONE):
            await client.wire.send(CONNECT)
            topic = topic_of(rng)
            subscribe = pb.CommandSubscribe(
                topic=topic,
                subscription=f"long-{rng.randrange(3)}",
                subType=pb.CommandSubscribe.Shared,
                consumer_id=1,
                request_id=1,
            )
            await client.send(subscribe)
            await asyncio.sleep(0.1)
            ids = [
                pb.MessageIdData(ledgerId=rng.randrange(5), entryId=entry)
                for entry in range(rng.choice([3_000, 50_000]))
            ]
            await client.send(pb.CommandAck(consumer_id=1, ack_type=0, message_id=ids))  # type: ignore[arg-type]
            await client.send(
                pb.CommandRedeliverUnacknowledgedMessages(consumer_id=1, message_ids=ids)
            )
            await client.wire.send(PING * 10_000)
            target.count("long lists", 4)
            await asyncio.sleep(0.3)


PROGRAMS = [
    random_commands,
    random_commands,
    liars,
    slow_readers,
    slow_writers,
    half_open,
    strangers,
    huge_names,
    churn,
    cut_frames,
    long_lists,
]

"""A client that sends any bytes over either transport, and reads commands."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from fakes.entries import entry_of, texts_of

from magnetar.broker.session.grpc import SERVICE
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.grpc_frames import open_channel, open_frame_stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from fakes.broker import RunningBroker
    from google.protobuf.message import Message

    from magnetar.runtime.frames import FrameStream

T = TypeVar("T")

TRANSPORTS = ("pulsar", "grpc")
WAIT_S = 30.0


class Wire(Protocol):
    """One connection's bytes."""

    async def send(self, data: bytes) -> None: ...

    async def receive(self) -> bytes:
        """The bytes that have arrived, at least one; b"" at the end."""

    async def break_off(self) -> None:
        """Break the connection without a close."""


class _Tcp:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> bytes:
        try:
            return await self._reader.read(1 << 20)
        except ConnectionError:
            return b""

    async def break_off(self) -> None:
        self._writer.transport.abort()


class StreamWire:
    """Over a frame stream: gRPC's, or one in memory."""

    def __init__(
        self, stream: FrameStream, break_off: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self._stream = stream
        self._turn = asyncio.Lock()  # one task at a time sends on a stream
        self.break_off = break_off

    async def send(self, data: bytes) -> None:
        async with self._turn:
            await self._stream.send([data])

    async def receive(self) -> bytes:
        try:
            return bytes(await self._stream.receive())
        except StreamClosed:
            return b""


class WireClient:
    """Sends commands and returns the answers in order. It answers PINGs whenever it reads."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.wait_s = WAIT_S  # the limit of one command
        self._numbers = itertools.count(1)
        self._decoder = framing.FrameDecoder()
        self._came: list[framing.Command] = []

    async def send(self, body: Message) -> None:
        await self.wire.send(framing.encode_command(body))

    async def receive(self) -> framing.Command:
        """The next command. Raises EOFError at the end of the connection."""
        async with asyncio.timeout(self.wait_s):
            while True:
                while self._came:
                    command = self._came.pop(0)
                    if command.type != pb.BaseCommand.PING:
                        return command
                    await self.send(pb.CommandPong())
                await self._read()

    async def _read(self) -> None:
        data = await self.wire.receive()
        if not data:
            raise EOFError("the broker closed the connection")
        self._came += [framing.parse_command(frame) for frame in self._decoder.feed(data)]

    async def ended(self) -> list[framing.Command]:
        """Wait until the broker closes the connection. Returns the commands before the close."""
        before = []
        while True:
            try:
                before.append(await self.receive())
            except EOFError:
                return before

    async def expect(self, kind: type[T]) -> T:
        """The next command's body, which must be of this class."""
        body: Any = (await self.receive()).body
        assert isinstance(body, kind), body
        return body

    async def connect(self, version: int = 20) -> pb.CommandConnected:
        await self.send(pb.CommandConnect(client_version="wire", protocol_version=version))
        return await self.expect(pb.CommandConnected)

    async def ask(self, body: Any) -> Any:
        """Send a request with a new request id. Returns the body of the answer."""
        body.request_id = next(self._numbers)
        await self.send(body)
        answer: Any = (await self.receive()).body
        assert answer.request_id == body.request_id, answer
        return answer

    async def produce(self, topic: str, producer_id: int = 1, **fields: Any) -> Any:
        return await self.ask(
            pb.CommandProducer(topic=topic, producer_id=producer_id, request_id=0, **fields)
        )

    async def subscribe(
        self, topic: str, name: str = "s", consumer_id: int = 1, **fields: Any
    ) -> Any:
        fields = {
            "subType": pb.CommandSubscribe.Exclusive,
            "initialPosition": pb.CommandSubscribe.Earliest,
        } | fields
        answer = await self.ask(
            pb.CommandSubscribe(
                topic=topic, subscription=name, consumer_id=consumer_id, request_id=0, **fields
            )
        )
        if isinstance(answer, pb.CommandSuccess) and fields["subType"] == 0:
            await self.expect(pb.CommandActiveConsumerChange)
        return answer

    async def publish(
        self,
        text: str = "text",
        *,
        sequence_id: int = 0,
        producer_id: int = 1,
        entry: bytes | None = None,
    ) -> None:
        body = pb.CommandSend(producer_id=producer_id, sequence_id=sequence_id)
        data = bytes(entry_of(text).data) if entry is None else entry
        await self.wire.send(b"".join(framing.encode_payload_command(body, [data])))

    async def flow(self, permits: int, consumer_id: int = 1) -> None:
        await self.send(pb.CommandFlow(consumer_id=consumer_id, messagePermits=permits))

    async def message(self) -> tuple[pb.CommandMessage, list[str]]:
        """The next command, which must be a MESSAGE, and its texts."""
        command = await self.receive()
        assert isinstance(command.body, pb.CommandMessage), command.body
        assert command.entry is not None
        return command.body, texts_of(command.entry)


@asynccontextmanager
async def pulsar_wire(address: str) -> AsyncIterator[WireClient]:
    """A connection to host:port over Pulsar's TCP protocol. The end of the context breaks it."""
    host, _, port = address.rpartition(":")
    client = WireClient(_Tcp(*await asyncio.open_connection(host, int(port))))
    try:
        await client.connect()
        yield client
    finally:
        await client.wire.break_off()


@asynccontextmanager
async def wire_to(
    broker: RunningBroker, transport: str, *, connected: bool = True
) -> AsyncIterator[WireClient]:
    """A connection. The end of the context breaks it."""
    url = urlsplit(broker.pulsar_url if transport == "pulsar" else broker.grpc_url)
    wire: Wire
    if transport == "pulsar":
        wire = _Tcp(*await asyncio.open_connection(url.hostname, url.port))
    else:
        channel = open_channel(url.netloc)
        stream = open_frame_stream(channel, f"/{SERVICE}/Session", peer="the broker", greets=True)
        wire = StreamWire(stream, channel.close)
    client = WireClient(wire)
    try:
        if connected:
            await client.connect()
        yield client
    finally:
        await wire.break_off()

"""Streams over gRPC: each has a TCP connection of its own, which ends with it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from support import wait_until

from magnetar.client.options import ClientOptions
from magnetar.client.session.dialer import GrpcDialer
from magnetar.client.session.pool import Purpose
from magnetar.client.session.transport import dialer_of
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.grpc_frames import frame_stream_handler, grpc_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from magnetar.client.session.pool import Dialer
    from magnetar.runtime.frames import FrameStream

pytestmark = pytest.mark.real_loop


class Broker:
    """Accepts sessions, and notes their frames and goodbyes."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.goodbyes = 0

    async def accept(self, stream: FrameStream) -> None:
        try:
            while True:
                self.frames.append(bytes(await stream.receive()))
        except StreamClosed as error:
            self.goodbyes += error.clean


class Relay:
    """Passes bytes on to the broker, and counts the open connections of the client."""

    def __init__(self) -> None:
        self.connections = 0

    async def carry(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.connections += 1
        inward, outward = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(pipe(reader, outward))
                group.create_task(pipe(inward, writer))
        finally:
            self.connections -= 1


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


@asynccontextmanager
async def dialer_to(broker: Broker) -> AsyncIterator[tuple[Dialer, int, Relay]]:
    """A dialer, the broker's port on all local addresses, and a relay that counts connections."""
    handlers = {"magnetar.broker.Broker": {"Session": frame_stream_handler(broker.accept)}}
    relay = Relay()
    async with grpc_server(handlers, host="127.0.0.1", port=0, grace_s=0.1) as port:
        server = await asyncio.start_server(partial(relay.carry, port), "0.0.0.0", 0)
        front = server.sockets[0].getsockname()[1]
        dialer = dialer_of(ClientOptions(f"grpc://127.0.0.1:{front}"))
        yield dialer, front, relay
        await dialer.close()
        await wait_until(lambda: not relay.connections)
        server.close()


async def test_each_stream_has_its_own_connection() -> None:
    broker = Broker()
    async with dialer_to(broker) as (dialer, port, relay):
        streams = [dialer.open(f"grpc://127.0.0.1:{port}", purpose) for purpose in Purpose]
        for stream in streams:
            await stream.send([b"x"])
        await wait_until(lambda: len(broker.frames) == 2)
        assert relay.connections == 2
        for stream in streams:
            await stream.close()


async def test_connection_ends_with_its_stream() -> None:
    """A client outlives brokers and their addresses, so it must not keep their connections."""
    broker = Broker()
    async with dialer_to(broker) as (dialer, port, relay):
        for number in range(1, 6):
            stream = dialer.open(f"grpc://127.0.0.{number}:{port}", Purpose.PUBLISH)
            await stream.send([b"x"])
            await wait_until(lambda number=number: len(broker.frames) == number)  # type: ignore[misc]
            await stream.close()
        await wait_until(lambda: not relay.connections)
        assert broker.goodbyes == 5


async def test_second_close_does_not_break_the_goodbye_of_the_first() -> None:
    """The session's reader closes its stream, too, when the program closes the client."""
    broker = Broker()
    async with dialer_to(broker) as (dialer, port, _):
        stream = dialer.open(f"grpc://127.0.0.1:{port}", Purpose.PUBLISH)
        await stream.send([b"first"])
        await stream.send([b"last"])
        async with asyncio.TaskGroup() as group:
            for _call in range(2):
                group.create_task(stream.close())
        await wait_until(lambda: broker.goodbyes == 1)
        assert broker.frames == [b"first", b"last"]


class SlowChannel:
    """A channel that closes when the event is set."""

    def __init__(self, may_close: asyncio.Event) -> None:
        self._may_close = may_close
        self.closed = False

    async def close(self) -> None:
        await self._may_close.wait()
        self.closed = True


async def test_close_after_a_cancelled_close_closes_all_channels() -> None:
    dialer = GrpcDialer()
    may_close = asyncio.Event()
    channels: list[Any] = [SlowChannel(may_close) for _ in range(2)]
    dialer._channels.update(channels)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await dialer.close()
    may_close.set()
    await dialer.close()
    assert [channel.closed for channel in channels] == [True, True]
